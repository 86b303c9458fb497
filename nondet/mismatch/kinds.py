"""The kind of a mismatch: the model computes each hypothesis, which is fitted and subtracted from what was seen.

Let d be the trainer's logprob minus the sampler's, and c the change of a logprob under a hypothesis, computed by a
forward of its own. Then d is c plus rounding where the trainer does so, and -c plus rounding where the sampler does. K3
of d - c (or d + c) shows how much of the mismatch the hypothesis explains. Rounding is not a hypothesis but the floor:
the distance of the model's own forward from one in a wider format, one share for each side. The effect of weights,
tokens and positions is computed in the wider format, in which c has no rounding of its own; the effect of a format in
the model's.

A temperature, top-k or top-p that both sides have is not a mismatch: then all of this is about logprobs under it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from nondet.core.records import MismatchFloor, MismatchKind
from nondet.mismatch.figures import ABOVE, Floats, Logprobs, coarse, margin
from nondet.mismatch.rollouts import Rollout, by_rollout
from nondet.mismatch.trainer import (
    FORMULAS,
    NO_FAULT,
    Fault,
    Formula,
    Spec,
    rounded_to_fp8,
    score,
    weights_changed,
    widened,
    widths,
)

_TOKENS, _ROLLOUTS = 1024, 24  # that hypotheses are computed for, at least one rollout
_LIKE = 1.5  # times their K3: up to this K3 of all rollouts they represent all
_LOGITS = 2**26  # numbers of logits that are kept for fits
_CHUNK = 2**22  # of these at once
_COLUMNS = 2048  # of the largest logits that top-k and top-p are fitted in
_RANK, _LOW = 64, 0.7  # of a difference of weights: the share of its energy in this many directions
CERTAIN = 0.9  # of tokens whose bits a hypothesis reproduces
_PLAIN = Spec()
_SIDES = {"trainer": 1.0, "sampler": -1.0}
_HEATS = np.geomspace(0.25, 4.0, 11)
_STEPS = {torch.float64: 32}  # of a golden section around the best of these, by the wider format
_STEPS_LEAST = 14
_FEW = 100  # tokens: for fewer, a less plausible setting may be nearer by chance
_FAR = 10.0  # times rounding: then no other setting of both sides is the reason
_SHARES = 64  # values of top-p that are tried at once, five times between ever closer ends


@dataclass(frozen=True)
class Setting:
    """The setting of a distribution: logits divided by `heat`, all of them, or the top k or the top p."""

    heat: float = 1.0
    cut: str = ""  # "top-k" or "top-p"
    value: float = 1.0

    def __str__(self) -> str:
        words = [f"temperature {self.heat:.4g}"] * (self.heat != 1) + [f"{self.cut} {self.value:.4g}"] * bool(self.cut)
        return f" at {', '.join(words)}" if words else ""

    @property
    def formula(self) -> Formula:
        """From logits to logprobs."""
        if self.cut:
            return lambda x, ids: _Logits(x, ids).logprobs(self)
        return lambda x, ids: FORMULAS["log_softmax"](x if self.heat == 1 else x / self.heat, ids)


class _Logits:
    """Rows of logits [k, V] in the format that they were computed in, and the tokens [k] that followed them."""

    def __init__(self, logits: torch.Tensor, ids: torch.Tensor) -> None:
        self.logits, self.ids = logits, ids[:, None]
        self.top, ids_of_top = logits.topk(min(_COLUMNS, logits.shape[-1]), -1)
        self.most = ids_of_top[:, :1]

    def total(self, heat: float) -> torch.Tensor:
        """ln of the sum of exponentials at a temperature, [k] float64."""
        sums, size = [], max(1, _CHUNK // self.logits.shape[-1])
        for part, most in zip(self.logits.split(size), self.most.split(size), strict=True):
            x = part / heat  # the sum in float32 is relative to its largest term, and several times faster
            sums.append(x.gather(-1, most).double() - x.float().log_softmax(-1).gather(-1, most).double())
        return torch.cat(sums).squeeze(-1)

    def plain(self, heat: float, total: torch.Tensor) -> torch.Tensor:
        """Logprobs at a temperature, [k] float64, with what `total` gives."""
        return (self.logits.gather(-1, self.ids) / heat).double().squeeze(-1) - total

    def shares(self, heat: float, total: torch.Tensor) -> torch.Tensor:
        """[k, C] float64: cumulative probabilities of the most likely tokens."""
        return ((self.top / heat).double() - total[:, None]).exp().cumsum(-1).clamp(max=1.0)

    def logprobs(self, setting: Setting) -> torch.Tensor:
        """[k] float64; a token that is cut off is divided by the kept share, too."""
        total = self.total(setting.heat)
        values = self.plain(setting.heat, total)
        if not setting.cut:
            return values
        kept = _kept(self.shares(setting.heat, total), setting.cut, torch.tensor([setting.value]))
        return values - kept.squeeze(-1).log()


def _kept(shares: torch.Tensor, cut: str, values: torch.Tensor) -> torch.Tensor:
    """[k, n]: the share of what is kept at each of n values."""
    wanted = values.to(shares)[None].expand(len(shares), -1).contiguous()
    last = wanted.round().long() - 1 if cut == "top-k" else torch.searchsorted(shares, wanted)
    return shares.gather(-1, last.clamp(0, shares.shape[-1] - 1))


@dataclass(frozen=True)
class _Seen:
    """A share of the rollouts with both sides' logprobs (setting `base`), and the model's own logits of the rows
    `rows`: plain (`near`) and in the wider format (`far`)."""

    rollouts: Sequence[Rollout]
    padded: Sequence[int]
    sampler: Logprobs
    trainer: Logprobs
    own: Logprobs
    exact: Logprobs
    near: _Logits
    far: _Logits
    rows: np.ndarray
    base: Setting = Setting()

    def given(self, side: str) -> Logprobs:
        return self.sampler if side == "sampler" else self.trainer

    @property
    def distance(self) -> Floats:
        return self.trainer.astype(np.float64) - self.sampler.astype(np.float64)

    def rounding(self, setting: Setting) -> float:
        """K3 between the model's own forward and the wider one, under a setting."""
        return _k3((self.near.logprobs(setting) - self.far.logprobs(setting)).cpu().numpy())


