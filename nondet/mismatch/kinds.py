"""The kind of a mismatch: the model computes each hypothesis, which is fitted and subtracted from what was seen.

Let d be the trainer's logprob minus the sampler's, and c the change of a logprob under a hypothesis, computed by a
forward of its own. Then d is c plus rounding where the trainer does so, and -c plus rounding where the sampler does. K3
of d - c (or d + c) shows how much of the mismatch the hypothesis explains. Rounding is not a hypothesis but the floor:
the distance of the model's own forward from one in a wider format, one share for each side. The effect of weights,
tokens and positions is computed in the wider format, in which c has no rounding of its own; the effect of a format in
the model's.

A temperature, top-k, min-p or top-p that both sides have is not a mismatch: then all of this is about logprobs under
it. Tokens at the edge of what it keeps are left out, where rounding decides which side keeps one token more.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from nondet.core.records import MismatchFloor, MismatchKind
from nondet.mismatch.figures import ABOVE, Floats, Logprobs, coarse, explains, margin
from nondet.mismatch.rollouts import WHOLE, Rollout, Setting, by_rollout
from nondet.mismatch.trainer import (
    FORMULAS,
    NO_FAULT,
    Fault,
    Formula,
    Spec,
    at_heat,
    rounded_to_fp8,
    score,
    weights_changed,
    widths,
)

_TOKENS, _ROLLOUTS = 1024, 24  # that hypotheses are computed for, at least one rollout
_LIKE = 1.5  # times their K3: up to this K3 of all rollouts they represent all
_LOGITS = 2**26  # numbers of logits that are kept for fits
_RANK, _LOW = 64, 0.7  # of a difference of weights: the share of its energy in this many directions
CERTAIN = 0.9  # of tokens whose bits a hypothesis reproduces
_PLAIN = Spec()
_SIDES = {"trainer": 1.0, "sampler": -1.0}
_FEW = 100  # tokens: for fewer, a less plausible setting may be nearer by chance
_FAR = 10.0  # times rounding: then no other setting of both sides is the reason
_EDGE = 16.0  # times what rounding changes in a logprob: a token that is that near to a cut may be on either side of it
_HEAT = "temperature"
# What both sides may share, the simplest first.
_FORMS = ((_HEAT,), ("top-p",), ("top-k",), ("min-p",), (_HEAT, "top-p"), (_HEAT, "top-k"), (_HEAT, "min-p"))

_CUTS = ("top-k", "min-p", "top-p")
_NONE = {"temperature": 1.0, "top-k": 2.0**31, "min-p": 1e-300, "top-p": 1.0}  # values that change nothing
_CHUNK = 2**22  # of logits at once
_COLUMNS = 2048  # of the largest logits that cuts are fitted in
_HEATS = np.geomspace(0.25, 4.0, 11)
_STEPS = {torch.float32: 14, torch.float64: 32}  # of a golden section around the best of these, by the wider format
_TRIED = 64  # values of a cut at once, five times between ever closer ends
_DIGITS = {"top-k": (-2, -1, 0), "min-p": (1, 2, 3, 4)}  # of a short value, the fewest first; else 1 to 3
_SURE = 0.9  # of rows: where fewer are off a cut's edge, logits are so coarse that rows at an edge are like the others

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


class _Logits:
    """Rows of logits [k, V] in the format that they were computed in, and the tokens [k] that followed them."""

    def __init__(self, logits: torch.Tensor, ids: torch.Tensor) -> None:
        self.logits, self.ids = logits, ids[:, None]
        self.top, ids_of_top = logits.topk(min(_COLUMNS, logits.shape[-1]), -1)
        self.most = ids_of_top[:, :1]

    def columns(self, each: Sequence[Setting]) -> dict[str, torch.Tensor]:
        """Name -> values [k, 1] float64 of the settings of each row, or the one of all."""
        values = {name: [float(one.get(name, _NONE[name])) for one in each] for one in each for name in one}
        values |= {} if "temperature" in values else {"temperature": [1.0] * len(each)}
        made = {n: torch.tensor(of, dtype=torch.float64, device=self.top.device) for n, of in values.items()}
        return {name: of[:, None].expand(len(self.top), 1) for name, of in made.items()}

    def logprobs(self, each: Sequence[Setting], edge: float = 0.0) -> torch.Tensor:
        """[k] float64, under the setting of each row, or the one of all; a token that is cut off is divided by the kept
        share, too. NaN where probabilities that are off by a share of `edge` would keep other tokens, unless that holds
        of many rows."""
        cuts = self.columns(each)
        rows = _Heated(self, cuts.pop("temperature"))
        if not cuts:
            return rows.logprobs
        values = rows.logprobs - rows.kept(cuts).squeeze(-1).log()
        if edge:
            less, more = ({"top-p": 1 - by, "min-p": 1 + by, "top-k": 1.0} for by in (edge, -edge))
            few, many = (rows.kept({n: x * by[n] for n, x in cuts.items()}) for by in (less, more))
            sure = (many <= few * (1 + 4 * edge)).squeeze(-1)
            values = torch.where(sure, values, torch.nan) if sure.double().mean() >= _SURE else values
        return values


def _heated(x: torch.Tensor, heat: torch.Tensor) -> torch.Tensor:
    """Logits at temperatures [k, 1], divided and rounded as a division by a number does it."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) / heat.to(wide)).to(x.dtype)


