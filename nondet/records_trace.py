"""What a run file holds of tapes, replays and traces. Plain typed data, no torch."""

from __future__ import annotations

from typing import Any

import msgspec

from nondet.records import Difference, Record

__all__ = ["Control", "Culprit", "Replay", "Replayed", "Substitution", "Tape", "TapedRequest", "TraceVerdict"]


class TapedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a tape.

    Attributes:
        prompt: Index among the tape's prompts.
        new: Tokens to generate.
        arrival: Engine step from which it may be scheduled.
        sampling: How its tokens were drawn, as in `nondet.sampling.temperature.Sampling`; None of greedy requests.
    """

    id: str
    target: bool
    prompt: int
    new: int
    arrival: int
    sampling: dict[str, Any] | None = None


class Tape(Record, frozen=True, tag="tape", kw_only=True):
    """What is needed to play one round again, and to see whether it was played as before.

    Attributes:
        prompts: Token ids of each distinct prompt.
        load: The load's parameters: limits of the engine, chunking, sharing.
        engine: What the engine says of itself.
        weights: Digest over the names, shapes and bits of all parameters and buffers.
        padding: What steps are padded to; "" for steps of their own size.
        steps: The schedule, as [first step, steps, [request, first position, rows], ...]: requests by their index, in
            the order of the rows. In each further step of the same entry everybody goes on by their rows.
    """

    impl: str
    round: int
    requests: list[TapedRequest]
    prompts: list[list[int]]
    load: dict[str, Any]
    seed: int
    eos: list[int]
    engine: dict[str, Any]
    weights: str
    steps: list[list[Any]]
    padding: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """What a resumed run recognizes a finished tape by."""
        return ("tape", self.impl, str(self.round))


class Replayed(Record, frozen=True, tag="replayed", kw_only=True):
    """A recorded completion that was played again.

    Attributes:
        how: "as recorded", "alone", or "shrunk".
        company: Ids of the others in the session.
        recorded, got: Digests of tokens and logprob bits.
        first_token: First token that differs from the recorded completion; None where none does.
        first_logprob: First place where tokens or logprob bits differ; None where none does.
        sessions: Engine sessions that it took.
        sentence: For people.
    """

    impl: str
    request: str
    how: str
    company: list[str]
    recorded: str
    got: str
    same: bool
    first_token: int | None
    first_logprob: int | None
    sessions: int
    sentence: str
    seconds: float

    @property
    def key(self) -> tuple[str, ...]:
        """What a resumed run recognizes it by."""
        return ("replayed", self.impl, self.request, self.how)


class Control(Record, frozen=True, tag="control", kw_only=True):
    """One thing that must hold before a trace may say anything, or that a reader must know.

    Attributes:
        passed: Whether it holds; None where it is a plain statement.
        figures: Numbers behind the sentence.
    """

    name: str
    passed: bool | None
    sentence: str
    figures: dict[str, float] = msgspec.field(default_factory=dict)

    @property
    def key(self) -> tuple[str, ...]:
        """What a resumed run recognizes it by."""
        return ("control", self.name)


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """The guilty call made again, alone, with one thing changed.

    Attributes:
        name: "repeat", "rows only", "values", "order", "M", "keys", "exact" or "substitution".
        status: "identical", "divergent" or "error".
        equals_first, equals_second: Whether the result has the bits of either arm; None where that was not asked.
        values, labels: What was swept, and the class of bits of each.
        kernels: The kernels of each value, where a profiler saw them.
    """

    name: str
    status: str
    sentence: str
    trials: int = 0
    distinct: int = 0
    equals_first: bool | None = None
    equals_second: bool | None = None
    values: list[int | str] = []
    labels: list[int] = []
    kernels: list[list[str]] = []


class Culprit(Record, frozen=True, tag="culprit", kw_only=True):
    """The first call with bitwise equal inputs and unequal outputs, with what was replaced by then.

    Attributes:
        number: 1 for the first of the list.
        replaced: Families whose invariant implementation was in place in both arms.
        position: Absolute position in the sequence; token: which generated token its logits predict, or -1.
        layer: Number of the layer, "embedding" or "head".
        module, call, occurrence: Who called what, for which time in this call of the module.
        call: "" where no call could be named: then `sentence` says what is known.
        requests: Whose rows were compared: the request of either arm, or who wrote the keys that it read.
        shapes: For either arm, place of a tensor -> its shape.
        axes: Place of a tensor -> what its axes count.
        digests: Place of an input -> digest of this request's part, equal in both arms.
        differences: Result -> how it differs.
        kernels: For either arm, what ran.
        family: The family of batch_invariant() that the call belongs to; "" where there is none.
        unmatched: Calls before it that only one arm made.
        not_understood: Tensors of it of which no claim is made.
    """

    number: int
    replaced: list[str]
    position: int
    token: int
    layer: str
    module: str
    call: str
    occurrence: int
    requests: list[str]
    shapes: list[dict[str, list[int]]]
    axes: dict[str, list[str]]
    digests: dict[str, str]
    differences: dict[str, Difference]
    kernels: list[list[str]]
    replays: list[Replay]
    family: str
    sentence: str
    unmatched: list[str] = msgspec.field(default_factory=list)
    not_understood: list[str] = msgspec.field(default_factory=list)
    compared: int = 0

    @property
    def key(self) -> tuple[str, ...]:
        """What a resumed run recognizes it by."""
        return ("culprit", str(self.number))


class Substitution(Record, frozen=True, tag="substitution", kw_only=True):
    """The whole run again with families replaced in both arms.

    Attributes:
        role: "search" for one more replacement, "left out" for the test that each is needed, "all" for every family.
        agree: Whether hidden states, K, V, logits and logprobs agree in every position.
        position, layer: Where the arms part now; -1 and "" where they agree.
        at_risk: Calls that the replacements left stock and unproven.
    """

    role: str
    families: list[str]
    agree: bool
    position: int
    layer: str
    sentence: str
    at_risk: list[str] = msgspec.field(default_factory=list)

    @property
    def key(self) -> tuple[str, ...]:
        """What a resumed run recognizes it by."""
        return ("substitution", self.role, "+".join(self.families))


class TraceVerdict(Record, frozen=True, tag="trace_verdict", kw_only=True):
    """What a trace came to.

    Attributes:
        finding: "batch-dependent", "run-to-run", "no divergence observed" or "unknown".
        culprits: One line for each guilty call, in the order in which they were found.
        families: The smallest set of replacements after which the arms agree; None where none was found.
        sentences: For people.
        repro: The stand-alone script, and what it showed when it was run; "" without one.
    """

    finding: str
    culprits: list[str]
    families: list[str] | None
    sentences: list[str]
    repro: str = ""
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, ...]:
        """What a resumed run recognizes it by."""
        return ("trace_verdict",)
