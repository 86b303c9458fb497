"""What a report says of servers: the contract, the arms and their proof, how far traces part, the times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from nondet.core.records import Completion, Round, Run
from nondet.core.traces import Trace
from nondet.endpoint.contract import QUESTIONS
from nondet.errors import one_line
from nondet.reports.document import BRIEF, Bit, Block, Cells, Details, Heading, Items, Paragraph, Table
from nondet.reports.text import counted
from nondet.reports.text import number as number_text
from nondet.sampling.analysis import COUNTS, Interval, SampleSummary
from nondet.verdict.findings import plural, subject_name, subject_unit
from nondet.verdict.served import ArmEvidence, Comparison, evidence, is_endpoint, subjects

if TYPE_CHECKING:
    from nondet.reports.content import Report, RunSection

# What the arms of an endpoint run come to: how far traces part, how long answers took. Pure figures, no HTTP.
#
# Every trace is held against the commonest solo trace of its prompt and server (without solo: the arm's own
# commonest).


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
        completions=_span_figures([len(e.completions) for e in mine.values() if e.n]),
        traces=_span_figures([len(e.traces) for e in mine.values() if e.n]),
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


def _span_figures(counts: Sequence[int]) -> tuple[int, int]:
    return min(counts, default=0), max(counts, default=0)


def _total(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(sorted(total.items()))


_COMPARISONS_MOST = 40
_CELLS = ("", *("cell",) * 9)
_ARMS = (
    "arm", "requests", "distinct completions", "distinct traces", "tokens part at", "logprobs part at",
    "largest logprob gap", "margin where tokens part", "failed", "how it is known to be that",
)  # fmt: skip
_TIMES = (
    "arm", "concurrency", "first token, median s", "answer, median s", "answer, 95% s", "tokens/s of everybody",
    "retried",
)  # fmt: skip


@dataclass(frozen=True)
class ContractRow:
    """One question and its answer by each server."""

    question: str
    answers: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class EndpointSection:
    """The part of a run that is about its servers.

    Attributes:
        servers: A line for each.
        impls: The servers' names.
        contract: A row for each question, an (answer, evidence) for each server.
        comparisons: (server, prompt, what was compared): all of few, else those in which something parted.
        omitted: Comparisons left out for their number.
        figures: Of each arm.
    """

    servers: tuple[str, ...]
    impls: tuple[str, ...]
    contract: tuple[ContractRow, ...]
    comparisons: tuple[tuple[str, str, Comparison], ...]
    omitted: int
    figures: tuple[ArmFigures, ...]

    @property
    def parted(self) -> list[str]:
        """What was seen, and the finding, of each comparison in which something parted."""
        return [f"{c.text}: {c.finding}" for _, _, c in self.comparisons if c.traces_off]

    @property
    def broken(self) -> tuple[ContractRow, ...]:
        """Questions that a server answers with no, or that have no answer."""
        return tuple(r for r in self.contract if any(answer != "yes" for answer, _ in r.answers))

    @property
    def brief(self) -> list[str]:
        """A few lines for a small screen: what is wrong with the contract, then a line for each arm."""
        lines = [*self.servers]
        answers = [answer for r in self.contract for answer, _ in r.answers]
        if answers:
            parts = [f"{answers.count('yes')} of {len(answers)} kept"]
            for kind in ("no", "unknown"):
                named = [r.question for r in self.contract if any(answer == kind for answer, _ in r.answers)]
                parts += [f"{kind}: {'; '.join(named)}"] if named else []
            lines.append(f"contract: {', '.join(parts)}")
        lines += [_arm_text(f, len(self.impls) > 1) for f in self.figures]
        return lines

    @property
    def gap(self) -> str:
        """ "logprobs off by up to 0.047 at 44 requests", or nothing."""
        requests = sum(f.gap_requests for f in self.figures)
        largest = max((f.gap for f in self.figures), default=0.0)
        return f"logprobs off by up to {number_text(largest)} at {counted(requests)} requests" if requests else ""


def endpoint_section(run: Run, traces: Mapping[str, Trace]) -> EndpointSection | None:
    """The section; None for runs of other engines."""
    if not is_endpoint(run):
        return None
    unit = subject_unit(run.header.plan)
    figures = [replace(f, unit=unit) for f in arm_figures(run, traces)]
    if run.header.plan.get("sampling"):  # of drawn tokens the margin says little
        figures = [replace(f, margins=()) for f in figures]
    impls = tuple(dict.fromkeys([s.impl for s in run.servers] or [f.impl for f in figures]))
    compared = [(s.server.impl, _subject(run, s.prompt), c) for s in subjects(run) for c in s.comparisons]
    kept = compared
    if len(compared) > _COMPARISONS_MOST:
        kept = [entry for entry in compared if entry[2].traces_off][:_COMPARISONS_MOST]
    return EndpointSection(
        servers=tuple(_server_line(run, impl) for impl in impls if any(s.impl == impl for s in run.servers)),
        impls=impls,
        contract=tuple(_contract(run, impls)),
        comparisons=tuple(kept),
        omitted=len(compared) - len(kept),
        figures=tuple(figures),
    )


def endpoint_parts(report: Report, section: RunSection, number: int) -> list[Block]:
    """Who the servers are, the arms and what proves them, the comparisons, the contract, the times."""
    told = section.endpoint
    if told is None:
        return []
    made: list[Block] = [
        *(Paragraph(line, only=BRIEF) for line in told.brief),
        Heading("Servers", f"servers-{number}", "servers"),
        Items([Bit(line) for line in told.servers]) if told.servers else Paragraph("None answered.", "soft"),
    ]
    several = len(told.impls) > 1
    if told.figures:
        made += [
            Heading("Arms", level=4),
            Paragraph(
                "Places are those of the first token, or logprob, that differs from the commonest answer given alone. "
                "Logprobs are compared bit for bit, as the decimals that were sent, up to where tokens part.",
                "soft",
            ),
            Table(_ARMS, [tuple(map(Bit, _arm_cells(f, several))) for f in told.figures], _CELLS),
        ]
    if told.comparisons:
        rows: list[Cells] = [
            (Bit(impl, "code"), Bit(prompt), c.text, Bit(c.finding, "strong"), " ".join(c.why) or "–")
            for impl, prompt, c in told.comparisons
        ]
        head: Cells = ("server", "prompt", "seen", "finding", "what stands against more")
        made += [Heading("Compared with each other", level=4), Table(head, rows, _CELLS)]
    if told.omitted:
        made.append(Paragraph(f"… and {plural(told.omitted, 'more comparison')}, in which nothing parted.", "soft"))
    if told.contract:
        styles = {"yes": "good", "no": "bad"}
        rows = [
            (row.question, *((Bit(answer, styles.get(answer, "dull")), f" {seen}") for answer, seen in row.answers))
            for row in told.contract
        ]
        count = plural(len(told.broken), "question is not answered with yes", "questions are not answered with yes")
        note = "What a comparison takes for granted, asked before anything was sampled, one request at a time."
        head = ("contract", *(Bit(impl, "code") for impl in told.impls))
        grid = Table(head, rows, ("", *("wide",) * len(told.impls)))
        made.append(Details(f"Contract: {count}", [Paragraph(note, "soft"), grid], opened=True))
    if told.figures:
        rows = [tuple(map(Bit, _latency_cells(f, several))) for f in told.figures]
        made.append(Details("Times", [Table(_TIMES, rows, _CELLS)], opened=True))
    return made


def counts_alone(summary: SampleSummary) -> SampleSummary:
    """A summary of a server's arms together, which are no sample of one thing: what differs where, and no rate."""

    def bare(interval: Interval) -> Interval:
        return replace(interval, low=0.0, high=1.0, method=COUNTS, rounds=0)

    return replace(
        summary, agree=bare(summary.agree), rate=bare(summary.rate), disagreement=None, new_share=None, k3=None
    )


