"""transformers' continuous batching set up as nondet runs it: its configuration, its attention, its masks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from math import ceil
from typing import Any

import torch

from nondet.errors import UserError
from nondet.sampling.plan import Load, Request

__all__ = [
    "batching_config",
    "masks_at_once",
    "query_step",
    "quiet",
    "set_wake_event",
    "stock_attention",
    "stop_now",
    "wake",
    "why_no_graphs",
    "write_mask",
]

# Steps as CUDA graphs are padded: query tokens to a multiple of so many at most, keys to such a share of the cache.
# Finer steps pad less and capture more graphs, each of which costs two steps without one.
_QUERY_STEP, _KEY_SHARE, _KEY_STEP = 64, 4, 256

_GRAPHED, _ROTARY = ("llama", "mistral", "qwen2", "qwen3"), ("default", "linear", "llama3")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def query_step(requests: int, budget: int) -> int:
    """Query tokens that a step under CUDA graphs is padded to a multiple of: what the requests' decodes fill.

    Args:
        requests: That a step takes at most, and `budget` its query tokens; as in `Load`.
    """
    return min(_QUERY_STEP, max(8, 1 << (min(requests, budget) - 1).bit_length()))


def batching_config(
    requests: Sequence[Request], load: Load, pages: int | None = None, model: Any = None, **more: Any
) -> Any:
    """transformers' settings for these requests: everything that it would otherwise choose by itself is fixed.

    Args:
        pages: Of the KV cache, over all layers; None: so many that nobody is preempted.
        model: Whose layers may be of several kinds of attention: 5.17 gives each group of layers blocks of its own.
    """
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    known = {f.name for f in fields(ContinuousBatchingConfig)}
    # pages for as many requests as a step takes, the longest ones: no more are ever alive, since running ones go first.
    # running out makes the engine preempt, which is an axis of its own
    needed = sorted((ceil((len(r.prompt) + r.max_new_tokens) / load.page) + 1 for r in requests), reverse=True)
    groups = 1
    if "page_size" not in known and model is not None:
        from transformers.generation.continuous_batching.cache import group_layers_by_attn_type

        groups = len(group_layers_by_attn_type(model.config)[0])
    settings: dict[str, Any] = {
        ("page_size" if "page_size" in known else "block_size"): load.page,  # renamed after transformers 5.17
        "num_blocks": groups * (pages or sum(needed[: min(load.requests, load.budget)])),
        "max_batch_tokens": load.budget,
        "max_requests_per_batch": min(load.requests, load.budget),
        "max_blocks_per_request": 0,  # the block-table path belongs to flash-attention packages
        "allow_block_sharing": load.sharing,
        "use_async_batching": False,
        "use_cuda_graph": load.graphs,
        "safety_margin": 0.0,
        "return_logprobs": True,
    }
    if load.graphs:
        room = settings["num_blocks"] * load.page
        settings["q_padding_interval_size"] = query_step(load.requests, load.budget)
        settings["kv_padding_interval_size"] = _KEY_STEP * ceil(room / _KEY_SHARE / _KEY_STEP)
    if "auto_switch_to_flash" in known:
        settings["auto_switch_to_flash"] = False  # 5.17 has no such switch, see `stock_attention`
    return ContinuousBatchingConfig(**settings | more)


@contextmanager
def stock_attention(model: Any, name: str = "") -> Iterator[None]:
    """Keep the engine on scaled_dot_product_attention, whether flash-attention packages are installed or not.

    Args:
        name: Another attention implementation of transformers' instead.
    """
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    before = model.config._attn_implementation
    if name:
        model.set_attn_implementation(name)
    if "auto_switch_to_flash" not in {f.name for f in fields(ContinuousBatchingConfig)}:
        model.set_attn_implementation(
            f"paged|{(name or before).removeprefix('paged|')}"
        )  # transformers 5.17: "paged|" says that the choice is made
    try:
        yield
    finally:
        if model.config._attn_implementation != before:
            model.set_attn_implementation(before)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the engine's own log lines off the terminal: what goes wrong is in the outcomes."""
    logger = logging.getLogger("ContinuousBatchingLogger")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def why_no_graphs(config: Any) -> str:
    """Why a model's steps are not run as CUDA graphs unless that is asked for; "" for plain dense decoders.

    Experts are chosen by what the host reads back, and some rotary embeddings are scaled by it, which no graph can; a
    sliding window's cache is updated by positions. None of these has been seen to its end inside of a graph, nor has
    an architecture that is not listed.
    """
    text = config.get_text_config()
    if any(getattr(text, name, None) for name in _EXPERTS):
        return "the model has experts"
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or (getattr(text, "sliding_window", None) and not hasattr(text, "layer_types")):
        return "not all of the model's layers are of full attention"
    rotary = getattr(text, "rope_parameters", None) or {}
    if text.model_type not in _GRAPHED or rotary.get("rope_type", "default") not in _ROTARY:
        return f"no {text.model_type} of this kind has been seen in CUDA graphs; --cuda-graphs tries it"
    return ""


