"""Arms of reinforcement learning as blocks of a report: reward and KL by step, a line per arm, seeds as thin ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nondet.core.records import Run
from nondet.errors import one_line
from nondet.mismatch.arms import ARMS
from nondet.reports.document import ALL, Bit, Block, Cells, Details, Figure, Items, Paragraph, Table
from nondet.reports.plots import Mark, Panel, Plot, Plots, Scale, decades, linear, placed
from nondet.reports.text import counted
from nondet.verdict.findings import plural
from nondet.verdict.mismatch import Course, courses, lines_of

HEALTH = "A small K3 is no sign of health: it falls with entropy, too, so the two stand beside each other."
PLOTS = "Reward, K3 and entropy by step"
_TICKS = 6
_FOOT = 0.12  # of a plot's height, between 0 and the least decade of K3


def _rewards_text(listed: Sequence[Course]) -> str:
    arms, seeds = ({getattr(c, name) for c in listed} for name in ("impl", "seed"))
    said = ""
    if len(arms) > 1 and len(seeds) == 1:
        said = "One seed: what the arms earned is not compared. Other bits draw other texts, as other seeds do. "
    if all(s.flat == s.groups for c in listed for s in c.steps):
        return f"{said}Every group had one reward: nothing could be learnt."
    fallen = [f"{one_line(c.impl, 40)} (seed {c.seed})" for c in listed if c.fell]
    return said + (f"Fell to less than half of its best: {', '.join(fallen)}." if fallen else "No arm's reward fell.")


_HEAD = ("arm", "KL 0 in", "other bits", "K3, mean", "most", "entropy", "reward", "ratios", "gradient norm")
_TIME = "s a step, sample + train"


def _table(listed: Sequence[Course]) -> Table:
    """A row for each arm and seed."""
    rows: list[Cells] = []
    for c in listed:
        seed = f" {c.seed}" * (len({c.seed for c in listed}) > 1)
        ratios = [ratio for s in c.steps for ratio in (s.ratio_least, s.ratio_most)] or [1.0]
        equal = f"{sum(s.differ == 0 for s in c.steps)} of {len(c.steps)}"
        differ = f"{counted(sum(s.differ for s in c.steps))} of {counted(sum(s.tokens for s in c.steps))}"
        k3 = (_k3(c.mean("k3")), _k3(max((s.k3 for s in c.steps), default=None)))
        entropy, reward, norm = (_from_to(c, name) for name in ("entropy", "reward", "grad_norm"))
        took = f"{c.mean('sample_seconds') or 0.0:.2f} + {c.mean('train_seconds') or 0.0:.2f}"
        named, span = (Bit(one_line(c.impl, 60), "code"), seed), f"{min(ratios):.3f} to {max(ratios):.3f}"
        rows.append((named, equal, differ, *k3, entropy, reward, span, norm, took))
    unshown = ("most", "ratios", "gradient norm", _TIME)
    return Table((*_HEAD, _TIME), rows, ("nowrap", *["num"] * 9), unshown=unshown, only=ALL)


def _k3(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}" if value else "0"


def _from_to(c: Course, name: str) -> str:
    first, last = (c.mean(name, part) for part in c.ends)
    return "–" if first is None or last is None else f"{first:.2f} → {last:.2f}"


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
    named = [(Bit(one_line(name, 60), "code"), f": {ARMS[name].help}") for name in arms if name in ARMS]
    parts: list[Block] = [*([Items(named)] if named else []), _table(listed)]
    figure = training_figure(run, f"{place}-plot")
    parts += [figure] if figure else []
    parts += [Paragraph(_rewards_text(listed), "soft", ALL), Paragraph(HEALTH, "soft")]
    return [
        *([Paragraph(f"{how}.", "soft")] if "group" in plan else []),
        Details("Arms", parts, place, plural(len(arms), "arm"), "arms", opened=opened),
    ]


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
    return Figure("plots", Plots([(one_line(impl, 60), "") for impl in impls], panels), place, PLOTS)


def _whole(values: Sequence[float]) -> Scale:
    return linear(min(0, math.floor(min(values))), math.ceil(max(1.0, *values)))
