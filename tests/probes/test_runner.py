"""The runner measures everything it can, says why it could not where it couldn't, and never calls nothing identical."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nondet.cli import main
from nondet.core.launch import note
from nondet.core.measure import Trial, VariantProfile, between_marks
from nondet.core.records import Culprit, Header, Run
from nondet.core.registry import load_probe
from nondet.core.runfile import open_run
from nondet.errors import UnknownNameError, UserError, WrongShapeError
from nondet.probes.attention import packed_trials
from nondet.probes.base import Case, Classes, Options, Probe
from nondet.probes.runner import Job, met_in, plan_jobs, run_jobs

TOYS = "tests.probes.toys"


class _Toy(Probe):
    """A probe whose variants are whatever the test says; `prepared` counts how often inputs were made."""

    name = "toy"

    def __init__(self, results: tuple[Any, ...], many: bool, oracle: torch.Tensor | None) -> None:
        self.results, self.many, self.oracle, self.prepared = results, many, oracle, 0

    def prepare(self, case: Case, device: str, seed: int) -> Any:
        self.prepared += 1
        return case.name

    def trials(self, case: Case, inputs: Any, operator: Callable[..., torch.Tensor]) -> Iterator[Trial]:
        for i, result in enumerate(self.results):
            yield Trial(i, functools.partial(self._computed, result), many=self.many)

    @staticmethod
    def _computed(result: Any) -> torch.Tensor:
        if isinstance(result, BaseException):
            raise result
        note("toy[1x1]")
        return torch.as_tensor(result)

    def reference(self, case: Case, inputs: Any) -> torch.Tensor | None:
        return self.oracle

    def findings(self, case: Case, inputs: Any, classes: Classes, operator: Any) -> dict[str, Any]:
        return {"classes": len(classes.results), "made": self.prepared}


def toy(
    *results: Any, done: Any = (), many: bool = False, oracle: torch.Tensor | None = None, **data: Any
) -> list[Any]:
    """The rows of the toy's two cases under two implementations."""
    probe = _Toy(results, many, oracle)
    cases = [Case(name, "toy", {"N": 2}, "float32", "run", data=data) for name in ("first", "second")]
    return list(run_jobs([Job(probe, case, impl, "cpu") for case in cases for impl in ("stock", "other")], 0, {*done}))


def test_rows_say_what_happened():
    """Values, labels and sizes belong together, the sizes sum to the trials, and launchers' notes are kept."""
    row = toy([1.0, 2.0], [1.0, 3.0], [1.0, 2.0])[0]
    assert row.status == "divergent"
    assert (row.values, row.labels, row.class_sizes) == ([0, 1, 2], [0, 1, 0], [2, 1])
    assert (row.trials, row.distinct) == (3, 2)
    assert (row.difference.max_abs, row.difference.first_mismatch) == (1.0, [1])
    assert row.ran == ["toy[1x1]"]
    assert row.extra == {"classes": 2, "made": 1}
    assert row.key == ("row", "toy", "first", "float32", "cpu", "stock")
    assert row.seconds > 0
    row, *_, last = toy([1.0, 2.0], [1.0, 2.0])
    assert (row.status, row.distinct, row.difference.mismatched) == ("identical", 1, 0)
    assert last.extra["made"] == 2, "inputs are made once a case, for all implementations"
    left = toy([1.0], [1.0], done=[row.key, last.key])  # a resumed run does what is left: rows and jobs have equal keys
    assert [(row.case, row.impl) for row in left] == [("first", "other"), ("second", "stock")]
    # NaN equals NaN, so a kernel that gives nothing else is called identical, with a note for the reader
    row = toy([float("nan"), 1.0], [float("nan"), 1.0])[0]
    assert (row.status, row.reason) == ("identical", "1 of 2 elements of the first variant are NaN or infinite")
    for results in ((), ([1.0],)):  # nothing is identical to one variant
        row = toy(*results)[0]
        assert (row.status, row.trials, "nothing to compare" in row.reason) == ("skipped", 0, True)
    row = toy([1.0, 2.0], [1.0])[0]  # two shapes are a bug of the implementation
    assert (row.status, "not comparable" in row.reason) == ("error", True)


