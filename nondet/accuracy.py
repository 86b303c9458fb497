"""How far a result may be from the float64 oracle, element by element; `nondet.watch` holds results to it.

Identical is not right: a kernel that gives zeros gives the same zeros at every batch size. The bounds below hold in the
worst case for a sound implementation, whatever its order of additions, so what exceeds one is wrong and not another
rounding. They are the price of that: an error that an order of additions could have made passes.

The bounds are those of Higham, Accuracy and Stability of Numerical Algorithms (2nd ed., 2002), section 3.1: a sum of n
products errs by at most gamma_n * sum |x||w|, with gamma_n = n u / (1 - n u), whatever its order. Here u is twice the
unit roundoff of the accumulator, since tensor cores truncate; sum |x||w| is at most ||x|| ||w|| (Cauchy-Schwarz). To it
come the rounding of the result, and the roundings that torch's own settings allow (TF32, reduced-precision reductions).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from nondet.kernels.declaration import AccuracyBound
from nondet.registry import load_object, operators

__all__ = [
    "bound_of",
    "declared_bound",
    "of_attention",
    "of_cumsum",
    "of_grouped",
    "of_linear",
    "of_logarithm",
    "of_matmul",
    "of_mean",
    "of_rms_norm",
    "of_scattered",
    "of_softmax",
    "of_sum",
]

_ROUNDINGS = 16.0  # of exp, rsqrt, division and the like, in units of the accumulator's epsilon


class _Terms(NamedTuple):
    """What the bounds are made of for one call."""

    reference: torch.Tensor  # float64, one result
    dtype: torch.dtype  # of the result
    device: str

    @property
    def rounded(self) -> torch.Tensor:
        """Two roundings of the result (a bias may come after the first), and what flushing to zero takes."""
        return self.reference.abs() * (2 * self.unit) + torch.finfo(self.dtype).tiny

    @property
    def unit(self) -> float:
        """Unit roundoff of the result's dtype."""
        return torch.finfo(self.dtype).eps / 2

    @property
    def _accumulator(self) -> torch.finfo:
        return torch.finfo(torch.float64 if self.dtype == torch.float64 else torch.float32)

    @property
    def epsilon(self) -> float:
        """Epsilon of the accumulator: float32, or float64 for float64."""
        return self._accumulator.eps

    @property
    def flushed(self) -> float:
        """What a term may lose where the accumulator's format flushes to zero."""
        return self._accumulator.tiny

    def gamma(self, n: int) -> float:
        """Relative error of a sum of n terms in the accumulator, in any order; infinite where the bound is void."""
        return _gamma(n, self.epsilon)


def _gamma(n: int, epsilon: float) -> float:
    return n * epsilon / (1 - n * epsilon) if n * epsilon < 0.5 else float("inf")


def of_linear(t: _Terms, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K] by weight [N, K]."""
    products = _of_products(t, x.shape[-1], x.double().norm(dim=-1)[..., None], weight.double().norm(dim=-1))
    extra = 0.0 if bias is None else bias.double().abs() * (t.gamma(2) + 2 * t.unit)
    return t.rounded + products + extra


def of_matmul(t: _Terms, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [.., M, K] by b [.., K, N]."""
    left, right = a.double().norm(dim=-1)[..., None], b.double().norm(dim=-2)[..., None, :]
    return t.rounded + _of_products(t, a.shape[-1], left, right)


