"""What the Triton launchers share: the devices and dtypes that they take, and the device they launch on.

Triton kernels run on CUDA, or on CPU tensors in Triton's interpreter, which is chosen by TRITON_INTERPRET=1 in the
environment before a kernel module is imported. The interpreter is for tests of logic: it is slow, and its bfloat16 is
wrong (it multiplies raw bits), so bfloat16 is refused there.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

from nondet.core.launch import listen_to_triton

INTERPRETED = bool(triton.knobs.runtime.interpret)
listen_to_triton()
HALF = (torch.float16, torch.bfloat16)


def accumulator(dtype: torch.dtype) -> Any:
    """The Triton dtype that sums are kept in: float64 for float64, float32 for everything narrower."""
    return tl.float64 if dtype == torch.float64 else tl.float32


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Of a CUDA device: (9, 0) for Hopper."""
    return torch.cuda.get_device_capability(device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a CUDA device; in the interpreter 132, a large GPU's, so that plans are those of one."""
    if device.type != "cuda":
        return 132
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


_HERE = nullcontext()


def on_device(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Launch inside this: Triton launches on the current device, which need not be the one that holds `x`."""
    if not x.is_cuda or (not torch.compiler.is_compiling() and torch.cuda.current_device() == x.get_device()):
        return _HERE
    return torch.cuda.device(x.device)


_FOUND_MOST = 16384
_found: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: tuple[Any, ...],
    numbers: tuple[Any, ...],
    constants: dict[str, Any],
    **options: Any,
) -> None:
    """kernel[grid](*tensors, *numbers, **constants, **options), found again where its like was launched before.

    Triton's own way to a compiled kernel binds a signature, and takes several times as long as the launch. Here it is
    found by all that Triton compiles it for: the device, numbers, constants and options as they are, of each tensor the
    dtype and whether it starts at 16 bytes.

    Args:
        tensors: The kernel's first parameters, by place: tensors, boxes of them for the copy engine, or None.
        numbers: The next ones.
        constants: All others, by name and in their order.
    """
    if INTERPRETED or torch.compiler.is_compiling():
        kernel[grid](*tensors, *numbers, **constants, **options)
        return
    low = 0
    kinds: list[object] = []
    for x in tensors:
        if isinstance(x, torch.Tensor):
            low |= x.data_ptr()
            kinds.append(x.dtype)
        else:  # how boxes lie in shared memory follows from their sizes
            kinds.append(None if x is None else (x.base.dtype, *x.block_shape))
    if low & 15:
        kinds += [isinstance(x, torch.Tensor) and x.data_ptr() & 15 for x in tensors]
    values = (*constants.values(),)
    key = (kernel.fn, torch.cuda.current_device(), numbers, values, *options.values(), *kinds)
    compiled = _found.get(key)
    if compiled is not None:
        compiled[(*grid, 1, 1)](*tensors, *numbers, *values)
        return
    compiled = kernel[grid](*tensors, *numbers, **constants, **options)
    if compiled is not None and [*constants] == [*kernel.arg_names[len(tensors) + len(numbers) :]]:
        if len(_found) >= _FOUND_MOST:
            _found.clear()
        _found[key] = compiled


def require(operator: str, dtypes: tuple[torch.dtype, ...], *tensors: torch.Tensor) -> None:
    """Refuse what the kernels do not do, rather than do something else.

    Raises:
        NotImplementedError: the device or the dtype has no kernel.
        ValueError: the tensors' devices or dtypes differ.
    """
    first = tensors[0]
    for x in tensors[1:]:
        if x.device != first.device or x.dtype != first.dtype:
            raise ValueError(
                f"{operator} needs one device and one dtype, got {first.dtype} on {first.device} "
                f"and {x.dtype} on {x.device}"
            )
    if first.device.type != "cuda" and not (INTERPRETED and first.device.type == "cpu"):
        raise NotImplementedError(f"{operator} has no Triton kernel for device {first.device}; it runs on CUDA")
    if first.dtype not in dtypes:
        known = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise NotImplementedError(f"{operator} has no Triton kernel for {first.dtype}; it takes {known}")
    if INTERPRETED and first.dtype == torch.bfloat16:
        raise NotImplementedError(f"{operator}: Triton's interpreter computes bfloat16 wrongly; use float16 or float32")