def test_many_results_of_one_variant_and_errors_against_the_oracle():
    """Each is a trial; a number names the first and the others count on. Of ten thousand only the sizes are kept. The
    first variant's error and the worst class's are told apart; a class of NaN is worse than any number."""
    row = toy([[1.0], [1.0], [2.0]], many=True)[0]
    assert (row.values, row.labels, row.trials) == ([0, 1, 2], [0, 0, 1], 3)
    row = toy([[float(i % 3)] for i in range(5000)], many=True)[0]
    assert (row.values, row.labels, row.kernels) == ([], [], [])
    assert row.trials == sum(row.class_sizes) == 5000
    oracle = torch.tensor([1.0, 2.0], dtype=torch.float64)
    row = toy([1.0, 2.0], [1.0, 3.0], oracle=oracle)[0]
    assert (row.error.max_abs, row.worst_error.max_abs) == (0.0, 1.0)
    row = toy([1.0, 2.0], [1.0, 30.0], [1.0, float("nan")], oracle=oracle)[0]
    assert row.worst_error.relative_norm is None


def test_a_failing_case_becomes_a_row_and_the_next_one_runs():
    """Whatever a kernel raises, its first line is kept and the run goes on; a dtype or device that an implementation
    lacks is no failure of the tool's; and Ctrl-C is not a failed case."""
    rows = toy([1.0], RuntimeError("the kernel failed\nwith a long story"))
    assert [row.status for row in rows] == ["error"] * 4
    assert rows[0].reason == "RuntimeError: the kernel failed"
    assert (rows[0].trials, rows[0].values, rows[0].difference) == (0, [], None)
    refusals = UserError("no", "do that"), NotImplementedError("no"), RuntimeError("No available kernel. Aborting.")
    for error in refusals:
        row = toy([1.0], error)[0]
        assert (row.status, row.reason) == ("skipped", str(error))
    small = Options(m=4, k=8, n=8, dtypes=("float32",), inputs=("bell",), runs=2)
    for name, status in (("failing", "error"), ("not_here", "skipped")):  # a user's function, through the whole chain
        jobs = plan_jobs(["matmul"], [f"{TOYS}:{name}"], small)
        assert {(row.status, bool(row.reason)) for row in run_jobs(jobs, 0)} == {(status, True)}
    refused, wrong = (toy([1.0], e, may_refuse=True)[0] for e in (RuntimeError("odd"), WrongShapeError("it gave 3")))
    assert (refused.status, refused.reason) == ("skipped", "the case is not for it: RuntimeError: odd")
    assert wrong.status == "wrong"
    with pytest.raises(KeyboardInterrupt):
        toy([1.0], KeyboardInterrupt())


def test_a_plan_names_each_implementation_once_and_refuses_those_that_do_not_exist():
    """Asked twice for one, or for a backend that stock stands for, it is measured once."""
    jobs = plan_jobs(["attention"], ["stock", "stock", "stock-math"], Options(dtypes=("float32",)))
    assert len({job.key for job in jobs}) == len(jobs)
    assert {job.impl for job in jobs} == {"stock", "stock-flash", "stock-math"}
    for probe, impl, error, said in (
        ("matmul", "invarient", UnknownNameError, "invariant"),
        ("matmul", "nowhere:mm", UserError, "nowhere"),
        ("attention", "stock-cudnn", UserError, "nothing to measure"),
    ):
        with pytest.raises(error, match=said):
            plan_jobs([probe], [impl], Options())


def test_kernels_are_those_between_their_marks():
    """A variant has the kernels between its two marks, each once, in order; comparisons and fills are not its. Many
    results of one variant share its kernels: they were computed by one call, marked once."""
    mark = "vectorized_elementwise_kernel<nextafter_kernel_cuda>"
    launched = [
        *("setup", mark, "Memset (Device)", "gemm_splitK", "splitKreduce", "gemm_splitK", mark),
        *("compare", mark, mark, "compare", mark, "triton_kernel", mark),
    ]
    assert between_marks(launched) == [["gemm_splitK", "splitKreduce"], [], ["triton_kernel"]]
    on_gpu = {"device_type": lambda: torch.autograd.DeviceType.CUDA}
    names = ["nextafter", "one", "nextafter", "nextafter", "two", "nextafter"]
    events = [
        SimpleNamespace(start_ns=lambda i=i: i, name=lambda name=name: name, **on_gpu) for i, name in enumerate(names)
    ]
    results = SimpleNamespace(events=lambda: list(reversed(events)))
    profile = VariantProfile(SimpleNamespace(kineto_results=results))
    for index in (0, 1):
        with profile.variant(index):
            pass
    assert profile.kernels(4) == [["one"], ["two"], ["two"], ["two"]]


