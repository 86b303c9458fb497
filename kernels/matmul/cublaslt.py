"""The functions of cuBLASLt that a product needs, called in the library that PyTorch has loaded.

The names and numbers here and in `nondet.kernels.matmul.cuda_blas` are those of cublasLt.h (CUDA 12 and 13).
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

__all__ = ["SIZE", "BlasError", "Heuristic", "available", "do", "handle_of", "library", "put", "version"]

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
    """One answer of the library's heuristic; the opaque algorithm is its first field."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """The cuBLASLt that PyTorch has loaded, or None: a CPU build, or a library under another name."""
    if torch.version.cuda is None:
        return None
    try:
        found = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")
    except OSError:
        return None
    for name, arguments in _SIGNATURES.items():
        getattr(found, name).argtypes = arguments
    found.cublasLtGetVersion.restype = SIZE
    return found


def available() -> bool:
    """Is the library there at all."""
    return library() is not None


def version() -> int:
    """The library's own number, as 130100; 0 without a library."""
    found = library()
    return 0 if found is None else int(found.cublasLtGetVersion())


def do(name: str, *arguments: Any) -> None:
    """Call the library's function `name`.

    Raises:
        BlasError: it refused, or there is no library.
    """
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
