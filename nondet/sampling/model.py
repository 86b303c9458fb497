"""Loading a causal LM and its tokenizer, with every way that this goes wrong said in one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nondet.errors import UserError, reason_of
from nondet.sampling.loading import (
    check_dtype,
    commit_of,
    local_folder,
    offline,
    quiet,
    read_config,
    read_tokenizer,
    weight_names,
    weights_digest,
)
from nondet.sampling.random_model import check_memory, is_published, is_random, random_config, random_model

__all__ = ["EMBEDDED", "LoadedModel", "check_lengths", "embedded_folder", "load_model"]

EMBEDDED = "embedded"


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device, and what a run's header says of it.

    Attributes:
        name: "embedded", or the folder or hub name as given.
        context: Positions that it has; None where the config names no limit.
        eos: Token ids that end a text.
        identity: What decides its bits: class, parameters, dtype, commit, weights. JSON-able, for the header: a run is
            resumed only under an equal one.
    """

    name: str
    model: Any = field(repr=False)
    tokenizer: Any = field(repr=False)
    device: str
    dtype: str
    context: int | None
    eos: tuple[int, ...]
    identity: dict[str, Any]

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with whatever special tokens the tokenizer adds by itself."""
        ids: list[int] = self.tokenizer.encode(text)
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a piece of text, without special tokens."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens shown."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def embedded_folder() -> Path:
    """Where the model that ships with nondet lies."""
    return Path(__file__).resolve().parent.parent / "embedded"


def load_model(source: str | None, dtype: str, device: str, *, trust_remote_code: bool = False) -> LoadedModel:
    """Load a model and its tokenizer.

    Args:
        source: None for the embedded model, a local folder, a hub name (weights must be safetensors), or random
            weights, see `nondet.sampling.random_model`.
        dtype: A key of `DTYPES`.
        device: "cpu" or "cuda".
        trust_remote_code: Run code that the repository brings.

    Raises:
        UserError: it isn't there, is half-written, is no causal LM, or can't run here; what, and what to try.
    """
    torch_dtype = check_dtype(dtype, device)
    where = str(embedded_folder()) if source is None else source
    random = is_random(source)
    local = embedded_folder() if random else local_folder(where)
    with quiet():
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        if local is None:
            options["local_files_only"] = offline(where)
        # the config first: a tokenizer is looked up by it, and would be blamed for a broken one
        config: Any = None if random else read_config(where, local, options)
        names = ["model.safetensors"] if random else weight_names(where, local, config, options)
        tokenizer = read_tokenizer(where, local, options)
        if random:
            config = random_config(where, max(tokenizer.get_vocab().values()) + 1)
            made_on = device if is_published(where) else "cpu"
            check_memory(where, config, torch_dtype, made_on)
            model = random_model(config, torch_dtype, made_on)
        else:
            _check_causal(where, config, trust_remote_code)
            model = _weights(where, local, config, torch_dtype, options)
    if not tokenizer.encode("one word", add_special_tokens=False):
        # transformers makes an empty tokenizer up where a folder has none
        raise UserError(f"{where} has no tokenizer, or an empty one", "Put its tokenizer.json beside config.json.")
    highest = max(tokenizer.get_vocab().values())
    rows = model.get_input_embeddings().weight.shape[0]
    if highest >= rows:
        raise UserError(
            f"{where}: the tokenizer has ids up to {highest}, the model only {rows}", "Are they of one model?"
        )
    tokenizer.model_max_length = 10**9  # check_lengths speaks in one line; transformers would warn in its own way
    try:
        model = model.to(device).eval()
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{where} does not fit into the GPU's memory in {dtype}", "Use a smaller model or --device cpu."
        ) from error
    text_config = config.get_text_config()
    limit = getattr(text_config, "max_position_embeddings", None)
    return LoadedModel(
        name=EMBEDDED if source is None else source,
        model=model,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        context=limit if isinstance(limit, int) and limit > 0 else None,
        eos=_eos(model, text_config),
        identity={
            "class": type(model).__name__,
            "parameters": model.num_parameters(),
            "dtype": dtype,
            "commit": commit_of(where, local),
            "weights": "random" if random else None if local is None else weights_digest(local, names),
            "layers": getattr(text_config, "num_hidden_layers", None),
            "hidden": getattr(text_config, "hidden_size", None),
            "vocabulary": rows,
        },
    )


def check_lengths(loaded: LoadedModel, prompt: Sequence[int], max_new_tokens: int) -> None:
    """Refuse a request that the model can't hold.

    Raises:
        UserError: an empty prompt, or prompt plus completion beyond the context.
    """
    if not prompt:
        raise UserError("the prompt has no tokens", "Give some text.")
    if max_new_tokens < 1:
        raise UserError(f"--max-tokens {max_new_tokens} makes no sense", "Give 1 or more.")
    total = len(prompt) + max_new_tokens
    if loaded.context is not None and total > loaded.context:
        room = loaded.context - len(prompt)
        hint = f"Use --max-tokens {room} or less." if room > 0 else "Shorten the prompt."
        raise UserError(
            f"{len(prompt)} prompt tokens + {max_new_tokens} new ones = {total} exceed the model's context of "
            f"{loaded.context}",
            hint,
        )


def _check_causal(where: str, config: Any, trust_remote_code: bool) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return
    names = getattr(config, "architectures", None) or []
    known = {n for v in CAUSAL.values() for n in ([v] if isinstance(v, str) else v)}
    named_otherwise = bool(names) and not known & set(names)
    if getattr(config, "is_encoder_decoder", False) or config.model_type not in CAUSAL or named_otherwise:
        what = ", ".join(names) or config.model_type
        raise UserError(
            f"{where} is a {what}, not a causal language model", "Give a model that generates text, such as Qwen3."
        )


def _weights(where: str, local: Path | None, config: Any, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    hint = "Copy or download it again; weights must be safetensors."
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            local or where,
            config=config,
            dtype=dtype,
            attn_implementation="sdpa",
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    except Exception as error:
        if "scaled_dot_product_attention" in str(error) or "sdpa" in str(error):
            raise UserError(
                f"{where} can't use scaled_dot_product_attention, which the engine needs", "Choose another model."
            ) from error
        if "ignore_mismatched_sizes" in str(error):
            raise UserError(f"{where}: the shapes of its weights are not those of its config.json", hint) from error
        raise UserError(f"{where}: its weights can't be loaded: {reason_of(error)}", hint) from error
    absent = sorted(info["missing_keys"])
    if absent:
        # transformers would go on with random numbers in their place
        raise UserError(f"{where} is half-written: {len(absent)} tensors are missing, {absent[0]} first", hint)
    return model


def _eos(model: Any, config: Any) -> tuple[int, ...]:
    found = getattr(model.generation_config, "eos_token_id", None)
    if found is None:
        found = getattr(config, "eos_token_id", None)
    if found is None:
        return ()
    return (found,) if isinstance(found, int) else tuple(found)
