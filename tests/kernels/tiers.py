"""Which parameters of a test run by default."""

from __future__ import annotations

from typing import Any

import pytest


def at_length(*values: Any) -> list[Any]:
    """These only in a run at length (`nightly`); a tuple stands for several arguments."""
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.nightly) for v in values]
