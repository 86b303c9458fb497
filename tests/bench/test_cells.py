"""Cells: the defaults are the shapes promised, and what a user types becomes sizes or one clear line."""

import math
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nondet.bench import cells, ranks
from nondet.bench import collect as module
from nondet.bench.cells import BenchCase, PerfCounter, groups_of, interleave, plan_cases, rotation
from nondet.bench.collect import bits_row, collect, implementations_of, kernels_at, planned_keys
from nondet.bench.work import Work, limit_us, work_of
from nondet.cli import main
from nondet.core.inputs import generator
from nondet.core.operator import Sizes, tile_borders
from nondet.core.records import Cell, Limit, Row, Status
from nondet.core.registry import load_implementation
from nondet.core.runfile import read_run
from nondet.errors import UnknownNameError, UserError
from nondet.kernels import stock
from nondet.kernels.matmul.cpu_tiles import NotInvariantError
from nondet.ranks.group import RankError
from tests.build import row


def test_the_defaults_on_cuda() -> None:
    """77 linear layers, 10 of matmul, 7 decode steps, 2 prefills of an 8B model in bfloat16; rows beyond the cache."""
    planned = plan_cases(["all"], Sizes(), "cuda", None)
    sections = {c.section: [d for d in planned if d.section == c.section] for c in planned}
    dtypes = {(c.dtype, c.operator == "scaled_matmul") for c in planned}
    assert dtypes == {("bfloat16", False), ("float8_e4m3fn", True)}
    counts = {"linear": 11 * 7, "matmul": 5 * 2, "scaled_matmul, rows": 4 * 5, "scaled_matmul, blocks": 4 * 5}
    assert {name: len(sections[name]) for name in counts} == counts
    assert sections["linear"][0].name == "M=1 K=4096 N=6144"
    assert {c.operator for c in sections["matmul"]} == {"matmul"}
    assert [(c.shape["B"], c.shape["Tk"]) for c in sections["attention decode"]] == [
        (1, 1024), (1, 8192), (1, 32768), (8, 4096), (32, 2048), (64, 2048), (64, 8192)
    ]  # fmt: skip
    assert [c.shape["Tq"] for c in sections["attention prefill"]] == [4096, 16384]
    assert {"M": 131072, "H": 128} in [dict(c.shape) for c in sections["rms_norm"]]
    names = [(c.section, c.name, c.dtype) for c in planned]
    assert len(set(names)) == len(names)  # a resumed run skips by these


def test_sizes_asked_for() -> None:
    both = plan_cases(["matmul"], Sizes(m=(3,), k=5, n=7), "cpu", ("float16", "float32"))
    assert [c.name for c in both] == ["M=3 K=5 N=7"] * 2
    assert [c.group for c in plan_cases(["softmax"], Sizes(m=(3, 4), k=99), "cpu", None)] == ["V=99", "V=99"]
    decode, prefill = plan_cases(["attention"], Sizes(m=(2,), k=64), "cpu", None)
    assert (decode.section, decode.shape["B"], decode.shape["Tk"]) == ("attention decode", 2, 64)
    assert (prefill.section, prefill.shape["B"], prefill.shape["Tk"]) == ("attention prefill", 1, 64)
    jigsaw = [c.shape["M"] for c in plan_cases(["matmul"], Sizes(k=8, n=8, jigsaw=True), "cuda", None)]
    assert {1, 16, 17, 64, 65, 128, 129, 1024, 1025, 4096} <= set(jigsaw)
    assert (tile_borders(1, 20), tile_borders(100, 100)) == ((1, 8, 9, 16, 17, 20), (100,))
    assert max(tile_borders(1, 100_000)) == 100_000
    assert cells.parse_sizes("m", ["16", "1-9", "100-300:100"]) == (1, 8, 9, 16, 100, 200, 300)
    assert cells.parse_sizes("m", []) is None
    wrong = "0 -3 x 9-3 1-9:0 1-9:00 1.5 1-999999999999 1-16777216:1 1-9999999"
    for text in ["", "9" * 26, *wrong.split()]:
        with pytest.raises(UserError, match="--m"):
            cells.parse_sizes("m", [text])
    # close names are suggested; an option that no operator has is not left aside, beside one that has it
    for names, sizes, dtypes, said in [
        (["matmull"], Sizes(), None, "matmul"),
        (["matmul"], Sizes(), ("float8",), "float16"),
        (["matmul"], Sizes(k=0), None, "--k 0"),
        (["attention"], Sizes(k=99999999999), None, "--k 99999999999"),
        (["mean", "softmax"], Sizes(n=8), None, "--n 8"),
        (["grouped"], Sizes(jigsaw=True), None, "--jigsaw"),
    ]:
        with pytest.raises(UserError, match=said):
            plan_cases(names, sizes, "cpu", dtypes)
    grouped = [plan_cases([name], Sizes(), "cpu", None) for name in ("grouped", "grouped-matmul")]
    assert grouped[0] == grouped[1]  # a former name
    assert plan_cases(["mean", "grouped"], Sizes(n=8), "cpu", None)
    assert plan_cases(["all"], Sizes(n=8, jigsaw=True), "cpu", None)


