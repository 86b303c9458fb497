"""Batch-invariant attention under transformers' continuous batching, and its eager attention."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from nondet.errors import UserError
from nondet.kernels.attention.masks import attend_packed, one_query_each, packing_of
from nondet.kernels.dispatch.differentiable import with_gradient
from nondet.kernels.dispatch.state import DTYPES, count, current, guarded, kernels_for
from nondet.kernels.dispatch.transformers import Replacement, installed, note_traced, source_of

# A step of continuous batching packs the queries of many requests into one row, reads their keys from a paged cache,
# and separates them by a mask. Stock attention then reduces over the keys of all requests, including hidden ones, so a
# request's bits depend on the others. The stand-in takes the same call, updates the cache itself, splits the pack into
# requests by their cumulative lengths, and computes each over its own keys (`attention_varlen`): in blocks anchored at
# its first key, wherever that comes from. A layer with a sliding window keeps only the last keys; there the positions
# of the queries show where the request began.
# None of the replaced functions computes a soft cap (Gemma 2's): before 5.23 they silently ignore it, and so do the
# stand-ins, because the model would differ otherwise. Eager attention that is not paged has it, see below.
#
# The stand-in has the names that the engine accepts, because it refuses unknown ones. A call without a paged cache goes
# on to the original, whose scaled_dot_product_attention is replaced. The caches of transformers 5.17, 5.23 and 5.24
# differ: since 5.24 a model writes the cache itself, and its attention gets every key that was read.

_PAGED = ("sdpa", "paged|sdpa", "paged|eager")
_UNSUPPORTED = ("position_bias", "s_aux")

_MARK = "_nondet_stands_in"
_Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
_installed: dict[str, _Attention] = {}  # name -> the original


def install() -> None:
    """Put the stand-ins into transformers' table of attention functions, if transformers is imported.

    Without them scaled_dot_product_attention reads the requests from the pack's mask, which is slower and has the same
    bits. Functions without a stand-in are counted as at risk.
    """
    if "transformers.modeling_utils" not in sys.modules:
        return
    from transformers.modeling_utils import AttentionInterface

    table = AttentionInterface()
    for name in list(table):
        original = table[name]
        if getattr(original, _MARK, False):
            continue
        stand_in = _stand_in(name, original) if name in _PAGED else _counted(name, original)
        setattr(stand_in, _MARK, True)
        _installed[name] = original
        AttentionInterface.register(name, stand_in)


def uninstall() -> None:
    """Restore the originals, if anything was installed. A thread inside a stand-in finishes in it."""
    if not _installed:
        return
    from transformers.modeling_utils import AttentionInterface

    for name, original in _installed.items():
        AttentionInterface.register(name, original)
    _installed.clear()


def _counted(name: str, original: _Attention) -> _Attention:
    @functools.wraps(original)
    def forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        count("at_risk", f"transformers attention {name!r}")
        return original(module, *args, **kwargs)

    return forward


def _stand_in(name: str, original: _Attention) -> _Attention:
    paged, in_window = guarded(_paged), guarded(windowed)
    # transformers' sdpa refuses a soft cap since 5.23; where the original ignores it, so does the stand-in
    refuses_soft_cap = "softcap" in getattr(getattr(original, "__code__", None), "co_consts", ())

    @functools.wraps(original)
    def forward(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        if "attention" not in current().families:
            return original(module, query, key, value, attention_mask, *args, **kwargs)
        cache = kwargs.get("cache")
        bound = {**dict(zip(("dropout", "scaling"), args, strict=False)), **kwargs}
        if bound.pop("softcap", None) is not None and refuses_soft_cap:
            return original(module, query, key, value, attention_mask, *args, **kwargs)
        if not is_paged(kwargs):
            window = bound.get("sliding_window")
            if window and key.shape[2] >= window and not (attention_mask is None and query.shape[2] > 1):
                # First keys may be gone or hidden: the rest does not show where a request began.
                out = in_window(query, key, value, attention_mask, bound)
                if out is not None:
                    count("replaced", f"transformers attention {name!r}, windowed")
                    return out, None
                if query.shape[2] == 1:  # with more queries the mask shows that the window has slid, and is left
                    count("at_risk", f"transformers attention {name!r}: a window whose first keys are not known")
            return original(module, query, key, value, attention_mask, *args, **kwargs)
        out = paged(module, query, key, value, cache, bound)
        count("replaced", f"transformers attention {name!r}, paged")
        return out, None

    return forward


def windowed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """query [B, Hq, Tq, D] over the last keys and values [B, Hkv, Tk, D] of requests -> [B, Tq, Hq, D].

    Anchored at each request's first key by `position_ids`, even if it is hidden or the cache dropped it. None where
    there are no positions, where the mask is not a set of such windows, and while torch.compile traces, which can't
    read a mask.
    """
    if torch.compiler.is_compiling():
        return None
    if torch.is_autocast_enabled(query.device.type):  # as scaled_dot_product_attention, which is not called, would do
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    positions, window, (batch, _, q_len, _) = kwargs.get("position_ids"), kwargs["sliding_window"], query.shape
    kernels = _kernels_taking(query, key, value, mask)
    if kernels is None or kwargs.get("dropout") or positions is None or positions.shape[1:] != (q_len,):
        return None
    packings = None if mask is None else packing_of(mask, batch, q_len, anchored=False)
    if mask is None:  # one query, which sees every key that is left
        packings = [one_query_each(batch, key.shape[2], query.device)]
    seen = (p.causal and (p.max_k <= window if p.window is None else p.window == window) for p in packings or ())
    if packings is None or not all(seen):  # the mask shows something else than the layer's window
        return None
    flat = positions.expand(batch, q_len).reshape(-1)
    more: dict[str, Any] = {"positions": flat, "window": window, "softcap": kwargs.get("softcap")}
    attend = kernels.attention_varlen
    return attend_packed(attend, query, key, value, packings, kwargs.get("scaling"), **more).transpose(1, 2)


def _kernels_taking(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> Any:
    """The device's kernels, if they take these; with a gradient where one is needed under a block for training."""
    kernels = with_gradient(kernels_for(query.device.type), query, key, value)
    if kernels is None or key.shape != value.shape or not 1 <= query.shape[3] <= kernels.max_head_dim:
        return None
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        return None
    return None if mask is not None and mask.shape[-1] != key.shape[2] else kernels


