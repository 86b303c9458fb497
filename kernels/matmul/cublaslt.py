"""Matrix products by cuBLASLt without split-K, a member of class "chain" where proven.

Names and numbers are those of cublasLt.h (CUDA 12 and 13).
"""

from __future__ import annotations

import ctypes
import functools
import threading
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from nondet.core.environment import cublaslt, cublaslt_version
from nondet.kernels.triton_common import empty_strided

_AT, _INT, SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_SET = [_AT, _INT, _AT, SIZE]
_SIGNATURES: dict[str, list[Any]] = {
    "cublasLtCreate": [_AT],
    "cublasLtMatmulDescCreate": [_AT, _INT, _INT],
    "cublasLtMatmulDescSetAttribute": _SET,
    "cublasLtMatrixLayoutCreate": [_AT, _INT, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64],
    "cublasLtMatrixLayoutSetAttribute": _SET,
    "cublasLtMatmulPreferenceCreate": [_AT],
    "cublasLtMatmulPreferenceSetAttribute": _SET,
    "cublasLtMatmulPreferenceDestroy": [_AT],
    "cublasLtMatmulAlgoGetHeuristic": [*[_AT] * 7, _INT, _AT, _AT],
    "cublasLtMatmulAlgoConfigGetAttribute": [*_SET, _AT],
    "cublasLtMatmul": [*[_AT] * 14, SIZE, _AT],
}


class BlasError(RuntimeError):
    """The library refused a call."""


class Heuristic(ctypes.Structure):
    """One result of the library's heuristic; the opaque algorithm is its first field."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """The cuBLASLt that PyTorch has loaded, its functions' arguments declared; None where there is none."""
    found = cublaslt()
    if found is not None:
        for name, arguments in _SIGNATURES.items():
            getattr(found, name).argtypes = arguments
    return found


def available() -> bool:
    """Whether the library is loaded."""
    return library() is not None


version = cublaslt_version


def do(name: str, *arguments: Any) -> None:
    """Call the library's function `name`. Raises BlasError: it refused, or there is no library."""
    found = library()
    if found is None:
        raise BlasError("PyTorch has loaded no cuBLASLt here")
    status = getattr(found, name)(*arguments)
    if status:
        raise BlasError(f"{name} returned status {status}")


def put(name: str, owner: ctypes.c_void_p, attribute: int, value: ctypes._SimpleCData[Any]) -> None:
    """Set an attribute of `owner` with the library's function `name`."""
    do(name, owner, attribute, ctypes.addressof(value), ctypes.sizeof(value))


@functools.cache
def handle_of(index: int) -> ctypes.c_void_p:
    """This module's own handle on CUDA device `index`."""
    handle = ctypes.c_void_p()
    with torch.cuda.device(index):
        do("cublasLtCreate", ctypes.byref(handle))
    return handle


# PyTorch can forbid split-K too (`allow_bf16_reduced_precision_reduction = (False, False)`), but for the whole process,
# not in float32, and only with the library's first choice. So this module calls PyTorch's library directly: the mask is
# part of each call, nothing global changes, and any algorithm that the heuristic offers can be chosen by rank.
# Requested are reduction scheme NONE and a split-K number of 1 (the library reports both for each algorithm, and others
# are dropped), accumulation in float32, alpha 1, beta 0, a bias added by the epilogue before the one rounding. The
# library does not document the order inside K: on an H200 its half-precision kernels have the bits of the Triton chain;
# a GEMV kernel (number 13, offered at one row if partial sums fit) does not, and float32 kernels mostly do not.
# `nondet.kernels.matmul.cuda` proves it by bits, for each shape and algorithm, before it uses one.

ALIGNMENT_BYTES = 16  # of every operand, at least
# Enough for a kernel's counter and not for partial sums. With PyTorch's 32 MiB the heuristic prefers split-K
# algorithms, the mask removes them, and the rest may be 10 times slower.
MAX_WORKSPACE_BYTES = 256

_DATA_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF
_COMPUTE_32F, _COMPUTE_32F_FAST_TF32 = 68, 77
_DESC_TRANSA, _DESC_TRANSB, _DESC_EPILOGUE, _DESC_BIAS_POINTER = 3, 4, 7, 8
_EPILOGUE_BIAS = 4
_LAYOUT_BATCH_COUNT, _LAYOUT_BATCH_OFFSET = 5, 6
_PREF_WORKSPACE, _PREF_REDUCTION_MASK, _PREF_ALIGNMENTS = 1, 3, (5, 6, 7, 8)
_REDUCTION_NONE = 0
_ALGO_ID, _ALGO_TILE, _ALGO_SPLIT_K, _ALGO_REDUCTION, _ALGO_STAGES = 0, 1, 2, 3, 6


