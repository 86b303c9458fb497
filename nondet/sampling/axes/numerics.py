"""Axes that change the arithmetic itself: dtype, attention, threads. Bits may differ between their values."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from nondet.errors import UserError, suggestion
from nondet.sampling.axes.base import Axis, Conditions, Proof, Seen, Subject, number

__all__ = ["ATTENTION", "ATTENTIONS", "DTYPE", "THREADS"]

_DTYPES = ("bfloat16", "float16", "float32")
# What transformers' continuous batching takes without further packages; it refuses flex attention and others.
ATTENTIONS = ("sdpa", "eager")


def _dtype(subject: Subject, value: str) -> Conditions:
    if value not in _DTYPES:
        raise UserError(f"--vary: dtype={value} is not one that models run in here", suggestion(value, _DTYPES))
    return replace(subject.base, dtype=value)


def _ran(what: str) -> Callable[[str, Seen, Seen], Proof]:
    def proof(value: str, seen: Seen, base: Seen) -> Proof:
        prefix = f"ran {what} "
        ran = sorted(name.removeprefix(prefix) for name in seen if name.startswith(prefix))
        return Proof(ran == [value], f"the engine ran with {what} {', '.join(ran) or 'unknown'}")

    return proof


DTYPE = Axis(
    name="dtype",
    changes="the dtype of weights and activations; the weights in hand are cast",
    why="another format rounds otherwise: only completions of one dtype can be equal",
    value=lambda s: s.base.dtype,
    values=lambda s: [d for d in _DTYPES if d != s.base.dtype],
    apply=_dtype,
    proof=_ran("dtype"),
    held=False,
)


def _attention(subject: Subject, value: str) -> Conditions:
    if value not in ATTENTIONS:
        raise UserError(
            f"--vary: attention={value}: transformers' continuous batching takes {' and '.join(ATTENTIONS)} here",
            suggestion(value, ATTENTIONS),
        )
    return replace(subject.base, setting=replace(subject.base.setting, attention=value))


ATTENTION = Axis(
    name="attention",
    changes="the model's attention implementation",
    why="another implementation adds in another order: only completions of one can be equal",
    value=lambda s: s.base.setting.attention or "sdpa",
    values=lambda s: [a for a in ATTENTIONS if a != (s.base.setting.attention or "sdpa")],
    apply=_attention,
    proof=_ran("attention"),
    held=False,
)


def _threads(subject: Subject, value: str) -> Conditions:
    return replace(subject.base, threads=number("threads", value, 1, max(2, os.cpu_count() or 1)))


THREADS = Axis(
    name="threads",
    changes="the CPU threads",
    why="a library may cut a product by threads: only completions of one count can be equal",
    value=lambda s: str(s.base.threads or s.threads),
    values=lambda s: [str(n) for n in (1, 2, 4) if n != (s.base.threads or s.threads) and n <= max(2, s.threads)],
    apply=_threads,
    proof=_ran("threads"),
    held=False,
    lacking=lambda s: "" if s.device == "cpu" else "threads decide nothing on a CUDA device",
)
