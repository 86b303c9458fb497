"""Stock operators over one axis that have no kernel of ours: proven at first use, for each shape met, or at risk.

The claim is the one that matters to a request: each row has, in this batch, the bits that it has alone. It is proven by
computing the operator on generated rows of the very shape, dtype and layout, then on single rows of them, and comparing
the bits. A library chooses its kernel by just these, so the claim is about that choice and holds until another driver
or torch is installed, which is what a certificate's machine key says. It is no proof for inputs that a kernel would
treat in another way; the inputs have wide exponents, cancel, and (for sort) are full of ties.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from nondet.core.certificates import certificates
from nondet.core.launch import proving
from nondet.core.proof import distinct, operands_key, settings, switches
from nondet.kernels.dispatch.coverage import MOVED, over_batch, padded_in_front

__all__ = ["proven"]

_MEMBER = "aten"
_ROWS_COMPARED = 48
_RUNNING = frozenset({"cumprod", "cumsum", "_logcumsumexp"})


def proven(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, str]:
    """Whether stock `name` gives each row its own bits at the shape of args[0]; and why not, or on what ground.

    While a CUDA graph is captured nothing can be computed on the side: what is not known by then is at risk.
    """
    x: torch.Tensor = args[0]
    form = _form_of(name, x, args, kwargs)
    if form.reason:
        return form.holds, form.reason
    if form.axis == 0 and (mixes := over_batch(x, 0)):
        return False, mixes
    if name in _RUNNING and padded_in_front(x, form.axis):
        return False, MOVED
    known = certificates("cuda" if x.is_cuda else "cpu")
    standing = known.standing(_MEMBER, form.key)
    if standing is None:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return False, "not proven before a CUDA graph was captured"
        with proving():
            parted = _parted(name, x, form.axis, args[1:], kwargs)
        standing = parted is None
        rows = min(_ROWS_COMPARED, x.numel() // max(1, x.shape[form.axis]))
        evidence = f"{rows} rows in the batch and alone: " + ("equal bits" if standing else f"row {parted} parts")
        known.record(_MEMBER, form.key, standing, evidence)
    return (True, "each row as alone") if standing else (False, "a row's bits are not those that it has alone")


class _Form(NamedTuple):
    """What is known of a call without its numbers: the key of its certificate, or the answer and its reason."""

    axis: int = 0
    key: str = ""
    holds: bool = False
    reason: str = ""


_FORMS_KEPT = 4096
_forms: dict[tuple[object, ...], _Form] = {}


def _form_of(name: str, x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Form:
    """The form, remembered by the raw layout, arguments and settings: a key in words takes far longer to write."""
    device = "cuda" if x.is_cuda else "cpu"
    where = x.data_ptr() & (255 if x.is_cuda else 63)
    raw = (
        name,
        x.dtype,
        x.shape,
        x.stride(),
        where,
        args[1:],
        tuple(kwargs.items()) if kwargs else (),
        device,
        switches(device),
    )
    try:
        form = _forms.get(raw)
    except TypeError:  # a list of axes
        return _form(name, x, args, kwargs)
    if form is None:
        if len(_forms) >= _FORMS_KEPT:
            _forms.clear()
        form = _forms[raw] = _form(name, x, args, kwargs)
    return form


def _form(name: str, x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Form:
    axis = _axis(name, x, args, kwargs)
    if axis is None:
        return _Form(reason="over several axes, or over all")
    if not x.numel():
        return _Form(holds=True, reason="each row as alone")  # there is none
    if not distinct(x):
        return _Form(reason="elements that share a place in memory")
    rest = [str(v) for v in (*args[1:], *sorted(kwargs.items())) if not isinstance(v, torch.Tensor)]
    key = operands_key(f"row-alone {name}", (x,), [f"axis={axis}", *rest, *settings(x.device.type)])
    return _Form(axis, key)


def _axis(name: str, x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """The one axis that the operator runs over, or None."""
    place = {"linalg_vector_norm": 2, "sort.stable": 1}.get(name, 1)
    dim = args[place] if len(args) > place else kwargs.get("dim", -1 if name.startswith("sort") else None)
    if isinstance(dim, (list, tuple)) and len(dim) == 1:
        dim = dim[0]
    return dim % x.dim() if isinstance(dim, int) and x.dim() else None


def _parted(name: str, x: torch.Tensor, axis: int, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """The first generated row whose bits in the batch are not those that it has alone; None where all agree."""
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    span = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    batch = x.new_empty(span).as_strided(x.shape, x.stride()).copy_(_inputs(name, x))  # x's own layout, dense or not
    together = _tuple(operator(batch, *rest, **kwargs))
    others = [d for d in range(x.dim()) if d != axis]
    rows = x.numel() // max(1, x.shape[axis])
    for row in sorted({i * rows // _ROWS_COMPARED for i in range(_ROWS_COMPARED)} | {max(0, rows - 1)}):
        place: list[slice] = [slice(None)] * x.dim()
        left = row
        for d in reversed(others):
            place[d] = slice(left % x.shape[d], left % x.shape[d] + 1)
            left //= x.shape[d]
        alone = _tuple(operator(batch[tuple(place)].contiguous(), *rest, **kwargs))
        for part, whole in zip(alone, together, strict=True):
            kept = place if whole.dim() == x.dim() else [p for d, p in enumerate(place) if d != axis]
            if not _identical(whole[tuple(kept)], part):
                return row
    return None


def _inputs(name: str, x: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(x.numel())
    drawn = torch.rand(x.shape, generator=generator)
    if name.startswith("sort"):
        return (drawn * 8).floor()
    if "prod" in name:
        return 0.5 + drawn
    signs = torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
    return signs * drawn * torch.exp2(torch.randint(-8, 8, x.shape, generator=generator).float())


def _identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    from nondet.core.compare import identical

    return identical(a.contiguous(), b.contiguous().view(a.shape))


def _tuple(out: Any) -> tuple[torch.Tensor, ...]:
    return (out,) if isinstance(out, torch.Tensor) else tuple(out)
