"""`nondet certify` on the command line: verdicts, certificates, and one clear line for bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nondet.core import certificates as store
from nondet.core.records import Status
from nondet.core.runfile import read_run
from tests.build import Command, tiers


@pytest.fixture
def run(run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("NONDET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(store, "_instances", {})
    return run


SMALL = ("certify", "linear", "--device", "cpu", "--k", "64", "--n", "32", "--m", "17", "--dtype", "bfloat16")

WRONG = [
    (["certify", "liner"], ["'liner'", "linear"]),
    (["certify", "linear", "--class", "chian", "--device", "cpu"], ["'chian'", "chain"]),
    (["certify", "linear", "--class", "chain", "--device", "cpu"], ["belongs to cuda", "cpu-tiles"]),
    (["certify", "softmax", "--class", "cpu-tiles", "--device", "cpu"], ["no softmax"]),
    (["certify", "linear", "--member", "cublas-lt", "--device", "cpu"], ["'cublas-lt'", "invariant"]),
    (["certify", "linear", "--dtype", "floaty16"], ["'floaty16'", "float16"]),
    (["certify", "linear", "--dtype", "float8_e4m3fn", "--device", "cpu"], ["linear", "--dtype float8_e4m3fn"]),
    (["certify", "linear", "--device", "tpu"], ["'tpu'", "cpu"]),
    (
        ["certify", "linear", "--inputs", "nope"],
        ["'nope'", "Known: bell, cancel, order, order-wide, outlier, underflow, wide"],
    ),
    (["certify", "--show", "--forget"], ["--forget", "by itself"]),
    (["certify", "linear", "--forget"], ["--forget", "by itself"]),
    (["certify", "linear", "--seed", "99999999999999999999999"], ["'--seed'"]),
    (["certify", "linear", "--m", "0"], ["--m 0"]),
    (["certify", "linear", "--k", "-3"], ["--k -3"]),
    (["certify", "linear", "--impl", "no.such.module:f"], ["no.such.module"]),
    (["certify", "--impl", "math:sqrt"], ["--impl", "certify linear"]),
    (["certify", "linear", "--impl", "math:pi"], ["float", "function"]),
    (["certify", "linear", "--preset", "qwen3-8c"], ["'qwen3-8c'", "qwen3-8b"]),
    (["certify", "linear", "--preset", "qwen3-8b", "--k", "5"], ["--k and --n", "one of the two"]),
    (["certify", "linear", "--out", "x.txt"], ["x.txt", ".jsonl"]),
    (["certify", "linear", "--fail-on", "sunshine"], ["'sunshine'", "divergent"]),
]


def test_bad_input_is_one_clear_line(run: Any, tmp_path: Path) -> None:
    """Exit code 2, one line on stderr that quotes the value, nothing measured, nothing left behind."""
    for argv, said in WRONG:
        code, out, err = run(*argv)
        assert (code, out) == (2, ""), argv
        assert err.startswith("nondet: "), argv
        assert err.count("\n") == 1, argv
        assert [word for word in said if word not in err] == [], argv
        assert list(tmp_path.iterdir()) == [], argv


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_no_gpu_is_said_plainly(run: Any) -> None:
    """No silent fallback to the CPU's classes."""
    code, _, err = run("certify", "linear", "--device", "cuda")
    assert (code, "--device cuda" in err) == (2, True)


def test_the_command_proves_keeps_shows_and_forgets(run: Any, tmp_path: Path) -> None:
    """Rows in a run file that reports read, certificates in the cache, a resumed run free, --forget empties it."""
    code, out, err = run(*SMALL, "--out", "r.jsonl", "--report", "r.md", "--report", "r.html")
    assert code == 0, err
    assert "invariant: no divergence observed in " in " ".join(out.split())
    rows = read_run(Path("r.jsonl")).rows
    assert {r.probe for r in rows} == {"certify"}
    assert {r.status for r in rows} == {Status.IDENTICAL}
    assert "no divergence observed" in Path("r.md").read_text()
    assert run(*SMALL, "--out", "r.jsonl")[0] == 2
    assert run(*SMALL, "--out", "r.jsonl", "--resume")[0] == 0
    assert read_run(Path("r.jsonl")).rows == rows
    assert list((tmp_path / "cache" / "certificates").iterdir())
    code, out, _ = run("certify", "--show", "--device", "cpu", "--json")
    certificates = json.loads(out)["certificates"]
    assert (code, {c["holds"] for c in certificates}) == (0, {True})
    asked = [c for c in certificates if c["member"] == "invariant"]
    assert len(asked) == sum(len(r.values) - 1 for r in rows) - 1  # one row has no stride: the same twice
    _, out, _ = run("certify", "--show", "--device", "cpu")
    assert f"standing: {len(certificates)}" in out
    assert "excluded: none" in out
    assert run("certify", "--forget", "--device", "cpu")[0] == 0
    assert not list((tmp_path / "cache" / "certificates").iterdir())


