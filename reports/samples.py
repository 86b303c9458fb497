"""Sampled completions: all prompts together, each prompt's counts, divergences and branches, and their pictures."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nondet.core.records import Role, Row, Run, engine_of, families_of, role_of
from nondet.core.statistics import one_sided_bound, percent, percent_range
from nondet.errors import printable
from nondet.reports import text
from nondet.reports.classes import letter
from nondet.reports.document import ALL, Bit, Block, Code, Details, Figure, Heading, Items, Paragraph, Table
from nondet.reports.plots import Mark, Panel, Plot, Plots, Scale, answers_picture, linear, placed
from nondet.reports.text import counted, number
from nondet.sampling import analysis
from nondet.sampling.analysis import DistinctCompletion, Interval, PromptSet, SampleSummary, compared, prompt_sets
from nondet.verdict.findings import plural, sort_impls, subject_name, subject_unit
from nondet.verdict.samples import repetition, replays
from nondet.verdict.served import is_endpoint
from nondet.verdict.wording import words

# Prompts of one run that are shown, with their divergences and branches; of more, those that differ most.
SAMPLES_MOST = 24
# Distinct completions on a page, the most common ones; the others are in the run's side file.
COMPLETIONS_MOST = 100
_BRANCHES_MOST = 12  # elsewhere
_BEFORE, _AFTER = 120, 160  # characters around the position where a branch differs


@dataclass(frozen=True)
class Sample:
    """One prompt under every implementation, stock first."""

    prompt: int
    name: str  # "prompt 2", with its seed where it has one
    text: str
    summaries: tuple[SampleSummary, ...]
    main: tuple[SampleSummary, ...]  # all but replacements of single families, if there are any: those of the report


class Samples:
    """What completed, by prompt and, in `overall`, each implementation over several prompts."""

    def __init__(self, run: Run, summaries: Sequence[SampleSummary]) -> None:
        order, plan, served = sort_impls(s.impl for s in summaries), run.header.plan, is_endpoint(run)
        counts = map(_counts_alone, summaries) if served else summaries
        by_impl = sorted(counts, key=lambda s: order.index(s.impl))
        self.run, self.prompts, self.overall = run, list[Sample](), list[PromptSet]()
        for prompt, of in itertools.groupby(sorted(by_impl, key=lambda s: s.prompt), key=lambda s: s.prompt):
            mine = tuple(of)
            main = tuple(s for s in mine if role_of(s.impl) != Role.PART) or mine
            self.prompts.append(Sample(prompt, subject_name(plan, prompt), mine[0].prompt_text, mine, main))
        if len(self.prompts) > 1 and not served:
            rounds = Counter(impl for impl, _ in {(c.impl, c.round) for c in run.completions if c.status == "ok"})
            self.overall = prompt_sets(by_impl, rounds, subject_unit(plan))

        def differing(p: Sample) -> tuple[int, int]:
            return max(s.distinct_completions for s in p.summaries), max(s.distinct_traces for s in p.summaries)

        # those that are shown: the ones that differ most, by their number
        most = sorted(self.prompts, key=differing, reverse=True)[:SAMPLES_MOST]
        self.shown = sorted(most, key=lambda p: p.prompt)


def _counts_alone(summary: SampleSummary) -> SampleSummary:
    """A server's arms together are not one sample: what differs where, without a rate."""
    bare = replace(summary.rate, low=0.0, high=1.0, method=analysis.COUNTS, rounds=0)
    return replace(summary, rate=bare, flips=None, k3=None)


