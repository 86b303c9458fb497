"""Sampled completions: all prompts together, each prompt's counts, divergences and branches, and their pictures."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from nondet.core.records import Role, Row, Run, families_of, of_vllm, role_of
from nondet.core.statistics import one_sided_bound, percent, percent_range
from nondet.errors import one_line
from nondet.reports import text
from nondet.reports.classes import letter
from nondet.reports.document import ALL, Bit, Block, Code, Details, Figure, Heading, Inline, Items, Paragraph, Table
from nondet.reports.picture import answers_picture
from nondet.reports.plots import Mark, Panel, Plot, Plots, Scale, linear, placed
from nondet.sampling.analysis import (
    ANYTIME,
    COUNTS,
    DEFINITION,
    TOO_FEW,
    DistinctCompletion,
    Fork,
    Interval,
    PromptSet,
    SampleSummary,
    SpeedRatio,
    compared,
    prompt_sets,
    ratio_text,
    smallest_cures,
    speed_ratio_of,
)
from nondet.verdict.findings import plural, sort_impls, subject_name, subject_unit
from nondet.verdict.samples import repeated, replays

# Prompts of one run that are shown one by one, with their divergences and branches; of more, those that differ most.
SAMPLES_MOST = 24
# Distinct completions on a page, the most common ones; the others are in the run's side file.
COMPLETIONS_MOST = 100
_BRANCHES_MOST = 12
_TEXT = 60


class FamilyTest(NamedTuple):
    """What remained when only one family of operators was replaced."""

    family: str
    summary: SampleSummary
    removed: bool

    @property
    def result(self) -> str:
        """The conclusion about the family."""
        if self.removed:
            return "replacing only it removed every divergence seen"
        return "divergence remains" if self.summary.distinct_traces > 1 else "too few completions to tell"


@dataclass(frozen=True)
class SampleSection:
    """One prompt under every implementation, stock first."""

    prompt: int
    name: str  # "prompt 2", with its seed where it has one
    summaries: tuple[SampleSummary, ...]
    families: tuple[FamilyTest, ...]
    replays: Mapping[str, Sequence[Row]]  # implementation -> the rows of rounds that were run again
    # implementation -> what vLLM counted over all rounds; {} where another engine ran
    counted: Mapping[str, Counter[str]]
    speed: SpeedRatio | None = None  # the cost of the fix in this run; None unless both ran

    @cached_property
    def main(self) -> tuple[SampleSummary, ...]:
        """The implementations that the report is about: all but replacements of single families, if there are any."""
        return tuple(s for s in self.summaries if role_of(s.impl) != Role.PART) or self.summaries

    @property
    def prompt_text(self) -> str:
        """The prompt."""
        return self.summaries[0].prompt_text


@dataclass(frozen=True)
class Samples:
    """All prompts that completed anything. `overall`: each implementation over several prompts."""

    prompts: tuple[SampleSection, ...]
    overall: tuple[PromptSet, ...]

    @property
    def ranked(self) -> list[SampleSection]:
        """The prompts, those that differ most first."""

        texts = {p.prompt: max(s.distinct_completions for s in p.summaries) for p in self.prompts}
        traces = {p.prompt: max(s.distinct_traces for s in p.summaries) for p in self.prompts}
        return sorted(self.prompts, key=lambda p: (-texts[p.prompt], -traces[p.prompt], p.prompt))

    @property
    def shown(self) -> list[SampleSection]:
        """The prompts that are shown one by one: those that differ most, by their number."""
        return sorted(self.ranked[:SAMPLES_MOST], key=lambda p: p.prompt)


def samples_of(run: Run, summaries: Sequence[SampleSummary], *, served: bool) -> Samples:
    """What completed, by prompt and all together."""
    order = sort_impls(s.impl for s in summaries)
    by_impl = sorted(summaries, key=lambda s: order.index(s.impl))
    by_prompt: dict[int, list[SampleSummary]] = {}
    for s in by_impl:
        by_prompt.setdefault(s.prompt, []).append(s)
    plan, speed, again = run.header.plan, speed_ratio_of(run), replays(run)
    counted: dict[str, Counter[str]] = {s.impl: Counter() for s in summaries if of_vllm(run)}
    for r in run.rounds if counted else ():
        counted.setdefault(r.impl, Counter()).update(r.ran)
    prompts = tuple(
        SampleSection(prompt, subject_name(plan, prompt), tuple(mine), _family_tests(mine), again, counted, speed)
        for prompt, mine in sorted(by_prompt.items())
    )
    if served or len(prompts) < 2:  # a server's arms are not one sample: each has its own bounds
        return Samples(prompts, ())
    rounds = Counter(impl for impl, _ in {(c.impl, c.round) for c in run.completions if c.status == "ok"})
    return Samples(prompts, tuple(prompt_sets(by_impl, rounds, subject_unit(plan))))


def _family_tests(summaries: Sequence[SampleSummary]) -> tuple[FamilyTest, ...]:
    if not any(role_of(s.impl) == Role.STOCK and s.distinct_traces > 1 for s in summaries):
        return ()
    removing, parts = smallest_cures(summaries), [s for s in summaries if role_of(s.impl) == Role.PART]
    return tuple(FamilyTest(families_of(s.impl), s, families_of(s.impl) in removing) for s in parts)


def _overall(told: Samples, number: int) -> list[Block]:
    parts, shown, total = told.overall, len(told.shown), len(told.prompts)
    first, second = (next((o for o in parts if role_of(o.impl) == role), None) for role in (Role.STOCK, Role.INVARIANT))
    against = _comparison(first, second) if first and second else []
    return [
        Heading(f"All {plural(total, parts[0].unit)}", f"overall-{number}"),
        _side_by_side([o.impl for o in parts], [_measures_of_all(o) for o in parts]),
        *([Items(against)] if against else []),
        Details("One by one", _prompts(told), only="mp"),
        *([Paragraph(f"Shown one by one below: the {shown} that differ most.", "soft", "mp")] if shown < total else []),
    ]


def _measures_of_all(o: PromptSet) -> dict[str, str]:
    return {
        f"{o.unit}s": text.counted(o.prompts),
        "completions (failed), rounds": f"{o.n:,} ({o.failed:,}), {o.rounds:,}",
        f"{o.unit}s whose logprob traces differ": _traces_text(o),
        f"{o.unit}s whose texts differ": f"{o.differing_texts:,} of {o.prompts:,}",
        f"pairs that differ, mean over {o.unit}s": _share(o.disagreement),
        f"chance of a new text next, mean over {o.unit}s": _share(o.new),
    }


def _side_by_side(impls: Sequence[str], measures: Sequence[Mapping[str, str]]) -> Table:
    """A column for each implementation. A measure that none of them has ("") is left out."""
    rows = [(name, *(m[name] or "–" for m in measures)) for name in measures[0] if any(m[name] for m in measures)]
    return Table(("measure", *(Bit(impl, "code") for impl in impls)), rows, ("", *("cell",) * len(impls)))


def _share(value: float | None) -> str:
    return "" if value is None else percent(value)


def _traces_text(o: PromptSet) -> str:
    counts = f"{o.differing_traces:,} of {o.prompts:,}"
    if o.bound_completions is not None:
        rounds = "" if o.bound_rounds is None else f"below {percent(o.bound_rounds, 'up')} of rounds, "
        bound = f"below {percent(o.bound_completions, 'up')} of completions if they were independent"
        return f"{counts} (at 95%, one-sided: {rounds}{bound})"
    if o.prompts < 2:
        return counts
    return f"{counts} (95% {percent_range(*o.share)} of {o.unit}s drawn like these, under such loads)"


def _comparison(first: PromptSet, second: PromptSet) -> list[str]:
    c = compared(first, second)
    if c.prompts < 2:
        return []
    return [
        f"Texts differ only under {first.impl} on {plural(c.only_first, first.unit)}, only under {second.impl} on "
        f"{c.only_second:,}, of {c.prompts:,} (McNemar, exact: p = {_p(c.p)}).",
    ]


def _p(p: float) -> str:
    return "1" if p >= 1.0 else f"{p:.2g}" if p >= 1e-300 else "below 1e-300"


def _prompts(told: Samples) -> list[Block]:
    rows: list[tuple[Inline, ...]] = []
    for p in told.ranked[:COMPLETIONS_MOST]:
        cells = [_prompt_cell(o.summaries.get(p.prompt)) for o in told.overall]
        rows.append((str(p.prompt + 1), Bit(one_line(p.prompt_text, _TEXT)), *cells))
    head = ("number", "prompt", *(f"{o.impl}: texts / traces, first difference" for o in told.overall))
    left = len(told.prompts) - len(rows)
    more = f"… and {plural(left, told.overall[0].unit)} that differ less."
    return [Table(head, rows), *([Paragraph(more, "soft")] if left else [])]


def _prompt_cell(s: SampleSummary | None) -> str:
    if s is None:
        return "–"
    where = f", token {s.first_fork.index}" if s.first_fork else ""
    return f"{s.distinct_completions:,} / {s.distinct_traces:,} of {s.n:,}{where}"


def sample_blocks(told: Samples, number: int, opened: bool) -> list[Block]:
    """All prompts together, then each of those that are shown."""
    made = _overall(told, number) if told.overall else []
    several = len(told.prompts) > 1
    for i, sample in enumerate(told.shown, 1):
        place, title = f"sample-{number}-{i}", f"Completions of {sample.name}" if several else "Completions"
        mine: list[Block] = [Code(sample.prompt_text)]
        if any(s.distinct_completions > 1 for s in sample.main):
            mine.append(answers_of(sample, sample.main, f"{place}-answers"))
        mine += [block for j, s in enumerate(sample.main, 1) for block in _branches(s, f"{place}-tree-{j}")]
        if sample.families:
            mine += _families(sample.families)
        counts, said = (
            "Counts and forks" + f" of {sample.name}" * several,
            "where they differ, what each continues with",
        )
        mine.append(Details(counts, _parting(sample, place), f"{place}-where", said, opened=opened))
        if several:
            said = "; ".join(f"{s.impl}: {_of_all(s.distinct_completions, s)} distinct" for s in sample.main)
            made.append(Details(title, mine, place, said, title.lower()))
        else:
            made += [Heading(title, place, title.lower()), *mine]
    speed = told.shown[0].speed  # a round serves all prompts: every prompt has the same
    if speed is not None:
        ratio = ratio_text(speed)
        made.append(Paragraph(text.sentence(f"{ratio[:1].upper()}{ratio[1:]}")))
        if not speed.no_cost:
            made.append(Paragraph(f"{DEFINITION.capitalize()}.", "soft"))
    return made


def _families(families: Sequence[FamilyTest]) -> list[Block]:
    note = "One family of operators replaced at a time, all others stock, under the same load plan."
    rows = []
    for f in families:
        texts, traces = _of_all(f.summary.distinct_completions, f.summary), text.counted(f.summary.distinct_traces)
        rows.append((Bit(f.family, "code"), texts, traces, f.result))
    head = ("replaced", "distinct completions", "distinct traces", "result")
    table = Table(head, rows, ("", "num", "num", "wide"), only=ALL)
    return [Heading("Which family is responsible", level=4), Paragraph(note, "soft"), table]


def _of_all(count: int, s: SampleSummary) -> str:
    return f"{text.counted(count)} of {text.counted(s.n)}"


def _parting(sample: SampleSection, place: str) -> list[Block]:
    counts = [_counts(s, sample) for s in sample.summaries]
    made: list[Block] = [_side_by_side([s.impl for s in sample.summaries], counts)]
    made += [block for s in sample.main for block in _fork(s)]
    plots = curve_plots(sample.main)
    if plots:
        made.append(Figure("plots", plots, f"{place}-curve", "Agreement with the most common completion by position"))
    rest: list[Block] = []
    for i, s in enumerate((s for s in sample.summaries if s not in sample.main), 1):
        if s.first_fork is None:
            rest.append(Paragraph(f"`{s.impl}`: no fork in {text.counted(s.n)} completions."))
        else:
            rest += [*_fork(s), *_branches(s, f"{place}-part-{i}")]
    return [*made, *([Details("Forks and branches with one family replaced", rest, only="p")] if rest else [])]


def _counts(s: SampleSummary, sample: SampleSection) -> dict[str, str]:
    """The figures of one implementation; "" where it has none."""
    measures = {
        "completions (failed)": f"{text.counted(s.n)} ({text.counted(s.failed)})",
        "distinct completions": text.counted(s.distinct_completions),
        "distinct logprob traces": text.counted(s.distinct_traces) if s.has_logprobs else "no logprobs",
        "share of the most common": rate_text(s.agree) if s.rate.k else "all",
        "differ from it": rate_text(s.rate),
        "pairs that differ": _share(s.disagreement),
        "chance of a new one next": _share(s.new_share),
        "K3 to the most common trace, nats a token": "" if s.k3 is None else text.number(s.k3),
        "margin where they differ; elsewhere": _margins_text(s),
        "tokens that flip": flips_text(s),
        "draw where they first differ; elsewhere": _draws_text(s),
        "run again": repeated(sample.replays.get(s.impl, ())),
        "first fork, token index": str(s.first_fork.index) if s.first_fork else "none",
        "largest logprob gap": text.number(s.logprob_spread) if s.has_logprobs else "no logprobs",
        "batch, query tokens a step": f"{s.batch_min} to {s.batch_max}, {s.distinct_batches} sizes" * bool(s.batch_max),
        "tokens/s of all requests, median round": f"{s.tokens_per_second:.1f}",
    }
    if s.impl in sample.counted:
        for name in ("vLLM's cached prompt tokens", "vLLM's preemptions"):
            measures[f"{name}, all requests"] = text.counted(sample.counted[s.impl][name])
    return measures


def rate_text(interval: Interval) -> str:
    """A rate with its counts and its interval."""
    if interval.n == 0:
        return "0 of 0"
    share = f"{text.counted(interval.k)} of {text.counted(interval.n)}"
    if interval.method == COUNTS:
        return share
    if interval.method == ANYTIME:
        span = percent_range(interval.low, interval.high)
        how = f"95% {span} over {plural(interval.rounds, 'round')}, {interval.method}"
    elif interval.method == TOO_FEW:
        how = interval.method
    else:
        return f"{share} ({_bounds_text(interval)})"
    return f"{share} = {percent(interval.k / interval.n)} ({how})"


def _bounds_text(interval: Interval) -> str:
    by_completion = f"below {percent(interval.high, 'up')} of completions if they were independent"
    if interval.rounds < 1:
        return f"at 95%, one-sided: {by_completion}; one round bounds no rate of rounds"
    by_round = f"below {percent(one_sided_bound(interval.rounds), 'up')} of rounds"
    return f"at 95%, one-sided: {by_round}, {by_completion}"


def _margins_text(summary: SampleSummary) -> str:
    """ "median 0.0625 at 3 flips, 2 exact ties; 1.5 elsewhere, as close in 2.1%"."""
    m = summary.margins
    if m is None:
        return ""
    ties = f", exactly tied at {text.counted(m.ties)} of the completions' choices there" if m.ties else ""
    return (
        f"median {text.number(m.median)} at {text.counted(m.flips)} flips{ties}; median "
        f"{text.number(m.elsewhere_median)} at {text.counted(m.elsewhere)} other positions, as close in "
        f"{percent(m.as_close)} of them"
    )


def flips_text(summary: SampleSummary) -> str:
    """ "7 of 3,840, 1 in 549 (95% 1 in 90 to 1 in 3,200 over 4 rounds, anytime-valid)"."""
    f = summary.flips
    if f is None:
        return ""
    share = f"{text.counted(f.flips)} of {text.counted(f.tokens)}"
    if f.interval is None:
        return f"{share} ({TOO_FEW})"
    low, high = f.interval
    most = f"1 in {text.counted(max(1, math.floor(1 / high)))}"
    span = f"{most} to 1 in {text.counted(math.ceil(1 / low))}" if low > 1e-9 else f"{most} or fewer"
    once = (
        f"{share}, 1 in {text.counted(round(f.tokens / f.flips))}" if f.flips else f"none of {text.counted(f.tokens)}"
    )
    return f"{once} (95% {span} over {plural(f.rounds, 'round')})"


def _draws_text(summary: SampleSummary) -> str:
    """How near the draws were to another token at the first divergence."""
    d = summary.draws
    if d is None:
        return ""
    elsewhere = "" if d.border_elsewhere is None else f", elsewhere {percent(d.border_elsewhere)}"
    parts = [f"{percent(d.nearest)} of the mass from another token (median {percent(d.border)}{elsewhere})"]
    if d.cut is not None:
        tied = f", {text.counted(d.cut_ties)} traces exactly tied" if d.cut_ties else ""
        parts.append(f"edge of top-k {text.number(d.cut)} logits{tied}")
    if d.nucleus is not None:
        parts.append(f"edge of the nucleus {percent(d.nucleus)} of the mass")
    return "; ".join(parts)


def _fork(s: SampleSummary) -> list[Block]:
    if s.first_fork is None:
        return []
    rows = []
    for b in s.first_fork.branches:
        margin = "not recorded" if b.margin_min is None else text.number(b.margin_min)
        margin += "" if b.margin_median is None else f" / {text.number(b.margin_median)}"
        token, continues = Bit(text.token(b.text, b.token_id), "code"), Bit(b.continuation, "code")
        rows.append((token, str(b.token_id), _of_all(b.count, s), margin, continues))
    head = ("token", "id", "completions", "top-1 − top-2 logit, min / median", "continues")
    branches = Table(head, rows, ("nowrap", "num", "num", "num", "wide"))
    forks = [f for f in s.forks[:COMPLETIONS_MOST] if f is not s.first_fork]
    others = [(str(f.index), Bit(f.before[-60:], "code"), _branch_texts(f)) for f in forks]
    later = Table(("index", "before", "branches"), others, ("num", "wide", ""))
    named = f"First divergent token of `{s.impl}`: index {s.first_fork.index}, after "
    made: list[Block] = [Paragraph((named, Bit(s.first_fork.before, "code"))), branches]
    return [*made, *([Details(plural(len(later.rows), "later fork"), [later], only="p")] if later.rows else [])]


def _branch_texts(fork: Fork) -> Inline:
    parts: list[str | Bit] = []
    for b in fork.branches:
        margin = "" if b.margin_min is None else f" (margin {text.number(b.margin_min)} or more)"
        parts += [Bit(text.token(b.text, b.token_id), "code"), f" {text.counted(b.count)} ×{margin} "]
    return tuple(parts)


def _branches(s: SampleSummary, place: str) -> list[Block]:
    if s.distinct_completions < 2:
        title = f"The one completion of `{s.impl}`"
        return [Details(title, [Code(c.text)], only="p") for c in s.completions[:1]]
    views = branch_views(s)
    texts: list[Block] = []
    for view in views[:_BRANCHES_MOST]:
        where = "" if view["parts_at"] is None else f", token {view['parts_at']}"
        texts += [Paragraph((Bit(view["letter"], "strong"), f", {view['count']} of {s.n}{where}")), Code(_marked(view))]
    if len(views) > _BRANCHES_MOST:
        texts.append(Paragraph(f"… and {len(views) - _BRANCHES_MOST} rarer ones."))
    title = f"{plural(len(views), 'branch', 'branches')} of `{s.impl}`, the first different token in ⟦ ⟧"
    return [
        Figure("branches", (s, views), place, f"Where completions of {s.impl} differ"),
        Details(title, texts, only="vm"),
    ]


def answers_of(sample: SampleSection, summaries: Sequence[SampleSummary], place: str) -> Figure:
    """The answers of these implementations as trees, one below the other."""
    title = "" if place == "fig-answer" else f"Answers to {sample.name}"
    return Figure("answers", answers_picture(summaries), place, title, of=summaries)


def _marked(view: Mapping[str, Any]) -> str:
    if view["ends"]:
        return f"{view['before']}⟦ends here⟧"
    marked = f"⟦{text.visible(view['token'])}⟧" if view["token"] else ""
    return f"{view['before']}{marked}{view['after']}"


# Pictures: agreement over position, the tree of branches, and branches side by side.

_BEFORE, _AFTER = 120, 160  # characters around the position where a branch differs


def curve_plots(summaries: Sequence[SampleSummary]) -> Plots | None:
    """The agreement curves of one prompt, in one chart; None where there is nothing to draw."""
    drawn = [s for s in summaries if len(s.survival) > 1 and s.n > 0]
    if not drawn:
        return None
    length = max(len(s.survival) - 1 for s in drawn)
    worst = min(min(s.survival) for s in drawn)
    # the axis starts at the nearest of a few round shares below the data: a curve along the top edge shows nothing
    low = max((x for x in (0.0, 0.5, 0.8, 0.9, 0.95) if x < worst - (1 - worst) * 0.15 - 0.005), default=0.0)
    step = next(x for x in (1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 2000, 5000, length) if length / x <= 8)
    across = linear(0, length, {str(i): i for i in range(0, length + 1, step)})
    shares = [low + (1 - low) * i / 4 for i in range(5)]
    up = linear(low, 1.0, {f"{share * 100:.4g}%": share for share in shares})
    curves = [_curve(i, s, across, up) for i, s in enumerate(drawn)]
    marks = sorted((mark for curve in curves for mark in curve), key=lambda mark: mark.style != "band")
    said = "Share of completions whose tokens so far are all those of the most common one."
    if any(mark.style == "band" for mark in curves[0]):
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
    bare = summary.agree.method == COUNTS or not summary.held_rounds
    band = [] if bare else [Mark("band", index, placed(top + bottom[::-1], across, up))]
    return [*band, Mark("curve", index, placed(steps, across, up)), *stretches]


def branch_views(summary: SampleSummary) -> list[dict[str, Any]]:
    """Every distinct completion, the most common first, with the first different token separate. The most common one
    has that token where the second one, which is next to it, differs."""
    first = next((c.parts_at for c in summary.completions[1:2]), None)
    return [_view(i, c, first if c.parts_at is None else c.parts_at) for i, c in enumerate(summary.completions)]


def _view(label: int, completion: DistinctCompletion, at: int | None) -> dict[str, Any]:
    """One distinct completion around the position where it differs from the most common one.

    `before`, `token`, `after` are the text up to there, the first token that differs, and what follows, cut on both
    sides; `ends` where it stops and the other continues; `parts_at` is the token's index.
    """
    pieces = completion.pieces
    place = len(pieces) if at is None else at
    before, after = "".join(pieces[:place]), "".join(pieces[place + 1 :])
    tail = before[-_BEFORE:]
    return {
        "letter": letter(label),
        "label": label,
        "count": completion.count,
        "parts_at": at,
        "before": before if tail == before else "…" + (tail.partition(" ")[2] or tail),
        "token": text.piece(pieces[place], completion.token_ids[place]) if place < len(pieces) else "",
        "after": after if len(after) <= _AFTER else (after[:_AFTER].rpartition(" ")[0] or after[:_AFTER]) + "…",
        "ends": at is not None and at >= len(pieces),
        "text": completion.text,
    }
