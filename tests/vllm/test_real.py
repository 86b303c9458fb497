"""The seams of a real vLLM, where one is installed: `pytest -m vllm tests/vllm`, in an environment that has 0.25.1."""

from __future__ import annotations

import importlib.util

import pytest

from nondet.vllm import plugin

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


def test_every_seam_fits() -> None:
    """By signature, the attention backend's base classes among them; nothing is patched."""
    found = plugin.check_seams()
    assert set(found) == {seam.place for seam in plugin.SEAMS}
    from nondet.vllm.attention import SegmentsBackend

    assert SegmentsBackend.get_name() == "CUSTOM"


def test_the_operators_take_its_registration() -> None:
    """vLLM infers their schemas."""
    from vllm.utils.torch_utils import direct_register_custom_op

    from nondet.vllm.operators import OPERATORS

    for name, (compute, shape) in OPERATORS.items():
        direct_register_custom_op(f"{name}_tested", compute, fake_impl=shape)
