"""Inputs for testing operators: ordinary ones, and hard ones in which rounding errors are rare or hidden.

Built from `torch.rand` only, whose bits do not depend on the CPU's instruction set (those of `randn` do), so that one
seed means one input on every CPU. A GPU's generator draws other numbers for the same seed; rows carry their device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

KINDS = {
    "bell": "sum of three uniforms, mean 0, variance 1: ordinary activations",
    "wide": "exponents spread evenly over 2^-12 ... 2^12: small terms are lost or kept depending on the order",
    "cancel": "pairs that nearly cancel along the last axis: the result is made of rounding errors",
    "outlier": "bell, with one in 256 elements 1,000 times larger, as in real activations",
    "order": "sums, and products with a weight of the same kind, are exactly 0: only an order's rounding errors show",
    "order-wide": "as order, with exponents further apart, for sums of few terms",
    "mixed": "rows in turn of bell and of order: ordinary results and bare rounding errors from one call",
    "tiny": "bell times 2^-12, whose squares are small beside the epsilon of a norm",
    "denormal": "bell times the dtype's smallest normal number: a kernel that flushes to zero gives other bits",
    "underflow": "bell, so small that products are subnormal or a zero with a sign, which not every kernel keeps",
    "masked": "bell, and minus infinity from some place of each row on, as a mask leaves a row of scores",
    "infinite": "bell, with one infinity in every second row",
    "positive": "bell without its sign, and one column of zeros: what a kernel may treat apart, if a whole batch is so",
    "integers": "integers -8 ... 8: sums and products are exact in every order, so that another result is a wrong one",
}
# Binades over which the exponents of the order-revealing kinds are spread, see `order_revealing`.
ORDER = {"order": 6, "order-wide": 20}
# Kinds whose every partial sum is exact in float32: there all orders must agree with the known answer.
EXACT = ("integers",)


def generator(seed: int, device: str | torch.device) -> torch.Generator:
    """A seeded generator on the device."""
    return torch.Generator(device=device).manual_seed(seed)


def make(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device, rng: torch.Generator
) -> torch.Tensor:
    """A tensor of the kind, drawn in float32 on `device`, where `rng` must be. `cancel` pairs neighbours along the last
    axis, the order-revealing kinds pair halves of it. Raises ValueError: unknown kind."""

    def uniform() -> torch.Tensor:
        return torch.rand(shape, generator=rng, device=device, dtype=torch.float32)

    def bell() -> torch.Tensor:
        x = uniform()
        x += uniform()
        x += uniform()
        return x.sub_(1.5).mul_(2.0)

    if kind in ORDER:
        seed = int(torch.randint(0, 2**31, (), generator=rng, device=device))
        rows = math.prod(shape[:-1])
        flat = order_revealing(rows, shape[-1], dtype, seed, negate=True, binades=ORDER[kind], device=device)
        return flat.view(shape)
    if kind == "integers":
        return torch.randint(-8, 9, shape, generator=rng, device=device).to(dtype)
    if kind == "mixed":
        return _in_turn(bell().to(dtype), make("order", shape, dtype, device, rng))
    if kind == "denormal":
        return bell().to(dtype).mul_(torch.finfo(dtype).tiny)
    if kind == "underflow":
        return bell().to(dtype).mul_(underflow(dtype))
    return _drawn(kind, shape[-1] if shape else 1, uniform, bell).to(dtype)


def underflow(dtype: torch.dtype) -> float:
    """A power of two; products of two numbers of that size are about the smallest subnormal one of the sum's dtype."""
    info = torch.finfo(torch.float32 if dtype == torch.bfloat16 else dtype)
    return math.ldexp(1.0, math.frexp(info.tiny * info.eps)[1] // 2)


def _drawn(
    kind: str, width: int, uniform: Callable[[], torch.Tensor], bell: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """In float32, of a kind that is the same for every dtype."""
    if kind == "bell":
        return bell()
    if kind == "positive":
        x = bell().abs_()
        x[..., width // 2] = 0.0
        return x
    if kind == "tiny":
        return bell().mul_(2.0**-12)
    if kind == "masked":
        seen = 1 + uniform()[..., :1] * (width - 1)
        return bell().masked_fill_(torch.arange(width, device=seen.device) >= seen, -math.inf)
    if kind == "infinite":
        x = bell()
        x.view(-1, width)[1::2, width // 3] = math.inf
        return x
    if kind == "wide":
        sign = torch.where(uniform() < 0.5, -1.0, 1.0)
        exponent = torch.floor(uniform() * 25.0) - 12.0
        return torch.ldexp(uniform() + 1.0, exponent) * sign
    if kind == "cancel":
        x, pairs = bell() * 64.0, width // 2
        x[..., 1 : 2 * pairs : 2] = -x[..., 0 : 2 * pairs : 2] * (1.0 + (uniform()[..., :pairs] - 0.5) * 2.0**-6)
        return x
    if kind == "outlier":
        return torch.where(uniform() < 1.0 / 256.0, bell() * 1000.0, bell())
    raise ValueError(f"unknown input kind {kind!r}; known: {', '.join(KINDS)}")


def _in_turn(even: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(math.prod(even.shape[:-1]), device=even.device).view(*even.shape[:-1], 1)
    return torch.where(rows % 2 == 0, even, odd)


def order_revealing(
    rows: int,
    width: int,
    dtype: torch.dtype,
    seed: int,
    *,
    negate: bool,
    binades: int | None = None,
    device: str | torch.device = "cpu",
) -> torch.Tensor:
    """Rows [rows, width] whose sum, or whose product with rows made with the same `seed`, is exactly zero.

    The second half of a row holds the numbers of the first half at other positions, negated with `negate`. The sum of
    such a row, or its product with an unnegated one, cancels term by term, but not next to each other: a float32
    accumulator is left with its own rounding errors. An odd width ends with one number 2^-12 times smaller. Exponents
    are spread evenly over `binades`; by default over 6 of odd seeds, where rounding errors are of many sizes, and over
    20 of even ones, where the sum of a few terms has some too.
    """
    rng = generator(seed, device)
    half = width // 2
    places = torch.randperm(half, generator=rng, device=device)
    rng.manual_seed(2 * seed + int(negate))
    spread = float(binades if binades is not None else (6 if seed % 2 else 20))
    drawn = [torch.rand(rows, width, generator=rng, dtype=torch.float32, device=device) for _ in range(2)]
    x = torch.empty(rows, width, dtype=dtype, device=device)
    for own in (slice(half), slice(2 * half, width)):  # those between repeat the first half, elsewhere
        exponent = ((drawn[0][:, own] - 0.5) * spread).floor_().to(torch.int32)
        power = exponent.add_(127).bitwise_left_shift_(23).view(torch.float32)  # of two, by its bits: ldexp is slower
        x[:, own] = (drawn[1][:, own] * 2.0 - 1.0).mul_(power)
    twins = x[:, :half].index_select(1, places)
    x[:, half : 2 * half] = twins.neg_() if negate else twins
    if width > 1:
        x[:, 2 * half :] *= 2.0**-12
    return x


_last = functools.lru_cache(maxsize=6)(order_revealing)  # 24 MiB at most


def kept_order_revealing(rows: int, width: int, dtype: torch.dtype, seed: int, *, negate: bool) -> torch.Tensor:
    """As `order_revealing`, on the CPU, and not to be written to: the next proof often has the same numbers."""
    if rows * width > 2**20:
        return order_revealing(rows, width, dtype, seed, negate=negate)
    return _last(rows, width, dtype, seed, negate=negate)


def placed(x: torch.Tensor, strides: tuple[int, ...], offset: int = 0, align: int = 1) -> torch.Tensor:
    """The same numbers in memory of their own, with these strides, `offset` elements past a multiple of `align`."""
    extent = 1 + sum((size - 1) * step for size, step in zip(x.shape, strides, strict=True))
    storage = x.new_zeros(extent + offset + align - 1)
    start = -storage.data_ptr() // x.element_size() % align + offset
    return storage.as_strided(x.shape, strides, start).copy_(x)


def product_operands(
    kind: str,
    left: tuple[int, int],
    right: tuple[int, int],
    dtype: torch.dtype,
    device: str | torch.device,
    seed: int,
    weight_kind: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operands of a product over the last axis of both: x of the shape `left`, [M, K], weight of `right`, [N, K].
    Rows of order-revealing kinds and of `mixed`, and the pairs of `cancel`, cancel with their weight; of other kinds
    the weight is of `weight_kind`, by default that of x."""
    if kind in (*ORDER, "mixed"):
        named = 2 * seed + (2 if kind == "order-wide" else 1)  # the parity decides how far apart exponents are
        x = order_revealing(*left, dtype, named, negate=True, device=device)
        if kind == "mixed":
            x = _in_turn(make("bell", left, dtype, device, generator(seed, device)), x)
        return x, order_revealing(*right, dtype, named, negate=False, device=device)
    x = make(kind, left, dtype, device, generator(seed, device))
    if kind in ("cancel", *EXACT):
        weight_kind = "bell" if kind == "cancel" else kind
    weight = make(weight_kind or kind, right, dtype, device, generator(seed + 1, device))
    if kind == "cancel":
        pairs = right[1] // 2 * 2
        weight[:, 1:pairs:2] = weight[:, 0:pairs:2]  # so that the pairs of x also cancel in the products
    return x, weight
