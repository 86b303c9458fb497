"""`nondet report`, `nondet export` and `nondet diff`: what is made of run files; and `nondet list`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from nondet.commands.output import PipedConsole, check_reports, check_verbosity, drop_stdout, put, say, write_reports
from nondet.core.operator import ANY, Family
from nondet.core.registry import PROBES, REPORTERS, classes, declared, operators
from nondet.core.runfile import check_free, read_run, replacing
from nondet.errors import UserError
from nondet.probes.models import PRESETS
from nondet.sampling.plan import PRESETS as LOADS
from nondet.services import options as o

if TYPE_CHECKING:
    import pandas as pd

    from nondet.core.records import Run
    from nondet.diff import RunDiff


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
    check_verbosity(verbose=verbose, quiet=quiet)
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


TABLES = (".csv", ".parquet", ".json")
_FIGURES = (".png", ".svg", ".pdf")
_FORMULA = ("=", "+", "-", "@", "\t", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")  # and the wide forms


def export(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run files.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Table (.csv, .parquet, .json) or figure (.png, .svg, .pdf) to write.")
    ],
    records: Annotated[
        str | None,
        typer.Option(
            "--records",
            help="Which records, for a table: rows, completions, cells, ...",
            show_default="the only kind there is",
        ),
    ] = None,
    figure: Annotated[
        str | None,
        typer.Option(
            "--figure",
            help="Which figure: class-map, speed, jigsaw, survival or tree.",
            show_default="the only one there is",
            autocompletion=o.choices("class-map", "speed", "jigsaw", "survival", "tree"),
        ),
    ] = None,
    section: Annotated[
        str | None,
        typer.Option("--section", help="Of a bench run, this section alone: matmul, ...", show_default="all"),
    ] = None,
    probe: Annotated[
        str | None,
        typer.Option(
            "--probe",
            help="Of a probe run, this probe's rows alone: matmul, ...",
            show_default="all",
            autocompletion=o.probes,
        ),
    ] = None,
    case: Annotated[
        str | None,
        typer.Option("--case", help="The rows whose case has this in its name.", show_default="all"),
    ] = None,
    force: o.FORCE = False,
    allow_truncated: Annotated[
        bool, typer.Option("--allow-truncated", help="Read a run that was killed, without its cut-off line.")
    ] = False,
) -> None:
    """Write the records of runs as a table, or draw a figure to publish."""
    run(
        run_files(runs),
        out,
        records=records,
        figure=figure,
        section=section,
        probe=probe,
        case=case,
        force=force,
        allow_truncated=allow_truncated,
    )


def run(
    paths: list[Path],
    out: Path,
    *,
    records: str | None,
    figure: str | None,
    section: str | None = None,
    probe: str | None = None,
    case: str | None = None,
    force: bool,
    allow_truncated: bool,
) -> None:
    """Write one table or one figure of these runs.

    Args:
        records: Kind of records for a table; None where the runs hold one kind only.
        section: Of a bench run, this section's cells alone.
        probe: Of a probe run, this probe's rows alone.
        case: The rows whose case has this in its name.
        figure: Name of the figure; None where there is one that these runs have anything for.

    Raises:
        UserError: an unreadable run, an unknown suffix, kind or figure, a file that exists, or nothing to write.
    """
    if out.suffix not in (*TABLES, *_FIGURES):
        raise UserError(
            f"--out {str(out)!r} has a suffix that is not known", f"Known: {', '.join((*TABLES, *_FIGURES))}."
        )
    check_free(out, force=force, hint="Use --force to overwrite it, or another --out.")
    runs = [read_run(path, allow_truncated=allow_truncated) for path in paths]
    if section is not None:
        _check_named("section", section, (cell.section for run in runs for cell in run.cells))
        for run in runs:
            run.cells = [cell for cell in run.cells if cell.section == section]
    if probe is not None:
        _check_named("probe", probe, (row.probe for run in runs for row in run.rows))
        for run in runs:
            run.rows = [row for row in run.rows if row.probe == probe]
    if case is not None:
        if not any(case in row.case for run in runs for row in run.rows):
            raise UserError(f"no case of these runs has {case!r} in its name", "See `nondet report RUN -v`.")
        for run in runs:
            run.rows = [row for row in run.rows if case in row.case]
    with replacing(out, "Choose another --out.") as scratch:
        if out.suffix in TABLES:
            if figure is not None:
                raise UserError(f"--figure {figure} and a table", f"Give --out one of {', '.join(_FIGURES)}.")
            from nondet.export.frames import frame, only_kind

            what = records or only_kind(runs)
            table = frame(runs, what)
            _write(table, scratch)
            text = f"{len(table)} {what}"
        else:
            from nondet.export.figures import draw, figures_of, save

            names = figures_of(runs)
            if figure is None and len(names) != 1:
                choice = f"Name one with --figure: {', '.join(names)}." if names else "Nothing here can be drawn."
                raise UserError(f"these runs have {len(names)} figures", choice)
            text = figure or names[0]
            save(draw(text, runs), scratch)
    say(f"{text}: {out}")


def _check_named(option: str, name: str, there: Iterable[str]) -> None:
    """Refuse a part that these runs don't have.

    Raises:
        UserError: as said, with those that they have.
    """
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
    from nondet.diff import diff_runs
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
    from nondet.core.compare import first_difference
    from nondet.core.traces import read_traces

    wanted = {i: c.commonest for i, c in enumerate(difference.completions) if c.with_logprobs and c.commonest}
    if not wanted:
        return {}
    try:
        mine, theirs = (read_traces(Path(run.source))[0] for run in (a, b))
    except UserError as error:
        say(f"nondet: where completions part is not said: {error}")
        return {}
    pairs = {i: (mine.get(first), theirs.get(second)) for i, (first, second) in wanted.items()}
    return {i: first_difference(x, y) for i, (x, y) in pairs.items() if x is not None and y is not None}


def _families() -> list[Family]:
    """What `batch_invariant` can replace by itself."""
    return list(dict.fromkeys(o.family for o in declared().values() if o.family is not None))


def list_registries(as_json: o.JSON = False) -> None:
    """List probes, implementations, classes, loads, families, presets of shapes, and reports."""
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
    probes = Table("probe", "what it asks", title="nondet probe NAME", title_justify="left")
    for name, (_, text) in PROBES.items():
        probes.add_row(name, text)
    probes.add_row("all", "every probe above")
    console.print(probes)
    by_operator = Table("operator", "implementation", "runs on", title="--impl", title_justify="left")
    for operator, declaration in operators().items():
        by_operator.add_row(operator, "reference", "any device")
        for implementation in declaration.implementations:
            targets = implementation.targets
            by_operator.add_row("", implementation.name, "any device" if ANY in targets else ", ".join(sorted(targets)))
    console.print(by_operator)
    by_class = Table("class", "device", "operators", "members", title="nondet certify --class", title_justify="left")
    for found in classes().values():
        names = dict.fromkeys(name for members in found.members.values() for name in members)
        by_class.add_row(found.name, found.device, ", ".join(found.members), ", ".join(names))
    console.print(by_class)
    loads = Table("load", "what it is", title="nondet sample --load", title_justify="left")
    for name, load in LOADS.items():
        others = f"{load.others} others beside" if load.others else "nobody beside, one request a step:"
        loads.add_row(name, f"{others} {load.targets} requests a round, budget {load.budget} tokens a step")
    console.print(loads)
    by_family = Table("family", "what it replaces", title="nondet sample --impl invariant:FAMILY", title_justify="left")
    for family in _families():
        by_family.add_row(family.name, family.text)
    console.print(by_family)
    console.print("nondet probe --preset: " + ", ".join(PRESETS), highlight=False)
    reports = Table("nondet report --out", "what it writes", title_justify="left")
    for suffix, (_, text) in REPORTERS.items():
        reports.add_row(suffix, text)
    console.print(reports)