def sample_blocks(samples: Samples, number: int, opened: bool) -> list[Block]:
    """All prompts together, then each of those that are shown."""
    made = _overall(samples, number) if samples.overall else []
    several, again = len(samples.prompts) > 1, replays(samples.run)
    for i, sample in enumerate(samples.shown, 1):
        place, title = f"sample-{number}-{i}", f"Completions of {sample.name}" if several else "Completions"
        mine: list[Block] = [Code(sample.text)]
        if any(s.distinct_completions > 1 for s in sample.main):
            mine.append(answers_of(sample, sample.main, f"{place}-answers"))
        mine += [block for s in sample.main for block in _branches(s)] + _families(sample)
        counts = "Counts and forks" + f" of {sample.name}" * several
        said, figures = "where they differ, what each continues with", _figures(samples.run, sample, again, place)
        mine.append(Details(counts, figures, f"{place}-where", said, opened=opened))
        if several:
            said = "; ".join(f"{s.impl}: {_of_all(s.distinct_completions, s)} distinct" for s in sample.main)
            made.append(Details(title, mine, place, said, title.lower()))
        else:
            made += [Heading(title, place, title.lower()), *mine]
    if speed := analysis.speed_ratio_of(samples.run):  # a round serves all prompts
        ratio = analysis.ratio_text(speed)
        made.append(Paragraph(text.sentence(f"{ratio[:1].upper()}{ratio[1:]}")))
        made += [Paragraph(f"{analysis.DEFINITION.capitalize()}.", "soft")] if not speed.no_cost else []
    return made


def _overall(samples: Samples, number: int) -> list[Block]:
    parts, shown, total = samples.overall, len(samples.shown), len(samples.prompts)
    unit, measures = parts[0].unit, []
    for o in parts:
        mine = {
            f"{unit}s": counted(o.prompts),
            "completions (failed), rounds": f"{o.n:,} ({o.failed:,}), {o.rounds:,}",
            f"{unit}s whose logprob traces differ": _traces_text(o),
            f"{unit}s whose texts differ": f"{o.differing_texts:,} of {o.prompts:,}",
        }
        measures.append(mine)
    made: list[Block] = [
        Heading(f"All {plural(total, unit)}", f"overall-{number}"),
        _side_by_side([o.impl for o in parts], measures),
    ]
    of = {o.impl: o for o in parts}
    if {"stock", "invariant"} <= of.keys() and (c := compared(of["stock"], of["invariant"])).prompts > 1:
        p = f"{c.p:.2g}" if c.p >= 1e-300 else "below 1e-300"
        only = f"only under stock on {plural(c.only_first, unit)}, only under invariant on {c.only_second:,}"
        made.append(Items([f"Texts differ {only}, of {c.prompts:,} (McNemar, exact: p = {p})."]))
    if shown < total:
        made.append(Paragraph(f"Shown one by one below: the {shown} that differ most.", "soft", "mp"))
    return made


def _side_by_side(impls: Sequence[str], measures: Sequence[Mapping[str, str]]) -> Table:
    """A column for each implementation. A measure that none of them has ("") is left out."""
    rows = [(name, *(m[name] or "–" for m in measures)) for name in measures[0] if any(m[name] for m in measures)]
    return Table(("measure", *(Bit(impl, "code") for impl in impls)), rows, ("", *("cell",) * len(impls)))


def _traces_text(o: PromptSet) -> str:
    counts = f"{o.differing_traces:,} of {o.prompts:,}"
    if o.bound_completions is not None:
        rounds = "" if o.bound_rounds is None else f"below {percent(o.bound_rounds, 'up')} of rounds, "
        bound = f"below {percent(o.bound_completions, 'up')} of completions if they were independent"
        return f"{counts} (at 95%, one-sided: {rounds}{bound})"
    if o.prompts < 2:
        return counts
    return f"{counts} (95% {percent_range(*o.share)} of {o.unit}s drawn like these, under such loads)"


def _families(sample: Sample) -> list[Block]:
    parts = [s for s in sample.summaries if role_of(s.impl) == Role.PART]
    if not parts or not any(s.impl == "stock" and s.distinct_traces > 1 for s in sample.main):
        return []
    rows, cures = [], analysis.smallest_cures(sample.summaries)
    for s in parts:
        result = "divergence remains" if s.distinct_traces > 1 else "too few completions to tell"
        result = REMOVED if families_of(s.impl) in cures else result
        texts, traces = _of_all(s.distinct_completions, s), counted(s.distinct_traces)
        rows.append((Bit(families_of(s.impl), "code"), texts, traces, result))
    head = ("replaced", "distinct completions", "distinct traces", "result")
    note = "One family of operators replaced at a time, all others stock, under the same load plan."
    table = Table(head, rows, ("", "num", "num", "wide"), only=ALL)
    return [Heading("Which family is responsible", level=4), Paragraph(note, "soft"), table]