def _paged(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: Any, kwargs: dict[str, Any]
) -> torch.Tensor:
    """query [1, Hq, T, D], key and value [1, Hkv, T, D], requests in sequence -> [1, T, Hq, D].

    Without a cache, key and value [1, Hkv, Tk_total, D] are all that the step reads.
    """
    # the call's argument first: hybrid models (EXAONE 4) keep the window's size in layers of full attention, too
    window = kwargs.get("sliding_window", getattr(module, "sliding_window", None)) or None
    window, positions = _kept_window(cache, module, window), None
    if window:
        # The cache keeps a request's last keys; only the queries' positions show where its first one was.
        positions = kwargs.get("position_ids")
        if positions is None:
            raise UserError(
                f"layer {module.layer_idx} has a sliding window of {window}, and its model does not pass position_ids: "
                "the cache drops a request's first keys, where the invariant attention is anchored",
                "Leave attention out: batch_invariant(families=...) without 'attention'.",
            )
        positions = positions.reshape(-1)
    for feature in _UNSUPPORTED:
        if kwargs.get(feature) is not None:
            raise UserError(f"layer {module.layer_idx} asks for {feature}, which invariant attention lacks")
    if kwargs.get("dropout"):
        raise UserError("continuous batching with dropout has no invariant attention", "Call model.eval().")
    if kwargs.get("block_table") is not None:
        raise UserError("the cache is to be read by FlashAttention's block table", 'Use attn_implementation="sdpa".')
    index: torch.Tensor | None = None
    # a trace has to see the keys pass through the cache's update
    direct = cache is not None and not window and not getattr(type(cache).update, "watched", False)
    in_place = write_in_place(cache, module.layer_idx, key, value, kwargs) if direct else None
    if in_place is not None:
        keys, values, index = in_place
    else:
        keys, values = update_cache(
            cache, module.layer_idx, key, value, kwargs, "sliding_attention" if window else "full_attention"
        )
    out = kernels_for(query.device.type).attention_varlen(
        query[0].transpose(0, 1),
        keys,
        values,
        cu_seqlens_q=kwargs["cu_seq_lens_q"].to(torch.int32),
        cu_seqlens_k=kwargs["cu_seq_lens_k"].to(torch.int32),
        max_seqlen_q=longest("q", kwargs),
        max_seqlen_k=longest("k", kwargs),
        scale=kwargs.get("scaling"),
        causal=True,
        window=window,
        positions=positions,
        key_index=index,
    )
    return out[None]