class Problem(NamedTuple):
    """One product as the library sees it: a [batch, m, k] x b [batch, k, n] -> out [batch, m, n], out in row order."""

    batch: int
    m: int
    n: int
    k: int
    dtype: torch.dtype
    a_rows: bool  # rows of `a` are contiguous (else its columns are); `lda` is the distance between them, in elements
    lda: int
    a_step: int  # elements from one product's `a` to the next one's
    b_rows: bool
    ldb: int
    b_step: int
    bias: bool  # a bias [n] is added
    tf32: bool  # float32 operands are rounded to TF32

    def layout(self) -> str:
        """As "tn": each operand's layout, n for contiguous rows; with its distances where they are not the tightest."""
        text = ("n" if self.a_rows else "t") + ("n" if self.b_rows else "t")
        tight_a, tight_b = self.k if self.a_rows else self.m, self.n if self.b_rows else self.k
        steps = ("", "") if self.batch == 1 else (f",{self.a_step}", f",{self.b_step}")
        if self.lda != tight_a or (self.batch > 1 and self.a_step != self.m * self.k):
            text += f" a={self.lda}{steps[0]}"
        if self.ldb != tight_b or (self.batch > 1 and self.b_step != self.n * self.k):
            text += f" b={self.ldb}{steps[1]}"
        return text


class Algorithm(NamedTuple):
    """One of the library's algorithms for a problem, opaque except for its reported settings."""

    rank: int
    state: bytes
    workspace_bytes: int
    number: int
    tile: int
    stages: int

    def __str__(self) -> str:
        """All its settings, so that equal names mean the same kernel and grid."""
        return f"{self.number}.{self.tile}.{self.stages}.{zlib.crc32(self.state):08x}"


def _order(size: Sequence[int], stride: Sequence[int]) -> tuple[bool, int] | None:
    (rows, cols), (down, across) = size, stride
    if (across == 1 or cols == 1) and (down >= cols or rows == 1):
        return True, max(down, cols) if rows > 1 else cols
    if (down == 1 or rows == 1) and (across >= rows or cols == 1):
        return False, max(across, rows) if cols > 1 else rows
    return None


def problem_of(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, tf32: bool) -> Problem | None:
    """The problem a [batch, m, k] x b [batch, k, n] (+ bias), or None: a dtype or strides that the library lacks."""
    (batch, m, k), n = a.shape, b.shape[2]
    left, right = _order(a.shape[1:], a.stride()[1:]), _order(b.shape[1:], b.stride()[1:])
    if a.dtype not in _DATA_TYPES or left is None or right is None or 0 in (batch, m, n, k):
        return None
    if bias is not None and (bias.stride(0) != 1 or batch > 1):
        return None
    steps = (a.stride(0), b.stride(0)) if batch > 1 else (0, 0)
    return Problem(batch, m, n, k, a.dtype, *left, steps[0], *right, steps[1], bias is not None, tf32)


class Descriptors:
    """The library's descriptions of a product and of its operands, which it sees transposed."""

    def __init__(self, problem: Problem) -> None:
        self.desc = ctypes.c_void_p()
        compute = _COMPUTE_32F_FAST_TF32 if problem.tf32 else _COMPUTE_32F
        do("cublasLtMatmulDescCreate", ctypes.byref(self.desc), compute, _DATA_TYPES[torch.float32])
        # The library uses column order, so it gets the transposed product: out^T = b^T a^T.
        self.set(_DESC_TRANSA, ctypes.c_int32(int(not problem.b_rows)))
        self.set(_DESC_TRANSB, ctypes.c_int32(int(not problem.a_rows)))
        if problem.bias:
            self.set(_DESC_EPILOGUE, ctypes.c_int32(_EPILOGUE_BIAS))
        b_shape = (problem.n, problem.k) if problem.b_rows else (problem.k, problem.n)
        a_shape = (problem.k, problem.m) if problem.a_rows else (problem.m, problem.k)
        self.b = _matrix(problem, *b_shape, problem.ldb, problem.b_step)
        self.a = _matrix(problem, *a_shape, problem.lda, problem.a_step)
        self.out = _matrix(problem, problem.n, problem.m, problem.n, problem.m * problem.n)

    def set(self, attribute: int, value: ctypes._SimpleCData[Any]) -> None:
        """One attribute of the product."""
        put("cublasLtMatmulDescSetAttribute", self.desc, attribute, value)


def _matrix(problem: Problem, rows: int, cols: int, ld: int, step: int) -> ctypes.c_void_p:
    layout = ctypes.c_void_p()
    do("cublasLtMatrixLayoutCreate", ctypes.byref(layout), _DATA_TYPES[problem.dtype], rows, cols, ld)
    if problem.batch > 1:
        put("cublasLtMatrixLayoutSetAttribute", layout, _LAYOUT_BATCH_COUNT, ctypes.c_int32(problem.batch))
        put("cublasLtMatrixLayoutSetAttribute", layout, _LAYOUT_BATCH_OFFSET, ctypes.c_int64(step))
    return layout


