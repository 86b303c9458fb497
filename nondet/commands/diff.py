"""`nondet diff`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nondet.commands import options as o
from nondet.commands.common import drop_stdout, put, say
from nondet.errors import UserError

if TYPE_CHECKING:
    from nondet.core.records import Run
    from nondet.diffing.runs import RunDiff

__all__ = ["diff"]


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="Run file: before, or one machine.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Run file: after, or the other.")],
    impl: Annotated[
        str | None,
        typer.Option("--impl", help="Compare this implementation's records alone.", show_default=False),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", help="Hold A's --impl against this implementation of B.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write a page: a .html or .md file.", show_default=False)
    ] = None,
    force: o.FORCE = False,
    allow_truncated: Annotated[
        bool, typer.Option("--allow-truncated", help="Read runs that were killed, without their cut-off line.")
    ] = False,
    fail_on: Annotated[
        str | None,
        typer.Option(
            "--fail-on",
            help='"moved": exit with 3 if a record got worse, completions differ or fail anew, 1 if not compared.',
            show_default=False,
            autocompletion=o.choices("moved"),
            rich_help_panel=o.OUTPUT,
        ),
    ] = None,
    as_json: o.JSON = False,
    verbose: o.VERBOSE = False,
    quiet: o.QUIET = False,
) -> None:
    """Hold two run files against each other: what appeared, what went, what moved, environments side by side."""
    if fail_on not in (None, "moved"):
        raise UserError(f"unknown --fail-on {fail_on!r}", "Known: moved.")
    if against is not None and impl is None:
        raise UserError("--against without --impl", "Name A's implementation with --impl.")
    if out is not None and out.suffix not in (".html", ".md"):
        raise UserError(f"--out {str(out)!r} is no .html or .md file", "Name one that ends so.")

    from nondet.core.runfile import check_free, read_run, replace_text
    from nondet.diffing.runs import diff_runs
    from nondet.reports import diff as diff_text
    from nondet.verdict.findings import plural

    if out is not None:
        check_free(out, force=force)
    runs = tuple(read_run(path, allow_truncated=allow_truncated) for path in (a, b))
    difference = diff_runs(runs[0], runs[1], impl=impl or "", against=against or "")
    names, parting = (str(a), str(b)), _parting(difference, runs[0], runs[1])
    if out is not None:
        from nondet.reports import diff as diff_text

        write = diff_text.render if out.suffix == ".html" else diff_text.markdown
        replace_text(out, write(difference, names, parting))
    if as_json:
        lines = [diff_text.as_json(difference, names, parting)]
    else:
        lines = diff_text.text(difference, names, parting, verbose=verbose)
    try:
        put(lines[-1:] if quiet else lines, as_json=as_json)
    except BrokenPipeError:
        drop_stdout()
    if out is not None and not quiet:
        say(f"report: {out}")
    if fail_on is not None:
        if difference.worse or difference.parted or difference.failed_more:
            raise typer.Exit(3)
        if not difference.compared:
            groups = difference.completions
            unheld = f"{sum(bool(c.reason) for c in groups)} of {plural(len(groups), 'group')} of completions"
            what = f"{unheld} could not be compared" if difference.held else "nothing of A could be held against B"
            say(f"nondet: --fail-on moved can't be answered: {what}.")
            raise typer.Exit(1)


def _parting(difference: RunDiff, a: Run, b: Run) -> dict[int, tuple[int | None, int | None]]:
    """Where the commonest traces of each group part; {} where a side file is missing, which is said."""
    from nondet.core.traces import read_traces
    from nondet.diffing.completions import first_divergence

    wanted = {i: c.commonest for i, c in enumerate(difference.completions) if c.with_logprobs and c.commonest}
    if not wanted:
        return {}
    try:
        mine, theirs = (read_traces(Path(run.source))[0] for run in (a, b))
    except UserError as error:
        say(f"nondet: where completions part is not said: {error}")
        return {}
    pairs = {i: (mine.get(first), theirs.get(second)) for i, (first, second) in wanted.items()}
    return {i: first_divergence(x, y) for i, (x, y) in pairs.items() if x is not None and y is not None}
