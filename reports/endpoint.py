"""Servers in a report: the contract, the arms and their proof, how far traces differ, the times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from nondet.core.records import Run
from nondet.core.traces import Trace
from nondet.endpoint.arms import DETERMINISTIC
from nondet.endpoint.contract import QUESTIONS
from nondet.errors import one_line
from nondet.reports.document import ALL, Bit, Block, Cells, Details, Heading, Paragraph, Table
from nondet.reports.text import counted, environment_line, number
from nondet.verdict.findings import Finding, bounds_of, plural, subject_name, subject_unit
from nondet.verdict.served import ArmEvidence, evidence, proven_tries, subjects
from nondet.verdict.size import DEFECT, Size
from nondet.verdict.wording import words

Known = Mapping[tuple[str, int], Mapping[str, ArmEvidence]]  # by server and prompt, then by arm
_COMPARISONS_MOST = 40


class Divergence(NamedTuple):
    """How one trace differs from another."""

    token: int | None  # index of the first token that differs; None where none does
    bits: int | None  # index of the first logprob that differs before that; None where none does
    gap: float  # largest difference of a common token's logprob, up to where tokens differ; 0.0 if none differs
    margin: float | None  # top-1 minus top-2 of the other trace where tokens differ; None where it is not on record


def divergence_of(base: Trace, other: Trace) -> Divergence:
    """Where and how far `other` differs from `base`."""
    a, b = (np.asarray(t.token_ids, dtype=np.int64) for t in (base, other))
    shared = min(len(a), len(b))
    differing = np.flatnonzero(a[:shared] != b[:shared])
    token = int(differing[0]) if differing.size else None if len(a) == len(b) else shared
    count = min(shared if token is None else token, len(base.logprob_array), len(other.logprob_array))
    x, y = base.logprob_array[:count], other.logprob_array[:count]
    other_bits = np.flatnonzero(x.view(np.int32) != y.view(np.int32))
    apart = np.abs(x.astype(np.float64) - y)
    gap = float(apart[np.isfinite(apart)].max(initial=0.0))
    margin = None
    if token is not None and token < len(base.margin_array) and np.isfinite(base.margin_array[token]):
        margin = float(base.margin_array[token])
    return Divergence(token, int(other_bits[0]) if other_bits.size else None, gap, margin)


class Arm:
    """One arm of one server, over all prompts. `known`: the evidence of all arms, by server and prompt."""

    def __init__(self, run: Run, impl: str, arm: str, known: Known, traces: Mapping[str, Trace]) -> None:
        self.run, self.impl, self.arm = run, impl, arm
        self.requests = [c for c in run.completions if (c.impl, c.arm) == (impl, arm)]  # those that failed, too
        mine = {prompt: of for (server, prompt), of in known.items() if server == impl and arm in of}
        self.evidence = {prompt: of[arm] for prompt, of in mine.items()}
        # how each trace differs from the most common solo one of its prompt and server (without solo: the arm's own
        # most common), and how many requests gave it
        self.divergences = [found for of in mine.values() for found in _divergences(of.get("solo"), of[arm], traces)]
        # whether the server gave any; without them a trace is its tokens
        self.has_logprobs = any(traces[trace].logprobs for e in self.evidence.values() for trace in e.traces)
        self.gap = max((d.gap for d, _ in self.divergences), default=0.0)  # the largest of any trace
        self.gap_requests = sum(n for d, n in self.divergences if d.bits is not None)  # whose logprobs differ
        margins = [d.margin for d, n in self.divergences if d.margin is not None for _ in range(n)]
        # where tokens differ, one for each request; none where tokens are drawn
        self.margins = [] if run.header.plan.get("sampling") else margins

    @property
    def proof(self) -> str:
        """The proof that the arm was what it is called, in the words of the first prompt that has one."""
        proven = [(prompt, words(e.shown)) for prompt, e in self.evidence.items() if e.proof]
        if not proven:
            return f"unproven: {words(next(iter(self.evidence.values())).shown)}"
        prompt, said = proven[0]
        if len(self.evidence) < 2:
            return said
        unit = subject_unit(self.run.header.plan)
        first, n = f"prompt {prompt + 1}" if unit == "prompt" else "one of them", len(self.evidence)
        if len(proven) < n:  # first, because a terminal cuts the end off
            return f"proven on only {len(proven)} of {n} {unit}s: {said} ({first})"
        return f"{said} ({first}; proven on {n} of {n} {unit}s)"

    @property
    def cells(self) -> Cells:
        """Its columns of the table of arms, but for its name."""
        arms = [e for e in self.evidence.values() if e.n]
        failed = sorted(sum((e.failed for e in self.evidence.values()), Counter[str]()).items())
        lost = one_line(", ".join(f"{kind} {count}" for kind, count in failed), 200)
        prompts, margins = len(self.evidence), self.margins
        of = f" of {counted(prompts)} {subject_unit(self.run.header.plan)}s" if prompts > 1 else ""
        span = f"{number(min(margins))} to {number(max(margins))}, median {number(median(margins))}" if margins else "–"
        traces, first, gap = "no logprobs", "–", "–"
        if self.has_logprobs:
            traces = _each([len(e.traces) for e in arms], prompts)
            first = _earliest(d.bits for d, _ in self.divergences)
            gap = f"{number(self.gap)} at {counted(self.gap_requests)}" if self.gap_requests else "none"
        texts = _each([len(e.completions) for e in arms], prompts)
        where = (_earliest(d.token for d, _ in self.divergences), first, gap, span)
        named = Bit(f"{counted(len(self.requests))}{of}")
        return named, texts, traces, *where, Bit(lost or "none"), Bit(one_line(self.proof, 300))


def _each(counts: Sequence[int], prompts: int) -> str:
    """The fewest and the most of a prompt: "1 to 3 each"; of one prompt, its number."""
    low, high = min(counts, default=0), max(counts, default=0)
    if prompts < 2:
        return counted(high)
    return f"{counted(low)} to {counted(high)} each" if low < high else f"{counted(high)} each"


def _earliest(indices: Iterable[int | None]) -> str:
    first = min((index for index in indices if index is not None), default=None)
    return "nowhere" if first is None else f"token {first}"


def _divergences(
    solo: ArmEvidence | None, arm: ArmEvidence, traces: Mapping[str, Trace]
) -> Iterator[tuple[Divergence, int]]:
    """Every trace of the arm against the most common; ties go to the first by name, whatever the file's order."""
    counts = solo.traces if solo is not None and solo.n else arm.traces
    base = min(counts, key=lambda digest: (-counts[digest], digest), default=None)
    if base is not None:
        for digest, count in arm.traces.items():
            if digest != base:
                yield divergence_of(traces[base], traces[digest]), count


