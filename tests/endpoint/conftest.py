"""Shared by the tests of endpoints."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """No key of whoever runs the tests gets into them."""
    for name in ("NONDET_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
