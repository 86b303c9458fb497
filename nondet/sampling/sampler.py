"""A sampler whose draw belongs to (seed, position), and that gives a row the same token whatever the batch.

Its steps are such that no order of operations can matter, so it is invariant by arithmetic and not by luck:

1. Selection: logits are compared as integers (an order-preserving view of their bits, with the token id below it), all
   distinct, so any sort or top-k gives one result.
2. Weights: exp((l - l_max) / T) in float64, row by row, cut to whole multiples of 2^-44. Sums of integers are exact.
3. Nucleus: the fewest of the largest whose exact sum reaches top_p of the whole.
4. Draw: 53 bits of Philox4x32-10 with the seed as its key and the position as its counter, against the exact sum of
   the kept weights in the order of their token ids: a logit that moves a little moves the borders a little, where an
   order by logits would let two tokens change places.

What is left is the logits: if they are the same bits, so is the token. Weights below 2^-44 of the largest are never
drawn, a chance of less than 2^-26 for the largest vocabulary. Logprobs are the model's own, at temperature 1 over the
whole vocabulary, so that traces show a difference where the nucleus has a single token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from nondet.sampling.plan import Request
from nondet.sampling.protocol import Outcome
from nondet.sampling.temperature import Sampling

if TYPE_CHECKING:
    from nondet.sampling.schedule import SessionLog

__all__ = ["Draw", "Drawing", "draw_row", "draw_rows", "drawn_outcome", "generation", "philox", "uniform_bits"]

_SCALE = 2.0**44
_CERTAIN = 1.0e4  # a logit beside zeros: the engine's argmax takes it, and exp(-1e4) is 0 in every dtype
_BITS = 53
_MASK = 0xFFFFFFFF
_M0, _M1, _W0, _W1 = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85


class Draw(NamedTuple):
    """One token, and how near it was to being another one.

    Attributes:
        logprob: ln p of the token at temperature 1 over the whole vocabulary; NaN where the logits are no numbers.
        border: Distance of the draw from the nearest border between two tokens, as a share of the mass that is drawn
            from; 1.0 where only one token is left.
        cut: Logit of the last token that top-k keeps minus that of the first it drops: 0.0 is an exact tie, which the
            token ids decide; NaN without top-k.
        nucleus: Distance of the kept mass from top_p, at the nearer end of the last token, as a share; NaN without.
    """

    token: int
    logprob: float
    border: float
    cut: float
    nucleus: float


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: four 32-bit words that belong to a counter and a key.

    Source: J. K. Salmon, M. A. Moraes, R. O. Dror and D. E. Shaw, Parallel random numbers: as easy as 1, 2, 3.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & _MASK, (a >> 32) ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def uniform_bits(seed: int, position: int) -> int:
    """53 bits, uniform, of the token at `position` (0 is the first generated one) under `seed`."""
    words = philox((position & _MASK, position >> 32, 0, 0), (seed & _MASK, (seed >> 32) & _MASK))
    return (words[0] << 21) | (words[1] >> 11)


def draw_rows(rows: torch.Tensor, asked: Sequence[tuple[Sampling, int]]) -> list[Draw]:
    """A token for each row.

    Args:
        rows: [R, V] float32 logits, on any device.
        asked: For each row its sampling and position.
    """
    if not asked:
        return []
    vocabulary = rows.shape[-1]
    # one more than is kept, to see how close the first that is dropped came
    widest = max(vocabulary if not s.top_k else s.top_k + 1 for s, _ in asked)
    ids, logits = _largest(rows, min(vocabulary, widest))
    masses = _log_masses(rows)
    return [draw_row(ids[i], logits[i], masses[i], sampling, position) for i, (sampling, position) in enumerate(asked)]


def _largest(rows: torch.Tensor, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Ids and logits of the largest logits of each row, in falling order, equal ones by rising id. [R, count] each."""
    vocabulary = rows.shape[-1]
    plain = torch.where(rows == 0, torch.zeros_like(rows), rows).contiguous()  # -0.0 and 0.0 are one logit
    bits = plain.view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    backwards = torch.arange(vocabulary - 1, -1, -1, device=rows.device)
    keys = (ordered << 32) + backwards  # all distinct: every sort gives the same
    best = keys.topk(count, dim=-1, sorted=True).values
    ids = vocabulary - 1 - (best & _MASK)
    return ids.cpu().numpy(), plain.gather(-1, ids).cpu().numpy().astype(np.float64)


def _log_masses(rows: torch.Tensor) -> list[float]:
    """ln of the sum of exp(l) of each row, from an exact sum of weights in whole multiples of 2^-44."""
    top = rows.max(dim=-1, keepdim=True).values
    if rows.device.type == "cpu":  # row by row: a vectorized exp may treat the last elements of a tensor in another way
        values, tops = rows.numpy().astype(np.float64), top.numpy().astype(np.float64)
        sums = [int(_weights(row, t, 1.0).sum()) for row, t in zip(values, tops, strict=True)]
    else:
        exact = torch.floor(torch.exp(rows.double() - top.double()) * _SCALE)
        sums = exact.nan_to_num(0.0, 0.0, 0.0).to(torch.int64).sum(dim=-1).tolist()
    largest = top.squeeze(-1).double().cpu().tolist()
    return [
        t + math.log(s / _SCALE) if s > 0 and math.isfinite(t) else math.nan for t, s in zip(largest, sums, strict=True)
    ]


