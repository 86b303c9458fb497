"""The fixtures, as a test suite has them: an engine and a server, each asked as a gate would."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest

from nondet.core.runfile import read_run
from nondet.testing.plugin import Endpoint, Engine, assert_open
from tests.endpoint.honest import serving
from tests.verdict.test_decision import loads

pytest_plugins = ("pytester",)
SMALL = {"max_tokens": 5, "load": "others=4,targets=3,prompt=4-8,tokens=4-8", "rate": 0.7}


def test_a_run_that_a_gate_would_not_open_on_fails() -> None:
    """On divergence, and on too few loads; enough of them pass."""
    assert_open(loads(30))
    with pytest.raises(AssertionError, match=r"^gate shut"):
        assert_open(loads(30, parted=[7]))
    with pytest.raises(AssertionError, match=r"^gate not enough was compared"):
        assert_open(loads(5))


def test_an_engine_is_asked_in_process(tmp_path: Path) -> None:
    """The embedded model; three loads of one see no tenth, so that the gate is never open, whatever they show."""
    asked = {"n": 3, "load": "others=1,targets=1,prompt=4-8,tokens=4-8,spread=8", "max_tokens": 3, "impl": "stock"}
    with pytest.raises(AssertionError, match=r"^gate (shut|not enough was compared: stock: 2 loads)"):
        Engine(tmp_path).assert_batch_invariant(**asked)
    assert len(read_run(tmp_path / "engine-0.jsonl").completions) == 3


def test_a_server_is_asked_over_http(tmp_path: Path) -> None:
    """An honest one passes, one that depends on its batch fails at once."""
    with serving("vllm", token_s=0.001) as server:
        Endpoint(server.url, None, tmp_path).assert_batch_invariant("The following", **SMALL)
    with serving("vllm", token_s=0.001, batch_noise=1e-6) as server, pytest.raises(AssertionError, match=r"^gate shut"):
        Endpoint(server.url, None, tmp_path / "b").assert_batch_invariant("The following", **SMALL)


def test_without_a_server_its_test_is_skipped(pytester: pytest.Pytester) -> None:
    """With the reason; the option's name is in it."""
    pytester.makepyfile("def test_server(nondet_endpoint): assert False\ndef test_engine(nondet_engine): pass")
    installed = any(e.name == "nondet" for e in entry_points(group="pytest11"))  # then pytest has it already
    result = pytester.runpytest_inprocess(*(() if installed else ("-p", "nondet.testing.plugin")), "-rs")
    result.assert_outcomes(skipped=1, passed=1)
    result.stdout.fnmatch_lines(["*needs a server: --nondet-endpoint URL*"])
