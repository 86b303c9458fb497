"""The contract: what a comparison of a server's answers assumes, tested first.

A check has the answer yes, no or unknown, and the evidence in a phrase. A "no" stops nothing: verdicts report it, and
claim less. All requests are sent one at a time, of one prompt, with few tokens.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from nondet.core.records import ContractAnswer
from nondet.core.statistics import percent
from nondet.core.traces import shared_length
from nondet.endpoint.arms import Answer, Ask, Client, KnownBy, Tokens
from nondet.endpoint.traffic import reports_running
from nondet.errors import one_line

QUESTIONS: dict[str, str] = {
    "listed": "the model is one that the server lists",
    "known-by": "answers include token ids",
    "logprobs": "answers include logprobs",
    "greedy": "temperature 0 takes the token of the largest logprob",
    "max-tokens": "max_tokens is respected",
    "repeatable": "the same request, sent twice solo, gives the same tokens",
    "repeatable-bits": "the same request, sent twice solo, gives the same logprob bits",
    "varies": "temperature 1 without a seed varies",
    "seed": "temperature 1 with one seed gives one answer",
    "tempered": "temperature 1 draws, where temperature 0 takes the most likely token",
    "independent": "requests at the same time at temperature 1 without a seed are drawn independently",
    "distribution": "logprobs are of the distribution that is sampled from",
    "sums": "probabilities of the two most likely tokens add up to at most 1",
    "running": "the server reports how many requests it runs",
    "cache-counted": "the server reports how much of a prompt it had cached",
}
_RUNNING = "its counters show it: what it runs under load can be compared with what was sent"
Checked = tuple[str, str]  # yes, no or unknown; and the evidence
_TOKENS = 16
_DRAWS = 4
_AT_ONCE = 8
_CHANCE = 0.001  # of a wrong "no": that all draws agree although they vary


@dataclass
class Contract:
    """The checks of one server, whose completions are filed under `impl` and which lists these models. `drawn`: the run
    is at a temperature, so that it is tested whether requests of one batch share a draw."""

    client: Client
    prompt: str
    impl: str
    model: str
    listed: list[str]
    drawn: bool = False
    number: int = 0
    known_by: KnownBy = KnownBy.TEXT  # what identifies two of its answers

    async def check(self, known: Collection[str] = ()) -> tuple[Answer, list[ContractAnswer]]:
        """The first answer, and all checks, unless it failed; where all are known, only two requests are sent."""
        once = await self.send()
        if not once.ok:
            return once, []
        again = await self.send()
        self.known_by = max(once.known_by, again.known_by if again.ok else once.known_by, key=list(KnownBy).index)
        if all(q in known for q in QUESTIONS if self.drawn or q != "independent"):
            return once, []
        running = reports_running(await self.client.metrics())
        checks: dict[str, Checked] = {
            "listed": self._listed(),
            "known-by": self._known(once),
            "logprobs": _logprobs(once),
            "greedy": _greedy([a for a in (once, again) if a.ok]),
            "max-tokens": self._max_tokens(once),
            **self._repeatable(once, again),
            **await self._sampled(once),
            "distribution": await self._distribution(),
            "sums": _sums(once),
            "running": ("yes" if running else "no", _RUNNING),
            "cache-counted": _cache_counted(again),
        }
        return once, [
            ContractAnswer(impl=self.impl, question=question, answer=answer, evidence=one_line(evidence, 300))
            for question, (answer, evidence) in checks.items()
        ]

    async def send(self, temperature: float = 0.0, seed: int | None = None, max_tokens: int = _TOKENS) -> Answer:
        """One short request."""
        self.number += 1
        how: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        return await self.client.complete(Ask(id=f"contract-{self.number}", prompt=self.prompt, **how))

    def _tokens(self, answer: Answer) -> tuple[int, ...]:
        trace = Tokens(self.known_by).trace(answer)
        return (-1,) if isinstance(trace, str) else tuple(trace.token_ids)

    def _listed(self) -> Checked:
        if not self.listed:
            return "unknown", "the server lists none, and answers"
        if self.model in self.listed:
            return "yes", f"{self.model} is one of {len(self.listed)}"
        return "no", f"it answers as {self.model}, and lists {', '.join(self.listed[:5])}"

    def _known(self, once: Answer) -> Checked:
        if self.known_by == KnownBy.IDS:
            return "yes", f"{_length(once)} ids: completions are compared by them"
        what = "the bytes of each token" if self.known_by == KnownBy.BYTES else "their text, character by character"
        return "no", f"completions are compared by {what}"

    def _max_tokens(self, once: Answer) -> Checked:
        sent = once.completion_tokens if once.completion_tokens is not None else _length(once)
        if not sent:
            return "unknown", "answers include neither tokens nor their number"
        text = f"{sent} tokens of {_TOKENS} requested, finish {once.finish}"
        if self.known_by != KnownBy.TEXT and _length(once) != sent:
            text += f"; it sent {_length(once)} and counts {sent}"
        if max(sent, _length(once)) > _TOKENS:
            return "no", text
        if once.finish == "eos":
            return "unknown", text
        return "yes" if once.finish == "length" and sent == _TOKENS else "no", text

    def _repeatable(self, once: Answer, again: Answer) -> dict[str, Checked]:
        if not again.ok:
            failed = "unknown", f"the second one failed: {again.reason}"
            return {"repeatable": failed, "repeatable-bits": failed}
        first, second = self._tokens(once), self._tokens(again)
        at = shared_length(first, second)
        hits = [a.cached_tokens for a in (once, again)]
        cached = "" if hits[0] == hits[1] else f"; cached tokens {hits[0]} and {hits[1]}"
        unit = "token" if self.known_by != KnownBy.TEXT else "character"
        text = f"{at} {unit}s identical" if first == second else f"they first differ at {unit} {at}"
        tokens = "yes" if first == second else "no", text + cached
        if not once.logprobs or not again.logprobs:
            return {"repeatable": tokens, "repeatable-bits": ("unknown", "there are no logprobs")}
        count = min(at, len(_floats(once.logprobs)), len(_floats(again.logprobs)))
        a, b = _floats(once.logprobs)[:count], _floats(again.logprobs)[:count]
        off = int((a.view(np.int32) != b.view(np.int32)).sum())
        text = f"{count} logprobs identical, bit for bit"
        if off:
            gap = float(np.nanmax(np.abs(a.astype(np.float64) - b), initial=0.0))
            text = f"{off} of {count} logprobs differ, by up to {gap:.3g}"
        bits = "no" if off else "yes" if count else "unknown", text + cached
        return {"repeatable": tokens, "repeatable-bits": bits}

    async def _sampled(self, once: Answer) -> dict[str, Checked]:
        free = [await self.send(temperature=1.0) for _ in range(_DRAWS)]
        good = [a for a in free if a.ok]
        if len(good) < 2:
            failed = "unknown", f"requests at temperature 1 failed: {free[0].reason}"
            return dict.fromkeys(("varies", "seed", "tempered"), failed)
        distinct, chance = len({self._tokens(a) for a in good}), _chance_of(good[0], len(good) - 1)
        checks: dict[str, Checked] = {
            "varies": ("unknown", f"{len(good)} identical answers; this prompt may leave no choice")
        }
        if distinct > 1:
            checks["varies"] = "yes", f"{distinct} distinct answers of {len(good)}"
        elif chance < _CHANCE:
            text = f"{len(good)} identical answers, by chance in {percent(chance, 'up')} of cases"
            checks["varies"] = "no", text
        varies = checks["varies"][0]
        if self.drawn:
            checks["independent"] = await self._independent(varies)
        seeded = [await self.send(temperature=1.0, seed=s) for s in (1, 1, 2)]
        checks["tempered"] = self._tempered(once, [*good, *(a for a in seeded if a.ok)])
        one, same, other = (self._tokens(a) for a in seeded)
        bad = next((a for a in seeded if not a.ok), None)
        if bad is not None:
            checks["seed"] = "unknown", f"it failed: {bad.reason}"
        elif one != same:
            checks["seed"] = "no", "one seed, two answers"
        elif varies == "yes" or other != one:
            checks["seed"] = "yes", f"one seed, one answer; another seed, {'the same' if other == one else 'another'}"
        else:
            checks["seed"] = "unknown", "one seed, one answer, but nothing varies without a seed either"
        return checks

    def _tempered(self, once: Answer, drawn: list[Answer]) -> Checked:
        """Whether answers at temperature 1 are the greedy one; those without a seed may all be one draw."""
        greedy = self._tokens(once)
        other = sum(self._tokens(a) != greedy for a in drawn)
        if other:
            return "yes", f"{other} of {len(drawn)} answers are not the one at temperature 0"
        text = f"all {len(drawn)} answers at temperature 1 are the one at temperature 0"
        chance = _chance_of(drawn[0], 2)
        if chance >= _CHANCE:
            return "unknown", f"{text}; this prompt may leave no choice"
        return "no", f"{text}, by chance in {percent(chance, 'up')} of cases"

    async def _independent(self, varies: str) -> Checked:
        """Whether requests that are sent at once get the same draw, where one after another they do not."""
        sent = await asyncio.gather(*(self.send(temperature=1.0) for _ in range(_AT_ONCE)))
        answers = {self._tokens(a): a for a in sent if a.ok}
        counts = Counter(self._tokens(a) for a in sent if a.ok)
        if not counts or varies != "yes":
            return "unknown", "one after another they do not vary either"
        ((most, times),) = counts.most_common(1)
        if times == 1:
            return "yes", f"{counts.total()} requests at once, as many distinct answers"
        text = f"{times} of {counts.total()} requests at once have one answer, and one after another they vary"
        chance = _chance_of(answers[most])
        if math.comb(counts.total(), 2) * chance >= _CHANCE:
            return "unknown", f"{text}; that may be chance"
        return "no", f"{text}; two agree by chance in {percent(chance, 'up')} of cases"

    async def _distribution(self) -> Checked:
        """Compare the first position's margin at two temperatures: a scaled one doubles when the temperature halves."""
        answers = [await self.send(temperature=temperature, max_tokens=1) for temperature in (1.0, 0.5)]
        margins = [_floats(a.margins) for a in answers if a.ok]
        if len(margins) < 2 or not all(m.size and np.isfinite(m[0]) and m[0] > 1e-3 for m in margins):
            return "unknown", "no margin of top-1 and top-2 to compare with another"
        full, half = (float(m[0]) for m in margins)
        text = f"top-1 − top-2 of the first token: {full:.4g} at temperature 1, {half:.4g} at 0.5"
        if abs(half / full - 2.0) < 0.05:
            return "yes", text + ": they are scaled by it"
        if abs(half / full - 1.0) < 0.025:
            return "no", text + ": they are the model's own, before temperature"
        return "unknown", text


