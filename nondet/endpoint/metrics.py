"""Counters in the text form of Prometheus, as vLLM, SGLang and llama.cpp show them under /metrics."""

from __future__ import annotations

import math
import re

__all__ = ["read_metrics"]

_LINE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]{0,199})(?:\{[^\n]*\})?[ \t]+([0-9eE.+-]{1,40})(?:[ \t]+-?\d+)?[ \t]*")
_MOST = 10_000


def read_metrics(text: str) -> dict[str, float]:
    """Each metric's name -> its value, summed over all labels. Histograms' buckets, NaN and infinities are left out.

    Args:
        text: What a server sent; lines that are no samples are skipped.
    """
    metrics: dict[str, float] = {}
    for line in text.split("\n"):
        match = _LINE.fullmatch(line.rstrip("\r"))
        if match is None or match[1].endswith("_bucket"):
            continue
        try:
            value = float(match[2])
        except ValueError:
            continue
        if math.isfinite(value) and (match[1] in metrics or len(metrics) < _MOST):
            metrics[match[1]] = metrics.get(match[1], 0.0) + value
    return {name: value for name, value in metrics.items() if math.isfinite(value)}  # a sum may overflow
