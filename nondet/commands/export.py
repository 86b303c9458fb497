"""`nondet export`: records as a table (CSV, Parquet, JSON), or a figure (PNG, SVG, PDF)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nondet.commands import completion
from nondet.commands import options as o
from nondet.commands.common import say
from nondet.commands.report import run_files
from nondet.core.runfile import check_free, read_run, replacing
from nondet.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["TABLES", "export", "run"]

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
            autocompletion=completion.probes,
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
