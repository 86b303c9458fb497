"""Identical is not right, rare is not batch-dependent, and inputs are not an implementation's to write to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nondet.core.inputs import generator, make
from nondet.core.measure import Trial, fingerprint, measure, row_of, written_to
from nondet.core.records import FORMAT, SCHEMA_VERSION, Header, Row, Run
from nondet.core.watch import Answers, Watch, bound_of
from nondet.errors import WrongResultError
from nondet.kernels import reference
from nondet.probes.base import Options
from nondet.probes.runner import plan_jobs, run_jobs
from nondet.verdict.findings import Finding
from nondet.verdict.gate import exit_code, judge
from tests.probes import toys

SMALL: dict[str, Any] = {"m": 32, "k": 100, "n": 24, "inputs": ("bell",), "runs": 3}


def judged(toy: str, dtype: str = "bfloat16") -> tuple[Run, Finding]:
    """The run of the matmul probe under one toy, and its finding."""
    rows = list(toys.measure("matmul", toy, dtypes=(dtype,), **SMALL).values())
    header = Header(format=FORMAT, schema=SCHEMA_VERSION, command="probe", plan={}, environment={}, started="")
    run = Run(header=header, rows=rows)
    return run, judge(run)[0].finding


@pytest.mark.parametrize(
    ("toy", "reason"),
    [
        ("linear_zeros", "more than any rounding explains"),
        ("linear_flipped", "more than any rounding explains"),
        ("linear_lost_tail", "more than any rounding explains"),
        ("linear_wide_result", "float32 for torch.bfloat16"),
        ("linear_fewer_rows", "shape (24, 24), not (32, 24)"),
        ("linear_nan", "NaN or infinite where the oracle is not"),
        ("linear_writes", "wrote to its input w"),
    ],
)
def test_identical_and_wrong_is_wrong(toy: str, reason: str) -> None:
    """In the row, the verdict and the exit code; beside it a sound kernel is none of that."""
    run, finding = judged(toy)
    assert finding == Finding.WRONG
    assert any(reason in row.reason for row in run.rows if row.status == "wrong"), [r.reason for r in run.rows]
    assert exit_code(run, "divergent") == (3, "")


def test_a_row_is_made_of_results_that_were_compared_elsewhere() -> None:
    """Classes are numbered by first appearance; two of them part, and a status that is given stands."""
    head = Row(
        probe="bench", case="c", operator="linear", shape={}, dtype="float32", device="cpu", inputs="bell",
        varied="batch_size", impl="mine", status="",
    )  # fmt: skip
    row = row_of(head, [1, 8, "prefill"], ["b", "a", "b"], ran=["kernel"])
    assert (row.status, row.values, row.labels, row.ran) == ("divergent", [1, 8, "prefill"], [0, 1, 0], ["kernel"])
    assert (row.class_sizes, row.trials, row.distinct) == ([2, 1], 3, 2)
    assert row_of(head, [1, 2], [0, False]).status == "identical"
    assert row_of(head, [1, 2], ["a", "b"], status="error").status == "error"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_a_sound_kernel_is_clean_and_its_accuracy_is_on_record(dtype: str) -> None:
    """Whole results of several calls were checked, and the worst element is within what rounding explains."""
    run, finding = judged("linear_sound", dtype)
    assert finding == Finding.CLEAN
    assert exit_code(run, "divergent") == (0, "")
    for row in run.rows:
        assert row.accuracy is not None
        assert row.accuracy.calls >= 1
        assert 0 <= (row.accuracy.worst or 0.0) <= 1
        assert "Higham" in row.accuracy.source


@pytest.mark.parametrize("toy", ["linear_every_fifth", "linear_rarely"])
def test_noise_of_some_calls_is_not_called_batch_dependent(toy: str) -> None:
    """A class that showed and does not come again is run-to-run nondeterminism, wherever in the sweep it fell."""
    for offset in range(0, 90, 18):
        getattr(toys, toy).calls = offset
        _, finding = judged(toy, "float32")
        assert finding == Finding.RUN_TO_RUN, offset


def test_a_kernel_that_splits_by_the_batch_is_still_called_batch_dependent() -> None:
    """Its classes come again whenever they are asked for."""
    rows = toys.measure("matmul", "linear_splits_by_m", m=33, k=96, n=24, dtypes=("float32",), inputs=("bell",), runs=3)
    swept = [r for r in rows.values() if r.varied == "batch_size"]
    assert all(r.status == "divergent" and r.replays >= 3 and not r.replays_parted for r in swept)
    run, _ = judged("linear_sound")
    run.rows[:] = list(rows.values())
    assert judge(run)[0].finding == Finding.BATCH


def test_inputs_are_restored_for_the_next_implementation() -> None:
    """A kernel that doubles the weight leaves the next one's figures alone."""
    impls = ["tests.probes.toys:linear_writes", "tests.probes.toys:linear_sound"]
    options = Options(dtypes=("float32",), **SMALL)
    beside = {r.key: r for r in run_jobs(plan_jobs(["matmul"], impls, options), 0, set())}
    alone = list(run_jobs(plan_jobs(["matmul"], impls[1:], options), 0, set()))
    assert len(beside) == 2 * len(alone)
    for row in alone:
        assert beside[row.key].error == row.error
        assert beside[row.key].status == "identical"


