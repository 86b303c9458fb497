"""transformers' eager attention under `batch_invariant()`: computed by the invariant kernels, or said to be at risk.

`eager_attention_forward` computes a softmax over all keys of the padded batch, hidden ones too. Every operator in it is
replaced, and each row of each is invariant; but where a request's keys lie among the padding, and how many there are,
decides in which order they are added. So its bits depend on the company after all. Models take it when they are asked
for attn_implementation="eager", and Gemma 2 by itself, for its soft cap. It is no entry of transformers' table of
attention functions: each model's module has its own copy, and most are one of two, Llama's and Gemma 2's.

The stand-in reads the requests off the mask as for scaled_dot_product_attention (`attention_masks`), so a request's
bits are those of "sdpa". Copies with other code (attention sinks, biases), masks with other patterns, gradients,
dropout, a caller who asks for the attention weights and torch.compile get the original, counted as at risk.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from types import CodeType, ModuleType
from typing import Any

import torch

from nondet.kernels.attention.masks import attend_packed, packing_of
from nondet.kernels.dispatch.kernels import DTYPES, kernels_for
from nondet.kernels.dispatch.state import count, current, emit, guarded
from nondet.kernels.dispatch.transformers import attention as hf_attention

__all__ = ["install", "uninstall"]

_NAME = "eager_attention_forward"
_RISK = "transformers eager attention: sums over padded keys"
_KNOWN = ("llama", "gemma2")  # without and with a soft cap
_installed: dict[ModuleType, Any] = {}  # modeling module -> its function


def install() -> None:
    """Stand in for it in every modeling module that is imported by now and has no stand-in yet.

    A stand-in replaces while the family "attention" is on, and else counts its calls as at risk.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models.") and module not in _installed and _NAME in vars(module):
            original = _installed[module] = vars(module)[_NAME]
            setattr(module, _NAME, _stand_in(original))


def uninstall() -> None:
    """Put back what was there; nothing if nothing was installed. A thread inside a stand-in ends in it undisturbed."""
    for module, original in _installed.items():
        setattr(module, _NAME, original)
    _installed.clear()


def _stand_in(original: Any) -> Any:
    compute = guarded(_compute)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _note_traced()
            return original(*args, **kwargs)
        if "attention" in current().families and _is_known(original):
            bound = inspect.signature(original).bind(*args, **kwargs).arguments
            bound.update(bound.pop("kwargs", {}))
            out = compute(**bound)
            if out is not None:
                count("replaced", "transformers eager attention")
                emit("transformers::eager_attention_forward", args, kwargs, out, "replaced")
                return out, None
        count("at_risk", _RISK)
        return original(*args, **kwargs)

    return forward


def _note_traced() -> None:
    """Count once for each trace; a compiler takes what this returns as a constant, and does not look inside."""
    count("at_risk", _RISK)


_note_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result


@functools.cache
def _is_known(function: Any) -> bool:
    """Does it compute softmax(softcap(q k * scaling) + mask) v, going by its code?"""
    code = getattr(function, "__code__", None)
    return code is not None and _what_it_does(code) in _known_codes()


@functools.cache
def _known_codes() -> frozenset[object]:
    modules = (importlib.import_module(f"transformers.models.{name}.modeling_{name}") for name in _KNOWN)
    originals = (_installed.get(module, vars(module)[_NAME]) for module in modules)
    return frozenset(_what_it_does(original.__code__) for original in originals)


def _what_it_does(code: CodeType) -> object:
    """Equal for functions of one code: its docstring and annotations are no part of that."""
    constants = tuple(repr(x) for x in code.co_consts if x is not None and not isinstance(x, str))
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants


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
    if (dropout and module.training) or wants_weights or {query.dtype, key.dtype, value.dtype} - set(DTYPES):
        return None
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        return None
    kernels = kernels_for(query.device.type)
    batch, _, q_len, dim = query.shape
    k_len = key.shape[2]
    if not query.dtype == key.dtype == value.dtype or key.shape != value.shape or not 1 <= dim <= kernels.max_head_dim:
        return None
    if attention_mask is not None and attention_mask.shape[-1] != k_len:
        return None
    scale = module.head_dim**-0.5 if scaling is None else scaling
    window = kwargs.get("sliding_window")
    if window and k_len >= window and not (attention_mask is None and q_len > 1):
        bound = {**kwargs, "scaling": scale, "softcap": softcap}
        found: torch.Tensor | None = hf_attention.windowed(query, key, value, attention_mask, window, bound)
        if found is not None or q_len == 1:  # one row does not tell hidden keys of a window from padding
            return found
    if attention_mask is None:  # every query sees every key
        return kernels.attention(query, key, value, causal=q_len == 1, scale=scale, softcap=softcap).transpose(1, 2)
    packings = packing_of(attention_mask, batch, q_len)
    if packings is None:
        return None
    out = attend_packed(kernels.attention_varlen, query, key, value, packings, scale, softcap=softcap)
    return out.transpose(1, 2)
