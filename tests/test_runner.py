"""The runner measures everything it can, says why it could not where it couldn't, and never calls nothing identical."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nondet.core import registry
from nondet.core.launch import note
from nondet.core.measure import Trial, VariantProfile, between_marks
from nondet.errors import UnknownNameError, UserError
from nondet.probes.base import Case, Options
from nondet.probes.runner import plan_jobs, run_jobs

TOYS = "tests.probes.toys"


class Toy:
    """A probe whose variants are whatever the test says.

    Two cases under two implementations; `prepared` counts how often inputs were made.
    """

    name = "toy"
    results: tuple[Any, ...] = ()
    many = False
    oracle: torch.Tensor | None = None
    prepared = 0

    def cases(self, options: Options) -> Iterator[Case]:
        """Two of them."""
        for name in ("first", "second"):
            yield Case(name, "toy", {"N": 2}, "float32", "run", impls=("stock", "other"))

    def prepare(self, case: Case, device: str, seed: int) -> Any:
        """Counted."""
        Toy.prepared += 1
        return case.name

    def trials(self, case: Case, inputs: Any, operator: Callable[..., torch.Tensor]) -> Iterator[Trial]:
        """One a result."""
        for i, result in enumerate(self.results):
            yield Trial(i, self._computer(result), many=self.many)

    @staticmethod
    def _computer(result: Any) -> Callable[[], torch.Tensor]:
        def compute() -> torch.Tensor:
            if isinstance(result, BaseException):
                raise result
            note("toy[1x1]")
            return torch.as_tensor(result)

        return compute

    def reference(self, case: Case, inputs: Any) -> torch.Tensor | None:
        """What the test says."""
        return self.oracle

    def extra(self, case: Case, inputs: Any, results: list[torch.Tensor]) -> dict[str, Any]:
        """The number of classes."""
        return {"classes": len(results)}


@pytest.fixture
def toy(monkeypatch):
    """A way to run the toy probe over given results: rows of its two cases under two implementations."""
    monkeypatch.setitem(registry.PROBES, "toy", (f"{__name__}:Toy", "a toy"))
    monkeypatch.setattr(Toy, "prepared", 0)

    def run(*results: Any, done: frozenset[Any] = frozenset(), **attributes: Any) -> list[Any]:
        monkeypatch.setattr(registry, "load_object", lambda target: Toy)
        monkeypatch.setattr(Toy, "results", results)
        for name, value in attributes.items():
            monkeypatch.setattr(Toy, name, value)
        return list(run_jobs(plan_jobs(["toy"], ["stock"], Options()), 0, set(done)))

    return run


def test_rows_say_what_happened(toy):
    """Values, labels and sizes belong together, the sizes sum to the trials, and launchers' notes are kept."""
    row = toy([1.0, 2.0], [1.0, 3.0], [1.0, 2.0])[0]
    assert row.status == "divergent"
    assert (row.values, row.labels, row.class_sizes) == ([0, 1, 2], [0, 1, 0], [2, 1])
    assert (row.trials, row.distinct) == (3, 2)
    assert (row.difference.max_abs, row.difference.first_mismatch) == (1.0, [1])
    assert row.ran == ["toy[1x1]"]
    assert row.extra == {"classes": 2}
    assert row.key == ("row", "toy", "first", "float32", "cpu", "stock")
    assert row.seconds > 0


def test_equal_results_are_identical(toy):
    """What agrees in every bit is not flagged."""
    row = toy([1.0, 2.0], [1.0, 2.0])[0]
    assert (row.status, row.distinct, row.difference.mismatched) == ("identical", 1, 0)


def test_inputs_are_made_once_a_case(toy):
    """Implementations of one case share its inputs, so that they answer the same question."""
    assert len(toy([1.0], [1.0])) == 4
    assert Toy.prepared == 2


@pytest.mark.parametrize("results", [(), ([1.0],)])
def test_one_variant_is_not_identical_to_anything(toy, results):
    """With nothing to compare there is no verdict: the row is skipped and says so."""
    row = toy(*results)[0]
    assert (row.status, row.trials) == ("skipped", 0)
    assert "nothing to compare" in row.reason


