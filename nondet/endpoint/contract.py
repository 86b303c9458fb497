"""The contract: what a comparison of a server's answers assumes, tested first.

A check has the answer yes, no or unknown, and the evidence in a phrase. A "no" stops nothing: verdicts report it, and
claim less. All requests are sent one at a time, of one prompt, with few tokens.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from nondet.core.records import ContractAnswer
from nondet.core.statistics import percent
from nondet.endpoint.arms import Answer, Ask, Client, KnownBy, Tokens
from nondet.endpoint.traffic import reports_running
from nondet.errors import one_line
from nondet.sampling.analysis import shared_length

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
        answers = [
            self._listed(),
            self._known(once),
            self._answer("logprobs", "yes" if once.logprobs else "no", _logprobs_words(once)),
            self._greedy([a for a in (once, again) if a.ok]),
            self._max_tokens(once),
            *self._repeatable(once, again),
            *await self._sampled(once),
            await self._distribution(),
            self._sums(once),
            self._answer(
                "running",
                "yes" if reports_running(await self.client.metrics()) else "no",
                "its counters show it: what it runs under load can be compared with what was sent",
            ),
            self._cache_counted(again),
        ]
        return once, answers

    async def send(self, temperature: float = 0.0, seed: int | None = None, max_tokens: int = _TOKENS) -> Answer:
        """One short request."""
        self.number += 1
        request = Ask(
            id=f"contract-{self.number}", prompt=self.prompt, max_tokens=max_tokens, temperature=temperature, seed=seed
        )
        return await self.client.complete(request)

    def _tokens(self, answer: Answer) -> tuple[int, ...]:
        trace = Tokens(self.known_by).trace(answer)
        return (-1,) if isinstance(trace, str) else tuple(trace.token_ids)

    def _answer(self, question: str, answer: str, evidence: str) -> ContractAnswer:
        return ContractAnswer(impl=self.impl, question=question, answer=answer, evidence=one_line(evidence, 300))

    def _listed(self) -> ContractAnswer:
        if not self.listed:
            return self._answer("listed", "unknown", "the server lists none, and answers")
        if self.model in self.listed:
            return self._answer("listed", "yes", f"{self.model} is one of {len(self.listed)}")
        return self._answer("listed", "no", f"it answers as {self.model}, and lists {', '.join(self.listed[:5])}")

    def _known(self, once: Answer) -> ContractAnswer:
        if self.known_by == KnownBy.IDS:
            return self._answer("known-by", "yes", f"{len(once.token_ids or ())} ids: completions are compared by them")
        what = "the bytes of each token" if self.known_by == KnownBy.BYTES else "their text, character by character"
        return self._answer("known-by", "no", f"completions are compared by {what}")

    def _greedy(self, answers: list[Answer]) -> ContractAnswer:
        tops = [a.chosen_is_top for a in answers]
        tokens = sum(_length(a) for a in answers)
        if not tops or any(t is None for t in tops) or not tokens:
            return self._answer("greedy", "unknown", "answers do not include alternatives to a chosen token")
        top = sum(t or 0 for t in tops)
        ties = sum(int((_floats(a.margins) == 0).sum()) for a in answers)
        tied = f", {ties} of them tied with the second" if ties else ", none of them a tie"
        text = f"{top} of {tokens} chosen tokens have the largest logprob{tied}"
        return self._answer("greedy", "yes" if top == tokens else "no", text)

    def _max_tokens(self, once: Answer) -> ContractAnswer:
        sent = once.completion_tokens if once.completion_tokens is not None else _length(once)
        if not sent:
            return self._answer("max-tokens", "unknown", "answers include neither tokens nor their number")
        text = f"{sent} tokens of {_TOKENS} requested, finish {once.finish}"
        if self.known_by != KnownBy.TEXT and _length(once) != sent:
            text += f"; it sent {_length(once)} and counts {sent}"
        if max(sent, _length(once)) > _TOKENS:
            return self._answer("max-tokens", "no", text)
        kept = once.finish == "length" and sent == _TOKENS
        ended = once.finish == "eos" and sent <= _TOKENS
        return self._answer("max-tokens", "yes" if kept else "unknown" if ended else "no", text)

    def _repeatable(self, once: Answer, again: Answer) -> Iterator[ContractAnswer]:
        if not again.ok:
            yield self._answer("repeatable", "unknown", f"the second one failed: {again.reason}")
            yield self._answer("repeatable-bits", "unknown", "the second one failed")
            return
        first, second = self._tokens(once), self._tokens(again)
        at = shared_length(np.array(first, np.int32), np.array(second, np.int32))
        same = first == second
        hits = [a.cached_tokens for a in (once, again)]
        cached = "" if hits[0] == hits[1] else f"; cached tokens {hits[0]} and {hits[1]}"
        unit = "token" if self.known_by != KnownBy.TEXT else "character"
        text = f"{at} {unit}s identical" if same else f"they first differ at {unit} {at}"
        yield self._answer("repeatable", "yes" if same else "no", text + cached)
        if not once.logprobs or not again.logprobs:
            yield self._answer("repeatable-bits", "unknown", "there are no logprobs")
            return
        count = min(at, len(_floats(once.logprobs)), len(_floats(again.logprobs)))
        a, b = _floats(once.logprobs)[:count], _floats(again.logprobs)[:count]
        off = int((a.view(np.int32) != b.view(np.int32)).sum())
        text = f"{count} logprobs identical, bit for bit"
        if off:
            gap = float(np.nanmax(np.abs(a.astype(np.float64) - b), initial=0.0))
            text = f"{off} of {count} logprobs differ, by up to {gap:.3g}"
        yield self._answer("repeatable-bits", "no" if off else "yes" if count else "unknown", text + cached)

    async def _sampled(self, once: Answer) -> list[ContractAnswer]:
        free = [await self.send(temperature=1.0) for _ in range(_DRAWS)]
        good = [a for a in free if a.ok]
        if len(good) < 2:
            why = f"requests at temperature 1 failed: {free[0].reason}"
            return [self._answer(question, "unknown", why) for question in ("varies", "seed", "tempered")]
        distinct = len({self._tokens(a) for a in good})
        chance = _chance_of_agreement(good)
        if distinct > 1:
            varies, text = "yes", f"{distinct} distinct answers of {len(good)}"
        elif chance is not None and chance < _CHANCE:
            varies, text = "no", f"{len(good)} identical answers, by chance in {percent(chance, 'up')} of cases"
        else:
            varies, text = "unknown", f"{len(good)} identical answers; this prompt may leave no choice"
        answers = [self._answer("varies", varies, text)]
        if self.drawn:
            answers.append(await self._independent(varies))
        pair = [await self.send(temperature=1.0, seed=s) for s in (1, 1, 2)]
        answers.append(self._tempered(once, [*good, *(a for a in pair if a.ok)]))
        if not all(a.ok for a in pair):
            bad = next(a for a in pair if not a.ok)
            return [*answers, self._answer("seed", "unknown", f"it failed: {bad.reason}")]
        one, same, other = (self._tokens(a) for a in pair)
        if one != same:
            seed, words = "no", "one seed, two answers"
        elif varies == "yes" or other != one:
            seed = "yes"
            words = "one seed, one answer; another seed, " + ("the same one" if other == one else "another one")
        else:
            seed, words = "unknown", "one seed, one answer, but nothing varies without a seed either"
        return [*answers, self._answer("seed", seed, words)]

    def _tempered(self, once: Answer, drawn: list[Answer]) -> ContractAnswer:
        """Whether answers at temperature 1 are the greedy one; those without a seed may all be one draw."""
        greedy = self._tokens(once)
        other = sum(self._tokens(a) != greedy for a in drawn)
        if other:
            return self._answer("tempered", "yes", f"{other} of {len(drawn)} answers are not the one at temperature 0")
        text = f"all {len(drawn)} answers at temperature 1 are the one at temperature 0"
        chance = _chance_of(drawn[0])
        if chance is None or chance**2 >= _CHANCE:
            return self._answer("tempered", "unknown", f"{text}; this prompt may leave no choice")
        return self._answer("tempered", "no", f"{text}, by chance in {percent(chance**2, 'up')} of cases")

    async def _independent(self, varies: str) -> ContractAnswer:
        """Whether requests that are sent at once get the same draw, where one after another they do not."""
        sent = await asyncio.gather(*(self.send(temperature=1.0) for _ in range(_AT_ONCE)))
        answers = {self._tokens(a): a for a in sent if a.ok}
        counts = Counter(self._tokens(a) for a in sent if a.ok)
        most = max(counts, key=counts.__getitem__, default=None)
        if most is None or varies != "yes":
            return self._answer("independent", "unknown", "one after another they do not vary either")
        if counts[most] == 1:
            return self._answer("independent", "yes", f"{counts.total()} requests at once, as many distinct answers")
        text = f"{counts[most]} of {counts.total()} requests at once have one answer, and one after another they vary"
        chance = _chance_of(answers[most])
        if chance is None or math.comb(counts.total(), 2) * chance >= _CHANCE:
            return self._answer("independent", "unknown", f"{text}; that may be chance")
        return self._answer("independent", "no", f"{text}; two agree by chance in {percent(chance, 'up')} of cases")

    async def _distribution(self) -> ContractAnswer:
        """Compare the first position's margin at two temperatures: a scaled one doubles when the temperature halves."""
        full = await self.send(temperature=1.0, max_tokens=1)
        half = await self.send(temperature=0.5, max_tokens=1)
        margins = [_floats(a.margins) for a in (full, half) if a.ok]
        if len(margins) < 2 or not all(m.size and np.isfinite(m[0]) and m[0] > 1e-3 for m in margins):
            return self._answer("distribution", "unknown", "no margin of top-1 and top-2 to compare with another")
        ratio = float(margins[1][0]) / float(margins[0][0])
        text = f"top-1 − top-2 of the first token: {margins[0][0]:.4g} at temperature 1, {margins[1][0]:.4g} at 0.5"
        if abs(ratio - 2.0) < 0.05:
            return self._answer("distribution", "yes", text + ": they are scaled by it")
        if abs(ratio - 1.0) < 0.025:
            return self._answer("distribution", "no", text + ": they are the model's own, before temperature")
        return self._answer("distribution", "unknown", text)

    def _sums(self, once: Answer) -> ContractAnswer:
        logprobs, margins = _floats(once.logprobs).astype(np.float64), _floats(once.margins).astype(np.float64)
        if not logprobs.size or logprobs.size != margins.size or once.chosen_is_top != logprobs.size:
            return self._answer("sums", "unknown", "answers do not include the two largest logprobs at every position")
        total = np.exp(logprobs) + np.exp(logprobs - np.where(np.isfinite(margins), margins, math.inf))
        over = int((~(total <= 1.0 + 1e-3)).sum())  # decimals are rounded on their way
        text = f"largest sum {float(np.max(total)):.6f} over {total.size} positions"
        return self._answer("sums", "no" if over else "yes", text)

    def _cache_counted(self, again: Answer) -> ContractAnswer:
        if again.cached_tokens is None:
            return self._answer("cache-counted", "no", "not reported: what the prefix cache does is not known")
        text = f"{again.cached_tokens} of {again.prompt_tokens} prompt tokens in the second answer"
        return self._answer("cache-counted", "yes", text)


def _length(answer: Answer) -> int:
    return len(answer.token_ids or answer.token_bytes or ())


def _floats(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.frombuffer(data, dtype="<f4")


def _logprobs_words(once: Answer) -> str:
    if not once.logprobs:
        return "there are none: what differs below the tokens can't be seen"
    margins = "with alternatives" if once.margins else "without alternatives: no margins"
    return f"{len(once.logprobs) // 4} of them, {margins}"


def _chance_of(answer: Answer) -> float | None:
    """The probability of drawing it at temperature 1; None where unknown. Logprobs of a model before temperature are
    those at temperature 1, and processed ones are as well."""
    total = float(_floats(answer.logprobs).astype(np.float64).sum())
    return math.exp(min(0.0, total)) if answer.logprobs and math.isfinite(total) else None


def _chance_of_agreement(answers: list[Answer]) -> float | None:
    """The probability that all draws agree: that of their common answer, once for each after the first."""
    chance = _chance_of(answers[0])
    return None if chance is None else chance ** (len(answers) - 1)
