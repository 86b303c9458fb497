"""The sampler compared with the trainer, once and by step of training: whether they differ, the kind, the effect."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

import numpy as np
from msgspec.structs import asdict

from nondet.core.records import MismatchKind, Role, Run, TrainingStep, role_of
from nondet.errors import UserError
from nondet.mismatch.figures import ABOVE, Bin, Figures, coarse, explains, interval_by_sequence, margin
from nondet.verdict.findings import Finding, Verdict, bounds_of, grouped
from nondet.verdict.wording import Reason, reason, stated

_NAMED = 0.9  # of tokens whose bits a hypothesis gives: then it is named
_LEFT = 10.0  # times rounding: a hypothesis that reproduces the bits of most tokens may leave this much in the others
_MOVED = 0.1  # of the middle |d|, where each logprob is compared with the next token's: then it is that token's
_FEWEST = 16  # tokens for a kind to be named: one fitted value explains a few, and two formulas agree on them

_STEPS, _GROWN = 4, 4.0  # steps at least, and times K3 of the first one: then it grows with the step

_SHARE, _LEAST = 10, 3  # the first and the last steps of an arm that have figures: a tenth, and three at least
_WINDOW = 5  # steps whose mean reward is an arm's best
_FELL = 0.5  # of its best: an arm that ended lower has collapsed


class Pair:
    """One arm of a run: its rollouts, and every hypothesis on each side, those that leave least first."""

    def __init__(self, run: Run, impl: str) -> None:
        mine = [r for r in run.mismatch_rollouts if r.impl == impl]
        self.impl, self.failed = impl, [r for r in mine if r.status != "ok"]
        self.rollouts = [r for r in mine if r.status == "ok"]
        ends = (np.frombuffer(b"".join(getattr(r, s) for r in self.rollouts), "<f4") for s in ("sampler", "trainer"))
        sampler, trainer = (side.astype(np.float32) for side in ends)
        self.figures = Figures(sampler, trainer, [r.tokens for r in self.rollouts]) if self.rollouts else None
        self.kinds = sorted((k for k in run.mismatch_kinds if k.impl == impl), key=lambda k: k.left)
        self.floor = next((r for r in run.mismatch_floors if r.impl == impl), None)
        self.place = next((r for r in run.mismatch_places if r.impl == impl), None)
        self.whole = next((r for r in run.mismatch_vocabularies if r.impl == impl), None)
        self.cost = next((r for r in run.mismatch_costs if r.impl == impl), None)
        # whole rows of logits that differ, and their mean KL(sampler || trainer) in nats a token
        self.rows_differ = sum(n > 0 for n in self.whole.differ) if self.whole else 0
        self.kl = sum(self.whole.kl) / len(self.whole.kl) if self.whole and self.whole.kl else 0.0

    @property
    def steps(self) -> list[Bin]:
        """The figures by training step; empty if there is only one step."""
        numbers, f = sorted({r.step for r in self.rollouts}), self.figures
        if f is None or len(numbers) < 2:
            return []
        each = np.repeat(np.array([r.step for r in self.rollouts], dtype=np.float64), f.lengths)
        return f.bins(each, [*numbers, numbers[-1] + 1])

    @cached_property
    def named(self) -> MismatchKind | None:
        """The hypothesis that is the cause: it gives exactly the same bits, or leaves least, and that explains it; or
        None."""
        if self.figures is None or not self.figures.differ or (self.floor and self.floor.tokens < _FEWEST):
            return None
        exact = [k for k in self.kinds if k.exactly >= _NAMED and k.left <= _LEFT * k.floor]
        if exact:
            return max(exact, key=lambda k: (k.exactly, -k.left))
        return next((k for k in self.kinds if explains(k.k3, k.left, k.floor)), None)

    @property
    def off(self) -> list[str]:
        """The sides that are farther from the wider forward than rounding takes the model's own."""
        if (floor := self.floor) is None:
            return []
        return [side for side in ("sampler", "trainer") if getattr(floor, side) > margin(floor.tokens) * floor.own]


