"""The load plan: which requests arrive when. Pure data, drawn from a seed, the same for every implementation.

Only the parameters go into a run's header; the plan is rebuilt from them (and from the tokenizer and the text that the
background prompts are cut from, which the plan's digest covers). Nothing here depends on Python's hash seed.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from nondet.errors import UserError, suggestion
from nondet.sampling.temperature import Sampling

__all__ = ["PRESETS", "Load", "Plan", "Request", "build_plan", "parse_load"]

# Characters cut per background token before encoding: byte-level BPE gives 3 to 5 characters a token on English prose,
# so 12 leaves enough tokens to cut the prompt from.
_CHARACTERS_PER_TOKEN = 12


@dataclass(frozen=True)
class Load:
    """What runs alongside, and the engine's limits that turn it into batches. All lengths are in tokens.

    Attributes:
        others: Background requests in each round.
        targets: Requests under study in each round; they are load to one another too.
        spread: Arrivals are drawn evenly over engine steps 0 ... spread-1.
        prompt: Shortest and longest background prompt.
        tokens: Shortest and longest background completion.
        budget: Query tokens that one engine step may take: prefills longer than what is left of it are chunked.
        requests: Requests that one engine step may take.
        page: Tokens in a page of the KV cache: the grain of prefix sharing.
        sharing: Whether requests share the cached pages of a common prefix.
        graphs: Whether steps run as CUDA graphs, padded to a few sizes. Then operators are counted only where a graph
            is captured, since a replay runs no Python.
    """

    others: int
    targets: int
    spread: int
    prompt: tuple[int, int]
    tokens: tuple[int, int]
    budget: int
    requests: int
    page: int = 16
    sharing: bool = True
    graphs: bool = False


PRESETS: dict[str, Load] = {
    # one request a step, nothing shared: every completion meets the same shapes, so this is the control
    "none": Load(others=0, targets=50, spread=1, prompt=(1, 1), tokens=(1, 1), budget=64, requests=1, sharing=False),
    "light": Load(others=6, targets=10, spread=96, prompt=(4, 48), tokens=(8, 64), budget=32, requests=32),
    "default": Load(others=20, targets=40, spread=64, prompt=(8, 128), tokens=(16, 96), budget=64, requests=64),
    "heavy": Load(others=120, targets=60, spread=96, prompt=(8, 256), tokens=(16, 128), budget=256, requests=256),
}

_HINT = "Write none, light, default, heavy, or keys such as others=60,budget=256,prompt=8-96; see --help."
_MOST = 1_000_000


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        id: Unique within the plan: t000017 is a target, r3-b005 the sixth background request of round 3.
        target: Under study, or background.
        prompt: Token ids.
        max_new_tokens: Tokens to generate.
        arrival_step: The engine step from which it may be scheduled.
        subject: Index of a target's prompt (and seed) among the header's; 0 of background requests.
        sampling: How its tokens are drawn; None of greedy requests.
    """

    id: str
    target: bool
    prompt: tuple[int, ...]
    max_new_tokens: int
    arrival_step: int
    subject: int = 0
    sampling: Sampling | None = None


@dataclass(frozen=True)
class Plan:
    """Rounds of requests. A round starts from an empty engine, and is the unit of resuming.

    Attributes:
        load: The parameters that it was drawn with.
        rounds: Requests of each round, by arrival; ties in drawn order.
    """

    load: Load
    rounds: tuple[tuple[Request, ...], ...]

    @property
    def targets(self) -> int:
        """Requests under study over all rounds."""
        return sum(r.target for requests in self.rounds for r in requests)

    @property
    def digest(self) -> str:
        """First 16 hex digits of the SHA-256 over everything that decides the batches: equal digests, equal load."""
        sha = hashlib.sha256(json.dumps(asdict(self.load), sort_keys=True).encode())
        prompt: tuple[int, ...] = ()
        for requests in self.rounds:
            sha.update(b"round")
            for r in requests:
                sha.update(f"{r.id} {r.target} {r.max_new_tokens} {r.arrival_step}".encode())
                if r.sampling is not None:
                    s = r.sampling
                    sha.update(f" drawn {s.temperature!r} {s.top_k} {s.top_p!r} {s.seed}".encode())
                if r.prompt is not prompt:  # all targets share one tuple: a million of them are hashed in seconds
                    prompt = r.prompt
                    sha.update(",".join(map(str, prompt)).encode())
        return sha.hexdigest()[:16]


def parse_load(spec: str) -> Load:
    """Read `--load`: a preset, or changes to one ("heavy,budget=512"; without a preset they change the default).

    Raises:
        UserError: an unknown preset or key, or a value that makes no sense; the part is named.
    """
    parts = [p.strip() for p in spec.split(",")]
    if not any(parts):
        raise UserError(f"--load {spec!r} is empty", _HINT)
    load = PRESETS["default"]
    known = {f.name: f for f in fields(Load)}
    for place, part in enumerate(parts):
        key, equals, value = (s.strip() for s in part.partition("="))
        if not equals and key in PRESETS and place == 0:
            load = PRESETS[key]
        elif not equals and key in PRESETS:
            raise UserError(f"--load {spec!r}: {key!r} must come first", _HINT)
        elif not equals:
            raise UserError(f"--load: unknown load {part!r}", suggestion(key, [*PRESETS, *(f"{k}=..." for k in known)]))
        elif key not in known:
            raise UserError(f"--load: unknown key {key!r}", suggestion(key, known))
        else:
            change: dict[str, Any] = {key: _value(key, value)}
            load = replace(load, **change)
    if load.others + load.targets > 100_000:
        raise UserError(
            f"--load {spec!r}: {load.others + load.targets} requests in one round",
            "Stay under 100,000 requests a round.",
        )
    return load


