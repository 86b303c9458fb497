"""What a report says of servers: the contract, the arms and their proof, the times. The same rows for all reporters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from nondet.core.records import Run
from nondet.core.traces import Trace
from nondet.endpoint.contract import QUESTIONS
from nondet.endpoint.figures import ArmFigures, arm_figures
from nondet.errors import one_line
from nondet.reports.figures import counted, number
from nondet.sampling.analysis import COUNTS, Interval, SampleSummary
from nondet.verdict.findings import subject_name, subject_unit
from nondet.verdict.served import compare_arms, evidence, is_endpoint, pooled_odds

__all__ = ["ContractRow", "EndpointSection", "counts_alone", "endpoint_section"]

_COMPARISONS_MOST = 40


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
        arms: Cells under `ARMS_HEAD`; `LATENCY_HEAD` has the times.
        comparisons: (server, prompt, what was seen, finding, what stands against more).
        omitted: Comparisons left out for their number: those in which nothing parted.
    """

    servers: tuple[str, ...]
    impls: tuple[str, ...]
    contract: tuple[ContractRow, ...]
    arms: tuple[tuple[str, ...], ...]
    latency: tuple[tuple[str, ...], ...]
    comparisons: tuple[tuple[str, str, str, str, str], ...]
    omitted: int
    figures: tuple[ArmFigures, ...]

    ARMS_HEAD = (
        "arm",
        "requests",
        "distinct completions",
        "distinct traces",
        "tokens part at",
        "logprobs part at",
        "largest logprob gap",
        "margin where tokens part",
        "failed",
        "how it is known to be that",
    )
    LATENCY_HEAD = (
        "arm",
        "concurrency",
        "first token, median s",
        "answer, median s",
        "answer, 95% s",
        "tokens/s of everybody",
        "retried",
    )
    COMPARISONS_HEAD = ("server", "prompt", "seen", "finding", "what stands against more")

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
        for cells in self.arms:
            arm, requests, completions, traces, place, _, gap, _, failed, proof = cells
            bits = traces if traces == "no logprobs" else f"{traces} traces"
            text = f"{arm}: {requests} requests, {completions} distinct, {bits}"
            text += f", logprobs off by {gap}" if gap not in ("none", "–") else ""
            text += f", tokens part at {place}" if place != "nowhere" else ""
            text += f", failed: {failed}" if failed != "none" else ""
            lines.append(f"{text}; {proof}")
        return lines

    @property
    def gap(self) -> str:
        """ "logprobs off by up to 0.047 at 44 requests", or nothing."""
        requests = sum(f.gap_requests for f in self.figures)
        largest = max((f.gap for f in self.figures), default=0.0)
        return f"logprobs off by up to {number(largest)} at {counted(requests)} requests" if requests else ""


def endpoint_section(run: Run, traces: Mapping[str, Trace]) -> EndpointSection | None:
    """The section; None for runs of other engines."""
    if not is_endpoint(run):
        return None
    unit = subject_unit(run.header.plan)
    figures = [replace(f, unit=unit) for f in arm_figures(run, traces)]
    if run.header.plan.get("sampling"):  # of drawn tokens the margin says little
        figures = [replace(f, margins=()) for f in figures]
    impls = tuple(dict.fromkeys([s.impl for s in run.servers] or [f.impl for f in figures]))
    known = evidence(run)
    odds = {impl: pooled_odds(known, impl) for impl in dict.fromkeys(impl for impl, _ in known)}
    rows = [
        (impl, _subject(run, prompt), c.text, c.finding.value, " ".join(c.why))
        for (impl, prompt), arms in known.items()
        for c in compare_arms(run, impl, prompt, arms, odds[impl])
    ]
    kept = rows if len(rows) <= _COMPARISONS_MOST else [r for r in rows if "alike" not in r[2]][:_COMPARISONS_MOST]
    several = len(impls) > 1
    return EndpointSection(
        servers=tuple(_server_line(run, impl) for impl in impls if any(s.impl == impl for s in run.servers)),
        impls=impls,
        contract=tuple(_contract(run, impls)),
        arms=tuple(_arm_cells(f, several) for f in figures),
        latency=tuple(_latency_cells(f, several) for f in figures),
        comparisons=tuple(kept),
        omitted=len(rows) - len(kept),
        figures=tuple(figures),
    )


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
        f"{number(min(f.margins))} to {number(max(f.margins))}, median {number(median(f.margins))}"
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
        f"{number(f.gap)} at {counted(f.gap_requests)}" if f.gap_requests else "none" if f.has_logprobs else "–",
        margin,
        one_line(failed, 200) or "none",
        one_line(f.proof, 300),
    )


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