@contextmanager
def masks_at_once(device: torch.device) -> Iterator[None]:
    """The engine's mask of a step written by `write_mask`: the same numbers, by a few launches for any pack.

    transformers writes it request by request, with three launches and five views for each, which is what the host of a
    small model on a GPU is busy with. On a CPU launches cost little, and its blocks are fewer numbers than the whole;
    there, and in versions without that function, the engine is left as it is.
    """
    from transformers.generation.continuous_batching import input_outputs

    before = getattr(input_outputs, "build_attention_mask", None)
    if before is None or device.type == "cpu":
        yield
        return
    input_outputs.build_attention_mask = write_mask
    try:
        yield
    finally:
        input_outputs.build_attention_mask = before


def write_mask(
    attention_mask: torch.Tensor,
    cumulative_seqlens_q: list[int],
    cumulative_seqlens_k: list[int],
    sliding_window: int = 1,
) -> None:
    """Write 0 where a query sees a key and the dtype's least number where it does not: transformers' own mask.

    Args:
        attention_mask: [1, 1, queries, keys] or larger; what is past the last entries is left as it is.
        cumulative_seqlens_q: [requests + 1], and so the keys'; a request's last query sees its last key.
        sliding_window: Keys that a query sees at most, its own included; 1 for all.
    """
    bounds: list[tuple[int, int]] = []
    for i in range(len(cumulative_seqlens_q) - 1):
        first, last = cumulative_seqlens_k[i], cumulative_seqlens_k[i + 1]
        queries, keys = cumulative_seqlens_q[i + 1] - cumulative_seqlens_q[i], last - first
        ahead = first + max(0, keys - queries) + 1
        behind = first + keys - queries - sliding_window + 1
        bounds += [
            (max(first, behind + j) if sliding_window > 1 else first, min(last, ahead + j)) for j in range(queries)
        ]
    rows, columns = len(bounds), cumulative_seqlens_k[-1]
    own = torch.tensor(bounds, dtype=torch.int32).to(attention_mask.device)
    place = torch.arange(columns, dtype=torch.int32, device=attention_mask.device)
    hidden = (place < own[:, :1]) | (place >= own[:, 1:])
    part = attention_mask[0, 0, :rows, :columns]
    part.zero_().masked_fill_(hidden, torch.finfo(attention_mask.dtype).min)


def stop_now(manager: Any) -> None:
    """Stop the engine's thread and wait for it. Told and woken first: idle, it looks up but every tenth of a second."""
    status = manager.background_thread_status
    status.request_stop(status.HARD_STOP, manager.distributed_helper.global_rank)
    wake(manager)
    manager.stop(block=True, hard_stop=True)


def wake(manager: Any) -> None:
    """Have the engine's idle thread look at what there is to do."""
    name = _wake_name(manager)
    if name:
        getattr(manager, name).set()


def set_wake_event(manager: Any, event: Any) -> None:
    """Have the engine's idle thread wait for this event in the place of its own, before it starts.

    Raises:
        UserError: an engine that has none.
    """
    name = _wake_name(manager)
    if not name:
        raise UserError("the engine of this transformers can't be held between runs", "Use 5.17 to 5.23.")
    setattr(manager, name, event)


def _wake_name(manager: Any) -> str:
    return next((name for name in ("_wake_up_loop", "_has_new_requests") if hasattr(manager, name)), "")  # 5.23, 5.17
