"""Records as pandas data frames: one line per comparison, value of a sweep, completion, or timed implementation.

Names of columns carry their units (`_us`, `_ulp`). Every line names its run and machine, so that frames of several runs
can be joined. Nothing is rounded, and missing values stay NA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import pandas as pd

from nondet.bench.summary import compare
from nondet.core.records import AxisValue, Cell, Completion, Round, Run, Timed, TrainingStep
from nondet.errors import UnknownNameError, UserError

__all__ = ["KINDS", "frame", "kinds_of", "only_kind"]

Lines = Iterator[dict[str, Any]]  # one for each record, or comparison, value or timed implementation

_MACHINE = ("gpu", "cpu", "num_threads", "torch", "triton", "transformers", "driver", "commit")


def frame(runs: Sequence[Run], kind: str) -> pd.DataFrame:
    """The records of one kind (a key of `KINDS`), of all runs together: one line per record; empty (with its columns)
    where the runs hold none. Raises UnknownNameError: no such kind."""
    if kind not in KINDS:
        raise UnknownNameError("kind of records", kind, KINDS)
    columns, lines_of = KINDS[kind]
    lines = []
    for run in runs:
        machine = {key: run.header.environment.get(key) for key in _MACHINE}
        machine |= {"run": run.source, "command": run.header.command, "started": run.header.started}
        lines += [machine | line for line in lines_of(run)]
    return pd.DataFrame(lines, columns=["run", "command", "started", *_MACHINE, *columns])


def kinds_of(runs: Sequence[Run]) -> list[str]:
    """The kinds that these runs hold a record of."""
    return [kind for kind, (_, lines_of) in KINDS.items() if any(any(lines_of(run)) for run in runs)]


def only_kind(runs: Sequence[Run]) -> str:
    """The kind to export where none was named: of runs of `nondet sample` completions, else the only kind. Raises
    UserError: the runs hold nothing, or records of several kinds side by side."""
    kinds = [kind for kind in kinds_of(runs) if kind != "classes"]  # those are rows again, value by value
    if len(kinds) == 1:
        return kinds[0]
    if "completions" in kinds and {run.header.command for run in runs} == {"sample"}:
        return "completions"
    if not kinds:
        raise UserError("these runs hold no records", "Repeat their commands with --resume.")
    raise UserError(f"these runs hold {', '.join(kinds)}", "Name one with --records.")


def _sizes(shape: dict[str, int]) -> dict[str, Any]:
    named = " ".join(f"{axis}={size}" for axis, size in shape.items())
    return {"shape": named, **{axis: shape.get(axis) for axis in "MNK"}}


def _fields(record: type[msgspec.Struct], *left_out: str) -> tuple[str, ...]:
    """The fields of a record that hold one value each."""
    return tuple(name for name in record.__struct_fields__ if name not in left_out)


def _plain(record: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names if hasattr(record, name)}


_ERROR = ("max_abs", "relative_norm", "max_ulp")
_ROW = ("probe", "case", "operator", "impl", "dtype", "device", "inputs", "varied", "status", "shape", "M", "N", "K")
_COUNTS = ("trials", "distinct", "replays", "replays_parted", "elements_compared", "elements_differing")
_ERRORS = [f"{prefix}_{name}" for prefix in ("error", "worst_error") for name in _ERROR]
_ROW_FIGURES = (*_COUNTS, "max_abs", "max_ulp", "nonfinite", *_ERRORS, "ran", "reason", "seconds")


def _rows(run: Run) -> Lines:
    for row in run.rows:
        line = _plain(row, (*_ROW, *_ROW_FIGURES)) | _sizes(row.shape) | {"ran": "; ".join(row.ran)}
        if row.difference is not None:
            line |= _plain(row.difference, ("max_abs", "max_ulp", "nonfinite"))
            line |= {"elements_compared": row.difference.compared, "elements_differing": row.difference.mismatched}
        for prefix, error in (("error", row.error), ("worst_error", row.worst_error)):
            line |= {f"{prefix}_{name}": value for name, value in _plain(error, _ERROR).items()}
        yield line


def _classes(run: Run) -> Lines:
    for row in run.rows:
        shared = _plain(row, _ROW) | _sizes(row.shape)
        for i, (value, label) in enumerate(zip(row.values, row.labels, strict=False)):
            kernels = row.kernel_sets[row.kernels[i]] if row.kernels else []
            yield {**shared, "value": value, "label": label, "kernels": " + ".join(kernels)}


_COMPLETION = _fields(Completion, "schedule", "served")
# Columns of a server's answers; `text` is a digest, as the others are.
_SERVED = ("prompt_tokens", "cached_tokens", "completion_tokens", "attempts", "in_flight", "text")
_COMPLETION_FIGURES = ("seed", "first_token_s", "answer_s", *_SERVED)


def _completions(run: Run) -> Lines:
    """`arm` is a server's arm, or the value of a varied axis."""
    prompts = run.header.plan.get("prompts", [])
    for completion in run.completions:
        line = _plain(completion, _COMPLETION)
        if completion.prompt < len(prompts):
            line["seed"] = prompts[completion.prompt].get("seed")
        served = completion.served
        if served is not None:
            line |= _plain(served, _SERVED)
            line["answer_s"] = served.done - served.sent if completion.status == "ok" else None
            line["first_token_s"] = None if served.first is None else served.first - served.sent
        yield line


_CELL = _fields(Cell, "shape", "timed", "seconds")
_TIMED = _fields(Timed, "samples_us", "ran", "kernels")
_RATIO = ("stock_over_impl", "stock_over_impl_low", "stock_over_impl_high")
_CELL_FIGURES = ("shape", "M", "N", "K", *_TIMED, *_RATIO)


def _cells(run: Run) -> Lines:
    """`stock_over_impl` above 1 is faster than the best stock one of that case."""
    for cell in run.cells:
        shared = _plain(cell, _CELL) | _sizes(cell.shape)
        for comparison in compare(cell):
            line = shared | _plain(comparison.timed, _TIMED)
            if comparison.ratio is not None:
                line |= dict(zip(_RATIO, (comparison.ratio, *comparison.interval), strict=True))
            yield line


_ROUND = _fields(Round, "background", "ran", "traffic", "figures")
_AXIS = _fields(AxisValue)
_STEP = _fields(TrainingStep, "ran")


def _as_they_are(records: str, names: Sequence[str], run: Run) -> Lines:
    return (_plain(record, names) for record in getattr(run, records))


# kind -> (columns besides the machine's, the lines of one run)
KINDS: dict[str, tuple[tuple[str, ...], Callable[[Run], Lines]]] = {
    "rows": ((*_ROW, *_ROW_FIGURES), _rows),
    "classes": ((*_ROW, "value", "label", "kernels"), _classes),
    "completions": ((*_COMPLETION, *_COMPLETION_FIGURES), _completions),
    "rounds": (_ROUND, partial(_as_they_are, "rounds", _ROUND)),
    # whether a value of an axis took effect, and the arm that its completions are under
    "axis-values": (_AXIS, partial(_as_they_are, "axis_values", _AXIS)),
    "training-steps": (_STEP, partial(_as_they_are, "training_steps", _STEP)),
    "cells": ((*_CELL, *_CELL_FIGURES), _cells),
}
