"""What the arms of an endpoint run come to: how far traces part, how long answers took. Pure figures, no HTTP.

Every trace is held against the commonest solo trace of its prompt and server (without solo: the arm's own commonest).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from nondet.core.records import Completion, Round, Run
from nondet.core.traces import Trace
from nondet.verdict.served import ArmEvidence, evidence

__all__ = ["ArmFigures", "Parting", "arm_figures", "parting"]


@dataclass(frozen=True)
class Parting:
    """How one trace parts from another.

    Attributes:
        token: Index of the first token that differs; None where none does.
        bits: Index of the first logprob that differs before that; None where none does.
        gap: Largest difference of the logprob of a token that both have, up to where tokens part; 0.0 if none differs.
        margin: Top-1 minus top-2 of the other trace where tokens part; None where it is not on record.
    """

    token: int | None
    bits: int | None
    gap: float
    margin: float | None


@dataclass(frozen=True)
class ArmFigures:
    """One arm of one server, over all prompts.

    Attributes:
        prompts: Prompts that it completed.
        evidence: By prompt.
        completions, traces: (fewest, most) distinct ones of a prompt.
        first_token, first_bits: The earliest of any trace; None where none parts.
        has_logprobs: Whether the server gave any; without them a trace is its tokens.
        gap: The largest of any trace.
        gap_requests: Requests whose logprobs part.
        margins: Top-1 minus top-2 at each place where tokens part, one for each request that parts there.
        wait_s, answer_s: Median seconds to the first token (None if nothing streamed) and to the end; slow_s: the 95th
            percentile of the latter.
        tokens_per_second: Of everybody in its rounds, over their time.
        retried: What went wrong at attempts before the last: kind -> times.
        unit: What a prompt is called: a prompt with its seed is a subject of its own.
    """

    impl: str
    arm: str
    prompts: int
    requests: int
    failed: Mapping[str, int]
    evidence: Mapping[int, ArmEvidence]
    completions: tuple[int, int]
    traces: tuple[int, int]
    first_token: int | None
    first_bits: int | None
    has_logprobs: bool
    gap: float
    gap_requests: int
    margins: tuple[float, ...]
    concurrency: int
    in_flight: int
    wait_s: float | None
    answer_s: float | None
    slow_s: float | None
    tokens_per_second: float
    retried: Mapping[str, int]
    unit: str = "prompt"

    @property
    def proof(self) -> str:
        """What shows that the arm was what it is called: the words are one prompt's, the first of those proven."""
        proven = [(prompt, e.proof_words) for prompt, e in self.evidence.items() if e.proof]
        several = len(self.evidence) > 1
        if not proven:
            return f"unproven: {next(iter(self.evidence.values())).proof_words}"
        prompt, words = proven[0]
        first = f"prompt {prompt + 1}" if self.unit == "prompt" else "one of them"
        share = f" ({first}; proven of {len(proven)} of {len(self.evidence)} {self.unit}s)"
        return words + (share if several else "")


@dataclass
class _Sums:
    first_token: list[int] = field(default_factory=list)
    first_bits: list[int] = field(default_factory=list)
    gap: float = 0.0
    requests: int = 0
    margins: list[float] = field(default_factory=list)


def parting(base: Trace, other: Trace) -> Parting:
    """Where and how far `other` parts from `base`."""
    a, b = (np.asarray(t.token_ids, dtype=np.int64) for t in (base, other))
    shared = min(len(a), len(b))
    differing = np.flatnonzero(a[:shared] != b[:shared])
    token = int(differing[0]) if differing.size else None if len(a) == len(b) else shared
    upto = shared if token is None else token
    x, y = base.logprob_array[:upto], other.logprob_array[:upto]
    count = min(len(x), len(y))
    other_bits = np.flatnonzero(x[:count].view(np.int32) != y[:count].view(np.int32))
    gap = 0.0
    if other_bits.size:
        apart = np.abs(x[:count].astype(np.float64) - y[:count])
        gap = float(apart[np.isfinite(apart)].max(initial=0.0))
    margin = None
    if token is not None and token < len(base.margin_array):
        value = float(base.margin_array[token])
        margin = value if np.isfinite(value) else None
    return Parting(token, int(other_bits[0]) if other_bits.size else None, gap, margin)


