"""Fingerprints of this machine: cases, copies, and units and runs that are planted to add wrongly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nondet.core.records import Fingerprint
from nondet.core.registry import class_operators, classes_for, load_implementation, load_object
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
    for device in ("cpu", "cuda"):
        names = [c.record(impl).key for c in collect.cases(device) for impl in c.calls]
        assert len(names) == len(set(names))
    tf32 = next(c for c in collect.cases("cuda") if c.question.cls == "chain-tf32")
    assert tf32.calls["invariant"] is load_object(
        "nondet.kernels.matmul.cuda:tf32_linear"
    )  # the class's own, not what float32 gets by default
    assert "stock" not in tf32.calls  # the chain's case has it


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


def flipping(case: collect.Case, run: int, row: int) -> collect.Case:
    """The case, whose invariant implementation flips a bit of one row in one of its calls, or below 0 in all."""
    calls = iter(range(1000))

    def wrong(*operands: Any) -> torch.Tensor:
        out: torch.Tensor = case.calls["invariant"](*operands).clone()
        if next(calls) == run or run < 0:
            out.view(-1).view(torch.uint8)[row * out[0].numel() * out.itemsize] ^= 1
        return out

    return replace(case, calls={**case.calls, "invariant": wrong})


@pytest.mark.parametrize("seed", range(5))
def test_one_bit_in_one_tile_of_one_call_shows(seed: int) -> None:
    case = case_of("rms_norm")
    sound = {p.impl: p for p in collect.measure(case)}
    assert (sound["invariant"].units, sound["invariant"].differing, sound["invariant"].wrong) == (8, 0, False)
    found = {p.impl: p for p in collect.measure(flipping(case, seed % 3, 32 * seed + seed))}
    bad = found["invariant"]
    assert (bad.differing, bad.runs_differing, bad.units_differing, bad.wrong) == (1, 1, 1, True)
    assert bad.digest == sound["invariant"].digest  # what most results are
    assert found["stock"].digest == sound["stock"].digest
    always = {p.impl: p for p in collect.measure(flipping(case, -1, 32 * seed))}["invariant"]
    assert (always.differing, always.runs_differing, always.units_differing) == (3, 3, 1)
    assert always.digest == sound["invariant"].digest


def test_what_fails_is_a_record_with_its_reason() -> None:
    def lacking(*_: Any) -> torch.Tensor:
        raise NotImplementedError("none here")

    def broken(*_: Any) -> torch.Tensor:
        raise ValueError("broken")

    case = replace(case_of("sum"), calls={"stock": lacking, "invariant": broken})
    found = {p.impl: (p.status, p.reason) for p in collect.measure(case)}
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

    monkeypatch.setattr(collect, "measure", lambda case: measure(flipping(case, 0, 40)))
    code, out, _ = run("fingerprint", "--device", "cpu", "--out", str(tmp_path / "bad.jsonl"))
    assert code == 3
    assert "this machine computes wrongly: it disagrees with itself" in " ".join(out.split())
    report = tmp_path / "fleet.html"
    code, out, _ = run("fleet", str(tmp_path), "--report", str(report))
    assert code == 3
    assert out.startswith("bad computes wrongly: it disagrees with itself")
    assert "bad computes wrongly" in report.read_text()
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:4]))  # killed after three records
    code, _, _ = run("fingerprint", "--device", "cpu", "--out", str(path), "--resume")
    assert code == 3
    assert len(read_run(path).fingerprints) == 2 * len(few) + 1


def test_a_case_is_named_by_what_it_computes() -> None:
    case = case_of("linear")
    assert case.name.startswith("K=333 N=217 nt")
    assert replace(case.question, kinds=("bell",)).kinds != case.question.kinds