def test_linear_and_matmul_mean_what_they_say() -> None:
    for name, weight in (("linear", (7, 5)), ("matmul", (5, 7))):
        (case,) = plan_cases([name], Sizes(m=(3,), k=5, n=7), "cpu", None)
        a, b = case.inputs("cpu", generator(0, "cpu"))
        assert (case.operator, case.section, tuple(a.shape), tuple(b.shape)) == (name, name, (3, 5), weight)
        assert load_implementation(name, "stock", "cpu").call(a, b).shape == (3, 7)
        try:
            assert load_implementation(name, "invariant", "cpu").call(a, b).shape == (3, 7)
        except NotInvariantError as refused:  # some CPUs' libraries have none for so short a K, and the kernel says so
            assert "no tile of" in str(refused)  # noqa: PT017 - either answer is right, by machine
    for name in ("linear", "matmul", "rms-norm", "rms-norm-residual", "softmax", "grouped"):
        n = 8 if name in ("linear", "matmul", "grouped") else None
        (case,) = plan_cases([name], Sizes(m=(6,), k=8, n=n), "cpu", None)
        whole = case.inputs("cpu", generator(0, "cpu"))
        part = case.first_rows(whole, 2)
        assert part[0].shape[0] == 2
        assert torch.equal(part[0], whole[0][:2])
        assert name == "softmax" or torch.equal(part[1], whole[1][:2] if name == "rms-norm-residual" else whole[1])
    assert case.first_rows(whole, 2)[2].tolist() == [1, 2, 2, 2, 2, 2, 2, 2]


def test_fp8_products_are_timed_in_fp8_alone() -> None:
    rows, blocks = plan_cases(["scaled-matmul"], Sizes(m=(3,), k=300, n=200), "cpu", None)
    for case, shapes in ((rows, ((3, 1), (1, 200))), (blocks, ((3, 3), (3, 2)))):
        a, b, scale_a, scale_b, dtype = given = case.inputs("cpu", generator(0, "cpu"))
        assert (a.shape, b.shape, b.stride()) == ((3, 300), (300, 200), (1, 300))
        assert {a.dtype, b.dtype} == {torch.float8_e4m3fn}
        assert (scale_a.shape, scale_b.shape) == shapes
        assert min(float(scale_a.min()), float(scale_b.min())) > 0
        call = load_implementation("scaled_matmul", "invariant", "cpu").call
        whole = call(*given)
        one = case.first_rows(given, 1)
        assert torch.equal(one[2], scale_a[:1])
        assert torch.equal(call(*one), whole[:1])
        assert whole.dtype == dtype == torch.bfloat16
    # 3x300 and 300x200 of one byte, 3x200 of two, scales of four
    assert rows.work == Work(900 + 60_000 + 1_200 + 4 * (3 + 200), 2 * 3 * 300 * 200)
    assert blocks.work == Work(900 + 60_000 + 1_200 + 4 * (9 + 6), 2 * 3 * 300 * 200)
    for names, dtypes in ((["scaled-matmul"], ("bfloat16",)), (["linear"], ("float8_e4m3fn",))):
        with pytest.raises(UserError, match="is not timed in it"):
            plan_cases(names, Sizes(), "cpu", dtypes)
    both = plan_cases(["scaled-matmul", "softmax"], Sizes(), "cpu", ("float16", "float8_e4m3fn"))
    assert {(c.operator, c.dtype) for c in both} == {("softmax", "float16"), ("scaled_matmul", "float8_e4m3fn")}


