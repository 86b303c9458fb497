"""Servers in a report: the contract, the arms and their proof, how far traces differ, the times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from nondet.core.records import Completion, Round, Run, Served
from nondet.core.traces import Trace
from nondet.endpoint.arms import DETERMINISTIC
from nondet.endpoint.contract import QUESTIONS
from nondet.errors import one_line
from nondet.reports.document import ALL, BRIEF, Bit, Block, Cells, Details, Heading, Paragraph, Table
from nondet.reports.text import counted, environment_line
from nondet.reports.text import number as number_text
from nondet.sampling.analysis import COUNTS, SampleSummary
from nondet.verdict.findings import Finding, plural, subject_name, subject_unit
from nondet.verdict.served import ArmEvidence, Comparison, evidence, subjects
from nondet.verdict.wording import words

_COMPARISONS_MOST = 40
# In nats. Rounding by itself explains neither a lead of the top token nor a change of a logprob that is larger.
_FAR = 1.0


@dataclass(frozen=True)
class Parting:
    """How one trace differs from another."""

    token: int | None  # index of the first token that differs; None where none does
    bits: int | None  # index of the first logprob that differs before that; None where none does
    gap: float  # largest difference of a common token's logprob, up to where tokens differ; 0.0 if none differs
    margin: float | None  # top-1 minus top-2 of the other trace where tokens differ; None where it is not on record


def parting(base: Trace, other: Trace) -> Parting:
    """Where and how far `other` differs from `base`."""
    a, b = (np.asarray(t.token_ids, dtype=np.int64) for t in (base, other))
    shared = min(len(a), len(b))
    differing = np.flatnonzero(a[:shared] != b[:shared])
    token = int(differing[0]) if differing.size else None if len(a) == len(b) else shared
    upto = shared if token is None else token
    count = min(upto, len(base.logprob_array), len(other.logprob_array))
    x, y = base.logprob_array[:count], other.logprob_array[:count]
    other_bits = np.flatnonzero(x.view(np.int32) != y.view(np.int32))
    gap = 0.0
    if other_bits.size:
        apart = np.abs(x.astype(np.float64) - y)
        gap = float(apart[np.isfinite(apart)].max(initial=0.0))
    margin = None
    if token is not None and token < len(base.margin_array):
        value = float(base.margin_array[token])
        margin = value if np.isfinite(value) else None
    return Parting(token, int(other_bits[0]) if other_bits.size else None, gap, margin)


@dataclass(frozen=True)
class ArmFigures:
    """One arm of one server, over all prompts."""

    impl: str
    arm: str
    unit: str  # what a prompt is called: a prompt with its seed is a subject of its own
    requests: int  # completions and failures
    failed: Mapping[str, int]
    evidence: Mapping[int, ArmEvidence]
    # how each trace differs from the most common solo one of its prompt and server (without solo: the arm's own most
    # common), and how many requests gave it
    partings: Sequence[tuple[Parting, int]]
    has_logprobs: bool  # whether the server gave any; without them a trace is its tokens
    drawn: bool  # whether tokens were drawn: then a margin shows little
    good: Sequence[Served]
    rounds: Sequence[Round]

    @property
    def gap(self) -> float:
        """The largest gap of any trace."""
        return max((p.gap for p, _ in self.partings), default=0.0)

    @property
    def far(self) -> float:
        """Largest distance in nats that rounding does not explain: a margin at a divergence, or a gap before one."""
        forks = [p.margin for p, _ in self.partings if p.margin is not None]
        return 0.0 if self.drawn else max([self.gap, *forks])

    @property
    def gap_requests(self) -> int:
        """Requests whose logprobs differ."""
        return sum(count for p, count in self.partings if p.bits is not None)

    @property
    def proof(self) -> str:
        """The proof that the arm was what it is called, in the words of the first prompt that has one."""
        proven = [(prompt, words(e.shown)) for prompt, e in self.evidence.items() if e.proof]
        if not proven:
            return f"unproven: {words(next(iter(self.evidence.values())).shown)}"
        prompt, first_proof = proven[0]
        if len(self.evidence) < 2:
            return first_proof
        first = f"prompt {prompt + 1}" if self.unit == "prompt" else "one of them"
        return f"{first_proof} ({first}; proven of {len(proven)} of {len(self.evidence)} {self.unit}s)"

    def span(self, counts: Sequence[int]) -> str:
        """The fewest and the most of a prompt: "1 to 3 each"; of one prompt, its number."""
        low, high = min(counts, default=0), max(counts, default=0)
        if len(self.evidence) < 2:
            return counted(high)
        return f"{counted(high)} each" if low == high else f"{counted(low)} to {counted(high)} each"


def _kinds(counts: Mapping[str, int]) -> str:
    return one_line(", ".join(f"{kind} {count}" for kind, count in counts.items()), 200) or "none"


def _margins(f: ArmFigures) -> str:
    """Top-1 minus top-2 at each position where tokens differ, one for each request that differs there."""
    margins = [m for p, count in f.partings for m in [p.margin] * count if m is not None]
    if f.drawn or not margins:
        return "–"
    return f"{number_text(min(margins))} to {number_text(max(margins))}, median {number_text(median(margins))}"


def _seconds(values: Iterable[float], share: float = 0.5) -> str:
    took = sorted(values)
    if not took:
        return "not streamed"
    return f"{median(took) if share == 0.5 else took[min(len(took) - 1, int(share * len(took)))]:.3f}"


def arm_figures(run: Run, traces: Mapping[str, Trace]) -> list[ArmFigures]:
    """A line for each server and arm, in the order of the plan."""
    by_prompt, plan = evidence(run), run.header.plan
    members: dict[tuple[str, str], list[Completion]] = {}
    for completion in run.completions:
        members.setdefault((completion.impl, completion.arm), []).append(completion)
    order = list(plan.get("arms", {}))
    figures = []
    for impl, arm in sorted(members, key=lambda key: (key[0], order.index(key[1]) if key[1] in order else len(order))):
        mine = {prompt: arms[arm] for (i, prompt), arms in by_prompt.items() if i == impl and arm in arms}
        completions = members[impl, arm]
        figures.append(
            ArmFigures(
                impl=impl,
                arm=arm,
                unit=subject_unit(plan),
                requests=len(completions),
                failed=_total(e.failed for e in mine.values()),
                evidence=mine,
                partings=[
                    parted
                    for prompt, e in mine.items()
                    for parted in _partings(by_prompt[impl, prompt].get("solo"), e, traces)
                ],
                has_logprobs=any(traces[t].logprobs for e in mine.values() for t in e.traces),
                drawn=bool(plan.get("sampling")),
                good=[c.served for c in completions if c.status == "ok" and c.served is not None],
                rounds=[r for r in run.rounds if (r.impl, r.arm) == (impl, arm)],
            )
        )
    return figures


def _partings(solo: ArmEvidence | None, arm: ArmEvidence, traces: Mapping[str, Trace]) -> Iterable[tuple[Parting, int]]:
    """Every trace of the arm against the most common; ties go to the first by name, whatever the file's order."""
    counts = solo.traces if solo is not None and solo.n else arm.traces
    base = min(counts, key=lambda digest: (-counts[digest], digest), default=None)
    if base is not None:
        for digest, count in arm.traces.items():
            if digest != base:
                yield parting(traces[base], traces[digest]), count


