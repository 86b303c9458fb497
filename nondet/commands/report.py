"""`nondet report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nondet.commands import options as o
from nondet.commands.common import PipedConsole, check_reports, say, write_reports
from nondet.errors import UserError

__all__ = ["report", "run_files"]


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run files. Side files beside them are skipped.")
    ],
    out: Annotated[
        list[Path] | None,
        typer.Option(
            "--out", "-o", help="Report to write: .html or .md. Repeatable. Default: the terminal.", show_default=False
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Markdown of all that GitHub takes, not of 20,000 characters.")
    ] = False,
    force: o.FORCE = False,
    allow_truncated: Annotated[
        bool, typer.Option("--allow-truncated", help="Read a run that was killed, without its cut-off line.")
    ] = False,
    verbose: o.VERBOSE = False,
    quiet: o.QUIET = False,
) -> None:
    """Turn run files into one report: terminal, .md or .html."""
    from nondet.core.runfile import read_run

    check_reports(out or [], force=force)
    if verbose and quiet:
        raise UserError("--verbose and --quiet exclude each other", "Give one of them.")
    read = [read_run(path, allow_truncated=allow_truncated) for path in run_files(runs)]
    if not out:
        from nondet.reports.terminal import render

        render(read, PipedConsole(), verbose=verbose, quiet=quiet)
        return
    for path in write_reports(out, read, full=full):
        if not quiet:
            say(f"report: {path}")


def run_files(paths: list[Path]) -> list[Path]:
    """Without the side files of sampled runs, which a shell's * brings along, where a run is left.

    One that is named alone is refused by the reader, in its own words.
    """
    kept = [path for path in paths if not path.name.endswith((".traces.jsonl", ".traces.jsonl.gz"))]
    return kept or paths