class Servers:
    """What a run shows of its servers: their arms in the order of the plan, and what comparing them showed."""

    def __init__(self, run: Run, traces: Mapping[str, Trace]) -> None:
        self.run, known, order = run, evidence(run), [*run.header.plan.get("arms", {})]
        named = sorted(
            dict.fromkeys((c.impl, c.arm) for c in run.completions),
            key=lambda pair: (pair[0], order.index(pair[1]) if pair[1] in order else len(order)),
        )
        self.arms = [Arm(run, impl, arm, known, traces) for impl, arm in named]
        # the names under which servers were compared
        self.impls = list(dict.fromkeys([s.impl for s in run.servers] or [arm.impl for arm in self.arms]))
        plan = run.header.plan
        self.comparisons = [
            (s.server.impl, subject_name(plan, s.prompt), c) for s in subjects(run) for c in s.comparisons
        ]
        several = len({prompt for _, prompt, _ in self.comparisons}) > 1
        # those in which anything differed, in words; with the prompt if there are several
        self.differences = []
        for _, prompt, c in self.comparisons:
            if c.traces_off:
                why = f" ({c.why[0].rstrip('.')})" if c.finding == Finding.UNATTRIBUTED and c.why else ""
                self.differences.append(f"{f'{prompt}, ' * several}{c.text}: {c.finding}{why}")

    @property
    def cure(self) -> str:
        """What to try next: a server's own mode, unless it is on."""
        lines = [_server_line(self.run, impl) for impl in dict.fromkeys(s.impl for s in self.run.servers)]
        if lines and all(DETERMINISTIC in line for line in lines):
            other = ": try --attention-backend triton" if "attention fa3" in lines[0] else ""
            differ = f", and answers differ{other}" if self.differences else ""
            return f"its own mode is on (--enable-deterministic-inference){differ}"
        modes = "vLLM: VLLM_BATCH_INVARIANT=1, SGLang: --enable-deterministic-inference"
        return f"not tried: switch on the server's own mode ({modes}) or nondet's plugin (NONDET_BATCH_INVARIANT=1)"

    @property
    def size(self) -> Size | None:
        """How far answers differ; None where none does, or without logprobs of greedy tokens. The first answer after a
        start may come from other settings, so it does not count."""
        arms = [arm for arm in self.arms if arm.arm != "first" and arm.divergences]
        if self.run.header.plan.get("sampling") or not any(arm.has_logprobs for arm in arms):
            return None
        margins = [d.margin for arm in arms for d, _ in arm.divergences if d.token is not None]
        return Size(max(arm.gap for arm in arms), margins)


