"""The coarse pass: for each position and layer a hash of the hidden state and of K and V as written, and of the logits.

Hashes of all rows of a step are taken on the device, of whoever's they are, and copied to the host once a step. They
are kept under (request, position), never under a step or a row. With prefix sharing a request may read K and V that
another one wrote: who wrote what is read off the cache's own indices, so that a position's record is its owner's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nondet.core.compare import row_hashes
from nondet.errors import UserError
from nondet.sampling.schedule import SessionLog
from nondet.trace.layers import find_layers, window_of, wrapped_cache_update

__all__ = ["CoarseCapture", "Owner"]

Owner = tuple[str, int]  # request, position
Hashes = npt.NDArray[np.int64]

# Hashes kept at most: 8 bytes each. Beyond them nothing more is kept, and `full` says so.
_MOST_HASHES = 2**26


class CoarseCapture:
    """A watcher that keeps hashes.

    Args:
        request: The request under study.
        last: The position after which the session may end; None to look on until its end.
        sharing: Whether requests share cached pages; then who wrote what is followed.

    Attributes:
        names: What is hashed at each position, in the order of computation: "input", "3.k", "3.v", "3.out", ...
        rows: (request, position) -> one hash for each name.
        logits: (request, position) -> hash of the logits there.
        foreign: Request -> position -> who else wrote what that request read there.
        full: Whether a limit stopped the keeping of hashes.
    """

    def __init__(self, request: str, last: int | None = None, *, sharing: bool = True) -> None:
        self.request, self.last, self.sharing = request, last, sharing
        self.names: list[str] = []
        self.rows: dict[Owner, Hashes] = {}
        self.logits: dict[Owner, int] = {}
        self.foreign: dict[str, dict[int, set[Owner]]] = {}
        self.full = False
        self._kept = 0
        self._step: list[tuple[str, torch.Tensor]] = []
        self._indices: tuple[torch.Tensor, torch.Tensor] | None = None
        self._slots: dict[int, Owner] = {}
        self._done = False
        self._log: SessionLog

    @property
    def done(self) -> bool:
        """Whether the last position was seen."""
        return self._done

    @contextmanager
    def attached(self, model: Any, log: SessionLog) -> Iterator[None]:
        """Hooks on the layers and on the model, and a wrapper around the cache's update."""
        self._log = log
        layers = [layer for _, layer in find_layers(model)]
        # windows and sharing exclude each other in the engine; without windows a layer's slots are positions
        self._shared = self.sharing and all(window_of(model, i) is None for i in range(len(layers)))
        with ExitStack() as stack:
            handles = [
                model.register_forward_pre_hook(self._begin, with_kwargs=True),
                layers[0].register_forward_pre_hook(self._input, with_kwargs=True),
                *(layer.register_forward_hook(self._output(i)) for i, layer in enumerate(layers)),
                model.register_forward_hook(self._end, with_kwargs=True),
            ]
            for handle in handles:
                stack.callback(handle.remove)
            stack.enter_context(wrapped_cache_update(self._wrap))
            yield

    def _begin(self, _module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        self._step.clear()
        self._positions = kwargs["position_ids"]
        read, write = kwargs["read_index"], kwargs["write_index"]
        self._indices = (read[0], write[0]) if self._shared else None

    def _input(self, _module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        self._step.append(("input", row_hashes(_rows(hidden, "the first layer's input"))))

    def _output(self, layer: int) -> Callable[..., None]:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            self._step.append((f"{layer}.out", row_hashes(_rows(hidden, f"layer {layer}'s output"))))

        return hook

    def _wrap(self, update: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(update)
        def run(*args: Any, **kwargs: Any) -> Any:
            for name, states in (("k", kwargs["key_states"]), ("v", kwargs["value_states"])):
                rows = states[0].transpose(0, 1)  # [1, Hkv, T, D] -> [T, Hkv, D]
                self._step.append((f"{kwargs['layer_idx']}.{name}", row_hashes(rows)))
            return update(*args, **kwargs)

        return run

    def _end(self, _module: Any, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
        logits, wanted = output.logits[0], kwargs["logits_indices"]
        if logits.shape[0] != wanted.shape[0]:
            logits = logits[wanted]
        names = [name for name, _ in self._step]
        parts = [*(h for _, h in self._step), self._positions[0].to(torch.int64), row_hashes(logits)]
        parts += [x.to(torch.int64) for x in self._indices or ()]
        lengths = [len(p) for p in parts]
        host = torch.cat(parts).cpu().numpy()
        pieces = np.split(host, np.cumsum(lengths)[:-1])
        self._keep(names, pieces)

    def _keep(self, names: list[str], pieces: list[Hashes]) -> None:
        self.names = self.names or names
        if names != self.names:
            raise RuntimeError(f"a step computed {names[:4]}..., another one {self.names[:4]}...: no common records")
        table = np.stack(pieces[: len(names)], axis=1)  # [rows, names]
        positions, logits = pieces[len(names)], pieces[len(names) + 1]
        start, predicted = 0, 0
        for span in self._log.pack:
            rows = slice(start, start + span.rows)
            if positions[rows].tolist() != list(range(span.first, span.first + span.rows)):
                raise RuntimeError(f"the rows of {span.request} are not where the schedule says")
            self._kept += table[rows].size
            self.full = self.full or self._kept > _MOST_HASHES
            for offset in range(0 if self.full else span.rows):
                self.rows[span.request, span.first + offset] = table[start + offset].copy()
            if span.new:
                self.logits[span.request, span.first + span.rows - 1] = int(logits[predicted])
                predicted += 1
            start += span.rows
            if span.request == self.request and self.last is not None and span.first + span.rows > self.last:
                self._done = True
        if self._indices is not None:
            self._note_owners(pieces[-2], pieces[-1])

    def _note_owners(self, read: Hashes, write: Hashes) -> None:
        """Who wrote what each request reads: its own rows first, then whatever its pages hold."""
        start = 0
        for span in self._log.pack:
            for offset in range(span.rows):
                self._slots[int(write[start + offset])] = (span.request, span.first + offset)
            start += span.rows
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


def _rows(hidden: torch.Tensor, what: str) -> torch.Tensor:
    """The step's rows [tokens, width] of a hidden state [1, tokens, width].

    Raises:
        UserError: it has another form, as Gemma 3n's several predictions of each token.
    """
    if hidden.dim() != 3 or hidden.shape[0] != 1:
        raise UserError(
            f"{what} has shape {tuple(hidden.shape)}, not one row for each token, so its rows can't be followed",
            "`nondet sample` compares this model's completions all the same.",
        )
    return hidden[0]