def removed(kind: MismatchKind) -> float:
    """The share of the mismatch above rounding that a hypothesis removes; may be below 0, or above 1."""
    above = kind.k3 - kind.floor
    return (kind.k3 - kind.left) / above if above > 0 else 0.0


def pairs(run: Run) -> list[Pair]:
    """The arms of a run, in the order of the file."""
    return [Pair(run, impl) for impl in dict.fromkeys(r.impl for r in run.mismatch_rollouts)]


def judge_mismatch(run: Run) -> list[Verdict]:
    """One verdict for each arm."""
    arms = pairs(run)
    return [_judge(pair, arms) for pair in arms]


def _judge(pair: Pair, arms: Sequence[Pair]) -> Verdict:
    notes = [reason("mm-failed", n=len(pair.failed), why=pair.failed[0].reason)] if pair.failed else []
    f, rows = pair.figures, _rows(pair)
    if f is None:
        return Verdict(pair.impl, (Finding.UNTESTED,), (reason("mm-none"),), tuple(notes))
    counted = {"tokens": f.tokens, "rollouts": len(f.lengths)}
    if not f.differ and not pair.rows_differ:
        return _clean(pair.impl, reason("mm-zero", **counted), [*notes, rows], f.tokens)
    if not f.differ:
        seen = reason("mm-rows-only", **counted, rows=pair.rows_differ, n=len(pair.whole.differ) if pair.whole else 0)
        notes += [rows, *_where(pair)]
    else:
        said, bound = _said(pair)
        figures = {"differ": f.differ, "k3": f.k3, "interval": _interval(f.k3_interval)}
        seen = reason("mm-apart", said=said, bound=bound, **counted, **figures)
        tails = reason("mm-tails", outside=f.outside / f.tokens, least=f.ratios[0], most=f.ratios[1])
        drift = [] if said == "rounding" else _drift(pair)
        notes += [*_kind(pair), *drift, *_where(pair), tails, rows, *_cures(pair, arms)]
    return Verdict(pair.impl, (Finding.MISMATCH,), (seen,), tuple(notes))


def _clean(impl: str, count: Reason, notes: Sequence[Reason], tokens: int) -> Verdict:
    return Verdict(impl, (Finding.CLEAN,), (count,), tuple(notes), bounds=(bounds_of(tokens, "token"),))


def _said(pair: Pair) -> tuple[str, Reason | None]:
    """Whether it is rounding, and the number that decides it with its bound."""
    k, f = pair.named, pair.floor
    if f is None or f.tokens < _FEWEST:
        sure = any(why.code in ("kind-shifted", "kind-one-sided") for why in _without_model(pair))
        of = "of so few tokens" if f else "without --model"
        return "not rounding" if sure else f"rounding or not is not decided {of}", None
    of, number, bound = f"K3 to {f.wide}", max(f.sampler, f.trainer), margin(f.tokens) * f.own
    if k is not None:
        of, number, bound = f"K3 of {f.tokens:,} tokens", k.k3, ABOVE * k.floor
    said = "rounding" if number <= bound else "not rounding"
    return said, reason("mm-bound", of=of, number=number, bound=bound)


def _drift(pair: Pair) -> list[Reason]:
    """Whether K3 grows with the step. Where a side is so many updates behind, logprobs are ever farther off in as many
    steps from the first, in which both had the same weights, and no farther later."""
    steps = [step for step in pair.steps if step.tokens >= _FEWEST]
    if len(steps) < _STEPS or min(step.k3 for step in steps[1:]) < 2 * steps[0].k3:
        return []
    third, first = len(steps) // 3, steps[0].k3
    last, before = (fmean(step.k3 for step in part) for part in (steps[-third:], steps[-2 * third : -third]))
    if last < _GROWN * first:
        return []
    lag = 2 * sum(1 - min(1.0, math.sqrt((step.k3 - first) / (last - first))) for step in steps) - 1
    stopped = last < ABOVE * before and all(b.low - a.low == 1 for a, b in pairwise(steps))
    by = reason("mm-lag", n=max(1, round(lag))) if stopped else None
    return [reason("mm-drift", first=first, last=last, by=by)]


