"""The command against real servers: contract, solo, cold, warm, loaded; what each gives is what nondet says of it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nondet.core.records import Completion, Run
from nondet.core.runfile import read_run
from nondet.core.traces import check_traces, read_traces
from tests.servers.conftest import REAL, ROOT, Real
from tests.servers.conftest import SERVERS as FOLDER

SERVERS = [pytest.param(name, marks=getattr(pytest.mark, real.marker)) for name, real in REAL.items()]
# Longer than a page of any of their prefix caches.
PROMPT = (
    "Classes provide a means of bundling data and functionality together. Creating a new class creates a new type of "
    "object, allowing new instances of that type to be made. Each class instance can have attributes attached to it "
    "for maintaining its state. For example, the"
)
ARMS = {"solo": 2, "cold": 2, "warm": 2, "loaded": 8}
KILLS = int(os.environ.get("NONDET_KILLS", "5"))


def command(server: tuple[Real, str], out: Path, *options: str) -> list[str]:
    """As users type it."""
    real, url = server
    argv = ["sample", "--endpoint", url, "--model", real.model, "--max-tokens", "12", "--out", str(out), *options]
    return [sys.executable, "-m", "nondet", *argv]


def complete(words: list[str], out: Path) -> Run:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    return read_run(out)


@pytest.fixture(scope="module")
def run(server: tuple[Real, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Run]:
    """One run of all arms."""
    out = tmp_path_factory.mktemp(server[0].name) / "run.jsonl"
    arms = ",".join(f"{arm}={count}" for arm, count in ARMS.items())
    words = command(server, out, "--arms", arms, "--load", "light", "--prompt", PROMPT)
    return server[0].name, complete(words, out)


@pytest.mark.parametrize("server", SERVERS, indirect=True)
def test_every_arm_is_whole_and_the_contract_is_what_the_server_keeps(run: tuple[str, Run]) -> None:
    """All completions are there and none failed; ids and logprobs or neither, a seed or none, metrics or none."""
    name, made = run
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
    # a load of a second or two can pass between two looks at its counters, but streams overlap all the same
    assert all(t.running_most is not None and max(t.running_most, t.decoding_most) >= 2 for t in loaded)
    cached = {arm: {c.served.cached_tokens for c in made.completions if c.served and c.arm == arm} for arm in ARMS}
    assert cached["cold"] == {0}
    assert all(tokens for tokens in cached["warm"])


@pytest.mark.parametrize("server", SERVERS[:2], indirect=True)
def test_a_seed_gives_one_text_alone(server: tuple[Real, str], tmp_path: Path) -> None:
    """At a temperature, one request at a time: equal seeds the same tokens, another seed other ones."""
    out, drawn = tmp_path / "run.jsonl", ("--temperature", "0.9", "--seeds", "2", "--arms", "solo=3")
    made = complete(command(server, out, *drawn, "--prompt", PROMPT), out)
    texts = {seed: {c.tokens_digest for c in made.completions if c.prompt == seed} for seed in (0, 1)}
    assert [len(digests) for digests in texts.values()] == [1, 1]
    assert texts[0] != texts[1]


def completions(path: Path) -> dict[tuple[str, str], Completion]:
    """What a file holds, whole or cut off; each request once."""
    if not path.exists() or not path.stat().st_size:
        return {}
    made = read_run(path, allow_truncated=True).completions
    by_request = {(c.arm, c.request): c for c in made}
    assert len(by_request) == len(made)
    return by_request


@pytest.mark.llamacpp
@pytest.mark.parametrize("server", ["llamacpp"], indirect=True)
def test_one_run_killed_again_and_again_is_whole_in_the_end(server: tuple[Real, str], tmp_path: Path) -> None:
    """SIGKILL at any moment, --resume, SIGKILL, ...: what was on disk stays as it was, and nothing is asked twice."""
    out = tmp_path / "run.jsonl"
    words = command(server, out, "--arms", "solo=40,cold=20,warm=20,loaded=120", "--load", "light")
    rng, hit, kept = random.Random("kills"), 0, {}  # noqa: S311 - moments, not secrets
    for _ in range(KILLS):
        resume = ["--resume"] if out.exists() and out.stat().st_size else ["--force"]
        with subprocess.Popen([*words, *resume], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            before, deadline = len(kept), time.monotonic() + 60
            # into the asking, not into the imports: until something new is there, and then a moment
            while process.poll() is None and len(completions(out)) <= before and time.monotonic() < deadline:
                time.sleep(0.1)
            time.sleep(rng.random())
            hit += process.poll() is None
            process.kill()
        now = completions(out)
        assert kept.items() <= now.items()
        kept = now
    made = complete([*words, "--resume"], out)
    assert kept.items() <= completions(out).items()
    assert made.complete
    assert Counter(c.arm for c in made.completions) == {"solo": 40, "cold": 20, "warm": 20, "loaded": 120}
    check_traces(made, read_traces(out)[0])
    assert hit, "every kill came too late"


# The embedded model as GGUF is the embedded model: in float32, llama.cpp's tokens are those of transformers.

PROMPTS = ("For example, the", "In this case, the", "Python's", "def f(x):\n    return x+1 # ½ é中", "  1234  a\tb\r\n")
TOKENS = 48
PYTHON = FOLDER / "llamacpp" / "bin" / "python"


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})  # noqa: S310 - loopback
    with urllib.request.urlopen(request, timeout=60) as reply:  # noqa: S310 - loopback
        return json.load(reply)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """llama.cpp's server with float32 weights, keys and values."""
    subprocess.run(["bash", "scripts/serve_llamacpp.sh", "--setup"], cwd=ROOT, check=True)
    model = tmp_path_factory.mktemp("gguf") / "f32.gguf"
    subprocess.run([PYTHON, "lab/embedded_to_gguf.py", "--type", "f32", "--out", model], cwd=ROOT, check=True)
    words = [PYTHON, "scripts/servers/llamacpp.py", "--model", model, "--alias", "f32", "--port", "0", "--slots", "1"]
    words.append("--float32-attention")
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split("; ")[-1].strip()
        finally:
            process.terminate()


@pytest.mark.llamacpp
def test_gguf_gives_the_tokens_of_transformers(exact: str) -> None:
    """The same tokens in, the same greedy tokens out, logprobs of the first one within 1e-5."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = ROOT / "nondet" / "embedded"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt in PROMPTS:
        ids = tokenizer(prompt)["input_ids"]
        assert post(f"{exact}/tokenize", {"content": prompt, "add_special": True})["tokens"] == ids
        # ignore_eos forbids the end of text, as suppress_tokens does
        given = torch.tensor([ids])
        wanted = model.generate(given, max_new_tokens=TOKENS, do_sample=False, suppress_tokens=[0])[0, len(ids) :]
        body = {"prompt": prompt, "n_predict": TOKENS, "temperature": 0, "n_probs": 1}
        said = post(f"{exact}/completion", {**body, "return_tokens": True, "ignore_eos": True})
        assert said["tokens"] == wanted.tolist()
        with torch.no_grad():
            first = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], -1)[said["tokens"][0]].item()
        assert abs(np.float32(said["completion_probabilities"][0]["logprob"]) - first) < 1e-5