def machine_line(run: Run) -> str:
    """The machine in one line; for a server, what it reports of itself, and the machine that sent the requests."""
    here = environment_line(run.header.environment)
    servers = dict.fromkeys(s.software or s.url for s in run.servers)
    return one_line(f"{', '.join(servers)} · requests sent from: {here}", 400) if servers else here


_APART = ("other token", "first other logprob", "largest logprob gap", "margin where tokens differ", "failed")
_ARMS = ("arm", "requests", "texts", "traces", *_APART, "what proves the arm")
_ARMS_NOTE = (
    "Texts and traces: distinct ones. Positions: of the first token, or logprob, that differs from the most common "
    "solo answer. Logprobs are compared bit for bit, as the decimals that were sent, up to where tokens differ."
)


def endpoint_blocks(servers: Servers, number_: int) -> list[Block]:
    """The servers, the contract, the arms and what proves them, the comparisons."""
    run, impls = servers.run, servers.impls
    lines = [_server_line(run, impl) for impl in impls if any(s.impl == impl for s in run.servers)]
    named = [(Bit(f"{arm.impl}, {arm.arm}" if len(impls) > 1 else arm.arm), arm) for arm in servers.arms]
    made: list[Block] = [Heading("Servers", f"servers-{number_}", "servers")]
    made += [Paragraph(Bit(line), only=ALL) for line in lines or ["None answered."]]
    made += _contract(run, impls)
    if named:
        rows = [(name, *arm.cells) for name, arm in named]
        table = Table(_ARMS, rows, ("", *["cell"] * 9), unshown=_APART, clipped=True, only=ALL)
        made += [Heading("Arms", level=4), Paragraph(_ARMS_NOTE, "soft"), table]
        if servers.size and servers.size.is_bug:
            made.append(Paragraph(f"This is not rounding. {DEFECT}.", "warn", ALL))
    listed = servers.comparisons
    if len(listed) > _COMPARISONS_MOST:
        listed = [entry for entry in listed if entry[2].traces_off][:_COMPARISONS_MOST]
    if listed:
        seen = [
            (Bit(server, "code"), Bit(prompt), c.text, Bit(c.finding, "strong"), " ".join(c.why) or "–")
            for server, prompt, c in listed
        ]
        names = ("server", "prompt", "seen", "finding", "why no more is claimed")
        made += [Heading("Compared with each other", level=4), Table(names, seen, ("", *["cell"] * 4))]
    if left := len(servers.comparisons) - len(listed):
        made.append(Paragraph(f"… and {plural(left, 'more comparison')}, without a difference.", "soft"))
    return made


# What an issue calls the arms.
_IN_AN_ISSUE = {
    "solo": "one at a time, again",
    "cold": "cache cold",
    "warm": "cache warm",
    "chunked": "a long request arriving in mid-answer",
    "equal": "among requests of equal length",
    "loaded": "among requests of unequal lengths",
}