@pytest.mark.gpu
def test_a_gpu_names_its_kernels():
    """On a GPU each variant of a stock product comes with the names of the kernels that it launched."""
    options = Options(device="cuda", m=3, k=4096, n=4096, dtypes=("bfloat16",), inputs=("bell",), runs=2)
    rows = list(run_jobs(plan_jobs(["matmul"], ["stock"], options), 0))
    assert rows
    for row in rows:
        assert len(row.kernels) == len(row.values), row.case
        assert all(row.kernel_sets), row.case
        assert not any("nextafter" in name for names in row.kernel_sets for name in names)


def unsteady_sum(x: torch.Tensor, calls: Iterator[int] = itertools.count()) -> torch.Tensor:  # noqa: B008 - it counts
    """A sum that comes out otherwise every time, whatever the batch."""
    return x.sum(-1) + next(calls)


def test_replays_tell_run_to_run_from_batch():
    """What changes from run to run is found out by computing a variant twice; a steady kernel replays to equal bits."""
    options = Options(device="cpu", m=4, k=64, dtypes=("float32",), inputs=("bell",))
    for impl, parted in (("tests.probes.test_runner:unsteady_sum", True), ("stock", False)):
        rows = [r for r in run_jobs(plan_jobs(["reduction"], [impl], options), 0, set()) if r.operator == "sum"]
        assert rows
        for row in rows:
            least = 1 if row.varied == "position" else min(2, len(set(row.values)))
            assert row.replays >= least or row.axis == "run", row.case
            assert (row.replays_parted > 0) == parted, row.case


def test_a_user_s_function_is_judged_as_one_operator():
    """Plain, as the probe's first, which the row says; with a name, as that one; one that no probe has is refused."""
    small = Options(m=4, k=8, dtypes=("float32",), inputs=("bell",))
    plain = plan_jobs(["reduction"], [f"{TOYS}:sum_sound"], small)
    assert {job.case.operator for job in plain} == {"sum"}
    row = next(iter(run_jobs(plain, 0)))
    assert row.extra["judged_as"].startswith("sum, the first operator of reduction")
    named = plan_jobs(["reduction"], [f"mean={TOYS}:sum_sound"], small)
    assert {(job.case.operator, job.impl) for job in named} == {("mean", f"mean={TOYS}:sum_sound")}
    assert not any(job.note for job in named)
    with pytest.raises(UserError, match="softmax"):
        plan_jobs(["reduction"], [f"softmax={TOYS}:sum_sound"], small)
    with pytest.raises(UserError, match="nowhere"):
        plan_jobs(["reduction"], ["mean=nowhere:mm"], small)


