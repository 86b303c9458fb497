"""`nondet report` and `nondet diff`: what is made of run files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nondet.commands.output import PipedConsole, check_shown, open_page, put, say, to_stdout, write_reports
from nondet.core.registry import REPORTERS
from nondet.core.runfile import check_free, check_outputs, is_run, read_run, replace_text, replacing
from nondet.errors import UserError
from nondet.services import options as o
from nondet.services.run import latest_run

if TYPE_CHECKING:
    from nondet.core.records import Run
    from nondet.diff import RunDiff


TRUNCATED = Annotated[bool, o.opt("Read a run that was killed, without its cut-off line.", "--allow-truncated")]
TABLES = (".csv", ".parquet", ".json")
FIGURES = (".png", ".svg", ".pdf")
DATA = "Tables and figures"  # the panel of the options that belong to them


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN...]", help="Run files, or folders of them. Side files are skipped.",
            show_default="the latest in runs/",
        ),
    ] = None,
    out: Annotated[
        list[Path] | None,
        o.opt(
            "What to write: a report (.html, .md), the records as a table (.csv, .parquet, .json), or a figure to "
            "publish (.png, .svg, .pdf). Repeatable.",
            "--out", "-o", shown="the terminal",
        ),
    ] = None,
    full: Annotated[bool, o.opt("Markdown as long as GitHub accepts, not 20,000 characters.", "--full")] = False,
    records: Annotated[
        str | None,
        o.opt(
            "Of a table, the kind of records: rows, completions, ...", panel=DATA,
            shown="completions of a sample run; else the only kind",
        ),
    ] = None,
    figure: Annotated[
        str | None,
        o.opt(
            "Figure: class-map, map, speed, jigsaw, survival, tree, training or mismatch.",
            shown="the only one there is", panel=DATA,
            complete=o.choices("class-map", "map", "speed", "jigsaw", "survival", "tree", "training", "mismatch"),
        ),
    ] = None,
    section: Annotated[
        str | None, o.opt("Only this section of a bench run: matmul, ...", shown="all", panel=DATA)
    ] = None,
    probe: Annotated[
        str | None,
        o.opt("Only this probe's rows of a probe run: matmul, ...", shown="all", panel=DATA, complete=o.PROBES),
    ] = None,
    case: Annotated[str | None, o.opt("Only rows whose case has this in its name.", shown="all", panel=DATA)] = None,
    force: o.FORCE = False,
    browse: o.OPEN = False,
    allow_truncated: TRUNCATED = False,
    verbose: o.VERBOSE = False,
    quiet: o.QUIET = False,
) -> None:  # fmt: skip
    """Turn run files into a report (terminal, .md, .html), a table of their records, or a figure to publish."""
    paths = out or []
    known = (*(suffix for suffix in REPORTERS if suffix.startswith(".")), *TABLES, *FIGURES)
    for path in paths:
        if path.suffix not in known:
            raise UserError(f"--out {str(path)!r} has a suffix that is not known", f"Known: {', '.join(known)}.")
    data = [path for path in paths if path.suffix not in REPORTERS]
    reports = [path for path in paths if path.suffix in REPORTERS]
    files = run_files(runs or [latest_run(say)])
    check_outputs({"out": out, "runs": files})
    check_shown(reports, force=force, verbose=verbose, quiet=quiet)
    for path in data:
        check_free(path, force=force, hint="Use --force to overwrite it, or another --out.")
    parts = {"section": section, "probe": probe, "case": case}
    _check_options(parts | {"records": records, "figure": figure}, data, reports)
    read = [read_run(path, allow_truncated=allow_truncated) for path in files]
    write_reports(reports, read, quiet=quiet, full=full, browse=browse)
    if data:
        _narrow(read, **parts)
    for path in data:
        with replacing(path, "Choose another --out.") as scratch:
            write = partial(_write_table, records) if path.suffix in TABLES else partial(_write_figure, figure)
            written = write(read, scratch)
        say(f"{written}: {path}", quiet=quiet)
    if not data and (quiet or not out) and not browse:
        from nondet.reports.terminal import render

        render(read, PipedConsole(), verbose=verbose, quiet=quiet)


def _check_options(given: dict[str, str | None], data: list[Path], reports: list[Path]) -> None:
    """Refuse what belongs to tables and figures beside a report: a verdict is about a whole run, not a part of it."""
    named = [name for name, value in given.items() if value is not None]
    if named and (reports or not data):
        known = ", ".join((*TABLES, *FIGURES))
        raise UserError(f"--{named[0]} belongs to a table or a figure", f"Give --out with one of {known}.")
    for name, wanted, suffixes in (("records", "a table", TABLES), ("figure", "a figure", FIGURES)):
        if name in named and not any(path.suffix in suffixes for path in data):
            raise UserError(f"--{name} belongs to {wanted}", f"Give --out with one of {', '.join(suffixes)}.")


def run_files(paths: list[Path]) -> list[Path]:
    """These files, and the run files of these folders, without the side files of sampled runs (a shell's * brings them
    along), if a run is left. Raises UserError: a folder without a run file."""
    found = []
    for path in paths:
        inside = sorted(path.glob("*.jsonl*")) if path.is_dir() else [path]
        kept = [file for file in inside if file == path or is_run(file)]
        if not kept:
            raise UserError(f"no run file in the folder {path}", "Name a folder of run files (.jsonl), or the files.")
        found += kept
    return [path for path in found if ".traces.jsonl" not in path.name] or found


_FORMULA = ("=", "+", "-", "@", "\t", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")  # and the wide forms


def _narrow(runs: list[Run], section: str | None, probe: str | None, case: str | None) -> None:
    """Drop the records that were not asked for; a `UserError` where nothing has the name."""
    for option, name, part, field in (("section", section, "cells", "section"), ("probe", probe, "rows", "probe")):
        if name is not None:
            _check_named(option, name, (getattr(record, field) for run in runs for record in getattr(run, part)))
            for run in runs:
                setattr(run, part, [record for record in getattr(run, part) if getattr(record, field) == name])
    if case is not None:
        if not any(case in row.case for run in runs for row in run.rows):
            raise UserError(f"no case of these runs has {case!r} in its name", "See `nondet report RUN --out a.csv`.")
        for run in runs:
            run.rows = [row for row in run.rows if case in row.case]


def _write_figure(figure: str | None, runs: list[Run], path: Path) -> str:
    """Draw a figure; returns its name."""
    from nondet.export.figures import draw, figures_of, save

    names = figures_of(runs)
    if figure is None and len(names) != 1:
        choice = f"Name one with --figure: {', '.join(names)}." if names else "Nothing here can be drawn."
        raise UserError(f"these runs have {len(names)} figures", choice)
    name = figure or names[0]
    save(draw(name, runs), path)
    return name


def _check_named(option: str, name: str, there: Iterable[str]) -> None:
    """Refuse a part that these runs don't have."""
    names = list(dict.fromkeys(there))
    if name not in names:
        raise UserError(f"no --{option} {name!r} in these runs", f"There are: {', '.join(names) or 'none'}.")