def _logprobs(once: Answer) -> Checked:
    if not once.logprobs:
        return "no", "there are none: what differs below the tokens can't be seen"
    margins = "with alternatives" if once.margins else "without alternatives: no margins"
    return "yes", f"{len(once.logprobs) // 4} of them, {margins}"


def _greedy(answers: list[Answer]) -> Checked:
    tops = [a.chosen_is_top for a in answers]
    tokens = sum(_length(a) for a in answers)
    if any(t is None for t in tops) or not tokens:
        return "unknown", "answers do not include alternatives to a chosen token"
    top = sum(t or 0 for t in tops)
    ties = sum(int((_floats(a.margins) == 0).sum()) for a in answers)
    tied = f"{ties} of them tied with the second" if ties else "none of them a tie"
    return "yes" if top == tokens else "no", f"{top} of {tokens} chosen tokens have the largest logprob, {tied}"


def _sums(once: Answer) -> Checked:
    logprobs, margins = _floats(once.logprobs).astype(np.float64), _floats(once.margins).astype(np.float64)
    if not logprobs.size or logprobs.size != margins.size or once.chosen_is_top != logprobs.size:
        return "unknown", "answers do not include the two largest logprobs at every position"
    total = np.exp(logprobs) + np.exp(logprobs - np.where(np.isfinite(margins), margins, math.inf))
    over = int((~(total <= 1.0 + 1e-3)).sum())  # decimals are rounded on their way
    return "no" if over else "yes", f"largest sum {float(np.max(total)):.6f} over {total.size} positions"


def _cache_counted(again: Answer) -> Checked:
    if again.cached_tokens is None:
        return "no", "not reported: what the prefix cache does is not known"
    return "yes", f"{again.cached_tokens} of {again.prompt_tokens} prompt tokens in the second answer"


def _length(answer: Answer) -> int:
    return len(answer.token_ids or answer.token_bytes or ())


def _floats(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.frombuffer(data, dtype="<f4")


def _chance_of(answer: Answer, times: int = 1) -> float:
    """The probability of drawing it so many times at temperature 1; 1 where unknown. Logprobs of a model before
    temperature are those at temperature 1, and processed ones are as well."""
    total = float(_floats(answer.logprobs).astype(np.float64).sum())
    return math.exp(min(0.0, total) * times) if answer.logprobs and math.isfinite(total) else 1.0
