"""Ranks that several tests share: starting them is most of what such a test costs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nondet.ranks.group import RankGroup


@pytest.fixture(scope="module")
def two() -> Iterator[RankGroup]:
    """Two ranks on the CPU, for tests that leave them alive."""
    group = RankGroup(2, "cpu", limit_s=60)
    yield group
    group.close()