def is_paged(kwargs: dict[str, Any]) -> bool:
    """Whether attention was called by continuous batching: with its cache, or since 5.24 with the slots it reads."""
    return kwargs.get("cache") is not None or "read_index" in kwargs


def window_of(config: Any, layer: int) -> int | None:
    """The sliding window of that layer as transformers' caches keep it, or None."""
    window: int | None = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    return window if types is None or types[layer] == "sliding_attention" else None


def _kept_window(cache: Any, module: Any, window: int | None) -> int | None:
    """The window of a layer's keys in the cache; before 5.23 the cache gives 1 for none."""
    layer = module.layer_idx
    kept = getattr(cache, "sliding_windows", None)
    if cache is None:
        found = window_of(module.config, layer)
    elif kept is not None:
        found = None if kept[layer] == 1 else kept[layer]
    else:
        found = getattr(cache.layer_to_allocator[layer], "sliding_window", None)
    if window not in (None, found):
        raise UserError(
            f"layer {layer} has a sliding window of {window}, but its cache one of {found}",
            "Compare stock alone, or leave attention out: batch_invariant(families=...) without 'attention'.",
        )
    return found


def update_cache(
    cache: Any, layer: int, key: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any], layer_type: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the new keys and read all of them: [Tk_total, Hkv, D], in this version of transformers.

    Afterwards kwargs["cu_seq_lens_k"] is this layer's tensor. Without a cache the model did both (5.24).
    """
    if cache is None:
        return key[0].transpose(0, 1), value[0].transpose(0, 1)
    if "read_index" in _parameters(type(cache).update):  # 5.17
        keys, values = cache.update(
            key_states=key,
            value_states=value,
            layer_idx=layer,
            read_index=kwargs["read_index"],
            write_index=kwargs["write_index"],
        )
        for name in ("cu_seq_lens_k", "max_seqlen_k"):  # a dict only where layers differ, and then by their type
            if isinstance(kwargs[name], dict):
                kwargs[name] = kwargs[name][layer_type]
        return keys, values
    keys, values = cache.update(key_states=key, value_states=value, layer_idx=layer, kwargs=kwargs)
    return keys[0].transpose(0, 1), values[0].transpose(0, 1)


def write_in_place(
    cache: Any, layer: int, key: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Write the new keys of a layer without a window, and return where all of them are: nothing is gathered.

    Afterwards kwargs["cu_seq_lens_k"] is this layer's tensor. Returns the whole cache's keys and values [tokens, Hkv,
    D], and the slot of each key that a request of the step sees. None where the step reads no cache or this version of
    transformers stores it differently; then nothing was written.
    """
    kept: tuple[torch.Tensor, torch.Tensor] | None
    if "read_index" in _parameters(type(cache).update):  # 5.17
        group, place = cache.layer_index_to_group_indices[layer]
        layer_type, kept = "full_attention", (cache.key_cache[place], cache.value_cache[place])
    else:
        allocator = cache.layer_to_allocator[layer]
        group, layer_type, views = allocator.index, allocator.layer_type, getattr(allocator, "_kv_token_views", {})
        kept = views.get(layer)
    read, write = kwargs["read_index"][group], kwargs["write_index"][group]
    if kept is None or read.numel() == 0:
        return None
    for whole, new in zip(kept, (key, value), strict=True):
        whole.index_copy_(0, write, new[0].transpose(0, 1))
    if hasattr(cache, "note_written"):
        cache.note_written(layer)
    for name in ("cu_seq_lens_k", "max_seqlen_k", "max_length_k"):
        if isinstance(kwargs.get(name), dict):
            kwargs[name] = kwargs[name][layer_type]
    return kept[0], kept[1], read


