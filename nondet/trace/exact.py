"""A wrong sum or rounding? The guilty call on numbers whose exact result is known, against the same call in float64.

On ones every partial sum is a whole number. On small integers results may cancel, and then a distance in ULP says
nothing: there the error is held against the sum of the terms' magnitudes, which is the same call on absolute values.
An attention gets equal scores (queries of zero), so that its result is the mean of the values.

The oracle is the call itself in float64, which torch computes by other kernels: a fault of one kernel shows, one that
the float64 code shares does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from nondet.core.compare import error_against
from nondet.core.records import Replay
from nondet.trace.calls import RecordedCall

__all__ = ["exact"]

_QUERY = "0"  # the place among attention's arguments
_MOST_ULP = 2
# Roundings to the result's own format that a library may make on the way (split sums kept in it), each half an ULP of
# the terms' magnitudes: a term or a slice that is lost, doubled or of the wrong sign costs far more on these inputs.
_ROUNDINGS = 4


def exact(b: RecordedCall, name: str) -> Replay:
    """Ones, then small integers."""
    attention = name == "scaled_dot_product_attention"
    double = replace(b, kwargs={k: torch.float64 if isinstance(v, torch.dtype) else v for k, v in b.kwargs.items()})

    def change(low: int, high: int, *, wide: bool, magnitude: bool) -> Callable[[str, torch.Tensor], torch.Tensor]:
        generator = torch.Generator().manual_seed(1)

        def small(path: str, tensor: torch.Tensor) -> torch.Tensor:
            roles = set(b.roles.get(path, ())) - {""}
            if not tensor.dtype.is_floating_point:
                return tensor
            if len(roles) > 1:  # a mask
                return tensor.double() if wide else tensor
            if attention and path == _QUERY:
                return torch.zeros_like(tensor, dtype=torch.float64 if wide else None)
            whole = torch.randint(low, high, tensor.shape, generator=generator)
            whole = whole.abs() if magnitude else whole
            return whole.to(torch.float64 if wide else tensor.dtype).to(tensor.device)

        return small

    ones = b.run(change=change(1, 2, wide=False, magnitude=False))
    ulp = error_against(ones, double.run(change=change(1, 2, wide=True, magnitude=False))).max_ulp
    result = b.run(change=change(-2, 3, wide=False, magnitude=False))
    reference = double.run(change=change(-2, 3, wide=True, magnitude=False))
    scale = double.run(change=change(-2, 3, wide=True, magnitude=True)).abs()
    gap = (result.double() - reference).abs()
    bound = _ROUNDINGS * torch.finfo(result.dtype).eps * torch.maximum(scale, reference.abs())
    within = bool((gap <= bound).all())  # NaN is within nothing
    if ulp <= _MOST_ULP and within:
        sentence = (
            f"on ones it is within {ulp} ULP of float64, on small integers within the roundings of its format: what "
            "differs is rounding"
        )
    else:
        where = f"{ulp} ULP from float64 on ones" if ulp > _MOST_ULP else "beyond rounding on small integers"
        sentence = f"it is {where}: a wrong result, a bug rather than rounding"
    right = ulp <= _MOST_ULP and within
    return Replay(name="exact", status="identical" if right else "divergent", trials=2, distinct=1, sentence=sentence)
