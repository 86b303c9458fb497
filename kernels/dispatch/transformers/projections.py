"""transformers' attention modules under `batch_invariant()` on a CPU: what is around attention, without a dispatcher.

Projections, their norms and the rotary embedding run one after the other, token by token as the projections lay them
out, where the module turns queries and keys around before it rotates them, and back again in attention. What is called
is what the operators are replaced by, so the bits are theirs, and the coverage says the same. Attention itself is the
module's own call, whoever stands there.

Recognized by the text of a class's `forward`, as `nondet.kernels.dispatch.transformers.norms` recognizes modules. A
call with a hook on it or on a part of it, with other parts than plain linear layers and known norms, with a cache of
its own (not a paged one), with a gradient, or elsewhere than on a CPU runs as it did.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module as torch_module

from nondet.kernels.dispatch.state import count, current, inside, looked_at
from nondet.kernels.dispatch.transformers import norms, rotary
from nondet.kernels.dispatch.transformers.mlp import is_plain_linear, unhooked
from nondet.kernels.dispatch.transformers.source import own_source

__all__ = ["form_of", "install", "projecting", "uninstall"]


class Form(NamedTuple):
    """Whether queries and keys are normed, head by head, and whether the window is told to attention."""

    normed: bool
    window: bool


_TEXT = """
input_shape = hidden_states.shape[:-1]
hidden_shape = (*input_shape, -1, self.head_dim)
query_states = {query}.transpose(1, 2)
key_states = {key}.transpose(1, 2)
value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
cos, sin = position_embeddings
query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
if past_key_values is not None:
    key_states, value_states = past_key_values.update(key_states, value_states, self.layer_idx)
attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
    self.config._attn_implementation, eager_attention_forward
)
attn_output, attn_weights = attention_interface(
    self, query_states, key_states, value_states, attention_mask,
    dropout=0.0 if not self.training else self.attention_dropout, scaling=self.scaling, {window}**kwargs
)
attn_output = attn_output.reshape(*input_shape, -1).contiguous()
attn_output = self.o_proj(attn_output)
return (attn_output, attn_weights)
"""
_ARGUMENTS = ["self", "hidden_states", "position_embeddings", "attention_mask", "past_key_values"]
_PROJECTIONS, _NORMS = ("q_proj", "k_proj", "v_proj"), ("q_norm", "k_norm")
_Forward = Any  # a method of a torch.nn.Module


def _text(form: Form) -> str:
    query, key = (f"self.{name}_proj(hidden_states).view(hidden_shape)" for name in "qk")
    if form.normed:
        query, key = f"self.q_norm({query})", f"self.k_norm({key})"
    window = "sliding_window=self.sliding_window, " if form.window else ""
    return ast.unparse(ast.parse(_TEXT.format(query=query, key=key, window=window)))


# body of forward -> form: Llama and its kin, Qwen2, Qwen3
_FORMS = {_text(form): form for form in (Form(False, False), Form(False, True), Form(True, True))}
_installed: dict[type, _Forward] = {}  # class -> its forward


def form_of(cls: type) -> Form | None:
    """The form of that class's forward; None for another text, or none to be had."""
    try:
        function = ast.parse(own_source(cls.__dict__["forward"])).body[0]
    except (KeyError, OSError, TypeError, SyntaxError):
        return None
    if not isinstance(function, ast.FunctionDef) or [a.arg for a in function.args.args] != _ARGUMENTS:
        return None
    return _FORMS.get("\n".join(ast.unparse(statement) for statement in function.body))


@functools.cache
def _classes(module: str) -> tuple[tuple[type, Form, _Forward], ...]:
    """The attention classes that a module of transformers defines and that have a known form, with the forward."""
    made = []
    for name, value in list(vars(sys.modules[module]).items()):
        if isinstance(value, type) and name.endswith("Attention") and value.__module__ == module:
            form = form_of(value)
            if form is not None:
                made.append((value, form, value.__dict__["forward"]))
    return tuple(made)


def install() -> None:
    """Lead the known modules' forward to the short way, in every model that is imported by now."""
    for name in [m for m in list(sys.modules) if m.startswith("transformers.models.") and ".modeling_" in m]:
        for cls, form, known in _classes(name):
            if cls not in _installed and cls.__dict__.get("forward") is known:
                _installed[cls] = known
                cls.forward = projecting(known, form)  # type: ignore[attr-defined]  # a torch.nn.Module's