class _Heated:
    """Rows of logits at temperatures [k, 1]: the logprobs of their tokens [k] float64, and what cuts keep."""

    def __init__(self, of: _Logits, heat: torch.Tensor) -> None:
        sums, size = [], max(1, _CHUNK // of.logits.shape[-1])
        for part, most, by in zip(*(x.split(size) for x in (of.logits, of.most, heat)), strict=True):
            x = _heated(part, by)  # the sum in float32 is relative to its largest term, and several times faster
            sums.append(x.gather(-1, most).double() - x.float().log_softmax(-1).gather(-1, most).double())
        total = torch.cat(sums)
        self.logprobs = (_heated(of.logits.gather(-1, of.ids), heat).double() - total).squeeze(-1)
        self._top = lambda: _heated(of.top, heat).double() - total

    @cached_property
    def _likely(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the most likely tokens, in order: how far each is behind the first, and cumulative probabilities, [k, C]
        float64."""
        top = self._top()
        return top[:, :1] - top, top.exp().cumsum(-1).clamp(max=1.0)

    def kept(self, cuts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """[k, n]: the share of what cuts with values [k, 1], one of them [k, n], keep. As in vLLM, top-k keeps all that
        equal the last, and top-p is of the share that the other cuts keep."""
        behind, shares = self._likely
        reach, last = torch.full_like(shares[:, :1], torch.inf), shares.shape[-1] - 1
        if (count := cuts.get("top-k")) is not None:
            at = behind.gather(-1, (count.round().long() - 1).clamp(0, last))
            reach = torch.where(count <= last, at, torch.inf)
        if (least := cuts.get("min-p")) is not None:
            reach = reach.minimum(-least.log().clamp(max=0))
        ends = torch.searchsorted(behind, reach.contiguous(), right=True) - 1
        mass = torch.where(reach.isinf(), 1.0, shares.gather(-1, ends))
        if (share := cuts.get("top-p")) is None:
            return mass
        ends = torch.searchsorted(shares, (wanted := share * mass).contiguous())
        # with a larger vocabulary the nucleus may go beyond these columns
        return torch.where(ends <= last, shares.gather(-1, ends.clamp(max=last)), wanted)


def _formula_of(setting: Setting, edge: float) -> Formula:
    """From logits to logprobs; NaN at the edge of a cut, where rounding decides what is kept."""
    if setting.keys() & {*_CUTS}:
        return lambda logits, ids: _Logits(logits, ids).logprobs([setting], edge)
    return partial(at_heat, FORMULAS["log_softmax"], setting.get("temperature", 1.0))


def _nearest(of: _Logits, wanted: torch.Tensor, base: Setting, names: Sequence[str]) -> Setting:
    """`base` with other values of these names, of which at most one is a cut, whose logprobs are nearest by squares."""
    cut = next((name for name in names if name in _CUTS), "")

    def at(heat: float) -> tuple[float, Setting]:
        setting = {name: value for name, value in base.items() if name != "temperature"}
        setting |= {"temperature": heat} if heat != 1 else {}
        others = of.columns([setting])
        rows = _Heated(of, others.pop("temperature"))
        above = (wanted - rows.logprobs)[:, None]

        def costs(values: torch.Tensor) -> torch.Tensor:
            cuts = others | ({cut: values.to(above)[None].expand(len(above), -1)} if cut else {})
            return ((above + rows.kept(cuts).log()) if cuts else above).square().nanmean(0)

        if not cut:
            return float(costs(above)[0]), setting
        high = float(min(of.top.shape[-1], of.logits.shape[-1] - 1)) if cut == "top-k" else 1.0
        low, power = {"top-k": (1.0, 1), "min-p": (0.05, 3), "top-p": (0.02, 1)}[cut]  # min-p by its cube root
        for _ in range(5):
            tried = torch.linspace(low, high, _TRIED, dtype=torch.float64)
            cost = costs(tried**power)
            best = (cost <= cost.min()).nonzero().squeeze(-1).cpu()  # often equal over an interval
            low, high = (float(tried[i.clamp(0, _TRIED - 1)]) for i in (best[0] - 1, best[-1] + 1))
        value = float(tried[best[len(best) // 2]]) ** power
        value = _short(value, lambda v: float(costs(torch.tensor([v], dtype=torch.float64))[0]), cut)
        return float(cost.min()), setting | {cut: value}

    if "temperature" not in names:
        return at(base.get("temperature", 1.0))[1]
    least, best = min((at(float(heat))[0], i) for i, heat in enumerate(_HEATS))
    low, middle, high = (float(_HEATS[min(max(0, i), len(_HEATS) - 1)]) for i in (best - 1, best, best + 1))
    for _ in range(_STEPS[of.logits.dtype]):  # the wider part between the middle and an end is divided
        tried = middle + (3 - 5**0.5) / 2 * (max(high, low, key=lambda end: abs(end - middle)) - middle)
        if (cost := at(tried)[0]) < least:
            tried, middle, least = middle, tried, cost
        low, high = (tried, high) if tried < middle else (low, tried)
    return at(_short(middle, lambda v: at(v)[0]))[1]


def _short(value: float, cost: Callable[[float], float], name: str = "") -> float:
    most, digits = 1.01 * cost(value), _DIGITS.get(name, (1, 2, 3))
    return next((short for n in digits if (short := round(value, n)) > 0 and cost(short) <= most), value)


def _k3(distance: Floats) -> float:
    """Over the tokens that have a distance."""
    distance = distance[~np.isnan(distance)]
    with np.errstate(over="ignore"):
        return float(np.mean(np.maximum(np.expm1(distance) - distance, 0.0))) if len(distance) else 0.0


def _alike(settings: Sequence[Setting]) -> bool:
    return all(setting == settings[0] for setting in settings)


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
    settings = (of.by_setting((name,)) for name in (_HEAT, *_CUTS))
    for kind in chain(of.by_format(), of.by_formula(), of.by_lines(), *settings, of.by_forwards(older)):
        explained |= kind.exactly >= CERTAIN or explains(kind.k3, kind.left, kind.floor)
        yield kind
    off = [side for side in of.given if getattr(of.floor, side) > ABOVE * of.floor.own]
    for cut in () if explained else _CUTS:  # two values are fitted where one explains nothing
        yield from of.by_setting((_HEAT, cut), off)


class _Fit:
    """A share of the rollouts, whose logprobs both sides have (under each one's setting in `base`), and the model's own
    of them and of the rows `rows` the logits: plain (`own`, `near`) and in the wider format (`exact`, `far`)."""

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
        self.distance = distance[tokens]
        self.stride = max(1, -(-len(tokens) * model.config.get_text_config().vocab_size // _LOGITS))
        self.rows = np.arange(0, len(tokens), self.stride)
        self.of_rows = np.repeat(np.arange(len(chosen)), [len(r.drawn) for r in self.rollouts])[self.rows]
        self.near, self.far = self._logits(model, self.plain, self.padded), self._logits(self.wide, _PLAIN, ())
        self.edge = 0.0
        self.base: Sequence[Setting] = [WHOLE] * len(chosen)
        self.edge = _EDGE * math.sqrt(2 * self._rounding(self.base))
        self.base = self._common()
        self.formulas = [_formula_of(one, self.edge / one.get(_HEAT, 1.0)) for one in self.base]
        self.own, self.exact = self._rounded(), self._exact()
        self.distance = np.where(np.isnan(self.exact), np.nan, self.distance)
        away = {side: _k3(x.astype(np.float64) - self.exact) for side, x in (self.given | {"own": self.own}).items()}
        self.floor = MismatchFloor(
            impl=impl,
            tokens=len(tokens),
            rollouts=len(chosen),
            k3=_k3(self.distance),
            floor=2 * away["own"],
            wide=f"{wider}{_text(self.base)}",
            **away,
        )

    def _logits(self, of: Any, spec: Spec, padded: Sequence[int]) -> _Logits:
        """The logits of `rows`."""
        kept, count = list[tuple[torch.Tensor, torch.Tensor]](), 0

        def keep(values: torch.Tensor, after: torch.Tensor) -> None:
            nonlocal count
            first = -count % self.stride
            kept.append((values[first :: self.stride].clone(), after[first :: self.stride]))
            count += len(values)

        score(of, self.rollouts, spec, padded=padded, keep=keep)
        return _Logits(*map(torch.cat, zip(*kept, strict=True)))

    def _under(self, settings: Sequence[Setting], of: _Logits | None = None) -> torch.Tensor:
        """The logprobs of `rows`, in the wider format unless other logits are given."""
        each = settings[:1] if _alike(settings) else [settings[i] for i in self.of_rows]
        return (of or self.far).logprobs(each, self.edge / min(one.get(_HEAT, 1.0) for one in each))

    def _exact(self, fault: Fault = NO_FAULT) -> Logprobs:
        """In the wider format, in which no padding is needed but where it is the fault."""
        spec, padded = (_PLAIN, ()) if fault.mask else (replace(self.plain, padding="left"), self.padded)
        return score(self.wide, self.rollouts, spec, fault, padded=padded, formulas=self.formulas)

    def _rounded(self, of: Any = None, **changes: Any) -> Logprobs:
        of, spec = self.model if of is None else of, replace(self.plain, **changes)
        return score(of, self.rollouts, spec, padded=self.padded, formulas=self.formulas)

    def _rounding(self, settings: Sequence[Setting]) -> float:
        """K3 between the model's own forward and the wider one, under settings of the rollouts."""
        return _k3((self._under(settings, self.near) - self._under(settings)).cpu().numpy())

    def _found(self, layer: str, cause: str, side: str, fitted: str, left: float, **figures: float) -> MismatchKind:
        given = {"k3": self.floor.k3, "floor": self.floor.floor, "exactly": 0.0} | figures
        return MismatchKind(impl=self.impl, layer=layer, cause=cause, side=side, fitted=fitted, left=left, **given)

    def _common(self) -> Sequence[Setting]:
        """The setting of both sides' logprobs: the simplest at which both are near, or one is and the other is far."""
        sides = [torch.from_numpy(x[self.rows]).to(self.far.top.device).double() for x in self.given.values()]
        loose: dict[bool, Sequence[Setting]] = {}
        for settings, names in self._settings(sides):
            if loose and len(names) > 1 and len(sides[0]) > _FEW:
                break
            rounding, logprobs = self._rounding(settings), self._under(settings)
            near, far = sorted(_k3((x - logprobs).cpu().numpy()) / max(rounding, 1e-300) for x in sides)
            if near <= ABOVE and (far <= ABOVE or (far > _FAR and not loose)):  # a simpler one may have one near
                return settings
            if near <= ABOVE or far <= margin(len(sides[0])):  # with few tokens another setting may be nearer
                loose.setdefault(far <= margin(len(sides[0])), settings)
        return loose.get(True) or loose.get(False) or self.base

    def _settings(self, sides: Sequence[torch.Tensor]) -> Iterator[tuple[Sequence[Setting], Sequence[str]]]:
        """What both sides may share, the simplest first, and what of it is fitted to one of them."""
        yield from ((settings, ()) for settings in (self.base, *of_lines(self.rollouts)))
        for names in _FORMS:
            for side in sides:
                yield [_nearest(self.far, side, WHOLE, names)] * len(self.rollouts), names

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
        heats = self.near.columns([self.base[i] for i in self.of_rows])[_HEAT]
        logits, ids = _heated(self.near.logits, heats), self.near.ids.squeeze(-1)
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

    def by_lines(self) -> Iterator[MismatchKind]:
        """What a setting leaves that the lines have, where one side's logprobs are under it."""
        whole = [] if _alike(self.base) else [[WHOLE] * len(self.base)]  # else a fit finds it
        for settings in (*whole, *of_lines(self.rollouts)):
            pairs = [*zip(settings, self.base, strict=True)]
            names = [name for name in (_HEAT, *_CUTS) if any(one.get(name) != base.get(name) for one, base in pairs)]
            for side in _SIDES if names else ():
                yield self._of_setting(" and ".join(names), side, settings, _text(settings).removeprefix(" at "))

    def by_setting(self, names: Sequence[str], sides: Sequence[str] = tuple(_SIDES)) -> Iterator[MismatchKind]:
        """What a setting leaves that was fitted to one side, by the other side's logprobs and d."""
        for side in sides if _alike(self.base) else ():
            base = self._under(self.base)
            wanted = base + _SIDES[side] * torch.from_numpy(self.distance[self.rows]).to(base)
            setting = _nearest(self.far, wanted, self.base[0], names)
            fitted = ", ".join(f"{setting.get(name, 1.0):.4g}" for name in names)
            yield self._of_setting(" and ".join(names), side, [setting] * len(self.base), fitted)

    def _of_setting(self, cause: str, side: str, settings: Sequence[Setting], fitted: str) -> MismatchKind:
        change = (self._under(settings) - self._under(self.base)).cpu().numpy()
        distance = np.where(np.isnan(change), np.nan, self.distance[self.rows])
        figures = {"k3": _k3(distance), "floor": self._rounding(self.base) + self._rounding(settings)}
        return self._found("semantic", cause, side, fitted, _k3(distance - _SIDES[side] * change), **figures)

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


def of_lines(rollouts: Sequence[Rollout]) -> list[Sequence[Setting]]:
    """The settings that the lines of the rollouts have, of each: the temperature by itself, and all."""
    every: Sequence[Setting] = [r.setting for r in rollouts]
    heats: Sequence[Setting] = [{name: value for name, value in one.items() if name == _HEAT} for one in every]
    return [of for of in (heats, every)[heats == every :] if any(of)]


def _text(settings: Sequence[Setting]) -> str:
    values = [f"{name} {value:.4g}" for name, value in settings[0].items()]
    return (f" at {', '.join(values)}" if values else "") if _alike(settings) else " at the settings of each line"


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