BAD: list[tuple[str, list[tuple[dict[str, Any], str]]]] = [
    ("matmul grouped-matmul", [({"k": 0}, "--k 0"), ({"m": 10**12}, "M=1000000000000")]),
    ("matmul grouped-matmul", [({"dtypes": ("float8_e4m3fn",)}, "float8_e4m3fn")]),
    ("matmul", [({"m": -3}, "--m -3"), ({"k": 10**9, "n": 10**9}, "K=1000000000 N=1000000000")]),
    ("matmul", [({"dtypes": ("floaty16",)}, "floaty16"), ({"inputs": ("bel",)}, "bell"), ({"runs": 1}, "--runs 1")]),
    ("matmul", [({"k": 8, "layers": (("q", 8, 8),)}, "--k")]),
    ("matmul", [({"m": 5000, "k": 64, "n": 16, "map": "mn"}, "every M up to 4,096")]),
    ("scaled-matmul", [({"k": 2**20, "n": 2**22}, "memory")]),
    ("attention", [({"config": {"heads": 10**7, "kv_heads": 10**7, "head_dim": 128}}, "Hq=10000000")]),
    ("rms-norm", [({name: size}, f"--{name} {size}") for name, size in (("k", 0), ("n", -1), ("m", 0))]),
    ("rms-norm float-sum", [({"k": 10**13}, "10000000000000")]),
    ("float-sum split-k pointwise backward", [({"k": 0}, "--k 0")]),
    ("atomics", [({"m": 0}, "--m 0"), ({"n": 10**13}, "10000000000000")]),
    ("atomics split-k", [({"dtypes": ("int8",)}, "int8")]),
    ("split-k", [({"n": 10**11}, "100000000000"), ({"runs": 0}, "--runs 0")]),
    ("backward", [({"runs": 1}, "--runs 1"), ({"n": -1}, "--n -1")]),
]


def test_bad_input_is_refused_before_anything_is_allocated() -> None:
    """Sizes, dtypes and inputs that make no sense are named in one line, with what to try."""
    for probe, options, said in (
        (probe, *bad) for probes, all_bad in BAD for probe in probes.split() for bad in all_bad
    ):
        with pytest.raises(UserError) as caught:
            list(load_probe(probe).cases(Options(**options)))
        assert said in str(caught.value), (probe, options)
        assert caught.value.hint, (probe, options)
        assert "\n" not in str(caught.value), (probe, options)


# `nondet probe --from-trace`: the guilty operator's probe at the shapes of the trace, or one line why not.


def culprit(call: str, *shapes: dict[str, list[int]], position: int = 19) -> Culprit:
    return Culprit(
        number=1, replaced=[], position=position, token=-1, layer="0", module="model.layers.0.m", call=call,
        occurrence=0, requests=[], shapes=list(shapes), axes={}, digests={}, differences={}, kernels=[], replays=[],
        family="", sentence="",
    )  # fmt: skip


def run_of(*culprits: Culprit) -> Run:
    about: dict[str, Any] = {"format": "nondet-run", "schema": 3, "environment": {}, "started": ""}
    return Run(header=Header(command="trace", plan={"dtype": "float32"}, **about), culprits=list(culprits))


def attention(rows: int, keys: int) -> dict[str, list[int]]:
    return {"0": [1, 4, rows, 16], "1": [1, 2, keys, 16], "2": [1, 2, keys, 16], "out": [1, 4, rows, 16]}


LINEAR = ({"0": [1, 1, 64], "1": [48, 64], "out": [1, 1, 48]}, {"0": [1, 37, 64], "1": [48, 64], "out": [1, 37, 48]})


def test_a_linear_layer_is_asked_at_its_rows_and_sizes() -> None:
    """Both arms' numbers of rows are among the sizes, and the layer is the one that was met."""
    met = met_in(run_of(culprit("linear", *LINEAR)))
    assert (met.probe, met.k, met.n, met.dtype) == ("matmul", 64, 48, "float32")
    jobs = plan_jobs(["matmul"], ["stock"], met.options(Options(device="cpu", m=8)))
    plain = (j.case for j in jobs if j.case.varied == "batch_size" and not j.case.data["layout"])
    (case,) = (case for case in plain if case.inputs == "bell")
    assert (case.dtype, case.shape["K"], case.shape["N"]) == ("float32", 64, 48)
    assert {1, 37} <= set(case.data["values"])


