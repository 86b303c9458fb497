"""transformers' gated MLPs under `batch_invariant()` on a CPU: their five operators without a dispatcher between them.

Recognized by the text of a class's `forward`, as `nondet.kernels.dispatch.transformers.norms` recognizes modules. What
is called is what the operators are replaced by, so the bits are theirs, and the coverage says the same. A call with a
hook on it or on a part of it, with other parts than plain linear layers and SiLU, with a gradient, or elsewhere than on
a CPU runs as it did.
"""

from __future__ import annotations

import ast
import functools
import sys
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from nondet.kernels.dispatch.state import count, current, inside, looked_at
from nondet.kernels.dispatch.transformers.source import is_of_file, linear_untouched, own_source

__all__ = ["gated", "install", "is_known", "is_plain_linear", "unhooked", "uninstall"]

_TEXT = """
down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
return down_proj
"""
_TENSORS = frozenset({torch.nn.Parameter, torch.Tensor})
_FAMILIES = frozenset({"matmul", "pointwise"})
_installed: dict[type, Any] = {}  # class -> its forward


def is_known(cls: type) -> bool:
    """Whether that class's forward is a gated MLP, by its text."""
    try:
        function = ast.parse(own_source(cls.__dict__["forward"])).body[0]
    except (KeyError, OSError, TypeError, SyntaxError):
        return False
    if not isinstance(function, ast.FunctionDef) or [a.arg for a in function.args.args] != ["self", "x"]:
        return False
    return "\n".join(ast.unparse(statement) for statement in function.body) == ast.unparse(ast.parse(_TEXT))


@functools.cache
def _classes(module: str) -> tuple[tuple[type, Any], ...]:
    """The known classes, each with the forward by which it is known: another one put there later is not."""
    values = list(vars(sys.modules[module]).items())
    return tuple(
        (v, v.__dict__["forward"])
        for n, v in values
        if isinstance(v, type) and n.endswith("MLP") and v.__module__ == module and is_known(v)
    )


def install() -> None:
    """Lead the known MLPs' forward to the short way, in every model that is imported by now."""
    for name in [m for m in list(sys.modules) if m.startswith("transformers.models.") and ".modeling_" in m]:
        for cls, known in _classes(name):
            if cls not in _installed and cls.__dict__.get("forward") is known:
                _installed[cls] = known
                cls.forward = gated(_installed[cls])  # type: ignore[attr-defined]  # a torch.nn.Module's


def uninstall() -> None:
    """Put back what was there; nothing if nothing was installed. A thread inside a stand-in ends in it undisturbed."""
    for cls, forward in _installed.items():
        cls.forward = forward  # type: ignore[attr-defined]
    _installed.clear()


def gated(original: Any) -> Any:
    """A forward that calls the kernels one after the other on a CPU, and `original` elsewhere."""

    @functools.wraps(original)
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        now = current()
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or not (type(x) is torch.Tensor and x.is_cpu):
            return original(self, x)
        if looked_at() or not now.families >= _FAMILIES or not _plain(self):
            return original(self, x)
        parts = self.gate_proj, self.up_proj, self.down_proj
        before, inside.active = inside.active, True
        try:
            out = _computed(x, *parts)
        finally:
            inside.active = before
        if out is None:
            return original(self, x)
        count("replaced", "linear", 3)
        count("replaced", "silu")
        return out

    return forward


def _computed(x: torch.Tensor, gate: Any, up: Any, down: Any) -> torch.Tensor | None:
    """None until all three products have been computed once by the operators."""
    from nondet.kernels import originals
    from nondet.kernels.matmul.cpu import linear_again
    from nondet.kernels.pointwise.cpu import in_vectors

    opened = linear_again(x, gate.weight, gate.bias)
    if opened is None or not in_vectors(opened.numel()):
        return None
    factor = linear_again(x, up.weight, up.bias)
    if factor is None:
        return None
    return linear_again(originals.mul(originals.silu(opened), factor), down.weight, down.bias)


def _plain(mlp: Any) -> bool:
    """Are its parts what they are by name, called by nobody else on the way?"""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return False
    parts = mlp._modules
    activation = parts.get("act_fn")
    if not _is_silu(type(activation)) or not unhooked(activation):
        return False
    if not (is_plain_linear(parts.get("gate_proj")) and is_plain_linear(parts.get("up_proj"))):
        return False
    return is_plain_linear(parts.get("down_proj"))


def is_plain_linear(part: Any) -> bool:
    """Whether that is torch's linear layer, called by nobody else on the way, and not of somebody's own tensors."""
    if type(part) is not torch.nn.Linear or part._forward_hooks or part._forward_pre_hooks or not linear_untouched():
        return False
    parameters = part._parameters
    # a tensor class of somebody's own may compute its products itself; what is no parameter is kept by somebody else
    return (
        "forward" not in part.__dict__
        and type(parameters.get("weight")) in _TENSORS
        and "bias" in parameters
        and (parameters["bias"] is None or type(parameters["bias"]) in _TENSORS)
    )


def _is_silu(cls: type) -> bool:
    """torch's class, and transformers' own for what calls silu likewise; not a class of that name from elsewhere."""
    ours = cls is torch.nn.SiLU or (cls.__name__ == "SiLUActivation" and cls.__module__ == "transformers.activations")
    return ours and is_of_file(cls.forward, sys.modules[cls.__module__].__file__)  # type: ignore[attr-defined]  # a module's


def unhooked(module: Any) -> bool:
    """Whether nobody looks at a module's calls, or has put another forward in its place."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)
