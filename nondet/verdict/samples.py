"""The verdict on sampled completions: how many differ, the possible cause, and what followed an axis.

Only where completions ran in different batches is divergence batch dependence, and only then does agreement show
anything about the batch. If the logprobs of equal tokens differ, that is batch dependence too.

A round that is run again in equal batches distinguishes run-to-run nondeterminism from batch dependence, but only for
its own completions: traces that differ only in rounds that were not run again may be noise of one run. So the batch is
named only where traces differ among completions whose rounds were bit-identical when they were repeated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from nondet.core.records import BASE_ARM, AxisValue, Completion, Row, Run, Status
from nondet.errors import UserError
from nondet.sampling.analysis import batch_totals
from nondet.sampling.plan import UNSEEDED
from nondet.verdict.findings import Finding, Tally, Verdict, bounds_of, change_of, grouped, sort_impls, successful
from nondet.verdict.wording import Reason, reason, stated


def is_replay(row: Row) -> bool:
    """Whether the row compares a round of completions with its repetition."""
    return row.operator == "engine" and row.varied == "run"


def replays(run: Run) -> dict[str, list[Row]]:
    """The rows that compare a round with its repetition, by implementation; without those that failed."""
    measured = (Status.IDENTICAL, Status.DIVERGENT)
    return grouped((row for row in run.rows if is_replay(row) and row.status in measured), lambda row: row.impl)


def repetition(again: Sequence[Row]) -> Reason:
    """The result of the repeated rounds. A repetition is one trial, however many requests were in it."""
    requests, other = (sum(int(r.extra.get(key, 0)) for r in again) for key in ("requests", "requests_parted"))
    code = "again-none" if not again else "again-differs" if any(r.differs for r in again) else "again-equal"
    return reason(code, n=other, of=requests, rounds=len(again))


Steps = npt.NDArray[np.int64]


class SampleCounts(Tally):
    """The completions of one prompt under one implementation, and whether the batch really changed under them.

    A completion's *batches* are its own query tokens and the whole batch's, for each of its steps; they are known where
    its schedule was kept and its round ended. `totals`: round -> query tokens of the whole batch at each step.
    """

    def __init__(
        self, run: Run, impl: str, prompt: int, completions: Iterable[Completion], totals: Mapping[int, Steps]
    ) -> None:
        super().__init__(completions)
        self.impl, self.prompt = impl, prompt
        self.rounds: dict[int, set[str]] = {}  # round -> its traces
        patterns: list[bytes] = []  # a digest of each completion's batches
        # the same -> traces of completions that ran solo in every batch and computed every key themselves: pages of a
        # shared prefix hold bits of the batch that computed them
        alone: dict[bytes, list[str]] = {}
        for c in self.good:
            self.rounds.setdefault(c.round, set()).add(c.trace)
            total = totals.get(c.round)
            if total is None or not c.schedule:
                continue
            own = np.concatenate([np.full(steps, tokens, dtype=np.int64) for _, steps, tokens in c.schedule])
            whole = np.concatenate([total[first : first + steps] for first, steps, _ in c.schedule])
            patterns.append(hashlib.sha256(own.tobytes() + b"|" + whole.tobytes()).digest())
            # the last token is never fed back; a smaller sum means that pages were shared
            shared_nothing = int(own.sum()) == run.header.plan["prompts"][prompt]["tokens"] + c.n_tokens - 1
            if shared_nothing and np.array_equal(own, whole):
                alone.setdefault(patterns[-1], []).append(c.trace)
        different = len(set(patterns))
        self.varied = different > 1  # at least two completions had different batches
        # every completion ran solo, in equal batches: then the batch can't be the cause
        self.constant = different == 1 and sum(map(len, alone.values())) == len(patterns)
        # in equal batches the same shapes and data gave other bits: run-to-run nondeterminism and nothing else
        self.alone_differ = any(len(set(traces)) > 1 for traces in alone.values())
        load = run.header.plan.get("load")
        # steps ran as CUDA graphs, so that products had a few fixed sizes, and not those on record
        self.padded = isinstance(load, dict) and bool(load.get("graphs"))


def subjects(run: Run) -> Iterator[SampleCounts]:
    """Each prompt under each implementation, prompt by prompt, stock first; in one pass: a set has thousands."""
    order = {impl: i for i, impl in enumerate(sort_impls(c.impl for c in run.completions))}
    # failed completions were in others' batches, and count in the totals
    ended = {(record.impl, record.round) for record in run.rounds}
    totals = {impl: {n: t for n, t in batch_totals(run, impl).items() if (impl, n) in ended} for impl in order}
    members = grouped(run.completions, lambda c: (c.prompt, order[c.impl], c.impl))
    for (prompt, _, impl), mine in sorted(members.items()):
        yield SampleCounts(run, impl, prompt, mine, totals[impl])


def judge_samples(run: Run) -> list[Verdict]:
    """A verdict for each prompt and implementation, stock first. Raises UserError: records contradict each other."""
    again, unseeded = replays(run), UNSEEDED if run.header.plan.get("sampling") else ()
    return [judge_counts(c, again.get(c.impl, []), unseeded=c.impl in unseeded) for c in subjects(run)]


def judge_counts(counts: SampleCounts, again: Sequence[Row] = (), *, unseeded: bool = False) -> Verdict:
    """The verdict on the completions of one prompt under one implementation; `again` are the rows of rounds that were
    run again, in equal batches. Raises UserError: the counts contradict each other."""
    if len(counts.completions) > len(counts.traces) == 1:  # though a trace is the tokens and their logprobs
        what = f"the run contradicts itself: {counts.impl} has {len(counts.completions)} completions in one trace"
        raise UserError(what, "Was it edited by hand?")
    finding, clauses = Finding.UNTESTED, [reason("too-few", n=counts.n)]
    reasons, bounds = [*counts.notes], tuple[Reason, ...]()
    if counts.n > 1:
        finding, limits = _attribute(counts, again)
        clauses = [*counts.clauses(), reason("finding", findings=finding)]
        reasons += [*stated((again, reason("again", what=repetition(again)))), *limits]
        if finding == Finding.CLEAN:
            # completions of one round share its batches; the others are compared with the first round
            bounds = (bounds_of(counts.n - 1, "completion", len(counts.rounds) - 1, "round"),)
    reasons += stated((unseeded, reason("unseeded-engine")))
    # one trace is one text: if it diverged, its end differs or a repeated run
    changes = change_of(counts.texts, (finding,))
    verdict = Verdict(counts.impl, (finding,), tuple(clauses), tuple(reasons), counts.prompt, bounds, changes)
    return counts.checked(verdict)


def _attribute(counts: SampleCounts, again: Sequence[Row]) -> tuple[Finding, list[Reason]]:
    """The possible cause where completions differ, what agreement leaves open, and why: the first line that holds."""
    traces = len(counts.traces)
    agree, differ = traces == 1, traces > 1
    repeated_rounds = {int(row.extra.get("round", 0)) for row in again}
    shown = len(set[str]().union(*(counts.rounds.get(number, ()) for number in repeated_rounds)))
    table = (
        (any(r.differs for r in again), Finding.RUN_TO_RUN, ""),
        (agree and counts.ended_otherwise, Finding.UNATTRIBUTED, "ends-alone"),  # one trace, yet several answers
        (agree and counts.constant, Finding.CLEAN, "constant"),
        (agree and not counts.varied, Finding.CLEAN, "hardly-tested"),
        (agree, Finding.CLEAN, "graphs-padded" if counts.padded else ""),
        (counts.alone_differ, Finding.RUN_TO_RUN, "alone-differ"),
        (not counts.varied, Finding.UNATTRIBUTED, "batches-unknown"),
        (shown < 2, Finding.UNATTRIBUTED, "others-again"),
        (True, Finding.BATCH, "traces-open" if traces > shown else ""),
    )
    finding, code = next((finding, code) for holds, finding, code in table if holds)
    unrepeated = differ and not table[0][0]
    return finding, stated(
        (unrepeated and len(counts.completions) == 1, reason("tokens-agree")),
        (unrepeated and counts.padded, reason("graphs-first")),
        (code, reason(code, n=traces - shown)),
    )


# What `nondet sample --vary` shows. *Within* a value of an axis the batches change from completion to completion, as in
# any sample. *Across* values the plan is the same for each request: where its trace is not that at the base, only the
# axis changed, so the bits followed it. That holds only while the same session run twice gives the same bits, and only
# for values that took effect. Over an axis that changes the arithmetic itself completions are only counted.


def is_varied(run: Run) -> bool:
    """Whether the run's completions belong to values of axes."""
    return "vary" in run.header.plan


