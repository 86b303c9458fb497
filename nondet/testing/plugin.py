"""What pytest gets from nondet: options and fixtures. Nothing happens without being asked.

pytest imports this module in every project of an environment that nondet is installed in. So it imports nothing heavy,
and neither marks, collects nor reports anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from nondet.testing.gates import Endpoint, Engine

__all__ = ["nondet_endpoint", "nondet_engine", "pytest_addoption", "pytest_configure"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of this plugin, in a group of their own."""
    group = parser.getgroup("nondet", "batch invariance (nondet)")
    group.addoption(
        "--nondet-runs",
        metavar="DIR",
        default=None,
        help="Write a run file of every assertion there, for `nondet report DIR/*.jsonl --out report.html`.",
    )
    group.addoption("--nondet-endpoint", metavar="URL", default=None, help="The server that nondet_endpoint asks.")
    group.addoption("--nondet-model", metavar="NAME", default=None, help="What that server calls the model.")


def _folder(request: pytest.FixtureRequest) -> Path:
    """Where run files of a test go: the folder of --nondet-runs, or pytest's own for this test."""
    asked = request.config.getoption("--nondet-runs")
    own: Path = request.getfixturevalue("tmp_path")
    return own if asked is None else Path(asked) / own.name


@pytest.fixture
def nondet_engine(request: pytest.FixtureRequest) -> Engine:
    """nondet's engine over a model of transformers: `nondet_engine.assert_batch_invariant("./my-model")`."""
    from nondet.testing.gates import Engine

    return Engine(_folder(request))


@pytest.fixture
def nondet_endpoint(request: pytest.FixtureRequest) -> Endpoint:
    """The server of --nondet-endpoint: `nondet_endpoint.assert_batch_invariant("a prompt")`. Skips without one."""
    url = request.config.getoption("--nondet-endpoint")
    if url is None:
        pytest.skip("needs a server: --nondet-endpoint URL")
    from nondet.testing.gates import Endpoint

    return Endpoint(url, request.config.getoption("--nondet-model"), _folder(request))


def pytest_configure(config: pytest.Config) -> None:
    """Tell the assertions where to keep their runs."""
    folder = config.getoption("--nondet-runs", default=None)
    if folder is not None:
        from nondet.testing.assertions import keep_runs_in

        keep_runs_in(Path(folder))
