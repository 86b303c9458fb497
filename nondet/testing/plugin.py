"""Options and fixtures for pytest, which do nothing unless they are used.

pytest imports this module in every project of an environment that nondet is installed in. So it imports nothing heavy,
and neither marks, collects nor reports anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from nondet.core.records import Run


def assert_open(
    run: Run, *, impls: Sequence[str] = (), rate: float = 0.1, confidence: float = 0.95, by: str = "load"
) -> None:
    """Fail where `nondet gate` would not pass: on divergence, on no answer, and on too few comparisons.

    Raises:
        AssertionError: with the gate's own lines.
    """
    __tracebackhide__ = True
    from nondet.errors import no_commands
    from nondet.reports.gate import text
    from nondet.verdict.gate import Outcome, decide

    decision = decide(run, impls=impls, rate=rate, confidence=confidence, by=by)
    if decision.outcome != Outcome.OPEN:
        raise AssertionError(no_commands("\n".join([*reversed(text(decision, run)), f"run file: {run.source}"])))


@dataclass
class Engine:
    """nondet's own engine over a model of transformers, in this process; run files go to `folder`."""

    folder: Path
    _numbers: Any = field(default_factory=itertools.count, repr=False)

    def assert_batch_invariant(
        self,
        model: str | None = None,
        prompt: str | None = None,
        *,
        impl: str = "invariant",
        n: int = 60,
        load: str = "others=6,targets=2",
        rate: float = 0.1,
        confidence: float = 0.95,
        by: str = "load",
        **options: Any,
    ) -> Run:
        """Complete one prompt n times under a changing load, and fail where a gate would not pass.

        Args:
            model, prompt, impl, n, load, options: As `nondet.sample`; 60 completions, two per load, see a rate of 10%.

        Raises:
            AssertionError: it diverged, or too little was compared for the power.
            UserError: an option that makes no sense.
        """
        __tracebackhide__ = True
        from nondet.api import sample

        out = self.folder / f"engine-{next(self._numbers)}.jsonl"
        run = sample(n, prompt, model=model, impl=impl, load=load, out=out, **options).records
        assert_open(run, impls=[impl], rate=rate, confidence=confidence, by=by)
        return run


@dataclass
class Endpoint:
    """A running server at `url`, with its name of the model (None: its only one); run files go to `folder`."""

    url: str
    model: str | None
    folder: Path
    _numbers: Any = field(default_factory=itertools.count, repr=False)

    def assert_batch_invariant(
        self, *prompts: str, rate: float = 0.1, confidence: float = 0.95, by: str = "load", **options: Any
    ) -> Run:
        """Test the server until it diverges or the power is reached, and fail where a gate would not pass.

        Args:
            options: Any other of `nondet gate --endpoint`: max_tokens, load, seed, protocol, stream, key_env, ...

        Raises:
            AssertionError: it diverged, its load is unproven, or too little was compared.
            UserError: an option that makes no sense, or a server that gives no completion.
        """
        __tracebackhide__ = True
        from nondet.core.runfile import read_run
        from nondet.services.gate import GateRequest, ask_endpoint
        from nondet.services.run import Sink

        request = GateRequest(
            endpoint=self.url, model=self.model, rate=str(rate), confidence=str(confidence), by=by,
            out=self.folder / f"endpoint-{next(self._numbers)}.jsonl", **options,
        )  # fmt: skip
        run = read_run(ask_endpoint(request, Sink(), prompts))
        assert_open(run, rate=rate, confidence=confidence, by=by)
        return run


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of this plugin, in a group of their own."""
    group = parser.getgroup("nondet", "batch invariance (nondet)")
    group.addoption(
        "--nondet-runs",
        metavar="DIR",
        default=None,
        help="Write a run file of every assertion there, for `nondet report DIR/*.jsonl --out report.html`.",
    )
    group.addoption("--nondet-endpoint", metavar="URL", default=None, help="The server that nondet_endpoint tests.")
    group.addoption("--nondet-model", metavar="NAME", default=None, help="That server's name for the model.")


def _folder(request: pytest.FixtureRequest) -> Path:
    """The folder of a test's run files: the folder of --nondet-runs, or pytest's own for this test."""
    folder = request.config.getoption("--nondet-runs")
    own: Path = request.getfixturevalue("tmp_path")
    return own if folder is None else Path(folder) / own.name


@pytest.fixture
def nondet_engine(request: pytest.FixtureRequest) -> Engine:
    """nondet's engine over a model of transformers: `nondet_engine.assert_batch_invariant("./my-model")`."""
    return Engine(_folder(request))


@pytest.fixture
def nondet_endpoint(request: pytest.FixtureRequest) -> Endpoint:
    """The server of --nondet-endpoint: `nondet_endpoint.assert_batch_invariant("a prompt")`. Skips without one."""
    url = request.config.getoption("--nondet-endpoint")
    if url is None:
        pytest.skip("needs a server: --nondet-endpoint URL")

    return Endpoint(url, request.config.getoption("--nondet-model"), _folder(request))


def pytest_configure(config: pytest.Config) -> None:
    """Set where the assertions keep their runs."""
    folder = config.getoption("--nondet-runs", default=None)
    if folder is not None:
        from nondet.testing.assertions import keep_runs_in

        keep_runs_in(Path(folder))