def _k3(distance: Floats) -> float:
    with np.errstate(over="ignore"):
        return float(np.mean(np.maximum(np.expm1(distance) - distance, 0.0)))


def _same(one: Logprobs, other: Logprobs) -> Floats:
    return (one.view(np.uint32) == other.view(np.uint32)).astype(np.float64)


def share_of(rollouts: Sequence[Rollout]) -> list[int]:
    """The rollouts that hypotheses are computed for, unless these hide the fault: about a thousand tokens."""
    mean = sum(len(r.drawn) for r in rollouts) / len(rollouts)
    count = max(1, min(len(rollouts), _ROLLOUTS, round(_TOKENS / mean)))
    return sorted({int(i) for i in np.linspace(0, len(rollouts) - 1, count).round()})


_Found = Callable[..., MismatchKind]


def fit(
    model: Any, rollouts: Sequence[Rollout], spec: Spec, sampler: Logprobs, trainer: Logprobs, impl: str,
    older: Any = None,
) -> Iterator[MismatchFloor | MismatchKind]:  # fmt: skip
    """The floor, then each hypothesis on each side, with what it leaves.

    Args:
        model: In the sampler's format, on its device.
        spec: The trainer's layout.
        sampler, trainer: [n] float32 of all rollouts.
        older: A model of the same form with other weights that a side may have had, or None.
    """
    wide, plain = widened(model), Spec(padding=spec.padding, micro=spec.micro)
    seen = _seen(model, wide, plain, rollouts, sampler, trainer)
    before = _k3(seen.distance)
    away = [_k3(x.astype(np.float64) - seen.exact) for x in (seen.sampler, seen.trainer, seen.own)]
    floor = 2 * away[2]
    yield MismatchFloor(
        impl=impl, tokens=len(seen.exact), rollouts=len(seen.rollouts), k3=before, floor=floor, sampler=away[0],
        trainer=away[1], own=away[2], wide=f"{_format_of(wide)}{seen.base}",
    )  # fmt: skip

    def found(layer: str, cause: str, side: str, fitted: str, left: float, **figures: float) -> MismatchKind:
        given = {"k3": before, "floor": floor, "exactly": 0.0} | figures
        return MismatchKind(impl=impl, layer=layer, cause=cause, side=side, fitted=fitted, left=left, **given)

    by_logits = [_grids(seen, found), _formulas(seen, found), _fitted(seen, found, "temperature", "", None)]
    by_logits += [_fitted(seen, found, cut, cut, seen.base.heat) for cut in ("top-k", "top-p")]
    explained = before <= ABOVE * floor
    for kind in chain(*by_logits, _forwards(model, wide, older, seen, plain, found)):
        explained |= kind.exactly >= CERTAIN or kind.left <= ABOVE * kind.floor
        yield kind
    off = [side for side, k3 in zip(("sampler", "trainer"), away, strict=False) if k3 > ABOVE * away[2]]
    for cut in () if explained else ("top-k", "top-p"):  # two values are fitted where one explains nothing
        yield from _fitted(seen, found, f"temperature and {cut}", cut, None, off)