def uninstall() -> None:
    """Put back what was there; nothing if nothing was installed. A thread inside a stand-in ends in it undisturbed."""
    for cls, forward in _installed.items():
        cls.forward = forward  # type: ignore[attr-defined]
    _installed.clear()


def projecting(original: _Forward, form: Form) -> _Forward:
    """A forward that calls the kernels one after the other on a CPU, and `original` elsewhere."""
    needed = frozenset({"matmul", "norm", "pointwise"} if form.normed else {"matmul", "pointwise"})
    names = inspect.unwrap(original).__globals__  # of the module that wrote it, wherever a class inherits it

    @functools.wraps(original)
    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        x = hidden_states
        made = None
        if (
            past_key_values is None
            and not torch.compiler.is_compiling()
            and not torch.is_grad_enabled()
            and type(x) is torch.Tensor
            and x.is_cpu
            and x.dim() == 3
            and not looked_at()
            and current().families >= needed
            and rotary.stands_in(names)
            and _plain(self, form)
        ):
            before, inside.active = inside.active, True
            try:
                made = _projected(self, x, position_embeddings, form)
            finally:
                inside.active = before
        if made is None:
            return original(self, x, position_embeddings, attention_mask, past_key_values, **kwargs)
        count("replaced", "linear", 3)
        if form.normed:
            count("replaced", "RMSNorm module", 2)
        if form.window:
            kwargs["sliding_window"] = self.sliding_window
        out, weights = _interface(self, names)(
            *(self, *made, attention_mask),
            dropout=0.0 if not self.training else self.attention_dropout,
            scaling=self.scaling,
            **kwargs,
        )
        return _ended(self, out.reshape(*x.shape[:-1], -1).contiguous()), weights

    return forward


def _projected(
    module: Any, x: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], form: Form
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Queries, keys and values as attention takes them, [B, heads, T, D], laid out token by token.

    None until all of the products have been computed once by the operators.
    """
    linear_again, module_norm, rotated = _kernels()
    parts = module._modules
    shape = (*x.shape[:-1], -1, module.head_dim)
    heads = []
    for name in _PROJECTIONS:
        parameters = parts[name]._parameters
        out = linear_again(x, parameters["weight"], parameters["bias"])
        if out is None:
            return None
        heads.append(out.view(shape))
    cos, sin = position_embeddings
    for place, name in enumerate(_NORMS):
        if form.normed:
            norm = parts[name]
            own = norms.installed_form(type(norm))
            if own is None:
                return None
            weight, eps = norm._parameters["weight"], getattr(norm, own.eps)
            out = module_norm(heads[place], weight, eps, round_first=own.round_first, plus_one=own.plus_one)
            if out is None:
                return None
            heads[place] = out
        turned = rotated(heads[place], cos, sin)
        if turned is None:
            return None
        heads[place] = turned
    q, k, v = heads
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


@functools.cache
def _kernels() -> tuple[Any, Any, Any]:
    """Imported with the first product, as every kernel."""
    from nondet.kernels.matmul.cpu import linear_again
    from nondet.kernels.pointwise.cpu_rotary import rotated
    from nondet.kernels.rows.cpu_module_norm import module_norm

    return linear_again, module_norm, rotated


def _ended(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The output projection: by the operator's shorter way where it has one."""
    linear_again = _kernels()[0]
    part = module._modules["o_proj"]
    if type(x) is torch.Tensor and is_plain_linear(part) and not torch.is_grad_enabled():
        before, inside.active = inside.active, True
        try:
            out = linear_again(x, part._parameters["weight"], part._parameters["bias"])
        finally:
            inside.active = before
        if out is not None:
            count("replaced", "linear")
            return out
    ended: torch.Tensor = part(x)
    return ended


def _interface(module: Any, names: dict[str, Any]) -> Any:
    """The module's own choice of attention, by the names that its forward sees."""
    table, default = names["ALL_ATTENTION_FUNCTIONS"], names["eager_attention_forward"]
    return table.get_interface(module.config._attn_implementation, default)


def _plain(module: Any, form: Form) -> bool:
    """Are its parts what they are by name, called by nobody else on the way?"""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return False
    parts = module._modules
    for name in _PROJECTIONS:
        if not is_plain_linear(parts.get(name)):
            return False
    if not form.normed:
        return True
    for name in _NORMS:
        norm = parts.get(name)
        if norms.installed_form(type(norm)) is None or not unhooked(norm):
            return False
        if type(norm._parameters.get("weight")) not in (torch.nn.Parameter, torch.Tensor):
            return False
    return True