def _interval(ends: tuple[float, float] | None) -> Reason | None:
    return reason("mm-interval", low=ends[0], high=ends[1]) if ends else None


def _rows(pair: Pair) -> Reason:
    """The whole vocabulary, where it was compared; a note that it was not, where sides gave only logprobs."""
    if (w := pair.whole) is None or not w.differ:
        return reason("mm-rows-none")
    if not pair.rows_differ:
        return reason("mm-rows-zero", n=len(w.differ), size=w.size)
    by: dict[str, list[float]] = {}  # rollout -> KL of its rows
    for name, kl in zip(w.rollouts, w.kl, strict=True):
        by.setdefault(name, []).append(kl)
    ends = interval_by_sequence(np.array([sum(v) for v in by.values()]), [len(v) for v in by.values()])
    figures = {"rows": pair.rows_differ, "kl": pair.kl, "most": max(w.kl), "interval": _interval(ends)}
    return reason("mm-rows", n=len(w.differ), size=w.size, **figures)


def _kind(pair: Pair) -> list[Reason]:
    if (k := pair.named) is not None:
        return [reason("kind-exact" if k.exactly >= _NAMED else "kind-fits", **asdict(k))]
    if (f := pair.floor) is None:
        return [*_without_model(pair), reason("mm-unasked")]
    if f.tokens < _FEWEST:
        return [reason("kind-few", n=f.tokens, least=_FEWEST)]
    shifted = [why for why in _without_model(pair) if why.code == "kind-shifted"] if pair.off else []
    return [reason("kind-unexplained" if pair.off else "kind-numeric", sides=tuple(pair.off), **asdict(f)), *shifted]


