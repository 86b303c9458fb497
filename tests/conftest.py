"""Shared by all tests: without a GPU, Triton kernels run in Triton's interpreter and `gpu` tests are skipped."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel module is imported, so it has to be set before


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that only a GPU can answer, with the reason."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