REMOVED = "replacing only it removed every divergence seen"


def _of_all(count: int, s: SampleSummary) -> str:
    return f"{counted(count)} of {counted(s.n)}"


def _figures(run: Run, sample: Sample, again: Mapping[str, Sequence[Row]], place: str) -> list[Block]:
    """Counts side by side, where each implementation's completions first differ, and how many still agree."""
    counts = [_counts(run, s, again.get(s.impl, ())) for s in sample.summaries]
    table, title = (
        _side_by_side([s.impl for s in sample.summaries], counts),
        "Agreement with the most common completion",
    )
    curve = Figure("plots", curve_plots(sample.main), f"{place}-curve", f"{title} by position")
    return [table, *(block for s in sample.main for block in _fork(s)), curve]


def _counts(run: Run, s: SampleSummary, again: Sequence[Row]) -> dict[str, str]:
    """The figures of one implementation; "" where it has none."""
    measures = {
        "completions (failed)": f"{counted(s.n)} ({counted(s.failed)})",
        "distinct completions": counted(s.distinct_completions),
        "distinct logprob traces": counted(s.distinct_traces) if s.has_logprobs else "no logprobs",
        "share of the most common": rate_text(s.agree) if s.rate.k else "all",
        "differ from it": rate_text(s.rate),
        "K3 to the most common trace, nats a token": "" if s.k3 is None else number(s.k3),
        "margin where they differ; elsewhere": _margins_text(s),
        "tokens that flip": flips_text(s),
        "draw where they first differ; elsewhere": _draws_text(s),
        "run again": words(repetition(again)),
        "first fork, token index": str(s.first_fork.index) if s.first_fork else "none",
        "largest logprob gap": number(s.logprob_spread) if s.has_logprobs else "no logprobs",
        "batch, query tokens a step": f"{s.batch_min} to {s.batch_max}, {s.distinct_batches} sizes" * bool(s.batch_max),
        "tokens/s of all requests, median round": f"{s.tokens_per_second:.1f}",
    }
    for name in ("vLLM's cached prompt tokens", "vLLM's preemptions") if engine_of(run) == "vllm" else ():
        measures[f"{name}, all requests"] = counted(sum(r.ran.get(name, 0) for r in run.rounds if r.impl == s.impl))
    return measures


def rate_text(interval: Interval) -> str:
    """A rate with its counts and its interval."""
    if interval.n == 0:
        return "0 of 0"
    share = f"{counted(interval.k)} of {counted(interval.n)}"
    rate = f"{share} = {percent(interval.k / interval.n)}"
    if interval.method == analysis.COUNTS:
        return share
    if interval.method == analysis.TOO_FEW:
        return f"{rate} ({interval.method})"
    if interval.method == analysis.ANYTIME:
        span, rounds = percent_range(interval.low, interval.high), plural(interval.rounds, "round")
        return f"{rate} (95% {span} over {rounds}, {interval.method})"
    by_completion = f"below {percent(interval.high, 'up')} of completions if they were independent"
    if interval.rounds < 1:
        return f"{share} (at 95%, one-sided: {by_completion}; one round bounds no rate of rounds)"
    by_round = f"below {percent(one_sided_bound(interval.rounds), 'up')} of rounds"
    return f"{share} (at 95%, one-sided: {by_round}, {by_completion})"


def _margins_text(summary: SampleSummary) -> str:
    """ "median 0.0625 at 3 flips, 2 exact ties; 1.5 elsewhere, as close in 2.1%"."""
    m = summary.margins
    if m is None:
        return ""
    ties = f", exactly tied at {counted(m.ties)} of the completions' choices there" if m.ties else ""
    return (
        f"median {number(m.median)} at {counted(m.flips)} flips{ties}; median {number(m.elsewhere_median)} at "
        f"{counted(m.elsewhere)} other positions, as close in {percent(m.as_close)} of them"
    )


