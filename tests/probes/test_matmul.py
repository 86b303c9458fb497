"""The matmul probe calls what depends on the batch divergent, and nothing else."""

from __future__ import annotations

import pytest
import torch

from nondet.core.registry import load_probe
from nondet.probes.base import SWEEP, Options, sweep
from nondet.probes.matmul import Matmul
from nondet.probes.runner import plan_jobs, run_jobs
from tests.build import tiers
from tests.probes.toys import measure, statuses

SMALL = {"m": 32, "k": 512, "n": 16, "dtypes": ("float32",), "runs": 4}


def test_split_by_m_is_flagged_where_it_begins():
    """A kernel that splits K from 16 rows on: the class changes at 16, in the sweeps and in no other question. With
    --m 3 there are 16 rows in batches of up to 3, and no case fails."""
    rows = measure("matmul", "linear_splits_by_m", **SMALL, inputs=("bell", "order"))
    for kind, asked in {"bell": sweep(32, Options()), "order": list(range(1, 33))}.items():
        row = rows[f"16 rows in batches of M, K=512 N=16, {kind} [float32]"]
        assert (row.status, row.distinct) == ("divergent", 2)
        assert [value for value, label in zip(row.values, row.labels, strict=True) if label] == asked[asked.index(16) :]
    for varied in ("position", "run", "history", "neighbour_values", "alignment"):
        assert statuses(rows, varied=varied) == {"identical"}
    assert "error" not in statuses(measure("matmul", "linear_splits_by_m", **(SMALL | {"m": 3})))


def test_a_fault_of_the_place_or_of_later_rows_is_flagged():
    """A kernel that cuts K by the row's place: every place among 32 has the class of its cut. One that computes row 0
    alike in every batch, and the last rows of a large one in another order, is seen too."""
    rows = measure("matmul", "linear__order__any__place_3", **SMALL, asked={"position"})
    row = next(r for r in rows.values() if r.varied == "position")
    assert (row.status, row.values, row.labels) == ("divergent", list(range(32)), [int(i % 3 == 1) for i in range(32)])
    rows = measure("matmul", "linear_tail_rows", **SMALL, inputs=("order",), asked={"batch_size"})
    assert statuses(rows, varied="batch_size", inputs="order") == {"divergent"}


@pytest.mark.parametrize("dtype", tiers(["float32", "bfloat16"], ["float64", "float16"]))
def test_sound_kernel_is_not_flagged(dtype):
    """Rows computed by themselves are identical in every case, dtype and kind of input, and exact to a rounding."""
    kinds = ("bell", "wide", "cancel", "outlier", "order", "integers")
    rows = measure("matmul", "linear_sound", **(SMALL | {"dtypes": (dtype,), "inputs": kinds}))
    assert statuses(rows) == {"identical"}
    assert {r.inputs for r in rows.values()} == {*kinds, "mixed", "positive"}
    assert not any(r.wrong for r in rows.values())
    ordinary = [r for r in rows.values() if r.inputs not in ("order", "cancel", "mixed") and ", bias," not in r.case]
    assert all(r.error.max_ulp <= 1 for r in ordinary if dtype != "float64")
    assert all(r.reason == "" for r in rows.values()), "an input overflowed the dtype"


def test_cancelling_inputs_cancel_in_the_product():
    """The hard input is hard: the result is far smaller than its terms, so that rounding errors dominate it."""
    probe, sizes = Matmul(), {}
    for case in (c for c in probe.cases(Options(**SMALL, inputs=("bell", "cancel"))) if c.varied == "batch_size"):
        inputs = probe.prepare(case, "cpu", 0)
        x, w = inputs["x"].double(), inputs["w"].double()
        sizes[case.inputs] = float((x @ w.T).abs().mean() / (x.abs() @ w.T.abs()).mean())
    assert sizes["cancel"] < sizes["bell"] / 20


def test_linspace_case_is_the_post_s():
    """a = linspace(-1000, 1000, 2048*4096), b likewise, in the default list alone; a CPU takes a part."""
    probe = Matmul()
    case = next(c for c in probe.cases(Options()) if c.inputs == "linspace")
    inputs = probe.prepare(case, "cpu", 0)
    assert inputs["x"].dtype == torch.float32
    assert torch.equal(inputs["x"], torch.linspace(-1000, 1000, 2048 * 4096).reshape(2048, 4096)[:64])
    assert torch.equal(inputs["w"], torch.linspace(-1000, 1000, 4096 * 4096).reshape(4096, 4096)[:, :512])
    whole = next(c for c in probe.cases(Options(full=True)) if c.inputs == "linspace")
    assert (case.data["values"], whole.data["values"]) == ([1, 64], [1, 2048])
    assert not any(c.inputs == "linspace" for c in probe.cases(Options(**SMALL)))


@pytest.mark.gpu
def test_linspace_figure_of_the_post():
    """1669.25, the post's own figure: measured on one H200, so other GPUs need not show it."""
    if "H200" not in torch.cuda.get_device_name():
        pytest.skip("the figure is an H200's")
    jobs = [j for j in plan_jobs(["matmul"], ["stock"], Options(device="cuda")) if j.case.inputs == "linspace"]
    (row,) = run_jobs(jobs, 0)
    assert row.difference.max_abs == 1669.25


def swept(**options) -> list[list[int]]:
    """The batches of the plain layout's sweeps of the inputs that show an order."""
    cases = [c for c in Matmul().cases(Options(**options)) if (c.inputs, c.varied) == ("order", "batch_size")]
    return [c.data["values"] for c in cases if not c.data["layout"]]


