"""Models with random weights, for measuring speed and batch dependence at a size that no weights are at hand for.

"random:qwen3-12x1024" is a Qwen3 of 12 layers, 1024 wide, with the embedded model's tokenizer. Everything is made here
from a fixed seed; nothing is downloaded. What such a model says is gibberish, but its operators, shapes and launches
are those of a trained model of the size.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from nondet.errors import UserError, suggestion

__all__ = ["PREFIX", "check_memory", "is_random", "random_config", "random_model"]

PREFIX = "random:"
_HINT = "Write random:qwen3-12x1024: an architecture, layers, width."
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
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
        **more,
    )


def check_memory(source: str, config: Any, dtype: torch.dtype) -> None:
    """Refuse a model that does not fit into this machine's memory, before the first tensor of it is made.

    Raises:
        UserError: as said.
    """
    import psutil  # type: ignore[import-untyped] # it ships no type information

    width, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layer = 2 * width * (heads + kv_heads) + 3 * width * inner
    count = config.num_hidden_layers * layer + config.vocab_size * width
    # beside the weights, the float32 numbers that the largest matrix is drawn as
    needed = count * dtype.itemsize + 4 * max(config.vocab_size, inner, heads) * width
    free = psutil.virtual_memory().available
    if needed > free:
        raise UserError(
            f"--model {source!r} takes {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} are free",
            "Give fewer layers or a smaller width.",
        )


def random_model(config: Any, dtype: torch.dtype) -> Any:
    """A causal LM of that config on the CPU, its matrices uniform around 0, its norms as they begin.

    uniform_ and not normal_: the latter's values differ between CPUs for one seed.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                parameter.copy_(torch.empty(parameter.shape).uniform_(-_SPREAD, _SPREAD, generator=generator))
    return model
