"""Kernel tests compute on one thread unless they ask for more: OpenMP on shared cores waits longer than it computes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> int:
    """Run on one thread, and on two."""
    torch.set_num_threads(request.param)  # `_one_thread` puts it back
    count: int = request.param
    return count
