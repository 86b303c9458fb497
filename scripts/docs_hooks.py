"""mkdocs hooks: the executed notebook as a page of the site. Named in mkdocs.yml."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

__all__ = ["on_files", "on_page_markdown"]

_STYLE = re.compile(r"<style\b.*?</style>\s*", re.DOTALL)
_TABLE = re.compile(r'<table [^>]*class="dataframe"[^>]*>')


def on_files(files: Any, config: Any) -> Any:
    """Add notebook.md, made from notebook.ipynb: its text, its code, and what that gave."""
    from mkdocs.structure.files import File

    notebook = json.loads((Path(config["docs_dir"]) / "notebook.ipynb").read_text(encoding="utf-8"))
    files.append(File.generated(config, "notebook.md", content=markdown_of(notebook)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to the notebook lead to its page."""
    return markdown.replace("(notebook.ipynb)", "(notebook.md)")


def markdown_of(notebook: dict[str, Any]) -> str:
    """Cells in order. Of each output the richest form that a page takes: a picture, a table, text."""
    blocks = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            blocks.append(source)
            continue
        blocks.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                blocks.append(f'<img alt="{_alt(data)}" src="data:image/png;base64,{data["image/png"].strip()}">')
            elif "text/html" in data:
                # Pandas' style goes, its <div> stays: without it the </div> at the end would close the page's article.
                # The theme styles tables without a class, and lets them scroll on a phone.
                blocks.append(_TABLE.sub("<table>", _STYLE.sub("", "".join(data["text/html"])).strip()))
            else:
                blocks.append(f"```text\n{''.join(data.get('text/plain', output.get('text', ''))).strip()}\n```")
    return "\n\n".join(blocks) + "\n"


def _alt(data: dict[str, Any]) -> str:
    return "".join(data.get("text/plain", "figure")).strip("<>").replace('"', "'")
