"""Products with a known fault, and sound ones. See `tests.probes.toys`."""

from __future__ import annotations

from typing import Any

import torch

STATE: dict[Any, Any] = {}


def count() -> int:
    STATE["calls"] = STATE.get("calls", 0) + 1
    return int(STATE["calls"])


def forget() -> None:
    """Every toy is as in a fresh process."""
    STATE.clear()


# ---- linear

Bias = torch.Tensor | None


def _plus(out: torch.Tensor, bias: Bias) -> torch.Tensor:
    return out if bias is None else (out.double() + bias.double()).to(out.dtype)


def _in_parts(x: torch.Tensor, w: torch.Tensor, parts: int) -> torch.Tensor:
    total = torch.zeros(x.shape[0], w.shape[0])
    for a, b in zip(x.float().chunk(parts, 1), w.float().chunk(parts, 1), strict=True):
        for i in range(len(a)):  # row by row: no library's own choice by M may come in
            total[i] += (b * a[i]).sum(1)  # and no GEMV, whose order follows from the address on some CPUs
    return total.to(x.dtype)


def linear_sound(x: torch.Tensor, w: torch.Tensor, bias: Bias = None) -> torch.Tensor:
    """Sound: each row by itself in float64."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.stack([(w.double() * row.double()).sum(1).to(x.dtype) for row in rows])
    return _plus(out, bias).reshape(*x.shape[:-1], -1)


def linear_without_bias(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Sound, and of layers without a bias alone."""
    return linear_sound(x, w)


def linear_in_order(x: torch.Tensor, w: torch.Tensor, bias: Bias = None) -> torch.Tensor:
    """Sound: each row by itself in float32, K in four parts whatever the batch."""
    return _plus(_in_parts(x.reshape(-1, x.shape[-1]), w, 4).reshape(*x.shape[:-1], -1), bias)


def linear_splits_by_m(x: torch.Tensor, w: torch.Tensor, bias: Bias = None) -> torch.Tensor:
    """Faulty: splits K in four from 16 rows on."""
    rows = x.reshape(-1, x.shape[-1])
    return _plus(_in_parts(rows, w, 4 if len(rows) >= 16 else 1).reshape(*x.shape[:-1], -1), bias)