# Never destroyed: a few hundred bytes each, and a Product in use still refers to them.
descriptors = functools.cache(Descriptors)


def _setting(found: Heuristic, attribute: int) -> int:
    value, written = ctypes.c_uint32(0), SIZE(0)
    at = ctypes.addressof(found), attribute, ctypes.addressof(value)  # the algorithm is its first field
    do("cublasLtMatmulAlgoConfigGetAttribute", *at, ctypes.sizeof(value), ctypes.byref(written))
    return value.value


def _preference(alignment_bytes: int) -> ctypes.c_void_p:
    preference = ctypes.c_void_p()
    do("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
    settings: list[tuple[int, ctypes._SimpleCData[Any]]] = [
        (_PREF_WORKSPACE, ctypes.c_uint64(MAX_WORKSPACE_BYTES)),
        (_PREF_REDUCTION_MASK, ctypes.c_uint32(_REDUCTION_NONE)),
        *((attribute, ctypes.c_uint32(alignment_bytes)) for attribute in _PREF_ALIGNMENTS),
    ]
    for attribute, value in settings:
        put("cublasLtMatmulPreferenceSetAttribute", preference, attribute, value)
    return preference


def algorithms(problem: Problem, index: int, count: int = 1, alignment_bytes: int = ALIGNMENT_BYTES) -> list[Algorithm]:
    """Up to `count` algorithms without split-K for the problem on CUDA device `index`, in the library's order of
    preference.

    Empty where the library has none. They are for operands of that alignment or a better one. Runs only on the host,
    also while a CUDA graph is being captured.
    """
    of = descriptors(problem)
    preference = _preference(alignment_bytes)
    found = (Heuristic * count)()
    returned = ctypes.c_int(0)
    try:
        with torch.cuda.device(index):
            do(
                "cublasLtMatmulAlgoGetHeuristic",
                *(handle_of(index), of.desc, of.b, of.a, of.out, of.out, preference, count),
                *(ctypes.addressof(found), ctypes.byref(returned)),
            )
    except BlasError:  # "not supported" is the usual one: no algorithm for this problem
        return []
    finally:
        do("cublasLtMatmulPreferenceDestroy", preference)
    result = []
    for rank, one in enumerate(found[: returned.value]):
        if one.state or _setting(one, _ALGO_SPLIT_K) > 1 or _setting(one, _ALGO_REDUCTION) != _REDUCTION_NONE:
            continue
        numbers = [_setting(one, attribute) for attribute in (_ALGO_ID, _ALGO_TILE, _ALGO_STAGES)]
        result.append(Algorithm(rank, bytes(one.algo), one.workspace_bytes, *numbers))
    return result


class Product:
    """A problem bound to a device and an algorithm, which fix its order; calling it launches one kernel."""

    def __init__(self, problem: Problem, index: int, algorithm: Algorithm) -> None:
        loaded = library()
        if loaded is None:
            raise BlasError("PyTorch has loaded no cuBLASLt here")
        self._problem = problem
        self._of = of = descriptors(problem)
        self._index = index
        self._workspace_bytes = algorithm.workspace_bytes
        self._matmul = loaded.cublasLtMatmul
        state = ctypes.create_string_buffer(algorithm.state, len(algorithm.state))
        self._kept = (state, ctypes.c_float(1.0), ctypes.c_float(0.0))
        algo, one, zero = (ctypes.c_void_p(ctypes.addressof(x)) for x in self._kept)
        self._fixed = (handle_of(index), of.desc, one, of.b, of.a, zero, of.out, algo)

    def __call__(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Write a x b (+ bias) to `out`: tensors of the problem, aligned, on its device, which must be the current."""
        if bias is None:
            self._launch(a, b, out)
            return
        with _bias_lock:  # the bias is part of the descriptor, which other threads use too
            self._of.set(_DESC_BIAS_POINTER, ctypes.c_void_p(bias.data_ptr()))
            self._launch(a, b, out)

    def _launch(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        handle, desc, one, b_desc, a_desc, zero, out_desc, algo = self._fixed
        # From the caching allocator, so it belongs to the stream, and to a graph that captures this
        space = empty_strided((self._workspace_bytes,), (1,), torch.uint8) if self._workspace_bytes else None
        space_at = None if space is None else space.data_ptr()
        a_at, b_at, at = a.data_ptr(), b.data_ptr(), out.data_ptr()
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        operands = (b_at, b_desc, a_at, a_desc, zero, at, out_desc, at, out_desc)
        status = self._matmul(handle, desc, one, *operands, algo, space_at, self._workspace_bytes, stream)
        if status:
            raise BlasError(f"cublasLtMatmul returned status {status} for {self._problem}")


_bias_lock = threading.Lock()
