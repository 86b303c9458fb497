"""What the Triton launchers share: the devices and dtypes that they accept, and how they launch.

Triton kernels run on CUDA, or on CPU tensors in Triton's interpreter, which you choose with TRITON_INTERPRET=1 in the
environment before a kernel module is imported. The interpreter is for tests of logic: it is slow, and its bfloat16 is
wrong (it multiplies raw bits), so bfloat16 is refused there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from nondet.core.launch import listen_to_triton, note

INTERPRETED = bool(triton.knobs.runtime.interpret)
listen_to_triton()
HALF = (torch.float16, torch.bfloat16)

# (shape, strides, dtype) -> uninitialized memory of the current device from its allocator, as Inductor's code gets it:
# `torch.empty` or `empty_like` from Python takes two to six times as long. Shape and strides are plain tuples.
_guards: Any = torch._C._dynamo.guards
empty_strided: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]
empty_strided = _guards._empty_strided_cpu if INTERPRETED else _guards._empty_strided_cuda
Buffer = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def buffer_of(shape: tuple[int, ...], dtype: torch.dtype) -> Buffer:
    """The arguments of `empty_strided` for a contiguous tensor."""
    return (*shape,), torch.empty(shape, dtype=dtype, device="meta").stride(), dtype


def accumulator(dtype: torch.dtype) -> Any:
    """The Triton dtype that sums are kept in: float64 for float64, float32 for everything narrower."""
    return tl.float64 if dtype == torch.float64 else tl.float32


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Of a CUDA device: (9, 0) for Hopper."""
    return torch.cuda.get_device_capability(device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a CUDA device; in the interpreter 132, so that plans are those of a large GPU."""
    if device.type != "cuda":
        return 132
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


_HERE = nullcontext()


def on_device(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Launch inside this: Triton launches on the current device, which may differ from x's device."""
    if not x.is_cuda or (not torch.compiler.is_compiling() and torch.cuda.current_device() == x.get_device()):
        return _HERE
    return torch.cuda.device(x.device)


_FOUND_MOST = 16384
_found: dict[tuple[Any, ...], Any] = {}


class Launched:
    """A repeatable launch, only for tensors of the dtypes, alignment and device that it was made for: unchecked."""

    __slots__ = ("_front", "_grid", "_kernel", "_rest", "_run")

    def __init__(self, compiled: Any, grid: tuple[int, ...], rest: tuple[Any, ...]) -> None:
        self._kernel, self._grid, self._rest = compiled, (*grid, 1, 1)[:3], rest
        self._run = run = getattr(compiled, "run", None)  # the driver's launcher
        if run is not None:
            self._front: tuple[Any, ...] = (compiled.function, compiled.packed_metadata, None, None, None)
            if triton.__version__.startswith("3.6.") and not (run.global_scratch_size or run.profile_scratch_size):
                modes = run.launch_cooperative_grid, run.launch_pdl, None, None  # Triton's own additions
                self._run, self._front = run.launch, (compiled.function, *modes, *self._front[1:])

    def __call__(self, device: int, tensors: Sequence[Any]) -> None:
        """On the current device's stream; `tensors` are the kernel's first parameters: tensors, addresses, boxes or
        None.
        """
        if self._run is None or _heard():
            self._kernel[self._grid](*tensors, *self._rest)
        else:  # Triton's own preparation is done already, and no launch hook is set: only launch
            stream = torch._C._cuda_getCurrentRawStream(device)
            self._run(*self._grid, stream, *self._front, *tensors, *self._rest)


def _heard() -> bool:
    runtime = triton.knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: tuple[Any, ...],
    numbers: tuple[Any, ...],
    constants: dict[str, Any],
    **options: Any,
) -> Callable[[int, Sequence[Any]], None] | None:
    """kernel[grid](*tensors, *numbers, **constants, **options), with a cache of compiled kernels.

    Triton's own lookup binds a signature, and takes several times as long as the launch. Here the key is all that
    Triton compiles for: the device, numbers, constants, options, and each tensor's dtype and 16-byte alignment. The
    kernel's parameters are, in order, the tensors (or boxes of them for the copy engine, or None), the numbers and the
    constants. Returns the same launch, repeatable, as `Launched`; None where that is not possible.
    """
    if INTERPRETED or torch.compiler.is_compiling():
        kernel[grid](*tensors, *numbers, **constants, **options)
        if not INTERPRETED:
            return None
        return lambda device, tensors: kernel[grid](*tensors, *numbers, **constants, **options)
    low = 0
    kinds: list[object] = []
    for x in tensors:
        if isinstance(x, torch.Tensor):
            low |= x.data_ptr()
            kinds.append(x.dtype)
        else:  # the layout of boxes in shared memory follows from their sizes
            kinds.append(None if x is None else (x.base.dtype, *x.block_shape))
    if low & 15:
        kinds += [isinstance(x, torch.Tensor) and x.data_ptr() & 15 for x in tensors]
    values = (*constants.values(),)
    device = torch.cuda.current_device()
    key = (kernel.fn, device, numbers, values, *options.values(), *kinds)
    compiled = _found.get(key)
    if compiled is not None:
        again = Launched(compiled, grid, (*numbers, *values))
        again(device, tensors)
        return again
    compiled = kernel[grid](*tensors, *numbers, **constants, **options)
    if compiled is not None and [*constants] == [*kernel.arg_names[len(tensors) + len(numbers) :]]:
        if len(_found) >= _FOUND_MOST:
            _found.clear()
        _found[key] = compiled
        return Launched(compiled, grid, (*numbers, *values))
    return None


