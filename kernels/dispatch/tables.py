"""Which function of ours stands under which operator, at which dispatch key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from nondet.kernels import originals
from nondet.kernels.dispatch import collectives, functions
from nondet.kernels.dispatch.exact import CONDITIONS, reason
from nondet.kernels.dispatch.kernels import Kernels, kernels_for
from nondet.kernels.dispatch.operators import (
    CERTIFIABLE,
    COMPOSED,
    COMPUTES,
    EXEMPT,
    OPERATORS,
    ORDERED_BY_SIZES,
    variants,
)
from nondet.kernels.dispatch.pointwise import VECTORS_ALONE
from nondet.kernels.pointwise.cpu import in_vectors, vectors_only

__all__ = ["decided", "exact_ones", "keep_originals"]

_Functions = dict[tuple[str, str], Callable[..., Any]]

# Dispatch keys of a device's tensors, plain and not. oneDNN's own tensors exist on a CPU alone.
_FORMS = {
    "CPU": ("CPU", "QuantizedCPU", "MkldnnCPU", "SparseCPU", "SparseCsrCPU", "NestedTensorCPU"),
    "CUDA": ("CUDA", "QuantizedCUDA", "SparseCUDA", "SparseCsrCUDA", "NestedTensorCUDA"),
}

# Namespaces that are not watched: ours; collectives, of which those that reduce have functions of their own, and the
# rest copies; compositions in Python of aten's operators; and what computes nothing.
_NOT_WATCHED = frozenset(
    {
        *("nondet", "c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"),
        *("prims", "inductor_prims", "debugprims", "rngprims", "profiler", "debug_mode_ops", "export", "_test"),
    }
)


def devices() -> tuple[str, ...]:
    """The dispatch keys of the devices at hand."""
    return ("CPU", "CUDA") if torch.cuda.is_available() else ("CPU",)


def decided() -> _Functions:
    """Everything that is replaced, certified or at risk. Called while nothing of ours is registered.

    At risk is all that has a kernel for a device, in any namespace, and is not in `nondet.kernels.dispatch.exact`.
    """
    made = _replaced_and_certified()
    for qualified, key in _kernels_there():
        namespace, _, name = qualified.partition("::")
        if namespace in _NOT_WATCHED or (qualified, key) in made:
            continue
        matters = None
        if namespace == "aten":
            device = "CUDA" if "CUDA" in key else "CPU"
            matters = CONDITIONS[device].get(name) if key == device else None
            if matters is None and reason(name, device):
                continue
        original = _original(qualified, key)
        if original is not None:
            made[qualified, key] = functions.watching(qualified, original, matters)
    return made


def keep_originals() -> _Functions:
    """`decided`, and for `nondet.kernels.originals` what stands there now. Called likewise."""
    own = {name: _original(name if "::" in name else f"aten::{name}", "CPU") for name in originals.NAMES}
    originals.keep({name: kernel.call_boxed for name, kernel in own.items() if kernel is not None})
    return decided()


def exact_ones() -> _Functions:
    """Every other operator of aten with a kernel of its own for the device, for hooks that want to see all."""
    taken = decided()
    made: _Functions = {}
    for qualified, key in _kernels_there():
        if key in devices() and qualified.startswith("aten::") and (qualified, key) not in taken:
            original = _original(qualified, key)
            if original is not None:
                made[qualified, key] = functions.passing(qualified, original)
    return made


def _replaced_and_certified() -> _Functions:
    made: _Functions = dict(collectives.functions(devices()))
    for device in devices():
        for family, operators in OPERATORS.items():
            if family == "pointwise" and device != "CPU":
                continue
            for base, whole in operators.items():
                for name, replacement in variants(base, whole).items():
                    for key in _where(name, device):
                        original = _original(f"aten::{name}", key)
                        if original is not None:
                            made[f"aten::{name}", key] = functions.replacing(
                                *(name, family, _kernels(device.lower()), original, replacement),
                                again=_again(name, base, family, device, original),
                            )
        for name, matters in ORDERED_BY_SIZES.items():
            for key in (device, f"Autograd{device}"):
                original = _original(f"aten::{name}", key)
                if original is not None:
                    made[f"aten::{name}", key] = functions.watching(f"aten::{name}", original, matters)
        for name in CERTIFIABLE:
            original = _original(f"aten::{name}", device)
            if original is not None:
                made[f"aten::{name}", device] = functions.certifying(name, original)
    return made


def _kernels_there() -> Iterator[tuple[str, str]]:
    """Operators that compute by themselves at a device's key. Those composed of others are seen as the others."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for qualified in torch._C._dispatch_get_all_op_names():
        for device in devices():
            for key in _FORMS[device]:
                if has(qualified, key):
                    yield qualified, key
            if not has(qualified, device) and _computes(qualified):
                yield qualified, device


def _computes(qualified: str) -> bool:
    """Registered as composed of others, for every device, and yet computing past the dispatcher, or not torch's."""
    namespace, _, name = qualified.partition("::")
    if namespace == "aten":
        return name in COMPUTES
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CompositeExplicitAutograd"))


def _again(name: str, base: str, family: str, device: str, original: Any) -> Callable[..., Any] | None:
    """The shorter way that an operator has on a CPU, see `functions.replacing`."""
    if device != "CPU":
        return None
    if name == "linear":
        return _linear_again
    if family == "pointwise" and name == base and name in VECTORS_ALONE and name not in EXEMPT:
        stock, keys = original.call_boxed, torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

        def whole(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            """The original, straight, over vectors alone: as it is where no element of x is left to scalar code."""
            if not (x.dtype.is_floating_point and x.is_contiguous() and x.numel()):
                return None
            if in_vectors(x.numel()):
                return stock(keys, x, *args, **kwargs)
            return vectors_only(lambda piece: stock(keys, piece, *args, **kwargs), x)

        return whole
    return None


def _linear_again(x: Any, weight: Any, bias: Any = None) -> Any:
    from nondet.kernels.matmul.cpu import linear_again  # with the first product, as every kernel

    return linear_again(x, weight, bias)


def _kernels(device: str) -> Callable[[], Kernels]:
    def get() -> Kernels:
        return kernels_for(device)

    return get


def _where(name: str, device: str) -> tuple[str, ...]:
    """Dispatch keys to register under: a composed operator with a kernel for the device alone loses its gradient."""
    return (device, f"Autograd{device}") if name in COMPOSED else (device,)


def _original(qualified: str, key: str) -> Any:
    """The kernel there, kept for good; None where nothing can be called."""
    try:
        # as torch.library.get_kernel, which does not know every key by its name ("MkldnnCPU")
        return torch._C._dispatch_get_computed_kernel_for_dispatch_key(qualified, torch._C._dispatch_key_parse(key))
    except RuntimeError:  # "no kernel for CUDA for aten::..."
        return None
