"""Where the layers of a causal LM are, and what the paged cache is called: all that the capture knows of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nondet.errors import UserError

__all__ = ["LayerPath", "find_layers", "window_of", "wrapped_cache_update"]

LayerPath = tuple[str, Any]  # module path, module


def find_layers(model: Any) -> list[LayerPath]:
    """The decoder layers in order: the outermost list of modules that is as long as the config says.

    Raises:
        UserError: no such list.
    """
    from torch import nn

    count = model.config.get_text_config().num_hidden_layers
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return [(f"{path}.{i}", layer) for i, layer in enumerate(module)]
    raise UserError(
        f"{type(model).__name__} has no list of {count} layers, so there is nothing to trace layer by layer",
        "Trace a decoder-only model of transformers.",
    )


def window_of(model: Any, layer: int) -> int | None:
    """The sliding window of that layer as the engine's cache keeps it, or None."""
    config = model.config.get_text_config()
    window: int | None = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        return window
    return window if types[layer] == "sliding_attention" else None


@contextmanager
def wrapped_cache_update(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Put `wrap(update)` in the place of the paged cache's `update`, in every thread.

    It is marked `watched`: an attention of ours that would go around it calls it then.
    """
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    original = PagedAttentionCache.update
    watching = wrap(original)
    watching.watched = True  # type: ignore[attr-defined] # functions take attributes
    PagedAttentionCache.update = watching
    try:
        yield
    finally:
        PagedAttentionCache.update = original