def issue_lines(servers: Servers, headline: str) -> list[str]:
    """Markdown to paste into an issue: the finding, what was sent, each comparison over all prompts, how far answers
    differ, what the server states of itself."""
    run, plan, lines = servers.run, servers.run.header.plan, [f"**{one_line(headline, 400)}**", ""]
    lines += [f"- {_server_line(run, impl)}" for impl in dict.fromkeys(s.impl for s in run.servers)]
    tokens = [c.served.prompt_tokens for c in run.completions if c.served and c.served.prompt_tokens]
    lengths = f" of {min(tokens):,} to {max(tokens):,} tokens" if tokens else ""
    lines.append(
        f"- sent: {plural(len(run.completions), 'request')}, {plural(len(plan['prompts']), 'prompt')}{lengths}, "
        f"{plan['max_tokens']} tokens each, temperature {plan['temperature']:g}, at most "
        f"{plan['load']['concurrency']} at once"
    )
    for arm, name in _IN_AN_ISSUE.items():
        mine = [c for _, _, c in servers.comparisons if c.arm == arm]
        if mine:
            n, traces, texts = (sum(getattr(c, field) for c in mine) for field in ("n", "traces_off", "tokens_off"))
            unproven = [a.proof for a in servers.arms if a.arm == arm and a.proof.startswith("unproven")]
            base = "among themselves" if mine[0].base == "itself" else f"from {mine[0].base}"
            shown = "".join(f" ({proof})" for proof in unproven[:1])
            lines.append(f"- {name}: {traces:,} of {n:,} differ {base}, {texts:,} of them in tokens{shown}")
    lines.append(f"- {_size(servers)}")
    lines += [f"- {block.text}" for block in _contract(run, servers.impls)[:1] if isinstance(block, Paragraph)]
    return [*lines, f"- nondet {run.header.environment.get('nondet', '')}, `nondet sample --endpoint URL --quick`"]


def _size(servers: Servers) -> str:
    """Whether what differs is as small as rounding makes it."""
    run, size = servers.run, servers.size
    if not any(c.traces_off for _, _, c in servers.comparisons):
        requests, loads = map(sum, zip(*(proven_tries(run, impl) for impl in servers.impls), strict=True))
        return f"nothing differed{words(bounds_of(requests, 'request', loads, 'load'))}" if loads else "no load formed"
    if size is None:
        return "rounding or a bug is not decided, because there are no logprobs of greedy tokens to compare"
    return f"{size.text}. {DEFECT}" if size.is_bug else size.text


def _contract(run: Run, impls: Sequence[str]) -> list[Block]:
    """In a line how many checks were passed, and which were not; then all of them with their evidence."""
    if not run.contract:
        return []
    answers = {(a.impl, a.question): (a.answer, a.evidence) for a in run.contract}
    listed = [q for q in QUESTIONS if any((impl, q) in answers for impl in impls)]
    listed += sorted({a.question for a in run.contract} - set(QUESTIONS))
    styles, kinds = {"yes": "good", "no": "bad"}, Counter[str]()
    named: dict[str, dict[str, None]] = {"failed": {}, "unknown": {}}
    rows: list[Cells] = []
    for question in listed:
        mine = [answers.get((impl, question), ("unknown", "")) for impl in impls]
        text = QUESTIONS.get(question, one_line(question, 80))
        rows.append((text, *((Bit(answer, styles.get(answer, "dull")), f" {seen}") for answer, seen in mine)))
        kinds.update(answer for answer, _ in mine)
        for kind in {answer for answer, _ in mine if answer != "yes"}:
            named["failed" if kind == "no" else "unknown"][text] = None
    said = f"contract: {kinds['yes']} of {kinds.total()} checks passed"
    for kind, texts in named.items():
        said += f"; {kind}: {', '.join(f'“{text}”' for text in texts)}" if texts else ""
    note = "What a comparison assumes, checked before anything was sampled, one request at a time."
    table = Table(("contract", *(Bit(impl, "code") for impl in impls)), rows, ("", *("wide",) * len(impls)))
    return [Paragraph(said, only=ALL), Details("Contract", [Paragraph(note, "soft"), table])]


def _server_line(run: Run, impl: str) -> str:
    seen = [s for s in run.servers if s.impl == impl]
    first = seen[0]
    parts = [
        f"{impl}: {first.url}",
        f"model {first.answered_as or first.model or 'not named'}",
        first.software,
        f"as {first.protocol}" * bool(first.protocol),
        f"calls itself {first.fingerprint}" if first.fingerprint else "no fingerprint",
        f"compared by {first.known_by}" + ("" if first.logprobs else ", no logprobs"),
        f"continued {len(seen) - 1} times" * (len(seen) > 1),
    ]
    return one_line(" · ".join(filter(None, parts)), 500)
