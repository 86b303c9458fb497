"""The one speed of a sampled run, and the one ratio of two. Pure figures from the run file, no torch.

Tokens per second are the median over rounds: in some round kernels are compiled, shapes are proven at first use and
caches are filled, once and for good, and a sum over all rounds would charge that to whoever met it. Every
implementation plays the same rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nondet.core.records import Role, Round, Run, role_of
from nondet.errors import one_line

__all__ = [
    "DEFINITION",
    "HOST_NOTE",
    "NAME",
    "SpeedRatio",
    "diagnosed_cost",
    "median_rate",
    "ratio_text",
    "speed_ratio",
    "speed_ratio_of",
]

# Figures of a diagnosis' timed rounds: "stock_tokens_per_second", "invariant:attention_tokens_per_second".
_RATE, _MAIN = "_tokens_per_second", ("stock", "invariant")

NAME = "speed ratio"
DEFINITION = (
    "speed ratio: invariant's tokens/s over those of the fastest stock, each the median over rounds of everybody's "
    "generated tokens over engine time (of a diagnosis: the better of two warm rounds, played in turn); above 1 "
    "invariant is faster"
)
# On an H200 4.4 s of host time in cuDNN's attention for 11 ms on the GPU: docs/evidence/h200/stock-profile.txt.
HOST_NOTE = (
    "stock's attention may be cuDNN's here, whose work on the host can outweigh the GPU's: such a ratio is no cost of "
    "the invariant kernels; --impl stock-no-cudnn leaves cuDNN out"
)


@dataclass(frozen=True)
class SpeedRatio:
    """Invariant against the fastest stock that ran.

    Attributes:
        baseline: Which stock: stock, stock-no-cudnn, ...
        stock, invariant: Tokens per second.
        host_bound: Stock may have waited for cuDNN's work on the host, see `HOST_NOTE`.
    """

    baseline: str
    stock: float
    invariant: float
    host_bound: bool = False

    @property
    def ratio(self) -> float:
        """Invariant over stock; above 1 invariant is faster."""
        return self.invariant / self.stock


def median_rate(rounds: Iterable[Round]) -> float:
    """Generated tokens per second of everybody, the median over rounds that took time; 0.0 without one."""
    rates = [r.tokens / r.seconds for r in rounds if r.seconds > 0]
    return statistics.median(rates) if rates else 0.0


def speed_ratio(rates: Mapping[str, float], *, host_bound: bool = False) -> SpeedRatio | None:
    """The ratio from each implementation's tokens per second; None unless invariant and a stock have one.

    Args:
        host_bound: Whether plain stock may have waited for the host.
    """
    stock = {impl: rate for impl, rate in rates.items() if role_of(impl) in (Role.STOCK, Role.BACKEND) and rate > 0}
    invariant = next((rate for impl, rate in rates.items() if role_of(impl) == Role.INVARIANT and rate > 0), None)
    if not stock or invariant is None:
        return None
    baseline = max(stock, key=stock.__getitem__)
    return SpeedRatio(baseline, stock[baseline], invariant, host_bound and baseline == Role.STOCK)


def speed_ratio_of(run: Run) -> SpeedRatio | None:
    """The ratio of a run's rounds; of a diagnosis, of the warm rounds that it timed for it, None if it timed none."""
    host_bound = _host_bound(run)
    if run.steps:
        timed = next((s.figures for s in run.steps if s.name == "cost" and s.outcome == "yes"), {})
        return speed_ratio({impl: float(timed.get(f"{impl}{_RATE}", 0.0)) for impl in _MAIN}, host_bound=host_bound)
    impls = dict.fromkeys(r.impl for r in run.rounds)
    rates = {impl: median_rate(r for r in run.rounds if r.impl == impl) for impl in impls}
    return speed_ratio(rates, host_bound=host_bound)


def ratio_text(speed: SpeedRatio) -> str:
    """ "speed ratio 0.98 against stock-no-cudnn", with what it can't say where it can't."""
    text = f"{NAME} {speed.ratio:.2f} against {one_line(speed.baseline, 40)}"
    return f"{text} ({HOST_NOTE})" if speed.host_bound else text


def diagnosed_cost(run: Run) -> str:
    """What a diagnosis says of the cost, from its timed rounds; "" where it timed none."""
    speed = speed_ratio_of(run)
    timed = next((s.figures for s in run.steps if s.name == "cost" and s.outcome == "yes"), {})
    if speed is None or not timed:
        return ""
    parts = [f"{speed.invariant:,.0f} against {speed.stock:,.0f} tokens/s, warm"]
    for name, rate in timed.items():
        family = name.removeprefix("invariant:").removesuffix(_RATE)
        if name.startswith("invariant:") and name.endswith(_RATE):
            parts.append(f"{one_line(family, 60)} alone {float(rate) / speed.stock:.2f}")
    note = f" This is no cost: {HOST_NOTE}." if speed.host_bound else ""
    return f"{NAME.capitalize()} {speed.ratio:.2f} ({'; '.join(parts)}).{note}"


def _host_bound(run: Run) -> bool:
    """Whether stock ran on a GPU with cuDNN within reach and each call launched from the host: no CUDA graphs."""
    load = run.header.plan.get("load")
    graphs = isinstance(load, dict) and bool(load.get("graphs"))
    return run.header.plan.get("device") == "cuda" and not graphs
