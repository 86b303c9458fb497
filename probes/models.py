"""Sizes of real models: the linear layers, heads and vocabulary of a preset, or of a model's config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nondet.errors import UnknownNameError, UserError


@dataclass(frozen=True)
class ModelSizes:
    """The sizes that the probes take from a model."""

    name: str  # the preset's name, or the path of the config
    # (name, K, N) of the linear layers, y[N] = W[N, K] x[K]; layers of equal shape share an entry. Serving engines fuse
    # q, k, v and gate, up into one product each, transformers does not: both forms are listed.
    layers: tuple[tuple[str, int, int], ...]
    config: Mapping[str, int] = field(default_factory=dict)  # hidden, heads, kv_heads, head_dim, vocabulary, layers


# The fields of each model's public config.json (huggingface.co/<id>), under the keys that transformers uses.
_KEYS = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size"
PRESETS: dict[str, tuple[int, int, int, int, int, int, int]] = {
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 128, 151936),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, 128, 151936),
    "qwen3-4b": (2560, 9728, 36, 32, 8, 128, 151936),
    "qwen3-8b": (4096, 12288, 36, 32, 8, 128, 151936),
    "qwen3-14b": (5120, 17408, 40, 40, 8, 128, 151936),
    "qwen3-32b": (5120, 25600, 64, 64, 8, 128, 151936),
    "llama-3.2-1b": (2048, 8192, 16, 32, 8, 64, 128256),
    "llama-3.2-3b": (3072, 8192, 28, 24, 8, 128, 128256),
    "llama-3.1-8b": (4096, 14336, 32, 32, 8, 128, 128256),
    "llama-3.1-70b": (8192, 28672, 80, 64, 8, 128, 128256),
    "mistral-7b-v0.1": (4096, 14336, 32, 32, 8, 128, 32000),
    "gemma-7b": (3072, 24576, 28, 16, 16, 256, 256000),
    "gemma-2-2b": (2304, 9216, 26, 8, 4, 256, 256000),
    "gemma-2-9b": (3584, 14336, 42, 16, 8, 256, 256000),
}


# Keys of architectures whose projections do not have the shapes of these rules.
_OTHER_LAYERS = {
    "kv_lora_rank": "latent attention",
    "linear_num_key_heads": "linear attention",
    "attn_output_gate": "gated attention",
    "layers_block_type": "state space layers",
}


def preset(name: str) -> ModelSizes:
    """The sizes of a model in this file. Raises UnknownNameError: the model is not here."""
    if name.lower() not in PRESETS:
        raise UnknownNameError("preset", name, PRESETS)
    return from_config(dict(zip(_KEYS.split(), PRESETS[name.lower()], strict=True)), name.lower())


def read_config(path: Path) -> ModelSizes:
    """The sizes in a model folder's config.json, or in the file itself. Raises UserError: it can't be read."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # no text, or no JSON
        what = f"no config at {file}" if isinstance(error, FileNotFoundError) else f"can't read {file}: {error}"
        raise UserError(what, "Give a model folder, or a model's config.json.") from error
    if not isinstance(config, dict):
        raise UserError(f"{file} holds a {type(config).__name__}, not an object", "Give a model's config.json.")
    return from_config(config, str(path))


def from_config(config: Mapping[str, Any], name: str) -> ModelSizes:
    """The sizes in a config, as transformers writes it: of a mixture of experts the layers of one expert, and dense
    ones where it has any; of several modalities those of the language model. Raises UserError: a size is missing or no
    positive integer, or the attention has no q, k, v and o projections."""
    if isinstance(config.get("text_config"), Mapping):
        config = config["text_config"]
    for key, what in _OTHER_LAYERS.items():
        if config.get(key):
            raise UserError(f"{name} has {what} ({key}), whose layers are not read", "Give --k and --n instead.")

    def size(key: str, default: int | None = None) -> int:
        value = default if config.get(key) is None else config[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            what = "is missing from" if value is None else f"is {value!r} in"
            raise UserError(f"{name}: {key} {what} the config", "Is it the config of a language model?")
        return value

    hidden, heads, vocabulary = size("hidden_size"), size("num_attention_heads"), size("vocab_size")
    kv_heads, head_dim = size("num_key_value_heads", heads), size("head_dim", hidden // heads)
    query, key_value = heads * head_dim, kv_heads * head_dim
    layers = [("qkv_proj", hidden, query + 2 * key_value), ("q_proj", hidden, query)]
    layers += [("k_proj v_proj", hidden, key_value), ("o_proj", query, hidden)]
    experts = config.get("moe_intermediate_size") is not None
    dense = not experts or bool(config.get("mlp_only_layers")) or bool(config.get("first_k_dense_replace"))
    for prefix, key, present in (("", "intermediate_size", dense), ("expert ", "moe_intermediate_size", experts)):
        if present:
            inner = size(key)
            layers += [(f"{prefix}gate_up_proj", hidden, 2 * inner), (f"{prefix}gate_proj up_proj", hidden, inner)]
            layers.append((f"{prefix}down_proj", inner, hidden))
    layers.append(("lm_head", hidden, vocabulary))
    names: dict[tuple[int, int], list[str]] = {}
    for layer, k, n in layers:
        names.setdefault((k, n), []).append(layer)
    sizes = {"hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "vocabulary": vocabulary}
    linear = tuple((" ".join(found), k, n) for (k, n), found in names.items())
    return ModelSizes(name, linear, sizes | {"layers": size("num_hidden_layers")})