def arm_figures(run: Run, traces: Mapping[str, Trace]) -> list[ArmFigures]:
    """A line for each server and arm, in the order of the plan."""
    by_prompt = evidence(run)
    members: dict[tuple[str, str], list[Completion]] = {}
    for completion in run.completions:
        members.setdefault((completion.impl, completion.arm), []).append(completion)
    rounds: dict[tuple[str, str], list[Round]] = {}
    for record in run.rounds:
        rounds.setdefault((record.impl, record.arm), []).append(record)
    order = list(run.header.plan.get("arms", {}))
    places = sorted(members, key=lambda key: (key[0], order.index(key[1]) if key[1] in order else len(order)))
    return [
        _figures(
            key, members[key], rounds.get(key, []), {p: a for (i, p), a in by_prompt.items() if i == key[0]}, traces
        )
        for key in places
    ]


def _figures(
    key: tuple[str, str],
    completions: Sequence[Completion],
    rounds: Sequence[Round],
    arms: Mapping[int, Mapping[str, ArmEvidence]],
    traces: Mapping[str, Trace],
) -> ArmFigures:
    impl, name = key
    mine = {prompt: by_arm[name] for prompt, by_arm in arms.items() if name in by_arm}
    sums = _Sums()
    for prompt, arm in mine.items():
        solo = arms[prompt].get("solo")
        base = _commonest((solo if solo is not None and solo.n else arm).traces)
        if base is not None:
            _hold(sums, traces[base], arm, traces)
    good = [c.served for c in completions if c.status == "ok" and c.served is not None]
    took = sorted(s.done - s.sent for s in good)
    waits = [s.first - s.sent for s in good if s.first is not None]
    seconds = sum(r.seconds for r in rounds)
    traffic = [r.traffic for r in rounds if r.traffic is not None]
    return ArmFigures(
        impl=impl,
        arm=name,
        prompts=len(mine),
        requests=len(completions),
        failed=_total(e.failed for e in mine.values()),
        evidence=mine,
        completions=_span([len(e.completions) for e in mine.values() if e.n]),
        traces=_span([len(e.traces) for e in mine.values() if e.n]),
        first_token=min(sums.first_token, default=None),
        first_bits=min(sums.first_bits, default=None),
        has_logprobs=any(traces[t].logprobs for e in mine.values() for t in e.traces),
        gap=sums.gap,
        gap_requests=sums.requests,
        margins=tuple(sums.margins),
        concurrency=max((t.concurrency for t in traffic), default=0),
        in_flight=max((s.in_flight for s in good), default=0),
        wait_s=median(waits) if waits else None,
        answer_s=median(took) if took else None,
        slow_s=took[min(len(took) - 1, int(0.95 * len(took)))] if took else None,
        tokens_per_second=sum(r.tokens for r in rounds) / seconds if seconds > 0 else 0.0,
        retried=_total(s.refusals for s in good),
    )


def _hold(sums: _Sums, base: Trace, arm: ArmEvidence, traces: Mapping[str, Trace]) -> None:
    """Every trace of the arm against `base`."""
    for digest, count in arm.traces.items():
        if digest == base.digest:
            continue
        p = parting(base, traces[digest])
        if p.token is not None:
            sums.first_token.append(p.token)
            if p.margin is not None:
                sums.margins += [p.margin] * count
        if p.bits is not None:
            sums.first_bits.append(p.bits)
            sums.gap = max(sums.gap, p.gap)
            sums.requests += count


def _commonest(traces: Mapping[str, int]) -> str | None:
    """The commonest; of equally common ones the first by name, so that the file's order does not matter."""
    return min(traces, key=lambda digest: (-traces[digest], digest), default=None)


def _span(counts: Sequence[int]) -> tuple[int, int]:
    return min(counts, default=0), max(counts, default=0)


def _total(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(sorted(total.items()))