def _weights(logits: npt.NDArray[np.float64], top: Any, temperature: float) -> npt.NDArray[np.int64]:
    with np.errstate(invalid="ignore", over="ignore"):
        weights = np.floor(np.exp((logits - top) / temperature) * _SCALE)
    return np.nan_to_num(weights, nan=0.0, posinf=0.0).astype(np.int64)


def draw_row(
    ids: npt.NDArray[np.int64], logits: npt.NDArray[np.float64], log_mass: float, sampling: Sampling, position: int
) -> Draw:
    """One token from the largest logits of a row.

    Args:
        ids, logits: [C] candidates in falling order; one more than top_k where the vocabulary has more.
        log_mass: ln of the sum of exp over the whole vocabulary.
    """
    kept = min(sampling.top_k or len(ids), len(ids))
    cut = float(logits[kept - 1] - logits[kept]) if kept < len(ids) else math.nan
    if not math.isfinite(logits[0]):  # no numbers to draw by: the trace will say so
        return Draw(int(ids[0]), math.nan, 1.0, cut, math.nan)
    weights = _weights(logits[:kept], logits[0], sampling.temperature)
    sums = np.cumsum(weights)  # of integers: exact in any order
    whole, nucleus = int(sums[-1]), math.nan
    if sampling.top_p < 1.0:
        need = math.ceil(sampling.top_p * whole)
        kept = min(int(np.searchsorted(sums, need, side="left")) + 1, kept)
        before = int(sums[kept - 2]) if kept > 1 else 0
        nucleus = min(int(sums[kept - 1]) - need, need - before) / whole
    order = np.argsort(ids[:kept])
    sums = np.cumsum(weights[:kept][order])
    mass = int(sums[-1])
    point = (uniform_bits(sampling.seed, position) * mass) >> _BITS
    place = int(np.searchsorted(sums, point, side="right"))
    # the outer ends are no borders: nothing lies beyond them
    inner = [point - int(sums[place - 1])] if place else []
    inner += [int(sums[place]) - point] if int(sums[place]) < mass else []
    border = min(inner) / mass if inner else 1.0
    chosen = int(order[place])
    return Draw(int(ids[chosen]), float(logits[chosen]) - log_mass, border, cut, nucleus)


class Drawing:
    """Puts our draw in the place of the engine's, as a forward hook: it draws from the logits of each row, and hands on
    logits of which the engine's own argmax can only take the drawn token.

    Attributes:
        drawn: Request id -> its draws, in order.
    """

    def __init__(self, requests: Sequence[Request], log: SessionLog) -> None:
        self._of = {r.id: (r.sampling, len(r.prompt)) for r in requests}
        self._log = log
        self.drawn: dict[str, list[Draw]] = {}

    @staticmethod
    def of(requests: Sequence[Request], log: SessionLog) -> Drawing | None:
        """Of these requests; None where nobody's draw is ours."""
        ours = [r.sampling is not None and r.sampling.seeded for r in requests]
        if any(ours) and not all(ours):
            raise ValueError("a session draws for all of its requests, or for none")
        return Drawing(requests, log) if any(ours) else None

    def __call__(self, _module: Any, _args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """The hook."""
        logits, wanted = output.logits[0], kwargs["logits_indices"]
        places = torch.arange(logits.shape[0], device=logits.device)
        if logits.shape[0] != wanted.shape[0]:
            places = wanted  # a model without logits_to_keep gives a row for every query token
        asked: list[tuple[Sampling, int]] = []
        names = []
        for span in self._log.pack:
            sampling, prompt = self._of[span.request]
            if span.new and sampling is not None:
                asked.append((sampling, span.first + span.rows - prompt))
                names.append(span.request)
        places = places[: len(asked)].long()
        draws = draw_rows(logits[places].float(), asked)
        for name, draw in zip(names, draws, strict=True):
            self.drawn.setdefault(name, []).append(draw)
        chosen = torch.zeros_like(logits)
        chosen[places, torch.tensor([d.token for d in draws], dtype=torch.long, device=logits.device)] = _CERTAIN
        output.logits = chosen[None]
        return output


def generation(requests: Sequence[Request]) -> dict[str, Any]:
    """transformers' own sampling, where the draw is left to it; else greedy, which takes what our draw hands on."""
    sampling = next((r.sampling for r in requests if r.sampling is not None), None)
    if sampling is None or sampling.seeded:
        return {"do_sample": False}
    wanted = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    return {"do_sample": True} | wanted


def drawn_outcome(outcome: Outcome, draws: Sequence[Draw]) -> Outcome:
    """The outcome of a request whose tokens were drawn here: with the model's logprobs, and how near each draw was.

    One whose tokens are not those that were drawn is an error, never a completion: a hook was left out, or run twice.
    """
    if outcome.finish in ("error", "cut") or outcome.request.sampling is None:
        return outcome
    if [d.token for d in draws] != outcome.token_ids:
        return replace(outcome, finish="error", reason="the engine went on with other tokens than were drawn")
    return replace(
        outcome,
        logprobs=np.asarray([d.logprob for d in draws], dtype="<f4").tobytes(),
        border=np.asarray([d.border for d in draws], dtype="<f4").tobytes(),
        cut=np.asarray([d.cut for d in draws], dtype="<f4").tobytes(),
        nucleus=np.asarray([d.nucleus for d in draws], dtype="<f4").tobytes(),
    )
