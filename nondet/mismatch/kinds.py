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

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
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
_STEPS = {torch.float32: 14, torch.float64: 32}  # of a golden section around the best of these, by the wider format
_FEW = 100  # tokens: for fewer, a less plausible setting may be nearer by chance
_FAR = 10.0  # times rounding: then no other setting of both sides is the reason
_SHARES = 64  # values of top-p that are tried at once, five times between ever closer ends
_CUTS = ("top-k", "top-p")
# What both sides may share, the simplest first: a cut, and the temperature (None: fitted).
_FORMS = (("", 1.0), ("", None), ("top-p", 1.0), ("top-k", 1.0), ("top-p", None), ("top-k", None))

# What one side may do to tokens and positions: cause, what it is in words, and how the forward has it.
_FAULTS = (
    *(("positions", name, Fault(positions=name)) for name in ("gap", "restart", "double")),
    ("padding mask", "padding on the left is attended to", Fault(mask=False)),
    ("template", "its first token is missing", Fault(front=1)),
    ("template", "its first 2 tokens are missing", Fault(front=2)),
    ("template", "its first token is there twice", Fault(front=-1)),
    ("template", "its last token is missing", Fault(back=1)),
    ("template", "its last 2 tokens are missing", Fault(back=2)),
)


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
        return lambda x, ids: FORMULAS["log_softmax"](x / self.heat, ids)


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


def fit(
    model: Any, rollouts: Sequence[Rollout], spec: Spec, sampler: Logprobs, trainer: Logprobs, impl: str,
    older: Any = None,
) -> Iterator[MismatchFloor | MismatchKind]:  # fmt: skip
    """The floor, then each hypothesis on each side, with what it leaves. `model` is in the sampler's format, on its
    device; `spec` the trainer's layout; `sampler` and `trainer` [n] float32 of all rollouts; `older` a model of the
    same form with other weights that a side may have had, or None."""
    of = _Fit(model, rollouts, spec, {"sampler": sampler, "trainer": trainer}, impl)
    yield of.floor
    explained = of.floor.k3 <= ABOVE * of.floor.floor
    settings = [of.by_setting("temperature", "", None), *(of.by_setting(cut, cut, of.base.heat) for cut in _CUTS)]
    for kind in chain(of.by_format(), of.by_formula(), *settings, of.by_forwards(older)):
        explained |= kind.exactly >= CERTAIN or kind.left <= ABOVE * kind.floor
        yield kind
    off = [side for side in of.given if getattr(of.floor, side) > ABOVE * of.floor.own]
    for cut in () if explained else _CUTS:  # two values are fitted where one explains nothing
        yield from of.by_setting(f"temperature and {cut}", cut, None, off)


