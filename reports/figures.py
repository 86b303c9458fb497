"""Figures as text, the same in every report: numbers, shapes, tokens, the environment."""

from __future__ import annotations

from typing import Any

from nondet.reports.intervals import percent, percent_range
from nondet.result import Difference, ErrorFigures, Row
from nondet.sampling.summary import Interval
from nondet.text import one_line, printable

__all__ = [
    "counted",
    "difference_text",
    "environment_line",
    "environment_rows",
    "error_span",
    "number",
    "rate",
    "shape_text",
    "token",
]

_LABELS = {
    "argv": "command line",
    "cpu_isa": "CPU instruction sets",
    "aten_cpu_capability": "ATen CPU capability",
    "onednn": "oneDNN",
    "gpu_sms": "GPU SMs",
    "gpu_memory_bytes": "GPU memory",
    "num_threads": "CPU threads",
    "num_interop_threads": "inter-op threads",
    "variables": "environment variables",
}
_CAPITALS = {"gpu": "GPU", "cpu": "CPU", "os": "OS", "mkl": "MKL", "cuda": "CUDA", "cublas": "cuBLAS", "nccl": "NCCL"}
_CAPITALS |= {
    "cudnn": "cuDNN",
    "tf32": "TF32",
    "blas": "BLAS",
    "python": "Python",
    "triton": "Triton",
    "numpy": "NumPy",
}


def number(x: float | None) -> str:
    """Four significant digits; exact where it is a small whole number; a dash where there is no finite figure."""
    if x is None:
        return "not finite"
    if x == 0:
        return "0"
    if float(x).is_integer() and abs(x) < 1e6:
        return str(int(x))
    return f"{x:.4g}"


def counted(n: int) -> str:
    """Thousands apart."""
    return f"{n:,}"


def rate(interval: Interval) -> str:
    """A rate with its counts and its interval."""
    if interval.n == 0:
        return "0 of 0"
    share = f"{counted(interval.k)} of {counted(interval.n)}"
    if interval.method.startswith("Wilson"):
        span = percent_range(interval.low, interval.high)
        return f"{share} = {percent(interval.k / interval.n)} (95% {span}, {interval.method})"
    return f"{share} (below {percent(interval.high, 'up')} at 95%, one-sided)"


def shape_text(shape: dict[str, int]) -> str:
    """ "M=256 N=4096 K=1024"."""
    return " ".join(f"{one_line(str(k), 20)}={v}" for k, v in shape.items())


def difference_text(d: Difference) -> str:
    """ "3 of 4096 elements"."""
    return f"{counted(d.mismatched)} of {counted(d.compared)}"


def error_text(e: ErrorFigures | None) -> str:
    """The relative error in the norm, or a dash where the probe has no reference."""
    return "–" if e is None else number(e.relative_norm)


def error_span(row: Row) -> str:
    """The first variant's error and, where it differs, the worst class's."""
    if row.error is None:
        return "–"
    first, worst = error_text(row.error), error_text(row.worst_error)
    return first if row.worst_error is None or worst == first else f"{first} … {worst}"


def token(text: str) -> str:
    """One token's text, quoted, with line ends and tabs made visible: spaces at its ends matter."""
    shown = printable(text).replace("\n", "⏎").replace("\t", "⇥")
    return f"“{shown}”" if shown else "“” (no text)"


def environment_line(environment: dict[str, Any]) -> str:
    """The machine in one line: the GPU or else the CPU, and what computes."""
    parts = []
    for key in ("gpu", "cpu"):
        if environment.get(key):
            parts.append(str(environment[key]))
            break
    if environment.get("gpu") is None and environment.get("num_threads"):
        parts.append(f"{environment['num_threads']} threads")
    for key, name in (("torch", "torch"), ("triton", "Triton"), ("transformers", "transformers"), ("driver", "driver")):
        if environment.get(key):
            parts.append(f"{name} {environment[key]}")
    if environment.get("commit"):
        parts.append(f"commit {environment['commit']}")
    return one_line(" · ".join(parts), 400)


def environment_rows(environment: dict[str, Any]) -> list[tuple[str, str]]:
    """Every entry as (label, text), in the header's order."""
    return [(_label(key), _value(key, value)) for key, value in environment.items()]


def _label(key: str) -> str:
    words = _LABELS.get(key) or " ".join(_CAPITALS.get(w, w) for w in key.split("_"))
    return one_line(words, 80)


def _value(key: str, value: Any) -> str:
    if value is None or value in ([], {}):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key == "gpu_memory_bytes" and isinstance(value, int):
        return f"{value / 2**30:.1f} GiB"
    if isinstance(value, dict):
        return one_line("; ".join(f"{k}={v}" for k, v in value.items()), 2000)
    if isinstance(value, list):
        return one_line(" ".join(map(str, value)), 2000)
    return one_line(str(value), 2000)