class ValueTally(Tally):
    """The completions at one value. `base`: those of the same requests at the base, by name."""

    def __init__(self, record: AxisValue, completions: Iterable[Completion], base: Mapping[str, Completion]) -> None:
        super().__init__(completions)
        self.record = record
        pairs = [(c, base[_name(c)]) for c in self.good if _name(c) in base] if record.arm != BASE_ARM else []
        moved = [b.round for a, b in pairs if a.trace != b.trace]
        # requests whose trace is not that at the base, of `compared`; those in the round that the base ran again
        self.moved, self.moved_first, self.compared = len(moved), moved.count(0), len(pairs)
        # with the base where the axis must not change anything, else of completions with the first
        self.comparisons = self.compared if record.held else max(0, self.n - 1)
        self.differs = self.moved > 0 if record.held else len(self.traces) > 1


class AxisTally:
    """One axis under one implementation; only values that took effect are counted."""

    def __init__(self, records: Sequence[AxisValue], every: Sequence[ValueTally]) -> None:
        self.axis, self.held = records[0].axis, records[0].held
        self.note = next((r.note for r in records if r.note), "")
        self.values = [v for v in every if v.record.proven]  # the base's first
        self.idle = [v for v in every if not v.record.proven]  # did not take effect, or are not shown to have
        self.tried = [v for v in self.values if v.record.arm != BASE_ARM]
        # requests whose trace followed the axis, of those that were compared with themselves at the base
        self.moved, self.compared = sum(v.moved for v in self.tried), sum(v.compared for v in self.tried)
        # distinct ones over all values; at the value with the most
        self.texts, self.texts_within = _distinct([v.completions for v in self.values])
        self.traces, self.traces_within = _distinct([v.traces for v in self.values])
        # distinct texts that are an effect on the output, at idle values too
        together, most = _distinct([v.completions for v in every])
        self.outputs = together if self.held else most


