"""What is kept of a session: the coarse pass's hashes of each layer, and every call inside one region of the model."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from nondet.core.compare import memory_of, row_hashes
from nondet.errors import UserError
from nondet.kernels.dispatch.transformers_attention import window_of
from nondet.sampling.plan import Span, StepLog
from nondet.sampling.schedule import requested_logits

# What the fine pass keeps of one step: the calls in one region of the model, with their tensors, in order of time.
#
# A region is one layer, or what comes before the first ("embedding") or after the last ("head"). A call is a function
# of torch as the model's Python calls it (`linear`, `scaled_dot_product_attention`, `Tensor.mul`), an update of the
# paged cache, one call of transformers' attention function, or a module as a whole.


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


def modules_of(model: Any, region: str) -> list[tuple[str, Any]]:
    """The modules of a region by their paths: of a layer by its number, with itself; else all outside of the layers."""
    layers = find_layers(model)
    if region.isdigit():
        path = layers[int(region)][0]
        return [(p, m) for p, m in model.named_modules() if p == path or p.startswith(f"{path}.")]
    among = layers[0][0].rsplit(".", 1)[0]
    return [(p, m) for p, m in model.named_modules() if p and not p.startswith(among)]


def add_hooks(stack: ExitStack, module: Any, before: Any = None, after: Any = None) -> None:
    """Call `before` and `after` each forward of a module, with its keyword arguments, until the stack is closed."""
    if before is not None:
        stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
    if after is not None:
        stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)


def watch_layers(stack: ExitStack, layers: Sequence[Any], note: Callable[[str, torch.Tensor], None]) -> None:
    """Call `note` with the hidden states that enter the first layer, as "input", and leave each layer, as "3.out"."""

    def entering(_module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        note("input", args[0] if args else kwargs["hidden_states"])

    def leaving(name: str, _module: Any, _args: Any, _kwargs: Any, output: Any) -> None:
        note(name, output[0] if isinstance(output, tuple) else output)

    add_hooks(stack, layers[0], before=entering)
    for i, layer in enumerate(layers):
        add_hooks(stack, layer, after=functools.partial(leaving, f"{i}.out"))


@contextmanager
def wrapped_cache_update(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace the paged cache's `update` by `wrap(update)`, in every thread. It is marked `watched`: an attention of
    ours that would bypass it calls it then."""
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    original = PagedAttentionCache.update
    watching = wrap(original)
    watching.watched = True  # type: ignore[attr-defined] # functions take attributes
    PagedAttentionCache.update = watching
    try:
        yield
    finally:
        PagedAttentionCache.update = original


