"""The text that the embedded model learns from: what the running Python itself ships.

Documentation topics (`pydoc_data.topics`), docstrings of the standard library (from its sources by `ast`, and from
the modules written in C by `__doc__`) and its longer comments; no tests, no installed packages, nothing fetched.
The same Python gives the same documents in the same order. `train_embedded_model.py` uses it as its first stage.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib
import inspect
import io
import json
import re
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["build_corpus"]

# Not documentation of the library: tests, their data, and packages that others installed.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}


def share_of_letters(text: str) -> float:
    """The share of letters and white space in a text."""
    return sum(c.isalpha() or c.isspace() for c in text) / max(1, len(text))


def cleaned(text: str) -> str:
    """Drop what does not read as prose: grammar, doctests, tables, code; and lines that name a person's address."""
    text = "\n".join(line for line in text.split("\n") if not re.search(r"\S+@\w+[.\w]*\w|[Cc]opyright|\(c\)", line))
    paragraphs = [p for p in re.split(r"\n\s*\n", text) if p.strip()]
    kept = [p for p in paragraphs if "::=" not in p and ">>>" not in p and share_of_letters(p) >= 0.8]
    return "\n\n".join(p.rstrip() for p in kept).strip("\n")


def prose(text: str) -> bool:
    """Whether a cleaned document is worth learning from: a sentence or more, with several lower-case words."""
    return len(text) >= 60 and len(re.findall(r"\b[a-z]{2,}\b", text)) >= 8


def comment_blocks(source: str) -> Iterator[str]:
    """Yield runs of three or more lines that hold nothing but a comment, without their marks."""
    block: list[str] = []
    last = -2
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.line.strip() != token.string.strip():
            continue
        if token.start[0] != last + 1:
            if len(block) >= 3:
                yield inspect.cleandoc("\n".join(block))
            block = []
        block.append(token.string.lstrip("#"))
        last = token.start[0]
    if len(block) >= 3:
        yield inspect.cleandoc("\n".join(block))


def source_documents(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (where, text) of every docstring and comment block in the standard library's sources, in path order."""
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED_FOLDERS & set(name.parts):
            continue
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if doc := ast.get_docstring(node):
                yield f"docstring {name.as_posix()}:{getattr(node, 'name', '')}", doc
        for block in comment_blocks(source):
            yield f"comment {name.as_posix()}", block


def compiled_documents(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (where, text) of the docstrings of modules written in C, which no source file of the library holds."""
    compiled = {path.name.split(".")[0] for path in (root / "lib-dynload").glob("*.so")}
    for name in sorted(set(sys.builtin_module_names) | compiled):
        if "test" in name or name.startswith("_x"):
            continue
        try:
            module = builtins if name == "builtins" else importlib.import_module(name)
        except ImportError:
            continue  # built for another platform, or its library is missing: it has no docstrings to offer
        for key, value in sorted(vars(module).items()):
            members = sorted(vars(value).items()) if isinstance(value, type) else []
            for member, item in [(key, value), *((f"{key}.{m}", v) for m, v in members)]:
                doc = getattr(item, "__doc__", None)
                if isinstance(doc, str) and (callable(item) or inspect.isdatadescriptor(item)):
                    yield f"compiled {name}.{member}", inspect.cleandoc(doc)


def topic_documents() -> Iterator[tuple[str, str]]:
    """Yield (where, text) of the language reference that `help()` shows, cut at its section underlines."""
    from pydoc_data.topics import topics

    for key, text in sorted(topics.items()):
        for i, section in enumerate(re.split(r"\n\n(?=[^\n]+\n[*=\-~]{4,}\n)", text)):
            yield f"topic {key}#{i}", section.strip()


def build_corpus(work: Path, held_out: float) -> None:
    """Write documents.jsonl to `work`: unique documents, a share of them marked held out by a hash of their text."""
    root = Path(sysconfig.get_path("stdlib"))
    seen: set[str] = set()
    kept: list[dict[str, Any]] = []
    characters: dict[str, int] = {}
    for where, raw in [*topic_documents(), *source_documents(root), *compiled_documents(root)]:
        text = cleaned(raw)
        # Documents that differ in spacing or numbers alone are one, or copies of held-out text would be trained on.
        key = re.sub(r"[\W\d_]+", " ", text).strip().lower()
        if key in seen or not prose(text):
            continue
        seen.add(key)
        held = int(hashlib.sha256(key.encode()).hexdigest(), 16) % 10_000 < held_out * 10_000
        kept.append({"where": where, "text": text, "held_out": held})
        kind = where.split()[0]
        characters[kind] = characters.get(kind, 0) + len(text)
    work.mkdir(parents=True, exist_ok=True)
    with (work / "documents.jsonl").open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(document, ensure_ascii=False) + "\n" for document in kept)
    version = sys.version.split()[0]
    print(f"corpus: Python {version}, {len(kept)} documents, characters by kind {characters}")