def of_grouped(t: _Terms, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """x [R, K] by each row's own weight of [E, K, N]."""
    expert = torch.searchsorted(offsets.long(), torch.arange(x.shape[0], device=x.device), right=True)
    columns = torch.cat([weight.double().norm(dim=1), weight.new_zeros((1, weight.shape[2]), dtype=torch.float64)])
    # rows after the last expert's are zeros
    return t.rounded + _of_products(t, x.shape[-1], x.double().norm(dim=-1)[:, None], columns[expert])


def _of_products(t: _Terms, terms: int, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Of rows and columns of these norms; operands and products below the smallest normal number may count as zero."""
    flushed = t.flushed * (math.sqrt(terms) * (left + right) + terms)
    return left * right * (t.gamma(terms + 1) + _operand_rounding(t) + _partial_rounding(t)) + flushed


def _operand_rounding(t: _Terms) -> float:
    """What float32 operands lose where torch may shorten them: to TF32 (11 bits), or to bfloat16 (8 bits)."""
    if t.dtype != torch.float32:
        return 0.0
    lost = {"highest": 0.0, "high": 2.0**-10, "medium": 2.0**-7}[torch.get_float32_matmul_precision()]
    return 2 * lost + lost * lost


def _partial_rounding(t: _Terms) -> float:
    """What split-K may lose by keeping its partial sums in the result's dtype, each rounded once."""
    flags = torch.backends.cuda.matmul
    allowed = {
        torch.bfloat16: flags.allow_bf16_reduced_precision_reduction,
        torch.float16: flags.allow_fp16_reduced_precision_reduction,
    }
    return 2 * t.unit if t.device == "cuda" and allowed.get(t.dtype) else 0.0


def of_attention(
    t: _Terms,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores err by what their products do and by roundings to the operands' dtype; so do the weights made of them."""
    depth, groups = q.shape[-1], q.shape[1] // k.shape[1]
    factor = scale if scale is not None else depth**-0.5
    keys = k.double().norm(dim=-1).amax(-1).repeat_interleave(groups, 1)[..., None, None]  # [B, Hq, 1, 1]
    largest = q.double().norm(dim=-1)[..., None] * keys * abs(factor)  # |score| at most, [B, Hq, Tq, 1]
    score = largest * (t.gamma(depth + 2) + _operand_rounding(t) + 4 * t.unit)
    values = v.double().abs().amax(-2).repeat_interleave(groups, 1)[..., None, :]  # [B, Hq, 1, D]
    weights = torch.expm1(2 * score) + t.gamma(k.shape[-2] + 2) + 4 * t.unit + _ROUNDINGS * t.epsilon
    return t.rounded + (weights + _operand_rounding(t)) * values


def of_rms_norm(t: _Terms, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """All terms of the mean have one sign; transformers round three times, and always to float32."""
    single = torch.finfo(torch.float32).eps
    return t.rounded + t.reference.abs() * (_gamma(x.shape[-1], single) + 4 * t.unit + _ROUNDINGS * single)


def of_softmax(t: _Terms, x: torch.Tensor) -> torch.Tensor:
    """exp errs by the distance from the maximum, whose rounding it takes; then a sum of one sign."""
    distance = x.double().amax(-1, keepdim=True) - x.double()
    relative = t.gamma(x.shape[-1]) + (_ROUNDINGS + 2 * distance) * t.epsilon + 2 * t.unit
    return t.rounded + t.reference.abs() * relative.nan_to_num(nan=float("inf"))


def of_logarithm(t: _Terms, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """x, its maximum and the logarithm of a sum are added: each brings a rounding of its own size.

    torch's CPU kernel keeps the logarithm, at most log V, in the result's dtype.
    """
    largest = x.double().nan_to_num(neginf=0.0).abs().amax(-1, keepdim=t.reference.dim() == x.dim())
    logarithm = t.gamma(x.shape[-1]) + 2 * t.unit * math.log(x.shape[-1])
    return t.rounded * 3 + logarithm + _ROUNDINGS * t.epsilon * (largest + t.reference.abs() + 1)


def of_sum(t: _Terms, x: torch.Tensor) -> torch.Tensor:
    """Over the last axis, in any order."""
    return t.rounded + t.gamma(x.shape[-1]) * x.double().abs().sum(-1) + x.shape[-1] * t.flushed


def of_cumsum(t: _Terms, x: torch.Tensor) -> torch.Tensor:
    """Each a sum of all up to it, which a GPU's scan keeps in the result's dtype."""
    epsilon = t.epsilon if t.device == "cpu" else max(t.epsilon, 2 * t.unit)
    return t.rounded + _gamma(x.shape[-1], epsilon) * x.double().abs().cumsum(-1) + x.shape[-1] * t.flushed


def of_mean(t: _Terms, x: torch.Tensor) -> torch.Tensor:
    """A sum, and a division."""
    return t.rounded * 2 + t.gamma(x.shape[-1] + 1) * x.double().abs().mean(-1) + t.flushed


def of_scattered(t: _Terms, target: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Sums are kept in the target's own dtype."""
    most = int(index.flatten().bincount().max()) if index.numel() else 0
    add = torch.Tensor.index_add if source.dim() > 1 else torch.Tensor.scatter_add
    return t.rounded + _gamma(most + 1, 2 * t.unit) * add(target.double().abs(), 0, index, source.double().abs())


def declared_bound(operator: str) -> AccuracyBound | None:
    """What the operator's declaration says of its bound; None where it says nothing."""
    declaration = operators().get(operator)
    return None if declaration is None else declaration.accuracy


def bound_of(
    operator: str, arguments: Sequence[Any], keywords: dict[str, Any], reference: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor | None:
    """What is allowed at each element, float64 of the reference's shape; None where no bound is written down.

    Args:
        operator: As in the registry.
        arguments, keywords: Of the call, as `nondet.kernels.reference` takes them.
        reference: Its float64 result.
        dtype: Of the result.
    """
    declared = declared_bound(operator)
    if declared is None or not dtype.is_floating_point:
        return None
    bound: Callable[..., torch.Tensor] = load_object(declared.bound)
    return bound(_Terms(reference, dtype, reference.device.type), *arguments, **keywords)