def test_a_kernel_that_ends_the_process_is_a_failed_case() -> None:
    """sys.exit(0) inside a kernel is no success of the run."""
    run, finding = judged("linear_exits")
    assert {row.status for row in run.rows} == {"error"}
    assert run.rows[0].reason == "it called sys.exit(0)"
    assert finding == Finding.UNTESTED
    assert exit_code(run, "divergent")[0] == 1


def test_writes_are_seen_and_reads_are_not() -> None:
    """A sign, a swap of two rows and a moved element show in the sums of bits; a product does not."""
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
    from nondet.core.registry import load_implementation

    rng = generator(0, "cpu")
    for dtype in (torch.bfloat16, torch.float32):
        x, w = make("wide", (9, 200), dtype, "cpu", rng), make("bell", (31, 200), dtype, "cpu", rng)
        calls = {"linear": (x, w), "matmul": (x, w.T), "softmax": (x,), "log_softmax": (x,), "sum": (x,), "mean": (x,)}
        calls |= {"rms_norm": (x, w[0]), "logsumexp": (x,)}
        for name, operands in calls.items():
            expected = getattr(reference, name)(*operands)
            allowed = bound_of(name, operands, {}, expected, dtype)
            assert allowed is not None
            got = load_implementation(name, "stock", "cpu").call(*operands)
            assert bool(((got.double() - expected).abs() <= allowed).all()), (name, dtype)
            assert not bool(((0 - expected).abs() <= allowed).all()), (name, dtype)  # zeros are not


def test_a_watch_that_is_not_checking_passes_everything_on() -> None:
    """What is measured and profiled is the operator and nothing else; its signature stays visible."""
    calls = []

    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return x @ weight.T

    watch = Watch(linear, Answers("linear", reference.linear))
    watch.call(torch.ones(2, 3), torch.ones(4, 3))
    assert (calls, watch.accuracy) == ([2], None)
    watch.checking = True
    watch.call(torch.ones(2, 3), torch.ones(4, 3))
    assert calls == [2, 2, 2]
    assert watch.accuracy is not None
    assert watch.accuracy.elements == 8
    with pytest.raises(WrongResultError, match="not a tensor"):
        Watch(lambda *_: [1.0], Answers("linear", reference.linear))._repeat([1.0], (), {})


def test_measure_needs_no_probe() -> None:
    """Whoever has variants and a head gets a row: benches and sampled runs do."""
    head = Row(
        probe="p", case="c", operator="o", shape={}, dtype="float32", device="cpu", inputs="bell",
        varied="batch_size", impl="stock", status="",
    )  # fmt: skip
    row = measure(head, [Trial(m, lambda m=m: torch.tensor([1.0 if m < 3 else 2.0])) for m in (1, 2, 3)])  # type: ignore[misc]
    assert (row.status, row.labels, row.replays, row.replays_parted) == ("divergent", [0, 0, 1], 3, 0)


def test_an_answer_is_known_by_its_bits_and_rows_are_checked_at_both_ends() -> None:
    """The oracle is asked once for equal operands, again after one was written to; of 100 rows the last is checked."""
    asked = []

    def oracle(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        asked.append(len(x))
        return reference.linear(x, weight)

    def lost(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = x @ weight.T
        out[-1] = 0
        return out

    answers, x, weight = Answers("linear", oracle), torch.randn(100, 8), torch.randn(4, 8)
    sound = Watch(lambda x, weight: x @ weight.T, answers)
    faulty = Watch(lost, answers)
    for watch in (sound, faulty):
        watch.checking = True
        watch.call(x, weight)
    assert (asked, sound.fault) == ([32], "")
    assert "4 of 128 elements" in faulty.fault
    weight *= 2
    sound.next_variant()
    sound.call(x, weight)
    assert (asked, sound.fault) == ([32, 32], "")


def test_rows_that_are_left_out_keep_their_experts() -> None:
    """Of a grouped product's rows some are checked, each against the weight of its own expert."""
    answers = Answers("grouped_matmul", reference.grouped_matmul)
    watch = Watch(lambda *operands: reference.grouped_matmul(*operands).float(), answers)
    watch.checking = True
    watch.call(torch.randn(90, 8), torch.randn(4, 8, 5), torch.tensor([0, 41, 41, 83], dtype=torch.int32))
    assert watch.fault == ""
    assert watch.accuracy is not None
    assert watch.accuracy.elements == 32 * 5
