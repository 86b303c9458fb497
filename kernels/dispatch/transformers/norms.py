"""transformers' RMSNorm modules under `batch_invariant()`: one kernel for the whole module.

A module is recognized by the text of its `forward`, not by its name: models bring classes of their own, most of them
copies of three forms. While a context is entered those classes' `forward` leads to the kernel that computes the same
with the same roundings. Every other module, every other device and every call with a gradient runs as it did, on the
operators that are replaced one by one. So it is a matter of speed, not of coverage; and both ways are meant to have the
same bits (tests/kernels/rows/test_cuda_module_norm.py and test_cpu_module_norm.py hold them to it), so that a trainer's
forward agrees with a sampler's.

On a CPU it takes the families of all operators that it stands for ("norm" and "pointwise"), and hooks see those.
"""

from __future__ import annotations

import ast
import functools
import sys
from typing import Any, NamedTuple

import torch

from nondet.kernels.dispatch.state import count, current, emit, inside, looked_at
from nondet.kernels.dispatch.transformers.source import own_source

__all__ = ["form_of", "install", "installed_form", "uninstall"]


class Form(NamedTuple):
    """Where a module keeps its eps, and how it rounds; see `nondet.kernels.rows.cuda_module_norm`."""

    eps: str
    round_first: bool
    plus_one: bool


_LLAMA = """
input_dtype = x.dtype
x = x.to(torch.float32)
variance = x.pow(2).mean(-1, keepdim=True)
x = x * torch.rsqrt(variance + self.variance_epsilon)
return {}
"""
_GEMMA = """
output = self._norm(x.float())
output = output * (1.0 + self.weight.float())
return output.type_as(x)
"""
_GEMMA_NORM = "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)"


def _body(text: str) -> str:
    return ast.unparse(ast.parse(text.strip()))


# body of forward (its argument renamed to x) -> form
_FORMS = {
    _body(_LLAMA.format("self.weight * x.to(input_dtype)")): Form("variance_epsilon", True, False),
    _body(_LLAMA.format("(self.weight * x).to(input_dtype)")): Form("variance_epsilon", False, False),
    _body(_GEMMA): Form("eps", False, True),
}
_installed: dict[type, Any] = {}  # class -> its forward
_standing: dict[type, Any] = {}  # class -> what stands there instead


def form_of(module: type) -> Form | None:
    """The form of that class's forward; None for another text, or none to be had."""
    form = _FORMS.get(_text_of(module.__dict__.get("forward")))
    if form is not None and form.plus_one and _text_of(module.__dict__.get("_norm")) != _body(_GEMMA_NORM):
        return None
    return form


def _text_of(method: Any) -> str:
    """The body of a method of one argument, without docstring and comments, the argument called x."""
    try:
        tree = ast.parse(own_source(method))
    except (OSError, TypeError, SyntaxError):
        return ""
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or len(function.args.args) != 2:
        return ""
    name = function.args.args[1].arg
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id == name:
            node.id = "x"
    body = function.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    return "\n".join(ast.unparse(statement) for statement in body)


@functools.cache
def _classes(module: str) -> tuple[tuple[type, Form, Any, Any], ...]:
    """The RMSNorm classes that a module of transformers defines, of a known form, with the methods that have it."""
    found = []
    for name, value in vars(sys.modules[module]).items():
        if isinstance(value, type) and name.endswith("RMSNorm") and value.__module__ == module:
            form = form_of(value)
            if form is not None:
                found.append((value, form, value.__dict__["forward"], value.__dict__.get("_norm")))
    return tuple(found)


def install() -> None:
    """Lead the known modules' forward to the kernels while "norm" is on, in every model that is imported by now."""
    for module in [m for m in list(sys.modules) if m.startswith("transformers.models.") and ".modeling_" in m]:
        for cls, form, known, inner in _classes(module):
            if cls in _installed or cls.__dict__.get("forward") is not known or cls.__dict__.get("_norm") is not inner:
                continue
            _installed[cls] = known
            _standing[cls] = fused(known, form)
            cls.forward = _standing[cls]  # type: ignore[attr-defined]  # a torch.nn.Module's


def installed_form(module: type) -> Form | None:
    """The form of a class that is led to the kernels now; None for any other."""
    standing = _standing.get(module)
    return _known_form(module) if standing is not None and module.__dict__.get("forward") is standing else None


@functools.cache
def _known_form(module: type) -> Form | None:
    """The form of a class of transformers, by the module that defines it."""
    return next((form for cls, form, *_ in _classes(module.__module__) if cls is module), None)


def uninstall() -> None:
    """Put back what was there; nothing if nothing was installed. A thread inside a stand-in ends in it undisturbed."""
    for cls, forward in _installed.items():
        cls.forward = forward  # type: ignore[attr-defined]
    _installed.clear()
    _standing.clear()


def fused(original: Any, form: Form) -> Any:
    """A forward that takes the device's kernel, and `original` where there is none."""
    eps, round_first, plus_one = form

    @functools.wraps(original)
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        on_cpu = type(x) is torch.Tensor and x.is_cpu
        if torch.is_grad_enabled() or not (on_cpu or x.is_cuda) or torch.compiler.is_compiling():
            return original(self, x)
        now = current()
        if "norm" not in now.families or (on_cpu and ("pointwise" not in now.families or looked_at())):
            return original(self, x)
        weight = self._parameters.get("weight")
        if type(weight) not in (torch.nn.Parameter, torch.Tensor):  # it may compute the product itself
            return original(self, x)
        before, inside.active = inside.active, True
        try:
            kernel = _kernel("cpu" if on_cpu else "cuda")
            out = kernel(x, weight, getattr(self, eps), round_first=round_first, plus_one=plus_one)
        finally:
            inside.active = before
        if out is None:
            return original(self, x)
        count("replaced", "RMSNorm module")
        if now.hooks:
            emit("transformers::RMSNorm", (self, x), {}, out, "replaced")
        return out

    return forward


@functools.cache
def _kernel(device: str) -> Any:
    if device == "cpu":
        from nondet.kernels.rows.cpu_module_norm import module_norm
    else:
        from nondet.kernels.rows.cuda_module_norm import module_norm  # needs Triton
    return module_norm
