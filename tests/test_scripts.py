"""lab/tune.py: which shapes it measures, what it refuses, and what it keeps of an older table."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from lab.tune import kept_rows, shapes_of, tune, write
from nondet.errors import UserError
from nondet.kernels.matmul import cublaslt
from nondet.kernels.matmul.cuda import Row, Table


def test_shapes_come_from_the_command_line_and_from_models():
    assert shapes_of(["64x32", "8x16", "64x32"], None, None) == [(64, 32), (8, 16)]
    assert shapes_of(["64x32"], "qwen3-8b", None)[0] == (64, 32)
    for options, said in [({"dtype": ["float8"]}, "float8"), ({"m": [8, 0]}, "--m 0"), ({"m": [2**31 + 1]}, "--m 21")]:
        with pytest.raises(UserError, match=said):
            tune(["64x32"], **options)
    with pytest.raises(UserError, match="4096x6144"):
        shapes_of(["64*32"], None, None)


def test_rows_that_were_not_measured_again_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cublaslt, "version", lambda: 5)
    old = Row("bfloat16", 64, 32, 1, "cublaslt:1", 1.0, "16x32x128w4s7", 1.0, 1.0)
    other = old._replace(n=48)
    write(tmp_path / "t.json", Table("g", "t", "t", 5, [old, other]))
    assert kept_rows(tmp_path / "t.json", [old._replace(m=7)]) == [other]
    monkeypatch.setattr(cublaslt, "version", lambda: 6)
    assert kept_rows(tmp_path / "t.json", [old]) == []
    assert kept_rows(tmp_path / "absent.json", [old]) == []


ROOT = Path(__file__).resolve().parents[1]


def script(name: str, folder: Path, option: str) -> int:
    command, environment = ["bash", f"scripts/serve_{name}.sh", option], os.environ | {"NONDET_SERVERS": str(folder)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False, timeout=60).returncode


def test_asking_and_ending_start_nothing(tmp_path: Path) -> None:
    for name in ["vllm", "llamacpp", "transformers"]:
        assert [script(name, tmp_path, option) for option in ("--url", "--stop", "--sotp")] == [1, 0, 2]
        assert list(tmp_path.iterdir()) == []


def test_a_process_that_took_an_old_number_is_not_ended(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            (tmp_path / "vllm.pid").write_text(f"{other.pid} 1\n", encoding="ascii")
            assert script("vllm", tmp_path, "--url") == 1
            assert script("vllm", tmp_path, "--stop") == 0
            assert other.poll() is None
        finally:
            other.kill()
    assert not (tmp_path / "vllm.pid").exists()
