"""Every planted fault of an operator, and what has to be said of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
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

__all__ = ["PLANTED", "Judged", "Planted", "drawn", "judge"]

BATCH, RUN, WRONG, OTHER = Finding.BATCH, Finding.RUN_TO_RUN, Finding.WRONG, Finding.OTHER
_LINEAR = {"m": 33, "k": 96, "n": 8, "dtypes": ("float32",), "runs": 5}
_GROUPED = _LINEAR | {"runs": 4}
_ROWS = {"m": 33, "k": 515, "dtypes": ("float32",)}
_HEADS = {"config": {"heads": 4, "kv_heads": 2, "head_dim": 8}, "dtypes": ("float32",)}
_FP8 = {"m": 80, "k": 512, "n": 24, "dtypes": ("float8_e4m3fn", "float32"), "runs": 3}
_JOINS = frozenset({"neighbour_length"})
_MET = frozenset({"batch_size", "neighbour_values", "run"})
_DECODE = frozenset({"batch_size", "neighbour_values", "history"})


class Judged(NamedTuple):
    """One fault or control under one seed: what is right to say, what was said, and whether it and its cause are."""

    name: str
    right: str
    said: str
    ok: bool
    cause: bool
    detail: str = ""


def said_of(findings: Iterable[str]) -> str:
    return " or ".join(sorted(findings)) or "sound"


@dataclass(frozen=True)
class Planted:
    """One implementation and what is right to say of it."""

    probe: str
    target: str  # "module:function", or with "operator=" before it
    finding: frozenset[Finding]  # of which one has to be said; none for a sound implementation
    shown: str  # what was varied in a case that has to show it; "": any, or the result itself is wrong
    options: dict[str, Any] = field(repr=False)  # sizes, small enough for a kernel in Python
    asked: frozenset[str] | None = None  # what is varied in the cases that are run; None: all of the probe's

    @property
    def function(self) -> str:
        return self.target.rpartition(":")[2]

    @property
    def name(self) -> str:
        return f"{self.probe} {self.function}"


# Operator -> its probe and what it is asked at: every size that a sentence may name is below these.
_ROW_PROBES = {o: o.replace("_", "-") for o in ("rms_norm", "softmax", "log_softmax", "logsumexp", "cumsum")}
_ASKED: dict[str, tuple[str, dict[str, Any], frozenset[str] | None]] = {
    "linear": ("matmul", _LINEAR | {"m": 80}, None),
    "grouped_matmul": ("grouped-matmul", _GROUPED | {"m": 80}, None),
    **{o: (p, _ROWS | {"m": 80}, None) for o, p in (_ROW_PROBES | dict.fromkeys(("sum", "mean"), "reduction")).items()},
    "attention": ("attention", _HEADS, _DECODE | {"query_chunk", "hidden_keys"}),
}


def _of_grammar(sentence: str, *, sound: bool = False) -> Planted:
    probe, options, asked = _ASKED[sentence.partition("__")[0]]
    finding, shown = (frozenset[Finding](), "") if sound else grammar.right(sentence)
    return Planted(probe, toys.target(sentence), finding, shown, options, asked)


def drawn(seed: int) -> list[Planted]:
    """Faults and sound implementations by the grammar, with the numbers that the seed draws."""
    sound = [_of_grammar(sentence, sound=True) for sentence in grammar.sounds(seed)]
    return [_of_grammar(sentence) for sentence in grammar.faults(seed)] + sound


def _toys(probe: str, finding: set[Finding], shown: str, names: str, options: dict[str, Any], asked: Any = None) -> Any:
    """One for each of the names, as "function" or "operator=function"."""
    for name in names.split():
        ours = hasattr(toys, name.rpartition("=")[2])
        where = "tests.probes.toys" if ours else "tests.faults.implementations"
        yield Planted(probe, toys.target(name, where), frozenset(finding), shown, options, asked)


_ATOMIC, _TILED = {"m": 256, "n": 4, "dtypes": ("float32",)}, _DECODE | {"cache", "prompt_length"}
_ORDERS = "linear_splits_by_m linear_tail_rows order_of_one_column three_dimensions"
# beside those that each seed draws
_SENTENCES = (
    *("linear__order__any__m_1_1", "linear__order__bias__from_8", "linear__order__any__first"),
    *("linear__order__any__nth_100", "grouped_matmul__order__any__share_1_1", "grouped_matmul__order__any__place_3"),
    "rms_norm__eps__any__place_2",
)
_SHARED = "attention_shared_maximum attention_neighbours_nan"
_PROMOTED = "scaled_matmul=fp8_promotes_sooner scaled_matmul=fp8_splits"
_REMEMBERING = "linear_one_buffer linear_remembers_weights remembers_results"
_WRONG = "linear_writes linear_zeros linear_flipped linear_nan linear_fewer_rows last_row_lost last_column_lost"
_SOUND = "linear_sound linear_in_order padded_to_tiles pool_of_buffers packs_by_version tunes_its_speed other_order"
PLANTED: tuple[Planted, ...] = (
    *map(_of_grammar, _SENTENCES),
    *_toys("matmul", {BATCH}, "batch_size", _ORDERS, _LINEAR),
    *_toys("matmul", {BATCH, WRONG}, "neighbour_values", "linear_shared_scale mixes_rows_by_zeros", _LINEAR),
    *_toys("matmul", {OTHER}, "alignment", "linear_by_address", _LINEAR),
    *_toys("matmul", {RUN}, "run", "linear_unsteady", _LINEAR),
    *_toys("matmul", {RUN}, "", "linear_every_fifth linear_rarely", _LINEAR),
    *_toys("matmul", {RUN, WRONG}, "history", _REMEMBERING, _LINEAR),
    # a result that held NaN decides which case shows it
    *_toys("matmul", {RUN, WRONG}, "", "adds_to_old_memory", _LINEAR),
    *_toys("matmul", {WRONG}, "", f"{_WRONG} other_rows_weight", _LINEAR),
    *_toys("matmul", {WRONG}, "", "linear_lost_tail", _LINEAR | {"k": 100}),
    *_toys("matmul", {WRONG}, "", "linear_wide_result", _LINEAR | {"dtypes": ("bfloat16",)}),
    *_toys("grouped-matmul", {BATCH}, "routing", "grouped_by_experts_in_use", _GROUPED),
    *_toys("grouped-matmul", {BATCH, WRONG}, "routing", "grouped_capacity", _GROUPED),
    *_toys("grouped-matmul", {WRONG}, "", "grouped_other_weight", _GROUPED),
    *_toys("rms-norm", {BATCH, WRONG}, "neighbour_values", "rms_norm_shared_scale", _ROWS),
    *_toys("rms-norm", {RUN, WRONG}, "history", "rms_norm_one_buffer", _ROWS),
    *_toys("softmax", {BATCH, WRONG}, "neighbour_values", "softmax_shared_maximum", _ROWS),
    *_toys("reduction", {BATCH}, "batch_size", "sum=sum_last_row", _ROWS),
    *_toys("reduction", {WRONG}, "", "sum=sum_lost_tail", _ROWS),
    *_toys("attention", {BATCH}, "cache", "attention_cache_apart", _HEADS, {"cache", "batch_size"}),
    *_toys("attention", {BATCH}, "neighbour_length", "attention_tile_by_longest attention_ragged_tile", _HEADS, _JOINS),
    *_toys("attention", {BATCH}, "batch_size", "attention_later_requests", _HEADS, {"batch_size"}),
    *_toys("attention", {BATCH, WRONG}, "neighbour_values", _SHARED, _HEADS, _DECODE),
    *_toys("attention", {WRONG, BATCH}, "", "attention_sees_the_future", _HEADS, {"prompt_length", "cache"}),
    *_toys("attention", {WRONG}, "", "attention_other_heads", _HEADS, _DECODE),
    *_toys("atomics", {RUN}, "run", "index_add=index_add_atomic", _ATOMIC),
    *_toys("atomics", {RUN}, "run", "scatter_add=scatter_add_atomic", {"m": 256, "dtypes": ("float32",)}),
    *_toys("atomics", {WRONG}, "", "index_add=index_add_loses_twins", _ATOMIC),
    Planted("pointwise", "tests.probes.toys:exp_with_a_tail", frozenset({OTHER}), "length", {"k": 256}),
    *_toys("scaled-matmul", {BATCH}, "batch_size", _PROMOTED, _FP8, _MET),
    *_toys("scaled-matmul", {BATCH, WRONG}, "neighbour_values", "scaled_matmul=fp8_rescales", _FP8, _MET),
    *_toys("scaled-matmul", {BATCH}, "neighbour_values", "quantize=quantize_by_batch", _FP8, _MET),
    # ---- sound
    *_toys("scaled-matmul", set(), "", "scaled_matmul=fp8_sound quantize=quantize_by_row", _FP8, _MET),
    *_toys("matmul", set(), "", _SOUND, _LINEAR),
    *_toys("grouped-matmul", set(), "", "grouped_sound", _GROUPED),
    *_toys("rms-norm", set(), "", "rms_norm_sound", _ROWS),
    *_toys("reduction", set(), "", "sum=sum_sound", _ROWS),
    *_toys("attention", set(), "", "attention_anchored", _HEADS, _TILED),
    *_toys("attention", set(), "", "attention_sound", _HEADS, _DECODE),
    *_toys("atomics", set(), "", "index_add=index_add_sound index_add=index_add_backwards", {"m": 256, "n": 4}),
    *_toys("atomics", set(), "", "scatter_add=scatter_add_sound", {"m": 256}),
    Planted("pointwise", "torch:square", frozenset(), "", {"k": 256}),
)


def judge(planted: Planted, seed: int, *, hasty: bool = False, first: bool = False) -> Judged:
    """Put one implementation to its probe, and say what the verdict says: `hasty`, until the fault is found; `first`,
    with the cases that are about it before all others, unless an earlier call decides it."""
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
            if row.status == "error":
                raise RuntimeError(f"{planted.name}: {row.reason}")
            rows.append(row)
            # a fault that is told already is told: what comes after can only say more of it
            if hasty and planted.finding and (row.differs or row.wrong):
                judged = _judged(planted, seed, rows, began)
                if judged.ok and judged.cause:
                    break
    STATE.clear()
    return _judged(planted, seed, rows, began)


def _judged(planted: Planted, seed: int, rows: list[Row], began: float) -> Judged:
    (verdict,) = judge_rows(rows)
    faults = {f for f in verdict.findings if f.is_fault}
    ok = bool(faults & planted.finding) if planted.finding else not faults and len(rows) > 0
    if RUN in planted.finding and BATCH in faults - planted.finding:
        ok = False  # no batch is in what an earlier call decides
    if ("__order__" in planted.target or not planted.finding) and "not rounding" in verdict.text:
        ok = False  # another order is rounding, whatever chooses it
    if WRONG in planted.finding and "all by rounding" in verdict.text:
        ok = False  # it follows values, and no order of a sum
    said = next((f for f in verdict.findings if f in planted.finding), verdict.findings[0])
    hit = [row for row in rows if row.differs or row.wrong or row.replays_parted]
    shown = sorted({row.varied for row in hit})
    detail = f"by {', '.join(shown)}; first {hit[0].varied}, {hit[0].inputs}, {hit[0].trials} trials" if hit else ""
    cause = not planted.shown or planted.shown in shown
    detail += f"; {time.perf_counter() - began:.1f} s"
    return Judged(f"{planted.name} {seed}", said_of(planted.finding), said, ok, cause, detail)
