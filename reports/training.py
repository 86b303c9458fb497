"""Arms of reinforcement learning as blocks of a report: reward and KL by step, a line an arm, seeds as thin ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nondet.core.records import Run
from nondet.errors import one_line
from nondet.mismatch.arms import ARMS
from nondet.reports.classes import WIDTH, Tick
from nondet.reports.document import BRIEF, Bit, Block, Details, Figure, Inline, Items, Paragraph, Table, grid
from nondet.reports.text import counted
from nondet.verdict.findings import Verdict, plural
from nondet.verdict.training import Course, Spread, courses, lines_of, spread
from nondet.verdict.wording import phrase

HEALTH = "A small K3 is no sign of health: it falls with entropy, too, so the two stand beside each other."
PLOTS = "Reward, K3 and entropy by step"
_TICKS = 6
_FLOOR = 12.0  # of a plot's height, between 0 and the least decade of K3


@dataclass(frozen=True)
class Training:
    """The arms of a run, a course for each seed; its figure is made once, so that a page shows it once."""

    run: Run

    @cached_property
    def courses(self) -> Sequence[Course]:
        """All of them."""
        return courses(self.run)

    @cached_property
    def figure(self) -> dict[str, Any] | None:
        """What the page's macro draws."""
        return training_figure(self.courses)


def training_headline(run: Run, verdicts: Sequence[Verdict]) -> str:
    """What each arm's verdict begins with, and what rewards came to, in a sentence without its full stop."""
    said = "; ".join(f"{one_line(v.impl, 60)}: {phrase(v.counts[:1], brief=True)}" for v in verdicts)
    between = spread(courses(run))
    return f"{said}; {_spread_text(between)}" if between else said


def _spread_text(between: Spread) -> str:
    figures = f"{between.arms:.2f} between arms, up to {between.seeds:.2f} between the seeds of one"
    how = "differ by no more than seeds do" if between.within else "differ by more than seeds do"
    return f"mean rewards of the arms {how} ({figures})"


def _rewards_text(told: Training) -> str:
    """What may be said of rewards."""
    arms, seeds = ({getattr(c, name) for c in told.courses} for name in ("impl", "seed"))
    said = ""
    if between := spread(told.courses):
        said = f"{_spread_text(between).capitalize()}. "
    elif len(arms) > 1 and len(seeds) == 1:
        said = "One seed: what the arms earned is not compared. Other bits draw other texts, as other seeds do. "
    if all(s.flat == s.groups for c in told.courses for s in c.steps):
        return f"{said}Every group had one reward: nothing could be learnt."
    fallen = [f"{one_line(c.impl, 40)} (seed {c.seed})" for c in told.courses if c.fell]
    return said + (f"Fell to less than half of its best: {', '.join(fallen)}." if fallen else "No arm's reward fell.")


def arms_table(told: Training, **more: Any) -> Table:
    """A row for each arm and seed."""
    several = len({c.seed for c in told.courses}) > 1

    def each(c: Course, name: str) -> list[Any]:
        return [getattr(s, name) for s in c.steps]

    def ends(c: Course, name: str) -> str:
        first, last = (c.mean(name, part) for part in c.ends)
        return "–" if first is None or last is None else f"{first:.2f} → {last:.2f}"

    def k3(value: float | None) -> str:
        return "–" if value is None else f"{value:.1e}" if value else "0"

    def ratios(least: list[float], most: list[float]) -> str:
        return f"{min(least, default=1.0):.3f} to {max(most, default=1.0):.3f}"

    def seconds(c: Course) -> str:
        return " + ".join(f"{c.mean(name) or 0.0:.2f}" for name in ("sample_seconds", "train_seconds"))

    columns: dict[str, tuple[str, Callable[[Course], Inline]]] = {
        "arm": ("nowrap", lambda c: (Bit(one_line(c.impl, 60), "code"), f" {c.seed}" * several)),
        "KL 0 in": ("num", lambda c: f"{sum(s.differ == 0 for s in c.steps)} of {len(c.steps)}"),
        "other bits": ("num", lambda c: " of ".join(counted(sum(each(c, n))) for n in ("differ", "tokens"))),
        "K3, mean": ("num", lambda c: k3(c.mean("k3"))),
        "most": ("num", lambda c: k3(max(each(c, "k3"), default=None))),
        "entropy": ("num", lambda c: ends(c, "entropy")),
        "reward": ("num", lambda c: ends(c, "reward")),
        "ratios": ("num", lambda c: ratios(each(c, "ratio_least"), each(c, "ratio_most"))),
        "gradient norm": ("num", lambda c: ends(c, "grad_norm")),
        "s a step, sample + train": ("num", seconds),
    }
    return grid(told.courses, columns, unshown=("most", "ratios", "gradient norm", "s a step, sample + train"), **more)