def tally_axes(run: Run, impl: str) -> list[AxisTally]:
    """Every axis under one implementation, in the order of the run."""
    by_arm = grouped((c for c in successful(run.completions) if c.impl == impl), lambda c: c.arm)
    base = {_name(c): c for c in by_arm.get(BASE_ARM, [])}
    axes = grouped((record for record in run.axis_values if record.impl == impl), lambda record: record.axis)
    tallies = []
    for records in axes.values():
        values = [ValueTally(r, by_arm.get(r.arm, []), base) for r in records if r.arm or r.proven]
        tallies.append(AxisTally(records, values))
    return tallies


def _distinct(counts: Sequence[Mapping[str, int]]) -> tuple[int, int]:
    """How many keys all of these have together, and the one with the most."""
    return len(set[str]().union(*counts)), max(map(len, counts), default=0)


def _name(completion: Completion) -> str:
    """The request of the completion, the same in every arm."""
    return completion.request.rpartition(" ")[2]


def judge_axes(run: Run) -> list[Verdict]:
    """A verdict for each implementation."""
    again = replays(run)
    wholes = {impl: Tally(mine) for impl, mine in grouped(run.completions, lambda c: c.impl).items()}
    return [wholes[i].checked(_judge_values(run, i, wholes[i], again.get(i, []))) for i in sort_impls(wholes)]


