"""Runs to one HTML page: self-contained, nothing fetched, no script, readable without one; its data folded in it.

Three walls keep untrusted text (completions, prompts, kernel and file names) from acting: Jinja's autoescape,
`printable` on everything that is printed, and a content security policy that allows one style sheet, by its hash, and
nothing else.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from nondet.core.records import Role, Row, Run, role_of
from nondet.errors import printable
from nondet.reports import classes, document
from nondet.reports import text as figures
from nondet.reports.content import Report, RunSection, build, run_blocks, speed_blocks
from nondet.reports.first_screen import first_screen
from nondet.reports.samples import COMPLETIONS_MOST
from nondet.sampling.analysis import PromptSet, SampleSummary, TreeNode, coverage_rows
from nondet.verdict.findings import plural

_JSON_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
_DATA_LEAST = 30_000
_CUTS = (
    "launch notes", "completions", "single times", "full kernel names", "classes of single values",
    "rows without a difference",
)  # fmt: skip


def page_data(report: Report, most: int) -> tuple[str, str]:
    """The JSON, and what had to be left out of it, for people; "" where nothing was.

    Args:
        most: Characters; data below `_DATA_LEAST` is never cut.

    Left out, one after the other, until the rest fits: launchers' notes, completions and forks, single times, the
    kernels' full names, the classes of single values, rows without a difference.
    """
    runs = [_run_data(section) for section in report.runs]
    text = embedded_json(runs)
    cuts = []
    for name in _CUTS:
        if len(text) <= max(most, _DATA_LEAST):
            break
        for run in runs:
            _cut(run, name)
            run["left_out"] = [*run.get("left_out", []), name]
        cuts.append(name)
        text = embedded_json(runs)
    return text, f", without {', '.join(cuts)}: those are in the run files" if cuts else ""


def embedded_json(data: Any) -> str:
    """JSON that can't leave a script element: no <, >, &, and nothing but ASCII."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    for char, escape in _JSON_ESCAPES.items():
        text = text.replace(char, escape)
    return text


def _cut(run: dict[str, Any], what: str) -> None:
    """Leave that out of a run's data."""
    rows, timed = run["rows"], [t for cell in run["cells"] for t in cell["timed"]]
    if what == "launch notes":
        for record in (*rows, *timed):
            record.pop("ran", None)
    elif what == "completions":
        for sample in run["samples"]:
            sample["forks"], sample["completions"] = sample["forks"][:1], []
    elif what == "single times":
        for record in (*run["limits"], *timed):
            record["samples_us"] = []
    elif what == "full kernel names":
        run["kernel_names"] = [classes.short_kernel(name) for name in run["kernel_names"]]
        for record in timed:
            record["kernels"] = [classes.short_kernel(name) for name in record["kernels"]]
    elif what == "classes of single values":
        for row in rows:
            row.pop("segments", None)
            row.pop("kernel_sets", None)
    else:
        run["rows"] = [row for row in rows if row.get("distinct", 0) > 1]


def _run_data(section: RunSection) -> dict[str, Any]:
    """What a program needs to check the page: verdicts, environment, rows in run-length form, counts of completions."""
    names: dict[str, int] = {}
    rows = [_row_data(r, names) for r in section.run.rows]
    return {
        "name": section.name,
        "headline": section.headline,
        "complete": section.run.complete,
        "header": msgspec.to_builtins(section.run.header),
        "verdicts": [msgspec.to_builtins(v) | {"finding": v.finding, "others": v.findings[1:]} for v in section.told],
        "problems": msgspec.to_builtins(section.problems),
        "rows": rows,
        "kernel_names": list(names),
        "limits": msgspec.to_builtins(section.run.limits),
        "cells": msgspec.to_builtins(section.run.cells),
        "trace": msgspec.to_builtins(_traced(section.run)),
        **({"mismatch": msgspec.to_builtins(_sides(section.run))} if section.mismatch else {}),
        **({"training": msgspec.to_builtins(section.run.training_steps)} if section.training else {}),
        "coverage": coverage_rows(section.run),
        **_served_data(section.run),
        "overall": [_overall_data(o) for o in (section.sampled.overall if section.sampled else ())],
        "samples": [_sample_data(s) for p in (section.sampled.shown if section.sampled else ()) for s in p.summaries],
    }


def _served_data(run: Run) -> dict[str, Any]:
    """Servers, contract and rounds of an endpoint run: what they were meant to be, and what shows that they were."""
    if not run.servers:
        return {}
    kept = ("impl", "arm", "round", "targets", "others", "tokens", "seconds", "traffic")
    rounds = [msgspec.to_builtins(r) for r in run.rounds if r.traffic is not None]
    return {
        "servers": msgspec.to_builtins(run.servers),
        "contract": msgspec.to_builtins(run.contract),
        "rounds": [{key: data[key] for key in kept} for data in rounds],
    }


