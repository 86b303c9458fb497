"""The matmul probe calls what depends on the batch divergent, and nothing else."""

from __future__ import annotations

import pytest
import torch

from nondet.errors import UserError
from nondet.probes.base import Options
from nondet.probes.matmul import Matmul
from tests.probes.toys import measure, statuses

SMALL = {"m": 32, "k": 512, "n": 16, "dtypes": ("float32",), "runs": 4}


def test_split_by_m_is_flagged_where_it_begins():
    """A kernel that splits K from 16 rows on: the class changes at 16, and only the batch sweep shows it."""
    rows = measure("matmul", "linear_splits_by_m", **SMALL)
    row = rows["row 0 of M rows, K=512 N=16, bell [float32]"]
    assert row.status == "divergent"
    assert row.distinct == 2
    assert [value for value, label in zip(row.values, row.labels, strict=True) if label] == [16, 17, 24, 31, 32]
    assert statuses(rows, varied="position") == statuses(rows, varied="run") == {"identical"}


def test_stream_k_is_flagged_by_the_place_alone():
    """A kernel that cuts K by the row's place: the position case shows it; row 0 itself never moves."""
    rows = measure("matmul", "linear_stream_k", **SMALL)
    row = next(r for r in rows.values() if r.varied == "position")
    assert row.status == "divergent"
    assert row.values == list(range(32))
    assert row.labels == [i % 3 for i in range(32)]
    assert statuses(rows, varied="batch_size") == {"identical"}


def test_unsteady_kernel_is_flagged_run_to_run():
    """A kernel whose split changes from call to call is not run-to-run deterministic."""
    assert statuses(measure("matmul", "linear_unsteady", **SMALL), varied="run") == {"divergent"}


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_sound_kernel_is_not_flagged(dtype):
    """Rows computed by themselves are identical in every case, dtype and kind of input, and exact to a rounding."""
    kinds = ("bell", "wide", "cancel", "outlier")
    rows = measure("matmul", "linear_sound", **(SMALL | {"dtypes": (dtype,), "inputs": kinds}))
    assert statuses(rows) == {"identical"}
    assert {r.inputs for r in rows.values()} == set(kinds)
    assert all(r.error.max_ulp <= 1 for r in rows.values() if dtype != "float64")
    assert all(r.reason == "" for r in rows.values()), "an input overflowed the dtype"


def test_cancelling_inputs_cancel_in_the_product():
    """The hard input is hard: the result is far smaller than its terms, so that rounding errors dominate it."""
    probe = Matmul()
    sizes = {}
    for case in probe.cases(Options(**SMALL, inputs=("bell", "cancel"))):
        if case.varied == "batch_size":
            inputs = probe.prepare(case, "cpu", 0)
            x, w = inputs["x"].double(), inputs["w"].double()
            sizes[case.inputs] = float((x @ w.T).abs().mean() / (x.abs() @ w.T.abs()).mean())
    assert sizes["cancel"] < sizes["bell"] / 20


def test_linspace_case_is_the_post_s():
    """a = linspace(-1000, 1000, 2048*4096), b likewise: float32, rows 1 and 2048, and only in the default list."""
    probe = Matmul()
    case = next(c for c in probe.cases(Options()) if c.inputs == "linspace")
    inputs = probe.prepare(case, "cpu", 0)
    assert inputs["x"].shape == (2048, 4096)
    assert inputs["w"].shape == (4096, 4096)
    assert inputs["x"][0, 0] == inputs["w"][0, 0] == -1000
    assert inputs["x"].dtype == torch.float32
    assert case.data["values"] == [1, 2048]
    assert not any(c.inputs == "linspace" for c in probe.cases(Options(**SMALL)))


def test_linspace_runs_without_tf32_and_restores_the_setting():
    """The post's figure was taken with full float32 precision: the user's setting must neither leak in nor be lost."""
    probe = Matmul()
    case = next(c for c in probe.cases(Options()) if c.inputs == "linspace")
    seen = []

    def spy(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_float32_matmul_precision())
        return a

    torch.set_float32_matmul_precision("medium")
    try:
        for trial in probe.trials(case, {"x": torch.ones(2, 2), "w": torch.ones(2, 2)}, spy):
            trial.compute()
        assert seen == ["highest", "highest"]
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.gpu
def test_linspace_figure_of_the_post():
    """1669.25, the post's own figure: measured on one H200, so other GPUs need not show it."""
    if "H200" not in torch.cuda.get_device_name():
        pytest.skip("the figure is an H100's and an H200's")
    from nondet.runner import plan_jobs, run_jobs

    jobs = [j for j in plan_jobs(["matmul"], ["stock"], Options(device="cuda")) if j.case.inputs == "linspace"]
    (row,) = run_jobs(jobs, 0, set())
    assert row.difference.max_abs == 1669.25


def test_sizes_from_the_command_line():
    """--m is the largest of the sweep, one of --k and --n stands for both, and a model's layers are all asked about."""
    cases = list(Matmul().cases(Options(m=10, k=64)))
    assert cases[0].shape == {"M": 10, "N": 64, "K": 64}
    assert cases[0].data["values"] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    layers = (("q_proj", 32, 64), ("o_proj", 64, 32))
    assert {(c.shape["K"], c.shape["N"]) for c in Matmul().cases(Options(layers=layers))} == {(32, 64), (64, 32)}


def test_full_sweep_is_longer():
    """`full` tries every M on a GPU up to 4096, and every M up to 512 on a CPU."""
    case = next(iter(Matmul().cases(Options(full=True, m=4096, k=8))))
    assert case.data["values"][:512] == list(range(1, 513))
    assert case.data["values"][-1] == 4096


def test_case_names_are_unique_and_readable():
    """A resumed run recognizes a case by its name, so names may neither collide nor change."""
    cases = list(Matmul().cases(Options()))
    assert len({(c.name, c.dtype) for c in cases}) == len(cases)
    assert "row 0 of M rows, K=2048 N=1024, bell" in {c.name for c in cases}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"k": 0}, "--k 0"),
        ({"m": -3}, "--m -3"),
        ({"k": 10**9, "n": 10**9}, "K=1000000000 N=1000000000"),
        ({"m": 10**12}, "M=1000000000000"),
        ({"dtypes": ("floaty16",)}, "floaty16"),
        ({"dtypes": ("float8_e4m3fn",)}, "float8_e4m3fn"),
        ({"inputs": ("bel",)}, "bell"),
        ({"runs": 1}, "--runs 1"),
        ({"k": 8, "layers": (("q", 8, 8),)}, "--k"),
    ],
)
def test_bad_input_is_refused_before_anything_is_allocated(options, said):
    """Sizes, dtypes and inputs that make no sense are named in one line, with what to try."""
    with pytest.raises(UserError) as caught:
        list(Matmul().cases(Options(**options)))
    assert said in str(caught.value)
    assert caught.value.hint
    assert "\n" not in str(caught.value)
