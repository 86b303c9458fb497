"""The logprobs that logits have under a temperature, top-k, min-p and top-p, and the setting whose logprobs are nearest
to given ones. Every cut keeps the first of the tokens by their probability."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial

import numpy as np
import torch

from nondet.mismatch.rollouts import Setting
from nondet.mismatch.trainer import FORMULAS, Formula, at_heat

CUTS = ("top-k", "min-p", "top-p")
_NONE = {"temperature": 1.0, "top-k": 2.0**31, "min-p": 1e-300, "top-p": 1.0}  # values that change nothing
_CHUNK = 2**22  # of logits at once
_COLUMNS = 2048  # of the largest logits that cuts are fitted in
_HEATS = np.geomspace(0.25, 4.0, 11)
_STEPS = {torch.float32: 14, torch.float64: 32}  # of a golden section around the best of these, by the wider format
_TRIED = 64  # values of a cut at once, five times between ever closer ends
_DIGITS = {"top-k": (-2, -1, 0), "min-p": (1, 2, 3, 4)}  # of a short value, the fewest first; else 1 to 3
_SURE = 0.9  # of rows: where fewer are off a cut's edge, logits are so coarse that rows at an edge are like the others


class Logits:
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
        rows = Heated(self, cuts.pop("temperature"))
        if not cuts:
            return rows.logprobs
        values = rows.logprobs - rows.kept(cuts).squeeze(-1).log()
        if edge:
            less, more = ({"top-p": 1 - by, "min-p": 1 + by, "top-k": 1.0} for by in (edge, -edge))
            few, many = (rows.kept({n: x * by[n] for n, x in cuts.items()}) for by in (less, more))
            sure = (many <= few * (1 + 4 * edge)).squeeze(-1)
            values = torch.where(sure, values, torch.nan) if sure.double().mean() >= _SURE else values
        return values


def heated(x: torch.Tensor, heat: torch.Tensor) -> torch.Tensor:
    """Logits at temperatures [k, 1], divided and rounded as a division by a number does it."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) / heat.to(wide)).to(x.dtype)


class Heated:
    """Rows of logits at temperatures [k, 1]: the logprobs of their tokens [k] float64, and what cuts keep."""

    def __init__(self, of: Logits, heat: torch.Tensor) -> None:
        sums, size = [], max(1, _CHUNK // of.logits.shape[-1])
        for part, most, by in zip(*(x.split(size) for x in (of.logits, of.most, heat)), strict=True):
            x = heated(part, by)  # the sum in float32 is relative to its largest term, and several times faster
            sums.append(x.gather(-1, most).double() - x.float().log_softmax(-1).gather(-1, most).double())
        total = torch.cat(sums)
        self.logprobs = (heated(of.logits.gather(-1, of.ids), heat).double() - total).squeeze(-1)
        self._top = lambda: heated(of.top, heat).double() - total

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


def formula_of(setting: Setting, edge: float) -> Formula:
    """From logits to logprobs; NaN at the edge of a cut, where rounding decides what is kept."""
    if setting.keys() & {*CUTS}:
        return lambda logits, ids: Logits(logits, ids).logprobs([setting], edge)
    return partial(at_heat, FORMULAS["log_softmax"], setting.get("temperature", 1.0))


def nearest(of: Logits, wanted: torch.Tensor, base: Setting, names: Sequence[str]) -> Setting:
    """`base` with other values of these names, of which at most one is a cut, whose logprobs are nearest by squares."""
    cut = next((name for name in names if name in CUTS), "")

    def at(heat: float) -> tuple[float, Setting]:
        setting = {name: value for name, value in base.items() if name != "temperature"}
        setting |= {"temperature": heat} if heat != 1 else {}
        others = of.columns([setting])
        rows = Heated(of, others.pop("temperature"))
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
