"""`nondet report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nondet.commands import options as o
from nondet.commands.common import PipedConsole, check_reports, say, write_reports

__all__ = ["report"]


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run files of `nondet probe`, `sample`, `bench` and `certify`."),
    ],
    out: Annotated[
        list[Path] | None,
        typer.Option(
            "--out", "-o", help="Report to write: .html or .md. Repeatable. Default: the terminal.", show_default=False
        ),
    ] = None,
    force: o.FORCE = False,
    allow_truncated: Annotated[
        bool, typer.Option("--allow-truncated", help="Read a run that was killed, without its cut-off line.")
    ] = False,
) -> None:
    """Turn run files into one report: terminal, .md or .html."""
    from nondet.runfile import read_run

    check_reports(out or [], force=force)
    read = [read_run(path, allow_truncated=allow_truncated) for path in runs]
    if not out:
        from nondet.reports.terminal import render

        render(read, PipedConsole())
        return
    for path in write_reports(out, read):
        say(f"report: {path}")
