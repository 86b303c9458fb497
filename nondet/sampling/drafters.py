"""Where speculated tokens come from: the text so far, a smaller model, an earlier text that is being edited.

A draft is a guess. Whether it is kept is decided by the model under study alone, so a poor drafter costs steps and no
correctness.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch

from nondet.errors import UnknownNameError, UserError
from nondet.sampling.setting import Setting

if TYPE_CHECKING:
    from nondet.sampling.model import LoadedModel

__all__ = [
    "DRAFTERS",
    "Draft",
    "check_draft_model",
    "draft_from_layers",
    "draft_from_model",
    "edit",
    "has_halves",
    "look_up",
    "make_draft",
]

# contexts (prompt and what was generated, of each request), most tokens -> drafts of each
Draft = Callable[[Sequence[Sequence[int]], int], list[list[int]]]

# name -> what it is, in words
DRAFTERS: dict[str, str] = {
    "lookup": "prompt lookup: what followed the last tokens earlier in the text",
    "draft": "a draft model: the first half of the model's own layers",
    "model": "a draft model of its own, which --draft-model names",
    "edit": "the editing form: the draft is an earlier text that is being changed",
}

_NGRAMS = (3, 2, 1)
_WINDOW = 16  # tokens of the context that the draft model sees


def make_draft(setting: Setting, model: Any) -> Draft:
    """The drafter of a setting.

    Raises:
        UnknownNameError: there is none of that name.
    """
    if setting.drafts == "lookup":
        return lambda contexts, most: [look_up(context, most) for context in contexts]
    if setting.drafts == "edit":
        guess = partial(edit, earlier=setting.earlier)
        return lambda contexts, most: [guess(context, most) for context in contexts]
    if setting.drafts == "draft":
        return draft_from_layers(model)
    if setting.drafts == "model":
        return draft_from_model(setting.draft_model, model)
    raise UnknownNameError("drafter", setting.drafts, DRAFTERS)


def look_up(context: Sequence[int], most: int) -> list[int]:
    """Prompt lookup: what came after the latest earlier place where the last 3, 2 or 1 tokens stood."""
    return _after(context[:-1], context, most, latest=True)


def edit(context: Sequence[int], most: int, earlier: Sequence[int]) -> list[int]:
    """The editing form: the earlier text goes on from the first place where the last 3, 2 or 1 tokens stand in it."""
    return _after(earlier, context, most, latest=False)


def _after(text: Sequence[int], context: Sequence[int], most: int, *, latest: bool) -> list[int]:
    for size in _NGRAMS:
        last = tuple(context[-size:])
        places = range(len(text) - size)
        for start in reversed(places) if latest else places:
            if tuple(text[start : start + size]) == last:
                return list(text[start + size : start + size + most])
    return []


def draft_from_layers(model: Any) -> Draft:
    """Greedy tokens of the first half of the model's own layers, with its own embedding, norm and head.

    Its weights are a copy: the engine switches the attention of the model's own layers.
    """
    return _greedy(_half(model))


def draft_from_model(name: str, model: Any) -> Draft:
    """Greedy tokens of another model, in the dtype and on the device of the model that verifies them.

    Raises:
        UserError: as `nondet.sampling.model.load_model` says.
    """
    small = _draft_model(name, str(model.dtype).removeprefix("torch."), model.device.type).model
    # rows that fill a matrix up stand for no token of the model that verifies
    return _greedy(small, model.get_input_embeddings().weight.shape[0])


def check_draft_model(name: str, loaded: LoadedModel) -> dict[str, Any]:
    """What the run's header says of the draft model.

    Raises:
        UserError: it can't be loaded, or its tokens are not those of the model under study.
    """
    draft = _draft_model(name, loaded.dtype, loaded.device)
    if draft.tokenizer.get_vocab() != loaded.tokenizer.get_vocab():
        raise UserError(
            f"--draft-model {name}: its tokenizer has other tokens than that of {loaded.name}",
            "Give a smaller model of the same family.",
        )
    return {"name": draft.name, **draft.identity}


@lru_cache(maxsize=1)  # sessions follow one another, each with the same one
def _draft_model(name: str, dtype: str, device: str) -> LoadedModel:
    from nondet.sampling.model import EMBEDDED, load_model

    return load_model(None if name == EMBEDDED else name, dtype, device)


def _greedy(small: Any, rows: int | None = None) -> Draft:
    """The model's likeliest tokens, of the first `rows`.

    The last tokens of each context are all it sees, and it keeps no cache.
    """

    @torch.no_grad()
    def draft(contexts: Sequence[Sequence[int]], most: int) -> list[list[int]]:
        texts = [list(context[-_WINDOW:]) for context in contexts]
        for _ in range(most if texts else 0):
            longest = max(map(len, texts))
            # filled on the right: a causal model's last real row does not see it
            ids = torch.tensor([t + [0] * (longest - len(t)) for t in texts], device=small.device)
            logits = small(input_ids=ids, use_cache=False).logits
            last = torch.tensor([len(t) - 1 for t in texts], device=small.device)
            chosen = logits[torch.arange(len(texts), device=small.device), last, :rows].argmax(-1).tolist()
            for text, token in zip(texts, chosen, strict=True):
                text.append(token)
        return [text[len(text) - most :] for text in texts]

    return draft


def has_halves(model: Any) -> bool:
    """Whether the model's layers are where decoders of transformers keep them."""
    return isinstance(getattr(model.base_model, "layers", None), torch.nn.ModuleList)


def _half(model: Any) -> Any:
    """A copy of the model with the first half of its layers; the others are not copied.

    Raises:
        UserError: its layers are not where decoders of transformers keep them.
    """
    if not has_halves(model):
        raise UserError(
            f"no draft model can be made of a {type(model).__name__}: its layers are elsewhere",
            "Leave speculative=draft out: --vary speculative=lookup:edit.",
        )
    layers = model.base_model.layers
    kept = max(1, len(layers) // 2)
    small = copy.deepcopy(model, {id(layer): None for layer in list(layers)[kept:]})
    small.base_model.layers = torch.nn.ModuleList(list(small.base_model.layers._modules.values())[:kept])
    small.config.num_hidden_layers = kept
    if getattr(small.config, "layer_types", None):
        small.config.layer_types = small.config.layer_types[:kept]
    small.set_attn_implementation("sdpa")
    return small.eval()
