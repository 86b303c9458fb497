"""Models with random weights, for measuring speed and batch dependence at a size that no weights are at hand for.

"random:qwen3-12x1024" is a Qwen3 of 12 layers, 1024 wide, with the embedded model's tokenizer; "random:qwen3-8b" has
the very shapes of Qwen3-8B, its vocabulary too. Everything is made here from a fixed seed; nothing is downloaded. What
such a model says is gibberish, but its operators, shapes and launches are those of a trained model of the size.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from nondet.errors import UserError, suggestion

__all__ = ["PREFIX", "check_memory", "is_published", "is_random", "random_config", "random_model"]

PREFIX = "random:"
_HINT = "Write random:qwen3-12x1024: an architecture, layers, width; or random:qwen3-0.6b, random:qwen3-8b."
_CONTEXT = 4096
_WIDTH_STEP = 128
_LAYERS, _WIDTH = 200, 16384  # more is a typing error rather than a model
# Wide enough that logits differ, so that greedy completions are no race between equals at every step.
_SPREAD = 0.05

# architecture -> what its config needs beside the common sizes
_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "mistral": {"sliding_window": None},
    "gemma3_text": {"query_pre_attn_scalar": 128, "layer_types": "full_attention"},
}

# The shapes of models as they are published. Their weights are drawn on the device that they are for, which is quick
# for the largest, too; so they are others on a GPU than on a CPU.
_PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}
_QWEN3 = {"vocab_size": 151_936, "head_dim": 128, "max_position_embeddings": 40_960}


def is_published(source: str) -> bool:
    """Whether it has the shapes of a published model, and so weights drawn on its device."""
    return source.removeprefix(PREFIX) in _PUBLISHED


def is_random(source: str | None) -> bool:
    """Whether `--model` asks for random weights."""
    return source is not None and source.startswith(PREFIX)


def random_config(source: str, vocabulary: int) -> Any:
    """The config that "random:ARCHITECTURE-LAYERSxWIDTH" stands for: heads of 128, twice as wide in all as the model.

    Qwen3-0.6B's proportions: WIDTH 1024 has 16 heads on 8 key heads, and an MLP of 3072.

    Raises:
        UserError: another form, an unknown architecture, or sizes that make no model.
    """
    from transformers import AutoConfig

    no_ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    if is_published(source):
        return AutoConfig.for_model("qwen3", **_QWEN3, **_PUBLISHED[source.removeprefix(PREFIX)], **no_ends)
    match = re.fullmatch(r"([a-z0-9_]+)-(\d{1,4})x(\d{1,6})", source.removeprefix(PREFIX))
    if match is None:
        raise UserError(f"--model {source!r} makes no sense", _HINT)
    name, layers, width = match[1], int(match[2]), int(match[3])
    if name not in _ARCHITECTURES:
        raise UserError(f"--model {source!r}: unknown architecture {name!r}", suggestion(name, _ARCHITECTURES))
    if not 1 <= layers <= _LAYERS or not _WIDTH_STEP <= width <= _WIDTH or width % _WIDTH_STEP:
        raise UserError(
            f"--model {source!r}: {layers} layers of width {width}",
            f"Give 1 to {_LAYERS} layers and a multiple of {_WIDTH_STEP} up to {_WIDTH}.",
        )
    more = dict(_ARCHITECTURES[name])
    if "layer_types" in more:
        more["layer_types"] = [more["layer_types"]] * layers
    heads = 2 * width // 128
    return AutoConfig.for_model(
        name,
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=128,
        max_position_embeddings=_CONTEXT,
        tie_word_embeddings=True,
        **no_ends,
        **more,
    )


def check_memory(source: str, config: Any, dtype: torch.dtype, device: str = "cpu") -> None:
    """Refuse a model that does not fit into the memory that it is made in, before the first tensor of it is made.

    Raises:
        UserError: as said.
    """
    import psutil  # type: ignore[import-untyped] # it ships no type information

    width, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layer = 2 * width * (heads + kv_heads) + 3 * width * inner
    tables = 1 if config.tie_word_embeddings else 2
    count = config.num_hidden_layers * layer + tables * config.vocab_size * width
    # beside the weights, the float32 numbers that the largest matrix is drawn as
    needed = count * dtype.itemsize + 4 * max(config.vocab_size, inner, heads) * width
    free = psutil.virtual_memory().available if device == "cpu" else torch.cuda.mem_get_info()[0]
    if needed > free:
        raise UserError(
            f"--model {source!r} takes {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} are free",
            "Give fewer layers or a smaller width.",
        )


def random_model(config: Any, dtype: torch.dtype, device: str = "cpu") -> Any:
    """A causal LM of that config, its matrices uniform around 0, its norms as they begin.

    uniform_ and not normal_: the latter's values differ between CPUs for one seed.

    Args:
        device: Where it is made and drawn.
    """
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                drawn = torch.empty(parameter.shape, device=device)
                parameter.copy_(drawn.uniform_(-_SPREAD, _SPREAD, generator=generator))
    return model