def _without_model(pair: Pair) -> list[Reason]:
    """Findings without a model: a narrower format, logprobs of the next token, or that it is not rounding.

    Rounding has no sign: that the tokens which differ most, a tenth and 16 at least, have one by chance is one in 2^15.
    """
    if (f := pair.figures) is None or f.differ < _FEWEST:
        return []
    sides = (("sampler", f.sampler, f.trainer), ("trainer", f.trainer, f.sampler))
    grids = [(side, name) for side, values, _ in sides if (name := coarse(values))]
    # where both sides are coarse, they were computed so
    reasons = [reason("kind-rounded", side=side, name=name) for side, name in grids if len(grids) == 1]
    later = np.setdiff1d(np.arange(f.tokens), np.cumsum([0, *f.lengths])[:-1])  # all but the first of each rollout
    here = float(np.median(np.abs(f.distance[later]))) if len(later) >= _FEWEST else 0.0
    for side, one, other in sides:
        moved = float(np.median(np.abs(one[later - 1] - other[later]))) if here else 0.0
        if moved < _MOVED * here:
            return [*reasons, reason("kind-shifted", side=side, here=here, moved=moved)]
    most = f.distance[np.argsort(-np.abs(f.distance))[: max(_FEWEST, f.tokens // 10)]]
    if abs(np.sign(most).sum()) == len(most):
        side, ends = "trainer" if most[0] > 0 else "sampler", sorted(np.abs(most))
        reasons.append(reason("kind-one-sided", n=len(most), side=side, least=ends[0], most=ends[-1]))
    return reasons


def _where(pair: Pair) -> list[Reason]:
    if (p := pair.place) is None:
        return []
    if p.unsteady:
        return [reason("mm-unsteady", **asdict(p))]
    if p.layer == "formula":
        return [reason("mm-formula")]
    if not p.call or (d := p.difference) is None:
        return [reason("mm-nowhere", **asdict(p))]
    rows = dict(zip(("sampled", "trained"), p.rows, strict=False))
    return [reason("call-where", **asdict(p), **rows, differ=d.mismatched, of=d.compared, ulp=d.max_ulp)]


def _cures(pair: Pair, arms: Sequence[Pair]) -> list[Reason]:
    """For stock, what the invariant arms leave of it, and what they cost."""
    reasons = []
    for cured in arms if pair.impl == "stock" and pair.cost else ():
        if role_of(cured.impl) in (Role.INVARIANT, Role.PART) and (f := cured.figures) and cured.cost:
            theirs, own = (p.cost.sample_seconds + p.cost.train_seconds for p in (cured, pair) if p.cost)
            times = theirs / own if own else 0.0
            reasons.append(reason("mm-cure", impl=cured.impl, differ=f.differ, tokens=f.tokens, k3=f.k3, times=times))
    return reasons


# Reinforcement learning, step by step: in how many steps the KL of sampler and trainer was 0, and how rewards compare.


class Course:
    """One arm under one seed: its steps in order, and why it ended early, where it did."""

    def __init__(self, impl: str, seed: int, steps: Sequence[TrainingStep]) -> None:
        self.impl, self.seed = impl, seed
        self.steps = sorted((s for s in steps if s.status == "ok"), key=lambda s: s.step)
        self.failed = next((s.reason for s in steps if s.status != "ok"), "")
        few = max(_LEAST, len(self.steps) // _SHARE)
        self.ends = self.steps[:few], self.steps[-few:]

    def mean(self, name: str, steps: Sequence[TrainingStep] | None = None) -> float | None:
        """The mean of a figure over its steps; None where none has it."""
        values = [value for s in (self.steps if steps is None else steps) if (value := getattr(s, name)) is not None]
        return fmean(values) if values else None

    @property
    def fell(self) -> tuple[float, float] | None:
        """The best mean reward of consecutive steps and that of the last ones, where these earned less than half."""
        rewards, last = [s.reward for s in self.steps if s.reward is not None], self.mean("reward", self.ends[1])
        if last is None:
            return None
        best = max(fmean(rewards[i : i + _WINDOW]) for i in range(max(1, len(rewards) - _WINDOW + 1)))
        return (best, last) if last < _FELL * best else None


def courses(run: Run) -> list[Course]:
    """The courses of a run, arms in the order of the file, seeds within."""
    found = grouped(run.training_steps, lambda step: (step.impl, step.seed))
    arms = list(dict.fromkeys(impl for impl, _ in found))
    return [Course(*key, found[key]) for key in sorted(found, key=lambda key: (arms.index(key[0]), key[1]))]


class Line(NamedTuple):
    """A figure by step: for one seed where `thin`, else the mean over an arm's seeds where all have the step."""

    impl: str
    thin: bool
    points: Sequence[tuple[int, float]]


def lines_of(arms: Sequence[Course], name: str) -> list[Line]:
    """The lines of a figure: for each arm thin ones of its seeds, where there are several, then its own."""
    made = []
    for impl, mine in grouped(arms, lambda course: course.impl).items():
        seeds = [{s.step: v for s in c.steps if (v := getattr(s, name)) is not None} for c in mine]
        made += [Line(impl, True, list(points.items())) for points in seeds if len(seeds) > 1]
        shared = sorted(set(seeds[0]).intersection(*seeds))
        made.append(Line(impl, False, [(step, fmean(points[step] for points in seeds)) for step in shared]))
    return [line for line in made if len(line.points) > 1]


def judge_training(run: Run) -> list[Verdict]:
    """One verdict for each arm, over its seeds."""
    arms = courses(run)
    verdicts = [_judge_steps(impl, mine) for impl, mine in grouped(arms, lambda course: course.impl).items()]
    # of all arms, so it appears once
    return [replace(v, reasons=(*_spread(arms), *v.reasons)) for v in verdicts[:1]] + verdicts[1:]


def _spread(arms: Sequence[Course]) -> list[Reason]:
    """How far mean rewards are apart: of the arms, over their seeds, and of the seeds of the arm that varies most. None
    where there is one arm, one seed, or an arm without rewards."""
    means = ((c.impl, mean) for c in arms if (mean := c.mean("reward")) is not None)
    rewards = [[mean for _, mean in of] for of in grouped(means, lambda item: item[0]).values()]
    if len(rewards) < 2 or min(map(len, rewards)) < 2:
        return []
    apart = max(map(fmean, rewards)) - min(map(fmean, rewards))
    seeds = max(max(values) - min(values) for values in rewards)
    return [reason("reward", arms=apart, seeds=seeds, than="no more" if apart <= seeds else "more")]


def _judge_steps(impl: str, mine: Sequence[Course]) -> Verdict:
    steps = [step for course in mine for step in course.steps]
    notes = [reason("rl-failed", n=len(c.steps), seed=c.seed, why=c.failed) for c in mine if c.failed]
    if not steps:
        return Verdict(impl, (Finding.UNTESTED,), (reason("rl-none"),), tuple(notes))
    names = ("tokens", "differ", "groups", "flat", "alike")
    tokens, differ, groups, flat, alike = (sum(getattr(s, name) for s in steps) for name in names)
    notes += stated((flat, reason("rl-flat", n=flat, of=groups, alike=alike)))
    notes += stated((flat and flat == groups, reason("rl-nothing")))
    notes += [reason("rl-fell", seed=c.seed, best=c.fell[0], last=c.fell[1]) for c in mine if c.fell]
    zero = sum(s.differ == 0 for s in steps)
    figures = {"n": zero, "of": len(steps), "differ": differ, "tokens": tokens}
    if differ == 0:
        return _clean(impl, reason("rl-zero", **figures), notes, tokens)
    k3, least, most = [s.k3 for s in steps], min(s.ratio_least for s in steps), max(s.ratio_most for s in steps)
    apart = reason("rl-apart", **figures, low=min(k3), high=max(k3))
    notes.append(reason("rl-ratios", least=least, most=most))
    return Verdict(impl, (Finding.MISMATCH,), (apart, *stated((zero, reason("rl-zero-steps", n=zero)))), tuple(notes))


# A user's own thresholds, by figure: tokens with other bits, K3 in nats per token, NeMo RL's mean of exp |d|.
Thresholds = Mapping[str, float | None]
_FIGURES = {"differ": "other bits", "k3": "K3", "mult_prob_error": "mean of exp |d|"}
# An arm, whether its figure is above its threshold, and both in words.
Held = tuple[str, bool, Reason]


def held(run: Run, limits: Mapping[str, float]) -> Iterator[Held]:
    """What a run holds for each of the thresholds that are set; of steps of training, differing bits over all of them,
    and the worst step's means. Raises UserError: the steps have no such mean, because an older nondet made them."""

    def compared(impl: str, name: str, value: float, limit: float, where: str = "") -> Held:
        figures = {"value": value, "limit": limit, "side": "above" if value > limit else "within"}
        return impl, value > limit, reason("mm-threshold", impl=impl, name=name, where=where, **figures)

    for pair in pairs(run):
        if (f := pair.figures) is not None:
            for field, limit in limits.items():
                yield compared(pair.impl, _FIGURES[field], getattr(f, field), limit)
            if limits.get("differ") == 0 and pair.whole:
                yield compared(pair.impl, "rows of other logits", pair.rows_differ, 0)
    for impl, steps in grouped((s for s in run.training_steps if s.status == "ok"), lambda s: s.impl).items():
        for field, limit in limits.items():
            values = [getattr(s, field) for s in steps]
            if None in values:
                what = f"{run.source or 'the run'} holds no {_FIGURES[field]}: an older nondet made it"
                raise UserError(what, "Gate it by --k3, or train again.")
            worst, count = steps[values.index(max(values))], field == "differ"
            where = f" ({'most in ' * count}step {worst.step}, seed {worst.seed})" * bool(max(values))
            yield compared(impl, _FIGURES[field], sum(values) if count else max(values), limit, where)
