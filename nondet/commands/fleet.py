"""`nondet fingerprint` of one machine, and `nondet fleet`: fingerprints of many machines, compared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nondet.commands.output import PipedConsole, check_shown, command_of, put, say, to_stdout
from nondet.commands.report import run_files
from nondet.core.runfile import check_outputs, read_run, replace_text
from nondet.services import options as o
from nondet.services.fleet import fingerprint as service

fingerprint = command_of(service, without=("fail_on",))  # its exit code says it


def fleet(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files of `nondet fingerprint`, or folders.")],
    report: o.REPORT = None,
    force: o.FORCE = False,
    as_json: o.JSON = False,
    verbose: o.VERBOSE = False,
    quiet: o.QUIET = False,
) -> None:
    """Compare machines by their fingerprints. Exit 3: one computes wrongly, or bits differ; 1: not all was compared."""
    paths = list(dict.fromkeys(run_files(files)))
    check_outputs({"report": report, "files": paths})
    check_shown(report or [], force=force, verbose=verbose, quiet=quiet)

    from rich.text import Text

    from nondet.fleet.compare import compare, machines_of
    from nondet.reports import fleet as texts
    from nondet.reports.document import BRIEF, VERBOSE
    from nondet.reports.terminal import renderables

    found = compare(machines_of(paths, read_run))
    for path in report or []:
        replace_text(path, texts.render(found) if path.suffix == ".html" else texts.markdown(found))
        say(f"report: {path}", quiet=quiet)

    def show() -> None:
        if as_json:
            put([texts.as_json(found)], as_json=True)
            return
        console = PipedConsole()
        console.print(Text(found.headline, style="bold"))
        for part in () if quiet else renderables(texts.blocks(found), console, VERBOSE if verbose else BRIEF):
            console.print(part)

    if failed := to_stdout(show):
        say(f"nondet: {failed}")
    if found.code:
        raise typer.Exit(found.code)
