"""The command against real servers: contract, solo, cold, warm, loaded; what each gives is what nondet says of it."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from nondet.reading import read_run
from nondet.result import Run

from .conftest import REAL, Real

SERVERS = [pytest.param(name, marks=getattr(pytest.mark, real.marker)) for name, real in REAL.items()]
# Longer than a page of any of their prefix caches.
PROMPT = (
    "Classes provide a means of bundling data and functionality together. Creating a new class creates a new type of "
    "object, allowing new instances of that type to be made. Each class instance can have attributes attached to it "
    "for maintaining its state. For example, the"
)
ARMS = {"solo": 2, "cold": 2, "warm": 2, "loaded": 8}


@pytest.fixture(scope="module")
def run(server: tuple[Real, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Run]:
    """One run of all arms, by the command that users type."""
    real, url = server
    out = tmp_path_factory.mktemp(real.name) / "run.jsonl"
    arms = ",".join(f"{arm}={count}" for arm, count in ARMS.items())
    options = ["--arms", arms, "--load", "light", "--max-tokens", "12", "--prompt", PROMPT, "--out", str(out)]
    command = [sys.executable, "-m", "nondet", "sample", "--endpoint", url, "--model", real.model, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    return real.name, read_run(out)


@pytest.mark.parametrize("server", SERVERS, indirect=True)
def test_every_arm_is_whole(run: tuple[str, Run]) -> None:
    """All completions of all arms are there and none failed."""
    name, made = run
    assert Counter(c.arm for c in made.completions) == ARMS
    assert {c.status for c in made.completions} == {"ok"}
    known = {c.served.prompt_tokens for c in made.completions if c.served}
    assert len(known) == 1, name


@pytest.mark.parametrize("server", SERVERS, indirect=True)
def test_the_contract_is_what_the_server_keeps(run: tuple[str, Run]) -> None:
    """What each server is known to give: ids and logprobs or neither, a seed or none, metrics or none."""
    name, made = run
    said = {a.question: a.answer for a in made.contract}
    whole = {"known-by": "yes", "logprobs": "yes", "greedy": "yes", "max-tokens": "yes", "varies": "yes", "seed": "yes"}
    counted = {"running": "yes", "cache-counted": "yes"}
    text_only = {"known-by": "no", "logprobs": "no", "greedy": "unknown", "seed": "unknown", "running": "no"}
    expected = {
        "vllm": whole | counted | {"distribution": "no"},
        "llamacpp": whole | counted | {"distribution": "no"},
        "transformers": text_only | {"max-tokens": "yes", "cache-counted": "no", "varies": "unknown"},
    }[name]
    assert {question: said[question] for question in expected} == expected


@pytest.mark.parametrize("server", SERVERS, indirect=True)
def test_the_load_formed_and_the_cache_was_what_the_arm_says(run: tuple[str, Run]) -> None:
    """The server's own counters prove the load and the cache, or nothing does and nothing is claimed."""
    name, made = run
    loaded = [r.traffic for r in made.rounds if r.arm == "loaded" and r.traffic]
    assert loaded
    if name == "transformers":
        assert all(t.running_most is None and t.decoding_most >= 2 for t in loaded)
        assert all(c.served and c.served.cached_tokens is None for c in made.completions)
        return
    assert all(t.running_most is not None and t.running_most >= 2 for t in loaded)
    cached = {arm: {c.served.cached_tokens for c in made.completions if c.served and c.arm == arm} for arm in ARMS}
    assert cached["cold"] == {0}
    assert all(tokens for tokens in cached["warm"])
