"""Every planted fault of an operator, and what has to be said of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from nondet.core.records import Row
from nondet.probes import attention, pointwise
from nondet.probes.base import Options
from nondet.probes.runner import plan_jobs, run_jobs
from nondet.verdict.findings import Finding
from nondet.verdict.rows import judge_rows
from tests.faults import grammar
from tests.probes import toys
from tests.probes.toys import STATE, forget

__all__ = ["PLANTED", "Planted", "Told", "drawn", "judge"]

BATCH, RUN, WRONG, OTHER = Finding.BATCH, Finding.RUN_TO_RUN, Finding.WRONG, Finding.OTHER
_LINEAR = {"m": 33, "k": 96, "n": 8, "dtypes": ("float32",), "runs": 5}
_GROUPED = {"m": 33, "k": 96, "n": 8, "dtypes": ("float32",), "runs": 4}
_ROWS = {"m": 33, "k": 515, "dtypes": ("float32",)}
_HEADS = {"config": {"heads": 4, "kv_heads": 2, "head_dim": 8}, "dtypes": ("float32",)}
_FP8 = {"m": 80, "k": 512, "n": 24, "dtypes": ("float8_e4m3fn", "float32"), "runs": 3}
_JOINS = frozenset({"neighbour_length"})
_MET = frozenset({"batch_size", "neighbour_values", "run"})
_DECODE = frozenset({"batch_size", "neighbour_values", "history"})


@dataclass(frozen=True)
class Planted:
    """One implementation and what is right to say of it.

    Attributes:
        target: "module:function", or with "operator=" before it.
        finding: The findings of which one has to be said; none for a sound implementation.
        shown: What was varied in a case that has to show it; empty: any, or the result itself is wrong.
        options: Sizes, small enough for a kernel in Python.
        asked: What is varied in the cases that are run; None: all of the probe's.
    """

    probe: str
    target: str
    finding: frozenset[Finding]
    shown: str
    options: dict[str, Any] = field(repr=False)
    asked: frozenset[str] | None = None

    @property
    def name(self) -> str:
        """As the matrix lists it."""
        return f"{self.probe} {self.target.rpartition(':')[2]}"


@dataclass(frozen=True)
class Told:
    """What was said: the findings, what was varied in the cases that parted or were wrong, and what it took."""

    findings: tuple[Finding, ...]
    shown: tuple[str, ...]
    first: str
    cases: int
    seconds: float

    def right(self, planted: Planted) -> bool:
        """Whether the finding is one of those that are right, and nothing was said of what is sound."""
        faults = {f for f in self.findings if f.is_fault}
        if RUN in planted.finding and BATCH in faults - planted.finding:
            return False  # no batch is in what an earlier call decides
        return bool(faults & planted.finding) if planted.finding else not faults and self.cases > 0

    def caught(self, planted: Planted) -> bool:
        """Whether a fault was told, and by a case about its cause."""
        return bool(planted.finding) and self.right(planted) and self.cause(planted)

    def cause(self, planted: Planted) -> bool:
        """Whether a case about the cause showed it."""
        return not planted.shown or planted.shown in self.shown


def _linear(where: str, name: str, finding: set[Finding], shown: str = "", **options: Any) -> Planted:
    target = f"tests.{where}:{name}"
    return Planted("matmul", target, frozenset(finding), shown, _LINEAR | options)


def _toy(
    probe: str, name: str, finding: set[Finding], shown: str, options: dict[str, Any], asked: Any = None
) -> Planted:
    function = name.rpartition("=")[2]
    where = "tests.probes.toys" if hasattr(toys, function) else "tests.faults.implementations"
    operator = name.rpartition("=")[0]
    target = f"{operator}={where}:{function}" if operator else f"{where}:{function}"
    return Planted(probe, target, frozenset(finding), shown, options, asked)


_TOYS, _HERE = "probes.toys", "faults.implementations"
PLANTED: tuple[Planted, ...] = (
    _linear(_TOYS, "linear_splits_by_m", {BATCH}, "batch_size"),
    _linear(_TOYS, "linear_stream_k", {BATCH}, "position"),
    _linear(_TOYS, "linear_tail_rows", {BATCH}, "batch_size"),
    _linear(_HERE, "gemv_at_one_row", {BATCH}, "batch_size"),
    _linear(_HERE, "border_at_30_rows", {BATCH}, "batch_size"),
    _linear(_HERE, "order_of_one_column", {BATCH}, "batch_size"),
    _linear(_HERE, "bias_first_in_batches", {BATCH}, "batch_size"),
    _linear(_HERE, "three_dimensions", {BATCH}, "batch_size"),
    _linear(_TOYS, "linear_shared_scale", {BATCH, WRONG}, "neighbour_values"),
    _linear(_HERE, "mixes_rows_by_zeros", {BATCH, WRONG}, "neighbour_values"),
    _linear(_TOYS, "linear_by_address", {OTHER}, "alignment"),
    _linear(_TOYS, "linear_unsteady", {RUN}, "run"),
    _linear(_TOYS, "linear_every_fifth", {RUN}),
    _linear(_TOYS, "linear_rarely", {RUN}),
    _linear(_HERE, "first_call", {RUN}, "history"),
    _linear(_TOYS, "linear_tunes_itself", {RUN}, "history"),
    _linear(_TOYS, "linear_one_buffer", {RUN, WRONG}, "history"),
    _linear(_TOYS, "linear_remembers_weights", {RUN, WRONG}, "history"),
    _linear(_HERE, "remembers_results", {RUN, WRONG}, "history"),
    _linear(_HERE, "adds_to_old_memory", {RUN, WRONG}),  # a result that held NaN decides which case shows it
    _linear(_TOYS, "linear_writes", {WRONG}),
    _linear(_TOYS, "linear_zeros", {WRONG}),
    _linear(_TOYS, "linear_flipped", {WRONG}),
    _linear(_TOYS, "linear_lost_tail", {WRONG}, k=100),
    _linear(_TOYS, "linear_nan", {WRONG}),
    _linear(_TOYS, "linear_wide_result", {WRONG}, dtypes=("bfloat16",)),
    _linear(_TOYS, "linear_fewer_rows", {WRONG}),
    _linear(_HERE, "last_row_lost", {WRONG}),
    _linear(_HERE, "last_column_lost", {WRONG}),
    _linear(_HERE, "other_rows_weight", {WRONG}),
    _toy("grouped-matmul", "grouped_by_rows", {BATCH}, "routing", _GROUPED),
    _toy("grouped-matmul", "grouped_by_place", {BATCH}, "position", _GROUPED),
    _toy("grouped-matmul", "grouped_by_experts_in_use", {BATCH}, "routing", _GROUPED),
    _toy("grouped-matmul", "grouped_capacity", {BATCH, WRONG}, "routing", _GROUPED),
    _toy("grouped-matmul", "grouped_other_weight", {WRONG}, "", _GROUPED),
    _toy("rms-norm", "rms_norm_by_rows", {BATCH}, "batch_size", _ROWS),
    _toy("rms-norm", "rms_norm_by_place", {BATCH, WRONG}, "position", _ROWS),
    _toy("rms-norm", "rms_norm_shared_scale", {BATCH, WRONG}, "neighbour_values", _ROWS),
    _toy("rms-norm", "rms_norm_one_buffer", {RUN, WRONG}, "history", _ROWS),
    _toy("rms-norm", "rms_norm_without_weight", {WRONG}, "", _ROWS),
    _toy("softmax", "softmax_by_rows", {BATCH}, "batch_size", _ROWS),
    _toy("softmax", "softmax_shared_maximum", {BATCH, WRONG}, "neighbour_values", _ROWS),
    _toy("log-softmax", "log_softmax_by_rows", {BATCH}, "batch_size", _ROWS),
    _toy("reduction", "sum=sum_by_rows", {BATCH}, "batch_size", _ROWS),
    _toy("reduction", "mean=mean_by_rows", {BATCH}, "batch_size", _ROWS),
    _toy("reduction", "sum=sum_last_row", {BATCH}, "batch_size", _ROWS),
    _toy("reduction", "sum=sum_lost_tail", {WRONG}, "", _ROWS),
    _toy("attention", "attention_splits_by_batch", {BATCH}, "batch_size", _HEADS, _DECODE),
    _toy("attention", "attention_cache_apart", {BATCH}, "cache", _HEADS, frozenset({"cache", "batch_size"})),
    _toy("attention", "attention_tile_by_longest", {BATCH}, "neighbour_length", _HEADS, _JOINS),
    _toy("attention", "attention_ragged_tile", {BATCH}, "neighbour_length", _HEADS, _JOINS),
    _toy("attention", "attention_later_requests", {BATCH}, "batch_size", _HEADS, frozenset({"batch_size"})),
    _toy("attention", "attention_shared_maximum", {BATCH, WRONG}, "neighbour_values", _HEADS, _DECODE),
    _toy("attention", "attention_neighbours_nan", {BATCH, WRONG}, "neighbour_values", _HEADS, _DECODE),
    _toy("attention", "attention_first_call", {RUN, WRONG}, "history", _HEADS, _DECODE),
    _toy("attention", "attention_sees_the_future", {WRONG, BATCH}, "", _HEADS, frozenset({"prompt_length", "cache"})),
    _toy("attention", "attention_other_heads", {WRONG}, "", _HEADS, _DECODE),
    _toy("atomics", "index_add=index_add_atomic", {RUN}, "run", {"m": 256, "n": 4, "dtypes": ("float32",)}),
    _toy("atomics", "scatter_add=scatter_add_atomic", {RUN}, "run", {"m": 256, "dtypes": ("float32",)}),
    _toy("atomics", "index_add=index_add_loses_twins", {WRONG}, "", {"m": 256, "n": 4, "dtypes": ("float32",)}),
    Planted("pointwise", "tests.probes.toys:exp_with_a_tail", frozenset({OTHER}), "length", {"k": 256}),
    _toy("scaled-matmul", "scaled_matmul=fp8_promotes_sooner", {BATCH}, "batch_size", _FP8, _MET),
    _toy("scaled-matmul", "scaled_matmul=fp8_splits", {BATCH}, "batch_size", _FP8, _MET),
    _toy("scaled-matmul", "scaled_matmul=fp8_rescales", {BATCH, WRONG}, "neighbour_values", _FP8, _MET),
    _toy("scaled-matmul", "quantize=quantize_by_batch", {BATCH}, "neighbour_values", _FP8, _MET),
    # ---- sound
    _toy("scaled-matmul", "scaled_matmul=fp8_sound", set(), "", _FP8, _MET),
    _toy("scaled-matmul", "quantize=quantize_by_row", set(), "", _FP8, _MET),
    _linear(_TOYS, "linear_sound", set()),
    _linear(_TOYS, "linear_in_order", set()),
    _linear(_HERE, "padded_to_tiles", set()),
    _linear(_HERE, "pool_of_buffers", set()),
    _linear(_HERE, "packs_by_version", set()),
    _linear(_HERE, "tunes_its_speed", set()),
    _linear(_HERE, "other_order", set()),
    _toy("grouped-matmul", "grouped_sound", set(), "", _GROUPED),
    _toy("rms-norm", "rms_norm_sound", set(), "", _ROWS),
    _toy("softmax", "softmax_sound", set(), "", _ROWS),
    _toy("log-softmax", "log_softmax_sound", set(), "", _ROWS),
    _toy("reduction", "sum=sum_sound", set(), "", _ROWS),
    _toy("reduction", "sum=sum_in_sequence", set(), "", _ROWS),
    _toy("reduction", "mean=mean_sound", set(), "", _ROWS),
    _toy("attention", "attention_anchored", set(), "", _HEADS, _DECODE | {"cache", "prompt_length"}),
    _toy("attention", "attention_sound", set(), "", _HEADS, _DECODE),
    _toy("atomics", "index_add=index_add_sound", set(), "", {"m": 256, "n": 4}),
    _toy("atomics", "index_add=index_add_backwards", set(), "", {"m": 256, "n": 4}),
    _toy("atomics", "scatter_add=scatter_add_sound", set(), "", {"m": 256}),
    Planted("pointwise", "torch:square", frozenset(), "", {"k": 256}),
)


# Operator -> its probe and what it is asked at: every size that a sentence may name is below these.
_ASKED: dict[str, tuple[str, dict[str, Any], frozenset[str] | None]] = {
    "linear": ("matmul", _LINEAR | {"m": 80}, None),
    "grouped_matmul": ("grouped-matmul", _GROUPED | {"m": 80}, None),
    "rms_norm": ("rms-norm", _ROWS | {"m": 80}, None),
    "softmax": ("softmax", _ROWS | {"m": 80}, None),
    "log_softmax": ("log-softmax", _ROWS | {"m": 80}, None),
    "logsumexp": ("logsumexp", _ROWS | {"m": 80}, None),
    "sum": ("reduction", _ROWS | {"m": 80}, None),
    "mean": ("reduction", _ROWS | {"m": 80}, None),
    "cumsum": ("cumsum", _ROWS | {"m": 80}, None),
    "attention": ("attention", _HEADS, _DECODE | {"query_chunk", "hidden_keys"}),
}


def drawn(seed: int) -> list[Planted]:
    """Faults and sound implementations by the grammar, with the numbers that the seed draws."""
    sentences = [
        *grammar.faults(seed),
        *((o, sentence, frozenset[Finding](), "") for o, sentence in grammar.sounds(seed)),
    ]
    found = []
    for operator, sentence, finding, shown in sentences:
        probe, options, asked = _ASKED[operator]
        found.append(Planted(probe, f"{operator}=tests.faults.grammar:{sentence}", finding, shown, options, asked))
    return found


def judge(planted: Planted, seed: int, *, hasty: bool = False, first: bool = False) -> Told:
    """Put one implementation to its probe, and say what the verdict says.

    Args:
        hasty: Until the fault is told.
        first: The cases that are about the fault before all others, unless an earlier call decides it.
    """
    forget()
    for function in vars(toys).values():
        if hasattr(function, "calls"):
            function.calls = seed  # counters of rare faults begin anew
    began = time.perf_counter()
    operators: dict[str, Callable[..., torch.Tensor]] = dict(pointwise.OPERATORS)
    impls = [planted.target]
    if planted.probe == "pointwise":  # its operators are torch's own: the fault stands in for one
        operators = {"exp": toys.exp_with_a_tail} if planted.finding else {"square": torch.square}
        impls = ["stock"]
    # the attention of the toys is a loop over queries in Python: fewer lengths join
    joined = mock.patch.object(attention, "JOINED", (1, 16, 64) if first else (1, 2, 16, 63, 64, 65))
    with mock.patch.dict(pointwise.OPERATORS, operators, clear=True), joined:
        jobs = plan_jobs([planted.probe], impls, Options(seed=seed, **planted.options))
        chosen = [j for j in jobs if planted.asked is None or j.case.varied in planted.asked]
        if first and planted.shown != "history":
            named = planted.target.split("__")  # a sentence of the grammar names the inputs that it is about
            chosen.sort(key=lambda j: (j.case.varied != (planted.shown or "batch_size"), j.case.inputs not in named))
        rows = []
        for row in run_jobs(chosen, seed, set()):
            rows.append(row)
            # a fault that is told already is told: what comes after can only say more of it
            if hasty and (row.differs or row.wrong) and _told(rows, began).caught(planted):
                break
    failed = [row for row in rows if row.status == "error"]
    if failed:
        raise RuntimeError(f"{planted.name}: {failed[0].reason}")
    STATE.clear()
    return _told(rows, began)


def _told(rows: list[Row], began: float) -> Told:
    (verdict,) = judge_rows(rows)
    hit = [row for row in rows if row.differs or row.wrong or row.replays_parted]
    return Told(
        findings=verdict.findings,
        shown=tuple(sorted({row.varied for row in hit})),
        first=f"{hit[0].varied}, {hit[0].inputs}, {hit[0].trials} trials" if hit else "",
        cases=len(rows),
        seconds=time.perf_counter() - began,
    )
