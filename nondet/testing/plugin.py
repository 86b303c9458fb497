"""What pytest gets from nondet: options and fixtures. Nothing happens without being asked.

pytest imports this module in every project of an environment that nondet is installed in. So it imports nothing heavy,
and neither marks, collects nor reports anything.
"""

from __future__ import annotations

from pathlib import Path

import pytest

__all__ = ["pytest_addoption", "pytest_configure"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of this plugin, in a group of their own."""
    group = parser.getgroup("nondet", "batch invariance (nondet)")
    group.addoption(
        "--nondet-runs",
        metavar="DIR",
        default=None,
        help="Write a run file of every assertion there, for `nondet report DIR/*.jsonl --out report.html`.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Tell the assertions where to keep their runs."""
    folder = config.getoption("--nondet-runs", default=None)
    if folder is not None:
        from nondet.testing.assertions import keep_runs_in

        keep_runs_in(Path(folder))
