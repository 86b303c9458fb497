"""The command against real servers: contract, solo, cold, warm, loaded; what each gives is what nondet says of it."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from nondet.core.records import Run
from nondet.core.runfile import read_run
from nondet.core.traces import check_traces, read_traces
from tests.servers.conftest import REAL, Real

SERVERS = [pytest.param(name, marks=getattr(pytest.mark, real.marker)) for name, real in REAL.items()]
# Longer than a page of any of their prefix caches.
PROMPT = (
    "Classes provide a means of bundling data and functionality together. Creating a new class creates a new type of "
    "object, allowing new instances of that type to be made. Each class instance can have attributes attached to it "
    "for maintaining its state. For example, the"
)
ARMS = {"solo": 2, "cold": 2, "warm": 2, "loaded": 8}


def command(server: tuple[Real, str], out: Path, *options: str) -> list[str]:
    real, url = server
    argv = ["sample", "--endpoint", url, "--model", real.model, "--max-tokens", "12", "--out", str(out), *options]
    return [sys.executable, "-m", "nondet", *argv]


def complete(words: list[str]) -> Run:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    return read_run(Path(words[words.index("--out") + 1]))


@pytest.mark.parametrize("server", SERVERS, indirect=True)
def test_arms_are_whole_and_the_contract_is_what_the_server_keeps(server: tuple[Real, str], tmp_path: Path) -> None:
    name, arms = server[0].name, ",".join(f"{arm}={count}" for arm, count in ARMS.items())
    made = complete(command(server, tmp_path / "run.jsonl", "--arms", arms, "--load", "light", "--prompt", PROMPT))
    check_traces(made, read_traces(tmp_path / "run.jsonl")[0])
    assert Counter(c.arm for c in made.completions) == ARMS
    assert {c.status for c in made.completions} == {"ok"}
    known = {c.served.prompt_tokens for c in made.completions if c.served}
    assert len(known) == 1, name
    said = {a.question: a.answer for a in made.contract}
    yes = ("known-by", "logprobs", "greedy", "max-tokens", "varies", "seed", "running", "cache-counted")
    whole = dict.fromkeys(yes, "yes") | {"distribution": "no"}
    text_only = {"known-by": "no", "logprobs": "no", "greedy": "unknown", "seed": "unknown", "running": "no"}
    text_only |= {"max-tokens": "yes", "cache-counted": "no", "varies": "unknown"}
    expected = text_only if name == "transformers" else whole
    assert {question: said[question] for question in expected} == expected
    loaded = [r.traffic for r in made.rounds if r.arm == "loaded" and r.traffic]
    assert loaded
    if name == "transformers":
        assert all(t.running_most is None and t.decoding_most >= 2 for t in loaded)
        assert all(c.served and c.served.cached_tokens is None for c in made.completions)
        return
    # a load of a second or two can pass between two looks at its counters, but streams overlap all the same
    assert all(t.running_most is not None and max(t.running_most, t.decoding_most) >= 2 for t in loaded)
    cached = {arm: {c.served.cached_tokens for c in made.completions if c.served and c.arm == arm} for arm in ARMS}
    assert cached["cold"] == {0}
    assert all(tokens for tokens in cached["warm"])


@pytest.mark.parametrize("server", SERVERS[:2], indirect=True)
def test_a_seed_gives_one_text_alone(server: tuple[Real, str], tmp_path: Path) -> None:
    out, drawn = tmp_path / "run.jsonl", ("--temperature", "0.9", "--seeds", "2", "--arms", "solo=3")
    made = complete(command(server, out, *drawn, "--prompt", PROMPT))
    texts = {seed: {c.tokens_digest for c in made.completions if c.prompt == seed} for seed in (0, 1)}
    assert [len(digests) for digests in texts.values()] == [1, 1]
    assert texts[0] != texts[1]
