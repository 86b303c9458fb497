"""Loading an encoder and its tokenizer, with every way that this goes wrong said in one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nondet.errors import UserError, reason_of
from nondet.sampling.model import (
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

__all__ = ["LoadedEncoder", "load_encoder"]

_HINT = "Copy or download it again; weights must be safetensors."


@dataclass(frozen=True)
class LoadedEncoder:
    """An encoder on its device, and what a run's header says of it.

    Attributes:
        context: The most tokens of a text, special ones included.
        identity: What decides its bits; JSON-able.
    """

    name: str
    model: Any = field(repr=False)
    tokenizer: Any = field(repr=False)
    device: str
    dtype: str
    context: int
    identity: dict[str, Any]

    def encode(self, texts: Sequence[str]) -> tuple[list[list[int]], int]:
        """(token ids of each text, how many texts were cut at the context).

        Raises:
            UserError: a text without a token.
        """
        rows: list[list[int]] = [self.tokenizer(text)["input_ids"] for text in texts]
        for place, ids in enumerate(rows):
            if not ids:
                raise UserError(f"text {place + 1} has no tokens", "Take it out, or give it some text.")
        cut = sum(len(ids) > self.context for ids in rows)
        if cut:
            rows = [
                self.tokenizer(text, truncation=True, max_length=self.context)["input_ids"]
                if len(ids) > self.context
                else ids
                for text, ids in zip(texts, rows, strict=True)
            ]
        return rows, cut


def load_encoder(where: str, dtype: str, device: str) -> LoadedEncoder:
    """Load an encoder: a model of transformers that reads whole texts, such as BERT and its kin.

    Args:
        where: A local folder or a hub name.

    Raises:
        UserError: it isn't there, is no encoder, or can't be loaded here.
    """
    from transformers import AutoModel

    torch_dtype = check_dtype(dtype, device)
    local = local_folder(where)
    options: dict[str, Any] = {} if local is not None else {"local_files_only": offline(where)}
    with quiet():
        config = read_config(where, local, options)
        _check_encoder(where, config)
        names = weight_names(where, local, config, options)
        tokenizer = read_tokenizer(where, local, options)
        tokenizer.model_max_length, limit = 10**9, tokenizer.model_max_length
        try:
            model, info = AutoModel.from_pretrained(
                local or where,
                config=config,
                dtype=torch_dtype,
                use_safetensors=True,
                output_loading_info=True,
                **options,
            )
        except Exception as error:
            if "ignore_mismatched_sizes" in str(error):
                raise UserError(f"{where}: the shapes of its weights don't fit its config.json", _HINT) from error
            raise UserError(f"{where}: its weights can't be loaded: {reason_of(error)}", _HINT) from error
    absent = sorted(
        name for name in info["missing_keys"] if "pooler" not in name
    )  # which no vector of ours goes through
    if absent:
        raise UserError(f"{where} is half-written: {len(absent)} tensors are missing, {absent[0]} first", _HINT)
    rows = model.get_input_embeddings().weight.shape[0]
    highest = max(tokenizer.get_vocab().values())
    if highest >= rows:
        raise UserError(
            f"{where}: the tokenizer has ids up to {highest}, the model only {rows}", "Are they of one model?"
        )
    return LoadedEncoder(
        name=where,
        model=model.to(device).eval(),
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        context=_context(config, limit),
        identity={
            "name": where,
            "class": type(model).__name__,
            "parameters": model.num_parameters(),
            "dtype": dtype,
            "commit": commit_of(where, local),
            "weights": None if local is None else weights_digest(local, names),
            "attention": getattr(model.config, "_attn_implementation", None),
            "layers": getattr(config, "num_hidden_layers", None),
            "hidden": getattr(config, "hidden_size", None),
        },
    )


def _check_encoder(where: str, config: Any) -> None:
    """Refuse what reads from left to right, and what has a decoder.

    Raises:
        UserError: as said.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as ENCODERS

    what = ", ".join(getattr(config, "architectures", None) or []) or config.model_type
    both = getattr(config, "is_encoder_decoder", False)
    if config.model_type in ENCODERS and not both and not getattr(config, "is_decoder", False):
        return
    kind = "an encoder with a decoder" if both else "no encoder that transformers knows"
    raise UserError(
        f"{where} is a {what}, {kind}", "Give one such as all-MiniLM-L6-v2; of what generates text ask nondet sample."
    )


def _context(config: Any, limit: Any) -> int:
    """Tokens of a text at most: what the tokenizer says, and what the model has positions for."""
    positions = getattr(config, "max_position_embeddings", None)
    limits = [x for x in (limit, positions) if isinstance(x, int) and 0 < x < 10**6]
    if positions and getattr(config, "model_type", "") in ("roberta", "xlm-roberta", "camembert", "mpnet"):
        limits.append(positions - 2)  # these count positions from the padding's id on
    return min(limits, default=512)