@pytest.mark.nightly
def test_packed_attention_is_asked_as_it_was_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row and its keys among others' come out as alone under an operator that goes by them alone, and not under
    one whose blocks begin at the first key of the call."""
    met = met_in(run_of(culprit("scaled_dot_product_attention", attention(4, 20), attention(9, 77))))
    assert met.config == {"heads": 4, "kv_heads": 2, "head_dim": 16}
    options = met.options(Options(device="cpu"))
    job = next(j for j in plan_jobs(["attention"], ["stock"], options) if j.case.varied == "load")
    rows = {}
    for name, operator in {"sound": _one_row_in_double, "blocks": _blocks_of_the_call}.items():
        monkeypatch.setattr("nondet.kernels.stock.attention", operator)
        rows[name] = next(run_jobs([job], 0))
    assert rows["sound"].values == ["alone, 20 keys", *(f"9 rows, 77 keys, its own from key {s}" for s in (0, 28, 57))]
    assert rows["sound"].status == "identical"
    assert rows["blocks"].status == "divergent"


def _one_row_in_double(q: Any, k: Any, v: Any, *, mask: Any = None, **_: Any) -> torch.Tensor:
    """Each visible key in its own order, in float64: what others have adds exact zeros."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1).double() for x in (k, v))
    out = torch.zeros_like(q, dtype=torch.float64)
    for row in range(q.shape[2]):
        seen = [i for i in range(k.shape[2]) if mask is None or mask[0, 0, row, i] == 0]
        scores = torch.stack([(q[:, :, row].double() * k[:, :, i]).sum(-1) for i in seen], -1)
        weights = torch.softmax(scores / q.shape[-1] ** 0.5, -1)
        for place, i in enumerate(seen):
            out[:, :, row] += weights[:, :, place, None] * v[:, :, i]
    return out.to(q.dtype)


def _blocks_of_the_call(q: Any, k: Any, v: Any, *, mask: Any = None, **more: Any) -> torch.Tensor:
    """As the other, but rounded on its way by how many keys the call has."""
    return _one_row_in_double(q, k, v, mask=mask) * (1 + 2.0**-22 * (k.shape[2] % 2))


def test_other_operators_are_tested_as_they_were_met() -> None:
    """A pointwise one whole and in pieces of the smaller call's size; grouped products at their experts, depth and
    width, and both numbers of rows. A packing that can't hold the row's own keys was not met as such."""
    met = met_in(run_of(culprit("silu", {"0": [1, 1, 96]}, {"0": [1, 5, 96]})))
    cases = [j.case for j in plan_jobs(["pointwise"], ["stock"], met.options(Options(device="cpu")))]
    assert {(case.operator, case.shape["n"], 96 in case.data["pieces"]) for case in cases} == {("silu", 480, True)}
    met = met_in(run_of(culprit("_grouped_mm", *({"0": [r, 64], "1": [6, 64, 40]} for r in (2, 74)))))
    options = met.options(Options(device="cpu", m=8, inputs=("order",)))
    (case,) = (j.case for j in plan_jobs([met.probe], ["stock"], options) if j.case.varied == "batch_size")
    assert (case.shape["E"], case.shape["K"], case.shape["N"]) == (6, 64, 40)
    assert {2, 74} <= set(case.data["values"])
    tensor = torch.zeros(1, 1, 4, 8)
    trials = packed_trials(_one_row_in_double, tensor, tensor, tensor, 4, [(2, 3)])
    assert [trial.value for trial in trials] == ["alone, 4 keys"]


def test_a_run_without_a_culprit_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is asked of an operator that nobody named; the command too exits with 2, and where shapes are given
    twice."""
    for run, reason in (
        (run_of(), "it holds no trace"),
        (run_of(culprit("")), "named no operator"),
        (run_of(culprit("Tensor.add", {"0": [1, 1, 8]}, {"0": [1, 3, 8]})), "no probe tests `Tensor.add`"),
        (run_of(culprit("linear", {"0": [8]}, {"0": [8]})), "no probe tests `linear`"),
        (run_of(culprit("bmm", *({"0": [b, 3, 32], "1": [b, 32, 8]} for b in (4, 12)))), "no probe tests `bmm`"),
        (run_of(culprit("linear[Float8Tensor]", *LINEAR)), "`nondet probe scaled-matmul --k K --n N` tests"),
    ):
        with pytest.raises(UserError, match=reason) as refused:
            met_in(run)
        assert "\n" not in str(refused.value)
    path = tmp_path / "run.jsonl"
    open_run(path, command="trace", plan={}, environment={}).finish()
    assert main(["probe", "--from-trace", str(path)]) == 2
    assert "names no operator that differs" in capsys.readouterr().err
    assert main(["probe", "matmul", "--from-trace", str(path)]) == 2
    assert main(["probe"]) == 2
