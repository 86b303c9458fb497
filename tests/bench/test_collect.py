"""A whole run: records stream, a killed run goes on, what fails is an entry with its reason, and bits are compared."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nondet.bench import collect as module
from nondet.bench import ranks
from nondet.bench.cells import BenchCase, PerfCounter, groups_of, plan_cases
from nondet.bench.collect import bits_row, collect, implementations_of, kernels_at, planned_keys
from nondet.cli import main
from nondet.core.operator import Sizes
from nondet.core.records import Cell, Limit, Row, Status
from nondet.core.runfile import read_run
from nondet.errors import UnknownNameError
from nondet.kernels import stock
from nondet.ranks.group import RankError
from tests.build import row

IMPLS = {"linear": ["stock", "mine"]}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[..., Any]]:
    """Implementations made here, under the names of IMPLS."""
    table: dict[str, Callable[..., Any]] = {"stock": torch.nn.functional.linear, "mine": torch.nn.functional.linear}

    def load(operator: str, name: str, device: str) -> SimpleNamespace:
        if name not in table:
            raise ImportError(f"{name} needs another torch")
        return SimpleNamespace(call=table[name])

    monkeypatch.setattr(module, "load_implementation", load)
    return table


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> PerfCounter:
    """A quick one, and quick limits of the machine."""
    monkeypatch.setattr("nondet.bench.cells.COPY_BYTES", {"cpu": 2**20})
    monkeypatch.setattr("nondet.bench.cells.PRODUCT_SIZES", {"cpu": 64})
    stopwatch = PerfCounter()
    stopwatch.cache_bytes, stopwatch.budget_us, stopwatch.replay_us = 1024, 1.0, 1.0
    return stopwatch


def cases() -> list[BenchCase]:
    return plan_cases(["linear"], Sizes(m=(1, 4), k=32, n=16), "cpu", None)


def test_a_run_has_limits_bits_and_cells(calls: dict[str, Any], watch: PerfCounter) -> None:
    calls["mine"] = stock.linear
    records = list(collect(cases(), IMPLS, "cpu", 0, watch))
    assert [r.key for r in records] == planned_keys(cases(), IMPLS, "cpu")
    assert [type(r) for r in records] == [Limit, Limit, Row, Row, Cell, Cell]
    cell = records[-1]
    assert isinstance(cell, Cell)
    assert [t.status for t in cell.timed] == [Status.TIMED] * 2
    assert all(len(t.samples_us) == 7 and t.low_us <= t.median_us <= t.high_us for t in cell.timed)
    assert cell.timed[1].ran == ["torch.linear"]
    assert cell.limit_us is not None
    assert cell.limit_us > 0


def test_what_fails_stands_beside_what_does_not(calls: dict[str, Any], watch: PerfCounter) -> None:

    def broken(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 4:
            raise RuntimeError("no tile\nfor this")
        raise NotImplementedError("no M = 1")

    calls["mine"] = broken
    records = list(collect(cases(), IMPLS, "cpu", 0, watch))
    rows = [r for r in records if isinstance(r, Row)]
    assert (rows[0].trials, rows[1].status, rows[1].reason) == (2, Status.SKIPPED, "no M = 1")
    entries = [c.timed for c in records if isinstance(c, Cell)]
    assert [timed[0].status for timed in entries] == [Status.TIMED] * 2
    assert [(timed[1].status, timed[1].reason) for timed in entries] == [
        (Status.SKIPPED, "no M = 1"), (Status.ERROR, "RuntimeError: no tile")
    ]  # fmt: skip

    def refuses(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """As torch does, which says the cause in warnings: they belong to the reason, not on stderr."""
        warnings.warn("Flash attention kernel not used because:", stacklevel=1)
        warnings.warn("Expected a last dimension of 8 (Triggered internally at x.cpp:1.)", stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")

    calls["mine"] = refuses
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        *_, last = collect(cases()[:1], IMPLS, "cpu", 0, watch)
    assert isinstance(last, Cell)
    reason = "No available kernel. Aborting execution. Expected a last dimension of 8"
    assert (last.timed[1].status, last.timed[1].reason) == (Status.SKIPPED, reason)
    del calls["mine"]  # loading goes wrong inside the run, and the run goes on
    *_, last = collect(cases(), IMPLS, "cpu", 0, watch)
    assert isinstance(last, Cell)
    assert [(t.status, t.reason) for t in last.timed] == [
        (Status.TIMED, ""), (Status.ERROR, "ImportError: mine needs another torch")
    ]  # fmt: skip


def test_what_is_not_the_operator_is_not_timed(calls: dict[str, Any], watch: PerfCounter) -> None:
    for calls["mine"], said in [
        (lambda x, w: None, "returned NoneType"),
        (lambda x, w: (x @ w.T)[:, :-1], "where stock returns float32 [1, 16]"),
        (lambda x, w: (x @ w.T).half(), "returned float16 [1, 16]"),
        (lambda x, w: x[:, :16] + 0.0, "relative difference"),
        (lambda x, w: (x @ w.T) * torch.nan, "relative difference nan"),
        (lambda x, w: torch.stack([w @ one for one in x]), ""),  # another order of additions is no fault
    ]:
        cell = next(r for r in collect(cases(), IMPLS, "cpu", 0, watch) if isinstance(r, Cell))
        assert [t.status for t in cell.timed] == [Status.TIMED, Status.ERROR if said else Status.TIMED]
        assert said in cell.timed[1].reason


def test_stock_stands_for_its_backends() -> None:
    """The best stock is chosen among them; the one that writes every score is timed only by its own name."""
    named = implementations_of("attention", ["stock", "invariant"], "cuda")
    assert named == ["stock", "stock-flash", "stock-efficient", "stock-cudnn", "invariant"]
    assert implementations_of("attention", ["stock-math"], "cuda") == ["stock-math"]
    with pytest.raises(UnknownNameError, match="flash-attn"):
        implementations_of("attention", ["flash-attn"], "cuda")


def test_bits_tell_one_class_from_two() -> None:
    """A product whose order depends on M parts; one that takes every row alone does not. Ends are computed twice."""
    group = plan_cases(["linear"], Sizes(m=(1, 2, 40), k=300, n=8), "cpu", None)

    def by_row(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.stack([(one * weight).sum(-1) for one in x])

    def by_load(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        parts = 1 + (x.shape[0] > 2)
        return sum(p @ w.T for p, w in zip(x.chunk(parts, 1), weight.chunk(parts, 1), strict=True))  # type: ignore[return-value] # two parts

    one, two = (bits_row(group, "mine", call, "cpu", 0) for call in (by_row, by_load))
    assert (one.status, one.distinct, one.values, one.replays) == (Status.IDENTICAL, 1, [1, 2, 40], 2)
    assert (two.status, two.labels[-1] != two.labels[0]) == (Status.DIVERGENT, True)
    assert two.difference is not None
    assert two.difference.mismatched > 0


def test_bits_of_attention_join_decode_and_prefill() -> None:
    group = groups_of(plan_cases(["attention"], Sizes(m=(1, 3), k=24), "cpu", None))[0]
    found = bits_row(group, "mine", lambda q, k, v: torch.zeros_like(q) + (q.shape[2] > 1), "cpu", 0)
    assert found.values == ["decode B=1", "decode B=3", "prefill"]
    assert (found.labels, found.varied) == ([0, 0, 1], "query_chunk")
    assert bits_row(group, "mine", lambda q, k, v: torch.zeros_like(q), "cpu", 0).status == Status.IDENTICAL

    # of an operator with two outputs the second counts: a residual is part of what the next layer reads
    group = plan_cases(["rms-norm-residual"], Sizes(m=(1, 4), k=16), "cpu", None)
    assert bits_row(group, "mine", lambda x, r, weight: (x * weight, r + x.shape[0]), "cpu", 0).labels == [0, 1]
    assert bits_row(group, "mine", lambda x, residual, weight: (x * weight, residual), "cpu", 0).labels == [0, 0]


def test_kernels_go_to_their_cells() -> None:
    sizes = plan_cases(["linear"], Sizes(m=(1, 8, 9), k=4, n=4), "cpu", None)
    found = row(values=[1, 8], kernels=[["gemv"], ["gemm"]])
    assert [kernels_at(found, case) for case in sizes] == [["gemv"], ["gemm"], []]
    assert kernels_at(None, sizes[0]) == []


# Cells over ranks, on two processes: times of the slowest rank, bits of row 0 beside every number of rows.

SMALL = ("--device", "cpu", "--m", "1", "--m", "16", "--n", "64", "--k", "64")


@pytest.mark.nightly
def test_sums_and_layers_over_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["bench", "all-reduce", "row-parallel", *SMALL, "--quiet", "--out", "r.jsonl"]
    assert main([*command, "--report", "r.md"]) == 0
    run = read_run(tmp_path / "r.jsonl")
    assert run.complete
    assert [(c.operator, c.shape["M"], c.shape["ranks"]) for c in run.cells] == [
        ("all_reduce", 1, 2), ("all_reduce", 16, 2), ("row_parallel", 1, 2), ("row_parallel", 16, 2)
    ]  # fmt: skip
    for cell in run.cells:
        wanted = {"stock", "invariant"} | ({"rank-free"} if cell.operator == "row_parallel" else set())
        assert {t.impl for t in cell.timed} == wanted
        assert all(t.status == "timed" and len(t.samples_us) == 15 for t in cell.timed)
    assert [c.bus_bytes for c in run.cells] == [64 * 2, 16 * 64 * 2, 0, 0], "2 (W - 1) / W of a bfloat16 message"
    assert {(r.operator, r.impl): r.distinct for r in run.rows if r.impl != "stock"} == {
        ("all_reduce", "invariant"): 1, ("row_parallel", "invariant"): 1, ("row_parallel", "rank-free"): 1
    }  # fmt: skip
    assert "B/s)" in (tmp_path / "r.md").read_text(encoding="utf-8")
    # killed before its last row, it is completed, and its cells stay as they are
    lines = Path("r.jsonl").read_bytes().splitlines(keepends=True)
    Path("r.jsonl").write_bytes(b"".join(lines[:-2]))
    assert main([*command, "--resume"]) == 0
    again = Path("r.jsonl").read_bytes().splitlines(keepends=True)
    assert again[:-2] == lines[:-2]
    assert [json.loads(line)["type"] for line in again[-2:]] == ["row", "end"]


def test_a_rank_that_dies_is_an_error_in_its_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    class Dying:
        def call(self, *_: object, **__: object) -> list[object]:
            raise RankError("rank 1 of 2 was killed by SIGKILL (in a test)")

    monkeypatch.setattr(ranks, "shared_group", lambda *_, **__: Dying())
    main(["bench", "all-reduce", *SMALL[:-2], "--quiet", "--out", str(tmp_path / "r.jsonl")])
    run = read_run(tmp_path / "r.jsonl")
    assert {t.reason for c in run.cells for t in c.timed} == {"rank 1 of 2 was killed by SIGKILL (in a test)"}
    assert {r.status for r in run.rows} == {"error"}
