"""The only place that compares. Identical means equal bits; results are sorted into classes by nothing else.

Everything runs on the tensors' own device: only counts, labels and single numbers are copied to the host.

Equality:
  * -0.0 and 0.0 are different bits, so they mismatch, at a distance of 0 ULP.
  * NaN equals NaN, whatever its sign and payload: the payload carries no result, and hardware may choose it freely.
    NaN against a number mismatches, at no defined distance (counted in `Difference.nonfinite`).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from nondet.core.records import ClassError, Difference, ErrorFigures
from nondet.core.traces import shared_length

_INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# float4_e2m1fn_x2 packs two numbers in a byte and has no arithmetic: its bytes are compared, its values are not.
_PACKED = {getattr(torch, "float4_e2m1fn_x2", None)} - {None}

_UNSIGNED = {getattr(torch, "float8_e8m0fnu", None)} - {None}  # only an exponent: no sign bit


def bits(x: torch.Tensor) -> torch.Tensor:
    """Integer view of `x` (real or complex, any device) in which equal integers mean equal results: every NaN becomes
    one pattern. It has x's shape, for complex with a last axis of 2; integer and bool tensors come back as is."""
    x = x.detach().resolve_conj().resolve_neg()
    if x.dtype.is_complex:
        x = torch.view_as_real(x)
    if x.dtype in _PACKED:
        return x.contiguous().view(torch.uint8)
    if not x.dtype.is_floating_point:
        return x
    raw = x.contiguous().view(_INT_OF_SIZE[x.element_size()])
    # float8 has no isnan kernel on every device; its values are exact in float32
    is_nan = torch.isnan(x.float() if x.element_size() == 1 else x).contiguous()
    # made on the CPU: devices convert NaN to different patterns, and a digest must not depend on the device
    one_nan = int(torch.full((), float("nan")).to(x.dtype).view(raw.dtype))
    return raw.masked_fill(is_nan, one_nan)


def readable(x: torch.Tensor) -> torch.Tensor:
    """A tensor that has arithmetic: a complex one by its parts, packed float4 by its bytes."""
    return torch.view_as_real(x.resolve_conj()) if x.dtype.is_complex else bits(x) if x.dtype in _PACKED else x


def same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Elementwise bit equality, on the device. Raises ValueError for other shapes or dtypes, because that is a bug."""
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(f"not comparable: {tuple(a.shape)} {a.dtype} against {tuple(b.shape)} {b.dtype}")
    return bits(a) == bits(b)


def identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all bits are equal. Copies a bool to the host, and a second one where raw bits differ, because of NaN."""
    if a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and _is_plain(a) and _is_plain(b):
        width = _INT_OF_SIZE[a.element_size()]
        if torch.equal(a.detach().contiguous().view(width), b.detach().contiguous().view(width)):
            return True
    return bool(same(a, b).all())


