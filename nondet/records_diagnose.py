"""What a run file holds of a diagnosis beside its completions and its trace. Plain typed data, no torch."""

from __future__ import annotations

import msgspec

from nondet.records import Record

__all__ = ["AxisTried", "Diagnosis", "Step"]


class Step(Record, frozen=True, tag="step", kw_only=True):
    """One step of a diagnosis that came to its end: the unit of resuming.

    Attributes:
        name: A key of `nondet.diagnose.verdict.QUESTIONS`.
        outcome: The answer in a word, "yes" or "no" to the question, "unknown" where it has none, or "skipped".
        sentence: What was found, with its counts.
        figures: Numbers behind the sentence.
        facts: Digests and texts that later steps and reports go by.
    """

    name: str
    outcome: str
    sentence: str
    figures: dict[str, float] = msgspec.field(default_factory=dict)
    facts: dict[str, str] = msgspec.field(default_factory=dict)
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, ...]:
        """What a resumed run recognizes it by."""
        return ("step", self.name)


class AxisTried(Record, frozen=True, tag="axis", kw_only=True):
    """One thing about the company varied, with the others held, against the request alone.

    Attributes:
        axis: "batch size", "ragged company", "chunked prefill" or "prefix sharing".
        impl: Under which implementation.
        held: What was held.
        values: What was tried.
        parted: Those values at which a trace differed.
        tried: Completions compared with the one alone.
        traces, tokens: How many of them have other logprob bits, and other tokens.
        first: The first generated token at which anything differed, over all of them; None where nothing did.
        note: Why nothing was tried, or what was not met.
    """

    axis: str
    impl: str
    held: str
    values: list[str]
    parted: list[str]
    tried: int
    traces: int
    tokens: int
    first: int | None = None
    note: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """What a resumed run recognizes it by."""
        return ("axis", self.impl, self.axis)


class Diagnosis(Record, frozen=True, tag="diagnosis", kw_only=True):
    """What a diagnosis came to.

    Attributes:
        finding: "not greedy", "run-to-run nondeterministic", "batch-dependent", "a defect", "no divergence observed" or
            "unknown".
        whether, where, why, cure, cost: The answers, each a sentence or a few; "" where the question did not arise.
        limits: What was not asked, or has no answer.
    """

    finding: str
    whether: str
    where: str = ""
    why: str = ""
    cure: str = ""
    cost: str = ""
    limits: list[str] = msgspec.field(default_factory=list)

    @property
    def key(self) -> tuple[str, ...]:
        """What a resumed run recognizes it by."""
        return ("diagnosis",)