class _Fit:
    """A share of the rollouts, whose logprobs both sides have (setting `base`), and the model's own of them and of the
    rows `rows` the logits: plain (`own`, `near`) and in the wider format (`exact`, `far`)."""

    def __init__(self, model: Any, rollouts: Sequence[Rollout], spec: Spec, sides: Mapping[str, Logprobs], impl: str):
        self.model, self.impl, self.plain = model, impl, Spec(padding=spec.padding, micro=spec.micro)
        self.format = str(next(model.parameters()).dtype).removeprefix("torch.")
        wider = "float64" if self.format == "float32" else "float32"
        self.wide = copy.deepcopy(model).to(getattr(torch, wider))
        distance = sides["trainer"].astype(np.float64) - sides["sampler"]
        chosen, whole = share_of(rollouts), by_rollout(np.arange(len(distance)), rollouts)
        if _k3(distance) > _LIKE * _k3(distance[np.concatenate([whole[i] for i in chosen])]):
            most = int(np.argmax([_k3(distance[mine]) * len(mine) for mine in whole]))
            chosen = sorted({*chosen, most})  # also the one that adds most
        tokens, lengths = np.concatenate([whole[i] for i in chosen]), widths(rollouts, spec.micro)
        self.rollouts, self.padded = [rollouts[i] for i in chosen], [lengths[i] for i in chosen]
        self.given = {side: values[tokens] for side, values in sides.items()}
        self.distance, self.base = distance[tokens], Setting()
        self.stride = max(1, -(-len(tokens) * model.config.get_text_config().vocab_size // _LOGITS))
        self.rows = np.arange(0, len(tokens), self.stride)
        self.own, self.near = self._forward(model, self.plain, self.padded)
        self.exact, self.far = self._forward(self.wide, _PLAIN, ())
        if (base := self._common()) != Setting():
            self.base = base
            self.own, self.exact = self._rounded(), self._exact()
        away = {side: _k3(x.astype(np.float64) - self.exact) for side, x in (self.given | {"own": self.own}).items()}
        self.floor = MismatchFloor(
            impl=impl,
            tokens=len(tokens),
            rollouts=len(chosen),
            k3=_k3(self.distance),
            floor=2 * away["own"],
            wide=f"{wider}{self.base}",
            **away,
        )

    def _forward(self, of: Any, spec: Spec, padded: Sequence[int]) -> tuple[Logprobs, _Logits]:
        """All logprobs, and the logits of some rows."""
        kept, count = list[tuple[torch.Tensor, torch.Tensor]](), 0

        def keep(values: torch.Tensor, after: torch.Tensor) -> None:
            nonlocal count
            first = -count % self.stride
            kept.append((values[first :: self.stride].clone(), after[first :: self.stride]))
            count += len(values)

        values = score(of, self.rollouts, spec, padded=padded, keep=keep)
        return values, _Logits(*map(torch.cat, zip(*kept, strict=True)))

    def _exact(self, fault: Fault = NO_FAULT) -> Logprobs:
        """In the wider format, in which no padding is needed but where it is the fault."""
        spec, padded = (_PLAIN, ()) if fault.mask else (replace(self.plain, padding="left"), self.padded)
        return score(self.wide, self.rollouts, spec, fault, padded=padded, formula=self.base.formula)

    def _rounded(self, of: Any = None, **changes: Any) -> Logprobs:
        of, spec = self.model if of is None else of, replace(self.plain, **changes)
        return score(of, self.rollouts, spec, padded=self.padded, formula=self.base.formula)

    def _rounding(self, setting: Setting) -> float:
        """K3 between the model's own forward and the wider one, under a setting."""
        return _k3((self.near.logprobs(setting) - self.far.logprobs(setting)).cpu().numpy())

    def _found(self, layer: str, cause: str, side: str, fitted: str, left: float, **figures: float) -> MismatchKind:
        given = {"k3": self.floor.k3, "floor": self.floor.floor, "exactly": 0.0} | figures
        return MismatchKind(impl=self.impl, layer=layer, cause=cause, side=side, fitted=fitted, left=left, **given)

    def _common(self) -> Setting:
        """The setting of both sides' logprobs: the simplest at which both are near, or one is and the other is far."""
        sides = [torch.from_numpy(x[self.rows]).to(self.far.top.device).double() for x in self.given.values()]
        loose: dict[bool, Setting] = {}
        for cut, heat in _FORMS:
            if loose and cut and heat is None and len(sides[0]) > _FEW:
                break
            for side in sides if cut or heat is None else sides[:1]:
                setting = _nearest(self.far, side, cut, heat)
                rounding, logprobs = self._rounding(setting), self.far.logprobs(setting)
                near, far = sorted(_k3((x - logprobs).cpu().numpy()) / max(rounding, 1e-300) for x in sides)
                if near <= ABOVE and (far <= ABOVE or (far > _FAR and not loose)):  # a simpler one may have one near
                    return setting
                if near <= ABOVE or far <= margin(len(sides[0])):  # with few tokens another setting may be nearer
                    loose.setdefault(far <= margin(len(sides[0])), setting)
        return loose.get(True) or loose.get(False) or Setting()

    def by_format(self) -> Iterator[MismatchKind]:
        """Hypotheses: logprobs that were rounded on one side."""
        for side, other in (("sampler", "trainer"), ("trainer", "sampler")):
            name = coarse(self.given[side])
            if name and name != coarse(self.given[other]):
                rounded = torch.from_numpy(self.given[other]).to(getattr(torch, name)).double().numpy()
                left = _k3(rounded - self.given[side].astype(np.float64))
                yield self._found("format", "rounded logprobs", side, name, left, exactly=1.0)

    def by_formula(self) -> Iterator[MismatchKind]:
        """Hypotheses: both sides have the bits of the same logits, by two formulas."""
        logits, ids = self.near.logits / self.base.heat, self.near.ids.squeeze(-1)
        values = {name: f(logits, ids).cpu().numpy() for name, f in FORMULAS.items() if name != "low-precision"}
        same, by = dict[str, Floats](), dict[str, str]()
        for side, given in self.given.items():
            alike = [(_same(given[self.rows], v), name) for name, v in values.items()]
            same[side], by[side] = max(alike, key=lambda one: (one[0].mean(), one[1]))
        share = float(min(x.mean() for x in same.values()))
        differ = _same(*self.given.values()).mean() < 1 and _same(*(values[name] for name in by.values())).mean() < 1
        if differ and share >= CERTAIN:
            left = _k3(np.where(same["sampler"] * same["trainer"], 0.0, self.distance[self.rows]))
            named = f"{by['trainer']} for {by['sampler']}"
            yield self._found("formula", "another formula", "trainer", named, left, exactly=share)

    def by_setting(
        self, cause: str, cut: str, heat: float | None, sides: Sequence[str] = tuple(_SIDES)
    ) -> Iterator[MismatchKind]:
        """What a setting leaves that was fitted to one side, by the other side's logprobs and d."""
        distance, base = self.distance[self.rows], self.far.logprobs(self.base)
        for side in sides:
            sign = _SIDES[side]
            setting = _nearest(self.far, base + sign * torch.from_numpy(distance).to(base), cut, heat)
            change = (self.far.logprobs(setting) - base).cpu().numpy()
            fitted = [f"{setting.heat:.4g}"] * (heat is None) + [f"{setting.value:.4g}"] * bool(cut)
            rounding = self._rounding(self.base) + self._rounding(setting)
            figures = {"k3": _k3(distance), "floor": rounding}
            yield self._found("semantic", cause, side, ", ".join(fitted), _k3(distance - sign * change), **figures)

    def by_forwards(self, older: Any) -> Iterator[MismatchKind]:
        """Hypotheses that need another forward: on each side, what is left of d without what the forward changes."""
        for layer, cause, fitted, other, base in self._forwards(older):
            known = np.isfinite(other)
            change, d = (other.astype(np.float64) - base)[known], self.distance[known]
            for side, sign in _SIDES.items() if known.mean() >= 0.5 else ():
                given = self.given[side][known]
                gained = float((_same(given, other[known]) - _same(given, self.own[known])).mean())
                figures = {"exactly": max(0.0, gained), "k3": _k3(d)}
                yield self._found(layer, cause, side, fitted, _k3(d - sign * change), **figures)

    def _forwards(self, older: Any) -> Iterator[tuple[str, str, str, Logprobs, Logprobs]]:
        """Layer, cause, what is fitted, the logprobs with it and without it."""
        for cause, what, fault in _FAULTS:
            if fault.mask or self.plain.padding != "packed":
                yield "semantic", cause, what, self._exact(fault), self.exact
        for scale in ("row", "tensor", "block"):
            with weights_changed(self.wide, partial(rounded_to_fp8, scale=scale)):
                yield "weights", "fp8 weights", f"a scale a {scale}", self._exact(), self.exact
        narrow = self.format in ("bfloat16", "float16")
        cast, single = (self.format, self.wide) if narrow else ("bfloat16", self.model)
        yield "format", "autocast over float32 weights", cast, self._rounded(single, autocast=cast), self.own
        if narrow:
            yield "format", "computed in float32", cast, self._rounded(self.wide), self.own
            yield "format", "a float32 head", cast, self._rounded(head="float32"), self.own
        if older is not None:
            yield "weights", *difference_of(self.model, older), self._rounded(older), self.own


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
    least, best = min((at(float(heat))[0], i) for i, heat in enumerate(_HEATS))
    low, middle, high = (float(_HEATS[min(max(0, i), len(_HEATS) - 1)]) for i in (best - 1, best, best + 1))
    for _ in range(_STEPS[of.logits.dtype]):  # the wider part between the middle and an end is divided
        tried = middle + (3 - 5**0.5) / 2 * (max(high, low, key=lambda end: abs(end - middle)) - middle)
        if (cost := at(tried)[0]) < least:
            tried, middle, least = middle, tried, cost
        low, high = (tried, high) if tried < middle else (low, tried)
    return at(_short(middle, lambda v: at(v)[0]))[1]


def _short(value: float, cost: Callable[[float], float], digits: Sequence[int] = (1, 2, 3)) -> float:
    most = 1.01 * cost(value)
    return next((short for n in digits if cost(short := round(value, n)) <= most), value)


def difference_of(model: Any, older: Any) -> tuple[str, str]:
    """Whether other weights differ by matrices of low rank, as an adapter's do, or by all directions."""
    theirs, shares = dict(older.named_parameters()), list[float]()
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
