"""`nondet report`."""

from __future__ import annotations

from pathlib import Path

from nondet.commands.common import PipedConsole, check_reports, say, write_reports
from nondet.runfile import read_run

__all__ = ["run"]


def run(paths: list[Path], out: list[Path], *, force: bool, allow_truncated: bool) -> None:
    """Read the runs, then write each report asked for, or print to the terminal.

    Raises:
        UserError: a run file that can't be read, or a report that can't be written.
    """
    check_reports(out, force=force)
    runs = [read_run(path, allow_truncated=allow_truncated) for path in paths]
    if not out:
        from nondet.reports.terminal import render

        render(runs, PipedConsole())
        return
    for path in write_reports(out, runs):
        say(f"report: {path}")
