"""Executes docs/notebook.ipynb from scratch and keeps its outputs: `python scripts/notebook.py`, after an edit."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

DOCS = Path(__file__).resolve().parent.parent / "docs"

if __name__ == "__main__":
    notebook = nbformat.read(DOCS / "notebook.ipynb", as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(DOCS)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of this run
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]  # warnings of other libraries
    nbformat.write(notebook, DOCS / "notebook.ipynb")
