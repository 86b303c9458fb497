"""Cells: the defaults are the shapes promised, and what a user types becomes sizes or one clear line."""

from __future__ import annotations

import pytest
import torch

from nondet.bench.cells import arguments, first_rows, parse_sizes, plan_cases
from nondet.core.inputs import generator
from nondet.core.operator import BenchSizes, tile_borders
from nondet.core.registry import load_implementation
from nondet.errors import UnknownNameError, UserError
from nondet.kernels.matmul.cpu_tiles import NotInvariantError


def test_the_defaults_on_cuda() -> None:
    """77 linear layers, 10 of matmul, 7 decode steps, 2 prefills of an 8B model in bfloat16; rows beyond the cache."""
    cases = plan_cases(["all"], BenchSizes(), "cuda", None)
    sections = {c.section: [d for d in cases if d.section == c.section] for c in cases}
    assert {c.dtype for c in cases} == {"bfloat16"}
    assert len(sections["linear"]) == 11 * 7
    assert sections["linear"][0].name == "M=1 K=4096 N=6144"
    assert {c.operator for c in sections["matmul"]} == {"matmul"}
    assert len(sections["matmul"]) == 5 * 2
    assert [(c.shape["B"], c.shape["Tk"]) for c in sections["attention decode"]] == [
        (1, 1024), (1, 8192), (1, 32768), (8, 4096), (32, 2048), (64, 2048), (64, 8192)
    ]  # fmt: skip
    assert [c.shape["Tq"] for c in sections["attention prefill"]] == [4096, 16384]
    assert {"M": 131072, "H": 128} in [dict(c.shape) for c in sections["rms_norm"]]
    names = [(c.section, c.name, c.dtype) for c in cases]
    assert len(set(names)) == len(names)  # a resumed run skips by these


def test_sizes_asked_for() -> None:
    """Sizes apply to what has them, dtypes multiply, a jigsaw stands on both sides of borders."""
    assert [c.name for c in plan_cases(["matmul"], BenchSizes(m=(3,), k=5, n=7), "cpu", ("float16", "float32"))] == [
        "M=3 K=5 N=7", "M=3 K=5 N=7"
    ]  # fmt: skip
    assert [c.group for c in plan_cases(["softmax"], BenchSizes(m=(3, 4), k=99), "cpu", None)] == ["V=99", "V=99"]
    attention = plan_cases(["attention"], BenchSizes(m=(2,), k=64), "cpu", None)
    assert [(c.section, c.shape["B"], c.shape["Tk"]) for c in attention] == [
        ("attention decode", 2, 64), ("attention prefill", 1, 64)
    ]  # fmt: skip
    jigsaw = [c.shape["M"] for c in plan_cases(["matmul"], BenchSizes(k=8, n=8, jigsaw=True), "cuda", None)]
    assert {1, 16, 17, 64, 65, 128, 129, 1024, 1025, 4096} <= set(jigsaw)


def test_linear_and_matmul_mean_what_they_say() -> None:
    """linear is a batch times a layer's weight [N, K]; matmul is a [M, K] times b [K, N], as everywhere else."""
    for name, weight in (("linear", (7, 5)), ("matmul", (5, 7))):
        (case,) = plan_cases([name], BenchSizes(m=(3,), k=5, n=7), "cpu", None)
        a, b = arguments(case, "cpu", generator(0, "cpu"))
        assert (case.operator, case.section, tuple(a.shape), tuple(b.shape)) == (name, name, (3, 5), weight)
        assert load_implementation(name, "stock", "cpu").call(a, b).shape == (3, 7)
        try:
            assert load_implementation(name, "invariant", "cpu").call(a, b).shape == (3, 7)
        except NotInvariantError as refused:  # some CPUs' libraries have none for so short a K, and the kernel says so
            assert "no tile of" in str(refused)  # noqa: PT017 - either answer is right, by machine


def test_former_names_still_work() -> None:
    """Scripts that say `nondet bench grouped` get what they got."""
    assert plan_cases(["grouped"], BenchSizes(), "cpu", None) == plan_cases(
        ["grouped-matmul"], BenchSizes(), "cpu", None
    )


def test_tile_borders_stay_within() -> None:
    """A range has its ends and the borders between them, and nothing else."""
    assert tile_borders(1, 20) == (1, 8, 9, 16, 17, 20)
    assert tile_borders(100, 100) == (100,)
    assert max(tile_borders(1, 100_000)) == 100_000


def test_sizes_as_typed() -> None:
    """A size, a range around borders, a range in steps; together and rising."""
    assert parse_sizes("m", ["16", "1-9", "100-300:100"]) == (1, 8, 9, 16, 100, 200, 300)
    assert parse_sizes("m", []) is None


@pytest.mark.parametrize(
    "text",
    ["0", "-3", "x", "9-3", "1-9:0", "1-9:00", "1.5", "", "1-999999999999", "9" * 26, "1-16777216:1", "1-9999999"],
)
def test_what_is_no_size(text: str) -> None:
    """One clear line that names the option and what was given."""
    with pytest.raises(UserError, match="--m"):
        parse_sizes("m", [text])


def test_wrong_names() -> None:
    """Close names are suggested."""
    with pytest.raises(UnknownNameError, match="matmul"):
        plan_cases(["matmull"], BenchSizes(), "cpu", None)
    with pytest.raises(UnknownNameError, match="float16"):
        plan_cases(["matmul"], BenchSizes(), "cpu", ("float8",))
    with pytest.raises(UserError, match="--k 0"):
        plan_cases(["matmul"], BenchSizes(k=0), "cpu", None)
    with pytest.raises(UserError, match="--k 99999999999"):
        plan_cases(["attention"], BenchSizes(k=99999999999), "cpu", None)


def test_options_that_nothing_asked_for_has() -> None:
    """Said, and not left aside; beside an operator that has them they are fine."""
    with pytest.raises(UserError, match="--n 8"):
        plan_cases(["mean", "softmax"], BenchSizes(n=8), "cpu", None)
    with pytest.raises(UserError, match="--jigsaw"):
        plan_cases(["grouped"], BenchSizes(jigsaw=True), "cpu", None)
    assert plan_cases(["mean", "grouped"], BenchSizes(n=8), "cpu", None)
    assert plan_cases(["all"], BenchSizes(n=8, jigsaw=True), "cpu", None)


def test_the_first_rows_keep_the_weights() -> None:
    """Row 0 of the small call is row 0 of the large one, under the same weights."""
    for name in ("linear", "matmul", "rms-norm", "rms-norm-residual", "softmax", "grouped"):
        n = 8 if name in ("linear", "matmul", "grouped") else None
        (case,) = plan_cases([name], BenchSizes(m=(6,), k=8, n=n), "cpu", None)
        whole = arguments(case, "cpu", generator(0, "cpu"))
        part = first_rows(case, whole, 2)
        assert part[0].shape[0] == 2
        assert torch.equal(part[0], whole[0][:2])
        assert name == "softmax" or torch.equal(part[1], whole[1][:2] if name == "rms-norm-residual" else whole[1])
    assert first_rows(case, whole, 2)[2].tolist() == [1, 2, 2, 2, 2, 2, 2, 2]