@contextmanager
def wrapped_attention(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace each attention function of transformers' table that may be used by `wrap(function)`."""
    from transformers.modeling_utils import AttentionInterface

    table = AttentionInterface()
    with ExitStack() as stack:
        for name in ("sdpa", "eager", "paged|sdpa", "paged|eager", "flash_attention_2", "flash_attention_3"):
            if name in table:
                original = table[name]
                AttentionInterface.register(name, wrap(original))
                stack.callback(AttentionInterface.register, name, original)
        yield


# The coarse pass: for each position and layer a hash of the hidden state and of K and V as written, and of the logits.
#
# Hashes of all rows of a step, of every request, are computed on the device and copied to the host once per step. They
# are kept under (request, position), never under a step or a row. With prefix sharing a request may read K and V that
# another one wrote: the writer is found by the cache's own indices, so that a position's record is its owner's.

Owner = tuple[str, int]  # request, position
Hashes = npt.NDArray[np.int64]

_MOST_HASHES = 2**26  # 8 bytes each; beyond them nothing more is kept, and `full` is set


def with_starts(step: Iterable[Span]) -> Iterator[tuple[int, Span]]:
    """The requests of a step, each with the index of its first row."""
    start = 0
    for span in step:
        yield start, span
        start += span.rows


class RowHashes:
    """What a coarse pass keeps of a session, step by step. The user of the class decides which rows are whose."""

    def __init__(self) -> None:
        self.names: list[str] = []  # hashed at each position, in the order of computation: "input", "3.k", "3.out", ...
        self.rows: dict[Owner, Hashes] = {}  # one hash for each name
        self.logits: dict[Owner, int] = {}  # hash of the logits there
        # request -> position -> other owners of what that request read there
        self.foreign: dict[str, dict[int, set[Owner]]] = {}
        self.full = False  # whether a limit stopped the keeping of hashes
        self._kept = 0
        self._step: dict[str, torch.Tensor] = {}

    def note(self, name: str, *tensors: torch.Tensor) -> None:
        """Hash tensors [rows, ...] of the running step, under one name."""
        for tensor in tensors:
            hashes = row_hashes(tensor.detach())
            self._step[name] = self._step[name] * 31 + hashes if name in self._step else hashes

    def keep(self, spans: Sequence[Span], *others: torch.Tensor) -> list[Hashes]:
        """End a step, whose rows are those of `spans`: one copy to the host, of the other integers as well."""
        names, tensors = list(self._step), [*self._step.values(), *others]
        self._step = {}
        pieces = np.split(torch.cat(tensors).cpu().numpy(), np.cumsum([len(t) for t in tensors])[:-1])
        self.names = self.names or names
        if names != self.names:
            raise RuntimeError(f"a step computed {names[:4]}..., another one {self.names[:4]}...: no common records")
        table = np.stack(pieces[: len(names)], axis=1)  # [rows, names]
        self._kept += table.size
        self.full = self.full or self._kept > _MOST_HASHES
        for start, span in with_starts(spans):
            for offset in range(0 if self.full else span.rows):
                self.rows[span.request, span.first + offset] = table[start + offset].copy()
        return pieces[len(names) :]


class CoarseCapture(RowHashes):
    """A watcher that keeps hashes. The session may end after the position `last` (None: at its end). With `sharing`
    requests share cached pages, and the writers are tracked."""

    def __init__(self, request: str, last: int | None = None, *, sharing: bool = True) -> None:
        super().__init__()
        self.request, self.last, self.sharing = request, last, sharing
        self._indices: tuple[torch.Tensor, ...] = ()
        self._slots: dict[int, Owner] = {}
        self.done = False
        self._log: StepLog

    @contextmanager
    def attached(self, model: Any, log: StepLog) -> Iterator[None]:
        """Hooks on the layers and on the model, and a wrapper around the cache's update."""
        self._log = log
        layers = [layer for _, layer in find_layers(model)]
        # windows and sharing exclude each other in the engine; without windows a layer's slots are positions
        self._shared = self.sharing and all(
            window_of(model.config.get_text_config(), i) is None for i in range(len(layers))
        )
        with ExitStack() as stack:
            add_hooks(stack, model, self._begin, self._end)
            watch_layers(stack, layers, lambda name, hidden: self.note(name, _rows(hidden, name)))
            stack.enter_context(wrapped_cache_update(self._wrap))
            yield

    def _begin(self, _module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        self._step = {}
        self._positions = kwargs["position_ids"]
        read, write = kwargs["read_index"], kwargs["write_index"]
        self._indices = (read[0], write[0]) if self._shared else ()

    def _wrap(self, update: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(update)
        def run(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(update).bind(*args, **kwargs).arguments
            for name, states in (("k", given["key_states"]), ("v", given["value_states"])):
                self.note(f"{given['layer_idx']}.{name}", states[0].transpose(0, 1))  # [1, Hkv, T, D] -> [T, Hkv, D]
            return update(*args, **kwargs)

        return run

    def _end(self, _module: Any, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
        wanted = (self._positions[0], row_hashes(requested_logits(kwargs, output)), *self._indices)
        positions, logits, *indices = self.keep(self._log.pack, *(x.to(torch.int64) for x in wanted))
        predicted = 0
        for start, span in with_starts(self._log.pack):
            end = span.first + span.rows
            if positions[start : start + span.rows].tolist() != list(range(span.first, end)):
                raise RuntimeError(f"the rows of {span.request} are not where the schedule puts them")
            if span.new:
                self.logits[span.request, end - 1] = int(logits[predicted])
                predicted += 1
            if span.request == self.request and self.last is not None and end > self.last:
                self.done = True
        if indices:
            self._note_owners(*indices)

    def _note_owners(self, read: Hashes, write: Hashes) -> None:
        """Find the writer of what each request reads: its own rows first, then whatever its pages hold."""
        for start, span in with_starts(self._log.pack):
            for offset in range(span.rows):
                self._slots[int(write[start + offset])] = (span.request, span.first + offset)
        if not len(read):
            return
        start = 0
        for span in self._log.pack:
            length = span.first + span.rows
            for position in range(span.first):
                owner = self._slots.get(int(read[start + position]))
                if owner is not None and owner != (span.request, position):
                    self.foreign.setdefault(span.request, {}).setdefault(position, set()).add(owner)
            start += length


def _rows(hidden: torch.Tensor, name: str) -> torch.Tensor:
    """The step's rows [tokens, width] of a hidden state [1, tokens, width]; a UserError for another form, such as Gemma
    3n's several predictions of each token."""
    if hidden.dim() != 3 or hidden.shape[0] != 1:
        what = "the first layer's input" if name == "input" else f"layer {name.removesuffix('.out')}'s output"
        raise UserError(
            f"{what} has shape {tuple(hidden.shape)}, not one row for each token, so its rows can't be followed",
            "`nondet sample` compares this model's completions all the same.",
        )
    return hidden[0]


# The fine pass: every call inside one region of the model, in the one step that computes one position.
#
# A TorchFunctionMode that is entered in the engine's own thread, inside the model's forward, sees torch's functions as
# the model calls them, before the dispatcher decomposes them, so that a call is what `batch_invariant()` replaces. What
# it cannot see (a Triton launch, another library's write) shows as a module with equal inputs and different outputs
# while no call inside it is responsible.

# Bytes of copies of one step; beyond them calls are recorded without their tensors, and the record is marked.
_MOST_BYTES = 4 * 2**30
_SHAPE_STEPS = 6  # of these only shapes are kept, to find out which axis counts tokens and which keys


def visible_keys(pack: tuple[Span, ...], request: str, position: int, window: int | None) -> tuple[range, int]:
    """The indices of a position's visible keys among all that a layer reads in the step, and the number of all. Each
    request's keys follow one another: all of its positions so far, with a window the last window-1 cached and the new
    ones."""
    start, columns = 0, range(0)
    for span in pack:
        cached = span.first if window is None else min(span.first, window - 1)
        if span.request == request:
            oldest = span.first - cached  # the position of the first of its columns
            first = oldest if window is None else max(oldest, position - window + 1)
            columns = range(start + first - oldest, start + position - oldest + 1)
        start += cached + span.rows
    return columns, start


class FineCapture(TorchFunctionMode):
    """A watcher that records the calls of one region ("embedding", "head" or a layer's number) while one position of
    one request is computed. With `opaque_attention` the attention function is one of ours: its inside is not recorded.
    """

    def __init__(self, request: str, position: int, region: str, *, opaque_attention: bool = False) -> None:
        super().__init__()
        self.request, self.position, self.region = request, position, region
        self.opaque_attention = opaque_attention
        self.site: StepRecord | None = None  # the step that computes the position, once it ran
        self.shapes: list[StepRecord] = []  # other steps, of which only shapes are kept
        self._now: StepRecord | None = None
        self._paused = self._after = 0

    @property
    def done(self) -> bool:
        """Whether the position was seen, and a few steps after it."""
        return self.site is not None and self._after >= 2

    @contextmanager
    def attached(self, model: Any, log: StepLog) -> Iterator[None]:
        """Hooks at the region's boundaries and on every module inside, wrappers around the cache and the attention."""
        self._log = log
        self._storages = {memory_of(t) for t in (*model.parameters(), *model.buffers())}
        layers = [layer for _, layer in find_layers(model)]
        self._names = {id(module): path for path, module in model.named_modules()}
        self._window, whole = None, model
        if self.region.isdigit():
            number = int(self.region)
            self._window, whole = window_of(model.config.get_text_config(), number), layers[number]
        with ExitStack() as stack:
            if self.region == "head":
                add_hooks(stack, layers[-1], after=self._begin)
            else:
                add_hooks(stack, whole, before=self._begin)
            for _, module in modules_of(model, self.region):
                add_hooks(stack, module, self._enter, self._leave)
            if self.region == "embedding":
                add_hooks(stack, layers[0], before=self._end)
            else:
                add_hooks(stack, whole, after=self._end)
            stack.enter_context(wrapped_cache_update(self._wrap_update))
            stack.enter_context(wrapped_attention(self._attention))
            yield

    def _begin(self, *_: Any) -> None:
        """Decide, as the region begins, whether this step is recorded."""
        pack = self._log.pack
        tokens = sum(span.rows for span in pack)
        site = False
        columns, keys = visible_keys(pack, self.request, self.position, self._window)
        record = StepRecord(Sizes(tokens, keys, len(pack)), -1, range(0), -1)
        predicting = [span.request for span in pack if span.new]
        for start, span in with_starts(pack):
            if span.request == self.request and span.first <= self.position < span.first + span.rows:
                site = self.site is None
                record.row, record.columns = start + self.position - span.first, columns
                if span.new and self.position == span.first + span.rows - 1:
                    record.predicted = predicting.index(span.request)
        if not site:
            self._after += self.site is not None
            if record.sizes in [r.sizes for r in self.shapes]:
                return
            if len(self.shapes) >= _SHAPE_STEPS:
                del self.shapes[1]  # steps near the position are kept, and the first
            record.row = -1
        self._start(record)

    def _start(self, record: StepRecord) -> None:
        """Record the region's calls from here on."""
        self._now, self._bytes, self._read = record, 0, list[Slot]()
        self._entered: list[tuple[str, list[Slot], tuple[Any, Any] | None]] = []  # modules, with what they were given
        self.__enter__()

    def _end(self, *_: Any) -> None:
        if self._now is None:
            return
        self.__exit__(None, None, None)
        if self._now.row >= 0:
            self.site = self._now
        else:
            self.shapes.append(self._now)
        self._now = None

    def _enter(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if self._now is None or self._paused:
            return
        with torch._C.DisableTorchFunction():
            copies: dict[int, torch.Tensor] = {}
            own = _plain(kwargs)
            slots = self._slots((*args, *([own] if own else [])), copies)
            given = None if kwargs.get("cache") is not None else (copied(args, copies), copied(own, copies))
            self._entered.append((self._names[id(module)], slots, given))

    def _leave(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if self._now is None or self._paused or not self._entered:
            return
        with torch._C.DisableTorchFunction():
            path, inputs, given = self._entered.pop()
            outputs = self._slots({"out": output if not isinstance(output, dict) else list(output.values())})
            event = self._record.add(path, type(module).__name__, inputs, outputs)
            event.of_module = True
            if given is not None and self._record.row >= 0 and not self._record.limited:
                event.function, (event.args, event.kwargs) = module, given

    def _wrap_update(self, update: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(update)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._now is None:
                return update(*args, **kwargs)
            with torch._C.DisableTorchFunction():
                given = inspect.signature(update).bind(*args, **kwargs).arguments
                inputs = self._slots({name: given[name] for name in ("key_states", "value_states")})
                self._paused += 1
                try:
                    out = update(*args, **kwargs)
                finally:
                    self._paused -= 1
                self._read = self._slots({"keys": out[0], "values": out[1]})
                self._record.add(self._where(), "cache.update", inputs, self._read)
            return out

        return run

    def _attention(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(module: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
            if self._now is None:
                return original(module, query, key, value, mask, *args, **kwargs)
            with torch._C.DisableTorchFunction():
                inputs = self._slots({"query": query, "key": key, "value": value, "attention_mask": mask})
            self._paused += self.opaque_attention
            try:
                out = original(module, query, key, value, mask, *args, **kwargs)
            finally:
                self._paused -= self.opaque_attention
            with torch._C.DisableTorchFunction():
                read = self._cached(key, value)
                event = self._record.add(self._where(), "attention", inputs + read, self._slots({"out": out[0]}))
                event.constants = {k: kwargs[k] for k in ("scaling", "softcap", "sliding_window") if k in kwargs}
            return out

        return run

    def _cached(self, _key: torch.Tensor, _value: torch.Tensor) -> list[Slot]:
        return self._read

    @property
    def _record(self) -> StepRecord:
        if self._now is None:
            raise RuntimeError("no step is recorded")
        return self._now

    def _where(self) -> str:
        return self._entered[-1][0] if self._entered else self.region

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record one call of a torch function; the mode is off while this runs."""
        kwargs, name = kwargs or {}, _name_of(func)
        if self._paused or self._now is None or name is None:
            return func(*args, **kwargs)
        given = [t for _, t in tensors_in((args, kwargs))]
        before = {memory_of(t) for t in given}
        # another package computes with it, as torchao with its weights; torch's DTensor holds plain numbers
        foreign = {type(t) for t in given if is_traceable_wrapper_subclass(t)}
        made = sorted(kind.__name__ for kind in foreign if not kind.__module__.startswith("torch."))
        copies: dict[int, torch.Tensor] = {}
        inputs = self._slots((*args, *([kwargs] if kwargs else [])), copies)
        out = func(*args, **kwargs)
        results = tensors_in(out)
        writes = name.endswith("_") or "out" in kwargs or "setitem" in name
        if not writes and all(memory_of(t) in before for _, t in results):
            return out  # no tensor, or a view: nothing was computed
        written = args[0] if writes and args else out
        # linear[Float8Tensor] is not a product of plain numbers
        named = name + (f"[{', '.join(made)}]" if made else "")
        event = self._record.add(self._where(), named, inputs, self._slots({"out": written}))
        constants = dict(enumerate(args)) | kwargs
        event.constants = {str(k): v for k, v in constants.items() if isinstance(v, bool | int | float | str)}
        if self._now.row >= 0 and not self._now.limited and not writes:
            event.function = func
            event.args, event.kwargs = copied(args, copies), copied(kwargs, copies)
        return out

    def _slots(self, value: Any, copies: dict[int, torch.Tensor] | None = None) -> list[Slot]:
        record, slots = self._record, []
        for path, tensor in tensors_in(value):
            weight = memory_of(tensor) in self._storages
            slot = Slot(path, tuple(tensor.shape), tensor.dtype, weight)
            if record.row >= 0 and not weight:
                self._bytes += tensor.numel() * tensor.element_size()
                record.limited = record.limited or self._bytes > _MOST_BYTES
                if not record.limited:
                    slot.value = tensor.detach().clone()
                    if copies is not None:
                        copies[id(tensor)] = slot.value
            slots.append(slot)
        return slots


def copied(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    """Nested arguments with their copies instead of the tensors."""
    return changed_tensors(value, lambda _, tensor: copies.get(id(tensor), tensor))


def _plain(kwargs: dict[str, Any]) -> dict[str, Any]:
    """A module's tensors, without the engine's own: those are separated by request and not by row."""
    engine = ("cu_seq_lens_q", "cu_seq_lens_k", "read_index", "write_index", "logits_indices", "logits_to_keep",
              "cache", "block_table", "logits_processor_args")  # fmt: skip
    return {k: v for k, v in kwargs.items() if k not in engine}


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