@functools.cache
def _parameters(update: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(update).parameters)


def longest(which: str, kwargs: dict[str, Any]) -> int:
    """Longest query or most keys in the step, from the engine, without reading the device. Renamed in 5.23."""
    found = kwargs.get(f"max_length_{which}", kwargs.get(f"max_seqlen_{which}"))
    if not isinstance(found, int):
        raise UserError(
            f"this version of transformers does not say how long a step is (max_length_{which}: {found!r})",
            "Versions 5.17, 5.23 and 5.24 were tested.",
        )
    return found


# transformers' eager attention: computed by the invariant kernels, or counted as at risk.
# `eager_attention_forward` computes a softmax over all keys of the padded batch, including hidden ones. Every operator
# in it is replaced; but where a request's keys are among the padding decides the order of additions, so its bits depend
# on concurrent requests. Models use it with attn_implementation="eager", and Gemma 2 by itself, for its soft cap. Each
# model's module has its own copy, and most are one of two, Llama's and Gemma 2's.
# The stand-in reads the requests from the mask as for scaled_dot_product_attention, so a request's bits are those of
# "sdpa". Copies with other code (attention sinks, biases), masks with other patterns, gradients, dropout, a caller that
# needs the attention weights and torch.compile get the original, counted as at risk.

_NAME = "eager_attention_forward"
_RISK = "transformers eager attention: sums over padded keys"
_KNOWN = ("llama", "gemma2")  # without and with a soft cap


def _stand_in_eager(_: Any, original: Any) -> Any:
    compute = guarded(_compute)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            note_traced(_RISK)
            return original(*args, **kwargs)
        if "attention" in current().families and _is_known(original):
            bound = inspect.signature(original).bind(*args, **kwargs).arguments
            bound.update(bound.pop("kwargs", {}))
            out = compute(**bound)
            if out is not None:
                count("replaced", "transformers eager attention")
                return out, None
        count("at_risk", _RISK)
        return original(*args, **kwargs)

    return forward


@functools.cache
def _is_known(function: Any) -> bool:
    return source_of(function) in _known_sources()


@functools.cache
def _known_sources() -> frozenset[object]:
    modules = (importlib.import_module(f"transformers.models.{name}.modeling_{name}") for name in _KNOWN)
    originals = (installed(module, _NAME)[0] or vars(module)[_NAME] for module in modules)
    return frozenset(map(source_of, originals)) - {((), "")}


def _compute(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """query [B, Hq, Tq, D] over key, value [B, Hkv, Tk, D] -> [B, Tq, Hq, D]; None if no invariant kernel can."""
    wants_weights = kwargs.get("output_attentions") or getattr(
        getattr(module, "config", None), "output_attentions", False
    )
    kernels = _kernels_taking(query, key, value, attention_mask)
    if kernels is None or (dropout and module.training) or wants_weights:
        return None
    (batch, _, q_len, _), k_len = query.shape, key.shape[2]
    scale = module.head_dim**-0.5 if scaling is None else scaling
    window = kwargs.get("sliding_window")
    if window and k_len >= window and not (attention_mask is None and q_len > 1):
        bound = {**kwargs, "scaling": scale, "softcap": softcap}
        found: torch.Tensor | None = windowed(query, key, value, attention_mask, bound)
        if found is not None or q_len == 1:  # one row does not distinguish a window's hidden keys from padding
            return found
    if attention_mask is None:  # every query sees every key
        out: torch.Tensor = kernels.attention(query, key, value, causal=q_len == 1, scale=scale, softcap=softcap)
        return out.transpose(1, 2)
    packings = packing_of(attention_mask, batch, q_len)
    if packings is None:
        return None
    return attend_packed(kernels.attention_varlen, query, key, value, packings, scale, softcap=softcap).transpose(1, 2)


EAGER = Replacement(_NAME, _stand_in_eager, modules=r"transformers\.models\.")
