"""Ranks that several tests share: starting them is most of what such a test costs."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from nondet.ranks.group import RankGroup


@pytest.fixture(scope="module")
def two() -> Iterator[RankGroup]:
    """Two ranks on the CPU, started while MASTER_PORT is somebody else's; the last test of a module may end them."""
    with socket.socket() as taken, pytest.MonkeyPatch.context() as patch:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        patch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        group = RankGroup(2, "cpu", limit_s=60)
        yield group
        group.close()
