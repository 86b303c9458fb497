"""Runs to one HTML page: self-contained, nothing fetched, no script, readable without one.

Three walls keep untrusted text (completions, prompts, kernel and file names) from acting: Jinja's autoescape,
`printable` on everything that is printed, and a content security policy that allows one style sheet, by its hash, and
nothing else.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from nondet.core.records import Run
from nondet.errors import printable
from nondet.reports import bench_text, classmap, draw_bench, draw_classes, draw_samples, figures, overall_text
from nondet.reports.axes_text import axes_bars
from nondet.reports.content import Report, build
from nondet.reports.first_screen import first_screen
from nondet.reports.html_data import COMPLETIONS_MOST, embedded_json, page_data
from nondet.reports.kinds import kind_of
from nondet.sampling.analysis import DEFINITION, HOST_NOTE
from nondet.verdict.findings import plural, subject_name

__all__ = ["embedded_json", "render", "render_page", "render_report"]

_TEMPLATES = Path(__file__).resolve().parent / "templates"
# Characters of a page: the data in it takes the room that the rest leaves.
_PAGE_MOST = 1_400_000
_DATA, _CUT = "@@data@@", "@@cut@@"


def render(runs: list[Run]) -> str:
    """The page.

    Raises:
        UserError: a sampled run's side file is missing or malformed.
    """
    return render_report(build(runs))


def render_report(report: Report) -> str:
    """The page of what was gathered already."""
    style = (_TEMPLATES / "style.css").read_text(encoding="utf-8")
    script = (_TEMPLATES / "page.js").read_text(encoding="utf-8")
    page = (
        _environment()
        .get_template("report.html.j2")
        .render(
            report=report,
            style=Markup(style),  # noqa: S704 - our own file
            script=Markup(script),  # noqa: S704 - our own file
            style_hash=Markup(_hash(style)),  # noqa: S704 - base64
            script_hash=Markup(_hash(script)),  # noqa: S704 - base64
            screen=first_screen(report),
            data_place=_DATA,
            cut_place=_CUT,
        )
    )
    # the last of each is the template's own: nothing of a run comes after them
    page, _, script_end = page.rpartition(_DATA)
    body, _, end = page.rpartition(_CUT)
    data, cut = page_data(report, _PAGE_MOST - len(page))
    return "".join((body, cut, end, data, script_end))


def render_page(template: str, **values: Any) -> str:
    """A page of its own, with the style of all and without a script."""
    style = (_TEMPLATES / "style.css").read_text(encoding="utf-8")
    marked = {"style": Markup(style), "style_hash": Markup(_hash(style))}  # noqa: S704 - our own file, and base64
    return _environment().get_template(template).render(**marked, **values)


def _hash(text: str) -> str:
    """As a policy names what it allows."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _coded(text: str) -> Markup:
    """Text with what stands between backticks set as code; everything of it is escaped."""
    parts = printable(text).split("`")
    if len(parts) % 2 == 0:  # one that has no partner
        return Markup("{}").format(printable(text))
    pieces = (Markup("<code>{}</code>" if i % 2 else "{}").format(part) for i, part in enumerate(parts))  # noqa: S704
    return Markup("").join(pieces)


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    environment.globals.update(completions_most=COMPLETIONS_MOST, speed_definition=DEFINITION, host_note=HOST_NOTE)
    environment.filters.update(
        apart_text=figures.apart_text,
        axes_bars=axes_bars,
        bench_figure=draw_bench.bench_figure,
        bench_rows=bench_text.table_rows,
        bits_text=bench_text.bits_text,
        branch_views=draw_samples.branch_views,
        classes=classmap.classes,
        coded=_coded,
        counted=figures.counted,
        curve_figure=draw_samples.curve_figure,
        environment_line=figures.environment_line,
        environment_rows=figures.environment_rows,
        error_span=figures.error_span,
        extras=figures.extras,
        first_mismatch=figures.first_mismatch,
        kind_of=kind_of,
        limits_text=bench_text.limits_text,
        time_unit=bench_text.time_unit,
        letter=classmap.letter,
        map_figures=draw_classes.map_figures,
        means_text=bench_text.means_text,
        method_text=bench_text.method_text,
        number=figures.number,
        overall_table=overall_text.overall_table,
        comparison_lines=overall_text.comparison_lines,
        prompt_table=overall_text.prompt_table,
        subject_name=subject_name,
        plural=plural,
        rate=figures.rate,
        run_rate=figures.run_rate,
        sample_table=figures.sample_table,
        sentence=figures.sentence,
        shape_text=figures.shape_text,
        short_kernel=classmap.short_kernel,
        size_bar=draw_classes.size_bar,
        summary_text=bench_text.summary_text,
        token=figures.token,
        tree_figure=draw_samples.tree_figure,
        visible=figures.visible,
    )
    return environment


def _finalize(value: Any) -> Any:
    """What is printed without being markup of ours is made printable first; escaping follows."""
    return value if isinstance(value, Markup) else printable(str(value))