def flips_text(summary: SampleSummary) -> str:
    """ "7 of 3,840, 1 in 549 (95% 1 in 90 to 1 in 3,200 over 4 rounds, anytime-valid)"."""
    f = summary.flips
    if f is None:
        return ""
    share = f"{counted(f.flips)} of {counted(f.tokens)}"
    if f.interval is None:
        return f"{share} ({analysis.TOO_FEW})"
    low, high = f.interval
    most = f"1 in {counted(max(1, math.floor(1 / high)))}"
    span = f"{most} to 1 in {counted(math.ceil(1 / low))}" if low > 1e-9 else f"{most} or fewer"
    once = f"{share}, 1 in {counted(round(f.tokens / f.flips))}" if f.flips else f"none of {counted(f.tokens)}"
    return f"{once} (95% {span} over {plural(f.rounds, 'round')})"


def _draws_text(summary: SampleSummary) -> str:
    """How near the draws were to another token at the first divergence."""
    d = summary.draws
    if d is None:
        return ""
    elsewhere = "" if d.border_elsewhere is None else f", elsewhere {percent(d.border_elsewhere)}"
    parts = [f"{percent(d.nearest)} of the mass from another token (median {percent(d.border)}{elsewhere})"]
    if d.cut is not None:
        tied = f", {counted(d.cut_ties)} traces exactly tied" if d.cut_ties else ""
        parts.append(f"edge of top-k {number(d.cut)} logits{tied}")
    if d.nucleus is not None:
        parts.append(f"edge of the nucleus {percent(d.nucleus)} of the mass")
    return "; ".join(parts)


def _fork(s: SampleSummary) -> list[Block]:
    if s.first_fork is None:
        return []
    rows = []
    for b in s.first_fork.branches:
        margin = "not recorded" if b.margin_min is None else number(b.margin_min)
        margin += "" if b.margin_median is None else f" / {number(b.margin_median)}"
        token, continues = Bit(text.token(b.text, b.token_id), "code"), Bit(b.continuation, "code")
        rows.append((token, str(b.token_id), _of_all(b.count, s), margin, continues))
    head = ("token", "id", "completions", "top-1 − top-2 logit, min / median", "continues")
    named = f"First divergent token of `{s.impl}`: index {s.first_fork.index}, after "
    table = Table(head, rows, ("nowrap", "num", "num", "num", "wide"))
    return [Paragraph((named, Bit(s.first_fork.before, "code"))), table]


def _branches(s: SampleSummary) -> list[Block]:
    """Every distinct completion, the most common first, around the first token that differs."""
    if s.distinct_completions < 2:
        return [Details(f"The one completion of `{s.impl}`", [Code(c.text)], only="p") for c in s.completions[:1]]
    made: list[Block] = []
    for i, c in enumerate(s.completions[:COMPLETIONS_MOST]):
        at = s.completions[1].parts_at if c.parts_at is None else c.parts_at
        where = "" if at is None else f", token {at}"
        only = "vmp" if i < _BRANCHES_MOST else "p"
        code = branch_of(c, at, only)
        made += [Paragraph((Bit(letter(i), "strong"), f", {_of_all(c.count, s)}{where}"), only=only), code]
        if code.text != c.text and "…" in (code.text[:1], code.after[-1:]):
            made.append(Details("Whole text", [Code(c.text)], only="p"))
    for most, only in ((_BRANCHES_MOST, "vm"), (COMPLETIONS_MOST, "p")):
        if s.distinct_completions > most:
            made.append(Paragraph(f"… and {s.distinct_completions - most} rarer ones.", only=only))
    title = f"{plural(s.distinct_completions, 'branch', 'branches')} of `{s.impl}`, the first different token marked"
    return [Details(title, made)]


