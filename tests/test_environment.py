"""The environment header: complete, JSON-able, and free of secrets."""

from __future__ import annotations

import msgspec
import pytest
import torch

from nondet.environment import collect, safe_argv

EXPECTED = {
    "gpu",
    "driver",
    "cpu",
    "cpu_isa",
    "num_threads",
    "os",
    "python",
    "torch",
    "triton",
    "transformers",
    "cuda",
    "cublas",
    "cudnn",
    "nccl",
    "commit",
    "argv",
    "seed",
    "float32_matmul_precision",
    "allow_tf32_matmul",
    "allow_bf16_reduced_precision_reduction",
    "variables",
}


def test_everything_that_changes_bits_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader finds every version and flag, and the variables that steer libraries."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    header = collect(seed=7)
    assert set(header) >= EXPECTED
    assert header["torch"] == torch.__version__
    assert header["num_threads"] == torch.get_num_threads()
    assert header["seed"] == 7
    assert header["variables"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    msgspec.json.decode(msgspec.json.encode(header))


def test_a_changed_precision_flag_shows() -> None:
    """The flags are read from the running process, not assumed."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert collect()["float32_matmul_precision"] == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_other_variables_stay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets in the environment never reach a run file."""
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 30)
    assert "x" * 30 not in str(collect())


@pytest.mark.parametrize(
    ("argv", "kept"),
    [
        (["/home/ann/bin/nondet", "sample", "--n", "3"], ["nondet", "sample", "--n", "3"]),
        (["nondet", "--api-key", "s3cret"], ["nondet", "--api-key", "<hidden>"]),
        (["nondet", "--api-key=s3cret", "--max-tokens", "8"], ["nondet", "--api-key=<hidden>", "--max-tokens", "8"]),
        (["nondet", "hf_" + "a" * 30], ["nondet", "<hidden>"]),
    ],
)
def test_argv_is_kept_without_its_secrets(argv: list[str], kept: list[str]) -> None:
    """The command can be repeated from the header, and the header can be shared."""
    assert safe_argv(argv) == kept
