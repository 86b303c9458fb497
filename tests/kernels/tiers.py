"""What tests of kernels share: what runs by default, and the full way of a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


def at_length(*values: Any) -> list[Any]:
    """These only in a run at length (`nightly`); a tuple stands for several arguments."""
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.nightly) for v in values]


@contextmanager
def in_full() -> Iterator[None]:
    """Each call goes through its replacement: no short way is taken."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nondet.kernels.dispatch.functions._plainly", lambda args: False)
        yield