def test_errors_against_the_oracle(toy):
    """The first variant's error and the worst class's are told apart; a class of NaN is worse than any number."""
    oracle = torch.tensor([1.0, 2.0], dtype=torch.float64)
    row = toy([1.0, 2.0], [1.0, 3.0], oracle=oracle)[0]
    assert (row.error.max_abs, row.worst_error.max_abs) == (0.0, 1.0)
    row = toy([1.0, 2.0], [1.0, 30.0], [1.0, float("nan")], oracle=oracle)[0]
    assert row.worst_error.relative_norm is None


def test_nothing_but_nan_is_noted(toy):
    """NaN equals NaN, so a kernel that gives nothing else is called identical, with a note for the reader."""
    row = toy([float("nan"), 1.0], [float("nan"), 1.0])[0]
    assert row.status == "identical"
    assert row.reason == "1 of 2 elements of the first variant are NaN or infinite"


def test_many_results_of_one_variant(toy):
    """Each of them is a trial; a number names the first and the others count on."""
    row = toy([[1.0], [1.0], [2.0]], many=True)[0]
    assert (row.values, row.labels, row.trials) == ([0, 1, 2], [0, 0, 1], 3)


def test_more_variants_than_anyone_reads_are_counted_not_listed(toy):
    """Ten thousand labels tell nothing: the sizes of the classes stay."""
    row = toy([[float(i % 3)] for i in range(5000)], many=True)[0]
    assert (row.values, row.labels, row.kernels) == ([], [], [])
    assert row.trials == sum(row.class_sizes) == 5000


def test_a_failing_case_becomes_a_row_and_the_next_one_runs(toy):
    """Whatever a kernel raises, its first line is kept and the run goes on."""
    rows = toy([1.0], RuntimeError("the kernel failed\nwith a long story"))
    assert [row.status for row in rows] == ["error"] * 4
    assert rows[0].reason == "RuntimeError: the kernel failed"
    assert (rows[0].trials, rows[0].values, rows[0].difference) == (0, [], None)


@pytest.mark.parametrize(
    "error",
    [UserError("no", "do that"), NotImplementedError("no"), RuntimeError("No available kernel. Aborting execution.")],
)
def test_what_is_not_available_is_skipped(toy, error):
    """A dtype or device that an implementation lacks is no failure of the tool's."""
    row = toy([1.0], error)[0]
    assert row.status == "skipped"
    assert row.reason == str(error)


def test_results_that_do_not_compare_are_an_error(toy):
    """Variants of two shapes are a bug of the implementation, not a divergence."""
    row = toy([1.0, 2.0], [1.0])[0]
    assert row.status == "error"
    assert "not comparable" in row.reason


def test_interrupting_ends_the_run(toy):
    """Ctrl-C is not a failed case."""
    with pytest.raises(KeyboardInterrupt):
        toy([1.0], KeyboardInterrupt())


def test_finished_rows_are_not_measured_again(toy):
    """A resumed run does what is left: the keys of rows and of jobs are the same."""
    done = frozenset(toy([1.0], [1.0])[i].key for i in (0, 3))
    left = toy([1.0], [1.0], done=done)
    assert [(row.case, row.impl) for row in left] == [("first", "other"), ("second", "stock")]


def test_rows_of_one_plan_have_different_keys():
    """Asking twice for one implementation, or for a backend that stock stands for, measures it once."""
    jobs = plan_jobs(["attention"], ["stock", "stock", "stock-math"], Options(dtypes=("float32",)))
    assert len({job.key for job in jobs}) == len(jobs)
    assert {job.impl for job in jobs} == {"stock", "stock-flash", "stock-math"}


def test_implementations_that_do_not_exist_stop_the_plan():
    """An unknown name, or a function that can't be imported, is said before anything is measured."""
    with pytest.raises(UnknownNameError, match="invariant"):
        plan_jobs(["matmul"], ["invarient"], Options())
    with pytest.raises(UserError, match="nowhere"):
        plan_jobs(["matmul"], ["nowhere:mm"], Options())
    with pytest.raises(UserError, match="nothing to measure"):
        plan_jobs(["attention"], ["stock-cudnn"], Options())


def test_a_user_s_kernel_that_fails_or_is_not_for_this_dtype():
    """Through the whole chain: a user's function that raises gives error rows, one that declines gives skipped ones."""
    small = Options(m=4, k=8, n=8, dtypes=("float32",), inputs=("bell",), runs=2)
    for toy_name, status in (("failing", "error"), ("not_here", "skipped")):
        rows = list(run_jobs(plan_jobs(["matmul"], [f"{TOYS}:{toy_name}"], small), 0, set()))
        assert {row.status for row in rows} == {status}
        assert all(row.reason for row in rows)


