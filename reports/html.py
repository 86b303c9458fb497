"""Runs to one HTML page: self-contained, nothing fetched, no script, readable without one.

Three walls keep untrusted text (completions, prompts, kernel and file names) from acting: Jinja's autoescape,
`printable` on everything that is printed, and a content security policy that allows one style sheet, by its hash, and
nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from nondet.reports import bench_text, classmap, draw_bench, draw_classes, draw_samples, figures
from nondet.reports.content import Report, RunSection, build
from nondet.result import Record, Row, Run
from nondet.sampling.summary import SampleSummary, TreeNode
from nondet.text import printable
from nondet.verdict import plural

__all__ = ["render", "render_report"]

_TEMPLATES = Path(__file__).resolve().parent / "templates"
# Distinct completions on a page, the commonest ones; the others are in the run's side file.
COMPLETIONS_MOST = 100
_JSON_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def render(runs: list[Run]) -> str:
    """The page.

    Raises:
        UserError: a sampled run's side file is missing or malformed.
    """
    return render_report(build(runs))


def render_report(report: Report) -> str:
    """The page of what was gathered already."""
    style = (_TEMPLATES / "style.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            report=report,
            style=Markup(style),  # noqa: S704 - our own file
            style_hash=Markup(f"sha256-{digest}"),  # noqa: S704 - base64
            data=Markup(embedded_json([_run_data(r) for r in report.runs])),  # noqa: S704 - escaped for a script element
        )
    )


def embedded_json(data: Any) -> str:
    """JSON that can't leave a script element: no <, >, &, and nothing but ASCII."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    for char, escape in _JSON_ESCAPES.items():
        text = text.replace(char, escape)
    return text


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    environment.globals["completions_most"] = COMPLETIONS_MOST
    environment.filters.update(
        bench_figure=draw_bench.bench_figure,
        bench_rows=bench_text.table_rows,
        bits_text=bench_text.bits_text,
        branch_views=draw_samples.branch_views,
        classes=classmap.classes,
        counted=figures.counted,
        curve_figure=draw_samples.curve_figure,
        difference_text=figures.difference_text,
        environment_line=figures.environment_line,
        environment_rows=figures.environment_rows,
        error_span=figures.error_span,
        extras=figures.extras,
        first_mismatch=figures.first_mismatch,
        kernel_sets=classmap.kernel_sets,
        limits_text=bench_text.limits_text,
        letter=classmap.letter,
        map_figures=draw_classes.map_figures,
        method_text=bench_text.method_text,
        number=figures.number,
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


def _run_data(section: RunSection) -> dict[str, Any]:
    """What a program needs to check the page: verdicts, environment, rows in run-length form, counts of completions."""
    return {
        "name": section.name,
        "headline": section.headline,
        "complete": section.run.complete,
        "header": msgspec.to_builtins(section.run.header),
        "verdicts": msgspec.to_builtins(section.verdicts),
        "problems": msgspec.to_builtins(section.problems),
        "rows": [_row_data(r) for r in section.run.rows],
        "limits": msgspec.to_builtins(section.run.limits),
        "cells": msgspec.to_builtins(section.run.cells),
        "trace": [msgspec.to_builtins(r) for r in _traced(section.run)],
        "samples": [_sample_data(s) for sample in section.samples for s in sample.summaries],
    }


def _traced(run: Run) -> list[Record]:
    """The records of a trace and of replays."""
    return [
        *run.steps,
        *run.axes,
        *run.diagnoses,
        *run.controls,
        *run.culprits,
        *run.substitutions,
        *run.trace_verdicts,
        *run.replayed,
    ]


def _row_data(row: Row) -> dict[str, Any]:
    """A row with values, labels and kernels folded into segments: 4,096 lists of kernel names would be megabytes."""
    data: dict[str, Any] = msgspec.to_builtins(row)
    for key in ("values", "labels", "kernels"):
        del data[key]
    data["segments"] = msgspec.to_builtins(classmap.segments(row))
    data["kernel_sets"] = classmap.kernel_sets(row)
    return data


def _sample_data(summary: SampleSummary) -> dict[str, Any]:
    """A summary without pieces and tree, which follow from texts and token ids, and without the rarest completions."""
    # cut before it is converted: a tree may nest deeper than Python recurses, and the rare completions are the many
    cut = replace(summary, tree=TreeNode(0, 0, 0, ""), completions=summary.completions[:COMPLETIONS_MOST])
    data: dict[str, Any] = msgspec.to_builtins(cut)
    del data["tree"]
    for completion in data["completions"]:
        del completion["pieces"]
    return data