def _judge_values(run: Run, impl: str, whole: Tally, again: Sequence[Row]) -> Verdict:
    axes = [t for t in tally_axes(run, impl) if not t.note]
    tested = [t for t in axes if any(v.comparisons for v in t.values)]
    idle = [(t.axis, v) for t in axes for v in t.idle]
    reasons = [reason("value-unproven", axis=axis, value=v.record.value, proof=v.record.proof) for axis, v in idle]
    reasons += whole.notes
    # where bits differ though the value is not shown to have taken effect, the cause is unknown
    differing = tuple(f"{axis}={v.record.value}" for axis, v in idle if v.differs)
    findings, once = _followed(whole, tested, bool(again))
    bounds: tuple[Reason, ...] = ()
    if tested:
        clauses = _axis_clauses(tested)
        reasons.append(reason("again", what=repetition(again)) if again else reason("base-once"))
    else:
        clauses = [reason("no-pair" if any(t.tried for t in axes) else "no-effect")]
    if tested and any(r.differs for r in again):
        findings, once = (Finding.RUN_TO_RUN,), []
    elif differing and not findings:
        findings, unexplained = (Finding.UNATTRIBUTED,), reason("differ-idly", values=differing)
        clauses.append(unexplained if tested else reason("but", what=unexplained))
    if findings:
        reasons += once
        clauses.append(reason("findings", findings=findings))
    elif not tested:
        findings = (Finding.UNTESTED,)
    else:
        clauses.append(reason("finding", findings=Finding.CLEAN))
        without = tuple(t.axis for t in axes if not t.tried)
        lone = tuple(t.axis for t in axes if t.tried and t not in tested)
        untested = tuple(stated((without, reason("idle-axes", axes=without)), (lone, reason("lone-axes", axes=lone))))
        findings = (Finding.UNPROVEN if untested else Finding.CLEAN,)
        bounds = (_value_bound(run, impl, tested), *stated((untested, reason("but", what=untested))))
    changes = change_of(max((t.outputs for t in axes), default=0), findings)
    return Verdict(impl, findings, tuple(clauses), tuple(reasons), 0, bounds, changes)


def _axis_clauses(tested: Sequence[AxisTally]) -> list[Reason]:
    held = [t for t in tested if t.held]
    following = tuple(t.axis for t in held if t.moved)
    within = max(t.traces_within for t in tested)
    which = reason("which", names=following) if following else None
    clauses = [reason("axes-followed", n=len(following), of=len(held), which=which)] if held else []
    # what may change the arithmetic is not a fault, but it was requested
    clauses += [reason("axis-apart", n=t.traces, axis=t.axis) for t in tested if not t.held and t.traces > 1]
    return [*clauses, reason("within" if within > 1 else "within-one", n=within)]


def _followed(whole: Tally, tested: Sequence[AxisTally], again: bool) -> tuple[tuple[Finding, ...], list[Reason]]:
    """What the bits followed, where the repeated round was bit-identical, () where they did not change; and a reason
    where they followed an axis only in rounds that were run once: there the run itself may have changed them."""
    findings = list[Finding]()
    if any(t.traces_within > 1 for t in tested):
        first = {c.trace for c in whole.good if (c.arm, c.round) == (BASE_ARM, 0)}
        findings.append(Finding.BATCH if again and len(first) > 1 else Finding.UNATTRIBUTED)
    moved = [v for t in tested if t.held for v in t.tried if v.moved]
    shown = again and any(v.moved_first for v in moved)
    findings += [Finding.OTHER if shown else Finding.UNATTRIBUTED] if moved else []
    return tuple(dict.fromkeys(findings)), stated((moved and again and not shown, reason("followed-once")))


def _value_bound(run: Run, impl: str, tested: Sequence[AxisTally]) -> Reason:
    """The bound without a divergence: sessions of many values don't share one rate, so the smallest sample counts."""
    least = min((v.comparisons for t in tested for v in t.tried if v.comparisons), default=0)
    rounds = len({r.round for r in run.rounds if r.impl == impl and r.arm == BASE_ARM})
    if least < 1 or rounds < 1:
        return reason("bounds-none")
    rounds -= any(not t.held for t in tested)  # there the others are compared with the first completion
    return bounds_of(least, "completion", rounds, "round", reason("each-value"))
