"""What a proof by bits depends on: the machine, the libraries that pick kernels on it, and our own sources.

A library picks its kernel by the chip, its version, the shape and the layout of a call, and by settings; a compiler
lays out a sum by its version. So a proof holds for one combination of all of these and is void in any other.

Settings that a process may change while it runs (the preferred BLAS, float32 matmul precision, reduced-precision
reductions) are not part of the machine: a member either sets them itself, or its key names them.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["digest_of", "machine", "machine_digest", "sources", "sources_digest"]

_BOTH = ("torch",)
_CUDA = ("gpu", "gpu_capability", "gpu_sms", "driver", "cuda", "cublas", "cudnn", "triton")
_CPU = ("cpu", "cpu_isa", "aten_cpu_capability", "mkl", "onednn", "num_threads", "numpy")

# Recorded by `nondet.environment`, yet no numeric library or compiler looks at them to pick an order.
_HARMLESS = {"CUDA_VISIBLE_DEVICES", "OMP_WAIT_POLICY", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NCCL_ALGO", "NCCL_PROTO"}
_COMPILER = ("DISABLE_PTXAS_OPT", "TRITON_DEFAULT_FP_FUSION", "TRITON_PTXAS_BLACKWELL_PATH", "TRITON_PTXAS_PATH")

_ROOT = Path(__file__).resolve().parent
# The kernels, and what a proof consists of: a sharper question voids the answers to the blunter one.
_SOURCES = ("kernels", "certify", "machine.py", "proof.py", "inputs.py", "compare.py")


def machine(device: str) -> dict[str, Any]:
    """What proofs on this device ("cuda": the current one) hold for, as JSON-able data; unknown things are None."""
    from nondet.environment import numerics, variables
    from nondet.kernels.matmul import cublaslt

    environment = numerics()
    steering = {k: v for k, v in environment["variables"].items() if k not in _HARMLESS}
    if device == "cuda":
        steering |= variables(_COMPILER)
    found: dict[str, Any] = {"device": device}
    found |= {k: environment[k] for k in (*(_CUDA if device == "cuda" else _CPU), *_BOTH)}
    if device == "cuda":
        found["cublaslt"] = cublaslt.version() or None  # of the very library that products are computed by
    return found | {"variables": steering, "sources": sources_digest()}


def machine_digest(described: dict[str, Any]) -> str:
    """First 16 hex digits of the SHA-256 over `machine`'s answer: the machine key of a proof."""
    import msgspec

    return digest_of(msgspec.json.encode(described, order="deterministic"))


@functools.cache
def sources_digest() -> str:
    """First 16 hex digits of the SHA-256 over every source file that a proof rests on, names included."""
    parts = [f"{name}:{hashlib.sha256(path.read_bytes()).hexdigest()}" for name, path in sources()]
    return digest_of("\n".join(parts).encode())


def sources() -> Iterator[tuple[str, Path]]:
    """(name, path) of every source file that a proof rests on."""
    for name in _SOURCES:
        place = (_ROOT / name).resolve()  # in a checkout `kernels` is a symbolic link, which "**" need not follow
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            yield (Path(name) / path.relative_to(place)).as_posix(), path


def digest_of(data: bytes) -> str:
    """First 16 hex digits of the SHA-256."""
    return hashlib.sha256(data).hexdigest()[:16]
