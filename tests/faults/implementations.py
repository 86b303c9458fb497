"""More faults of products than the probes' own tests need, and sound implementations that look suspicious."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from tests.faults.grammar import total
from tests.probes import toys
from tests.probes.toys import STATE, Bias, changed, count, in_parts, linear_in_order, of_rows


@of_rows
def order_of_one_column(rows: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Faulty: only the last column is summed otherwise, from 16 rows on."""
    out = in_parts(rows, w, 1)
    if len(out) >= 16:
        out[:, -1:] = in_parts(rows, w[-1:], 4)
    return out


def three_dimensions(x: torch.Tensor, w: torch.Tensor, bias: Bias = None) -> torch.Tensor:
    """Faulty for [B, T, K] alone: K is split in as many parts as there are requests."""
    return toys.of_parts(lambda *_: 1 if x.ndim == 2 else len(x))(x, w, bias)


def _mixed_by_zeros(out: torch.Tensor) -> torch.Tensor:
    rows = out.reshape(-1, out.shape[-1])
    return torch.stack([(c[:, None] * rows).sum(0) for c in torch.eye(len(rows))]).reshape(out.shape).to(out.dtype)


# Faulty: rows are chosen by a product with zeros and ones, so that a neighbour's NaN comes through.
mixes_rows_by_zeros = changed(linear_in_order, _mixed_by_zeros)


def remembers_results(x: torch.Tensor, w: torch.Tensor, bias: Bias = None) -> torch.Tensor:
    """Faulty: a result is kept for the address and shape of its input, whatever has been written there since."""
    key = ("result", x.data_ptr(), x.shape, x.stride(), w.data_ptr(), None if bias is None else bias.data_ptr())
    if key not in STATE:
        STATE[key] = (x, w, bias, toys.linear_sound(x, w, bias))  # the operands are held, so that addresses stay theirs
    return STATE[key][3].clone()


def _on_old_memory(out: torch.Tensor) -> torch.Tensor:
    """What an allocator hands out is chance; the memory of the last result of that shape is what it often is."""
    key = ("memory", out.shape, out.dtype)
    STATE[key] = out + STATE.get(key, torch.zeros_like(out)) * 0.0
    kept: torch.Tensor = STATE[key].clone()
    return kept


# Faulty: the accumulator is multiplied by zero instead of set to zero.
adds_to_old_memory = changed(linear_in_order, _on_old_memory)


def _without_last_row(out: torch.Tensor) -> torch.Tensor:
    rows = out.reshape(-1, out.shape[-1])
    if len(rows) > 16 and len(rows) % 16 == 1:
        rows[-1] = 0
    return out


# Wrong: the last row of a batch of 17, 33, 65 is zero, one row beyond a tile; the last output feature is zero, every
# time; two output features are exchanged, every time.
last_row_lost = changed(linear_in_order, _without_last_row)
last_column_lost = changed(linear_in_order, lambda out: F.pad(out[..., :-1], (0, 1)))
other_rows_weight = changed(linear_in_order, lambda out: out[..., [1, 0, *range(2, out.shape[-1])]])


# Sound: rows are padded to a multiple of 16, and the padding is cut off; after 100 calls rows are walked backwards, and
# each row's sum is taken as before; an order of its own, backwards along K, the same in every batch.
padded_to_tiles = of_rows(lambda rows, w: in_parts(F.pad(rows, (0, 0, 0, -len(rows) % 16)), w, 2)[: len(rows)])
tunes_its_speed = of_rows(
    lambda rows, w: in_parts(rows, w, 4) if count() < 100 else in_parts(rows.flip(0), w, 4).flip(0)
)
other_order = of_rows(lambda rows, w: in_parts(rows.flip(1), w.flip(1), 3))
# Sound: one work buffer for all calls of a shape, and every result copied out of it.
pool_of_buffers = changed(
    linear_in_order,
    lambda out: STATE.setdefault(("pool", out.shape, out.dtype), torch.empty_like(out)).copy_(out).clone(),
)


def packs_by_version(x: torch.Tensor, w: torch.Tensor, bias: Bias = None) -> torch.Tensor:
    """Sound: packed weights are kept for the tensor and the version of what it holds."""
    key = ("packed", w.data_ptr(), w._version, tuple(w.shape), w.stride())
    kept = STATE.get(key)
    if kept is None or kept[0] is not w:
        kept = STATE[key] = (w, w.clone())
    return linear_in_order(x, kept[1], bias)


def grouped_other_weight(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Wrong: rows of the last expert get the weight of the first."""
    return toys.grouped_sound(x, torch.cat([weight[:-1], weight[:1]]), offsets)


def grouped_capacity(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Faulty: an expert takes 6 rows, and those beyond get zeros."""
    out = toys.grouped_sound(x, weight, offsets)
    for start, end in itertools.pairwise([0, *offsets.tolist()]):
        out[min(start + 6, end) : end] = 0
    return out


def grouped_by_experts_in_use(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Faulty: K is split by the number of experts that have rows at all."""
    ends = [0, *offsets.tolist()]
    parts = 1 + sum(b > a for a, b in itertools.pairwise(ends)) % 4
    pieces = [in_parts(x[a:b], weight[e].mT, parts) for e, (a, b) in enumerate(itertools.pairwise(ends)) if b > a]
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
    out = toys.rms_norm_sound(x, weight)
    return STATE.setdefault(("norm", out.shape, out.dtype), out.clone()).copy_(out)


def sum_last_row(x: torch.Tensor) -> torch.Tensor:
    """Faulty: the last row of an odd batch is summed in another order."""
    out = total(x, 0)
    out[-1:] = total(x[-1:], len(x) % 2)
    return out.to(x.dtype)


def sum_lost_tail(x: torch.Tensor) -> torch.Tensor:
    """Wrong: what a row has beyond a multiple of 32 is left out."""
    return x[:, : max(1, x.shape[-1] // 32 * 32)].double().sum(-1).to(x.dtype)


def attention_sees_the_future(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Wrong: the last position of a prompt sees all keys, and so does every other one."""
    return toys.attention_sound(q, k, v, causal=False)


def attention_other_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Wrong: query heads read the keys of another group."""
    return toys.attention_anchored(q, k.flip(1), v.flip(1))


def attention_neighbours_nan(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Faulty: requests are told apart by weights of zero, so that a neighbour's NaN comes through."""
    return toys.attention_anchored(q, k, v) + 0.0 * v.sum()


def index_add_loses_twins(target: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Wrong: of sources for the same row the last one wins, as a write without atomics has it."""
    out = target.clone()
    out[index] = source
    return out


index_add_backwards = toys.adds("index_add", lambda n: range(n)[::-1])  # sound: an order of its own, every time
