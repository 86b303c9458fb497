"""transformers' rotary embedding under `batch_invariant()`: one launch instead of twelve on CUDA, the same bits.

On a CPU its operators are called past the functions that watch them, where no hook wants to see them.

Recognized by the text of a model's `apply_rotary_pos_emb` and `rotate_half`, as
`nondet.kernels.dispatch.transformers.norms` recognizes modules. Any other text, device or dtype, and any call with a
gradient, runs as it did.
"""

from __future__ import annotations

import ast
import functools
import sys
import textwrap
from types import ModuleType
from typing import Any

import torch

from nondet.kernels.dispatch.state import count, current, emit, looked_at
from nondet.kernels.dispatch.transformers.source import own_source

__all__ = ["install", "is_known", "rotating", "uninstall"]

_NAME = "apply_rotary_pos_emb"
_TEXT = """
def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed
"""
_HALVES = """
def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)
"""
_installed: dict[ModuleType, Any] = {}  # modeling module -> its function
_standing: dict[ModuleType, Any] = {}  # modeling module -> what stands there instead


def _plain(text: str) -> str:
    """Source of a function without decorators, docstring and comments."""
    function = ast.parse(textwrap.dedent(text)).body[0]
    if not isinstance(function, ast.FunctionDef):
        return ""
    function.decorator_list = []
    if isinstance(function.body[0], ast.Expr) and isinstance(function.body[0].value, ast.Constant):
        function.body = function.body[1:]
    return ast.unparse(function)


def is_known(name: str) -> bool:
    """Whether the module of that name rotates as Llama does, by the functions that stand there now."""
    module = sys.modules[name]
    rotate = vars(module).get(_NAME)
    if rotate is not None and rotate is _standing.get(module):
        rotate = _installed[module]
    return _are_known(rotate, vars(module).get("rotate_half"))


@functools.cache
def _are_known(rotate: Any, halves: Any) -> bool:
    try:
        return _plain(own_source(rotate)) == _plain(_TEXT) and _plain(own_source(halves)) == _plain(_HALVES)
    except (OSError, TypeError, SyntaxError):
        return False


def stands_in(namespace: dict[str, Any]) -> bool:
    """Whether the function by which a module with those globals rotates is our stand-in."""
    module = sys.modules.get(namespace.get("__name__", ""))
    standing = _standing.get(module) if module is not None else None
    return standing is not None and namespace.get(_NAME) is standing


def install() -> None:
    """Lead the rotary embedding of every model that is imported by now to the kernel, while "pointwise" is on."""
    for name, module in list(sys.modules.items()):
        if module in _installed or not name.startswith("transformers.models.") or ".modeling_" not in name:
            continue
        if is_known(name):
            _installed[module] = vars(module)[_NAME]
            _standing[module] = rotating(_installed[module])
            setattr(module, _NAME, _standing[module])


def uninstall() -> None:
    """Put back what was there; nothing if nothing was installed. A thread inside a stand-in ends in it undisturbed."""
    for module, original in _installed.items():
        setattr(module, _NAME, original)
    _installed.clear()
    _standing.clear()


def rotating(original: Any) -> Any:
    """The function by the device's kernel, `original` where there is none."""

    @functools.wraps(original)
    def apply(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> Any:
        now = current()
        plain = torch.compiler.is_compiling() or torch.is_grad_enabled() or unsqueeze_dim != 1 or q.dim() != 4
        if plain or "pointwise" not in now.families:
            return original(q, k, cos, sin, unsqueeze_dim)
        if q.is_cuda:
            out = _kernel("cuda")(q, k, cos, sin)
            if out is not None:
                count("replaced", "rotary embedding")
                emit(f"transformers::{_NAME}", (q, k, cos, sin), {}, out, "replaced")
                return out
        elif not looked_at() and all(type(x) is torch.Tensor and x.is_cpu for x in (q, k, cos, sin)):
            out = _kernel("cpu")(q, k, cos, sin)  # nothing is replaced: what stock calls is what is called
            if out is not None:
                return out
        return original(q, k, cos, sin, unsqueeze_dim)

    return apply


@functools.cache
def _kernel(device: str) -> Any:
    if device == "cpu":
        from nondet.kernels.pointwise.cpu_rotary import rotary
    else:
        from nondet.kernels.pointwise.cuda_rotary import rotary  # needs Triton
    return rotary