def test_a_users_kernel_gets_a_verdict_in_plain_words(run: Any, tmp_path: Path) -> None:
    """Right except at M = 1: said so, excluded there alone, a finding and no failure unless asked to be one."""
    (tmp_path / "users_kernel_1.py").write_text(
        "from nondet.kernels.matmul.cpu import linear as right\n"
        "def linear(x, weight, bias=None):\n"
        "    out = right(x, weight, bias)\n"
        "    if x.shape[0] == 1:\n"
        "        half = x.shape[1] // 2\n"
        "        parts = [x[:, s].float() @ weight[:, s].float().T for s in (slice(half), slice(half, None))]\n"
        "        out = (sum(parts) + (0 if bias is None else bias.float())).to(x.dtype)\n"
        "    return out\n"
    )
    user = (*SMALL, "--class", "cpu-tiles", "--impl", "users_kernel_1:linear")
    code, out, _ = run(*user, "--out", "u.jsonl", "--report", "u.md")
    assert code == 0
    assert "left its numerics class in 3 of 3 cases" in Path("u.md").read_text()
    assert "M anchor: A | 1: B | 2-17: A" in Path("u.md").read_text()
    assert "differs at M = 1, not at 2, 3, 5, 8, 13, 16, 17; first: M = 1" in " ".join(out.split())
    assert {tuple(r.extra["left_at"]) for r in read_run(Path("u.jsonl")).rows} == {(1,)}
    assert run(*user, "--out", "v.jsonl", "--fail-on", "divergent")[0] == 3
    assert run(*SMALL, "--out", "w.jsonl", "--fail-on", "divergent")[0] == 0
    shown = json.loads(run("certify", "--show", "--device", "cpu", "--json")[1])["certificates"]
    mine = [c for c in shown if c["member"].startswith("users_kernel_1:linear @")]
    assert {c["holds"] for c in mine} == {True, False}


ALWAYS = "attention softmax grouped-matmul matmul scaled-matmul"
NIGHTLY = "attention-gradient rms-norm rms-norm-residual cross-entropy sum softmax-gradient silu-gradient"


@pytest.mark.parametrize("operator", tiers(ALWAYS.split(), [*NIGHTLY.split(), "rms-norm-gradient"]))
def test_the_cpus_classes_hold_on_this_machine(run: Any, operator: str) -> None:
    """Every operator with a class on a CPU can be asked, answers, and stays in its class."""
    how = ("--k", "48", "--n", "32") if operator not in ("attention",) else ()
    dtype = "float8_e5m2" if operator == "scaled-matmul" else "float32"
    code, _, err = run("certify", operator, "--device", "cpu", "--dtype", dtype, "--m", "9", *how, "--out", "c.jsonl")
    assert code == 0, err
    rows = read_run(Path("c.jsonl")).rows
    assert rows
    assert [r.reason for r in rows if r.status != Status.IDENTICAL] == []


@pytest.mark.gpu
def test_the_chain_holds_on_this_gpu_and_splits_do_not(run: Any, tmp_path: Path) -> None:
    """Tiles and the dispatcher stay in class chain; cutting K in two, through the same kernel, does not."""
    (tmp_path / "users_kernel_2.py").write_text(
        "from nondet.kernels.matmul.cuda import chain_anchor_linear as chain\n"
        "def split(x, weight, bias=None):\n"
        "    h = x.shape[1] // 2\n"
        "    a, b = (chain(x[:, s].contiguous().float(), weight[:, s].contiguous().float())"
        " for s in (slice(h), slice(h, None)))\n"
        "    return (a + b + (0 if bias is None else bias.float())).to(x.dtype)\n"
    )
    shape = ("--k", "512", "--n", "256", "--m", "130", "--dtype", "bfloat16")
    code, _, err = run("certify", "linear", "--class", "chain", *shape, "--out", "g.jsonl")
    assert code == 0, err
    rows = read_run(Path("g.jsonl")).rows
    assert [r.reason for r in rows if r.impl == "invariant" and r.status != Status.IDENTICAL] == []
    assert [r.reason for r in rows if r.impl.startswith("triton/") and r.status != Status.IDENTICAL] == []
    user = ("--impl", "users_kernel_2:split", "--class", "chain")
    assert run("certify", "linear", *user, *shape, "--out", "h.jsonl", "--fail-on", "divergent")[0] == 3
