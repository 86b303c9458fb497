"""The requests to a server: requests, loads, arms and their plan, the run's header, and how tokens are identified.

Pure data: no HTTP, no torch. A server may be wrong or fail in many ways, so an answer records how it was understood:
by what its tokens are identified (ids, else bytes, else text), whether it has logprobs, its times, and why it failed.
"""

from __future__ import annotations

import hashlib
import json
import random
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Protocol

from nondet.core.traces import PIECE_MOST, Trace, trace_digest
from nondet.errors import UnknownNameError, UserError, each_once, shortened
from nondet.sampling.plan import Load, RoundLoad, Sampling, changed_load


class KnownBy(StrEnum):
    """What two completions can be compared by, the most reliable first."""

    IDS = "ids"
    BYTES = "bytes"
    TEXT = "text"


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request."""

    id: str  # unique within a run; never sent to the server
    prompt: str  # a chat endpoint gets it as one user message
    max_tokens: int
    temperature: float = 0.0  # 0.0 is greedy
    seed: int | None = None  # of the server's sampler; None sends none
    top_k: int = 0  # what is kept at a temperature above 0: 0 and a top_p of 1.0 are all. Not every format has top_k
    top_p: float = 1.0
    top_logprobs: int = 2  # alternatives requested at each position; 0 requests no logprobs
    cached: bool | None = None  # False tells the server not to reuse a cached prefix, if it can; None sends nothing


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of one request. Never an exception: a failure is an answer with a reason."""

    ask: str
    text: str = ""  # as sent; "" if it failed
    token_ids: tuple[int, ...] | None = None  # of each generated token; None where the server gives no ids
    token_bytes: tuple[bytes, ...] | None = None  # UTF-8 bytes of each token; None where the server gives none
    # little-endian float32, each nearest to the decimal that was sent (not to its float64); empty without logprobs
    logprobs: bytes = b""
    margins: bytes = b""  # little-endian float32, top-1 minus top-2 logprob of each position; empty where unknown
    chosen_is_top: int | None = None  # positions where the chosen token has the largest logprob, ties included
    runner_up: tuple[int, ...] = ()  # id of the better of the other alternatives; -1 where the server gives none
    finish: str = "length"  # or "eos" (the server's "stop"), or "error"
    prompt_tokens: int | None = None  # as the server counts them, like the next; None where it does not
    cached_tokens: int | None = None
    completion_tokens: int | None = None  # may differ from what it sent
    fingerprint: str = ""  # as sent by the server, like the model
    model: str = ""
    # seconds on one monotonic clock: first byte sent, first token received (None if not streamed), last byte received;
    # two requests overlap where these intervals do
    sent: float = 0.0
    first: float | None = None
    done: float = 0.0
    attempts: int = 1  # how often it was sent
    refusals: Mapping[str, int] = field(default_factory=dict)  # errors of earlier attempts: "http-429" -> times
    reason: str = ""  # why it failed, in one line
    kind: str = ""  # of the failure: "timeout", "malformed", "http-500", ...
    notes: tuple[str, ...] = ()  # oddities of an accepted answer, a line each

    @property
    def ok(self) -> bool:
        """Whether there is a completion."""
        return not self.kind

    @property
    def known_by(self) -> KnownBy:
        """What this completion can be compared by."""
        if self.token_ids is not None:
            return KnownBy.IDS
        return KnownBy.BYTES if self.token_bytes is not None else KnownBy.TEXT


class Client(Protocol):
    """A connection to one server, in one protocol; used inside of one asyncio event loop."""

    url: str
    protocol: str  # the format in use; set on entry, like the following
    model: str
    listed: list[str]  # the names that the server lists; empty where it lists none
    server: str  # the kind of server, with its version and mode where it reports them
    context: int | None  # the least context of its models, in tokens, where it reports one

    async def complete(self, ask: Ask) -> Answer:
        """Send one request and wait for its end, retrying by rule. Raises only on cancellation."""

    async def metrics(self) -> dict[str, float]:
        """The server's own counters (requests running or waiting, prefix hits), by name; empty if it has none."""

    async def flush(self) -> bool:
        """Empty the server's prefix cache; False where that is not possible."""


# Prompts are cut from text by four characters per token, because each server has its own tokenizer, which counts.