def _server_line(run: Run, impl: str) -> str:
    seen = [s for s in run.servers if s.impl == impl]
    first = seen[0]
    parts = [f"{impl}: {first.url}", f"model {first.answered_as or first.model or 'not named'}"]
    parts += [first.software] if first.software else []
    parts += [f"as {first.protocol}"] if first.protocol else []
    parts += [f"calls itself {first.fingerprint}"] if first.fingerprint else ["no fingerprint"]
    parts += [f"compared by {first.known_by}" + ("" if first.logprobs else ", no logprobs")]
    parts += [f"gone on with {len(seen) - 1} times"] if len(seen) > 1 else []
    return one_line(" · ".join(parts), 500)


def _contract(run: Run, impls: Sequence[str]) -> list[ContractRow]:
    answers = {(a.impl, a.question): (a.answer, a.evidence) for a in run.contract}
    asked = [q for q in QUESTIONS if any((impl, q) in answers for impl in impls)]
    asked += sorted({a.question for a in run.contract} - set(QUESTIONS))
    return [
        ContractRow(QUESTIONS.get(q, one_line(q, 80)), tuple(answers.get((impl, q), ("unknown", "")) for impl in impls))
        for q in asked
    ]


def _name(f: ArmFigures, several: bool) -> str:
    return f"{f.impl}, {f.arm}" if several else f.arm


