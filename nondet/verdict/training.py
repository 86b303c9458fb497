"""Arms of reinforcement learning: in how many steps the KL of sampler and trainer was 0, and how rewards compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from statistics import fmean
from typing import NamedTuple

from nondet.core.records import Run, TrainingStep
from nondet.core.statistics import one_sided_bound
from nondet.errors import UserError
from nondet.verdict.findings import Finding, Verdict
from nondet.verdict.mismatch import Held, Thresholds
from nondet.verdict.wording import Reason, reason

_SHARE, _LEAST = 10, 3  # the first and the last steps of an arm that have figures: a tenth, and three at least
_WINDOW = 5  # steps whose mean reward is an arm's best
_FELL = 0.5  # of its best: an arm that ended lower has collapsed


@dataclass(frozen=True)
class Course:
    """One arm under one seed: its steps in order, and why it ended early, where it did."""

    impl: str
    seed: int
    steps: Sequence[TrainingStep]
    failed: str

    @property
    def ends(self) -> tuple[Sequence[TrainingStep], Sequence[TrainingStep]]:
        """Its first and its last steps: a tenth of them, and three at least."""
        few = max(_LEAST, len(self.steps) // _SHARE)
        return self.steps[:few], self.steps[-few:]

    def mean(self, name: str, steps: Sequence[TrainingStep] | None = None) -> float | None:
        """The mean of a figure over its steps; None where none has it."""
        values = [value for s in (self.steps if steps is None else steps) if (value := getattr(s, name)) is not None]
        return fmean(values) if values else None

    @cached_property
    def fell(self) -> tuple[float, float] | None:
        """The best mean reward of consecutive steps and that of the last ones, where these earned less than half."""
        rewards, last = [s.reward for s in self.steps if s.reward is not None], self.mean("reward", self.ends[1])
        if last is None:
            return None
        best = max(fmean(rewards[i : i + _WINDOW]) for i in range(max(1, len(rewards) - _WINDOW + 1)))
        return (best, last) if last < _FELL * best else None


def courses(run: Run) -> list[Course]:
    """The courses of a run, arms in the order of the file, seeds within."""
    found: dict[tuple[str, int], list[TrainingStep]] = {}
    for step in run.training_steps:
        found.setdefault((step.impl, step.seed), []).append(step)
    arms, made = list(dict.fromkeys(impl for impl, _ in found)), []
    for (impl, seed), steps in sorted(found.items(), key=lambda item: (arms.index(item[0][0]), item[0][1])):
        done = sorted((s for s in steps if s.status == "ok"), key=lambda s: s.step)
        made.append(Course(impl, seed, done, next((s.reason for s in steps if s.status != "ok"), "")))
    return made


class Line(NamedTuple):
    """A figure by step: for one seed where `thin`, else the mean over an arm's seeds where all have the step."""

    impl: str
    thin: bool
    points: Sequence[tuple[int, float]]


def lines_of(arms: Sequence[Course], name: str) -> list[Line]:
    """The lines of a figure: for each arm thin ones of its seeds, where there are several, then its own."""
    made = []
    for impl in dict.fromkeys(c.impl for c in arms):
        seeds = [[(s.step, v) for s in c.steps if (v := getattr(s, name)) is not None] for c in arms if c.impl == impl]
        at: dict[int, list[float]] = {}
        for step, value in chain.from_iterable(seeds):
            at.setdefault(step, []).append(value)
        made += [Line(impl, True, points) for points in seeds if len(seeds) > 1]
        made.append(Line(impl, False, [(i, fmean(v)) for i, v in sorted(at.items()) if len(v) == len(seeds)]))
    return [line for line in made if len(line.points) > 1]


class Spread(NamedTuple):
    """Largest minus smallest mean reward: of the arms, over their seeds; of the seeds of the arm that varies most."""

    arms: float
    seeds: float


def spread(arms: Sequence[Course]) -> Spread | None:
    """The spread of rewards; None where there is one arm, one seed, or an arm without rewards."""
    rewards: dict[str, list[float]] = {}
    for course in arms:
        if (mean := course.mean("reward")) is not None:
            rewards.setdefault(course.impl, []).append(mean)
    if len(rewards) < 2 or min(map(len, rewards.values())) < 2:
        return None
    means = [fmean(values) for values in rewards.values()]
    return Spread(max(means) - min(means), max(max(values) - min(values) for values in rewards.values()))


def judge_training(run: Run) -> list[Verdict]:
    """One verdict for each arm, over its seeds."""
    arms = courses(run)
    verdicts = [_judge(impl, [c for c in arms if c.impl == impl]) for impl in dict.fromkeys(c.impl for c in arms)]
    if between := spread(arms):  # of all arms, so it appears once
        than = "no more" if between.arms <= between.seeds else "more"
        shared = reason("rl-spread", **between._asdict(), than=than)
        verdicts[0] = replace(verdicts[0], reasons=(shared, *verdicts[0].reasons))
    return verdicts


def _judge(impl: str, mine: Sequence[Course]) -> Verdict:
    steps = [step for course in mine for step in course.steps]
    tokens, differ = sum(s.tokens for s in steps), sum(s.differ for s in steps)
    failed = tuple(reason("rl-failed", n=len(c.steps), seed=c.seed, why=c.failed) for c in mine if c.failed)
    if not steps:
        return Verdict(impl, (Finding.UNTESTED,), (reason("rl-none"),), failed)
    zero = sum(s.differ == 0 for s in steps)
    figures = {"n": zero, "of": len(steps), "differ": differ, "tokens": tokens}
    notes = (*failed, *_learnt(mine))
    if differ == 0:
        bound = reason("rl-bound", rate=one_sided_bound(tokens))
        return Verdict(impl, (Finding.CLEAN,), (reason("rl-zero", **figures),), notes, bounds=(bound,))
    k3, least, most = [s.k3 for s in steps], min(s.ratio_least for s in steps), max(s.ratio_most for s in steps)
    clauses = [reason("rl-apart", **figures, low=min(k3), high=max(k3))]
    clauses += [reason("rl-zero-steps", n=zero)] if zero else []
    return Verdict(impl, (Finding.MISMATCH,), tuple(clauses), (*notes, reason("rl-ratios", least=least, most=most)))


def _learnt(mine: Sequence[Course]) -> list[Reason]:
    steps = [step for course in mine for step in course.steps]
    groups, flat, alike = (sum(getattr(s, name) for s in steps) for name in ("groups", "flat", "alike"))
    notes = [reason("rl-flat", n=flat, of=groups, alike=alike)] if flat else []
    notes += [reason("rl-nothing")] if flat and flat == groups else []
    return notes + [reason("rl-fell", seed=c.seed, best=c.fell[0], last=c.fell[1]) for c in mine if c.fell]


def held(run: Run, limits: Thresholds) -> Iterator[Held]:
    """As `nondet.verdict.mismatch.held`: differing bits over all steps of an arm, and the worst step's means. Raises
    UserError: the steps have no such mean, because an older nondet made them."""
    for impl in dict.fromkeys(s.impl for s in run.training_steps):
        steps = [s for s in run.training_steps if s.impl == impl and s.status == "ok"]
        for name, field, limit in limits.given if steps else ():
            values = [getattr(s, field) for s in steps]
            if None in values:
                what = f"{run.source or 'the run'} holds no {name}: an older nondet made it"
                raise UserError(what, "Gate it by --k3, or train again.")
            worst, count = steps[values.index(max(values))], field == "differ"
            where = f" ({'most in ' * count}step {worst.step}, seed {worst.seed})" * bool(max(values))
            yield impl, name, sum(values) if count else max(values), where, limit
