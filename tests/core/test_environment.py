"""The environment header: complete, JSON-able, and free of secrets."""

from __future__ import annotations

import msgspec
import pytest
import torch

from nondet.core import environment
from nondet.core.certificates import machine
from nondet.core.environment import collect

EXPECTED = {
    *("gpu", "driver", "cpu", "cpu_isa", "num_threads", "os", "python", "torch", "triton", "transformers", "cuda"),
    *("cublas", "cudnn", "nccl", "commit", "argv", "seed", "float32_matmul_precision", "allow_tf32_matmul"),
    *("allow_bf16_reduced_precision_reduction", "variables"),
}


def test_everything_that_changes_bits_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 30)
    header = collect(seed=7)
    assert "x" * 30 not in str(header)
    assert set(header) >= EXPECTED
    assert header["torch"] == torch.__version__
    assert header["num_threads"] == torch.get_num_threads()
    assert header["seed"] == 7
    assert header["variables"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    msgspec.json.decode(msgspec.json.encode(header))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    now = collect()["float32_matmul_precision"]
    torch.set_float32_matmul_precision(before)
    assert (before, now) == ("highest", "high")


def test_variables_that_are_no_text_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any byte may stand in a variable or an argument; a run file and a certificate hold UTF-8."""
    for name in ("MKL_CBWR", "NONDET_COMMIT", "TRITON_PTXAS_PATH"):
        monkeypatch.setenv(name, "a\udcff")
    monkeypatch.setattr("sys.argv", ["nondet", "\udcfe"])
    monkeypatch.setattr(environment, "_run", lambda _: None)
    header = collect()
    assert header["variables"]["MKL_CBWR"] == header["commit"] == "a\\udcff"
    assert header["argv"] == ["nondet", "\\udcfe"]
    msgspec.json.encode([header, machine("cpu"), environment.variables(["TRITON_PTXAS_PATH"])])