def _seen(
    model: Any, wide: Any, plain: Spec, rollouts: Sequence[Rollout], sampler: Logprobs, trainer: Logprobs
) -> _Seen:
    chosen, whole = share_of(rollouts), by_rollout(np.arange(len(sampler)), rollouts)
    distance = trainer.astype(np.float64) - sampler
    if _k3(distance) > _LIKE * _k3(distance[np.concatenate([whole[i] for i in chosen])]):  # also the one that adds most
        chosen = sorted({*chosen, int(np.argmax([_k3(distance[mine]) * len(mine) for mine in whole]))})
    tokens = np.concatenate([whole[i] for i in chosen])
    lengths, part = widths(rollouts, plain.micro), [rollouts[i] for i in chosen]
    padded = [lengths[i] for i in chosen]
    stride = max(1, -(-len(tokens) * model.config.get_text_config().vocab_size // _LOGITS))
    rows = np.arange(0, len(tokens), stride)

    def forward(of: Any, spec: Spec, padded: Sequence[int]) -> tuple[Logprobs, _Logits]:
        kept, count = list[tuple[torch.Tensor, torch.Tensor]](), 0

        def keep(values: torch.Tensor, after: torch.Tensor) -> None:
            nonlocal count
            first = -count % stride
            kept.append((values[first::stride].clone(), after[first::stride]))
            count += len(values)

        values = score(of, part, spec, padded=padded, keep=keep)
        return values, _Logits(*map(torch.cat, zip(*kept, strict=True)))

    own, near = forward(model, plain, padded)
    exact, far = forward(wide, _PLAIN, ())
    seen = _Seen(part, padded, sampler[tokens], trainer[tokens], own, exact, near, far, rows)
    if (base := _common(seen)) == Setting():
        return seen
    own = score(model, part, plain, padded=padded, formula=base.formula)
    return replace(seen, own=own, exact=score(wide, part, _PLAIN, formula=base.formula), base=base)


def _format_of(model: Any) -> str:
    return str(next(model.parameters()).dtype).removeprefix("torch.")


def _common(seen: _Seen) -> Setting:
    """The setting of both sides' logprobs: the simplest at which both are near, or one is and the other is far."""
    sides = [torch.from_numpy(x[seen.rows]).to(seen.far.top.device).double() for x in (seen.sampler, seen.trainer)]
    forms: list[tuple[str, float | None]] = [("", 1.0), ("", None)]
    forms += [(cut, heat) for heat in (1.0, None) for cut in ("top-p", "top-k")]
    loose: dict[bool, Setting] = {}
    for cut, heat in forms:
        if loose and cut and heat is None and len(sides[0]) > _FEW:
            break
        for setting in [_nearest(seen.far, side, cut, heat) for side in (sides if cut or heat is None else sides[:1])]:
            rounding, logprobs = seen.rounding(setting), seen.far.logprobs(setting)
            near, far = sorted(_k3((side - logprobs).cpu().numpy()) / max(rounding, 1e-300) for side in sides)
            if near <= ABOVE and (far <= ABOVE or (far > _FAR and not loose)):  # a simpler one may have one near
                return setting
            if near <= ABOVE or far <= margin(len(sides[0])):  # with few tokens another setting may be nearer
                loose.setdefault(far <= margin(len(sides[0])), setting)
    return loose.get(True) or loose.get(False) or Setting()


def _grids(seen: _Seen, found: _Found) -> Iterator[MismatchKind]:
    """Hypotheses: logprobs that were rounded on one side."""
    for side, other in (("sampler", "trainer"), ("trainer", "sampler")):
        name = coarse(seen.given(side))
        if name and name != coarse(seen.given(other)):
            dtype = torch.bfloat16 if name == "bfloat16" else torch.float16
            rounded = torch.from_numpy(seen.given(other)).to(dtype).double().numpy()
            left = _k3(rounded - seen.given(side).astype(np.float64))
            yield found("format", "rounded logprobs", side, name, left, exactly=1.0)


def _formulas(seen: _Seen, found: _Found) -> Iterator[MismatchKind]:
    """Hypotheses: both sides have the bits of the same logits, by two formulas."""
    logits, ids = seen.near.logits, seen.near.ids.squeeze(-1)
    logits = logits if seen.base.heat == 1 else logits / seen.base.heat
    values = {name: f(logits, ids).cpu().numpy() for name, f in FORMULAS.items() if name != "low-precision"}
    same, by = dict[str, Floats](), dict[str, str]()
    for side in _SIDES:
        given = seen.given(side)[seen.rows]
        alike = {name: _same(given, v) for name, v in values.items()}
        by[side] = max(alike, key=lambda name: (alike[name].mean(), name))
        same[side] = alike[by[side]]
    share = float(min(x.mean() for x in same.values()))
    differ = _same(seen.sampler, seen.trainer).mean() < 1 and _same(*(values[name] for name in by.values())).mean() < 1
    if differ and share >= CERTAIN:
        left = _k3(np.where(same["sampler"] * same["trainer"], 0.0, seen.distance[seen.rows]))
        yield found(
            "formula", "another formula", "trainer", f"{by['trainer']} for {by['sampler']}", left, exactly=share
        )


def _fitted(
    seen: _Seen, found: _Found, cause: str, cut: str, heat: float | None, sides: Sequence[str] = tuple(_SIDES)
) -> Iterator[MismatchKind]:
    """What a setting leaves that was fitted to one side, by the other side's logprobs and d."""
    distance, base = seen.distance[seen.rows], seen.far.logprobs(seen.base)
    for side in sides:
        sign = _SIDES[side]
        setting = _nearest(seen.far, base + sign * torch.from_numpy(distance).to(base), cut, heat)
        change = (seen.far.logprobs(setting) - base).cpu().numpy()
        fitted = [f"{setting.heat:.4g}"] * (heat is None) + [f"{setting.value:.4g}"] * bool(cut)
        rounding = seen.rounding(seen.base) + seen.rounding(setting)
        left = _k3(distance - sign * change)
        yield found("semantic", cause, side, ", ".join(fitted), left, k3=_k3(distance), floor=rounding)


def _nearest(of: _Logits, wanted: torch.Tensor, cut: str = "", heat: float | None = None) -> Setting:
    """The temperature, unless it is given, and the top k or top p at it whose logprobs are nearest, by squares."""

    def at(heat: float) -> tuple[float, Setting]:
        total = of.total(heat)
        above = wanted - of.plain(heat, total)
        if not cut:
            return float(above.square().mean()), Setting(heat)
        shares = of.shares(heat, total)

        def costs(values: torch.Tensor) -> torch.Tensor:
            return (above[:, None] + _kept(shares, cut, values).log()).square().mean(0)

        low, high = (0.02, 1.0) if cut == "top-p" else (1.0, float(min(shares.shape[-1], of.logits.shape[-1] - 1)))
        for _ in range(5):
            tried = torch.linspace(low, high, _SHARES, dtype=torch.float64)
            cost = costs(tried)
            best = (cost <= cost.min()).nonzero().squeeze(-1).cpu()  # often equal over an interval
            low, high = (float(tried[i.clamp(0, _SHARES - 1)]) for i in (best[0] - 1, best[-1] + 1))
        value = float(tried[best[len(best) // 2]])
        digits = (1, 2, 3) if cut == "top-p" else (-2, -1, 0)
        value = _short(value, lambda v: float(costs(torch.tensor([v], dtype=torch.float64))), digits)
        return float(cost.min()), Setting(heat, cut, value)

    if heat is not None:
        return at(heat)[1]
    best = int(np.argmin([at(float(heat))[0] for heat in _HEATS]))
    low, high = float(_HEATS[max(0, best - 1)]), float(_HEATS[min(len(_HEATS) - 1, best + 1)])
    golden = (5**0.5 - 1) / 2
    left, right = high - golden * (high - low), low + golden * (high - low)
    costs = [at(left)[0], at(right)[0]]
    for _ in range(_STEPS.get(of.logits.dtype, _STEPS_LEAST)):
        if costs[0] < costs[1]:
            high, right, costs[1] = right, left, costs[0]
            left = high - golden * (high - low)
            costs[0] = at(left)[0]
        else:
            low, left, costs[0] = left, right, costs[1]
            right = low + golden * (high - low)
            costs[1] = at(right)[0]
    return at(_short((low + high) / 2, lambda v: at(v)[0]))[1]


def _short(value: float, cost: Callable[[float], float], digits: Sequence[int] = (1, 2, 3)) -> float:
    most = 1.01 * cost(value)
    return next((short for n in digits if cost(short := round(value, n)) <= most), value)


def _forwards(model: Any, wide: Any, older: Any, seen: _Seen, plain: Spec, found: _Found) -> Iterator[MismatchKind]:
    """Hypotheses that need another forward: on each side, what is left of d without what the forward changes."""

    def sides(layer: str, cause: str, fitted: str, other: Logprobs, base: Logprobs) -> Iterator[MismatchKind]:
        known = np.isfinite(other)
        change = (other.astype(np.float64) - base)[known]
        for side, sign in _SIDES.items() if known.mean() >= 0.5 else ():
            given, d = seen.given(side)[known], seen.distance[known]
            gained = float((_same(given, other[known]) - _same(given, seen.own[known])).mean())
            figures = {"exactly": max(0.0, gained), "k3": _k3(d)}
            yield found(layer, cause, side, fitted, _k3(d - sign * change), **figures)

    def exact(fault: Fault = NO_FAULT, spec: Spec = _PLAIN, padded: Sequence[int] = ()) -> Logprobs:
        return score(wide, seen.rollouts, spec, fault, padded=padded, formula=seen.base.formula)

    def rounded(of: Any = model, spec: Spec = plain) -> Logprobs:
        return score(of, seen.rollouts, spec, padded=seen.padded, formula=seen.base.formula)

    for name in ("gap", "restart", "double"):
        yield from sides("semantic", "positions", name, exact(Fault(positions=name)), seen.exact)
    if plain.padding != "packed":
        unmasked = exact(Fault(mask=False), replace(plain, padding="left"), seen.padded)
        yield from sides("semantic", "padding mask", "padding on the left is attended to", unmasked, seen.exact)
    for name, fault in {
        "its first token is missing": Fault(front=1), "its first 2 tokens are missing": Fault(front=2),
        "its first token is there twice": Fault(front=-1), "its last token is missing": Fault(back=1),
        "its last 2 tokens are missing": Fault(back=2),
    }.items():  # fmt: skip
        yield from sides("semantic", "template", name, exact(fault), seen.exact)
    for scale in ("row", "tensor", "block"):
        with weights_changed(wide, partial(rounded_to_fp8, scale=scale)):
            coarser = exact()
        yield from sides("weights", "fp8 weights", f"a scale a {scale}", coarser, seen.exact)
    narrow = _format_of(model) in ("bfloat16", "float16")
    cast, single = (_format_of(model), wide) if narrow else ("bfloat16", model)
    mixed = rounded(single, replace(plain, autocast=cast))
    yield from sides("format", "autocast over float32 weights", cast, mixed, seen.own)
    if narrow:
        yield from sides("format", "computed in float32", cast, rounded(wide), seen.own)
        yield from sides("format", "a float32 head", cast, rounded(model, replace(plain, head="float32")), seen.own)
    if older is not None:
        cause, what = difference_of(model, older)
        yield from sides("weights", cause, what, rounded(older), seen.own)


def difference_of(model: Any, older: Any) -> tuple[str, str]:
    """Whether other weights differ by matrices of low rank, as an adapter's do, or by all directions."""
    theirs = dict(older.named_parameters())
    shares: list[float] = []
    for name, weight in model.named_parameters():
        delta = weight.detach().float() - theirs[name].detach().float()
        if weight.dim() == 2 and len(shares) < 8 and float(delta.norm()) > 0:
            top = torch.svd_lowrank(delta, q=max(1, min(_RANK, min(delta.shape) // 4)))[1]
            shares.append(float(top.square().sum() / delta.square().sum()))
    if not shares:
        return "stale weights", "the other weights are the same"
    share = float(np.median(shares))
    what = f"--older, whose difference has {share:.0%} of its energy in a quarter of the rank"
    return "an unmerged LoRA" if share >= _LOW else "stale weights", what
