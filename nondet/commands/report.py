"""`nondet report`, `nondet export` and `nondet diff`: what is made of run files; and `nondet list`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from nondet.commands.output import PipedConsole, check_shown, drop_stdout, put, say, write_reports
from nondet.core.operator import ANY, Family
from nondet.core.registry import PROBES, REPORTERS, classes, declared, operators
from nondet.core.runfile import check_free, check_outputs, is_run, read_run, replace_text, replacing
from nondet.errors import UserError
from nondet.probes.models import PRESETS
from nondet.sampling.plan import PRESETS as LOADS
from nondet.services import options as o

if TYPE_CHECKING:
    import pandas as pd

    from nondet.core.records import Run
    from nondet.diff import RunDiff


TRUNCATED = Annotated[bool, o.opt("Read a run that was killed, without its cut-off line.", "--allow-truncated")]


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run files, or folders of them. Side files are skipped.")
    ],
    out: Annotated[
        list[Path] | None,
        o.opt("Report to write: .html or .md. Repeatable.", "--out", "-o", shown="the terminal"),
    ] = None,
    full: Annotated[bool, o.opt("Markdown as long as GitHub accepts, not 20,000 characters.", "--full")] = False,
    force: o.FORCE = False,
    allow_truncated: TRUNCATED = False,
    verbose: o.VERBOSE = False,
    quiet: o.QUIET = False,
) -> None:
    """Turn run files into one report: terminal, .md or .html."""
    files = run_files(runs)
    check_outputs({"out": out, "runs": files})
    check_shown(out or [], force=force, verbose=verbose, quiet=quiet)
    read = [read_run(path, allow_truncated=allow_truncated) for path in files]
    for path in write_reports(out or [], read, full=full):
        if not quiet:
            say(f"report: {path}")
    if quiet or not out:
        from nondet.reports.terminal import render

        render(read, PipedConsole(), verbose=verbose, quiet=quiet)


def run_files(paths: list[Path]) -> list[Path]:
    """These files, and the run files of these folders, without the side files of sampled runs, where a run is left.

    A shell's * brings side files along; one that is named by itself is refused by the reader, in its own words.

    Raises:
        UserError: a folder without a run file.
    """
    found = []
    for path in paths:
        inside = sorted(path.glob("*.jsonl*")) if path.is_dir() else [path]
        kept = [file for file in inside if file == path or is_run(file)]
        if not kept:
            raise UserError(f"no run file in the folder {path}", "Name a folder of run files (.jsonl), or the files.")
        found += kept
    return [path for path in found if ".traces.jsonl" not in path.name] or found


TABLES = (".csv", ".parquet", ".json")
_FIGURES = (".png", ".svg", ".pdf")
_FORMULA = ("=", "+", "-", "@", "\t", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")  # and the wide forms


def export(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run files, or folders of them.")],
    out: Annotated[Path, o.opt("Table (.csv, .parquet, .json) or figure (.png, .svg, .pdf) to write.", "--out", "-o")],
    records: Annotated[
        str | None,
        o.opt("Kind of records: rows, completions, ...", shown="completions of a sample run; else the only kind"),
    ] = None,
    figure: Annotated[
        str | None,
        o.opt(
            "Figure: class-map, map, speed, jigsaw, survival or tree.", shown="the only one there is",
            complete=o.choices("class-map", "map", "speed", "jigsaw", "survival", "tree"),
        ),
    ] = None,
    section: Annotated[str | None, o.opt("Only this section of a bench run: matmul, ...", shown="all")] = None,
    probe: Annotated[
        str | None,
        o.opt("Only this probe's rows of a probe run: matmul, ...", shown="all", complete=o.PROBES),
    ] = None,
    case: Annotated[str | None, o.opt("Only rows whose case has this in its name.", shown="all")] = None,
    force: o.FORCE = False,
    allow_truncated: TRUNCATED = False,
) -> None:  # fmt: skip
    """Write the records of runs as a table, or draw a figure to publish."""
    if out.suffix not in (*TABLES, *_FIGURES):
        known = ", ".join((*TABLES, *_FIGURES))
        raise UserError(f"--out {str(out)!r} has a suffix that is not known", f"Known: {known}.")
    files = run_files(runs)
    check_outputs({"out": out, "runs": files})
    check_free(out, force=force, hint="Use --force to overwrite it, or another --out.")
    read = [read_run(path, allow_truncated=allow_truncated) for path in files]
    for option, name, part, field in (("section", section, "cells", "section"), ("probe", probe, "rows", "probe")):
        if name is not None:
            _check_named(option, name, (getattr(record, field) for run in read for record in getattr(run, part)))
            for run in read:
                setattr(run, part, [record for record in getattr(run, part) if getattr(record, field) == name])
    if case is not None:
        if not any(case in row.case for run in read for row in run.rows):
            raise UserError(f"no case of these runs has {case!r} in its name", "See `nondet report RUN -v`.")
        for run in read:
            run.rows = [row for row in run.rows if case in row.case]
    with replacing(out, "Choose another --out.") as scratch:
        if out.suffix in TABLES:
            if figure is not None:
                raise UserError(f"--figure {figure} and a table", f"Give --out one of {', '.join(_FIGURES)}.")
            from nondet.export.frames import frame, only_kind

            what = records or only_kind(read)
            table = frame(read, what)
            _write(table, scratch)
            text = f"{len(table)} {what}"
        else:
            from nondet.export.figures import draw, figures_of, save

            names = figures_of(read)
            if figure is None and len(names) != 1:
                choice = f"Name one with --figure: {', '.join(names)}." if names else "Nothing here can be drawn."
                raise UserError(f"these runs have {len(names)} figures", choice)
            text = figure or names[0]
            save(draw(text, read), scratch)
    say(f"{text}: {out}")


def _check_named(option: str, name: str, there: Iterable[str]) -> None:
    """Refuse a part that these runs don't have."""
    names = list(dict.fromkeys(there))
    if name not in names:
        raise UserError(f"no --{option} {name!r} in these runs", f"There are: {', '.join(names) or 'none'}.")


