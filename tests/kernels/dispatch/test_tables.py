"""Which dispatch keys are looked at, for devices that this machine need not have."""

from __future__ import annotations

import pytest
import torch

from nondet.kernels.dispatch import block


@pytest.mark.parametrize("device", ["CPU", "CUDA"])
def test_every_key_is_one_that_torch_knows(device: str) -> None:
    """torch refuses unknown keys with an error: on a GPU that was every first enter of a block."""
    for key in block._FORMS[device]:
        torch._C._dispatch_key_parse(key)
    with pytest.raises(RuntimeError, match="could not parse"):
        torch._C._dispatch_key_parse("MkldnnCUDA")


def test_a_machine_with_a_gpu_can_be_listed_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of kernels is made for both devices; without CUDA kernels in this build, it is made all the same."""
    monkeypatch.setattr(block, "devices", lambda: ("CPU", "CUDA"))
    keys = {key for _, key in block._kernels_there()}
    assert "CPU" in keys
    assert keys <= {*block._FORMS["CPU"], *block._FORMS["CUDA"]}
