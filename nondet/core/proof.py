"""The one prover: does a member of a numerics class give the class's bits? And the key that a proof is filed under.

`nondet certify` and the dispatchers prove by the same step (`attempt`), under keys of the same function
(`operands_key`), in the same store (`nondet.core.certificates`), so each finds what the other has proven.

A verdict is one of three. True: every bit is the anchor's. False: some are not; that is kept, and overrides later
proofs. None: undecided (memory, a failed launch); nothing is kept, and the caller uses another member.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nondet.core.compare import numbers, same
from nondet.core.inputs import generator, make, product_operands
from nondet.core.launch import check_device_alive, proving
from nondet.errors import UserError, reason_of

if TYPE_CHECKING:
    from nondet.core.certificates import Certificates

# "order" comes first: its exact result is zero, so the result consists of the rounding errors of the order only.
# "order-wide" is the same with exponents further apart, for sums of few terms.
PRODUCT_INPUTS = ("order", "order-wide", "wide", "cancel", "outlier", "bell", "underflow")

# A bias of the size of the rounding errors: a larger one would hide them where the result is rounded to bfloat16.
BIAS_SIZE = {"order": 2.0**-14, "order-wide": 2.0**-4, "underflow": 2.0**-126}


class Claim(NamedTuple):
    """A member that claims a class's bits at a key."""

    member: str  # its name, with whatever is chosen inside it: a tile, an algorithm
    key: str  # class and problem, as `operands_key` writes them
    call: Callable[..., torch.Tensor]  # call(*operands) -> the result, in the anchor's shape and dtype


class Attempt(NamedTuple):
    """One computation compared with the anchor's result."""

    result: torch.Tensor | None  # None where it failed
    equal: bool
    failure: Exception | None


def operands_key(
    cls: str, operands: Iterable[Any], options: Iterable[str] = (), *, alignment: int | None = None
) -> str:
    """The key of a proof: the class, of every operand what may change the bits, and whatever else decides.

    "chain | bfloat16[1,16,4096]/0,4096,1@256 bfloat16[1,4096,512]/0,1,4096@256 | bias". An operand is its dtype, shape,
    strides (0 along an axis of at most one element, because no step is taken) and the alignment of its first element in
    bytes, up to 256 (on a CPU, 64), or the one that a member requires. Other things are written as they are.
    """
    words = " ".join(_operand(x, alignment) for x in operands)
    return " | ".join(part for part in (cls, words, " ".join(options)) if part)


def _operand(x: Any, alignment: int | None) -> str:
    if isinstance(x, list | tuple):
        return "(" + " ".join(_operand(part, alignment) for part in x) + ")"
    if not isinstance(x, torch.Tensor):
        return str(x)
    sizes = ",".join(map(str, x.shape))
    strides = ",".join(str(step if size > 1 else 0) for size, step in zip(x.shape, x.stride(), strict=True))
    low = x.data_ptr() | (256 if x.is_cuda else 64)  # the least that allocators give, and the most that libraries check
    return f"{str(x.dtype).removeprefix('torch.')}[{sizes}]/{strides}@{alignment or low & -low}"


def distinct(x: torch.Tensor) -> bool:
    """Whether every element of x has its own address, as far as sizes and strides show it."""
    reach = 0
    for step, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if step <= reach:
                return False
            reach += step * (size - 1)
    return True


_SWITCHES = {
    "cpu": ("float32", "deterministic", "onednn", "threads"),
    "cuda": ("float32", "deterministic", "products", "blas", "bf16-reduction", "fp16-sums", "fp16-reduction"),
}


def settings(device: str) -> tuple[str, ...]:
    """The switches of this process by which a library picks other bits, for keys of members that do not set them."""
    return tuple(f"{name}={value}" for name, value in zip(_SWITCHES[device], switches(device), strict=True))


def switches(device: str) -> tuple[object, ...]:
    """The values of `settings`, for look-ups at every call."""
    of = torch._C  # torch.backends takes several times as long
    fixed = of._get_float32_matmul_precision(), of._get_deterministic_algorithms()
    if device == "cpu":
        return *fixed, of._get_mkldnn_enabled(), torch.get_num_threads()
    products = of._get_fp32_precision_getter("cuda", "matmul"), of._get_blas_preferred_backend()
    halves = of._get_cublas_allow_bf16_reduced_precision_reduction(), of._get_cublas_allow_fp16_accumulation()
    return *fixed, *products, *halves, of._get_cublas_allow_fp16_reduced_precision_reduction()


def attempt(expected: torch.Tensor, compute: Callable[[], torch.Tensor]) -> Attempt:
    """Compute, and compare with the anchor's result bit by bit; a `DeviceLostError` if the CUDA context is lost."""
    try:
        result = compute()
        return Attempt(result, bool(same(expected, result).all()), None)
    except Exception as error:  # noqa: BLE001 - whatever a library raises, it is not a proof
        check_device_alive(expected.device.type, error)
        return Attempt(None, False, error)


