"""Where speculated tokens come from: the text so far, a smaller model, an earlier text that is being edited.

A draft is a guess. Whether it is kept is decided by the model under study alone, so a poor drafter costs steps and no
correctness.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from nondet.errors import UnknownNameError, UserError
from nondet.sampling.setting import Setting

__all__ = ["DRAFTERS", "Draft", "draft_from_layers", "edit", "has_halves", "look_up", "make_draft"]

# contexts (prompt and what was generated, of each request), most tokens -> drafts of each
Draft = Callable[[Sequence[Sequence[int]], int], list[list[int]]]

# name -> what it is, in words
DRAFTERS: dict[str, str] = {
    "lookup": "prompt lookup: what followed the last tokens earlier in the text",
    "draft": "a draft model: the first half of the model's own layers",
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

    The last tokens of each context are all it sees, and it keeps no cache. Its weights are a copy: the engine switches
    the attention of the model's own layers.
    """
    small = _half(model)

    @torch.no_grad()
    def draft(contexts: Sequence[Sequence[int]], most: int) -> list[list[int]]:
        texts = [list(context[-_WINDOW:]) for context in contexts]
        for _ in range(most):
            longest = max(map(len, texts))
            # filled on the right: a causal model's last real row does not see it
            ids = torch.tensor([t + [0] * (longest - len(t)) for t in texts], device=small.device)
            logits = small(input_ids=ids, use_cache=False).logits
            last = torch.tensor([len(t) - 1 for t in texts], device=small.device)
            chosen = logits[torch.arange(len(texts), device=small.device), last].argmax(-1).tolist()
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