def _cell(value: object) -> object:
    """A cell of CSV in which a spreadsheet sees no formula: an apostrophe stands before what it would run. Python's csv
    quotes a line feed and leaves a bare carriage return, behind which a reader would begin a row."""
    if not isinstance(value, str):
        return value
    value = value.replace("\r\n", "\n").replace("\r", "\n")
    return f"'{value}" if value.startswith(_FORMULA) else value


def _write_table(records: str | None, runs: list[Run], path: Path) -> str:
    """Write the records of a kind; returns what was written."""
    from nondet.export.frames import frame, only_kind

    kind = records or only_kind(runs)
    table = frame(runs, kind)
    if path.suffix == ".csv":
        for name in table.select_dtypes(exclude=["number", "bool"]).columns:
            table[name] = table[name].astype(object).map(_cell)
        table.to_csv(path, index=False)
    elif path.suffix == ".json":
        table.to_json(path, orient="records", lines=False, indent=1)
    else:
        try:
            table.to_parquet(path, index=False)
        except ImportError as error:
            raise UserError("Parquet needs pyarrow, which is not installed", "pip install pyarrow, or .csv.") from error
    return f"{len(table)} {kind}"


def diff(
    a: Annotated[Path, typer.Argument(metavar="BEFORE", help="Run file: before, or one machine.")],
    b: Annotated[Path, typer.Argument(metavar="AFTER", help="Run file: after, or the other machine.")],
    impl: Annotated[str | None, o.opt("Compare only this implementation's records.")] = None,
    against: Annotated[str | None, o.opt("Compare BEFORE's --impl with this implementation of AFTER.")] = None,
    out: Annotated[Path | None, o.opt("Also write the comparison: .html or .md.", "--out", "-o")] = None,
    force: o.FORCE = False,
    browse: o.OPEN = False,
    allow_truncated: TRUNCATED = False,
    fail_on: Annotated[
        str | None,
        o.opt(
            '"moved": exit 3 if a record got worse, completions differ or newly fail, 1 if not all were compared.',
            complete=o.choices("moved"),
            panel=o.OUTPUT,
        ),
    ] = None,
    as_json: o.JSON = False,
    verbose: o.VERBOSE = False,
    quiet: o.QUIET = False,
) -> None:
    """Compare two run files: what appeared, disappeared or changed, and how the machines differ."""
    if fail_on not in (None, "moved"):
        raise UserError(f"unknown --fail-on {fail_on!r}", "Known: moved.")
    if against is not None and impl is None:
        raise UserError("--against without --impl", "Name BEFORE's implementation with --impl.")
    if out is not None and out.suffix not in (".html", ".md"):
        raise UserError(f"--out {str(out)!r} is no .html or .md file", "Name one that ends so.")

    from nondet.diff import RunDiff
    from nondet.reports import diff as texts
    from nondet.verdict.findings import plural

    check_outputs({"out": out, "runs": [a, b]})
    if out is not None:
        check_free(out, force=force)
    runs = tuple(read_run(path, allow_truncated=allow_truncated) for path in (a, b))
    difference = RunDiff(runs[0], runs[1], impl=impl or "", against=against or "")
    names, parting = (str(a), str(b)), _parting(difference, runs[0], runs[1])
    if out is None and browse:
        out = Path(tempfile.mkdtemp(prefix="nondet-")) / "diff.html"
    if out is not None:
        write = texts.render if out.suffix == ".html" else texts.markdown
        replace_text(out, write(difference, names, parting))
        if browse:
            open_page(out)
    if as_json:
        failed = to_stdout(lambda: put([texts.as_json(difference, names, parting)], as_json=True))
    else:
        failed = to_stdout(lambda: texts.show(difference, names, parting, PipedConsole(), verbose=verbose, quiet=quiet))
    if failed:
        raise UserError(failed, "Send it elsewhere.")
    if out is not None:
        say(f"report: {out}", quiet=quiet)
    if fail_on is not None:
        if difference.worse or difference.differing or difference.failed_more:
            raise typer.Exit(3)
        if not difference.compared:
            groups = difference.completions
            unheld = f"{sum(bool(c.reason) for c in groups)} of {plural(len(groups), 'group')} of completions"
            what = f"{unheld} could not be compared" if difference.held else "nothing could be compared"
            say(f"nondet: --fail-on moved can't be decided: {what}.")
            raise typer.Exit(1)


def _parting(difference: RunDiff, a: Run, b: Run) -> dict[int, tuple[int | None, int | None]]:
    """Where the most common traces of each group differ; {} where a side file is missing, which is said."""
    from nondet.core.compare import first_difference
    from nondet.core.traces import read_traces

    wanted = {i: c.most_common for i, c in enumerate(difference.completions) if c.with_logprobs and c.most_common}
    if not wanted:
        return {}
    try:
        mine, theirs = (read_traces(Path(run.source))[0] for run in (a, b))
    except UserError as error:
        say(f"nondet: where completions differ is not shown: {error}")
        return {}
    pairs = {i: (mine.get(first), theirs.get(second)) for i, (first, second) in wanted.items()}
    return {i: first_difference(x, y) for i, (x, y) in pairs.items() if x is not None and y is not None}
