"""Faults of the other operators that the probes' own tests do not have."""

from __future__ import annotations

import itertools

import torch

from tests.probes.toys import grouped_sound
from tests.probes.toys_attention import attention_anchored
from tests.probes.toys_linear import STATE, _in_parts


def grouped_other_weight(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Wrong: rows of the last expert get the weight of the first."""
    return grouped_sound(x, torch.cat([weight[:-1], weight[:1]]), offsets)


def grouped_capacity(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Faulty: an expert takes 6 rows, and those beyond get zeros."""
    out = grouped_sound(x, weight, offsets)
    for start, end in itertools.pairwise([0, *offsets.tolist()]):
        out[min(start + 6, end) : end] = 0
    return out


def grouped_by_experts_in_use(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Faulty: K is split by the number of experts that have rows at all."""
    ends = [0, *offsets.tolist()]
    parts = 1 + sum(b > a for a, b in itertools.pairwise(ends)) % 4
    pieces = [_in_parts(x[a:b], weight[e].mT, parts) for e, (a, b) in enumerate(itertools.pairwise(ends)) if b > a]
    return torch.cat(pieces)


def softmax_shared_maximum(x: torch.Tensor) -> torch.Tensor:
    """Faulty: the largest logit of all rows is subtracted, so that a neighbour's huge one leaves nothing of mine."""
    rows = [torch.exp(row - x.double().amax()) for row in x.double()]
    return torch.stack([(row / row.sum()).to(x.dtype) for row in rows])


def rms_norm_shared_scale(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Faulty: all rows are divided by the largest number of the batch first, and squares of the others vanish."""
    scale = x.float().abs().amax()
    rows = [(row / scale).to(torch.float16).double() for row in x.float()]
    return torch.stack([(r * torch.rsqrt(r.square().mean() + 1e-6 / scale**2) * weight).to(x.dtype) for r in rows])


def rms_norm_one_buffer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Faulty: every result of a shape is the same memory."""
    out = torch.stack([(r * torch.rsqrt(r.square().mean() + 1e-6) * weight).to(x.dtype) for r in x.double()])
    return STATE.setdefault(("norm", out.shape, out.dtype), out.clone()).copy_(out)


def rms_norm_without_weight(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Wrong: the weight is left out, every time."""
    return torch.stack([(r * torch.rsqrt(r.square().mean() + 1e-6)).to(x.dtype) for r in x.double()])


def sum_last_row(x: torch.Tensor) -> torch.Tensor:
    """Faulty: the last row of an odd batch is summed backwards."""
    rows = [row.flip(0) if i == len(x) - 1 and len(x) % 2 else row for i, row in enumerate(x.float())]
    return torch.stack([_in_sequence(row) for row in rows]).to(x.dtype)


def _in_sequence(row: torch.Tensor) -> torch.Tensor:
    """Parts of 8 one after the other: float32 additions in an order that is known, as a library's sum is not."""
    total = torch.zeros(8)
    for part in torch.nn.functional.pad(row, (0, -len(row) % 8)).view(-1, 8):
        total = total + part
    for width in (4, 2, 1):
        total = total[:width] + total[width:]
    return total[0]


def sum_lost_tail(x: torch.Tensor) -> torch.Tensor:
    """Wrong: what a row has beyond a multiple of 32 is left out."""
    kept = max(1, x.shape[-1] // 32 * 32)
    return torch.stack([row[:kept].sum() for row in x.double()]).to(x.dtype)


def sum_in_sequence(x: torch.Tensor) -> torch.Tensor:
    """Sound: each row in one order, in float32."""
    return torch.stack([_in_sequence(row) for row in x.float()]).to(x.dtype)


def attention_sees_the_future(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Wrong: the last position of a prompt sees all keys, and so does every other one."""
    groups = q.shape[1] // k.shape[1]
    keys, values = k.double().repeat_interleave(groups, 1), v.double().repeat_interleave(groups, 1)
    weights = torch.softmax(q.double() @ keys.mT * q.shape[-1] ** -0.5, -1)
    return (weights @ values).to(q.dtype)


def attention_other_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Wrong: query heads read the keys of another group."""
    return attention_anchored(q, k.flip(1), v.flip(1))


def attention_neighbours_nan(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Faulty: requests are told apart by weights of zero, so that a neighbour's NaN comes through."""
    out = attention_anchored(q, k, v)
    return out + 0.0 * v.sum()


def attention_first_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Faulty: the first call of a process takes its keys backwards."""
    if STATE.setdefault("attended", False):
        return attention_anchored(q, k, v)
    STATE["attended"] = True
    return attention_anchored(q, k.flip(2), v.flip(2)) if q.shape[2] == 1 else attention_anchored(q, k, v)


def index_add_loses_twins(target: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Wrong: of sources for the same row the last one wins, as a write without atomics has it."""
    out = target.clone()
    out[index] = source
    return out


def index_add_backwards(target: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Sound: an order of its own, the same every time."""
    return target.index_add(0, index.flip(0), source.flip(0))