def _cell(value: object) -> object:
    """A cell of CSV in which a spreadsheet sees no formula: an apostrophe stands before what it would run.

    Python's csv quotes a line feed and leaves a bare carriage return, behind which a reader would begin a row.
    """
    if not isinstance(value, str):
        return value
    value = value.replace("\r\n", "\n").replace("\r", "\n")
    return f"'{value}" if value.startswith(_FORMULA) else value


def _write(table: pd.DataFrame, path: Path) -> None:
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


def diff(
    a: Annotated[Path, typer.Argument(metavar="BEFORE", help="Run file: before, or one machine.")],
    b: Annotated[Path, typer.Argument(metavar="AFTER", help="Run file: after, or the other machine.")],
    impl: Annotated[
        str | None,
        o.opt("Compare only this implementation's records."),
    ] = None,
    against: Annotated[str | None, o.opt("Compare BEFORE's --impl with this implementation of AFTER.")] = None,
    out: Annotated[Path | None, o.opt("Also write the comparison: .html or .md.", "--out", "-o")] = None,
    force: o.FORCE = False,
    allow_truncated: Annotated[
        bool, o.opt("Read runs that were killed, without their cut-off line.", "--allow-truncated")
    ] = False,
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

    from nondet.diff import diff_runs
    from nondet.reports import diff as diff_text
    from nondet.verdict.findings import plural

    check_outputs({"out": out, "runs": [a, b]})
    if out is not None:
        check_free(out, force=force)
    runs = tuple(read_run(path, allow_truncated=allow_truncated) for path in (a, b))
    difference = diff_runs(runs[0], runs[1], impl=impl or "", against=against or "")
    names, parting = (str(a), str(b)), _parting(difference, runs[0], runs[1])
    if out is not None:
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
            what = f"{unheld} could not be compared" if difference.held else "nothing could be compared"
            say(f"nondet: --fail-on moved can't be decided: {what}.")
            raise typer.Exit(1)


def _parting(difference: RunDiff, a: Run, b: Run) -> dict[int, tuple[int | None, int | None]]:
    """Where the most common traces of each group differ; {} where a side file is missing, which is said."""
    from nondet.core.compare import first_difference
    from nondet.core.traces import read_traces

    wanted = {i: c.commonest for i, c in enumerate(difference.completions) if c.with_logprobs and c.commonest}
    if not wanted:
        return {}
    try:
        mine, theirs = (read_traces(Path(run.source))[0] for run in (a, b))
    except UserError as error:
        say(f"nondet: where completions differ is not shown: {error}")
        return {}
    pairs = {i: (mine.get(first), theirs.get(second)) for i, (first, second) in wanted.items()}
    return {i: first_difference(x, y) for i, (x, y) in pairs.items() if x is not None and y is not None}


def _families() -> list[Family]:
    """What `batch_invariant` can replace by itself."""
    return list(dict.fromkeys(o.family for o in declared().values() if o.family is not None))


def list_registries(as_json: o.JSON = False) -> None:
    """List probes, implementations, classes, loads, families, presets of shapes and reports."""
    if as_json:
        listing = {
            "probes": {name: text for name, (_, text) in PROBES.items()},
            "implementations": {
                name: {"reference": ["*"]} | {i.name: sorted(i.targets) for i in operator.implementations}
                for name, operator in operators().items()
            },
            "classes": {
                c.name: {
                    "device": c.device,
                    "dtypes": c.dtypes,
                    "order": c.order,
                    "formula": c.formula,
                    "members": {op: list(members) for op, members in c.members.items()},
                }
                for c in classes().values()
            },
            "presets": list(PRESETS),
            "loads": list(LOADS),
            "families": {f.name: f.text for f in _families()},
            "reports": {name: text for name, (_, text) in REPORTERS.items()},
        }
        print(json.dumps(listing))  # noqa: T201 - machine-readable output goes to stdout as it is
        return
    console = PipedConsole()

    def table(*columns: str, title: str | None = None, rows: Iterable[tuple[str, ...]]) -> None:
        shown = Table(*columns, title=title, title_justify="left")
        for row in rows:
            shown.add_row(*row)
        console.print(shown)

    table(
        "probe", "what it tests", title="nondet probe NAME",
        rows=[*((name, text) for name, (_, text) in PROBES.items()), ("all", "every probe above")],
    )  # fmt: skip
    by_operator = []
    for operator, declaration in operators().items():
        names = ["reference"]
        for i in declaration.implementations:
            names.append(i.name if ANY in i.targets else f"{i.name} ({' and '.join(sorted(i.targets))})")
        by_operator.append((operator, ", ".join(names)))
    table("operator", "implementations (and their devices, unless any)", title="--impl", rows=by_operator)
    by_class = (
        (c.name, c.device, ", ".join(c.members), ", ".join(dict.fromkeys(n for m in c.members.values() for n in m)))
        for c in classes().values()
    )
    table("class", "device", "operators", "members", title="nondet certify --class", rows=by_class)
    loads = []
    for name, load in LOADS.items():
        others = f"among {load.others} others" if load.others else "one at a time"
        loads.append((name, f"{load.targets} requests a round, {others}, at most {load.budget} tokens a step"))
    table("load", "what it is", title="nondet sample --load", rows=loads)
    table(
        "family", "what it replaces", title="nondet sample --impl invariant:FAMILY",
        rows=((family.name, family.text) for family in _families()),
    )  # fmt: skip
    console.print("nondet probe --preset: " + ", ".join(PRESETS), highlight=False)
    table("nondet report --out", "what it writes", rows=((suffix, text) for suffix, (_, text) in REPORTERS.items()))
