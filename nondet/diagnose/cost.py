"""What the cure costs here: one round, warm, under stock and under the cure in turn."""

from __future__ import annotations

from collections.abc import Callable, Collection

from nondet.core.records import Step
from nondet.sampling.analysis import NAME
from nondet.sampling.implementations import implementation
from nondet.sampling.plan import Session

__all__ = ["cost_step"]


def cost_step(play: Callable[[], Session], families: str, *, times: int = 2, warm: Collection[str] = ()) -> Step:
    """Time the round.

    Args:
        play: Runs it.
        families: The smallest cure as the trace found it, "attention+matmul"; "" where there is none.
        times: Timed rounds of each implementation.
        warm: Implementations under which this process has run the round already.
    """
    impls = ["stock", "invariant", *([f"invariant:{families}"] if families else [])]
    speeds: dict[str, list[float]] = {impl: [] for impl in impls}
    for impl in (impl for impl in impls if impl not in warm):
        with implementation(impl):
            play()  # kernels are compiled and proven, libraries have planned: none of it is in the timed rounds
    for _ in range(times):  # in turn, so that a slower minute of the machine is everybody's
        for impl in impls:
            with implementation(impl):
                session = play()
            speeds[impl].append(session.tokens / max(session.seconds, 1e-9))
    best = {impl: max(values) for impl, values in speeds.items()}
    parts = [
        f"stock {best['stock']:,.0f} tokens/s",
        f"invariant {best['invariant']:,.0f}, {_ratio(speeds, 'invariant')}",
    ]
    if families:
        parts.append(f"{families} alone {best[impls[2]]:,.0f}, {_ratio(speeds, impls[2])}")
    sentence = f"a warm round, {'the better of ' + str(times) if times > 1 else 'once'}: {'; '.join(parts)}"
    figures = {f"{impl}_tokens_per_second": value for impl, value in best.items()}
    figures |= {f"{impl}_ratio": best[impl] / best["stock"] for impl in impls[1:]}
    return Step(name="cost", outcome="yes", sentence=sentence, figures=figures)


def _ratio(speeds: dict[str, list[float]], impl: str) -> str:
    """ "speed ratio 0.64 (0.61 to 0.70 in single rounds)"."""
    pairs = [ours / stock for ours, stock in zip(speeds[impl], speeds["stock"], strict=True)]
    best = max(speeds[impl]) / max(speeds["stock"])
    return f"{NAME} {best:.2f} ({min(pairs):.2f} to {max(pairs):.2f} in single rounds)"
