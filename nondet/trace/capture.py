"""What is kept of a session: the coarse pass's hashes of each layer, and every call inside one region of the model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nondet.core.compare import row_hashes
from nondet.errors import UserError
from nondet.kernels.dispatch.transformers_attention import window_of
from nondet.sampling.plan import Span, StepLog
from nondet.sampling.schedule import requested_logits
from nondet.trace.recorder import Functions, Recorder, Sizes, Slot, StepRecord, add_hooks, find_layers


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

    _kept = 0

    def __init__(self) -> None:
        self.names: list[str] = []  # hashed at each position, in the order of computation: "input", "3.k", "3.out", ...
        self.rows: dict[Owner, Hashes] = {}  # one hash for each name
        self.logits: dict[Owner, int] = {}  # hash of the logits there
        # request -> position -> other owners of what that request read there
        self.foreign: dict[str, dict[int, set[Owner]]] = {}
        self.full = False  # whether a limit stopped the keeping of hashes
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

_SHAPE_STEPS = 6  # of these only shapes are kept, to find out which axis counts tokens and which keys


def visible_keys(pack: Sequence[Span], request: str, position: int, window: int | None) -> tuple[range, int]:
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


def step_of(pack: Sequence[Span], request: str, position: int, window: int | None = None) -> StepRecord:
    """An empty record of a step: with the row of that position, if the step computes it."""
    columns, keys = visible_keys(pack, request, position, window)
    record = StepRecord(Sizes(sum(span.rows for span in pack), keys, len(pack)), -1, range(0), -1)
    predicting = [span.request for span in pack if span.new]
    for start, span in with_starts(pack):
        if span.request == request and span.first <= position < span.first + span.rows:
            record.row, record.columns = start + position - span.first, columns
            if span.new and position == span.first + span.rows - 1:
                record.predicted = predicting.index(request)
    return record


class FineCapture(Recorder):
    """A watcher that records the calls of one region ("embedding", "head" or a layer's number) while one position of
    one request is computed. With `opaque_attention` the attention function is one of ours: its inside is not recorded.
    """

    def __init__(self, request: str, position: int, region: str, *, opaque_attention: bool = False) -> None:
        super().__init__(region)
        self.request, self.position = request, position
        self.opaque_attention = opaque_attention
        self.site: StepRecord | None = None  # the step that computes the position, once it ran
        self.shapes: list[StepRecord] = []  # other steps, of which only shapes are kept
        self._mode, self._after = Functions(self), 0
        self._read = list[Slot]()  # what attention's cache gave

    @property
    def done(self) -> bool:
        """Whether the position was seen, and a few steps after it."""
        return self.site is not None and self._after >= 2

    @contextmanager
    def attached(self, model: Any, log: StepLog) -> Iterator[None]:
        """Hooks at the region's boundaries and on every module inside, wrappers around the cache and the attention."""
        self._log = log
        layers = [layer for _, layer in find_layers(model)]
        self._window, whole = None, model
        if self.region.isdigit():
            number = int(self.region)
            self._window, whole = window_of(model.config.get_text_config(), number), layers[number]
        with ExitStack() as stack:
            add_hooks(stack, *((layers[-1], None, self._begin) if self.region == "head" else (whole, self._begin)))
            self.watch(model, stack)
            add_hooks(stack, *((layers[0], self._end) if self.region == "embedding" else (whole, None, self._end)))
            stack.enter_context(wrapped_cache_update(self._wrap_update))
            stack.enter_context(wrapped_attention(self._attention))
            yield

    def _begin(self, *_: Any) -> None:
        """Decide, as the region begins, whether this step is recorded."""
        record = step_of(self._log.pack, self.request, self.position, self._window)
        if record.row < 0 or self.site is not None:
            self._after += self.site is not None
            if record.sizes in [r.sizes for r in self.shapes]:
                return
            if len(self.shapes) >= _SHAPE_STEPS:
                del self.shapes[1]  # steps near the position are kept, and the first
            record.row = -1
        self.start(record)

    def _end(self, *_: Any) -> None:
        if self._now is None:
            return
        self._mode.__exit__(None, None, None)
        if self._now.row >= 0:
            self.site = self._now
        else:
            self.shapes.append(self._now)
        self._now = None

    def _wrap_update(self, update: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(update)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._now is None:  # inside of an opaque attention too, which reads what was stored
                return update(*args, **kwargs)
            given = inspect.signature(update).bind(*args, **kwargs).arguments
            inputs = self.kept({name: given[name] for name in ("key_states", "value_states")})
            with self.unseen():
                out = update(*args, **kwargs)
            self._read = self.add("cache.update", inputs, {"keys": out[0], "values": out[1]}).outputs
            return out

        return run

    def _attention(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(module: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.sees:
                return original(module, query, key, value, mask, *args, **kwargs)
            inputs = self.kept({"query": query, "key": key, "value": value, "attention_mask": mask})
            with self.unseen() if self.opaque_attention else nullcontext():
                out = original(module, query, key, value, mask, *args, **kwargs)
            event = self.add("attention", inputs + self._cached(key, value), {"out": out[0]})
            event.constants = {k: kwargs[k] for k in ("scaling", "softcap", "sliding_window") if k in kwargs}
            return out

        return run

    def _cached(self, _key: torch.Tensor, _value: torch.Tensor) -> list[Slot]:
        return self._read