def linear_stream_k(x: torch.Tensor, w: torch.Tensor, bias: Bias = None) -> torch.Tensor:
    """Faulty: where K is cut follows from the row's place."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.cat([_in_parts(row[None], w, 1 + i % 3) for i, row in enumerate(rows)])
    return _plus(out.reshape(*x.shape[:-1], -1), bias)


def linear_tail_rows(x: torch.Tensor, w: torch.Tensor, bias: Bias = None) -> torch.Tensor:
    """Faulty: the rows after the last whole tile of 8 take another order; row 0 never does, but alone."""
    rows = x.reshape(-1, x.shape[-1])
    body = max(1, len(rows) // 8 * 8)
    parts = [_in_parts(rows[:body], w, 1), *([_in_parts(rows[body:], w, 4)] if body < len(rows) else [])]
    return _plus(torch.cat(parts).reshape(*x.shape[:-1], -1), bias)


def linear_unsteady(x: torch.Tensor, w: torch.Tensor, bias: Bias = None) -> torch.Tensor:
    """Faulty: another split at each call."""
    return _plus(_in_parts(x.reshape(-1, x.shape[-1]), w, 1 + count() % 3).reshape(*x.shape[:-1], -1), bias)


def linear_shared_scale(x: torch.Tensor, w: torch.Tensor, bias: Bias = None) -> torch.Tensor:
    """Faulty: activations are rounded to 8 bits by one scale, which is the largest of all rows."""
    scale = x.float().abs().amax() / 127.0
    return linear_sound((torch.round(x.float() / scale) * scale).to(x.dtype), w, bias)


def linear_by_address(x: torch.Tensor, w: torch.Tensor, bias: Bias = None) -> torch.Tensor:
    """Faulty: operands at an unaligned address take another order."""
    rows = x.reshape(-1, x.shape[-1])
    return _plus(_in_parts(rows, w, 4 if rows.data_ptr() % 16 else 1).reshape(*x.shape[:-1], -1), bias)


def linear_one_buffer(x: torch.Tensor, w: torch.Tensor, bias: Bias = None) -> torch.Tensor:
    """Faulty: every result of a shape is the same memory."""
    out = linear_sound(x, w, bias)
    return STATE.setdefault(("buffer", out.shape, out.dtype), out.clone()).copy_(out)


def linear_remembers_weights(x: torch.Tensor, w: torch.Tensor, bias: Bias = None) -> torch.Tensor:
    """Faulty: weights are packed once for each address, and never again when they are written to."""
    packed = STATE.setdefault(("packed", w.data_ptr(), w.shape, w.dtype), (w, w.clone()))[1]
    return linear_sound(x, packed, bias)


def linear_tunes_itself(x: torch.Tensor, w: torch.Tensor, bias: Bias = None) -> torch.Tensor:
    """Faulty: from the 100th call of a shape on another split is taken."""
    rows = x.reshape(-1, x.shape[-1])
    calls = STATE["tuned", rows.shape, w.shape] = STATE.get(("tuned", rows.shape, w.shape), 0) + 1
    return _plus(_in_parts(rows, w, 4 if calls >= 100 else 1).reshape(*x.shape[:-1], -1), bias)


def linear_wide_result(x: torch.Tensor, w: torch.Tensor, bias: Bias = None) -> torch.Tensor:
    """Wrong: float32, whatever it was given."""
    return linear_sound(x.float(), w.float(), None if bias is None else bias.float())


def linear_fewer_rows(x: torch.Tensor, w: torch.Tensor, bias: Bias = None) -> torch.Tensor:
    """Wrong: at most 24 rows come back."""
    return linear_sound(x, w, bias)[:24]


def linear_zeros(x: torch.Tensor, w: torch.Tensor, bias: Bias = None) -> torch.Tensor:
    """Wrong: zeros, every time."""
    return torch.zeros_like(linear_sound(x, w, bias))


def linear_flipped(x: torch.Tensor, w: torch.Tensor, bias: Bias = None) -> torch.Tensor:
    """Wrong: the sign is turned."""
    return -linear_sound(x, w, bias)


def linear_lost_tail(x: torch.Tensor, w: torch.Tensor, bias: Bias = None) -> torch.Tensor:
    """Wrong: what K has beyond a multiple of 24 is left out."""
    kept = x.shape[-1] // 24 * 24
    return linear_sound(x[..., :kept], w[:, :kept], bias)


# ---- wrong otherwise


def linear_nan(x: torch.Tensor, w: torch.Tensor, bias: Bias = None) -> torch.Tensor:
    """Wrong: NaN, which equals NaN."""
    return torch.full_like(linear_sound(x, w, bias), torch.nan)


def linear_writes(x: torch.Tensor, w: torch.Tensor, bias: Bias = None) -> torch.Tensor:
    """Wrong: right the first time, and the weight is scaled for whoever comes next."""
    out = linear_sound(x, w, bias)
    w.mul_(2.0)
    return out


# ---- noise that is rare


def linear_every_fifth(x: torch.Tensor, w: torch.Tensor, bias: Bias = None) -> torch.Tensor:
    """Faulty: every fifth call is a few ULP off, by the same amount, so that there are two classes."""
    linear_every_fifth.calls += 1  # type: ignore[attr-defined] # a counter is what makes it rare
    out = linear_sound(x, w, bias)
    if linear_every_fifth.calls % 5 == 0:  # type: ignore[attr-defined] # the same
        out *= 1 + 2.0**-21
    return out


linear_every_fifth.calls = 0  # type: ignore[attr-defined] # the same


def linear_rarely(x: torch.Tensor, w: torch.Tensor, bias: Bias = None) -> torch.Tensor:
    """Faulty: one call in 97 is a few ULP off."""
    linear_rarely.calls += 1  # type: ignore[attr-defined] # the same
    out = linear_sound(x, w, bias)
    return out if linear_rarely.calls % 97 else out * (1 + 2.0**-21)  # type: ignore[attr-defined] # the same


linear_rarely.calls = 0  # type: ignore[attr-defined] # the same


def linear_exits(x: torch.Tensor, w: torch.Tensor, bias: Bias = None) -> torch.Tensor:
    """Broken: ends the process, with success."""
    raise SystemExit(0)
