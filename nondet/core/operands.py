"""The one maker of operands, for every command: of a declared operator, at given sizes, of a kind, in a layout."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from nondet.core.inputs import EXACT, generator, make
from nondet.core.operator import Operator, Shape
from nondet.core.proof import product_inputs
from nondet.core.registry import load_object

HARD = ("wide", "outlier")  # numbers of many sizes
Operands = tuple[torch.Tensor, ...]


def drawn(
    operator: Operator, shape: Shape, dtype: torch.dtype, device: str, rng: torch.Generator, kind: str = "bell"
) -> tuple[Any, ...]:
    """Fresh operands in the order of the signature. Those of the batch are of the kind, weights are ordinary."""
    batch, made = operator.operands[0].axes[0], []
    for operand in operator.operands:
        size = tuple(shape[axis] for axis in operand.axes)
        if operand.made_by is not None:
            made.append(load_object(operand.made_by)(shape, device))
        elif operand.below is not None:
            made.append(torch.randint(0, shape[operand.below], size, device=device, generator=rng))
        else:
            own = kind if batch in operand.axes else "bell"
            x = make(own, size, dtype, device, rng)
            if own in HARD:
                x *= operand.hard_scale
            made.append(x.mT if operand.transposed else x)
    return tuple(made)


def rows_of(operator: Operator, shape: Shape, operands: tuple[Any, ...], start: int, stop: int) -> tuple[Any, ...]:
    """The same operands with these rows of the batch only; weights are unchanged."""
    batch, cut = operator.operands[0].axes[0], []
    for operand, x in zip(operator.operands, operands, strict=False):  # a bias is not declared
        if operand.made_by is not None and isinstance(x, torch.Tensor) and not x.is_floating_point():
            x = load_object(operand.made_by)({**shape, batch: stop - start}, str(x.device))  # how many rows are whose
        elif batch in operand.axes:
            axis = operand.axes.index(batch) - len(operand.axes)
            x = x.narrow(axis, start, stop - start) if x.shape[axis] > 1 else x
        cut.append(x)
    return (*cut, *operands[len(cut) :])


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """x [.., M, K] with the same numbers: "strided", in every second row of a longer tensor; "offset", from an
    unaligned address, as a slice of a cache is; "columns", stored as [.., K, M]."""
    if layout == "strided":
        return pad(x, (0, x.shape[-1]))[..., : x.shape[-1]]
    if layout == "offset":
        return pad(x, (1, 0))[..., 1:]
    return x.mT.contiguous().mT if layout == "columns" else x


def of_linear(kind: str, layout: str, shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Operands:
    """x [M, K], weight [N, K] and, if the layout says so, a bias [N]; with B in the shape the first two are batched."""
    sizes, batch = (shape["M"], shape["N"], shape["K"]), shape.get("B", 1)
    draws = product_inputs(sizes, dtype, device, bias="bias" in layout, batch=batch, kinds=(kind,), seed=seed)
    x, weight, bias = next(iter(draws))[1]
    x = laid_out(x, "strided" if "strided" in layout else "")
    if "offset" in layout:
        x, weight = laid_out(x, "offset"), laid_out(weight, "offset")
    return (x, weight) if bias is None else (x, weight, bias)


def of_matmul(kind: str, layout: str, shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Operands:
    """As `of_linear`, with b [K, N]: by columns in the layout "nt", else by rows."""
    a, weight = of_linear(kind, layout, shape, dtype, device, seed)
    return a, weight.mT if "nt" in layout else weight.mT.contiguous()


def of_attention(kind: str, layout: str, shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Operands:
    """q [B, Hq, Tq, D], k [B, Hkv, Tk, D] and v [B, Hkv, Tk, Dv or D]; the kind is v's, along the tokens."""
    B, Hkv, T, D = (shape[axis] for axis in ("B", "Hkv", "Tk", "D"))
    rng = generator(seed, device)
    of_q, of_k = {"outlier": ("bell", "outlier"), "positive": ("positive", "positive")}.get(kind, ("bell", "bell"))
    q = make(of_q, (B, shape["Hq"], shape["Tq"], D), dtype, device, rng)
    k = make(of_k, (B, Hkv, T, D), dtype, device, rng)
    wide = (B, Hkv, shape.get("Dv", D), T)
    v = make("bell" if kind == "mixed" else kind, wide, dtype, device, rng).mT.contiguous()
    if kind in ("order", "mixed"):  # a key's twin has its weight, and the negative of its value: the result is 0
        places = torch.randperm(T // 2, generator=rng, device=device)
        every = slice(None) if kind == "order" else slice(1, None, 2)
        for x, sign in ((k[every], 1), (v[every], -1)):
            x[:, :, T // 2 : T // 2 * 2] = sign * x[:, :, places]
        v[every, :, T // 2 * 2 :] = 0
    elif kind in EXACT:
        q.zero_()  # all weights are 1 / Tk; in each column some sixteenths of the values are 1, the others 0
        ones = torch.randint(1, 16, (*v.shape[:2], 1, v.shape[3]), generator=rng, device=device) * T // 16
        turned = torch.randint(0, T, ones.shape, generator=rng, device=device)
        v = ((torch.arange(T, device=device)[:, None] + turned) % T < ones).to(dtype)
    return q, k, v