def branch_of(completion: DistinctCompletion, at: int | None, only: str = "vmp") -> Code:
    """A completion around the token `at`: there it differs from the most common one, or that one from the second."""
    pieces = completion.pieces
    place = len(pieces) if at is None else at
    before, after = "".join(pieces[:place]), "".join(pieces[place + 1 :])
    tail = before[-_BEFORE:]
    if tail != before:
        tail = "…" + (tail.partition(" ")[2] or tail)
    if len(after) > _AFTER:
        after = (after[:_AFTER].rpartition(" ")[0] or after[:_AFTER]) + "…"
    if place >= len(pieces):
        return Code(tail, "ends here" * (at is not None), only=only)
    # a mark around a bare line end would show nothing
    mark = printable(text.piece(pieces[place], completion.token_ids[place])).replace("\n", "⏎\n").replace("\t", "⇥")
    return Code(tail, mark, after, only)


def answers_of(sample: Sample, summaries: Sequence[SampleSummary], place: str) -> Figure:
    """The answers of these implementations as trees, one below the other."""
    title = "" if place == "fig-answer" else f"Answers to {sample.name}"
    return Figure("answers", answers_picture(summaries), place, title, of=summaries)


def curve_plots(summaries: Sequence[SampleSummary]) -> Plots | None:
    """How many completions of one prompt still agree with the most common one, over position; None without any."""
    drawn = [s for s in summaries if len(s.survival) > 1 and s.n > 0]
    if not drawn:
        return None
    length, worst = max(len(s.survival) - 1 for s in drawn), min(min(s.survival) for s in drawn)
    # the axis starts at the nearest of a few round shares below the data: a curve along the top edge shows nothing
    low = max((x for x in (0.0, 0.5, 0.8, 0.9, 0.95) if x < worst - (1 - worst) * 0.15 - 0.005), default=0.0)
    step = next(x for x in (1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 2000, 5000, length) if length / x <= 8)
    across = linear(0, length, {str(i): i for i in range(0, length + 1, step)})
    up = linear(low, 1.0, {f"{share * 100:.4g}%": share for share in (low + (1 - low) * i / 4 for i in range(5))})
    marks = [mark for i, s in enumerate(drawn) for mark in _curve(i, s, across, up)]
    marks.sort(key=lambda mark: mark.style != "band")
    said = "Share of completions whose tokens so far are all those of the most common one."
    if marks[0].style == "band":
        said += " Shaded: the pointwise 95% interval of rounds, which holds whenever one looks (anytime-valid)."
    said += f" The vertical axis starts at {low:.0%}." if low > 0 else ""
    label = "share of completions that agree, falling over position"
    plot = Plot("completions that agree so far", 200, up.levels, marks, label)
    legend = [(s.impl, f" (n = {s.n:,})") for s in drawn]
    return Plots(legend, [Panel("", [plot], across.ticks, "token")], caption=said)


def _curve(index: int, summary: SampleSummary, across: Scale, up: Scale) -> list[Mark]:
    shares = summary.survival
    corners = [0, *(i for i in range(1, len(shares)) if shares[i] != shares[i - 1]), len(shares) - 1]
    steps, top, bottom, stretches = [], [], [], list[Mark]()
    for begin, end in itertools.pairwise(corners):
        under, over = summary.band(begin)
        words = f"{summary.impl}, token {begin}-{end}: {percent(shares[begin])} agree"
        stretch = [(begin, shares[begin]), (end, shares[begin])]
        stretches.append(Mark("hit", None, placed(stretch, across, up), words))
        steps += stretch
        top += [(begin, over), (end, over)]
        bottom += [(begin, under), (end, under)]
    steps.append((corners[-1], shares[-1]))
    # a server's arms together are not one sample, and one round is not a sample of rounds: a line without a band
    bare = summary.agree.method == analysis.COUNTS or not summary.held_rounds
    band = [] if bare else [Mark("band", index, placed(top + bottom[::-1], across, up))]
    return [*band, Mark("curve", index, placed(steps, across, up)), *stretches]
