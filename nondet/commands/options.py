"""Options that several commands have, each written down once: its name, its help, its limits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "DEVICE",
    "DTYPES",
    "FAIL_ON",
    "FORCE",
    "IMPLS",
    "INPUTS",
    "JSON",
    "LARGEST_M",
    "MODEL_FOLDER",
    "OUT",
    "PRESET",
    "REPORT",
    "RESUME",
    "SEED",
    "THREADS",
    "K",
    "N",
]

OUT = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Run file to write (.jsonl). Default: a new file in runs/.", show_default=False),
]
FORCE = Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")]
RESUME = Annotated[bool, typer.Option("--resume", help="Go on with the run file at --out, with the same options.")]
SEED = Annotated[int, typer.Option("--seed", min=0, max=2**32 - 1, help="Seed of everything that is drawn.")]
DEVICE = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
THREADS = Annotated[
    int | None,
    typer.Option(
        "--threads", help="CPU threads. They change bits, so they are recorded either way.", show_default=False
    ),
]
JSON = Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout, one JSON object a line.")]
REPORT = Annotated[
    list[Path] | None,
    typer.Option("--report", help="Also write a report: .html or .md. Repeatable.", show_default=False),
]
FAIL_ON = Annotated[
    str | None,
    typer.Option(
        "--fail-on",
        help='"divergent": exit with 3 if anything diverged or is wrong, with 1 if that can\'t be said.',
        show_default=False,
    ),
]
IMPLS = Annotated[
    list[str] | None,
    typer.Option(
        "--impl",
        help="stock, invariant, or your own package.module:function or operator=package.module:function. Repeatable.",
        show_default="stock, invariant",
    ),
]
DTYPES = Annotated[
    list[str] | None,
    typer.Option("--dtype", help="bfloat16, float16, float32, ... Repeatable.", show_default=False),
]
LARGEST_M = Annotated[int | None, typer.Option("--m", help="Largest M (rows) of the sweep.", show_default=False)]
K = Annotated[int | None, typer.Option("--k", help="K: the axis that is summed over.", show_default=False)]
N = Annotated[int | None, typer.Option("--n", help="N: output features.", show_default=False)]
PRESET = Annotated[
    str | None, typer.Option("--preset", help="Layer shapes of a real model, e.g. qwen3-8b.", show_default=False)
]
MODEL_FOLDER = Annotated[
    Path | None,
    typer.Option("--model", help="Folder or config.json to read layer shapes from.", show_default=False),
]
INPUTS = Annotated[
    list[str] | None, typer.Option("--inputs", help="bell, wide, cancel, outlier. Repeatable.", show_default=False)
]
