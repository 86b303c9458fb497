"""The logprobs that logits have under a temperature, top-k, min-p and top-p, and the setting whose logprobs are nearest
to given ones. Every cut keeps the first of the tokens by their probability."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from nondet.mismatch.rollouts import Setting

_CHUNK = 2**22  # of logits at once
_COLUMNS = 2048  # of the largest logits that cuts are fitted in
_HEATS = np.geomspace(0.25, 4.0, 11)
_STEPS = {torch.float32: 14, torch.float64: 32}  # of a golden section around the best of these, by the wider format
_SHARES = 64  # values of a cut that are tried at once, five times between ever closer ends
# Decimals of a value that is short, the fewest first.
_DIGITS = {"": (1, 2, 3), "top-k": (-2, -1, 0), "min-p": (1, 2, 3, 4), "top-p": (1, 2, 3)}
_NO_CUT = {"top-k": 2.0**31, "min-p": 1e-300, "top-p": 1.0}  # values that keep all
_SURE = 0.9  # of rows: where fewer are off a cut's edge, logits are so coarse that rows at an edge are like the others


class Likely(NamedTuple):
    """The most likely tokens of rows, in order: how far their logprobs are behind the first's, and cumulative
    probabilities, [k, C] float64."""

    behind: torch.Tensor
    shares: torch.Tensor

    def kept(self, cuts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """[k, n]: the share of what cuts with values [k, 1], one of them [k, n], keep. As in vLLM, top-k keeps all that
        equal the last, and top-p is of the share that the other cuts keep."""
        reach, last = torch.full_like(self.shares[:, :1], torch.inf), self.shares.shape[-1] - 1
        if (count := cuts.get("top-k")) is not None:
            at = self.behind.gather(-1, (count.round().long() - 1).clamp(0, last))
            reach = torch.where(count <= last, at, torch.inf)
        if (least := cuts.get("min-p")) is not None:
            reach = reach.minimum(-least.log())
        ends = torch.searchsorted(self.behind, reach.contiguous(), right=True) - 1
        mass = torch.where(reach.isinf(), 1.0, self.shares.gather(-1, ends))
        if (share := cuts.get("top-p")) is None:
            return mass
        ends = torch.searchsorted(self.shares, (wanted := share * mass).contiguous())
        # with a larger vocabulary the nucleus may go beyond these columns
        return torch.where(ends <= last, self.shares.gather(-1, ends.clamp(max=last)), wanted)


class Logits:
    """Rows of logits [k, V] in the format that they were computed in, and the tokens [k] that followed them."""

    def __init__(self, logits: torch.Tensor, ids: torch.Tensor) -> None:
        self.logits, self.ids = logits, ids[:, None]
        self.top, ids_of_top = logits.topk(min(_COLUMNS, logits.shape[-1]), -1)
        self.most = ids_of_top[:, :1]

    def column(self, values: Sequence[float]) -> torch.Tensor:
        """[k, 1] float64: one value for all rows, or one of each."""
        return torch.tensor(values, dtype=torch.float64, device=self.top.device)[:, None].expand(len(self.top), 1)

    def heated(self, logits: torch.Tensor, heat: torch.Tensor) -> torch.Tensor:
        """Logits at temperatures [k, 1], divided and rounded as a division by a number does it."""
        wide = torch.promote_types(logits.dtype, torch.float32)
        return (logits.to(wide) / heat.to(wide)).to(logits.dtype)

    def total(self, heat: torch.Tensor) -> torch.Tensor:
        """ln of the sum of exponentials at temperatures [k, 1], [k] float64."""
        sums, size = [], max(1, _CHUNK // self.logits.shape[-1])
        for part, most, by in zip(*(x.split(size) for x in (self.logits, self.most, heat)), strict=True):
            x = self.heated(part, by)  # the sum in float32 is relative to its largest term, and several times faster
            sums.append(x.gather(-1, most).double() - x.float().log_softmax(-1).gather(-1, most).double())
        return torch.cat(sums).squeeze(-1)

    def plain(self, heat: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """Logprobs at temperatures [k, 1], [k] float64, with what `total` gives."""
        return self.heated(self.logits.gather(-1, self.ids), heat).double().squeeze(-1) - total

    def likely(self, heat: torch.Tensor, total: torch.Tensor) -> Likely:
        """The most likely tokens at temperatures [k, 1]."""
        scaled = self.heated(self.top, heat).double()
        return Likely(scaled[:, :1] - scaled, (scaled - total[:, None]).exp().cumsum(-1).clamp(max=1.0))

    def logprobs(self, each: Sequence[Setting], edge: float = 0.0) -> torch.Tensor:
        """[k] float64, under the setting of each row, or the one of all; a token that is cut off is divided by the kept
        share, too. NaN where probabilities that are off by a share of `edge` would keep other tokens, unless that holds
        of many rows."""
        heat = self.column([one.heat for one in each])
        total = self.total(heat)
        names = {name for one in each for name in one.cuts}
        cuts = {name: self.column([one.cuts.get(name, _NO_CUT[name]) for one in each]) for name in names}
        values = self.plain(heat, total)
        if not cuts:
            return values
        likely = self.likely(heat, total)
        values -= likely.kept(cuts).squeeze(-1).log()
        if edge:
            less, more = ({"top-p": 1 - by, "min-p": 1 + by, "top-k": 1.0} for by in (edge, -edge))
            few, many = (likely.kept({n: x * by[n] for n, x in cuts.items()}) for by in (less, more))
            sure = (many <= few * (1 + 4 * edge)).squeeze(-1)
            values = torch.where(sure, values, torch.nan) if sure.double().mean() >= _SURE else values
        return values


def formula_of(setting: Setting, edge: float = 0.0) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """From logits to logprobs."""
    return lambda logits, ids: Logits(logits, ids).logprobs([setting], edge)


def nearest(of: Logits, wanted: torch.Tensor, base: Setting, *, cut: str = "", heat: bool = False) -> Setting:
    """`base` with another temperature, if `heat`, and another value of a cut, if one is named, whose logprobs are
    nearest, by squares."""

    def at(degree: float) -> tuple[float, Setting]:
        by = of.column([degree])
        total = of.total(by)
        above, cuts = (wanted - of.plain(by, total))[:, None], {n: of.column([v]) for n, v in base.cuts.items()}
        likely = of.likely(by, total) if cuts or cut else None

        def costs(values: torch.Tensor) -> torch.Tensor:
            tried = {cut: values.to(by)[None].expand(len(by), -1)} if cut else {}
            return (above if likely is None else above + likely.kept(cuts | tried).log()).square().nanmean(0)

        if not cut:
            return float(costs(by)[0]), Setting(degree, base.cuts)
        high = float(min(of.top.shape[-1], of.logits.shape[-1] - 1)) if cut == "top-k" else 1.0
        low, power = {"top-k": (1.0, 1), "min-p": (0.05, 3), "top-p": (0.02, 1)}[cut]  # min-p by its cube root
        for _ in range(5):
            tried = torch.linspace(low, high, _SHARES, dtype=torch.float64)
            cost = costs(tried**power)
            best = (cost <= cost.min()).nonzero().squeeze(-1).cpu()  # often equal over an interval
            low, high = (float(tried[i.clamp(0, _SHARES - 1)]) for i in (best[0] - 1, best[-1] + 1))
        value = float(tried[best[len(best) // 2]]) ** power
        value = _short(value, lambda v: float(costs(torch.tensor([v], dtype=torch.float64))[0]), cut)
        return float(cost.min()), Setting(degree, base.cuts | {cut: value})

    if not heat:
        return at(base.heat)[1]
    least, best = min((at(float(degree))[0], i) for i, degree in enumerate(_HEATS))
    low, middle, high = (float(_HEATS[min(max(0, i), len(_HEATS) - 1)]) for i in (best - 1, best, best + 1))
    for _ in range(_STEPS[of.logits.dtype]):  # the wider part between the middle and an end is divided
        tried = middle + (3 - 5**0.5) / 2 * (max(high, low, key=lambda end: abs(end - middle)) - middle)
        if (cost := at(tried)[0]) < least:
            tried, middle, least = middle, tried, cost
        low, high = (tried, high) if tried < middle else (low, tried)
    return at(_short(middle, lambda v: at(v)[0]))[1]


def _short(value: float, cost: Callable[[float], float], cut: str = "") -> float:
    most = 1.01 * cost(value)
    return next((short for n in _DIGITS[cut] if (short := round(value, n)) > 0 and cost(short) <= most), value)
