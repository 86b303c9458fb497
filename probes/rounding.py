"""Rounding or not: how far a function's results can differ because its sums are taken in another order.

No bound is written down for a function of a user. So the function is computed again with noise at each sum (products,
norms, softmax, attention, means): relative noise on the terms and on the result, about as large as what another order
of many terms changes. How far its results then differ is what rounding may give, after all that the function does with
a sum. Where no sum is seen (a kernel of Triton, compiled code), its inputs get the noise.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from nondet.core.compare import difference, numbers, readable, same
from nondet.core.records import Judged, Value
from nondet.core.watch import operand_loss

_SUMS = re.compile(
    r"(mm|mv|dot|linear|matmul|conv|attention|softmax|norm|sum|mean|var|std|logsumexp|einsum|loss|scatter_add|index_add"
    r"|embedding_dense|embedding_bag)(?!.*_$)"
)
_ADDS = re.compile(r"(mm|mv|dot|matmul|mean|add)$|^(cum)?sum$|^embedding_dense")  # only adds terms, or products
_DRAWS = {True: 4, False: 12}  # of noise, by whether the result is of floats: tokens change seldom
# Another order of 4,096 terms changes a float32 sum by about so many units of roundoff. Sums of shorter formats are
# kept in float32 and rounded once, which costs one unit.
_UNITS = {torch.float64: 64.0, torch.float32: 64.0}
_ROUNDS, _DEVIATIONS = 4, 4.0  # of noise, for how far it moves an element; standard deviations that it may
_WORST = 8192.0  # times what orders give: more than a sum of 2^18 terms errs at worst
_FAR = 4.0  # times what rounding may give: beyond it is no rounding
FINER = 16.0  # times less rounding in float64
_WIDE = 0.1  # of a result's scale, or of its integers
_CONSTANT = 1e-3  # largest relative spread of a factor that all elements share, or two roundings of a short format


def unit(dtype: torch.dtype) -> float:
    """Relative noise for terms and sums of a dtype."""
    lost = operand_loss() if dtype == torch.float32 else 0.0
    return max(_UNITS.get(dtype, 1.0) * torch.finfo(dtype).eps / 2, lost)


class _Sums(TorchDispatchMode):
    """Notes the sums that a block computes, by name and shapes; with a seed each gets noise: of `dtype`, whose partial
    sums are in the format `kept`, or of its own operands'."""

    def __init__(self, seed: int | None, dtype: torch.dtype | None = None, kept: torch.dtype | None = None) -> None:
        super().__init__()
        self.dtype, self.kept, self.seed, self.seen = dtype, kept, seed, list[tuple[str, tuple[torch.Size, ...]]]()
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.name().partition("::")[2].partition(".")[0], kwargs or {}
        if not (_SUMS.search(name) and any(isinstance(x, torch.Tensor) and x.dtype.is_floating_point for x in args)):
            return func(*args, **kwargs)
        self.seen.append((name, tuple(x.shape for x in args if isinstance(x, torch.Tensor))))
        if self.seed is None:
            return func(*args, **kwargs)
        result = func(*tree_map_only(torch.Tensor, self.noised, args), **kwargs)
        first = result[0] if isinstance(result, tuple | list) else result
        first.copy_(self.noised(first))
        if self.kept is not None and _ADDS.search(name):  # a partial sum may be as large as all terms of one sign
            sizes = func(*tree_map_only(torch.Tensor, torch.abs, args), **kwargs)
            first += self.noised(sizes, self.kept) - sizes
        return result

    def noised(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Floats with noise; other tensors as they are."""
        if not x.dtype.is_floating_point or x.element_size() == 1:
            return x
        if x.device not in self._generators:
            self._generators[x.device] = torch.Generator(x.device).manual_seed(self.seed or 0)
        wide = x.double() if x.dtype == torch.float64 else x.float()
        draw = torch.rand(x.shape, generator=self._generators[x.device], device=x.device, dtype=wide.dtype)
        return (wide * (1 + unit(dtype or self.dtype or x.dtype) * (2 * draw - 1))).to(x.dtype)


def sums_of(call: Callable[[], Any]) -> list[tuple[str, tuple[torch.Size, ...]]]:
    """The sums that a call computes, by name and shapes; empty where they can't be seen."""
    mode = _Sums(None)
    return mode.seen if _ran(mode, call) is not None else []


def _ran(mode: Any, call: Callable[[], Any]) -> Any:
    """The result under a mode, None where it takes none: compiled code and some libraries, or it refuses noise."""
    try:
        with mode:
            return call()
    except Exception:  # noqa: BLE001 - whatever a function raises there, it does not raise by itself
        return None


def rounding_of(call: Callable[[Any], torch.Tensor], inputs: Any, dtype: torch.dtype) -> float | None:
    """How far results may differ by rounding, as a share of their scale; None where it is not known: neither sums nor
    floats among the inputs are seen. `call(inputs)` computes; `dtype`: the narrowest of the result."""
    clean, floats = call(inputs), dtype.is_floating_point or dtype.is_complex
    far, known = 0.0, False
    for seed in range(_DRAWS[floats]):
        if (result := _moved(_Sums(seed), call, inputs)) is not None:
            far, known = max(far, apart([clean, result], [0, 1])["1"]["far"]), True
    if not known:
        return None
    # a sum that is not seen may come last
    return 2 * max(far, unit(dtype)) if floats else far


def _moved(mode: _Sums, call: Callable[[Any], torch.Tensor], inputs: Any) -> torch.Tensor | None:
    """The result with noise at its sums, or in its inputs where none is seen; None where neither can be."""
    result: torch.Tensor | None = _ran(mode, partial(call, inputs))

    def moved(x: torch.Tensor) -> torch.Tensor:  # whole numbers stay, as masks and positions are not rounded
        return x if x.element_size() == 1 or bool((x == x.round()).all()) else mode.noised(x)

    if result is None or not mode.seen:
        noisy = tree_map_only(torch.Tensor, moved, inputs)
        unmoved = all(x is y for x, y in zip(tree_leaves(inputs), tree_leaves(noisy), strict=True))
        return None if unmoved else _ran(nullcontext(), partial(call, noisy))
    return result


def apart(results: Sequence[torch.Tensor], values: Sequence[Value]) -> dict[str, dict[str, float]]:
    """Of each class but the first, by its first value: how far it is from the first as a share of the results' scale
    (of integers, the share of elements that differ), and the factor that the first half of its elements share."""
    found, dtype = {}, results[0].dtype
    spread = max(_CONSTANT, 2 * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0)
    for value, result in zip(values[1:], results[1:], strict=True):
        gap = difference(results[0], result)
        if not (dtype.is_floating_point or dtype.is_complex):
            far = gap.mismatched / gap.compared
        else:
            lost = gap.nonfinite or (gap.max_abs and not gap.scale)
            far = sys.float_info.max if lost else gap.max_abs / (gap.scale or 1.0)
        half = slice(0, -(-readable(result).numel() // 2))
        mine, theirs = (readable(x).double().flatten()[half] for x in (results[0], result))
        kept = (mine != 0) & torch.isfinite(mine) & torch.isfinite(theirs)
        ratio = theirs[kept] / mine[kept]
        shared = len(ratio) > 1 and float(ratio.max() - ratio.min()) <= spread * float(ratio.abs().max())
        shared = shared and abs(float(ratio.mean()) - 1) > spread
        found[str(value)] = {"far": far, "factor": float(ratio.mean()) if shared else 0.0}
    return found


def orders_apart(reference: Callable[[Any], Any], inputs: Any, dtype: torch.dtype, kept: torch.dtype) -> torch.Tensor:
    """How far orders of the same sums, with a result of `dtype` and partial sums that are `kept` in their own, are
    apart: at each element of a float64 reference, which moves so far where its sums get noise; NaN if none shows."""
    clean = reference(inputs)
    squares = torch.zeros_like(clean)
    for seed in range(_ROUNDS):
        moved = _moved(_Sums(seed, dtype, kept), reference, inputs)
        squares += torch.nan if moved is None else (moved - clean).square() / _ROUNDS
    # a sum of one sign comes with an error of its own size, a result is rounded, and a tiny one may be flushed to zero
    return _DEVIATIONS * squares.sqrt() + 2 * unit(dtype) * clean.abs() + torch.finfo(dtype).tiny


def judged_classes(results: Sequence[torch.Tensor], usual: torch.Tensor, look: str) -> Judged:
    """Whether classes of results are apart by rounding: by no more than orders are, `usual`, at each element. With a
    `look`, of what no order explains, that is not decided, nor what is farther, unless it is far beyond, NaN or
    infinity. The figures are of the element that is farthest for its rounding."""
    first, *others = (x.double() for x in results)
    gaps = [torch.where(same(first, x), 0.0, (x - first).abs().nan_to_num(torch.inf, torch.inf)) for x in others]
    gap, size = torch.stack(gaps).amax(0), torch.where(first.isfinite(), first.abs(), 0.0).amax()
    ratio = torch.where(gap > 0, (gap / usual).nan_to_num(torch.inf, torch.inf), 0.0).flatten()
    at = ratio.argmax()
    far, bound, scale, most = numbers(gap.flatten()[at], usual.flatten()[at], size, ratio[at])
    far, known = min(far / (scale or 1.0), sys.float_info.max), bound / (scale or 1.0) if math.isfinite(bound) else None
    kind = "rounding" if most <= 1.0 and not look else "bug" if most > _WORST and known is not None else "open"
    return Judged(kind=kind, far=far, bound=known, dtype=str(results[0].dtype).removeprefix("torch."), look=look)


def judged(
    far: float, bound: float | None, dtype: torch.dtype, look: str, *, certain: bool = False, own: bool = False
) -> Judged:
    """Rounding, not rounding, or not decided. `certain`: no order of a sum can explain it, however small it is. `own`:
    a bound of the caller's. Noise that turns results over (another expert, another token) bounds nothing: below a wide
    bound it is not decided."""
    kind = "open"
    if certain or (bound is not None and far > (1.0 if own else _FAR) * bound):
        kind = "bug"
    elif bound is not None and far <= bound and (own or bound <= _WIDE):
        kind = "rounding"
    return Judged(kind=kind, far=far, bound=bound, dtype=str(dtype).removeprefix("torch."), look=look)