def test_kernels_are_those_between_their_marks():
    """A variant has the kernels between its two marks, each once, in order; comparisons and fills are not its."""
    mark = "vectorized_elementwise_kernel<nextafter_kernel_cuda>"
    launched = [
        *("setup", mark, "Memset (Device)", "gemm_splitK", "splitKreduce", "gemm_splitK", mark),
        *("compare", mark, mark, "compare", mark, "triton_kernel", mark),
    ]
    assert between_marks(launched) == [["gemm_splitK", "splitKreduce"], [], ["triton_kernel"]]


def test_many_results_of_one_variant_share_its_kernels():
    """They were computed by one call, marked once."""

    def event(start: int, name: str) -> Any:
        return SimpleNamespace(
            start_ns=lambda: start, name=lambda: name, device_type=lambda: torch.autograd.DeviceType.CUDA
        )

    names = ["nextafter", "one", "nextafter", "nextafter", "two", "nextafter"]
    events = [event(i, name) for i, name in enumerate(names)]
    results = SimpleNamespace(events=lambda: list(reversed(events)))
    profile = VariantProfile(SimpleNamespace(kineto_results=results))
    for index in (0, 1):
        profile.variant(index)
    assert profile.kernels(4) == [["one"], ["two"], ["two"], ["two"]]


@pytest.mark.gpu
def test_a_gpu_names_its_kernels():
    """On a GPU each variant of a stock product comes with the names of the kernels that it launched."""
    options = Options(device="cuda", m=3, k=4096, n=4096, dtypes=("bfloat16",), inputs=("bell",), runs=2)
    rows = list(run_jobs(plan_jobs(["matmul"], ["stock"], options), 0, set()))
    assert rows
    for row in rows:
        assert len(row.kernels) == len(row.values), row.case
        assert all(row.kernel_sets), row.case
        assert not any("nextafter" in name for names in row.kernel_sets for name in names)


def unsteady_sum(x: torch.Tensor) -> torch.Tensor:
    """A sum that comes out otherwise every time, whatever the batch."""
    unsteady_sum.calls = getattr(unsteady_sum, "calls", 0) + 1  # type: ignore[attr-defined]
    return x.sum(-1) + unsteady_sum.calls  # type: ignore[attr-defined]


def test_replays_tell_run_to_run_from_batch():
    """What changes from run to run is found out by computing a variant twice; a steady kernel replays to equal bits."""
    options = Options(device="cpu", m=4, k=64, dtypes=("float32",), inputs=("bell",))
    for impl, parted in (("tests.test_runner:unsteady_sum", True), ("stock", False)):
        rows = [r for r in run_jobs(plan_jobs(["reduction"], [impl], options), 0, set()) if r.operator == "sum"]
        assert rows
        for row in rows:
            assert row.replays >= min(2, len(set(row.values))) or row.varied == "position" or row.axis == "run", (
                row.case
            )
            assert row.replays > 0 or row.axis == "run", row.case
            assert (row.replays_parted > 0) == parted, row.case


def test_a_user_s_function_is_judged_as_one_operator():
    """Plain, as the probe's first, which the row says; with a name, as that one; one that no probe has is refused."""
    small = Options(m=4, k=8, dtypes=("float32",), inputs=("bell",))
    plain = plan_jobs(["reduction"], [f"{TOYS}:sum_sound"], small)
    assert {job.case.operator for job in plain} == {"sum"}
    row = next(iter(run_jobs(plain, 0, set())))
    assert row.extra["judged_as"].startswith("sum, the first operator of reduction")
    named = plan_jobs(["reduction"], [f"mean={TOYS}:mean_sound"], small)
    assert {(job.case.operator, job.impl) for job in named} == {("mean", f"mean={TOYS}:mean_sound")}
    assert not any(job.note for job in named)
    with pytest.raises(UserError, match="softmax"):
        plan_jobs(["reduction"], [f"softmax={TOYS}:softmax_sound"], small)
    with pytest.raises(UserError, match="nowhere"):
        plan_jobs(["reduction"], ["mean=nowhere:mm"], small)
