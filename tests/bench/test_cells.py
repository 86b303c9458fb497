"""Cells: the defaults are the shapes promised, and what a user types becomes sizes or one clear line."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import pytest
import torch

from nondet.bench import cells
from nondet.bench.cells import PerfCounter, interleave, plan_cases, rotation
from nondet.bench.work import Work, limit_us, work_of
from nondet.core.inputs import generator
from nondet.core.operator import Sizes, tile_borders
from nondet.core.registry import load_implementation
from nondet.errors import UserError
from nondet.kernels.matmul.cpu_tiles import NotInvariantError


def test_the_defaults_on_cuda() -> None:
    """77 linear layers, 10 of matmul, 7 decode steps, 2 prefills of an 8B model in bfloat16; rows beyond the cache."""
    planned = plan_cases(["all"], Sizes(), "cuda", None)
    sections = {c.section: [d for d in planned if d.section == c.section] for c in planned}
    assert {c.dtype for c in planned if c.operator != "scaled_matmul"} == {"bfloat16"}
    assert [len(sections[f"scaled_matmul, {how}"]) for how in ("rows", "blocks")] == [4 * 5, 4 * 5]
    assert {c.dtype for c in planned if c.operator == "scaled_matmul"} == {"float8_e4m3fn"}
    assert len(sections["linear"]) == 11 * 7
    assert sections["linear"][0].name == "M=1 K=4096 N=6144"
    assert {c.operator for c in sections["matmul"]} == {"matmul"}
    assert len(sections["matmul"]) == 5 * 2
    assert [(c.shape["B"], c.shape["Tk"]) for c in sections["attention decode"]] == [
        (1, 1024), (1, 8192), (1, 32768), (8, 4096), (32, 2048), (64, 2048), (64, 8192)
    ]  # fmt: skip
    assert [c.shape["Tq"] for c in sections["attention prefill"]] == [4096, 16384]
    assert {"M": 131072, "H": 128} in [dict(c.shape) for c in sections["rms_norm"]]
    names = [(c.section, c.name, c.dtype) for c in planned]
    assert len(set(names)) == len(names)  # a resumed run skips by these


def test_sizes_asked_for() -> None:
    assert [c.name for c in plan_cases(["matmul"], Sizes(m=(3,), k=5, n=7), "cpu", ("float16", "float32"))] == [
        "M=3 K=5 N=7", "M=3 K=5 N=7"
    ]  # fmt: skip
    assert [c.group for c in plan_cases(["softmax"], Sizes(m=(3, 4), k=99), "cpu", None)] == ["V=99", "V=99"]
    attention = plan_cases(["attention"], Sizes(m=(2,), k=64), "cpu", None)
    assert [(c.section, c.shape["B"], c.shape["Tk"]) for c in attention] == [
        ("attention decode", 2, 64), ("attention prefill", 1, 64)
    ]  # fmt: skip
    jigsaw = [c.shape["M"] for c in plan_cases(["matmul"], Sizes(k=8, n=8, jigsaw=True), "cuda", None)]
    assert {1, 16, 17, 64, 65, 128, 129, 1024, 1025, 4096} <= set(jigsaw)


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


def test_sizes_as_typed() -> None:
    assert tile_borders(1, 20) == (1, 8, 9, 16, 17, 20)
    assert tile_borders(100, 100) == (100,)
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


def test_the_first_rows_keep_the_weights() -> None:
    for name in ("linear", "matmul", "rms-norm", "rms-norm-residual", "softmax", "grouped"):
        n = 8 if name in ("linear", "matmul", "grouped") else None
        (case,) = plan_cases([name], Sizes(m=(6,), k=8, n=n), "cpu", None)
        whole = case.inputs("cpu", generator(0, "cpu"))
        part = case.first_rows(whole, 2)
        assert part[0].shape[0] == 2
        assert torch.equal(part[0], whole[0][:2])
        assert name == "softmax" or torch.equal(part[1], whole[1][:2] if name == "rms-norm-residual" else whole[1])
    assert case.first_rows(whole, 2)[2].tolist() == [1, 2, 2, 2, 2, 2, 2, 2]


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


def test_rotation() -> None:
    for set_bytes, limit, sets, calls, cold in [
        (50 << 20, 13.0, 4, 40, True),  # a weight of 8B: 200 MiB rotate; 10 passes make half a millisecond
        (400 << 20, 900.0, 2, 2, True),  # one call is longer than a replay has to be
        (2 << 20, 0.5, 64, 256, False),  # 128 MiB of sets stay below three caches of 60
        (0, None, 64, 256, False),  # nothing known
        (90 << 20, 1e9, 2, 2, True),
    ]:
        turns = rotation(set_bytes, limit, 60 << 20)
        assert (turns.sets, turns.calls, turns.cold) == (sets, calls, cold)


def test_a_replay_walks_over_the_sets_in_turn() -> None:
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


def test_quartiles() -> None:
    four, one = (cells.timed_of("stock", samples, []) for samples in ([4.0, 1.0, 3.0, 2.0], [7.0]))
    assert (four.low_us, four.median_us, four.high_us) == (1.75, 2.5, 3.25)
    assert (one.low_us, one.median_us, one.high_us) == (7.0, 7.0, 7.0)


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


def test_counts() -> None:
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


@pytest.mark.usefixtures("stock_fp8")
def test_the_peak_of_fp8_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch._scaled_mm; where torch refuses, nothing stands in its place."""
    monkeypatch.setattr("nondet.bench.cells.PRODUCT_SIZES", {"cpu": 64})
    limit = cells.measure_limit(cells.peak_name("float8_e4m3fn"), "cpu", 0, PerfCounter())
    assert (limit.what, limit.work, limit.rate > 0) == ("torch._scaled_mm, 64 cubed", 2 * 64**3, True)


def test_limits_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates follow from the work and the fastest replay; a copy counts what is read and what is written. The longer of
    bytes over bandwidth and operations over the peak holds, in us; none where a rate is missing."""
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
