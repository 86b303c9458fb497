"""Whether a flip of a token is within the noise: margins there against how far the same logits move elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from nondet.sampling.plan import Outcome, Session

__all__ = ["Flip", "Noise", "measure_noise"]

Top = tuple[float, float, int, int]  # the two largest logits, their token ids


@dataclass(frozen=True)
class Flip:
    """The first token of a completion that is not the one that it has alone.

    Attributes:
        index: Which generated token.
        margin: Top-1 minus top-2 logit, alone; other: in company.
    """

    index: int
    margin: float
    other: float

    @property
    def tie(self) -> bool:
        """Whether the two largest logits are equal on one side: then the choice hangs on the order of token ids."""
        return self.margin == 0 or self.other == 0


@dataclass
class Noise:
    """What was measured over completions in company against the one alone, as long as their tokens agree.

    Attributes:
        spread: Largest distance between the arms of one token's logit, at steps where the same token was chosen.
        moved: Logits compared there whose bits differ; compared: all of them.
        near: Its tokens whose margin is at most twice the spread: two logits may both move.
        tokens: Its tokens.
    """

    spread: float = 0.0
    moved: int = 0
    compared: int = 0
    near: int = 0
    tokens: int = 0
    flips: list[Flip] = field(default_factory=list)

    @property
    def within(self) -> int:
        """Flips whose margin alone is at most twice the spread."""
        return sum(flip.margin <= 2 * self.spread for flip in self.flips)


def measure_noise(alone: Session, companies: Iterable[Session]) -> Noise:
    """Compare the logits of the two largest tokens of each step, alone and in company.

    Contexts are equal up to and including the first token that differs: its own logits are those of the flip, and what
    the spread is measured on are the steps before it.
    """
    noise = Noise()
    reference = alone.outcomes[0]
    tops = alone.tops.get(reference.request.id, [])
    for session in companies:
        for outcome in session.outcomes:
            if outcome.request.target and outcome.finish != "error":
                _compare(noise, reference, tops, outcome, session.tops.get(outcome.request.id, []))
    margins = [first - second for first, second, _, _ in tops]
    noise.tokens = len(margins)
    noise.near = sum(margin <= 2 * noise.spread for margin in margins)
    return noise


def _compare(noise: Noise, a: Outcome, tops_a: Sequence[Top], b: Outcome, tops_b: Sequence[Top]) -> None:
    for index in range(min(len(a.token_ids), len(b.token_ids), len(tops_a), len(tops_b))):
        one, two = tops_a[index], tops_b[index]
        if a.token_ids[index] != b.token_ids[index]:
            noise.flips.append(Flip(index, one[0] - one[1], two[0] - two[1]))
            return
        logits = dict(zip(one[2:], one[:2], strict=True)), dict(zip(two[2:], two[:2], strict=True))
        for token in logits[0].keys() & logits[1].keys():
            distance = abs(logits[0][token] - logits[1][token])
            noise.compared += 1
            noise.moved += distance > 0
            noise.spread = max(noise.spread, distance)