def _value(key: str, text: str) -> int | bool | tuple[int, int]:
    if key in ("sharing", "graphs"):
        if text not in ("on", "off"):
            raise UserError(f"--load: {key}={text} makes no sense", f"Write {key}=on or {key}=off.")
        return text == "on"
    if key in ("prompt", "tokens"):
        low, dash, high = text.partition("-")
        span = (_number(key, text, low, 1), _number(key, text, high if dash else low, 1))
        if span[0] > span[1]:
            raise UserError(f"--load: {key}={text} runs backwards", f"Write {key}={span[1]}-{span[0]}.")
        return span
    return _number(key, text, text, {"others": 0, "page": 4}.get(key, 1))


def _number(key: str, text: str, digits: str, least: int) -> int:
    if not (digits.isascii() and digits.isdigit()) or not least <= int(digits) <= _MOST:
        example = f"{key}=8-96" if key in ("prompt", "tokens") else f"{key}=32"
        raise UserError(
            f"--load: {key}={text} makes no sense", f"Give whole numbers from {least} to {_MOST}, such as {example}."
        )
    return int(digits)


def background_text() -> list[str]:
    """The texts that background prompts are cut from: the documentation topics that ship with Python."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise UserError(
            "this Python lacks pydoc_data, the text that background requests are cut from",
            "Install the full standard library, or use --load none.",
        ) from error
    return [topics[name] for name in sorted(topics) if len(topics[name]) > 2000]


def build_plan(
    load: Load,
    *,
    n: int,
    seed: int,
    prompt: Sequence[int] = (),
    max_new_tokens: int,
    context: int,
    encode: Callable[[str], list[int]],
    texts: Sequence[str] | None = None,
    prompts: Sequence[Sequence[int]] = (),
    samplings: Sequence[Sampling] = (),
) -> Plan:
    """Draw the plan.

    Subjects are prompts, or at a temperature each prompt with each seed, seeds fastest. They take turns, so that
    the completions of one are spread over as many rounds as there are: rounds are independent, their members are not.

    Args:
        n: Targets of each subject, over all rounds; the last round holds what is left.
        prompt: Token ids of the request under study, where there is one.
        prompts: Token ids of several; instead of `prompt`.
        samplings: For each prompt, one a seed; () for greedy requests. Background requests draw likewise, each with a
            seed of its own.
        context: Positions that the model has: background requests are cut to fit.
        encode: Text to token ids, without special tokens.
        texts: What background prompts are cut from; None: Python's documentation.
    """
    if texts is None:
        texts = background_text() if load.others else []
    several = [tuple(p) for p in prompts or [prompt]]
    subjects = [(p, sampling) for p in several for sampling in (samplings or (None,))]
    rounds = []
    for index, first in enumerate(range(0, n * len(subjects), load.targets)):
        # a string seeds through SHA-512, so that neither the hash seed nor the rounds before matter
        rng = random.Random(f"nondet load plan {seed} {index}")  # noqa: S311 - a load plan, not a secret
        requests = []
        for i in range(first, min(first + load.targets, n * len(subjects))):
            subject = i % len(subjects)
            tokens, drawn = subjects[subject]
            arrival = rng.randrange(load.spread)
            requests.append(Request(f"t{i:06d}", True, tokens, max_new_tokens, arrival, subject, drawn))
        for j in range(load.others):
            request = _background(f"r{index}-b{j:03d}", load, rng, context, encode, texts)
            if samplings:
                request = replace(request, sampling=replace(samplings[0], seed=rng.getrandbits(63)))
            requests.append(request)
        rng.shuffle(requests)
        rounds.append(tuple(sorted(requests, key=lambda r: r.arrival_step)))
    return Plan(load, tuple(rounds))


def _background(
    name: str, load: Load, rng: random.Random, context: int, encode: Callable[[str], list[int]], texts: Sequence[str]
) -> Request:
    length = min(rng.randint(*load.prompt), context - 1)
    new = min(rng.randint(*load.tokens), context - length)
    text = texts[rng.randrange(len(texts))]
    wanted = length * _CHARACTERS_PER_TOKEN
    start = rng.randrange(max(1, len(text) - wanted))
    ids = encode(text[start : start + wanted])
    if not ids:
        raise ValueError("the tokenizer gives no tokens for the background text")
    while len(ids) < length:  # a tokenizer with very long tokens, or a text shorter than wanted
        ids = ids + ids
    return Request(name, False, tuple(ids[:length]), new, rng.randrange(load.spread))
