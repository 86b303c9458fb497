"""The data in a page: what a program needs to check it, folded, and bounded in size."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec

from nondet.core.records import Record, Round, Row, Run
from nondet.reports import classmap
from nondet.reports.content import Report, RunSection
from nondet.sampling.analysis import Overall, SampleSummary, TreeNode

__all__ = ["COMPLETIONS_MOST", "embedded_json", "page_data"]

# Distinct completions on a page, the commonest ones; the others are in the run's side file.
COMPLETIONS_MOST = 100
_JSON_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
_DATA_LEAST = 30_000


def page_data(report: Report, most: int) -> tuple[str, str]:
    """The JSON, and what had to be left out of it, for people; "" where nothing was.

    Args:
        most: Characters; data below `_DATA_LEAST` is never cut.

    Left out, one after the other, until the rest fits: launchers' notes, completions and forks, single times, the
    kernels' full names, the classes of single values, rows in which nothing parted.
    """
    runs = [_run_data(section) for section in report.runs]
    text = embedded_json(runs)
    cuts = []
    for name, cut in _CUTS:
        if len(text) <= max(most, _DATA_LEAST):
            break
        for run in runs:
            cut(run)
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


def _without_completions(run: dict[str, Any]) -> None:
    for sample in run["samples"]:
        sample["forks"], sample["completions"] = sample["forks"][:1], []


def _without_samples(run: dict[str, Any]) -> None:
    for timed in [*run["limits"], *(t for cell in run["cells"] for t in cell["timed"])]:
        timed["samples_us"] = []


def _without_names(run: dict[str, Any]) -> None:
    run["kernel_names"] = [classmap.short_kernel(name) for name in run["kernel_names"]]
    for timed in (t for cell in run["cells"] for t in cell["timed"]):
        timed["kernels"] = [classmap.short_kernel(name) for name in timed["kernels"]]


def _without_segments(run: dict[str, Any]) -> None:
    for row in run["rows"]:
        row.pop("segments", None)
        row.pop("kernel_sets", None)


def _without_rows(run: dict[str, Any]) -> None:
    run["rows"] = [row for row in run["rows"] if row.get("distinct", 0) > 1]


def _without_notes(run: dict[str, Any]) -> None:
    for row in run["rows"]:
        row.pop("ran", None)
    for timed in (t for cell in run["cells"] for t in cell["timed"]):
        timed["ran"] = []


_CUTS = (
    ("launch notes", _without_notes),
    ("completions", _without_completions),
    ("single times", _without_samples),
    ("full kernel names", _without_names),
    ("classes of single values", _without_segments),
    ("rows in which nothing parted", _without_rows),
)


def _run_data(section: RunSection) -> dict[str, Any]:
    """What a program needs to check the page: verdicts, environment, rows in run-length form, counts of completions."""
    names: dict[str, int] = {}
    rows = [_row_data(r, names) for r in section.run.rows]
    return {
        "name": section.name,
        "headline": section.headline,
        "complete": section.run.complete,
        "header": msgspec.to_builtins(section.run.header),
        "verdicts": msgspec.to_builtins(section.told),
        "problems": msgspec.to_builtins(section.problems),
        "rows": rows,
        "kernel_names": list(names),
        "limits": msgspec.to_builtins(section.run.limits),
        "cells": msgspec.to_builtins(section.run.cells),
        "trace": [msgspec.to_builtins(r) for r in _traced(section.run)],
        "coverage": section.coverage,
        **_served_data(section.run),
        "overall": [_overall_data(o) for o in section.overall],
        "samples": [_sample_data(s) for sample in section.shown for s in sample.summaries],
    }


def _served_data(run: Run) -> dict[str, Any]:
    """Servers, contract and rounds of an endpoint run; nothing of others."""
    if not run.servers:
        return {}
    return {
        "servers": msgspec.to_builtins(run.servers),
        "contract": msgspec.to_builtins(run.contract),
        "rounds": [_round_data(r) for r in run.rounds if r.traffic is not None],
    }


def _round_data(record: Round) -> dict[str, Any]:
    """A server's round: what it was meant to be, and what shows that it was."""
    data: dict[str, Any] = msgspec.to_builtins(record)
    return {key: data[key] for key in ("impl", "arm", "round", "targets", "others", "tokens", "seconds", "traffic")}


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


def _row_data(row: Row, names: dict[str, int]) -> dict[str, Any]:
    """A row with values, labels and kernels folded into segments, and kernels by their number in the run's list.

    Empty fields are left out. A segment is [class, first index, last index + 1, kernel set]; 4,096 lists of kernel
    names would be megabytes.
    """
    data: dict[str, Any] = msgspec.to_builtins(row)
    for key in ("labels", "kernels"):
        del data[key]
    data["values"] = row.values if len(row.values) <= 64 else [row.values[0], "...", row.values[-1]]
    data["segments"] = [[s.label, s.start, s.stop, s.kernels] for s in classmap.segments(row)]
    data["kernel_sets"] = [[names.setdefault(k, len(names)) for k in kernels] for kernels in row.kernel_sets]
    return {key: value for key, value in data.items() if value not in ("", None, [], {})}


def _overall_data(o: Overall) -> dict[str, Any]:
    """The figures over all prompts, without the prompts' own."""
    data: dict[str, Any] = msgspec.to_builtins(replace(o, summaries={}))
    del data["summaries"]
    return data | {"prompts": o.prompts}


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
