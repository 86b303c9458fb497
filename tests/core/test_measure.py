"""Identical is not right, rare is not batch-dependent, and inputs are not an implementation's to write to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from nondet.core import processes
from nondet.core.compare import looked_at
from nondet.core.inputs import generator, make
from nondet.core.launch import note
from nondet.core.measure import Trial, fingerprint, measure, row_of, written_to
from nondet.core.records import Row, Run
from nondet.core.registry import load_implementation
from nondet.core.statistics import wilson
from nondet.core.watch import Answers, Watch, bound_of
from nondet.errors import WrongResultError
from nondet.kernels import reference
from nondet.probes.base import Options
from nondet.probes.runner import plan_jobs, run_jobs
from nondet.reports.html import render
from nondet.verdict.findings import Finding
from nondet.verdict.gate import exit_code, judge
from tests.build import run_of
from tests.probes import toys

SMALL: dict[str, Any] = {"m": 16, "k": 100, "n": 24, "inputs": ("bell",), "runs": 3}
HEAD = Row(
    probe="p", case="c", operator="linear", shape={"M": 3}, dtype="float32", device="cpu", inputs="bell",
    varied="batch_size", impl="stock", status="",
)  # fmt: skip


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.T


def watched(call: Any, operator: str = "linear") -> Watch:
    watch = Watch(call, Answers(operator, getattr(reference, operator)))
    watch.checking = True
    return watch


def judged(toy: str, dtype: str = "bfloat16") -> tuple[Run, Finding]:
    run = run_of(*toys.measure("matmul", toy, dtypes=(dtype,), **SMALL).values())
    return run, judge(run)[0].finding


def test_identical_and_wrong_is_wrong() -> None:
    """sys.exit(0) inside a kernel is a failed case, and no success of the run."""
    for toy, reason in [
        ("linear_zeros", "more than any rounding explains"),
        ("linear_flipped", "more than any rounding explains"),
        ("linear_lost_tail", "more than any rounding explains"),
        ("linear_wide_result", "float32 for torch.bfloat16"),
        ("linear_fewer_rows", "shape (24, 22), not (256, 22)"),
        ("linear_nan", "NaN or infinite where the oracle is not"),
        ("linear_writes", "wrote to its input w"),
    ]:
        run, finding = judged(toy)
        assert finding == Finding.WRONG
        assert any(reason in row.reason for row in run.rows if row.status == "wrong"), [r.reason for r in run.rows]
        assert exit_code(run, "divergent") == (3, "")
    run, finding = judged("linear_exits")
    assert {(row.status, row.reason) for row in run.rows} == {("error", "it called sys.exit(0)")}
    assert finding == Finding.UNTESTED
    assert exit_code(run, "divergent")[0] == 1


def test_a_sound_kernel_is_clean_and_its_accuracy_is_on_record() -> None:
    for dtype in ["bfloat16", "float16", "float32", "float64"]:
        run, finding = judged("linear_sound", dtype)
        assert finding == Finding.CLEAN
        assert exit_code(run, "divergent") == (0, "")
        for row in run.rows:
            assert row.accuracy.calls >= 1
            assert 0 <= (row.accuracy.worst or 0.0) <= 1
            assert "Higham" in row.accuracy.source


def test_a_class_says_whether_it_is_more_accurate_or_merely_different() -> None:
    x, w = torch.randn(64, generator=generator(1, "cpu")), torch.randn(400, 64, generator=generator(2, "cpu"))
    exact = x.double() @ w.double().T
    halves = x[:32] @ w[:, :32].T + x[32:] @ w[:, 32:].T
    rounded = (x.bfloat16().float() @ w.T)[None]
    results = {1: (x @ w.T)[None], 2: halves[None], 3: rounded}
    trials = [Trial(m, lambda m=m: results[m]) for m in results]  # type: ignore[misc] # binds the loop's
    made = measure(HEAD, trials, reference=exact[None])
    first, other, worse = made.class_errors
    assert (first.elements, first.closer, first.farther) == (400, 0, 0)
    low, high = wilson(other.closer, other.closer + other.farther)
    assert low < 0.5 < high
    assert wilson(worse.closer, worse.closer + worse.farther)[1] < 0.5
    assert worse.median > 100 * first.median
    page = render([run_of(made)])
    assert "merely different: nearer at" in page
    assert "less accurate: nearer at" in page


@pytest.mark.nightly
def test_noise_of_some_calls_is_not_called_batch_dependent() -> None:
    """A class that showed and does not come again is run-to-run nondeterminism, wherever in the sweep it fell."""
    for toy in ["linear_every_fifth", "linear_rarely"]:
        for offset in range(0, 90, 36):
            getattr(toys, toy).calls = offset
            _, finding = judged(toy, "float32")
            assert finding == Finding.RUN_TO_RUN, offset


def test_inputs_are_restored_for_the_next_implementation() -> None:
    impls = ["tests.probes.toys:linear_writes", "tests.probes.toys:linear_sound"]
    options = Options(dtypes=("float32",), **SMALL)
    beside = {r.key: r for r in run_jobs(plan_jobs(["matmul"], impls, options), 0, set())}
    alone = list(run_jobs(plan_jobs(["matmul"], impls[1:], options), 0, set()))
    assert len(beside) == 2 * len(alone)
    assert {(beside[row.key].error == row.error, beside[row.key].status) for row in alone} == {(True, "identical")}


def test_writes_are_seen_and_reads_are_not() -> None:
    inputs = {"x": torch.randn(5, 7), "pair": (torch.arange(6), torch.randn(4).bfloat16())}
    before = fingerprint(inputs)
    torch.mm(inputs["x"], inputs["x"].T)  # type: ignore[union-attr] # a tensor
    assert written_to(before, inputs) == []
    inputs["pair"][1][2] *= -1
    assert written_to(before, inputs) == ["pair.1"]
    x = inputs["x"]
    x[:] = x[[1, 0, 2, 3, 4]]  # type: ignore[call-overload, index] # a tensor
    assert written_to(before, inputs) == ["x", "pair.1"]


def test_every_operator_s_own_stock_is_within_its_bound() -> None:
    """The bound is one that a sound kernel keeps: a false alarm would be as bad as a miss."""
    rng = generator(0, "cpu")
    for dtype in (torch.bfloat16, torch.float32):
        x, w = make("wide", (9, 200), dtype, "cpu", rng), make("bell", (31, 200), dtype, "cpu", rng)
        calls = {"linear": (x, w), "matmul": (x, w.T), "softmax": (x,), "log_softmax": (x,), "sum": (x,), "mean": (x,)}
        calls |= {"rms_norm": (x, w[0]), "logsumexp": (x,)}
        for name, operands in calls.items():
            expected = getattr(reference, name)(*operands)
            allowed = bound_of(name, operands, {}, expected, dtype)
            got = load_implementation(name, "stock", "cpu").call(*operands)
            assert bool(((got.double() - expected).abs() <= allowed).all()), (name, dtype)
            assert not bool(((0 - expected).abs() <= allowed).all()), (name, dtype)  # zeros are not


def test_an_answer_is_known_by_its_bits_and_rows_are_checked_at_both_ends() -> None:
    asked, calls = [], []

    def oracle(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        asked.append(len(x))
        return reference.linear(x, weight)

    def lost(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        out = x @ weight.T
        out[-1] = 0
        return out

    answers, x, weight = Answers("linear", oracle), torch.randn(100, 8), torch.randn(4, 8)
    sound, faulty = Watch(linear, answers), Watch(lost, answers)
    faulty.call(x, weight)
    assert (calls, asked, faulty.accuracy) == ([100], [], None)
    for watch in (sound, faulty):
        watch.checking = True
        watch.call(x, weight)
    assert (asked, calls, sound.fault) == ([32], [100] * 3, "")
    assert "4 of 128 elements" in faulty.fault
    weight *= 2
    sound.next_variant()
    sound.call(x, weight)
    assert (asked, sound.fault) == ([32, 32], "")
    watch = watched(lambda *operands: reference.grouped_matmul(*operands).float(), "grouped_matmul")
    watch.call(torch.randn(90, 8), torch.randn(4, 8, 5), torch.tensor([0, 41, 41, 83], dtype=torch.int32))
    assert watch.fault == ""
    assert watch.accuracy.elements == 32 * 5


def test_a_watch_tells_of_each_repeat_once_and_of_the_worst_fault() -> None:
    calls = 0

    def unsteady(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return linear(x, weight) + (2.0**-22 if calls == 4 else 0.0) + (1.0 if calls > 4 else 0.0)

    watch = watched(unsteady)
    for alike in (True, False, True):
        watch.next_variant()
        watch.call(torch.ones(2, 3), torch.ones(4, 3))
        assert looked_at(watch.repeated()) == [alike]
    assert watch.repeated() == []
    assert "8 of 8 elements are off" in watch.fault
    assert (watch.accuracy.calls, watch.accuracy.elements) == (3, 24)


def test_free_memory_is_asked_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def memory(_: Any, at: Any) -> int:
        at._obj[1] = 5 * 2**30
        return 0

    library = Mock(nvmlInit_v2=lambda: 0, nvmlDeviceGetMemoryInfo=memory)
    monkeypatch.setattr("ctypes.CDLL", lambda _: library)
    for status, expected in [(0, 5 * 2**30), (2, None)]:
        library.nvmlDeviceGetHandleByUUID.return_value = status
        assert processes.free_gpu_memory("12ab") == expected
        assert library.nvmlDeviceGetHandleByUUID.call_args[0][0] == b"GPU-12ab"
    monkeypatch.setattr("ctypes.CDLL", lambda _: SimpleNamespace())
    assert processes.free_gpu_memory("12ab") is None


def test_a_row_is_made_of_results_that_were_compared_elsewhere() -> None:
    """What a proof at first use launches and refuses is not what ran."""
    row = row_of(HEAD, [1, 8, "prefill"], ["b", "a", "b"], ran=["kernel"])
    assert (row.status, row.values, row.labels, row.ran) == ("divergent", [1, 8, "prefill"], [0, 1, 0], ["kernel"])
    assert (row.class_sizes, row.trials, row.distinct) == ([2, 1], 3, 2)
    assert row_of(HEAD, [1, 2], [0, False]).status == "identical"
    assert row_of(HEAD, [1, 2], ["a", "b"], status="error").status == "error"
    row = measure(HEAD, [Trial(m, lambda m=m: torch.tensor([1.0 if m < 3 else 2.0])) for m in (1, 2, 3)])  # type: ignore[misc]
    assert (row.status, row.labels, row.replays, row.replays_parted) == ("divergent", [0, 0, 1], 3, 0)
    proven: list[bool] = []

    def serve() -> torch.Tensor:
        if not proven:
            note("refused[16]")
            proven.append(True)
        note("served[64]")
        return torch.ones(1)

    assert measure(HEAD, [Trial(m, serve) for m in (1, 2)], warm=True).ran == ["served[64]"]


X, WEIGHT = torch.ones(3, 8), torch.ones(4, 8)


def test_a_result_of_another_form_is_wrong() -> None:
    rows = torch.ones(3, 8), torch.ones(3, 8), torch.ones(8)
    two = tuple(x.float() for x in reference.rms_norm_residual(*rows))
    one = linear(X, WEIGHT)
    made: list[tuple[str, tuple[torch.Tensor, ...], Any, str]] = [
        ("linear", (X, WEIGHT), [one, one], "linear gave 2 results, not 1"),
        ("linear", (X, WEIGHT), one[:2], r"linear gave the shape \(2, 4\), not \(3, 4\)"),
        ("linear", (X, WEIGHT), one.double(), "linear gave torch.float64 for torch.float32"),
        ("linear", (X, WEIGHT), 1.0, "the result is a float, not a tensor"),
        ("rms_norm_residual", rows, two[:1], "gave 1 results, not 2"),
        ("rms_norm_residual", rows, (*two, two[0]), "gave 3 results, not 2"),
    ]
    for operator, operands, result, why in made:
        with pytest.raises(WrongResultError, match=why):
            watched(lambda *_, result=result: result, operator).call(*operands)
    sound, both = watched(lambda *_: [one]), watched(lambda *_: two, "rms_norm_residual")
    sound.call(X, WEIGHT)
    both.call(*rows)
    assert (sound.fault, len(sound.repeated()), both.fault) == ("", 1, "")
    assert both.accuracy.elements == 2 * 24


def test_a_value_that_the_oracle_does_not_have_is_a_fault() -> None:
    for value in [float("nan"), float("inf"), float("-inf"), 8.5]:
        off = linear(X, WEIGHT)
        off[1, 2] = value
        watch, shared = watched(lambda *_, off=off: off), watched(linear)
        watch.call(X, WEIGHT)
        assert watch.fault.startswith("1 of 12 elements are ")
        assert ("NaN or infinite where the oracle is not" in watch.fault) == (value != 8.5)
        shared.call(X * value, WEIGHT)
        assert shared.fault == ""