def training_blocks(told: Training, number: int, opened: bool) -> list[Block]:
    """What was trained, the table, the pictures, what may be said of rewards, where steps ended."""
    place, plan = f"training-{number}", told.run.header.plan
    names = ("steps", "groups", "group", "tokens", "lr", "epochs", "task")
    how = (
        "GRPO: {} steps of {} prompts x {} rollouts x {} tokens at temperature 1; AdamW, learning rate {}, epochs {}; "
        "task: {}"
    ).format(*(one_line(str(plan.get(name)), 40) for name in names))
    if plan.get("rollouts"):
        how += f"; rollouts from {one_line(str(plan['rollouts']), 20)} weights"
    arms = dict.fromkeys(c.impl for c in told.courses)
    named = [(Bit(one_line(name, 60), "code"), f": {ARMS[name].help}") for name in arms if name in ARMS]
    parts: list[Block] = [*([Items(named)] if named else []), arms_table(told)]
    parts += [Figure("training", told.figure, f"{place}-plot", PLOTS)] if told.figure else []
    parts += [Paragraph(text, "soft") for text in (_rewards_text(told), HEALTH)]
    return [
        *([Paragraph(f"{how}.", "soft")] if "group" in plan else []),
        arms_table(told, only=BRIEF),
        Paragraph(_rewards_text(told), only=BRIEF),
        Details("Arms", parts, place, plural(len(arms), "arm"), "arms", opened=opened, only="vmp"),
    ]


# Geometry of the plots. Places are in thousandths of the plot's width and hundredths of its height.


def training_figure(told: Sequence[Course]) -> dict[str, Any] | None:
    """A panel each for reward, K3 and entropy; None of fewer than two steps."""
    steps = [step for course in told for step in course.steps]
    impls, last = list(dict.fromkeys(c.impl for c in told)), max((s.step for s in steps), default=0)
    if last < 1:
        return None

    def path(points: Sequence[tuple[int, float]], height: Callable[[float], float]) -> str:
        return "M" + " ".join(f"{WIDTH * x / last:.1f} {height(y):.2f}" for x, y in points)

    panels = {
        "reward": ("reward", "mean of a step", _linear([1.0, *(s.reward or 0.0 for s in steps)])),
        "k3": ("K3, sampler to trainer", "log scale; 0 is the axis", _decades([s.k3 for s in steps])),
        "entropy": ("entropy", "nats a token", _linear([1.0, *(s.entropy or 0.0 for s in steps)])),
    }
    drawn = []
    for name, (title, unit, (levels, height)) in panels.items():
        lines = [(impls.index(x.impl), x.thin, path(x.points, height)) for x in lines_of(told, name)]
        drawn.append({"title": title, "unit": unit, "levels": levels, "lines": lines})
    ticks = [Tick(WIDTH * step / last, f"{step:,}") for step in range(0, last + 1, max(1, -(-last // _TICKS)))]
    return {"impls": [one_line(impl, 60) for impl in impls], "ticks": ticks, "panels": drawn}


_Scale = tuple[list[tuple[str, float]], Callable[[float], float]]  # the levels that are drawn, and a value's height


def _linear(values: Sequence[float]) -> _Scale:
    low, high = min(0, math.floor(min(values))), math.ceil(max(values))

    def height(value: float) -> float:
        return 100.0 - 100.0 * (value - low) / (high - low)

    return [(f"{x:g}", height(x)) for x in (low, (low + high) / 2, high)], height


def _decades(values: Sequence[float]) -> _Scale:
    """0 at the axis, and above it the decades that hold all others."""
    above = [math.log10(v) for v in values if v > 0]
    least = math.floor(min(above, default=-6.0))
    most = max(least + 1, math.ceil(max(above, default=-3.0)))

    def height(value: float) -> float:
        return 100.0 if value <= 0 else (100.0 - _FLOOR) * (most - math.log10(value)) / (most - least)

    shown = range(least, most + 1, max(1, (most - least) // 3))
    return [("0", 100.0), *((f"1e{e}", height(10.0**e)) for e in shown)], height
