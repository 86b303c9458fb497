"""Fingerprints of this machine: cases, copies, and units and runs that are planted to add wrongly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nondet.core.records import Fingerprint
from nondet.core.registry import class_operators, classes_for, load_implementation
from nondet.core.runfile import read_run
from nondet.fleet import collect
from tests.build import Command


def case_of(operator: str, dtype: str = "float32") -> collect.Case:
    return next(c for c in collect.cases("cpu") if (c.question.operator, c.question.dtype) == (operator, dtype))


def test_every_class_and_dtype_has_cases() -> None:
    made = {(c.question.operator, c.question.cls, c.question.dtype) for c in collect.cases("cpu")}
    for operator in class_operators("cpu"):
        for cls in classes_for(operator, "cpu"):
            assert {(operator, cls.name, dtype) for dtype in cls.dtypes} <= made
    assert {c.question.operator for c in collect.cases("cuda")} == set(class_operators("cuda"))
    names = [c.record("invariant").key for c in collect.cases("cpu")]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("operator", ["linear", "matmul", "attention", "grouped_matmul", "rms_norm_residual"])
def test_copies_are_the_same_block(operator: str) -> None:
    for case in (c for c in collect.cases("cpu") if c.question.operator == operator and c.question.dtype == "float32"):
        question = case.question
        operands = question.prepare(question.kinds[0])
        many, asked = collect.copied(question, operands, 3)
        call = load_implementation(operator, "stock", "cpu").call
        parts = collect.blocks(question, asked.answer(many, call, asked.whole), 3)
        once = question.answer(operands, call, question.whole)
        assert parts.shape == (3, *once.shape)
        for part in parts:
            torch.testing.assert_close(part, once, rtol=1e-4, atol=1e-4)


def flipping(run: int, row: int) -> Callable[..., Any]:
    """The operators, of which the invariant one flips a bit of one row in one of its calls."""
    calls = iter(range(1000))

    def find(operator: str, impl: str, device: str) -> Any:
        call = load_implementation(operator, impl, device).call

        def wrong(*operands: Any) -> torch.Tensor:
            out: torch.Tensor = call(*operands)
            if impl == "invariant" and (next(calls) == run or run < 0):
                out = out.clone()
                out.view(torch.int32)[row, 0] ^= 1
            return out

        return SimpleNamespace(call=wrong)

    return find


@pytest.mark.parametrize("seed", range(5))
def test_one_bit_in_one_tile_of_one_call_shows(seed: int) -> None:
    case = case_of("rms_norm")
    sound = {p.impl: p for p in collect.measure(case)}
    assert (sound["invariant"].units, sound["invariant"].differing, sound["invariant"].wrong) == (8, 0, False)
    found = {p.impl: p for p in collect.measure(case, flipping(seed % 3, 32 * seed + seed))}
    bad = found["invariant"]
    assert (bad.differing, bad.runs_differing, bad.units_differing, bad.wrong) == (1, 1, 1, True)
    assert bad.digest == sound["invariant"].digest  # what most results are
    assert found["stock"].digest == sound["stock"].digest
    always = {p.impl: p for p in collect.measure(case, flipping(-1, 32 * seed))}["invariant"]
    assert (always.differing, always.runs_differing, always.units_differing) == (3, 3, 1)
    assert always.digest == sound["invariant"].digest


def test_what_fails_is_a_record_with_its_reason() -> None:
    def find(operator: str, impl: str, device: str) -> Any:
        if impl == "stock":
            raise NotImplementedError("none here")

        def broken(*_: Any) -> torch.Tensor:
            raise ValueError("broken")

        return SimpleNamespace(call=broken)

    found = {p.impl: (p.status, p.reason) for p in collect.measure(case_of("sum"), find)}
    assert found["stock"][0] == "skipped"
    assert "none here" in found["stock"][1]
    assert found["invariant"][0] == "error"
    assert "broken" in found["invariant"][1]


def test_the_command_writes_a_small_file_that_the_other_reads(
    tmp_path: Path, run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = collect.measure
    few = [c for c in collect.cases("cpu") if c.question.operator in ("sum", "rms_norm")]
    monkeypatch.setattr(collect, "cases", lambda device: few)
    answer = Fingerprint(
        impl="stock", cls="", operator="completion", case="tokens", dtype="float32", device="cpu", given="1" * 16,
        digest="2" * 16, runs=2, units=1,
    )  # fmt: skip
    monkeypatch.setattr(collect, "completions", lambda device: [answer])
    for name in ("a", "b"):
        path = str(tmp_path / f"{name}.jsonl")
        code, out, _ = run("fingerprint", "--device", "cpu", "--name", f"node {name}", "--out", path)
        assert code == 0
        assert "this machine agrees with itself" in " ".join(out.split())
    kept = read_run(tmp_path / "a.jsonl")
    assert len(kept.fingerprints) == 2 * len(few) + 1
    assert (kept.machines[0].name, kept.machines[0].host) == ("node a", "")
    assert (tmp_path / "a.jsonl").stat().st_size < 100_000
    assert run("fleet", str(tmp_path))[:2] == (0, "all 2 machines give equal bits.\n")

    monkeypatch.setattr(collect, "measure", lambda case: measure(case, flipping(0, 40)))
    code, out, _ = run("fingerprint", "--device", "cpu", "--out", str(tmp_path / "bad.jsonl"))
    assert code == 3
    assert "this machine computes wrongly: it disagrees with itself" in " ".join(out.split())
    report = tmp_path / "fleet.html"
    code, out, _ = run("fleet", str(tmp_path), "--report", str(report))
    assert code == 3
    assert out.startswith("bad computes wrongly: it disagrees with itself")
    assert "bad computes wrongly" in report.read_text()


def test_a_case_is_named_by_what_it_computes() -> None:
    case = case_of("linear")
    assert case.name.startswith("K=333 N=217 nt")
    assert replace(case.question, kinds=("bell",)).kinds != case.question.kinds