def _traced(run: Run) -> list[Any]:
    """The records of a trace and of replays."""
    kinds = (run.steps, run.axes, run.diagnoses, run.controls, run.culprits, run.substitutions, run.trace_verdicts)
    return [record for kind in (*kinds, run.replayed) for record in kind]


def _sides(run: Run) -> list[Any]:
    """The records of a sampler and a trainer, but for the tokens themselves, which the run file has."""
    kinds = (run.mismatch_floors, run.mismatch_kinds, run.mismatch_effects, run.mismatch_costs)
    return [record for kind in kinds for record in kind]


def _row_data(row: Row, names: dict[str, int]) -> dict[str, Any]:
    """A row with values, labels and kernels folded into segments, and kernels by their number in the run's list.

    Empty fields are left out. A segment is [class, first index, last index + 1, kernel set]; 4,096 lists of kernel
    names would be megabytes.
    """
    data: dict[str, Any] = msgspec.to_builtins(row)
    for key in ("labels", "kernels"):
        del data[key]
    data["values"] = row.values if len(row.values) <= 64 else [row.values[0], "...", row.values[-1]]
    data["segments"] = [[s.label, s.start, s.stop, s.kernels] for s in classes.segments(row)]
    data["kernel_sets"] = [[names.setdefault(k, len(names)) for k in kernels] for kernels in row.kernel_sets]
    return {key: value for key, value in data.items() if value not in ("", None, [], {})}


def _overall_data(o: PromptSet) -> dict[str, Any]:
    """The figures over all prompts, without the prompts' own."""
    data: dict[str, Any] = msgspec.to_builtins(replace(o, summaries={}))
    del data["summaries"]
    return data | {"prompts": o.prompts, "effect": o.effect if math.isfinite(o.effect) else None}


def _sample_data(summary: SampleSummary) -> dict[str, Any]:
    """A summary without pieces and tree, which follow from texts and token ids, and without the rarest completions."""
    # cut before it is converted: a tree may nest deeper than Python recurses, and the rare completions are the many
    cut = replace(summary, tree=TreeNode(0, 0, 0, ""), completions=summary.completions[:COMPLETIONS_MOST])
    data: dict[str, Any] = msgspec.to_builtins(cut)
    del data["held_rounds"]  # one number a round; the bound that rests on it is there
    del data["tree"]
    for completion in data["completions"]:
        del completion["pieces"]
    return data


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
    page = render_page(
        "report.html.j2",
        report=report,
        screen=first_screen(report),
        parts=[run_blocks(report, number) for number in range(1, len(report.runs) + 1)],
        speeds=speed_blocks(report),
        data_place=_DATA,
        cut_place=_CUT,
    )
    # the last of each is the template's own: nothing of a run comes after them
    page, _, script_end = page.rpartition(_DATA)
    body, _, end = page.rpartition(_CUT)
    data, cut = page_data(report, _PAGE_MOST - len(page))
    return "".join((body, cut, end, data, script_end))


def render_page(template: str, **values: Any) -> str:
    """A page of a template, with the style of all; the script is there for one that asks for it."""
    for name, file in (("style", "style.css"), ("script", "page.js")):
        text = (_TEMPLATES / file).read_text(encoding="utf-8")
        values |= {name: Markup(text), f"{name}_hash": Markup(_hash(text))}  # noqa: S704 - our own file, and base64
    return _environment().get_template(template).render(**values)


def _hash(text: str) -> str:
    """As a policy names what it allows."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _hue(impl: str, index: int = 0) -> int:
    """The number of an implementation's colour: orange is stock's in every chart, and blue is invariant's."""
    role = Role.STOCK if impl == "best stock" else role_of(impl)
    return {Role.STOCK: 0, Role.BACKEND: 0, Role.INVARIANT: 1}.get(role, 2 + index % 2)


def tint(label: int, row: Row | None = None) -> str:
    """The colour of a class: its own; of a row's only one that of its implementation."""
    return f"c{label % 8}" if row is None or row.distinct > 1 else f"r{_hue(row.impl)}"


@functools.cache  # with its compiled templates
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    environment.globals.update(completions_most=COMPLETIONS_MOST, kinds=classes.KINDS.values())
    named = (
        document.bits, document.contents, document.plain, figures.apart_text, classes.classes,
        classes.kind_of, classes.letter, classes.map_figures, classes.short_kernel, classes.size_bar, figures.counted,
        figures.extras, figures.run_rate, figures.sentence, figures.shape_text, figures.token,
        figures.visible, plural, tint,
    )  # fmt: skip
    environment.filters.update({function.__name__: function for function in named})
    environment.filters.update(hue=_hue, shown=lambda blocks: document.shown(blocks, document.PAGE))
    return environment


def _finalize(value: Any) -> Any:
    """What is printed without being markup of ours is made printable first; escaping follows."""
    return value if isinstance(value, Markup) else printable(str(value))