def _total(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    return dict(sorted(sum(map(Counter, parts), Counter[str]()).items()))


@dataclass(frozen=True)
class EndpointSection:
    """The part of a run that is about its servers."""

    servers: Sequence[str]
    impls: Sequence[str]
    # each question with the (answer, evidence) of each server
    contract: Sequence[tuple[str, Sequence[tuple[str, str]]]]
    # (server, prompt, comparison): all where they are few, else those in which something differed
    comparisons: Sequence[tuple[str, str, Comparison]]
    omitted: int  # number of comparisons left out
    figures: Sequence[ArmFigures]

    @property
    def parted(self) -> list[str]:
        """What was seen and found in each comparison with a difference, with its prompt if there are several."""
        several = len({subject for _, subject, _ in self.comparisons}) > 1
        return [
            f"{f'{s}, ' * several}{c.text}: {c.finding}"
            + (f" ({c.why[0].rstrip('.')})" if c.finding == Finding.UNATTRIBUTED and c.why else "")
            for _, s, c in self.comparisons
            if c.traces_off
        ]

    @property
    def cure(self) -> str:
        """What to try next: a server's own mode, unless it is on."""
        on = [line for line in self.servers if DETERMINISTIC in line]
        if on and len(on) == len(self.servers):
            other = ": try --attention-backend triton" if "attention fa3" in on[0] else ""
            differ = f", and answers differ{other}" if self.parted else ""
            return f"its own mode is on (--enable-deterministic-inference){differ}"
        modes = "vLLM: VLLM_BATCH_INVARIANT=1, SGLang: --enable-deterministic-inference"
        return f"not tried: switch on the server's own ({modes})"

    @property
    def not_rounding(self) -> str:
        """A warning where answers differ by more than rounding explains; else ""."""
        far = max((f.far for f in self.figures if f.arm != "first"), default=0.0)
        said = f"Some answers differ by {number_text(far)} nats: rounding does not do that. Look for a defect, such as "
        return f"{said}keys or positions of another request that are read." if far > _FAR else ""

    def answered(self, *kinds: str) -> list[str]:
        """Questions to which any server gave one of these answers."""
        return [question for question, answers in self.contract if any(a in kinds for a, _ in answers)]

    @property
    def gap(self) -> str:
        """ "logprobs off by up to 0.047 at 44 requests", or ""."""
        requests = sum(f.gap_requests for f in self.figures)
        largest = max((f.gap for f in self.figures), default=0.0)
        return f"logprobs off by up to {number_text(largest)} at {counted(requests)} requests" if requests else ""


def machine_line(run: Run) -> str:
    """The machine in one line; for a server, what it reports of itself, and the machine that sent the requests."""
    here = environment_line(run.header.environment)
    servers = dict.fromkeys(s.software or s.url for s in run.servers)
    return one_line(f"{', '.join(servers)} · asked from: {here}", 400) if servers else here


def endpoint_section(run: Run, traces: Mapping[str, Trace]) -> EndpointSection:
    """The servers' part of a run."""
    figures, plan = arm_figures(run, traces), run.header.plan
    impls = tuple(dict.fromkeys([s.impl for s in run.servers] or [f.impl for f in figures]))
    compared = [(s.server.impl, subject_name(plan, s.prompt), c) for s in subjects(run) for c in s.comparisons]
    kept = compared
    if len(compared) > _COMPARISONS_MOST:
        kept = [entry for entry in compared if entry[2].traces_off][:_COMPARISONS_MOST]
    servers = [_server_line(run, impl) for impl in impls if any(s.impl == impl for s in run.servers)]
    return EndpointSection(servers, impls, _contract(run, impls), kept, len(compared) - len(kept), figures)


def endpoint_blocks(told: EndpointSection, number: int, opened: bool) -> list[Block]:
    """The servers, the arms and what proves them, the comparisons, the contract, the times."""
    several = len(told.impls) > 1

    def name(f: ArmFigures) -> str:
        return f"{f.impl}, {f.arm}" if several else f.arm

    made: list[Block] = [Heading("Servers", f"servers-{number}", "servers")]
    made += [Paragraph(Bit(line), only=ALL) for line in told.servers or ["None answered."]]
    if told.contract:
        answers = [answer for _, row in told.contract for answer, _ in row]
        kinds = [f"{kind}: {'; '.join(told.answered(kind))}" for kind in ("no", "unknown") if kind in answers]
        kept = f"contract: {answers.count('yes')} of {len(answers)} kept"
        made.append(Paragraph(", ".join([kept, *kinds]), only=BRIEF))
    if told.figures:
        arms = Table(
            _ARMS,
            [(Bit(name(f)), *_arm_cells(f)) for f in told.figures],
            ("", *["cell"] * 9),
            unshown=_ARMS[4:9],
            clipped=True,
            only=ALL,
        )
        note = (
            "Texts and traces: distinct ones. Positions: of the first token, or logprob, that differs from the most "
            "common solo answer. "
            "Logprobs are compared bit for bit, as the decimals that were sent, up to where tokens differ."
        )
        made += [Heading("Arms", level=4), Paragraph(note, "soft"), arms]
        made += [Paragraph(told.not_rounding, "warn", ALL)] if told.not_rounding else []
    if told.comparisons:
        seen = [
            (Bit(server, "code"), Bit(prompt), c.text, Bit(c.finding, "strong"), " ".join(c.why) or "–")
            for server, prompt, c in told.comparisons
        ]
        names = ("server", "prompt", "seen", "finding", "why no more is claimed")
        made += [Heading("Compared with each other", level=4), Table(names, seen, ("", *["cell"] * 4))]
    if told.omitted:
        made.append(Paragraph(f"… and {plural(told.omitted, 'more comparison')}, without a difference.", "soft"))
    if told.contract:
        styles = {"yes": "good", "no": "bad"}
        rows: list[Cells] = [
            (question, *((Bit(answer, styles.get(answer, "dull")), f" {seen}") for answer, seen in answers))
            for question, answers in told.contract
        ]
        broken = len(told.answered("no", "unknown"))
        count = plural(broken, "question is not answered yes", "questions are not answered yes")
        note = "What a comparison assumes, checked before anything was sampled, one request at a time."
        head: Cells = ("contract", *(Bit(impl, "code") for impl in told.impls))
        table = Table(head, rows, ("", *("wide",) * len(told.impls)))
        made.append(Details(f"Contract: {count}", [Paragraph(note, "soft"), table], opened=True))
    if told.figures:
        times = Table(_TIMES, [(Bit(name(f)), *_time_cells(f)) for f in told.figures], ("", *["cell"] * 6))
        made.append(Details("Times", [times], opened=True))
    return made


_ARMS = (
    "arm", "requests", "texts", "traces", "other token", "first other logprob",
    "largest logprob gap", "margin where tokens differ", "failed", "what proves the arm",
)  # fmt: skip
_TIMES = (
    "arm", "concurrency", "first token, median s", "answer, median s", "answer, 95% s", "tokens/s of all requests",
    "retried",
)  # fmt: skip


def _arm_cells(f: ArmFigures) -> Cells:
    arms = [e for e in f.evidence.values() if e.n]
    prompts = f" of {counted(len(f.evidence))} {f.unit}s" if len(f.evidence) > 1 else ""
    traces, first, gap = "no logprobs", "–", "–"
    if f.has_logprobs:
        traces, first = f.span([len(e.traces) for e in arms]), _earliest(p.bits for p, _ in f.partings)
        gap = f"{number_text(f.gap)} at {counted(f.gap_requests)}" if f.gap_requests else "none"
    return (
        Bit(f"{counted(f.requests)}{prompts}"), f.span([len(e.completions) for e in arms]), traces,
        _earliest(p.token for p, _ in f.partings), first, gap, _margins(f), Bit(_kinds(f.failed)),
        Bit(one_line(f.proof, 300)),
    )  # fmt: skip


def _time_cells(f: ArmFigures) -> Cells:
    first, whole = [s.first - s.sent for s in f.good if s.first is not None], [s.done - s.sent for s in f.good]
    retried = Bit(_kinds(_total(s.refusals for s in f.good)))
    allowed = max((r.traffic.concurrency for r in f.rounds if r.traffic is not None), default=0)
    seconds, tokens = sum(r.seconds for r in f.rounds), sum(r.tokens for r in f.rounds)
    rate = f"{tokens / seconds if seconds > 0 else 0.0:,.1f}"
    times = (_seconds(first), _seconds(whole), _seconds(whole, 0.95))
    at_once = max((s.in_flight for s in f.good), default=0)
    return f"{at_once} at once of {allowed} allowed", *times, rate, retried


def _earliest(tokens: Iterable[int | None]) -> str:
    first = min((token for token in tokens if token is not None), default=None)
    return "nowhere" if first is None else f"token {first}"


def counts_alone(summary: SampleSummary) -> SampleSummary:
    """A summary of a server's arms together, which are not one sample: what differs where, without a rate."""
    bare = replace(summary.rate, low=0.0, high=1.0, method=COUNTS, rounds=0)
    return replace(summary, rate=bare, disagreement=None, new_share=None, flips=None, k3=None)


def _server_line(run: Run, impl: str) -> str:
    seen = [s for s in run.servers if s.impl == impl]
    first = seen[0]
    parts = [f"{impl}: {first.url}", f"model {first.answered_as or first.model or 'not named'}"]
    parts += [first.software] if first.software else []
    parts += [f"as {first.protocol}"] if first.protocol else []
    parts += [f"calls itself {first.fingerprint}"] if first.fingerprint else ["no fingerprint"]
    parts += [f"compared by {first.known_by}" + ("" if first.logprobs else ", no logprobs")]
    parts += [f"continued {len(seen) - 1} times"] if len(seen) > 1 else []
    return one_line(" · ".join(parts), 500)


def _contract(run: Run, impls: Sequence[str]) -> list[tuple[str, list[tuple[str, str]]]]:
    answers = {(a.impl, a.question): (a.answer, a.evidence) for a in run.contract}
    asked = [q for q in QUESTIONS if any((impl, q) in answers for impl in impls)]
    asked += sorted({a.question for a in run.contract} - set(QUESTIONS))
    return [
        (QUESTIONS.get(q, one_line(q, 80)), [answers.get((impl, q), ("unknown", "")) for impl in impls]) for q in asked
    ]
