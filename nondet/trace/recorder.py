"""What is kept of one step, whichever the engine: the calls in one region of the model, with their tensors.

A region is one layer, or what comes before the first ("embedding") or after the last ("head"). A call is a module as a
whole, or what its code calls, as a mode of torch's sees it in the engine's own thread: `Functions` before the
dispatcher decomposes it (`linear`, `Tensor.mul`), so that it is what `batch_invariant()` replaces; `Operators` in the
dispatcher, other libraries' among them. What neither sees (a Triton launch, another library's write) shows as a module
with equal inputs and different outputs while no call inside it is responsible.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from nondet.core.compare import memory_of
from nondet.errors import UserError


class EventKey(NamedTuple):
    """The caller, the function, and which of the module's calls it is."""

    module: str
    call: str
    occurrence: int


class Sizes(NamedTuple):
    """The lengths that axes of a step's tensors can have: rows of the step, keys that the region's attention reads, of
    all requests (0 where the region has none), and rows of the logits."""

    tokens: int
    keys: int
    predicted: int


@dataclass
class Slot:
    """One tensor of a call."""

    path: str  # its position among the arguments: "0", "attn_mask", "1.0"; "out" and "out.1" for results
    shape: tuple[int, ...]
    dtype: torch.dtype
    weight: bool  # whether it is a parameter of the model or a view of one: equal in both arms, as the weights are
    # a copy of it as it was at the call (inputs) or after it (results); None if only shapes are recorded, for weights,
    # and beyond the memory limit
    value: torch.Tensor | None = None
    layout: tuple[tuple[int, ...], int] = ((), 0)  # where it was noted: strides, and elements beyond 64 aligned bytes


@dataclass
class Event:
    """One call."""

    key: EventKey
    inputs: list[Slot]
    outputs: list[Slot]
    constants: dict[str, Any] = field(default_factory=dict)  # arguments that are not tensors, by position
    # function, args, kwargs: what was called, for replays: tensors are the copies, weights the weights themselves. None
    # where the call can't be made by itself.
    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    of_module: bool = False  # whether it is a module's, with all calls inside


@dataclass
class StepRecord:
    """The region's calls in one step."""

    sizes: Sizes
    row: int  # the row of the position under study; -1 in a step of which only shapes are recorded
    columns: range  # indices of this request's visible keys among all keys, in order of position
    predicted: int
    events: list[Event] = field(default_factory=list)
    limited: bool = False  # whether copies were left out for lack of memory
    # whether every tensor was cut to the position's rows: then none belongs to all rows, and no axis counts any
    cut: bool = False
    _count: Counter[tuple[str, str]] = field(default_factory=Counter)

    @classmethod
    def whole(cls) -> StepRecord:
        """Of a plain forward, of which everything is kept."""
        return cls(Sizes(0, 0, 0), 0, range(0), 0)

    def add(self, module: str, call: str, inputs: list[Slot], outputs: list[Slot]) -> Event:
        """Append a call, numbered among the calls of the same function in its module."""
        event = Event(EventKey(module, call, self._count[module, call]), inputs, outputs)
        self._count[module, call] += 1
        self.events.append(event)
        return event