def test_sizes_from_the_command_line():
    """--m is the largest of the sweep, one of --k and --n stands for both, and a model's layers are all asked about.
    `full` goes up to M = 4096 on a CPU too, and every M up to 512 is tried there."""
    assert swept(m=10, k=64)[0] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert {(c.shape["K"], c.shape["N"]) for c in Matmul().cases(Options(m=10, k=64))} == {(64, 64)}
    layers = (("q_proj", 32, 64), ("o_proj", 64, 32))
    assert {(c.shape["K"], c.shape["N"]) for c in Matmul().cases(Options(layers=layers))} == {(32, 64), (64, 32)}
    full = swept(full=True, k=8)
    assert full
    assert all((values[:512], values[-1]) == (list(range(1, 513)), 4096) for values in full)


@pytest.mark.parametrize("probe", ["matmul", "grouped-matmul", "softmax"])
def test_sizes_are_drawn_where_the_user_chose_the_others(probe):
    """With --k, --n and --m given, another seed asks about other batch sizes, and the same one about the same."""

    def asked(seed: int) -> set[int]:
        cases = load_probe(probe).cases(Options(m=200, k=64, n=8, seed=seed))
        return {n for c in cases if c.varied == "batch_size" for n in c.data["values"]}

    assert asked(1) == asked(1) != asked(2)
    assert asked(1) - set(range(1, 65)) - set(SWEEP)
    one, other = (
        {c.shape["K"] for c in Matmul().cases(Options(seed=seed)) if "drawn" in c.data.get("layer", "")}
        for seed in (1, 2)
    )
    assert one != other


def test_a_function_without_a_bias_is_not_asked_for_one():
    """What it can't be asked is skipped, and no fault: the reason says what it takes."""
    rows = measure("matmul", "linear_without_bias", **SMALL, asked={"batch_size"})
    biased = [r for name, r in rows.items() if ", bias," in name]
    assert {(r.status, "too many positional arguments" in r.reason) for r in biased} == {("skipped", True)}


# ---- maps

MAP = {"m": 18, "k": 64, "n": 16, "dtypes": ("float32",), "map": "mn"}


@pytest.mark.parametrize("axis", tiers(["k"], ["n"]))
def test_a_map_has_the_border_where_it_is_at_every_size(axis):
    """A toy that splits K from 16 rows on: the class changes at 16 in each of 16 lines."""
    rows = measure("matmul", "linear_splits_by_m", **(MAP | {"map": f"m{axis}"})).values()
    assert sorted(row.shape[axis.upper()] for row in rows) == [MAP[axis] * i // 16 for i in range(1, 17)]
    for row in rows:
        assert row.values == list(range(1, 19))
        assert row.extra["map"] == {"axis": axis.upper(), "unequal": []}
        # four sums of one term have one order
        assert row.labels == [0] * 18 if row.shape["K"] <= 4 else row.labels == [0] * 15 + [1] * 3, row.case


def test_a_map_looks_at_every_row_of_a_call():
    """Row 0 never changes under a toy whose tail does: its calls are a class of their own, of unequal rows."""
    rows = measure("matmul", "linear_tail_rows", **MAP)
    row = next(r for r in rows.values() if r.shape["N"] == 16)
    assert row.labels == [int((m > 8 and m % 8 > 0) or 1 < m < 8) for m in range(1, 19)]
    assert row.extra["map"]["unequal"] == [1]
    sound = measure("matmul", "linear_sound", **MAP)
    assert {(row.status, len(row.class_sizes)) for row in sound.values()} == {("identical", 1)}


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["stock", "invariant"])
def test_a_whole_weight_is_mapped_on_a_gpu(impl):
    """Every M up to 512 of an 8B model's down_proj: one line of a map, kernels named; `invariant` has one class."""
    options = Options(device="cuda", map="mn", k=12288, n=4096, dtypes=("bfloat16",))
    jobs = plan_jobs(["matmul"], [impl], options)
    (row,) = run_jobs(jobs[-1:], 0)
    assert (row.shape["N"], row.values) == (4096, list(range(1, 513)))
    assert row.kernel_sets
    assert not any("ArgMax" in name for names in row.kernel_sets for name in names), "the comparison's own"
    assert row.status == ("divergent" if impl == "stock" else "identical")


def test_what_a_larger_batch_left_behind_is_a_moment_s():
    """No call is larger than it before the question, or first of its K and N in another batch: history shows both."""
    for toy in ("linear__order__any__grown_201", "linear__order__any__tuned_2"):
        assert "divergent" in statuses(measure("matmul", toy, asked=("history",), **SMALL))
    assert statuses(measure("matmul", "linear_by_width", asked=("history",), **SMALL)) == {"identical"}


def test_a_layout_that_changes_the_order_is_flagged_there():
    """x by columns, as a transposed activation, and rows of a fused weight: no other layout shows the fault."""
    for place, layout in (("turned", "x stored [K, M]"), ("fused", "rows of a fused weight")):
        rows = measure("matmul", f"linear__order__{place}__from_3", asked=("batch_size",), **SMALL)
        shown = {name.partition(", K=")[0] for name, row in rows.items() if row.status == "divergent"}
        assert shown == {f"16 rows in batches of M, {layout}"}


def test_default_cases():
    """A resumed run recognizes a case by its name, so names may neither collide nor change. A window of one M may lie
    anywhere: every M up to 128, and some above 512, are in a sweep of inputs that show an order."""
    cases = list(Matmul().cases(Options()))
    assert len({(c.name, c.dtype) for c in cases}) == len(cases)
    assert "16 rows in batches of M, K=2048 N=1024, bell" in {c.name for c in cases}
    swept = [c for c in cases if (c.inputs, c.varied, c.shape["N"]) == ("order", "batch_size", 320)]
    assert len(swept) == 2
    assert all({*range(1, 129)} <= {*c.data["values"]} and max(c.data["values"]) > 512 for c in swept)