@dataclass(frozen=True)
class EndpointLoad(RoundLoad):
    """The load of a server's arm "loaded", a round of which is one burst from an idle client to an idle client."""

    concurrency: int  # most requests in flight at once
    rate: float = 0.0  # requests sent per second, at seeded Poisson times; 0: as fast as `concurrency` allows


ENDPOINT_PRESETS: dict[str, EndpointLoad] = {
    "light": EndpointLoad(concurrency=8, targets=8, others=8, prompt=(4, 64), tokens=(8, 64)),
    "default": EndpointLoad(concurrency=32, targets=16, others=32, prompt=(4, 128), tokens=(8, 96)),
    "heavy": EndpointLoad(concurrency=128, targets=32, others=128, prompt=(4, 512), tokens=(8, 192)),
}
_LONG = (1, 1_000_000)
_RANGES = {"concurrency": (1, 4096), "targets": (1, 10_000), "others": (0, 10_000), "prompt": _LONG, "tokens": _LONG}
_HINT = "Write light, default or heavy, or keys such as others=60,targets=16,prompt=8-96,tokens=8-64."


def parse_endpoint_load(spec: str, *, concurrency: int | None = None, rate: float | None = None) -> EndpointLoad:
    """Read `--load` for an endpoint: a preset, or changes to one; then --concurrency and --rate."""
    for key in (part.partition("=")[0].strip() for part in spec.split(",")):
        if key == "none":
            raise UserError("--load none is no load", "Leave the arm out: --arms solo.")
        if key in {f.name for f in fields(Load)} - set(_RANGES):
            raise UserError(f"--load: {key} is a limit of nondet's own engine, and an endpoint has its own", _HINT)
    load = changed_load(spec, ENDPOINT_PRESETS, _RANGES, _HINT)
    return replace(load, concurrency=concurrency or load.concurrency, rate=rate or load.rate)


# Arm -> a description that follows "completions".
ARMS: dict[str, str] = {
    "solo": "one at a time, nothing else of ours under way",
    "cold": "one at a time, the cached prefix flushed or left out",
    "warm": "one at a time, right after the same prompt",
    "chunked": "while a long neighbour arrived in mid-answer",
    "equal": "at once with the same prompt again and again, so among equal lengths",
    "loaded": "among others, as the load says",
}
DETERMINISTIC = "deterministic inference"  # in a server's description of itself: its own mode is on
_FEW = 6  # enough to separate a certain difference between two arms from chance: 1 / C(12, 6) is 0.1%
_AT_ONCE = 16
_SOLO_MOST, _SOLO_LEAST, _ARM_MOST = 32, 10, 1_000_000
_CHARACTERS_PER_TOKEN = 4
_LONG_NEIGHBOUR = 4  # times the longest background prompt


@dataclass(frozen=True, slots=True)
class Planned:
    """One request of a round."""

    id: str  # unique in the run, so that a run that is stopped knows what it has
    target: bool  # under study; else a concurrent request
    prompt: int  # index of the prompt under study; -1 for background text
    text: str  # of a background request; a target's is the prompt's
    max_tokens: int
    wait: float = 0.0  # seconds after the round begins, or of a long neighbour the share of a solo answer
    cold: bool = False  # whether it must find no cached prefix


@dataclass(frozen=True)
class ArmRound:
    """One burst of requests, in the order in which they are sent; the client is idle before and after it."""

    number: int
    arm: str
    requests: tuple[Planned, ...]
    concurrency: int
    rate: float
    ramp: bool  # whether concurrency rises from one request to `concurrency` in the first half; else all start at once
    pattern: str  # the same in words, with the concurrent requests

    @property
    def targets(self) -> int:
        """Requests under study."""
        return sum(r.target for r in self.requests)


@dataclass(frozen=True)
class ArmPlan:
    """All rounds, in the order in which they are run."""

    arms: Mapping[str, int]
    rounds: tuple[ArmRound, ...]

    @property
    def digest(self) -> str:
        """First 16 hex digits of the SHA-256 over every request: equal digests, equal plans."""
        sha = hashlib.sha256()
        for r in self.rounds:
            sha.update(json.dumps(asdict(r), sort_keys=True).encode())
        return sha.hexdigest()[:16]

    @property
    def sentence(self) -> str:
        """Requests by arm, and all of them."""
        by_arm: Counter[str] = Counter()
        for r in self.rounds:
            by_arm[r.arm] += r.targets
        total = by_arm.total()
        beside = sum(len(r.requests) for r in self.rounds) - total
        text = f"{total:,} requests to compare ({', '.join(f'{arm} {count:,}' for arm, count in by_arm.items())})"
        return f"{text} and {beside:,} background requests" if beside else text


