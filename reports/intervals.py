"""The two intervals that reports state, and how a rate is rounded: never to a stronger claim."""

from __future__ import annotations

import math

__all__ = ["CONFIDENCE", "one_sided_bound", "percent", "percent_range", "wilson"]

CONFIDENCE = 0.95
_Z = 1.959963984540054  # two-sided 95%


def wilson(k: int, n: int) -> tuple[float, float]:
    """Wilson's two-sided 95% interval for a rate seen k times in n.

    Source: E. B. Wilson, Journal of the American Statistical Association 22 (1927), 209-212.
    """
    if n <= 0 or not 0 <= k <= n:
        raise ValueError(f"{k} of {n} is no rate")
    share, spread = k / n, _Z * _Z / n
    middle = (share + spread / 2) / (1 + spread)
    half = _Z * math.sqrt(share * (1 - share) / n + spread / (4 * n)) / (1 + spread)
    # at k = 0 and k = n the ends are exact; rounding must not push them inside
    return (0.0 if k == 0 else max(0.0, middle - half), 1.0 if k == n else min(1.0, middle + half))


def one_sided_bound(n: int) -> float:
    """The rate that n independent tries without a hit exclude at 95%: 1 - 0.05^(1/n)."""
    if n <= 0:
        raise ValueError("no tries, no bound")
    return -math.expm1(math.log1p(-CONFIDENCE) / n)


def percent(share: float, rounding: str = "near") -> str:
    """A share in percent to about three digits.

    Args:
        rounding: "near", "up" (upper bounds) or "down" (lower bounds). Only exact ones are shown as 100%.
    """
    value = 100.0 * share
    if value <= 0.0 or value >= 100.0:
        return "0%" if value <= 0.0 else "100%"
    digits = 1 if value >= 10.0 else max(2, 1 - math.floor(math.log10(value)))
    scale = 10.0**digits
    # 1e-9 keeps figures that are round already from being moved by their own binary representation
    scaled = {
        "near": round(value * scale),
        "up": math.ceil(value * scale - 1e-9),
        "down": math.floor(value * scale + 1e-9),
    }[rounding]
    whole = round(100 * scale)
    if scaled >= whole and rounding != "up":
        return f">{(whole - 1) / scale:.{digits}f}%"
    if scaled >= whole:
        return "100%"
    return f"{scaled / scale:.{digits}f}%"


def percent_range(low: float, high: float) -> str:
    """An interval in percent, rounded outwards."""
    return f"{percent(low, 'down')} to {percent(high, 'up')}"