def _span(low: int, high: int, prompts: int, unit: str) -> str:
    if prompts < 2:
        return counted(high)
    return f"{counted(high)} a {unit}" if low == high else f"{counted(low)} to {counted(high)} a {unit}"


def _arm_cells(f: ArmFigures, several: bool) -> tuple[str, ...]:
    failed = ", ".join(f"{kind} {count}" for kind, count in f.failed.items())
    margin = (
        f"{number_text(min(f.margins))} to {number_text(max(f.margins))}, median {number_text(median(f.margins))}"
        if f.margins
        else "–"
    )
    return (
        _name(f, several),
        counted(f.requests) + (f" of {counted(f.prompts)} {f.unit}s" if f.prompts > 1 else ""),
        _span(*f.completions, f.prompts, f.unit),
        _span(*f.traces, f.prompts, f.unit) if f.has_logprobs else "no logprobs",
        "nowhere" if f.first_token is None else f"token {f.first_token}",
        "–" if not f.has_logprobs else "nowhere" if f.first_bits is None else f"token {f.first_bits}",
        f"{number_text(f.gap)} at {counted(f.gap_requests)}" if f.gap_requests else "none" if f.has_logprobs else "–",
        margin,
        one_line(failed, 200) or "none",
        one_line(f.proof, 300),
    )


def _arm_text(f: ArmFigures, several: bool) -> str:
    """An arm in a line."""
    traces = f"{_span(*f.traces, f.prompts, f.unit)} traces" if f.has_logprobs else "no logprobs"
    text = f"{_name(f, several)}: {counted(f.requests)}"
    text += f" of {counted(f.prompts)} {f.unit}s" if f.prompts > 1 else ""
    text += f" requests, {_span(*f.completions, f.prompts, f.unit)} distinct, {traces}"
    text += f", logprobs off by {number_text(f.gap)} at {counted(f.gap_requests)}" if f.gap_requests else ""
    text += f", tokens part at token {f.first_token}" if f.first_token is not None else ""
    text += f", failed: {', '.join(f'{kind} {count}' for kind, count in f.failed.items())}" if f.failed else ""
    return f"{text}; {f.proof}"


def _latency_cells(f: ArmFigures, several: bool) -> tuple[str, ...]:
    retried = ", ".join(f"{kind} {count}" for kind, count in f.retried.items())
    return (
        _name(f, several),
        f"{f.in_flight} under way of {f.concurrency} allowed",
        _seconds(f.wait_s),
        _seconds(f.answer_s),
        _seconds(f.slow_s),
        f"{f.tokens_per_second:,.1f}",
        one_line(retried, 200) or "none",
    )


def _seconds(value: float | None) -> str:
    return "not streamed" if value is None else f"{value:.3f}"


def _subject(run: Run, prompt: int) -> str:
    plan = run.header.plan
    return str(prompt + 1) if subject_unit(plan) == "prompt" else subject_name(plan, prompt)