class FakeStopwatch(PerfCounter):
    """A stopwatch whose clock moves when a call says so."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._clock = lambda: self.now

    def taking(self, name: str, seconds: Sequence[float], log: list[str]) -> Any:
        """A replay that takes each of `seconds` in turn, the last for ever."""
        left = list(seconds)

        def replay() -> None:
            log.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return replay


def test_sets_rotate() -> None:
    for set_bytes, limit, sets, calls, cold in [
        (50 << 20, 13.0, 4, 40, True),  # a weight of 8B: 200 MiB rotate; 10 passes make half a millisecond
        (400 << 20, 900.0, 2, 2, True),  # one call is longer than a replay has to be
        (2 << 20, 0.5, 64, 256, False),  # 128 MiB of sets stay below three caches of 60
        (0, None, 64, 256, False),  # nothing known
        (90 << 20, 1e9, 2, 2, True),
    ]:
        turns = rotation(set_bytes, limit, 60 << 20)
        assert (turns.sets, turns.calls, turns.cold) == (sets, calls, cold)
    seen: list[int] = []
    watch = PerfCounter()
    replay = watch.record(seen.append, [(0,), (1,), (2,)], 6)
    assert seen == [0, 1]  # the warm-up
    seen.clear()
    replay()
    assert seen == [0, 1, 2, 0, 1, 2]


def test_replays_stand_side_by_side_and_the_first_round_counts_for_nothing() -> None:
    """The slow first replay of a kernel is in no figure, everybody runs once a round, and the order turns. A barrier
    before each one is not timed."""
    watch, log = FakeStopwatch(), []
    watch.budget_us = 30_000.0
    replays = {"stock": watch.taking("stock", [0.5e-2, 1e-3], log), "ours": watch.taking("ours", [0.5e-2, 2e-3], log)}
    samples = interleave(replays, watch, least=3, most=5)
    assert [len(s) for s in samples.values()] == [5, 5]
    assert samples["stock"] == pytest.approx([1000.0] * 5)
    assert samples["ours"] == pytest.approx([2000.0] * 5)
    assert log == ["stock", "ours"] + ["stock", "ours", "ours", "stock"] * 2 + ["stock", "ours"]
    slow = interleave({"slow": watch.taking("slow", [1.0], log)}, watch, least=4)  # beyond any budget
    assert len(slow["slow"]) == 4
    assert interleave({}, watch) == {}
    log.clear()
    barrier, ours = watch.taking("before", [60.0], log), watch.taking("ours", [2e-3], log)
    samples = interleave({"ours": ours}, watch, least=3, most=3, before=barrier)
    assert log == ["before", "ours"] * 4  # before the uncounted round's too
    assert samples["ours"] == pytest.approx([2000.0] * 3)
    four, one = (cells.timed_of("stock", samples, []) for samples in ([4.0, 1.0, 3.0, 2.0], [7.0]))
    assert (four.low_us, four.median_us, four.high_us) == (1.75, 2.5, 3.25)
    assert one.low_us == one.median_us == one.high_us == 7.0


def test_a_cpu_is_timed_by_the_clock_and_by_its_own_time() -> None:
    clock, own = cells.stopwatch_for("cpu"), cells.stopwatch_for("cpu", "cpu")
    assert own.method == "process_time"
    a = torch.ones(256, 256)
    samples = interleave({str(n): clock.record(torch.mm, [(a, a)], n) for n in (1, 64)}, clock, least=5, most=5)
    assert 0 < median(samples["1"]) < median(samples["64"])
    calls = {"asleep": own.record(time.sleep, [(0.02,)], 1), "awake": own.record(torch.mm, [(a, a)], 4)}
    samples = interleave(calls, own, least=3, most=3)
    assert min(samples["asleep"]) < 10_000
    assert min(samples["awake"]) > 100


ATTENTION = {"B": 2, "Tq": 3, "Tk": 5, "Hq": 4, "Hkv": 2, "D": 8}


def test_limits_are_counted_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand; rates follow from the work and the fastest replay; the longer limit holds, none where one is missing."""
    for operator, shape, dtype, bytes_, flops in [
        ("linear", {"M": 2, "K": 3, "N": 5}, "bfloat16", 2 * (6 + 15 + 10), 2 * 2 * 3 * 5),
        ("matmul", {"M": 2, "K": 3, "N": 5}, "float32", 4 * (6 + 15 + 10), 2 * 2 * 3 * 5),
        # two of four experts have a row
        ("grouped_matmul", {"M": 2, "K": 3, "N": 5, "E": 4}, "float16", 2 * (6 + 2 * 15 + 10), 2 * 2 * 3 * 5),
        # three queries at positions 2, 3, 4 see 3 + 4 + 5 keys
        ("attention", ATTENTION, "bfloat16", 2 * (2 * 2 * 4 * 3 * 8 + 2 * 2 * 2 * 5 * 8), 4 * 2 * 4 * 8 * 12),
        ("attention", {**ATTENTION, "Tq": 1}, "bfloat16", 2 * (2 * 2 * 4 * 8 + 2 * 2 * 2 * 5 * 8), 4 * 2 * 4 * 8 * 5),
        ("attention", ATTENTION | {"Tq": 5}, "float16", 2 * 2 * 5 * 8 * (2 * 4 + 2 * 2), 4 * 2 * 4 * 8 * 15),
        ("rms_norm", {"M": 3, "H": 7}, "bfloat16", 2 * (42 + 7), 0),
        ("rms_norm_residual", {"M": 3, "H": 7}, "bfloat16", 2 * (84 + 7), 0),
        ("softmax", {"M": 3, "V": 7}, "float32", 4 * 42, 0),
        ("log_softmax", {"M": 3, "V": 7}, "float32", 4 * 42, 0),
        ("mean", {"M": 3, "K": 7}, "float32", 4 * 24, 0),
        ("logsumexp", {"M": 3, "V": 7}, "float32", 4 * 24, 0),
        ("softmax_gradient", {"M": 3, "W": 7}, "float32", 4 * 63, 0),
        ("rms_norm_gradient", {"M": 3, "W": 7}, "bfloat16", 2 * (63 + 7), 0),
        ("attention_gradient", ATTENTION | {"M": 2, "T": 5}, "bfloat16", 2 * (3 * 320 + 4 * 160), 24 * 4 * 8 * 15),
    ]:
        assert work_of(operator, shape, dtype) == Work(bytes_, flops)
    with pytest.raises(ValueError, match="scatter_add is not timed"):
        work_of("scatter_add", {}, "float32")
    for device in ("cpu", "cuda"):  # none fails in the middle of a run
        assert all(case.work.bytes > 0 for case in plan_cases(["all"], Sizes(), device, None))
    assert limit_us(Work(4_000_000, 0), 4e12, None) == (pytest.approx(1.0), "memory")
    assert limit_us(Work(4_000_000, 8_000_000_000), 4e12, 8e14) == (pytest.approx(10.0), "arithmetic")
    assert limit_us(Work(4_000_000, 8_000_000), 4e12, 8e14) == (pytest.approx(1.0), "memory")
    assert limit_us(Work(1, 1), 4e12, None)[0] is None
    assert limit_us(Work(1, 0), None, 8e14)[0] is None
    monkeypatch.setattr("nondet.bench.cells.COPY_BYTES", {"cpu": 2**20})
    monkeypatch.setattr("nondet.bench.cells.PRODUCT_SIZES", {"cpu": 128})
    watch = PerfCounter()
    watch.budget_us = 1.0
    copy, peak = (cells.measure_limit(name, "cpu", 0, watch) for name in cells.limit_names(["float32", "float32"]))
    assert (copy.name, copy.work, copy.unit) == ("copy", 2**21, "B/s")
    assert (peak.name, peak.work, peak.unit) == (cells.peak_name("float32"), 2 * 128**3, "FLOP/s")
    assert len(copy.samples_us) == 7
    for limit in (copy, peak):
        assert math.isclose(limit.rate, limit.work / min(limit.samples_us) * 1e6, rel_tol=1e-3)


