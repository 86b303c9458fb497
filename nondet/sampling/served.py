"""Whether the engine serves a model: every layer has to keep its keys in the paged cache, once a step.

transformers packs the requests of a step into one row and leaves it to its attention functions to fill the cache and
to tell the requests apart. A model whose layers compute attention by code of their own (Falcon), have a state that is
no keys (RecurrentGemma), or call those functions twice (DiffLlama, whose second values replace the first ones) runs
through the engine all the same. Its requests then read each other's tokens, or forget their own past: what comes out
follows the batch, and no kernel is to blame.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from nondet.errors import UserError

__all__ = ["KeptKeys", "UnservedError"]


class UnservedError(UserError):
    """Layers of the model go around the engine's cache, or overwrite what they have there."""


class KeptKeys:
    """How often each layer writes keys into a session's cache in its first step."""

    def __init__(self) -> None:
        self._cache: weakref.ref[Any] | None = None  # the closure below must not hold a cache's memory
        self._written: Counter[int] = Counter()

    def watch(self, cache: Any) -> None:
        """Count this cache's updates from now on, until `check`."""
        self._cache = weakref.ref(cache)
        own: Any = self._cache
        self._written.clear()

        def update(*args: Any, **kwargs: Any) -> Any:
            self.note(kwargs["layer_idx"] if "layer_idx" in kwargs else args[2])
            return type(own()).update(own(), *args, **kwargs)  # the class's own of this moment: a trace changes it

        cache.update = update
        cache.note_written = self.note  # for attention that writes past `update`

    def note(self, layer: int) -> None:
        """Count one write of that layer."""
        self._written[layer] += 1

    def check(self) -> None:
        """To be called after the step; later calls do nothing.

        Raises:
            UnservedError: some layer has written no keys, or more than once.
        """
        cache = None if self._cache is None else self._cache()
        self._cache = None
        if cache is None:
            return
        del cache.update, cache.note_written
        layers = _layers_of(cache)
        absent = sorted(layers - set(self._written))
        again = sorted(layer for layer, times in self._written.items() if times > 1)
        if absent or again:
            what = f"layer {absent[0]} keeps no keys" if absent else f"layer {again[0]} overwrites its own keys"
            raise UnservedError(
                f"transformers' continuous batching does not serve this model: {what} in the engine's cache "
                f"({len(absent or again)} of {len(layers)} layers), so that no completion would be the model's own",
                "Choose another model, or compare its own forward pass with nondet.check.",
            )


def _layers_of(cache: Any) -> set[int]:
    """All layers that the cache has room for; 5.17 and 5.23 keep them under different names."""
    name = "layer_to_allocator" if hasattr(cache, "layer_to_allocator") else "layer_index_to_group_indices"
    return set(getattr(cache, name))