def _capturing() -> bool:
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # a torch without CUDA
        return False


def established(member: str, key: str, kept: Certificates, prove_now: Callable[[], bool | None]) -> bool | None:
    """Whether a member is proven at a key; proven now if that is unknown, unless a CUDA graph is captured."""
    known = kept.standing(member, key)
    if known is not None or _capturing():
        return known
    with torch.no_grad():
        return prove_now()


@proving()
def prove(
    claims: Sequence[Claim],
    anchor: Callable[..., torch.Tensor],
    inputs: Iterable[tuple[str, tuple[Any, ...]]],
    kept: Certificates,
) -> list[bool | None]:
    """Whether each member has the anchor's bits on all of the inputs, (name, operands) one after the other. Results are
    recorded under its claim. All calls get the same tensors and must not write to them. Only the end waits for the
    device, because each wait is long where other processes use it.

    None: it failed to run, gave another shape or dtype, was given no inputs, or gave only NaN and infinities. A failure
    may be temporary, so it is not an exclusion: the member is set aside for as long as this process lasts. Where memory
    did not suffice, nothing is even set aside. Raises DeviceLostError: a call took the CUDA context with it.
    """
    failed: dict[int, tuple[str, Exception]] = {}
    seen: list[tuple[str, int, list[torch.Tensor]]] = []  # kind, elements; finite; of each claim, differing
    try:
        for kind, operands in inputs:
            expected = anchor(*operands)
            finite = torch.isfinite(expected).sum()
            counts = [finite]
            for i, claim in enumerate(claims):
                count = finite.new_zeros(()) if i in failed else _differing(expected, claim, operands)
                if isinstance(count, Exception):
                    failed[i], count = (kind, count), finite.new_zeros(())
                counts.append(count)
            seen.append((kind, expected.numel(), counts))
            if len(failed) == len(claims):
                break
    except torch.cuda.OutOfMemoryError as error:
        failed = dict.fromkeys(range(len(claims)), ("", error)) | failed
    known = iter(_counted([count for _, _, counts in seen for count in counts]))
    rows = [(kind, size, [int(next(known)) for _ in counts]) for kind, size, counts in seen]
    compared = sum(counts[0] for _, _, counts in rows)  # NaN and infinities are the same in any order
    equal = f"{compared} finite elements equal to the anchor's on {', '.join(kind for kind, _, _ in rows)}"
    verdicts: list[bool | None] = []
    for i, claim in enumerate(claims):
        differ = next((f"{kind}: {n[i + 1]} of {size} elements differ" for kind, size, n in rows if n[i + 1]), None)
        holds = not differ if differ or (compared and i not in failed) else None
        kind, failure = failed.get(i, ("", None))
        if holds is not None:
            kept.record(claim.member, claim.key, holds, differ or equal)
        elif failure is None:
            kept.set_aside(claim.member, claim.key, "nothing finite was compared")
        elif not isinstance(failure, torch.cuda.OutOfMemoryError):
            kept.set_aside(claim.member, claim.key, f"{kind}: {in_words(failure)}")
        verdicts.append(holds)
    return verdicts


def _differing(expected: torch.Tensor, claim: Claim, operands: tuple[Any, ...]) -> torch.Tensor | Exception:
    """How many elements differ, on the device, or why there is no result."""
    try:
        return (~same(expected, claim.call(*operands))).sum()
    except Exception as error:  # noqa: BLE001 - whatever a library raises, it is not a proof
        check_device_alive(expected.device.type, error)
        return error


def _counted(counts: list[torch.Tensor]) -> list[float]:
    try:
        return numbers(*counts)
    except Exception as error:
        check_device_alive(counts[0].device.type, error)
        raise


def in_words(error: Exception | None) -> str:
    """An error in one line, with its type where that is not the member's own "not here"."""
    return reason_of(str(error) if error is None or isinstance(error, NotImplementedError | UserError) else error)


def product_inputs(
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    device: str | torch.device,
    *,
    bias: bool = False,
    batch: int = 1,
    kinds: Iterable[str] = PRODUCT_INPUTS,
    seed: int = 0,
) -> Iterable[tuple[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]]:
    """Operands of a product of sizes (m, n, k), over k, one kind after another: (kind, (x [m, k], weight [n, k], bias
    [n] or None)), contiguous. With batch > 1 x is [batch, m, k] and weight [batch, n, k]."""
    m, n, k = sizes
    for kind in kinds:
        x, weight = product_operands(kind, (batch * m, k), (batch * n, k), dtype, device, seed)
        with_bias = None
        if bias:
            with_bias = make("bell", (n,), dtype, device, generator(seed + 2, device)) * BIAS_SIZE.get(kind, 1.0)
        if batch > 1:
            x, weight = x.view(batch, m, k), weight.view(batch, n, k)
        yield kind, (x, weight, with_bias)