def agreement(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`identical` as a bool tensor on the device, for `looked_at`: one copy then serves several. Raises as `same`."""
    if a.device.type == "cpu":  # nothing to wait for, and `identical` reads less
        return torch.tensor(identical(a, b))
    return same(a, b).all()


def looked_at(flags: Sequence[torch.Tensor]) -> list[bool]:
    """Bool tensors of one element, copied to the host at once."""
    return [bool(flag) for flag in numbers(*flags)]


def _is_plain(x: torch.Tensor) -> bool:
    return x.dtype.is_floating_point and x.dtype not in _PACKED and not x.is_neg()


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """Map finite floats to int64 so that neighbours are 1 apart and both zeros are 0."""
    raw = x.contiguous().view(_INT_OF_SIZE[x.element_size()]).to(torch.int64)
    if x.dtype in _UNSIGNED:
        return raw
    width = 8 * x.element_size()
    magnitude = raw & ((1 << (width - 1)) - 1)
    negative = (raw >> (width - 1)) & 1
    return torch.where(negative.bool(), -magnitude, magnitude)


def ulp_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Distance in representable numbers, int64; -1 where either side is NaN or infinite. A distance between float64
    values of opposite sign may be clamped. Raises ValueError: not two tensors of one unpacked real floating dtype."""
    if not (a.dtype.is_floating_point and b.dtype == a.dtype and a.dtype not in _PACKED):
        raise ValueError(f"no ULP between {a.dtype} and {b.dtype}")
    left, right = _ordered(a), _ordered(b)
    apart = left.abs() + right.abs()  # of opposite signs; both are below 2^63, so an overflow shows as a negative sum
    apart = torch.where(apart < 0, torch.full_like(apart, torch.iinfo(torch.int64).max), apart)
    gap = torch.where((left < 0) != (right < 0), apart, (left - right).abs())
    if a.element_size() == 1:  # float8 has no isfinite on every device
        a, b = a.float(), b.float()
    finite = torch.isfinite(a) & torch.isfinite(b)
    return torch.where(finite, gap, torch.full_like(gap, -1))


def difference(a: torch.Tensor, b: torch.Tensor) -> Difference:
    """How `b` differs from `a`, reduced on the device. Complex tensors are compared by parts, along a last axis.
    Integers have an absolute difference and no ULP; packed float4 has neither. Raises ValueError: as `same`."""
    mismatch = ~same(a, b)
    if a.dtype.is_complex:
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    compared = mismatch.numel()
    mismatched = int(mismatch.sum())
    if mismatched == 0:
        return Difference(mismatched=0, compared=compared, max_abs=0.0, max_ulp=0)
    position = int(mismatch.flatten().to(torch.uint8).argmax())
    first = [int(index) for index in np.unravel_index(position, tuple(mismatch.shape))]
    figures: dict[str, Any] = {"max_abs": 0.0, "max_ulp": 0}
    if a.dtype not in _PACKED:
        x, y = a.double(), b.double()
        gap = ulp_distance(a, b) if a.dtype.is_floating_point else torch.zeros_like(mismatch, dtype=torch.int64)
        finite = gap >= 0
        max_abs, max_ulp, nonfinite, scale = numbers(
            torch.where(finite, (x - y).abs(), torch.zeros_like(x)).max(),
            gap.clamp_min(0).max(),
            (mismatch & ~finite).sum(),
            torch.where(torch.isfinite(x), x.abs(), torch.zeros_like(x)).max(),
        )
        figures = {"max_abs": _storable(max_abs), "max_ulp": max_ulp, "nonfinite": nonfinite, "scale": _storable(scale)}
    figures |= {"first_mismatch": first, "first_bits": _bits_at(first, a, b)}
    return Difference(mismatched=mismatched, compared=compared, **figures)


def numbers(*scalars: torch.Tensor) -> list[float]:
    """Scalars of any dtype, copied at once: each copy waits for the device. Integers stay integers; of several devices
    one is a CPU."""
    device = next((x.device for x in scalars if x.device.type != "cpu"), "cpu")
    flat = [x.reshape(()).to(device) for x in scalars]
    wide = [x.view(torch.int64) if x.is_floating_point() else x.to(torch.int64) for x in flat]
    words = torch.stack(wide).cpu().unbind() if wide else ()
    return [(w.view(torch.float64) if x.is_floating_point() else w).item() for x, w in zip(flat, words, strict=True)]


def _bits_at(place: list[int], *tensors: torch.Tensor) -> list[str]:
    """The bits of each tensor's element at this index, as hex: "0x3f800000". Of bools and integers, their bytes."""
    elements = [x.detach()[tuple(place)].cpu().contiguous().reshape(1).view(torch.uint8) for x in tensors]
    # little-endian, as every machine that torch runs on
    return [f"0x{bytes(element.flip(0).tolist()).hex()}" for element in elements]


def _storable(x: float) -> float:
    """A float that JSON can hold: a distance beyond the range of float64 becomes the largest float64."""
    return min(x, sys.float_info.max)


_ELEMENTS = 2**20  # most elements of a result over which the distribution of errors is computed
_CLASSES_LISTED = 12  # most classes whose errors are listed one by one


def error_against(out: torch.Tensor, reference: torch.Tensor) -> ErrorFigures:
    """Accuracy of `out` against a float64 reference of the same shape. Elements that are NaN or infinite both in `out`
    and in the reference rounded to out's dtype, alike, are right and left out. Where only one side is, `max_abs` and
    `relative_norm` are None. Raises ValueError: the reference is not float64, or the shapes differ."""
    return errors_against([out], reference)[0]


def errors_against(outs: Sequence[torch.Tensor], reference: torch.Tensor) -> list[ErrorFigures]:
    """`error_against` of each of `outs`, by one copy."""
    read = iter(numbers(*(x for out in outs for x in _error_terms(out, reference))))
    errors = []
    for known in read:
        max_abs, relative_norm = (_storable(size) if known else None for size in (next(read), next(read)))
        errors.append(ErrorFigures(max_abs=max_abs, relative_norm=relative_norm, max_ulp=int(next(read))))
    return errors


def class_errors(outs: Sequence[torch.Tensor], reference: torch.Tensor) -> list[ClassError]:
    """How far each class's result is from a float64 reference of its shape, by one copy; only of two or more classes,
    few enough to be read, and of dtypes in which neighbours have one distance. Large results are sampled at a million
    evenly spread elements."""
    dtype = outs[0].dtype
    if not 1 < len(outs) <= _CLASSES_LISTED or not dtype.is_floating_point or dtype.itemsize == 1:
        return []
    step = -(-reference.numel() // _ELEMENTS)
    exact = reference.flatten()[::step]
    results = [out.flatten()[::step].double() for out in outs]
    info = torch.finfo(dtype)
    # 2^e is the power of two at or below the reference, and eps the distance of neighbours above 1
    exponent = torch.frexp(exact.abs().clamp_min(info.smallest_normal)).exponent - 1
    errors = [(wide - exact) / torch.ldexp(torch.full_like(exact, info.eps), exponent) for wide in results]
    known = torch.stack([torch.isfinite(error) for error in errors]).all(0)
    errors = [error[known] for error in errors]
    if not errors[0].numel():
        return []
    sizes = [error.abs() for error in errors]
    marks = torch.tensor([0.5, 0.99], dtype=torch.float64, device=exact.device)
    terms: list[torch.Tensor] = []
    for error, size in zip(errors, sizes, strict=True):
        half, most = torch.quantile(size, marks)
        terms += [half, most, size.max(), error.mean(), (size < sizes[0]).sum(), (size > sizes[0]).sum()]
    read, count = iter(numbers(*terms)), errors[0].numel()
    return [
        ClassError(
            elements=count, median=_storable(next(read)), p99=_storable(next(read)), most=_storable(next(read)),
            mean=next(read), closer=int(next(read)), farther=int(next(read)),
        )
        for _ in outs
    ]  # fmt: skip


def _error_terms(out: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(whether there is a distance at each element, the largest, the relative norm, the largest in ULP)."""
    if reference.dtype != torch.float64 or reference.shape != out.shape:
        got = f"{reference.dtype} {tuple(reference.shape)}"
        raise ValueError(f"reference must be float64 of shape {tuple(out.shape)}, got {got}")
    if out.numel() == 0:
        zero = reference.new_zeros(())
        return zero == 0, zero, zero, zero
    wide, rounded = out.double(), reference.to(out.dtype)
    target = rounded.double()
    finite = torch.isfinite(wide) & torch.isfinite(target) & torch.isfinite(reference)
    alike = (wide == target) | (wide.isnan() & target.isnan())
    exact = torch.where(finite, reference, 0.0)
    gap = torch.where(finite, wide - reference, 0.0)
    scale = exact.abs().max()  # taken out before squaring: norms of large or tiny numbers would overflow or vanish
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    norm = (exact / scale).norm()
    relative = (gap / scale).norm() / torch.where(norm > 0, norm, torch.ones_like(norm))
    return (finite | alike).all(), gap.abs().max(), relative, ulp_distance(out, rounded).max().clamp_min(0)


def first_difference(a: Any, b: Any) -> tuple[int | None, int | None]:
    """(first token that differs, first position where tokens or logprob bits differ) of two completions, from an engine
    or a file; None where none does. Where one has fewer tokens or logprobs than the other, they differ at its end."""
    token = _first_unequal(a.token_ids, b.token_ids)
    logprob = _first_unequal(memoryview(a.logprobs).cast("I"), memoryview(b.logprobs).cast("I"))
    return token, min((place for place in (token, logprob) if place is not None), default=None)


def _first_unequal(one: Sequence[int], two: Sequence[int]) -> int | None:
    return None if (shared := shared_length(one, two)) == len(one) == len(two) else shared


def digest(*tensors: torch.Tensor) -> str:
    """First 16 hex digits of the SHA-256 over dtype, shape and canonical bits. Copies the tensors: small ones only."""
    sha = hashlib.sha256()
    for x in tensors:
        sha.update(f"{x.dtype}{tuple(x.shape)}".encode())
        sha.update(bits(x).cpu().numpy().tobytes())
    return sha.hexdigest()[:16]


_WAITING_MOST = 2**24  # bytes of results that are compared at once


class ClassBook:
    """Sorts results into classes of equal bits, numbered by first appearance. One result of each is kept on the device.
    Results wait to be sorted until they are many or their labels are read: to compare is to wait for a GPU."""

    def __init__(self) -> None:
        self._representatives: list[torch.Tensor] = []
        self._patterns: list[torch.Tensor] = []  # of each representative, flat
        self._labels: list[int] = []
        self._waiting: list[torch.Tensor] = []
        self._bytes = 0  # of those that wait
        self._kind = ""  # shape and dtype

    @property
    def representatives(self) -> list[torch.Tensor]:
        """The first result of each class."""
        self._sort()
        return self._representatives

    @property
    def labels(self) -> list[int]:
        """The class of each result."""
        self._sort()
        return self._labels

    def add(self, results: torch.Tensor) -> None:
        """Take each slice of `results`, [n, ...], along its first axis. Raises ValueError: its shape or dtype is not
        that of the results before it."""
        self._check(results)
        self._bytes += results.nbytes
        at_once = self._bytes > _WAITING_MOST
        self._waiting.append(results.detach() if at_once else results.detach().clone())  # its owner may write to it
        if at_once:
            self._sort()

    def _check(self, results: torch.Tensor) -> None:
        kind = f"{tuple(results.shape[1:])} {results.dtype}"
        if self._kind not in ("", kind):
            raise ValueError(f"variants are not comparable: {self._kind} against {kind}")
        self._kind = kind

    def _sort(self) -> None:
        """Label the waiting results; those that match no class begin new ones. Each class costs one copy."""
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        if not waiting:
            return
        results = torch.cat(waiting) if len(waiting) > 1 else waiting[0]
        labels, left, patterns = [-1] * len(results), list(range(len(results))), _flat(results)
        known = range(len(self._patterns))
        last_first = dict.fromkeys([*self._labels[-1:], *known])  # a sweep changes class rarely
        for label in itertools.chain(last_first, itertools.count(len(known))):
            if not left:
                break
            if label == len(self._patterns):
                self._representatives.append(results[left[0]].clone())
                self._patterns.append(patterns[0].clone())
            equal = (patterns == self._patterns[label]).all(1).tolist()
            for place, alike in zip(left, equal, strict=True):
                if alike:
                    labels[place] = label
            others = [i for i, alike in enumerate(equal) if not alike]
            left, patterns = [left[i] for i in others], patterns[others]
        self._labels += labels

    def come_again(self, results: torch.Tensor, labels: Sequence[int]) -> torch.Tensor:
        """Whether each slice of `results` has the bits of the class that its label names: one bool tensor for
        `looked_at`. Raises ValueError: another shape or dtype than the labelled results have."""
        self._check(results)
        if len(results) != len(labels) or not labels:
            return torch.tensor(len(results) == len(labels))
        return (_flat(results) == torch.stack([self._patterns[label] for label in labels])).all()

    def widest_difference(self) -> Difference | None:
        """The largest difference of any class from the first: by NaN or infinite, by ULP, by mismatched elements."""
        if not self.representatives:
            return None
        first, *others = self.representatives
        if not others:
            return Difference(mismatched=0, compared=self._patterns[0].numel(), max_abs=0.0, max_ulp=0)
        found = [msgspec.structs.replace(difference(first, x), label=i) for i, x in enumerate(others, 1)]
        return max(found, key=lambda d: (d.nonfinite, d.max_ulp, d.mismatched))


def _flat(results: torch.Tensor) -> torch.Tensor:
    """The bits of each slice along the first axis, [n, elements]."""
    return bits(results).unsqueeze(-1).flatten(1)


# The hash of a row is the sum over its elements of w_i * x_i mod 2^64, where x_i are the bits of the elements as
# integers and w_i fixed odd numbers. Integer sums are exact in any order, so neither the batch nor the device can
# change a hash; the weights detect an exchange of two elements. Rows that differ in one element never collide, because
# an odd factor is invertible; others about once in 2^64, so the responsible call is confirmed on full bits.


@functools.cache
def _weights(width: int, device: torch.device) -> torch.Tensor:
    """[width] int64, odd, the same in every process."""
    rng = random.Random(f"nondet row hash {width}")  # noqa: S311 - a hash of floats, not a secret
    return torch.tensor([rng.getrandbits(64) - 2**63 | 1 for _ in range(width)], dtype=torch.int64, device=device)


def row_hashes(x: torch.Tensor) -> torch.Tensor:
    """[rows, ...] of any dtype -> [rows] int64: the hash of each row's bits, every NaN being one pattern."""
    pattern = bits(x).reshape(x.shape[0], -1)
    if pattern.shape[1] == 0:
        return torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
    return (pattern.to(torch.int64) * _weights(pattern.shape[1], pattern.device)).sum(-1)


def parts_of(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor by its name; if it is made of other tensors (torchao's weights), these by theirs."""
    if is_traceable_wrapper_subclass(tensor):
        for part in tensor.__tensor_flatten__()[0]:
            yield from parts_of(f"{name}.{part}", getattr(tensor, part))
    else:
        yield name, tensor


def memory_of(tensor: torch.Tensor) -> int:
    """The address of its memory; of a tensor that is made of others, the first one's."""
    return next(parts_of("", tensor))[1].untyped_storage().data_ptr()


def weights_digest(model: Any) -> str:
    """16 hex digits over the names, shapes and bits of all parameters and buffers, hashed on their device."""
    sha = hashlib.sha256()
    named = sorted([*model.named_parameters(), *model.named_buffers()], key=lambda pair: pair[0])
    for name, tensor in (part for path, whole in named for part in parts_of(path, whole.detach())):
        sha.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        rows = tensor.reshape(tensor.shape[0] if tensor.dim() > 1 else 1, -1)
        for piece in rows.split(max(1, 2**24 // max(1, rows.shape[1]))):  # 64-bit integers of one piece at a time
            sha.update(row_hashes(piece).cpu().numpy().tobytes())
    return sha.hexdigest()[:16]
