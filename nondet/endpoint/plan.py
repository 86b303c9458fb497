"""The plan of an endpoint run: which arm asks what, when, beside whom. Pure data, drawn from a seed.

A round is the unit of load: it begins and ends with nothing of ours under way. Its requests have ids that are unique
in the run, so that a run that is stopped knows what it has.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from nondet.endpoint.load import EndpointLoad
from nondet.errors import UnknownNameError, UserError

__all__ = ["ARMS", "ArmPlan", "ArmRound", "Planned", "build_arms", "parse_arms"]

# Arm -> what it is, in words that follow "completions".
ARMS: dict[str, str] = {
    "solo": "one at a time, nothing else of ours under way",
    "cold": "one at a time, the cached prefix flushed or left out",
    "warm": "one at a time, right after the same prompt",
    "chunked": "while a long neighbour arrived in mid-answer",
    "loaded": "among others, as the load says",
}
# As many as tell a certain difference between two arms from chance: 1 / C(12, 6) is 0.1%.
_FEW = 6
_SOLO_MOST = 32
_ARM_MOST = 1_000_000
_CHARACTERS_PER_TOKEN = 4
_LONG_NEIGHBOUR = 4  # times the longest background prompt


@dataclass(frozen=True, slots=True)
class Planned:
    """One request of a round.

    Attributes:
        target: Under study; else it rides along.
        prompt: Index of the prompt under study; -1 for background text.
        text: Of a background request; a target's is the prompt's.
        max_tokens: Tokens asked for.
        wait: When it is let go: seconds after the round begins, or for a long neighbour the share of a solo answer's
            time after its target was sent.
    """

    id: str
    target: bool
    prompt: int
    text: str
    max_tokens: int
    wait: float = 0.0


@dataclass(frozen=True)
class ArmRound:
    """One burst of requests, in the order in which they are sent.

    Attributes:
        ramp: Whether the first half of the round goes from one request under way to `concurrency`; else all at once.
        pattern: The same in words, with what rides along.
    """

    number: int
    arm: str
    requests: tuple[Planned, ...]
    concurrency: int
    rate: float
    ramp: bool
    pattern: str

    @property
    def targets(self) -> int:
        """Requests under study."""
        return sum(r.target for r in self.requests)


@dataclass(frozen=True)
class ArmPlan:
    """All rounds, in the order in which they are played."""

    arms: Mapping[str, int]
    rounds: tuple[ArmRound, ...]

    @property
    def digest(self) -> str:
        """First 16 hex digits of the SHA-256 over every request: equal digests, equal plans."""
        sha = hashlib.sha256()
        for r in self.rounds:
            sha.update(json.dumps(asdict(r), sort_keys=True).encode())
        return sha.hexdigest()[:16]


def parse_arms(spec: str, n: int) -> dict[str, int]:
    """Read `--arms`: names, each with the completions of each prompt that it makes ("solo=50,loaded").

    Raises:
        UserError: an unknown arm, one twice, or a number that makes no sense.
    """
    arms: dict[str, int] = {}
    for part in spec.split(","):
        name, equals, digits = (s.strip() for s in part.partition("="))
        if name not in ARMS:
            raise UnknownNameError("arm", name, ARMS)
        if name in arms:
            raise UserError(f"--arms {spec!r}: {name} is there twice", "Name each arm once.")
        if equals and not (digits.isascii() and digits.isdigit() and 1 <= int(digits) <= _ARM_MOST):
            raise UserError(f"--arms: {name}={digits} makes no sense", f"Give a whole number from 1 to {_ARM_MOST:,}.")
        fallback = {"loaded": n, "solo": min(n, _SOLO_MOST)}.get(name, min(n, _FEW))
        arms[name] = int(digits) if equals else fallback
    return arms


def build_arms(
    arms: Mapping[str, int],
    load: EndpointLoad,
    *,
    prompts: int,
    max_tokens: int,
    seed: int,
    texts: Sequence[str],
) -> ArmPlan:
    """Draw the plan.

    Solo comes first and again at the end, so that what changed with time is not taken for the load's doing.

    Args:
        arms: Arm -> completions of each prompt.
        prompts: How many prompts are under study.
        texts: What background prompts are cut from.
    """
    rounds: list[ArmRound] = []
    solo = arms.get("solo", 0)
    # half before and half after, and two before where there are two at all: they are what the rest is held against
    before = solo if len(arms) == 1 else min(solo, max(2, (solo + 1) // 2))

    def single(arm: str, count: int, first: int = 0) -> None:
        order = [(p, i) for i in range(first, first + count) for p in range(prompts)]
        requests: list[Planned] = []
        for p, i in order:
            if arm in ("solo", "warm") and i == first:  # the first one of a prompt finds no cached prefix: not counted
                requests.append(Planned(f"r{len(rounds)}-prime-{p:05d}", False, p, "", max_tokens))
            requests.append(Planned(f"{arm}-{p:05d}-{i:06d}", True, p, "", max_tokens))
        if arm == "warm":  # what one prompt left in the cache must not be pushed out by another
            requests.sort(key=lambda r: r.prompt)
        rounds.append(ArmRound(len(rounds), arm, tuple(requests), 1, 0.0, False, "one at a time"))

    if solo:
        single("solo", before)
    for arm in ("cold", "warm"):
        if arm in arms:
            single(arm, arms[arm])
    for i in range(arms.get("chunked", 0)):
        for p in range(prompts):
            rounds.append(_chunked(len(rounds), p, i, load, max_tokens, seed, texts))
    targets = [(p, i) for i in range(arms.get("loaded", 0)) for p in range(prompts)]
    for first in range(0, len(targets), load.targets):
        rounds.append(_loaded(len(rounds), targets[first : first + load.targets], load, max_tokens, seed, texts))
    if solo > before:
        single("solo", solo - before, before)
    return ArmPlan(dict(arms), tuple(rounds))


def _rng(seed: int, number: int) -> random.Random:
    # a string seeds through SHA-512, so that neither the hash seed nor the rounds before matter
    return random.Random(f"nondet endpoint plan {seed} {number}")  # noqa: S311 - a load plan, not a secret


def _chunked(
    number: int, prompt: int, index: int, load: EndpointLoad, max_tokens: int, seed: int, texts: Sequence[str]
) -> ArmRound:
    rng = _rng(seed, number)
    target = Planned(f"chunked-{prompt:05d}-{index:06d}", True, prompt, "", max_tokens)
    length = _LONG_NEIGHBOUR * load.prompt[1]
    share = round(rng.uniform(0.1, 0.6), 3)
    neighbour = Planned(f"r{number}-long", False, -1, _cut(rng, length, texts), min(load.tokens), share)
    pattern = f"a neighbour of about {length:,} tokens after {share:.0%} of a solo answer's time"
    return ArmRound(number, "chunked", (target, neighbour), 2, 0.0, False, pattern)


def _loaded(
    number: int,
    targets: Sequence[tuple[int, int]],
    load: EndpointLoad,
    max_tokens: int,
    seed: int,
    texts: Sequence[str],
) -> ArmRound:
    """One burst: a mix of lengths and a way to arrive are drawn, then the order of everybody."""
    rng = _rng(seed, number)
    mix, ramp = (
        rng.choice(("mixed lengths", "one long, many short", "short prompts", "long prompts")),
        rng.random() < 0.5,
    )
    low, high = load.prompt
    requests = [Planned(f"loaded-{p:05d}-{i:06d}", True, p, "", max_tokens) for p, i in targets]
    for j in range(load.others):
        length = {
            "mixed lengths": rng.randint(low, high),
            "one long, many short": high if j == 0 else low,
            "short prompts": rng.randint(low, max(low, high // 8)),
            "long prompts": rng.randint(max(low, high // 2), high),
        }[mix]
        requests.append(Planned(f"r{number}-b{j:04d}", False, -1, _cut(rng, length, texts), rng.randint(*load.tokens)))
    rng.shuffle(requests)
    if load.rate:
        at, timed = 0.0, []
        for r in requests:
            timed.append(Planned(r.id, r.target, r.prompt, r.text, r.max_tokens, round(at, 6)))
            at += rng.expovariate(load.rate)
        requests = timed
    arrival = f"{load.rate:g} a second" if load.rate else "a ramp" if ramp else "all at once"
    pattern = f"{mix}, {arrival}, in an order of its own"
    return ArmRound(number, "loaded", tuple(requests), load.concurrency, load.rate, ramp and not load.rate, pattern)


def _cut(rng: random.Random, length: int, texts: Sequence[str]) -> str:
    """About so many tokens of text."""
    wanted = length * _CHARACTERS_PER_TOKEN
    text = texts[rng.randrange(len(texts))]
    while len(text) < wanted:
        text += "\n" + texts[rng.randrange(len(texts))]
    start = rng.randrange(len(text) - wanted + 1)
    return text[start : start + wanted].strip() or "and"