class Step(NamedTuple):
    """One launch of a cached call."""

    launch: Callable[[int, Sequence[Any]], None] | None  # None where it can't be repeated
    order: tuple[int, ...]  # its tensors, as indices into the call's own tensors followed by the results; -1 for none
    # (Index among its tensors, index as in order, pattern of a descriptor) of what the copy engine brings
    boxes: tuple[tuple[int, int, Any], ...] = ()


class _Kept(NamedTuple):
    buffers: tuple[Buffer, ...]
    steps: tuple[Any, ...]
    label: str
    device: int


_kept: dict[tuple[Any, ...], _Kept] = {}


def box_at(pattern: Any, x: torch.Tensor) -> Any:
    """A descriptor of x's memory with the pattern's layout: a new one per launch, because other threads launch too."""
    box = object.__new__(type(pattern))
    box.__dict__.update(pattern.__dict__)
    box.base = x
    return box


def _kind(what: object, tensors: tuple[torch.Tensor | None, ...]) -> tuple[tuple[Any, ...], list[Any]] | None:
    """The key of a call's launches, and the tensors' addresses; None where one has no memory."""
    key: list[object] = [what]
    places: list[Any] = []
    for x in tensors:
        if x is None:
            key.append(None)
            places.append(None)
        else:
            place = x.data_ptr()
            if not place:  # no memory: empty, or a tensor subclass that only wraps others
                return None
            key += (x.shape, x.stride(), x.dtype, x.get_device(), place & 15)  # else a kernel of another alignment
            places.append(x if INTERPRETED else place)
    return (*key,), places


def remember(
    what: object, tensors: tuple[torch.Tensor | None, ...], buffers: tuple[torch.Tensor, ...], label: str, *steps: Step
) -> None:
    """Cache the launches for calls with the same `what` and tensors of these shapes, strides, dtypes and device.

    `what`: the operator and all its arguments except `tensors`, which the launches read in place, without copies.
    `buffers`: its results and intermediate buffers, contiguous. `label`: what is noted.
    """
    if torch.compiler.is_compiling() or any(step.launch is None for step in steps):
        return
    kind = _kind(what, tensors)
    if kind is not None:
        if len(_kept) >= _FOUND_MOST:
            _kept.clear()
        device = next(x.get_device() for x in (*buffers, *tensors) if x is not None)
        _kept[kind[0]] = _Kept(tuple(((*x.shape,), x.stride(), x.dtype) for x in buffers), steps, label, device)


def forget() -> None:
    """Clear the cache of calls."""
    _kept.clear()


def bound(what: object, *tensors: torch.Tensor | None) -> Callable[..., list[torch.Tensor]] | None:
    """What replays a cached call for tensors like these, as `again` does; for a caller with a key of its own, in which
    the current device is. None: no such call is cached, or the tensors are on another device.
    """
    kind = _kind(what, tensors)
    kept = None if kind is None else _kept.get(kind[0])
    if kept is None or not _on_current_device(tensors):
        return None

    def replay(*tensors: torch.Tensor | None) -> list[torch.Tensor]:
        return _replayed(kept, tensors, [x if x is None or INTERPRETED else x.data_ptr() for x in tensors])

    return replay


def again(what: object, *tensors: torch.Tensor | None) -> list[torch.Tensor] | None:
    """The output buffers of a cached call with the same signature, after replaying its launches; None if not cached."""
    kind = None if torch.compiler.is_compiling() else _kind(what, tensors)
    kept = None if kind is None else _kept.get(kind[0])
    if kind is None or kept is None or not _on_current_device(tensors):
        return None
    return _replayed(kept, tensors, kind[1])


def _on_current_device(tensors: Sequence[torch.Tensor | None]) -> bool:
    device = -1 if tensors[0] is None else tensors[0].get_device()
    return INTERPRETED if device < 0 else not INTERPRETED and torch._C._cuda_getDevice() == device


def _replayed(kept: _Kept, tensors: Sequence[torch.Tensor | None], places: list[Any]) -> list[torch.Tensor]:
    """`places`: what a launch takes of the tensors, their addresses, in the interpreter themselves."""
    made = []
    for wanted in kept.buffers:
        buffer = empty_strided(*wanted)
        made.append(buffer)
        places.append(buffer if INTERPRETED else buffer.data_ptr())  # aligned to 16 bytes by all of torch's allocators
    places.append(None)
    note(kept.label)
    for launch, order, boxes in kept.steps:
        operands = [places[i] for i in order]
        for at, i, pattern in boxes:
            operands[at] = box_at(pattern, tensors[i] if i < len(tensors) else made[i - len(tensors)])
        launch(kept.device, operands)
    return made


def require(operator: str, dtypes: tuple[torch.dtype, ...], *tensors: torch.Tensor) -> None:
    """Raise NotImplementedError for a device or dtype without a kernel, ValueError where the tensors' differ."""
    first = tensors[0]
    for x in tensors[1:]:
        if x.device != first.device or x.dtype != first.dtype:
            raise ValueError(
                f"{operator} needs one device and one dtype, got {first.dtype} on {first.device} "
                f"and {x.dtype} on {x.device}"
            )
    place = "cpu" if INTERPRETED else "cuda"
    if first.device.type != place:
        raise NotImplementedError(f"{operator} has no Triton kernel for device {first.device}; it runs on {place}")
    if first.dtype not in dtypes:
        known = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise NotImplementedError(f"{operator} has no Triton kernel for {first.dtype}; it takes {known}")
    if INTERPRETED and first.dtype == torch.bfloat16:
        raise NotImplementedError(f"{operator}: Triton's interpreter computes bfloat16 wrongly; use float16 or float32")
