"""`nondet fleet`: fingerprints of many machines, compared."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from nondet.commands.output import PipedConsole, check_shown, open_page, put, say, to_stdout
from nondet.core.runfile import check_outputs, is_run, read_run, replace_text
from nondet.errors import UserError
from nondet.services import options as o


def fleet(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files of `nondet fingerprint`, or folders.")],
    report: o.REPORT = None,
    force: o.FORCE = False,
    browse: o.OPEN = False,
    as_json: o.JSON = False,
    verbose: o.VERBOSE = False,
    quiet: o.QUIET = False,
) -> None:
    """Compare machines by their fingerprints. Exit 3: one computes wrongly, or bits differ; 1: not all was compared."""
    paths = _files(files)
    check_outputs({"report": report, "files": paths})
    check_shown(report or [], force=force, verbose=verbose, quiet=quiet)

    from rich.text import Text

    from nondet.fleet.compare import compare, machines_of
    from nondet.reports import fleet as texts
    from nondet.reports.document import BRIEF, VERBOSE
    from nondet.reports.terminal import renderables

    found = compare(machines_of(paths, read_run))
    written = [*(report or [])]
    if browse and not any(path.suffix == ".html" for path in written):
        written.append(Path(tempfile.mkdtemp(prefix="nondet-")) / "fleet.html")
    for path in written:
        replace_text(path, texts.render(found) if path.suffix == ".html" else texts.markdown(found))
        say(f"report: {path}", quiet=quiet)
        if browse and path.suffix == ".html":
            open_page(path)

    def show() -> None:
        if as_json:
            put([texts.as_json(found)], as_json=True)
            return
        console = PipedConsole()
        console.print(Text(texts.sentence_of(found), style="bold"))
        for part in () if quiet else renderables(texts.blocks(found), console, VERBOSE if verbose else BRIEF):
            console.print(part)

    if failed := to_stdout(show):
        say(f"nondet: {failed}")
    if found.code:
        raise typer.Exit(found.code)


def _files(given: list[Path]) -> list[Path]:
    """These files, and the run files of these folders, each once. Raises UserError: a folder without one."""
    found: dict[Path, None] = {}
    for path in given:
        inside = sorted(p for p in path.glob("*.jsonl*") if is_run(p)) if path.is_dir() else [path]
        if not inside:
            raise UserError(f"no fingerprint in the folder {path}", "Make them with `nondet fingerprint --out FILE`.")
        found |= dict.fromkeys(inside)
    return list(found)
