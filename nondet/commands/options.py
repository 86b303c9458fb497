"""Options that several commands have, each written down once: its name, its help, its limits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from nondet.commands import completion

__all__ = [
    "DEVICE",
    "DTYPES",
    "FAIL_ON",
    "FORCE",
    "IMPLS",
    "INPUTS",
    "JSON",
    "LARGEST_M",
    "MACHINE",
    "MODEL_FOLDER",
    "OUT",
    "OUTPUT",
    "PRESET",
    "QUIET",
    "REPORT",
    "RESUME",
    "SEED",
    "THREADS",
    "VERBOSE",
    "K",
    "N",
    "choices",
]

# The panels of `--help`: what is measured is under "Options", as Typer calls what has no panel.
OUTPUT, MACHINE = "Output", "Machine"


def choices(*names: str) -> Callable[[str], list[str]]:
    """A shell completion of these names."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


OUT = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", help="Run file to write (.jsonl). Default: a new file in runs/.", show_default=False,
        rich_help_panel=OUTPUT,
    ),
]  # fmt: skip
FORCE = Annotated[bool, typer.Option("--force", help="Overwrite files that exist.", rich_help_panel=OUTPUT)]
RESUME = Annotated[
    bool,
    typer.Option("--resume", help="Go on with the run file at --out, with the same options.", rich_help_panel=OUTPUT),
]
VERBOSE = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print everything, not 25 lines.", rich_help_panel=OUTPUT)
]
QUIET = Annotated[bool, typer.Option("--quiet", "-q", help="Print the verdict alone.", rich_help_panel=OUTPUT)]
SEED = Annotated[
    int,
    typer.Option("--seed", min=0, max=2**32 - 1, help="Seed of everything that is drawn.", rich_help_panel=MACHINE),
]
DEVICE = Annotated[
    str,
    typer.Option(
        "--device", help="auto, cpu or cuda.", autocompletion=choices("auto", "cpu", "cuda"), rich_help_panel=MACHINE
    ),
]
THREADS = Annotated[
    int | None,
    typer.Option(
        "--threads",
        help="CPU threads. They change bits, so they are recorded either way.",
        show_default=False,
        rich_help_panel=MACHINE,
    ),
]
JSON = Annotated[
    bool,
    typer.Option("--json", help="Machine-readable output on stdout, one JSON object a line.", rich_help_panel=OUTPUT),
]
REPORT = Annotated[
    list[Path] | None,
    typer.Option(
        "--report", help="Also write a report: .html or .md. Repeatable.", show_default=False, rich_help_panel=OUTPUT
    ),
]
FAIL_ON = Annotated[
    str | None,
    typer.Option(
        "--fail-on",
        help='"divergent": exit with 3 if anything diverged or is wrong, with 1 if that can\'t be said.',
        show_default=False,
        autocompletion=choices("divergent"),
        rich_help_panel=OUTPUT,
    ),
]
IMPLS = Annotated[
    list[str] | None,
    typer.Option(
        "--impl",
        help="stock, invariant, or your own package.module:function or operator=package.module:function. Repeatable.",
        show_default="stock, invariant",
        autocompletion=completion.probe_impls,
    ),
]
DTYPES = Annotated[
    list[str] | None,
    typer.Option(
        "--dtype",
        help="bfloat16, float16, float32, ... Repeatable.",
        show_default=False,
        autocompletion=choices("bfloat16", "float16", "float32", "float64"),
    ),
]
LARGEST_M = Annotated[int | None, typer.Option("--m", help="Largest M (rows) of the sweep.", show_default=False)]
K = Annotated[int | None, typer.Option("--k", help="K: the axis that is summed over.", show_default=False)]
N = Annotated[int | None, typer.Option("--n", help="N: output features.", show_default=False)]
PRESET = Annotated[
    str | None,
    typer.Option(
        "--preset",
        help="Layer shapes of a real model, e.g. qwen3-8b.",
        show_default=False,
        autocompletion=completion.presets,
    ),
]
MODEL_FOLDER = Annotated[
    Path | None,
    typer.Option("--model", help="Folder or config.json to read layer shapes from.", show_default=False),
]
INPUTS = Annotated[
    list[str] | None,
    typer.Option(
        "--inputs",
        help="bell, wide, cancel, outlier, order, order-wide, integers. Repeatable.",
        show_default=False,
        autocompletion=choices("bell", "wide", "cancel", "outlier", "order", "order-wide", "integers"),
    ),
]