@pytest.mark.usefixtures("stock_fp8")
def test_the_peak_of_fp8_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch._scaled_mm; where torch refuses, nothing stands in its place."""
    monkeypatch.setattr("nondet.bench.cells.PRODUCT_SIZES", {"cpu": 64})
    limit = cells.measure_limit(cells.peak_name("float8_e4m3fn"), "cpu", 0, PerfCounter())
    assert (limit.what, limit.work, limit.rate > 0) == ("torch._scaled_mm, 64 cubed", 2 * 64**3, True)


IMPLS = {"linear": ["stock", "mine"]}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[..., Any]]:
    """Implementations made here, under the names of IMPLS."""
    table: dict[str, Callable[..., Any]] = {"stock": torch.nn.functional.linear, "mine": torch.nn.functional.linear}

    def load(operator: str, name: str, device: str) -> SimpleNamespace:
        if name not in table:
            raise ImportError(f"{name} needs another torch")
        return SimpleNamespace(call=table[name])

    monkeypatch.setattr(module, "load_implementation", load)
    return table


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> PerfCounter:
    """A quick one, and quick limits of the machine."""
    monkeypatch.setattr("nondet.bench.cells.COPY_BYTES", {"cpu": 2**20})
    monkeypatch.setattr("nondet.bench.cells.PRODUCT_SIZES", {"cpu": 64})
    stopwatch = PerfCounter()
    stopwatch.cache_bytes, stopwatch.budget_us, stopwatch.replay_us = 1024, 1.0, 1.0
    return stopwatch


def cases() -> list[BenchCase]:
    return plan_cases(["linear"], Sizes(m=(1, 4), k=32, n=16), "cpu", None)


def test_a_run_has_limits_bits_and_cells(calls: dict[str, Any], watch: PerfCounter) -> None:
    calls["mine"] = stock.linear
    records = list(collect(cases(), IMPLS, "cpu", 0, watch))
    assert [r.key for r in records] == planned_keys(cases(), IMPLS, "cpu")
    assert [type(r) for r in records] == [Limit, Limit, Row, Row, Cell, Cell]
    cell = records[-1]
    assert isinstance(cell, Cell)
    assert [t.status for t in cell.timed] == [Status.TIMED] * 2
    assert all(len(t.samples_us) == 7 and t.low_us <= t.median_us <= t.high_us for t in cell.timed)
    assert cell.timed[1].ran == ["torch.linear"]
    assert cell.limit_us is not None
    assert cell.limit_us > 0


def test_what_fails_stands_beside_what_does_not(calls: dict[str, Any], watch: PerfCounter) -> None:

    def broken(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 4:
            raise RuntimeError("no tile\nfor this")
        raise NotImplementedError("no M = 1")

    def refuses(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """As torch does, which says the cause in warnings: they belong to the reason, not on stderr."""
        warnings.warn("Flash attention kernel not used because:", stacklevel=1)
        warnings.warn("Expected a last dimension of 8 (Triggered internally at x.cpp:1.)", stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")

    def fared() -> tuple[list[Row], list[tuple[str, str]]]:
        with warnings.catch_warnings(action="error"):
            records = list(collect(cases(), IMPLS, "cpu", 0, watch))
        timed = [c.timed for c in records if isinstance(c, Cell)]
        assert [stock.status for stock, _ in timed] == [Status.TIMED] * 2
        return [r for r in records if isinstance(r, Row)], [(mine.status, mine.reason) for _, mine in timed]

    calls["mine"] = broken
    rows, mine = fared()
    assert (rows[0].trials, rows[1].status, rows[1].reason) == (2, Status.SKIPPED, "no M = 1")
    assert mine == [(Status.SKIPPED, "no M = 1"), (Status.ERROR, "RuntimeError: no tile")]
    calls["mine"] = refuses
    reason = "No available kernel. Aborting execution. Expected a last dimension of 8"
    assert fared()[1] == [(Status.SKIPPED, reason)] * 2
    del calls["mine"]  # loading goes wrong inside the run, and the run goes on
    assert fared()[1] == [(Status.ERROR, "ImportError: mine needs another torch")] * 2


def test_what_is_not_the_operator_is_not_timed(calls: dict[str, Any], watch: PerfCounter) -> None:
    for calls["mine"], said in [
        (lambda x, w: None, "returned NoneType"),
        (lambda x, w: (x @ w.T)[:, :-1], "where stock returns float32 [1, 16]"),
        (lambda x, w: (x @ w.T).half(), "returned float16 [1, 16]"),
        (lambda x, w: x[:, :16] + 0.0, "relative difference"),
        (lambda x, w: (x @ w.T) * torch.nan, "relative difference nan"),
        (lambda x, w: torch.stack([w @ one for one in x]), ""),  # another order of additions is no fault
    ]:
        cell = next(r for r in collect(cases(), IMPLS, "cpu", 0, watch) if isinstance(r, Cell))
        assert [t.status for t in cell.timed] == [Status.TIMED, Status.ERROR if said else Status.TIMED]
        assert said in cell.timed[1].reason


def test_stock_stands_for_its_backends() -> None:
    """The best stock is chosen among them; the one that writes every score is timed only by its own name."""
    named = implementations_of("attention", ["stock", "invariant"], "cuda")
    assert named == ["stock", "stock-flash", "stock-efficient", "stock-cudnn", "invariant"]
    assert implementations_of("attention", ["stock-math"], "cuda") == ["stock-math"]
    with pytest.raises(UnknownNameError, match="flash-attn"):
        implementations_of("attention", ["flash-attn"], "cuda")
    sizes = plan_cases(["linear"], Sizes(m=(1, 8, 9), k=4, n=4), "cpu", None)
    found = row(values=[1, 8], kernels=[["gemv"], ["gemm"]])
    assert [kernels_at(found, case) for case in sizes] == [["gemv"], ["gemm"], []]
    assert kernels_at(None, sizes[0]) == []


def test_bits_tell_one_class_from_two() -> None:
    """A product whose order depends on M parts; one that takes every row alone does not. Ends are computed twice."""
    group = plan_cases(["linear"], Sizes(m=(1, 2, 40), k=300, n=8), "cpu", None)

    def by_row(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.stack([(one * weight).sum(-1) for one in x])

    def by_load(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        parts = 1 + (x.shape[0] > 2)
        return sum(p @ w.T for p, w in zip(x.chunk(parts, 1), weight.chunk(parts, 1), strict=True))  # type: ignore[return-value] # two parts

    one, two = (bits_row(group, "mine", call, "cpu", 0) for call in (by_row, by_load))
    assert (one.status, one.distinct, one.values, one.replays) == (Status.IDENTICAL, 1, [1, 2, 40], 2)
    assert (two.status, two.labels[-1] != two.labels[0]) == (Status.DIVERGENT, True)
    assert two.difference is not None
    assert two.difference.mismatched > 0
    group = groups_of(plan_cases(["attention"], Sizes(m=(1, 3), k=24), "cpu", None))[0]
    found = bits_row(group, "mine", lambda q, k, v: torch.zeros_like(q) + (q.shape[2] > 1), "cpu", 0)
    assert found.values == ["decode B=1", "decode B=3", "prefill"]
    assert (found.labels, found.varied) == ([0, 0, 1], "query_chunk")
    assert bits_row(group, "mine", lambda q, k, v: torch.zeros_like(q), "cpu", 0).status == Status.IDENTICAL

    # of an operator with two outputs the second counts: a residual is part of what the next layer reads
    group = plan_cases(["rms-norm-residual"], Sizes(m=(1, 4), k=16), "cpu", None)
    assert bits_row(group, "mine", lambda x, r, weight: (x * weight, r + x.shape[0]), "cpu", 0).labels == [0, 1]
    assert bits_row(group, "mine", lambda x, residual, weight: (x * weight, residual), "cpu", 0).labels == [0, 0]


SMALL = ("--device", "cpu", "--m", "1", "--m", "16", "--n", "64", "--k", "64")


@pytest.mark.nightly
def test_sums_and_layers_over_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["bench", "all-reduce", "row-parallel", *SMALL, "--quiet", "--out", "r.jsonl"]
    assert main([*command, "--report", "r.md"]) == 0
    run = read_run(tmp_path / "r.jsonl")
    assert run.complete
    sizes = [(c.operator, c.shape["M"], c.shape["ranks"]) for c in run.cells]
    assert sizes == [(name, m, 2) for name in ("all_reduce", "row_parallel") for m in (1, 16)]
    for cell in run.cells:
        wanted = {"stock", "invariant"} | ({"rank-free"} if cell.operator == "row_parallel" else set())
        assert {t.impl for t in cell.timed} == wanted
        assert all(t.status == "timed" and len(t.samples_us) == 15 for t in cell.timed)
    assert [c.bus_bytes for c in run.cells] == [64 * 2, 16 * 64 * 2, 0, 0], "2 (W - 1) / W of a bfloat16 message"
    ours = [(r.operator, r.impl, r.distinct) for r in run.rows if r.impl != "stock"]
    layer = [("row_parallel", impl, 1) for impl in ("invariant", "rank-free")]
    assert sorted(ours) == [("all_reduce", "invariant", 1), *layer]
    assert "B/s)" in (tmp_path / "r.md").read_text(encoding="utf-8")


def test_a_rank_that_dies_is_an_error_in_its_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    class Dying:
        def call(self, *_: object, **__: object) -> list[object]:
            raise RankError("rank 1 of 2 was killed by SIGKILL (in a test)")

    monkeypatch.setattr(ranks, "shared_group", lambda *_, **__: Dying())
    main(["bench", "all-reduce", *SMALL[:-2], "--quiet", "--out", str(tmp_path / "r.jsonl")])
    run = read_run(tmp_path / "r.jsonl")
    assert {t.reason for c in run.cells for t in c.timed} == {"rank 1 of 2 was killed by SIGKILL (in a test)"}
    assert {r.status for r in run.rows} == {"error"}