def tensors_in(value: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors in nested arguments or results, each with its path."""
    found: list[tuple[str, torch.Tensor]] = []
    changed_tensors(value, lambda path, tensor: found.append((path, tensor)))
    return found


def changed_tensors(value: Any, change: Callable[[str, torch.Tensor], Any], path: str = "") -> Any:
    """The same nested arguments, each tensor replaced by `change(path, tensor)`; "1.0" is the first in the second."""
    if isinstance(value, torch.Tensor):
        return change(path, value)
    join = f"{path}." if path else ""
    if isinstance(value, list | tuple):
        parts = [changed_tensors(v, change, f"{join}{i}") for i, v in enumerate(value)]
        return tuple(parts) if isinstance(value, tuple) else parts
    if isinstance(value, dict):
        return {k: changed_tensors(v, change, f"{join}{k}") for k, v in value.items()}
    return value


def copied(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    """Nested arguments with their copies instead of the tensors."""
    return changed_tensors(value, lambda _, tensor: copies.get(id(tensor), tensor))


def find_layers(model: Any) -> list[tuple[str, Any]]:
    """The decoder layers by their paths, in order: the outermost list of modules of the config's length; else
    UserError."""
    from torch import nn

    count = model.config.get_text_config().num_hidden_layers
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return [(f"{path}.{i}", layer) for i, layer in enumerate(module)]
    raise UserError(
        f"{type(model).__name__} has no list of {count} layers, so there is nothing to trace layer by layer",
        "Trace a decoder-only model of transformers.",
    )


def add_hooks(stack: ExitStack, module: Any, before: Any = None, after: Any = None) -> None:
    """Call `before` and `after` each forward of a module, with its keyword arguments, until the stack is closed."""
    if before is not None:
        stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
    if after is not None:
        stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)


# The engine's own among a module's tensors: those are separated by request and not by row.
_ENGINES = ("cu_seq_lens_q", "cu_seq_lens_k", "read_index", "write_index", "logits_indices", "logits_to_keep",
            "cache", "block_table", "logits_processor_args")  # fmt: skip


class Recorder:
    """Records the calls of a region while a step is under way: from `start` on, until `_now` is None. With `_seen` none
    is kept: each is given to it as it ends, with its result, and what that returns takes the result's place."""

    # Bytes of copies of one step; beyond them calls are recorded without their tensors, and the record is marked.
    most_bytes = 4 * 2**30
    most_of_one = most_bytes  # of one tensor, which is left out if it has more

    _now: Any = None  # the running step's record
    _mode: Any = None  # that is on while a step is recorded
    _seen: Callable[[Event, Any], Any] | None = None
    _paused = 0

    def __init__(self, region: str, seen: Callable[[Event, Any], Any] | None = None) -> None:
        self.region, self._seen = region, seen

    @property
    def sees(self) -> bool:
        """Whether a call that is made now is recorded."""
        return self._now is not None and not self._paused

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Nothing that is called in here is recorded: the recorder's own copies, and the inside of an opaque call."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def watch(self, model: Any, stack: ExitStack) -> None:
        """Add hooks to the region's modules, a layer with itself, or to all; closing the stack removes them."""
        self._storages = {memory_of(t) for t in (*model.parameters(), *model.buffers())}
        layers = find_layers(model)
        among, layer = layers[0][0].rpartition(".")[0], self.region.isdigit() and layers[int(self.region)][0]
        for path, module in model.named_modules():
            outside = path and not (self.region and path.startswith(among))
            if f"{path}.".startswith(f"{layer}.") if layer else outside:
                enter, leave = functools.partial(self._enter, path), functools.partial(self._leave, path)
                add_hooks(stack, module, enter, leave)

    def start(self, record: StepRecord) -> None:
        """Record the calls from here on."""
        self._now, self._bytes = record, 0
        # modules, with what they were given, and that again for replays
        self._entered: list[tuple[str, list[Slot], tuple[Any, Any] | None]] = []
        if self._mode is not None:
            self._mode.__enter__()

    def _enter(self, path: str, _module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if self.sees:
            own, copies = {k: v for k, v in kwargs.items() if k not in _ENGINES}, dict[int, torch.Tensor]()
            slots = self.kept((*args, *([own] if own else [])), copies)
            given = None if kwargs.get("cache") is not None else (copied(args, copies), copied(own, copies))
            self._entered.append((path, slots, given))

    def _leave(self, path: str, module: Any, _args: Any, _kwargs: dict[str, Any], output: Any) -> Any:
        if not self.sees or not self._entered or self._entered[-1][0] != path:
            return output
        _, inputs, given = self._entered.pop()
        outputs = self.kept({"out": output if not isinstance(output, dict) else list(output.values())})
        event = self._now.add(path, type(module).__name__, inputs, outputs)
        event.of_module = True
        if given is not None:
            self.repeats(event, module, *given)
        return self.taken(event, output)

    def add(self, name: str, inputs: list[Slot], results: Any) -> Event:
        """Record a call of the innermost module: what it read, and its results."""
        where, outputs = self._entered[-1][0] if self._entered else self.region, self.kept(results)
        event: Event = self._now.add(where, name, inputs, outputs)
        return event

    def repeats(self, event: Event, function: Any, args: Any, kwargs: Any) -> None:
        """Note what a replay calls, if this step's arguments are copies."""
        if self._now.row >= 0 and not self._now.limited and not self._now.cut:
            event.function, event.args, event.kwargs = function, args, kwargs

    def taken(self, event: Event, out: Any) -> Any:
        """What takes the place of a call's result."""
        if self._seen is None:
            return out
        self._now.events.pop()
        with self.unseen():
            return self._seen(event, out)

    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is kept of a tensor that is no weight."""
        return tensor

    def _noted(self, slot: Slot, _tensor: torch.Tensor) -> Slot:
        """What else is noted of a tensor."""
        return slot

    def kept(self, value: Any, copies: dict[int, torch.Tensor] | None = None) -> list[Slot]:
        """The tensors in arguments or results, with copies as far as they are wanted; `copies` finds them by id."""
        record, slots = self._now, []
        with self.unseen():
            for path, tensor in tensors_in(value):
                weight = memory_of(tensor) in self._storages
                part = tensor if weight else self._part(tensor.detach())
                slot, size = Slot(path, tuple(part.shape), tensor.dtype, weight), part.numel() * part.element_size()
                if record.row >= 0 and not weight and size <= self.most_of_one:
                    self._bytes += size
                    record.limited = record.limited or self._bytes > self.most_bytes
                    if not record.limited:
                        slot.value = part.clone()
                        if copies is not None:
                            copies[id(tensor)] = slot.value
                slots.append(self._noted(slot, tensor))
        return slots


class Functions(TorchFunctionMode):
    """Sees torch's functions. It is off while it handles one."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, _name_of(func)
        if name is None or not self._recorder.sees:
            return func(*args, **kwargs)
        given = [t for _, t in tensors_in((args, kwargs))]
        before = {memory_of(t) for t in given}
        # another package computes with it, as torchao with its weights; torch's DTensor holds plain numbers
        foreign = {type(t) for t in given if is_traceable_wrapper_subclass(t)}
        made = sorted(kind.__name__ for kind in foreign if not kind.__module__.startswith("torch."))
        copies: dict[int, torch.Tensor] = {}
        inputs = self._recorder.kept((*args, *([kwargs] if kwargs else [])), copies)
        out = func(*args, **kwargs)
        writes = name.endswith("_") or "out" in kwargs or "setitem" in name
        if not writes and all(memory_of(t) in before for _, t in tensors_in(out)):
            return out  # no tensor, or a view: nothing was computed
        # linear[Float8Tensor] is not a product of plain numbers
        named = name + (f"[{', '.join(made)}]" if made else "")
        event = self._recorder.add(named, inputs, {"out": args[0] if writes and args else out})
        constants = dict(enumerate(args)) | kwargs
        event.constants = {str(k): v for k, v in constants.items() if isinstance(v, bool | int | float | str)}
        if not writes:
            self._recorder.repeats(event, func, copied(args, copies), copied(kwargs, copies))
        return self._recorder.taken(event, out)


@functools.cache
def _name_of(function: Any) -> str | None:
    """As "linear" or "Tensor.mul"; None for what computes nothing (attributes, sizes)."""
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__", "__len__", "size", "dim", "stride", "numel", "is_floating_point", "data_ptr"):
        return None
    full = resolve_name(function) or name
    if full.endswith((".__get__", ".__set__")) or "empty" in full:  # an allocation holds whatever was there
        return None
    short = full.removeprefix("torch.").removeprefix("nn.functional.").removeprefix("_C._nn.")
    return short.replace("__", "") if short.startswith("Tensor.__") else short


class Operators(TorchDispatchMode):
    """Sees operators: what one writes is a result, what it reads an input. It is off while it handles one."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._fresh: set[int] = set()  # new storages without contents

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, schema = kwargs or {}, func._schema
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if view or not self._recorder.sees:  # nothing is computed
            return func(*args, **kwargs)
        if "empty" in schema.name:  # it holds old memory
            out = func(*args, **kwargs)
            self._fresh.add(memory_of(out))
            return out
        writes = sorted(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
        given = {a.name: value for a, value in zip(schema.arguments, args, strict=False)} | kwargs
        memory = {name: memory_of(given[name]) for name in writes if isinstance(given.get(name), torch.Tensor)}
        inputs = self._recorder.kept({n: value for n, value in given.items() if memory.get(n) not in self._fresh})
        self._fresh.difference_update(memory.values())
        out = func(*args, **kwargs)
        self._recorder.add(schema.name, inputs, {"out": out} | {name: given[name] for name in writes if name in given})
        return out
