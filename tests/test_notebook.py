"""The notebook in the docs runs from scratch, and what it says comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
NOTEBOOK = DOCS / "notebook.ipynb"


def _text(cell: Any) -> str:
    """Everything that a cell printed or showed."""
    parts = [output.get("text", "") for output in cell.get("outputs", [])]
    parts += ["".join(output.get("data", {}).values()) for output in cell.get("outputs", []) if "data" in output]
    return " ".join(parts)


@pytest.fixture(scope="module")
def executed() -> Any:
    """The notebook with outputs made now, in the folder that it lies in."""
    # of the dev extra, which a borrowed GPU machine may lack
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    places = {"metadata": {"path": str(DOCS)}}
    return nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=places).execute()


def test_the_notebook_runs(executed: Any) -> None:
    """Every cell, in order; a kernel that splits its sum by the batch is found out, and the wrong signature named."""
    shown = [_text(cell) for cell in executed.cells if cell.cell_type == "code"]
    text = " ".join(shown)
    assert "mine: batch-dependent in 1 of 1 case" in text
    assert "Write it as linear(x, weight, bias=None)" in text
    assert "invariant: 1 distinct completion of 10" in text
    assert "stock: 6 distinct completions of 1,000" in text
    assert any("image/png" in output.get("data", {}) for cell in executed.cells for output in cell.get("outputs", []))


def test_the_kept_notebook_is_executed_and_small(executed: Any) -> None:
    """Outputs are kept for readers, of the cells that are there, without this machine's paths."""
    import nbformat

    kept = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(kept)
    code = [cell for cell in kept.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert len(NOTEBOOK.read_bytes()) < 100_000
    assert "Traceback" not in " ".join(_text(cell) for cell in code)
    same = [bool(_text(a)) == bool(_text(b)) for a, b in zip(kept.cells, executed.cells, strict=True)]
    assert all(same)
