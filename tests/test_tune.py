"""`nondet tune`: which shapes it measures, what it refuses, and what it keeps of an older table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nondet.commands.tune import _kept_tune, shapes_of, tune
from nondet.errors import UserError
from nondet.kernels.matmul import cublaslt
from nondet.kernels.matmul.cuda import Row, Table, write


def test_shapes_come_from_the_command_line_and_from_models():
    """Each shape once, K by N, in the order asked for."""
    assert shapes_of(["64x32", "8x16", "64x32"], None, None) == [(64, 32), (8, 16)]
    assert (4096, 24576) in shapes_of(None, "qwen3-8b", None)
    assert shapes_of(["64x32"], "qwen3-8b", None)[0] == (64, 32)


@pytest.mark.parametrize("text", ["64", "64*32", "0x8", "-4x8", "64x"])
def test_a_shape_that_is_none_is_refused(text):
    """With the form that is expected."""
    with pytest.raises(UserError, match="4096x6144"):
        shapes_of([text], None, None)


def test_nothing_to_tune_is_refused():
    """Rather than measure for hours what nobody asked for."""
    with pytest.raises(UserError, match="--preset"):
        shapes_of(None, None, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it says without a GPU")
def test_without_a_gpu_it_says_so():
    """One line, not a traceback; and bad options are told first."""
    with pytest.raises(UserError, match="CUDA"):
        tune(["64x32"])
    with pytest.raises(UserError, match="float8"):
        tune(["64x32"], dtype=["float8"])
    for m in (0, 2**31 + 1):
        with pytest.raises(UserError, match=f"--m {m}"):
            tune(["64x32"], m=[8, m])


def test_rows_that_were_not_measured_again_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Tuning a second model must not lose the first; another library's rows are void."""
    monkeypatch.setattr(cublaslt, "version", lambda: 5)
    old = Row("bfloat16", 64, 32, 1, "cublaslt:1", 1.0, "16x32x128w4s7", 1.0, 1.0)
    other = old._replace(n=48)
    write(tmp_path / "t.json", Table("g", "t", "t", 5, [old, other]))
    assert _kept_tune(tmp_path / "t.json", [old._replace(m=7)]) == [other]
    monkeypatch.setattr(cublaslt, "version", lambda: 6)
    assert _kept_tune(tmp_path / "t.json", [old]) == []
    assert _kept_tune(tmp_path / "absent.json", [old]) == []


@pytest.mark.gpu
def test_measures_and_keeps_only_proven_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A small table, made for real: every row's members have the class's bits, and times are positive."""
    from nondet.bench.tune import measure
    from nondet.core.certificates import certificates
    from nondet.kernels.matmul.cuda import member

    monkeypatch.setenv("NONDET_CACHE", str(tmp_path))
    device = torch.device("cuda", torch.cuda.current_device())
    measured = list(measure([(512, 256)], [1, 200], torch.bfloat16, device))
    assert len(measured) == 2
    for (m, k, n), row in measured:
        assert isinstance(row, Row)
        assert min(row.choice_us, row.triton_us, row.stock_us) > 0
        assert not row.triton.startswith("cublaslt")
        x = torch.empty(1, m, k, dtype=torch.bfloat16, device=device)
        weight = torch.empty(n, k, dtype=torch.bfloat16, device=device).T[None]
        for name in (row.choice, row.triton):
            found = member(name, x, weight, alignment=256)
            assert found is not None
            assert found.is_anchor or certificates().standing(found.name, found.key)
