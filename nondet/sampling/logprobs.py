"""The logprob of a token, by one formula for the sampler's draw and for a trainer, so that both get the same bits.

With l the row's logits, L the largest and T the temperature:

    logprob(i) = l_i / T - (L / T + ln S),  S = sum of exp((l - L) / T), in float64, rounded once to float32

Order: none that could matter. Each weight exp((l - L) / T) is cut to a whole multiple of 2^-44, and sums of integers
are exact, so S does not depend on the order of its terms, the number of threads, or other rows. So a row has the same
bits in any batch, chunk or layout; a CPU and a GPU may differ in the last bit of an exponential, so you must compute
both sides on one kind of device.

With top-k and top-p the sum is over the tokens that the draw keeps: the `top_k` largest, ties by the smaller id, and of
them the fewest of the largest whose exact sum reaches `top_p` of theirs. Any other token has the logprob -inf.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nondet.errors import UserError
from nondet.kernels.dispatch.differentiable import once
from nondet.kernels.dispatch.state import guarded
from nondet.kernels.pointwise.cpu import vectors_only

SCALE = 2.0**44
_TOKEN = 0xFFFFFFFF  # the lower half of a key: the token id
_CHUNK = 2**24  # numbers in float64 that are held at a time


def token_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, temperature: float = 1.0, *, top_k: int = 0, top_p: float = 1.0
) -> torch.Tensor:
    """ln p of the tokens `ids`, each by its row of logits: the bits that the draw of `nondet sample` records.

    The gradient over the logits is (one-hot minus softmax) / T, computed in chunks of rows and rounded once to their
    dtype; the softmax is over the tokens that are kept. Row by row, like the value. No second derivative.

    Args:
        logits: [..., V], floating. Other dtypes than float64 are converted to float32.
        ids: [...], integers from 0 to V - 1, as many as rows.
        temperature: T. The engine records logprobs at 1 over the whole vocabulary, whatever it draws at.
        top_k: Tokens that are kept; 0 for all.
        top_p: Share of the mass that is kept; 1 for all. Kept tokens are found row by row on the host.

    Returns:
        [...], float32 (float64 of float64 logits). NaN where a row's largest logit is not finite; -inf of a token that
        is not kept.

    Raises:
        UserError: shapes that do not fit, ids out of range, or settings that no draw has.
    """
    _check(logits, ids, temperature, top_k, top_p)
    out: torch.Tensor = _Logprobs.apply(logits, ids, float(temperature), int(top_k), float(top_p))
    return out


def _check(logits: Any, ids: Any, temperature: float, top_k: int, top_p: float) -> None:
    if not isinstance(logits, torch.Tensor) or not isinstance(ids, torch.Tensor):
        raise UserError("token_logprobs takes tensors: logits [..., V] and ids [...]")
    if not logits.dtype.is_floating_point or ids.dtype not in (torch.int64, torch.int32):
        raise UserError(f"token_logprobs has no logits {logits.dtype} with ids {ids.dtype}", "Floats and integers.")
    if logits.dim() == 0 or logits.shape[:-1] != ids.shape or (ids.numel() and not logits.shape[-1]):
        raise UserError(
            f"ids {tuple(ids.shape)} are not one for each row of logits {tuple(logits.shape)}",
            "Drop the last position's logits, and the first id.",
        )
    if ids.numel() and not (ids.is_cuda and torch.cuda.is_current_stream_capturing()):
        least, most = int(ids.min()), int(ids.max())
        if least < 0 or most >= logits.shape[-1]:
            wrong = least if least < 0 else most
            raise UserError(f"there is no token {wrong} of {logits.shape[-1]}", "Leave padding and ignored ids out.")
    if not (temperature > 0 and math.isfinite(temperature)) or top_k < 0 or not 0 < top_p <= 1:
        raise UserError(f"no draw has temperature {temperature}, top_k {top_k} and top_p {top_p}")


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, ids: torch.Tensor, temperature: float, top_k: int, top_p: float
    ) -> torch.Tensor:
        width = logits.shape[-1]
        rows, places = logits.reshape(-1, width), ids.reshape(-1, 1).long()
        out, masses, kept = guarded(_forward)(rows, places, temperature, top_k, top_p)
        ctx.save_for_backward(logits, ids, masses, *([] if kept is None else [kept]))
        ctx.temperature = temperature
        dtype = torch.float64 if logits.dtype is torch.float64 else torch.float32
        return out.to(dtype).view(ids.shape)

    @staticmethod
    @once
    def backward(ctx: Any, gradient: torch.Tensor, *saved: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, ids, masses, *kept = saved
        return guarded(_backward)(logits, ids, masses, kept, gradient, ctx.temperature), None, None, None, None


def _forward(
    rows: torch.Tensor, places: torch.Tensor, temperature: float, top_k: int, top_p: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(logprobs [R], log masses [R], which tokens are kept [R, V] or None for all), the first two in float64."""
    out, masses, kept = [], [], []
    size = max(1, _CHUNK // max(1, rows.shape[1]))
    some = top_k or top_p < 1.0
    for part, at in zip(rows.split(size), places.split(size), strict=True):
        wide = part if part.dtype is torch.float64 else part.float()
        if some:
            mass, mask = _kept_masses(wide, temperature, top_k or wide.shape[1], top_p)
            kept.append(mask)
        else:
            mass = log_masses(wide, temperature)
        value = wide.gather(1, at)[:, 0].double() / temperature - mass
        out.append(torch.where(mask.gather(1, at)[:, 0] | value.isnan(), value, -torch.inf) if some else value)
        masses.append(mass)
    if not out:
        nothing = rows.new_empty(0, dtype=torch.float64)
        return nothing, nothing, None
    return torch.cat(out), torch.cat(masses), torch.cat(kept) if some else None


def _backward(
    logits: torch.Tensor,
    ids: torch.Tensor,
    masses: torch.Tensor,
    kept: list[torch.Tensor],
    gradient: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    width = logits.shape[-1]
    rows, places, above = logits.reshape(-1, width), ids.reshape(-1, 1).long(), gradient.reshape(-1, 1).double()
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    size = max(1, _CHUNK // max(1, width))
    for first in range(0, len(rows), size):
        part = slice(first, first + size)
        tempered = rows[part] if temperature == 1.0 else rows[part].double() / temperature
        distances = torch.sub(tempered, masses[part, None]).to(torch.promote_types(rows.dtype, torch.float32))
        shares = distances.exp_() if distances.is_cuda else vectors_only(torch.exp, distances)
        scale = above[part] / temperature
        if kept:  # a token that was not kept has no gradient
            shares = shares * kept[0][part]
            scale = scale.where(kept[0][part].gather(1, places[part]), 0.0)
        scale = scale.to(shares.dtype)
        own = (1.0 - shares.gather(1, places[part])) * scale
        out[part] = shares.mul_(-scale)
        out[part].scatter_(1, places[part], own.to(out.dtype))
    return out.view(logits.shape)


def log_masses(rows: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """L / T + ln of the sum of exp((l - L) / T) of each row of [R, V] -> [R] float64; NaN where L is not finite."""
    top = rows.max(dim=-1).values.double()
    tops = top.tolist()
    if rows.device.type == "cpu":  # row by row: a vectorized exp may treat the last elements of a tensor differently
        values = rows.detach().numpy()
        sums = [int(weights(row.astype(np.float64), t, temperature).sum()) for row, t in zip(values, tops, strict=True)]
    else:
        found = torch.sub(rows, top[:, None])  # in float64, as the second one is
        found = found if temperature == 1.0 else found.div_(temperature)
        # NaN or infinite logits make the largest logit not finite; the rest is cut in the conversion to integers
        sums = found.exp_().mul_(SCALE).to(torch.int64).sum(dim=-1).tolist()
    masses = [_log_mass(t, s, temperature) for t, s in zip(tops, sums, strict=True)]
    return torch.tensor(masses, dtype=torch.float64).to(rows.device)


def _log_mass(top: float, total: int, temperature: float) -> float:
    return top / temperature + math.log(total / SCALE) if total > 0 and math.isfinite(top) else math.nan


def weights(logits: npt.NDArray[np.float64], top: Any, temperature: float) -> npt.NDArray[np.int64]:
    """exp((l - top) / T) in whole multiples of 2^-44; 0 for NaN."""
    with np.errstate(invalid="ignore", over="ignore"):
        found = np.floor(np.exp((logits - top) / temperature) * SCALE)
    return np.where(np.isfinite(found), found, 0.0).astype(np.int64)


def nucleus_size(sums: npt.NDArray[np.int64], top_p: float) -> int:
    """How many of the largest reach top_p of the whole; `sums` are their weights' running sums."""
    need = math.ceil(top_p * int(sums[-1]))
    return min(int(np.searchsorted(sums, need, side="left")) + 1, len(sums))


def largest(rows: torch.Tensor, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Ids and logits of the largest logits of float32 rows, in falling order, equal ones by rising id. [R, count]."""
    vocabulary = rows.shape[-1]
    plain = torch.where(rows == 0, torch.zeros_like(rows), rows).contiguous()  # -0.0 and 0.0 are one logit
    bits = plain.view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    backwards = torch.arange(vocabulary - 1, -1, -1, device=rows.device)
    keys = (ordered << 32) + backwards  # all distinct: every sort gives the same
    best = keys.topk(count, dim=-1, sorted=True).values
    ids = vocabulary - 1 - (best & _TOKEN)
    return ids.cpu().numpy(), plain.gather(-1, ids).cpu().numpy().astype(np.float64)


def _kept_masses(rows: torch.Tensor, temperature: float, top_k: int, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    ids = largest(rows.float(), min(top_k, rows.shape[1]))[0]
    logits = rows.gather(1, torch.from_numpy(ids).to(rows.device)).double().cpu().numpy()
    mask = np.zeros(tuple(rows.shape), dtype=bool)
    masses = []
    for row, (mine, values) in enumerate(zip(ids, logits, strict=True)):
        sums = np.cumsum(weights(values, values[0], temperature))
        kept = nucleus_size(sums, top_p) if top_p < 1.0 and sums[-1] else len(sums)
        mask[row, mine[:kept]] = True
        masses.append(_log_mass(float(values[0]), int(sums[kept - 1]), temperature))
    return torch.tensor(masses, dtype=torch.float64).to(rows.device), torch.from_numpy(mask).to(rows.device)
