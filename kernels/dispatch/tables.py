"""Which function of ours stands under which operator, at which dispatch key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nondet.kernels.dispatch import collectives, functions
from nondet.kernels.dispatch.kernels import Kernels, kernels_for
from nondet.kernels.dispatch.operators import ADDS_IF, AT_RISK, CERTIFIABLE, COMPOSED, OPERATORS, variants

__all__ = ["decided", "exact_ones"]

_Functions = dict[tuple[str, str], Callable[..., Any]]


def devices() -> tuple[str, ...]:
    """The dispatch keys of the devices at hand."""
    return ("CPU", "CUDA") if torch.cuda.is_available() else ("CPU",)


def decided() -> _Functions:
    """Everything that is replaced, certified or at risk. Called while nothing of ours is registered."""
    found: _Functions = dict(collectives.functions(devices()))
    for device in devices():
        for family, operators in OPERATORS.items():
            if family == "pointwise" and device != "CPU":
                continue
            for base, whole in operators.items():
                for name, replacement in variants(base, whole).items():
                    for key in _where(name, device):
                        original = _original(f"aten::{name}", key)
                        if original is not None:
                            found[f"aten::{name}", key] = functions.replacing(
                                name, family, _kernels(device.lower()), original, replacement
                            )
        for name in (*AT_RISK, *ADDS_IF):
            original = None if _made_of_others(name, device) else _original(f"aten::{name}", device)
            if original is not None:
                found[f"aten::{name}", device] = functions.watching(f"aten::{name}", original, ADDS_IF.get(name))
        for name in CERTIFIABLE:
            original = _original(f"aten::{name}", device)
            if original is not None:
                found[f"aten::{name}", device] = functions.certifying(name, original)
    return found


def exact_ones() -> _Functions:
    """Every other operator of aten with a kernel of its own for the device, for hooks that want to see all."""
    taken = decided()
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    found: _Functions = {}
    for qualified in torch._C._dispatch_get_all_op_names():
        for device in devices():
            if qualified.startswith("aten::") and (qualified, device) not in taken and has(qualified, device):
                original = _original(qualified, device)
                if original is not None:
                    found[qualified, device] = functions.passing(qualified, original)
    return found


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
        return torch.library.get_kernel(qualified, key)
    except RuntimeError:  # "no kernel for CUDA for aten::..."
        return None


def _made_of_others(name: str, device: str) -> bool:
    """Composed, on this device: what it is made of is counted, and a kernel for it would take its gradient away."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has(f"aten::{name}", "CompositeImplicitAutograd")) and not has(f"aten::{name}", device)