def parse_arms(spec: str, n: int, prompts: int = 1) -> dict[str, int]:
    """Read `--arms`: names, each with its number of completions of each prompt ("solo=50,loaded")."""
    arms: dict[str, int] = {}
    each_once("--arms", (part.partition("=")[0].strip() for part in spec.split(",")))
    for part in spec.split(","):
        name, equals, digits = (s.strip() for s in part.partition("="))
        if name not in ARMS:
            raise UnknownNameError("arm", name, ARMS)
        if equals and not (digits.isascii() and digits.isdigit() and 1 <= int(digits) <= _ARM_MOST):
            raise UserError(f"--arms: {name}={digits} makes no sense", f"Give a whole number from 1 to {_ARM_MOST:,}.")
        usual = {"loaded": n, "equal": _AT_ONCE, "solo": max(_SOLO_LEAST, _SOLO_MOST // prompts)}
        arms[name] = int(digits) if equals else min(n, usual.get(name, _FEW))
    return arms


def build_arms(
    arms: Mapping[str, int], load: EndpointLoad, *, prompts: int, max_tokens: int, seed: int, texts: Sequence[str]
) -> ArmPlan:
    """Draw the plan, from arm -> completions of each of the prompts, with `texts` that background prompts are cut from.

    Solo comes first and again at the end, so that a change over time is not attributed to the load. Where cold answers
    are requested, every second request of a prompt under load finds no cached prefix either. Of the arm "first" one is
    the very first answer, and the other the same request at the end.
    """
    rounds = _Rounds(load, prompts, max_tokens, seed, texts, "cold" in arms)
    if "first" in arms:
        rounds.single("first", 1)
    solo = arms.get("solo", 0)
    # half before and half after, and two before where there are two at all: the rest is compared with them
    before = solo if arms.keys() <= {"first", "solo"} else min(solo, max(2, (solo + 1) // 2))
    for arm, count in (("solo", before), ("cold", arms.get("cold", 0)), ("warm", arms.get("warm", 0))):
        if count:
            rounds.single(arm, count)
    for i in range(arms.get("chunked", 0)):
        for p in range(prompts):
            rounds.chunked(p, i)
    for p in range(prompts if "equal" in arms else 0):
        rounds.equal(p, arms["equal"])
    targets = [(p, i) for i in range(arms.get("loaded", 0)) for p in range(prompts)]
    for first in range(0, len(targets), load.targets):
        rounds.loaded(targets[first : first + load.targets])
    if solo > before:
        rounds.single("solo", solo - before, before)
    if "first" in arms:
        rounds.single("first", 1, 1)
    return ArmPlan(dict(arms), tuple(rounds.drawn))


@dataclass
class _Rounds:
    """The rounds drawn so far, and what they are drawn from."""

    load: EndpointLoad
    prompts: int
    max_tokens: int
    seed: int
    texts: Sequence[str]
    cold: bool = False
    drawn: list[ArmRound] = field(default_factory=list)

    def single(self, arm: str, count: int, first: int = 0) -> None:
        """One request at a time; of the arm "first" only one prompt's."""
        number, requests = len(self.drawn), list[Planned]()
        for i in range(first, first + count):
            for p in range(self.prompts if arm != "first" else 1):
                if arm in ("solo", "warm") and i == first:  # a prompt's first finds no cached prefix: not counted
                    requests.append(Planned(f"r{number}-prime-{p:05d}", False, p, "", self.max_tokens))
                requests.append(self._target(arm, p, i))
        if arm == "warm":  # another prompt must not evict what one prompt left in the cache
            requests.sort(key=lambda r: r.prompt)
        self.drawn.append(ArmRound(number, arm, tuple(requests), 1, 0.0, False, "one at a time"))

    def chunked(self, prompt: int, index: int) -> None:
        """One request, and a long one in its middle."""
        number, length = len(self.drawn), _LONG_NEIGHBOUR * self.load.prompt[1]
        rng = self._rng()
        share = round(rng.uniform(0.1, 0.6), 3)
        long = Planned(f"r{number}-long", False, -1, self._cut(rng, length), min(self.load.tokens), share)
        requests = (self._target("chunked", prompt, index), long)
        pattern = f"a neighbour of about {length:,} tokens after {share:.0%} of a solo answer's time"
        self.drawn.append(ArmRound(number, "chunked", requests, 2, 0.0, False, pattern))

    def equal(self, prompt: int, count: int) -> None:
        """One prompt so many times at once."""
        requests = tuple(self._target("equal", prompt, i) for i in range(count))
        most = min(count, self.load.concurrency)
        self.drawn.append(ArmRound(len(self.drawn), "equal", requests, most, 0.0, False, f"{most} at once, all equal"))

    def loaded(self, targets: Sequence[tuple[int, int]]) -> None:
        """One burst: a mix of lengths and of arrivals is drawn, then the order of all requests."""
        number, load, rng = len(self.drawn), self.load, self._rng()
        mix = rng.choice(("mixed lengths", "one long, many short", "short prompts", "long prompts"))
        ramp = rng.random() < 0.5
        low, high = load.prompt
        requests = [replace(self._target("loaded", p, i), cold=self.cold and i % 2 == 1) for p, i in targets]
        for j in range(load.others):
            length = {
                "mixed lengths": rng.randint(low, high),
                "one long, many short": high if j == 0 else low,
                "short prompts": rng.randint(low, max(low, high // 8)),
                "long prompts": rng.randint(max(low, high // 2), high),
            }[mix]
            text, tokens = self._cut(rng, length), rng.randint(*load.tokens)
            requests.append(Planned(f"r{number}-b{j:04d}", False, -1, text, tokens))
        rng.shuffle(requests)
        if load.rate:
            at = 0.0
            for i, r in enumerate(requests):
                requests[i] = replace(r, wait=round(at, 6))
                at += rng.expovariate(load.rate)
        ramp &= not load.rate
        arrival = f"{load.rate:g} a second" if load.rate else "a ramp" if ramp else "all at once"
        pattern = f"{mix}, {arrival}, in an order of its own"
        self.drawn.append(ArmRound(number, "loaded", tuple(requests), load.concurrency, load.rate, ramp, pattern))

    def _target(self, arm: str, prompt: int, index: int) -> Planned:
        return Planned(f"{arm}-{prompt:05d}-{index:06d}", True, prompt, "", self.max_tokens)

    def _rng(self) -> random.Random:
        # a string seeds through SHA-512, so that neither the hash seed nor earlier rounds matter
        return random.Random(f"nondet endpoint plan {self.seed} {len(self.drawn)}")  # noqa: S311 - a load, no secret

    def _cut(self, rng: random.Random, length: int) -> str:
        wanted = length * _CHARACTERS_PER_TOKEN
        text = self.texts[rng.randrange(len(self.texts))]
        while len(text) < wanted:
            text += "\n" + self.texts[rng.randrange(len(self.texts))]
        start = rng.randrange(len(text) - wanted + 1)
        return text[start : start + wanted].strip() or "and"


@dataclass(frozen=True)
class Server:
    """One server, filed under `impl` ("server", "server-2"), by the url and model that the user named."""

    impl: str
    connect: Callable[[], AbstractAsyncContextManager[Client]]
    url: str
    model: str


@dataclass(frozen=True)
class Settings:
    """What every request under study has in common."""

    prompts: Sequence[str]  # the prompts under study; where tokens are drawn one for each prompt and seed
    max_tokens: int
    samplings: Sequence[Sampling] = ()  # how each is drawn, equal except for the seed; empty for greedy requests

    def ask(self, planned: Planned, arm: str) -> Ask:
        """The request for a planned one."""
        target, drawn = planned.prompt >= 0, dict[str, Any]()
        if self.samplings:  # a background request's seed follows from its name, so that equal plans send the same
            how = self.samplings[planned.prompt]
            drawn = {"temperature": how.temperature, "top_k": how.top_k, "top_p": how.top_p}
            drawn["seed"] = how.seed if target else zlib.crc32(planned.id.encode()) >> 1
        return Ask(
            id=planned.id,
            prompt=self.prompts[planned.prompt] if target else planned.text,
            max_tokens=planned.max_tokens,
            cached=False if planned.cold or (arm == "cold" and target and planned.target) else None,
            **drawn,
        )


def describe(
    servers: Sequence[Server], plan: ArmPlan, settings: Settings, load: EndpointLoad, *, seed: int, **options: Any
) -> dict[str, Any]:
    """The header's plan of an endpoint run, resumed only under an equal one; `options` also decide what is sent."""
    prompts: list[dict[str, Any]] = [{"text": str(text), "tokens": 0} for text in settings.prompts]
    sampling: dict[str, Any] = {}
    for prompt, drawn in zip(prompts, settings.samplings, strict=False):
        prompt["seed"] = drawn.seed
        sampling = {name: getattr(drawn, name) for name in ("temperature", "top_k", "top_p")}
    described = {
        "prompts": prompts,
        "endpoint": {"servers": [{"impl": s.impl, "url": s.url, "model": s.model} for s in servers], **options},
        "model": {"name": servers[0].model},
        "arms": dict(plan.arms),
        "load": asdict(load),
        "load_digest": plan.digest,
        "max_tokens": settings.max_tokens,
        "temperature": sampling.get("temperature", 0.0),
        "request_seed": None,
        "top_logprobs": 2,
        "ignore_eos": False,
        "extra": {},
        "impls": [s.impl for s in servers],
        "seed": seed,
    }
    if sampling:
        described["sampling"] = sampling | {"seeds": len({s.seed for s in settings.samplings})}
    return described


_MOST_TOKENS = 2**31 - 1


def clean(text: str) -> str:
    """The text without lone surrogates, which JSON may hold and UTF-8 may not."""
    return text.encode("utf-8", "replace").decode("utf-8")


@dataclass
class Tokens:
    """Turns answers into traces, with an integer for each distinct token, and remembers each token's text.

    Ids are the server's own. If a server gives only the bytes of each token, an id is made from the bytes, so that two
    runs agree on it. If it gives only text, completions are compared character by character: code points are the ids.
    """

    known_by: KnownBy  # what every completion of the run is compared by
    pieces: dict[int, str] = field(default_factory=dict)  # id -> its text, where the server gives it
    with_logprobs: bool = False  # whether the first answers had logprobs: then one without can't be compared

    def piece(self, token: int) -> str:
        """The text of one token; its id in brackets where the server gives no text of it."""
        if self.known_by == KnownBy.TEXT:
            return clean(chr(token)) if token <= 0x10FFFF else ""
        return self.pieces.get(token, f"⟨{token}⟩")

    def trace(self, answer: Answer) -> Trace | str:
        """The trace of a completion, or why it has none: it lacks what the run's completions are compared by."""
        if self.known_by == KnownBy.IDS:
            if answer.token_ids is None:
                return "it has no token ids, and others of this run do"
            ids = list(answer.token_ids)
            if len(answer.token_bytes or ()) == len(ids):
                for token, piece in zip(ids, answer.token_bytes or (), strict=True):
                    self.pieces.setdefault(token, piece.decode("utf-8", "backslashreplace"))
        elif self.known_by == KnownBy.BYTES:
            if answer.token_bytes is None:
                return "it has no bytes of its tokens, and others of this run do"
            ids = [self._made(data) for data in answer.token_bytes]
        else:
            ids = [ord(character) for character in answer.text]
        # figures of tokens belong to no character of a text
        size = 4 * len(ids) if self.known_by != KnownBy.TEXT else -1
        logprobs, margins = (x if len(x) == size else b"" for x in (answer.logprobs, answer.margins))
        if size > 0 and self.with_logprobs and not logprobs:
            return "it has no logprobs, and others of this run do"
        runner_up = list(answer.runner_up) if self.known_by == KnownBy.IDS else []
        if len(runner_up) != len(ids) or min(runner_up, default=0) < 0:
            runner_up = []
        digest, text = trace_digest(ids, logprobs), clean(answer.text)
        return Trace(digest=digest, token_ids=ids, logprobs=logprobs, margins=margins, runner_up=runner_up, text=text)

    def _made(self, data: bytes) -> int:
        """An id made from the bytes; if two of a run would share one, the next free one."""
        text = shortened(data.decode("utf-8", "backslashreplace"), PIECE_MOST)  # as a resumed run reads it back
        token = int.from_bytes(hashlib.sha256(data).digest()[:4], "little") & _MOST_TOKENS
        while self.pieces.setdefault(token, text) != text:
            token = (token + 1) & _MOST_TOKENS
        return token
