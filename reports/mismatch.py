"""A sampler and a trainer as blocks of a report: a row per arm, what each hypothesis leaves, where tokens differ; over
steps of training a row per arm and seed, reward and KL by step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from nondet.core.records import MismatchKind, Run
from nondet.errors import one_line
from nondet.mismatch.arms import ARMS
from nondet.reports.document import ALL, Bit, Block, Cells, Details, Figure, Inline, Items, Paragraph, Table
from nondet.reports.plots import Mark, Panel, Plot, Plots, Scale, decades, doublings, linear, placed
from nondet.reports.text import counted
from nondet.verdict.findings import plural
from nondet.verdict.mismatch import Course, Pair, courses, lines_of, pairs, removed

_POINTS, _KINDS_MOST = 1500, 12
_NOTE = (
    "d is the trainer's logprob less the sampler's, a ratio exp(d), K3 the mean of ratio - 1 - d. Its interval is by "
    "sequence: percentiles of 2,000 resamples of whole rollouts. Where tokens were not drawn at temperature 1, K3 is a "
    "distance and estimates no KL."
)
_HEALTH = "A small K3 is no sign of health: it falls with entropy, too, so the two stand beside each other."
_TICKS = 6
_FOOT = 0.12  # of a plot's height, between 0 and the least decade of K3


def _arm(impl: str) -> Bit:
    return Bit(one_line(impl, 60), "code")


def _small(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}" if value else "0"


def mismatch_blocks(run: Run, number: int, opened: bool) -> list[Block]:
    """The arms, the pictures, the hypotheses."""
    place, listed = f"mismatch-{number}", pairs(run)
    parts: list[Block] = [_pairs_table(listed), *filter(None, [mismatch_figure(run, f"{place}-plot")])]
    for pair in listed:
        if pair.figures is not None and pair.figures.differ:
            title = (_arm(pair.impl), ": hypotheses, each fitted")
            parts.append(Details(title, [_kinds(pair)], fold=True, only="mp"))
    parts.append(Paragraph(_NOTE, "soft"))
    return [Details("Arms", parts, place, plural(len(listed), "arm"), "arms", opened=opened)]


def _pairs_table(arms: Sequence[Pair]) -> Table:
    rows: list[Cells] = []
    for p in arms:
        f, kl = p.figures, f"{p.kl:.1e}" if p.rows_differ else "0" if p.whole else "–"
        seconds = f"{p.cost.sample_seconds:.1f} + {p.cost.train_seconds:.1f}" if p.cost else "–"
        cells: tuple[str, ...] = ("–", "–", "–", kl, *["–"] * 4)
        if f is not None:
            span = "{:.1e} to {:.1e}".format(*f.k3_interval) if f.k3_interval and f.differ else "–"
            first = (f"{counted(f.differ)} of {counted(f.tokens)}", _small(f.k3), span, kl)
            tails = ", ".join(f"{f.tails[q]:.1e}" for q in (0.5, 0.99, 0.999))
            ratios = (f"{f.outside / f.tokens:.1%}", "{:.3f} to {:.3f}".format(*f.ratios))
            cells = (*first, *ratios, tails, f"{f.mult_prob_error:.4f}")
        rows.append((_arm(p.impl), *cells, seconds))
    more = ("ratios", "|d|: middle, 99%, 99.9%", "mean of exp |d|", "s, sample + train")
    head = ("arm", "other bits", "K3", "95%", "KL, whole rows", "outside 1%", *more)
    return Table(head, rows, ("nowrap", *["num"] * 9), unshown=more, only=ALL)


def _kinds(pair: Pair) -> Table:
    named = pair.named
    best: dict[tuple[str, str], MismatchKind] = {(k.cause, k.side): k for k in reversed(pair.kinds)}
    rows: list[Cells] = []
    for k in sorted(best.values(), key=lambda k: (k is not named, k.left))[:_KINDS_MOST]:
        cause: Inline = (Bit(k.cause, "bad"), " (named)") if k == named else Bit(k.cause)
        away = f"{min(1.0, max(0.0, removed(k))):.0%}" if k.k3 > k.floor else "–"
        rows.append((cause, k.side, Bit(k.fitted), _small(k.left), away, f"{k.exactly:.0%}" if k.exactly else "–"))
    head = ("hypothesis", "side", "fitted", "K3 left", "taken away", "very bits")
    return Table(head, rows, ("wide", "nowrap", "wide", "num", "num", "num"))


def mismatch_figure(run: Run, place: str = "fig-answer") -> Figure | None:
    """Three panels over the arms that differ, and one by step of training; None where none differs."""
    arms = pairs(run)
    shown = [(i, p.figures) for i, p in enumerate(arms) if p.figures is not None and p.figures.differ]
    if not shown:
        return None
    by_probability = [(i, [((b.low + b.high) / 2, b.mean_abs) for b in f.probabilities]) for i, f in shown]
    by_position = [(i, [(b.low + 1, b.k3) for b in f.positions]) for i, f in shown]
    by_step = [(i, [(b.low, b.k3) for b in p.steps]) for i, p in enumerate(arms) if p.steps]
    longest = max(x for _, points in by_position for x, _ in points)
    scale = decades([1.0, *(math.exp(min(f.sampler.min(), f.trainer.min())) for _, f in shown)])
    tokens = []
    for i, f in shown:  # thinned to what a picture can show
        step = max(1, f.tokens // _POINTS)
        xs, ys = (np.exp(side[::step]).tolist() for side in (f.sampler, f.trainer))
        tokens.append(Mark("spot", i, placed(zip(xs, ys, strict=True), scale, scale)))
    title = "mean |d| by the sampler's probability"
    panels = [
        _panel("probability of each token", "trainer's", "sampler's", scale, scale, tokens),
        _curves(title, "sampler's probability", linear(0.0, 1.0), by_probability),
        _curves("K3 by position", "token of the rollout", doublings(1, max(2, longest)), by_position),
    ]
    if by_step:
        ends = [x for _, points in by_step for x, _ in points]
        panels.append(_curves("K3 by step", "step of training", linear(min(ends), max(ends)), by_step))
    drawn = Plots([(one_line(p.impl, 60), "") for p in arms], panels)
    return Figure("plots", drawn, place, "Where sampler and trainer differ")


def _curves(title: str, axis: str, across: Scale, lines: Sequence[tuple[int, Sequence[tuple[float, float]]]]) -> Panel:
    up = decades([y for _, points in lines for _, y in points])
    return _panel(title, "nats", axis, across, up, [Mark("curve", i, placed(p, across, up)) for i, p in lines if p])


def _panel(title: str, unit: str, axis: str, across: Scale, up: Scale, marks: Sequence[Mark]) -> Panel:
    return Panel(title, [Plot(unit, 150, up.levels, marks, title)], across.ticks, axis)


def training_blocks(run: Run, number: int, opened: bool) -> list[Block]:
    """What was trained, the table, the pictures, what rewards show, where steps ended."""
    place, plan, listed = f"training-{number}", run.header.plan, courses(run)
    names = ("steps", "groups", "group", "tokens", "lr", "epochs", "task")
    how = (
        "GRPO: {} steps of {} prompts x {} rollouts x {} tokens at temperature 1; AdamW, learning rate {}, epochs {}; "
        "task: {}"
    ).format(*(one_line(str(plan.get(name)), 40) for name in names))
    if plan.get("rollouts"):
        how += f"; rollouts from {one_line(str(plan['rollouts']), 20)} weights"
    arms = dict.fromkeys(c.impl for c in listed)
    parts: list[Block] = [
        Items([(_arm(name), f": {ARMS[name].help}") for name in arms if name in ARMS]),
        _courses_table(listed),
        *filter(None, [training_figure(run, f"{place}-plot")]),
        Paragraph(_rewards_text(listed), "soft", ALL),
        Paragraph(_HEALTH, "soft"),
    ]
    return [
        *([Paragraph(f"{how}.", "soft")] if "group" in plan else []),
        Details("Arms", parts, place, plural(len(arms), "arm"), "arms", opened=opened),
    ]


def _courses_table(listed: Sequence[Course]) -> Table:
    rows: list[Cells] = []
    for c in listed:
        ratios = [ratio for s in c.steps for ratio in (s.ratio_least, s.ratio_most)] or [1.0]
        equal = f"{sum(s.differ == 0 for s in c.steps)} of {len(c.steps)}"
        differ = f"{counted(sum(s.differ for s in c.steps))} of {counted(sum(s.tokens for s in c.steps))}"
        k3 = (_small(c.mean("k3")), _small(max((s.k3 for s in c.steps), default=None)))
        from_to = []
        for name in ("entropy", "reward", "grad_norm"):
            first, last = (c.mean(name, part) for part in c.ends)
            from_to.append("–" if first is None or last is None else f"{first:.2f} → {last:.2f}")
        entropy, reward, norm = from_to
        took = f"{c.mean('sample_seconds') or 0.0:.2f} + {c.mean('train_seconds') or 0.0:.2f}"
        named = (_arm(c.impl), f" {c.seed}" * (len({c.seed for c in listed}) > 1))
        rows.append((named, equal, differ, *k3, entropy, reward, f"{min(ratios):.3f} to {max(ratios):.3f}", norm, took))
    unshown = ("most", "ratios", "gradient norm", "s a step, sample + train")
    head = ("arm", "KL 0 in", "other bits", "K3, mean", unshown[0], "entropy", "reward", *unshown[1:])
    return Table(head, rows, ("nowrap", *["num"] * 9), unshown=unshown, only=ALL)


def _rewards_text(listed: Sequence[Course]) -> str:
    arms, seeds = ({getattr(c, name) for c in listed} for name in ("impl", "seed"))
    said = ""
    if len(arms) > 1 and len(seeds) == 1:
        said = "One seed: what the arms earned is not compared. Other bits draw other texts, as other seeds do. "
    if all(s.flat == s.groups for c in listed for s in c.steps):
        return f"{said}Every group had one reward: nothing could be learnt."
    fallen = [f"{one_line(c.impl, 40)} (seed {c.seed})" for c in listed if c.fell]
    return said + (f"Fell to less than half of its best: {', '.join(fallen)}." if fallen else "No arm's reward fell.")


def training_figure(run: Run, place: str = "fig-answer") -> Figure | None:
    """A panel each for reward, K3 and entropy; None with fewer than two steps."""
    listed = courses(run)
    steps = [step for course in listed for step in course.steps]
    impls, last = list(dict.fromkeys(c.impl for c in listed)), max((s.step for s in steps), default=0)
    if last < 1:
        return None
    across = linear(0, last, {f"{step:,}": step for step in range(0, last + 1, max(1, -(-last // _TICKS)))})
    panels = []
    for name, title, unit, up in (
        ("reward", "reward", "mean of a step", _whole([s.reward or 0.0 for s in steps])),
        ("k3", "K3, sampler to trainer", "log scale; 0 is the axis", decades([s.k3 for s in steps], _FOOT)),
        ("entropy", "entropy", "nats a token", _whole([s.entropy or 0.0 for s in steps])),
    ):
        marks = [
            Mark("thin" if x.thin else "curve", impls.index(x.impl), placed(x.points, across, up), x.impl)
            for x in lines_of(listed, name)
        ]
        plot = Plot(unit, 150, up.levels, marks, f"{title} by step")
        panels.append(Panel(title, [plot], across.ticks, "step"))
    drawn = Plots([(one_line(impl, 60), "") for impl in impls], panels)
    return Figure("plots", drawn, place, "Reward, K3 and entropy by step")


def _whole(values: Sequence[float]) -> Scale:
    return linear(min(0, math.floor(min(values))), math.ceil(max(1.0, *values)))
