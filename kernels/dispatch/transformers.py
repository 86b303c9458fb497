"""Stand-ins for parts of transformers that no aten operator covers as a whole: norms, rotary, MLPs, projections,
experts.
"""

from __future__ import annotations

import ast
import functools
import importlib.abc
import importlib.machinery
import inspect
import os
import re
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.modules import linear as torch_linear
from torch.nn.modules import module as torch_module

from nondet.kernels.dispatch.state import (
    Leave,
    count,
    current,
    guarded,
    kernels_for,
    looked_at,
    weights_first,
)

# Putting stand-ins into transformers, and taking them out again: one table of what is replaced, one walk for all of it.


class Replacement(NamedTuple):
    """What stands in for an attribute of modules of transformers, or of classes in them, while a block is entered.

    Attributes:
        attribute: A function of the module, or a method of the class.
        make: make(owner, original) -> what is to stand there; None leaves the original.
        classes: How the names of the classes end; "" for the module itself.
        modules: A pattern of the modules' names.
    """

    attribute: str
    make: Callable[[Any, Any], Any]
    classes: str = ""
    modules: str = r"transformers\.models\..*\.modeling_"


_replaced: dict[tuple[Any, str], tuple[Any, Any]] = {}  # (owner, attribute) -> (what was there, what stands there)


def install(replacements: Iterable[Replacement]) -> None:
    """Stand in wherever it is known what stands there, in what is imported by now; what stands in already stays."""
    imported = tuple(name for name in list(sys.modules) if name.startswith("transformers."))
    for replacement in replacements:
        for name in _matching(replacement.modules, imported):
            if (module := sys.modules.get(name)) is not None:
                for owner in _owners(replacement, name, module):
                    _stand_in(owner, replacement)


@functools.lru_cache(maxsize=64)
def _matching(pattern: str, names: tuple[str, ...]) -> list[str]:
    """Of names, those that match: every block asks for all that is imported."""
    return [name for name in names if re.match(pattern, name)]


def _owners(replacement: Replacement, name: str, module: Any) -> list[Any]:
    if not replacement.classes:
        return [module]
    values = list(vars(module).items())
    return [v for n, v in values if isinstance(v, type) and n.endswith(replacement.classes) and v.__module__ == name]


def _stand_in(owner: Any, replacement: Replacement) -> None:
    place, original = (owner, replacement.attribute), vars(owner).get(replacement.attribute)
    if original is not None and place not in _replaced:
        standing = replacement.make(owner, original)
        if standing is not None:
            _replaced[place] = original, standing
            setattr(owner, replacement.attribute, standing)


def uninstall() -> None:
    """Put back what was there; nothing if nothing was installed. A thread inside a stand-in ends in it undisturbed."""
    for (owner, attribute), (original, _) in _replaced.items():
        setattr(owner, attribute, original)
    _replaced.clear()


class Imports(importlib.abc.MetaPathFinder):
    """Calls `then` once modules of transformers are imported, while this leads sys.meta_path."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then, self._under_way = then, threading.local()

    def find_spec(self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None) -> Any:
        """What Python's own finder says, for modules in transformers' files."""
        if not name.startswith("transformers."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(loader := spec.loader, importlib.machinery.SourceFileLoader):

            def and_then(module: types.ModuleType) -> None:
                del vars(loader)["exec_module"]
                outer, self._under_way.here = getattr(self._under_way, "here", False), True
                try:
                    loader.exec_module(module)
                finally:
                    self._under_way.here = outer
                if not outer:
                    self._then()

            vars(loader)["exec_module"] = and_then  # of this module's own loader, once
        return spec


def installed(owner: Any, attribute: str) -> tuple[Any, Any]:
    """(what was there, our stand-in), whoever stands there by now; (None, None) where nothing was put."""
    return _replaced.get((owner, attribute), (None, None))


def note_traced(what: str) -> None:
    """Count as at risk, once for each trace; a compiler takes what this returns as a constant, and looks no further."""
    count("at_risk", what)


note_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result


# Whether a function is the one that its source shows: nobody's wrapper around it, and nobody's in its place.
#
# `inspect.getsource` follows `__wrapped__`, so the text of a wrapper made with functools.wraps is that of what it
# wraps. A stand-in that trusted it would skip what the wrapper does. Decorators of transformers' own are what stock
# calls too.


def own_source(function: Any) -> str:
    """The dedented source of a function.

    Raises:
        OSError: there is none, or somebody's wrapper stands around it.
        TypeError: it is no function.
    """
    layer = function
    while (inner := getattr(layer, "__wrapped__", None)) is not None:
        if not _is_of_transformers(layer):
            raise OSError("a wrapper stands around it")
        layer = inner
    if not isinstance(layer, types.FunctionType):
        raise TypeError("no function")
    return textwrap.dedent(inspect.getsource(layer))


def _is_of_transformers(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and f"{os.sep}transformers{os.sep}" in code.co_filename


def is_of_file(function: Any, file: str | None) -> bool:
    """Whether a function's own code stands in that file: functools.wraps copies names, and no code."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == file


@functools.cache
def _source(function: Any) -> tuple[tuple[str, ...], str]:
    """(names of its arguments, its body without docstring and comments); both empty where there is no own source."""
    try:
        definition = ast.parse(own_source(function)).body[0]
    except (OSError, TypeError, SyntaxError):
        return (), ""
    if not isinstance(definition, ast.FunctionDef):
        return (), ""
    body = definition.body[ast.get_docstring(definition, clean=False) is not None :]
    return tuple(argument.arg for argument in definition.args.args), "\n".join(map(ast.unparse, body))


def _body(text: str) -> str:
    return ast.unparse(ast.parse(text.strip()))


_FORWARD = torch.nn.Linear.forward if is_of_file(torch.nn.Linear.forward, torch_linear.__file__) else None
_CALL = torch.nn.Module.__call__ if is_of_file(torch.nn.Module.__call__, torch_module.__file__) else None


def linear_untouched() -> bool:
    """Whether a call of torch's linear layer still is torch's own product: nobody has put another in its place."""
    return (
        torch.nn.Linear.forward is _FORWARD
        and torch.nn.Module.__call__ is _CALL
        and torch.nn.functional.linear is torch._C._nn.linear
    )


# transformers' experts in decoding: which operand of a batched product is the weight.
#
# With "batched_mm" each token's expert weight [N, K] is gathered and multiplied with the token as a vector:
# bmm(weights [S, N, K], tokens [S, K, 1]). To a product the last operand is the weight, whose shape may decide an
# order; here that would be the token. So while transformers' `_batched_linear` runs, a batched product with vectors is
# told so, and takes each vector as one row of the product with its weight, which is what the grouped product of
# prefill does.
#
# Where there is no such function (another transformers), and while torch.compile traces, the product is that of any
# `bmm`: no less invariant, but in float32 on a CPU not in the bits of the grouped product.

_EXPERTS_TRACED = "transformers experts, compiled: batched products not in the grouped product's bits"


def _telling(original: Any) -> Any:
    @functools.wraps(original)
    def batched_linear(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            note_traced(_EXPERTS_TRACED)
            return original(*args, **kwargs)
        before, weights_first.active = weights_first.active, True
        try:
            return original(*args, **kwargs)
        finally:
            weights_first.active = before

    return batched_linear


# Rotary embeddings whose frequencies follow the longest request of a step: at risk under `batch_invariant()`.
#
# With the rope types "dynamic" and "longrope" (Phi-3's long contexts) transformers takes the largest position of the
# whole batch, and computes or chooses the frequencies of everybody by it. Beyond the model's original length a
# request's bits therefore follow its company, and its own chunks, through an operator that rounds nothing: no kernel
# can cure it. Up to that length everybody has the original ones, and nothing is counted.


def _counted(original: Any) -> Any:
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        kind = getattr(self, "rope_type", None)
        if kind not in ("default", "linear", "llama3", "yarn", None):  # the usual ones, without a further look
            given = {**dict(zip(("x", "position_ids", "layer_type"), args, strict=False)), **kwargs}
            layer_type = given.get("layer_type")
            if isinstance(kind, dict):  # by the layers' type
                kind = kind.get(layer_type, "")
            if "dynamic" in kind or kind == "longrope":
                _note(self, kind, layer_type, given.get("position_ids"))
        return original(self, *args, **kwargs)

    return forward


def _note(module: Any, kind: str, layer_type: str | None, positions: torch.Tensor | None) -> None:
    what = f"transformers rotary embedding {kind!r}: frequencies by the longest request of the step"
    if torch.compiler.is_compiling():
        note_traced(what)
    elif _is_beyond(module, layer_type, positions):
        count("at_risk", what)


def _is_beyond(module: Any, layer_type: str | None, positions: torch.Tensor | None) -> bool:
    """Has the step a position beyond the original length? Yes where that can't be read."""
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    parameters = parameters.get(layer_type, parameters)
    limit = parameters.get("original_max_position_embeddings") or getattr(module, "original_max_seq_len", None)
    capturing = positions is not None and positions.is_cuda and torch.cuda.is_current_stream_capturing()
    if limit is None or positions is None or capturing or positions.is_meta:
        return True
    return int(positions.max()) + 1 >= limit  # at the limit itself "dynamic" keeps what an earlier step has left


# transformers' gated MLPs under `batch_invariant()` on a CPU: their five operators without a dispatcher between them.
#
# Recognized by the text of a class's `forward`, as `nondet.kernels.dispatch.transformers` recognizes modules. What is
# called is what the operators are replaced by, so the bits are theirs, and the coverage says the same. A call with a
# hook on it or on a part of it, with other parts than plain linear layers and SiLU, with a gradient, or elsewhere than
# on a CPU runs as it did.

_TEXT = _body("""
down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
return down_proj
""")
_TENSORS = frozenset({torch.nn.Parameter, torch.Tensor})
_FAMILIES = frozenset({"matmul", "pointwise"})


def is_known(cls: type) -> bool:
    """Whether that class's forward is a gated MLP, by its text."""
    return _source(cls.__dict__.get("forward")) == (("self", "x"), _TEXT)


def gated(original: Any) -> Any:
    """A forward that calls the kernels one after the other on a CPU, and `original` elsewhere."""
    compute = guarded(_computed)

    @functools.wraps(original)
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        now = current()
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or not (type(x) is torch.Tensor and x.is_cpu):
            return original(self, x)
        if looked_at() or not now.families >= _FAMILIES or not _plain(self):
            return original(self, x)
        out = compute(x, self.gate_proj, self.up_proj, self.down_proj)
        if out is None:
            return original(self, x)
        count("replaced", "linear", 3)
        count("replaced", "silu")
        return out

    forward.at_once = ("gate_proj", "up_proj")  # type: ignore[attr-defined] # see `nondet.kernels.dispatch.block`
    return forward


def _computed(x: torch.Tensor, gate: Any, up: Any, down: Any) -> torch.Tensor | None:
    """None until all three products have been computed once by the operators."""
    from nondet.kernels import originals
    from nondet.kernels.matmul.cpu import linear_again, packed_again
    from nondet.kernels.pointwise.cpu import in_vectors

    both = packed_again(x, (gate.weight, up.weight)) if gate.bias is None and up.bias is None else None
    if both is None:
        opened, factor = linear_again(x, gate.weight, gate.bias), linear_again(x, up.weight, up.bias)
    else:
        opened, factor = both.chunk(2, -1)
        if not in_vectors(opened.shape[-1]):
            opened = opened.contiguous()
    if opened is None or factor is None or not in_vectors(opened.numel()):
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


# transformers' RMSNorm modules under `batch_invariant()`: one kernel for the whole module.
#
# A module is recognized by the text of its `forward`, not by its name: models bring classes of their own, most of them
# copies of three forms. While a context is entered those classes' `forward` leads to the kernel that computes the same
# with the same roundings. Every other module, every other device and every call with a gradient runs as it did, on the
# operators that are replaced one by one. So it is a matter of speed, not of coverage; and both ways are meant to have
# the same bits (tests/kernels/rows/test_cuda.py and test_cpu.py hold them to it), so that a
# trainer's forward agrees with a sampler's.
#
# On a CPU it takes the families of all operators that it stands for ("norm" and "pointwise").


class Form(NamedTuple):
    """Where a module keeps its eps, and how it rounds; see `nondet.kernels.rows.cuda`."""

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


# body of forward (its argument renamed to x) -> form
_FORMS = {
    _body(_LLAMA.format("self.weight * x.to(input_dtype)")): Form("variance_epsilon", True, False),
    _body(_LLAMA.format("(self.weight * x).to(input_dtype)")): Form("variance_epsilon", False, False),
    _body(_GEMMA): Form("eps", False, True),
}


def form_of(module: type) -> Form | None:
    """The form of that class's forward; None for another text, or none to be had."""
    return _form(module.__dict__.get("forward"), module.__dict__.get("_norm"))


def installed_form(module: type) -> Form | None:
    """The form of a class that is led to the kernels now; None for any other."""
    original, standing = installed(module, "forward")
    if standing is None or module.__dict__.get("forward") is not standing:
        return None
    return _form(original, module.__dict__.get("_norm"))


@functools.cache
def _form(forward: Any, inner: Any) -> Form | None:
    form = _FORMS.get(_text_of(forward))
    return None if form is not None and form.plus_one and _text_of(inner) != _body(_GEMMA_NORM) else form


def _text_of(method: Any) -> str:
    """The body of a method of one argument, the argument called x; "" for another."""
    names, text = _source(method)
    if len(names) != 2:
        return ""
    body = ast.parse(text)
    for node in ast.walk(body):
        if isinstance(node, ast.Name) and node.id == names[1]:
            node.id = "x"
    return ast.unparse(body)


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
        if type(weight) not in _TENSORS:  # it may compute the product itself
            return original(self, x)
        kernel = _kernel("cpu" if on_cpu else "cuda")
        out = kernel(x, weight, getattr(self, eps), round_first=round_first, plus_one=plus_one)
        if out is None:
            return original(self, x)
        count("replaced", "RMSNorm module")
        return out

    return forward


@functools.cache
def _kernel(device: str) -> Any:
    if device == "cpu":
        from nondet.kernels.rows.cpu import module_norm
    else:
        from nondet.kernels.rows.cuda import module_norm  # needs Triton
    return guarded(module_norm)


# transformers' rotary embedding under `batch_invariant()`: one launch instead of twelve on CUDA, the same bits.
#
# On a CPU its operators are called past the functions that watch them, where no hook wants to see them.
#
# Recognized by the text of a model's `apply_rotary_pos_emb` and `rotate_half`, as
# `nondet.kernels.dispatch.transformers` recognizes modules. Any other text, device or dtype, and any call with a
# gradient, runs as it did.

_NAME_ROTARY = "apply_rotary_pos_emb"
_TEXT_ROTARY = _body("""
cos = cos.unsqueeze(unsqueeze_dim)
sin = sin.unsqueeze(unsqueeze_dim)
q_embed = (q * cos) + (rotate_half(q) * sin)
k_embed = (k * cos) + (rotate_half(k) * sin)
return q_embed, k_embed
""")
_HALVES = _body("""
x1 = x[..., : x.shape[-1] // 2]
x2 = x[..., x.shape[-1] // 2 :]
return torch.cat((-x2, x1), dim=-1)
""")


def rotates(module: Any, function: Any) -> bool:
    """Whether that function, with the module's own halves, rotates as Llama does."""
    defaults = getattr(inspect.unwrap(function), "__defaults__", None) if callable(function) else None
    return (
        _source(function) == (("q", "k", "cos", "sin", "unsqueeze_dim"), _TEXT_ROTARY)
        and defaults == (1,)
        and _source(vars(module).get("rotate_half")) == (("x",), _HALVES)
    )


def stands_in(namespace: dict[str, Any]) -> bool:
    """Whether the function by which a module with those globals rotates is our stand-in."""
    module = sys.modules.get(namespace.get("__name__", ""))
    _, standing = installed(module, _NAME_ROTARY)
    return standing is not None and namespace.get(_NAME_ROTARY) is standing


def rotating(original: Any) -> Any:
    """The function by the device's kernel, `original` where there is none."""

    @functools.wraps(original)
    def apply(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> Any:
        now = current()
        plain = torch.compiler.is_compiling() or torch.is_grad_enabled() or unsqueeze_dim != 1 or q.dim() != 4
        if plain or "pointwise" not in now.families:
            return original(q, k, cos, sin, unsqueeze_dim)
        if q.is_cuda:
            out = _kernel_rotary("cuda")(q, k, cos, sin)
            if out is not None:
                count("replaced", "rotary embedding")
                return out
        elif not looked_at() and all(type(x) is torch.Tensor and x.is_cpu for x in (q, k, cos, sin)):
            out = _kernel_rotary("cpu")(q, k, cos, sin)  # nothing is replaced: what stock calls is what is called
            if out is not None:
                return out
        return original(q, k, cos, sin, unsqueeze_dim)

    return apply


@functools.cache
def _kernel_rotary(device: str) -> Any:
    if device == "cpu":
        from nondet.kernels.pointwise.cpu import rotary
    else:
        from nondet.kernels.pointwise.cuda import rotary  # needs Triton
    return rotary


# transformers' attention modules under `batch_invariant()` on a CPU: what is around attention, without a dispatcher.
#
# Projections, their norms and the rotary embedding run one after the other, token by token as the projections lay them
# out, where the module turns queries and keys around before it rotates them, and back again in attention. What is
# called is what the operators are replaced by, so the bits are theirs, and the coverage says the same. Attention
# itself is the module's own call, whoever stands there.
#
# Recognized by the text of a class's `forward`, as `nondet.kernels.dispatch.transformers` recognizes modules. A call
# with a hook on it or on a part of it, with other parts than plain linear layers and known norms, with a cache of its
# own (not a paged one), with a gradient, or elsewhere than on a CPU runs as it did.


class ProjectionsForm(NamedTuple):
    """Whether queries and keys are normed, head by head, and whether the window is told to attention."""

    normed: bool
    window: bool


_TEXT_PROJECTIONS = """
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
_ARGUMENTS = ("self", "hidden_states", "position_embeddings", "attention_mask", "past_key_values")
_PROJECTIONS, _NORMS = ("q_proj", "k_proj", "v_proj"), ("q_norm", "k_norm")
_Forward = Any  # a method of a torch.nn.Module


def _text(form: ProjectionsForm) -> str:
    query, key = (f"self.{name}_proj(hidden_states).view(hidden_shape)" for name in "qk")
    if form.normed:
        query, key = f"self.q_norm({query})", f"self.k_norm({key})"
    window = "sliding_window=self.sliding_window, " if form.window else ""
    return _body(_TEXT_PROJECTIONS.format(query=query, key=key, window=window))


# body of forward -> form: Llama and its kin, Qwen2, Qwen3
_FORMS_PROJECTIONS = {
    _text(form): form
    for form in (ProjectionsForm(False, False), ProjectionsForm(False, True), ProjectionsForm(True, True))
}


def form_of_projections(cls: type) -> ProjectionsForm | None:
    """The form of that class's forward; None for another text, or none to be had."""
    names, text = _source(cls.__dict__.get("forward"))
    return _FORMS_PROJECTIONS.get(text) if names == _ARGUMENTS else None


def projecting(original: _Forward, form: ProjectionsForm) -> _Forward:
    """A forward that calls the kernels one after the other on a CPU, and `original` elsewhere."""
    needed = frozenset({"matmul", "norm", "pointwise"} if form.normed else {"matmul", "pointwise"})
    names = inspect.unwrap(original).__globals__  # of the module that wrote it, wherever a class inherits it
    compute = guarded(_projected)

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
            and stands_in(names)
            and _plain_projections(self, form)
        ):
            made = compute(self, x, position_embeddings, form)
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

    forward.at_once = _PROJECTIONS  # type: ignore[attr-defined] # see `nondet.kernels.dispatch.block`
    return forward


def _projected(
    module: Any, x: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], form: ProjectionsForm
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Queries, keys and values as attention takes them, [B, heads, T, D], laid out token by token.

    None until all of the products have been computed once by the operators.
    """
    linear_again, module_norms, rotated, packed_again, _ = _kernels()
    parts = module._modules
    cos, sin = position_embeddings
    norms: list[tuple[Any, float, bool, bool]] = []
    for name in _NORMS if form.normed else ():
        norm = parts[name]
        known = installed_form(type(norm))
        if known is None:
            return None
        norms.append((norm._parameters["weight"], getattr(norm, known.eps), *known[1:]))
    own = [parts[name]._parameters for name in _PROJECTIONS]
    sizes = [p["weight"].shape[0] // module.head_dim for p in own]
    shape = (*x.shape[:-1], -1, module.head_dim)
    whole = None if any(p["bias"] is not None for p in own) else packed_again(x, tuple(p["weight"] for p in own))
    if whole is None:
        products = [linear_again(x, p["weight"], p["bias"]) for p in own]
        if any(out is None for out in products):
            return None
        q, k, v = (out.view(shape) for out in products)
    else:
        q, k, v = whole.view(shape).split_with_sizes(sizes, -2)
    pieces = [q, k]  # or both in one tensor
    if norms:
        together = norms[0][1:] == norms[1][1:]
        groups = [([q, k], norms)] if together else [([q], norms[:1]), ([k], norms[1:])]
        pieces = [module_norms(xs, [weight for weight, *_ in given], *given[0][1:]) for xs, given in groups]
    elif whole is not None:
        pieces = [whole.view(shape).narrow(-2, 0, sizes[0] + sizes[1])]
    if any(piece is None for piece in pieces):
        return None
    pieces = [rotated(piece, cos, sin) for piece in pieces]
    if any(piece is None for piece in pieces):
        return None
    q, k = pieces if len(pieces) > 1 else pieces[0].split_with_sizes(sizes[:2], -2)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


@functools.cache
def _kernels() -> tuple[Any, ...]:
    """Imported with the first product, as every kernel."""
    from nondet.kernels.matmul.cpu import linear_again, packed_again
    from nondet.kernels.pointwise.cpu import rotated
    from nondet.kernels.rows.cpu import module_norms

    return linear_again, module_norms, rotated, packed_again, guarded(linear_again)


def _ended(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The output projection: by the operator's shorter way where it has one."""
    part = module._modules["o_proj"]
    if type(x) is torch.Tensor and is_plain_linear(part) and not torch.is_grad_enabled():
        *_, alone = _kernels()
        out = alone(x, part._parameters["weight"], part._parameters["bias"])
        if out is not None:
            count("replaced", "linear")
            return out
    ended: torch.Tensor = part(x)
    return ended


def _interface(module: Any, names: dict[str, Any]) -> Any:
    """The module's own choice of attention, by the names that its forward sees."""
    table, default = names["ALL_ATTENTION_FUNCTIONS"], names["eager_attention_forward"]
    return table.get_interface(module.config._attn_implementation, default)


def _plain_projections(module: Any, form: ProjectionsForm) -> bool:
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
        if norm is None or not unhooked(norm):
            return False
        if type(norm._parameters.get("weight")) not in _TENSORS:
            return False
    return True


def _where_known(form_of: Callable[[type], Any], make: Callable[..., Any]) -> Callable[[type, Any], Any]:
    """`Replacement.make` for classes of a known form, which `make` takes after the original."""
    return lambda cls, original: None if (form := form_of(cls)) is None else make(original, form)


def _grouped(original: Any) -> Any:
    """Whether sdpa gets keys without a copy for each query head: always where somebody trains.

    With a mask transformers repeats them. What a group gives to a key would then be rounded head by head and added up
    outside of attention, so that a gradient's bits would depend on whether a batch is padded.
    """

    @functools.wraps(original)
    def grouped(*args: Any, **kwargs: Any) -> bool:
        now = current()
        ours = now.training and "attention" in now.families and torch.is_grad_enabled()
        return bool(ours or original(*args, **kwargs))

    return grouped


# transformers' FP8 layers, whose kernels come from its hub, DeepGEMM or FBGEMM and may be launched past the dispatcher,
# unseen.
#
# Computed by the family "fp8", activations by 1x128, by row or by the layer's own static scale, then one product:
# weights in blocks of 128x128 or with one scale, experts (a product for each that was chosen), FBGEMM's scales of rows.


def _fp8(original: Any) -> Any:
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        weight = getattr(self, "weight", None)
        if weight is not None and weight.element_size() > 1:
            return original(self, *args, **kwargs)  # a plain product, which is seen itself
        what = f"transformers {type(self).__name__}"
        if torch.compiler.is_compiling():
            note_traced(what)
            return original(self, *args, **kwargs)
        compute = _FP8_LAYERS.get(type(self).__name__)
        if compute is not None and "fp8" in current().families and not kwargs and not torch.is_grad_enabled():
            try:
                out = compute(self, *args)
            except (Leave, NotImplementedError, ValueError) as reason:
                what = f"{what}: {reason}"
            else:
                count("replaced", what)
                return out
        count("at_risk", what)
        return original(self, *args, **kwargs)

    return forward


def _fp8_groups(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """x [.., G, K]: each group by its own part of the weight [G N, K] -> [.., G, N]."""
    groups = layer.n_groups
    if layer.block_size is None or layer.activation_scale is not None or len(layer.weight_scale_inv) % groups:
        raise Leave("groups without whole blocks, or with a static scale")
    tensors = (layer.weight, layer.weight_scale_inv, layer.bias)
    own = zip(*((None,) * groups if t is None else t.chunk(groups) for t in tensors), strict=True)
    return torch.stack([_fp8_product(layer, x[..., g, :], *given) for g, given in enumerate(own)], -2)


def _fp8_experts(layer: Any, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """x [T, H] by the experts index [T, k]: products of each row alone, added in float32 in its order.

    Which experts were chosen is read on the host, which no CUDA graph can.
    """
    if layer.activation_scheme == "static" or layer.block_size is None or layer._is_expert_parallel:
        raise Leave("a static scale, one scale a weight, or experts on several ranks")
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise Leave("its experts are read on the host, which no CUDA graph can")
    rows, chosen = x.repeat_interleave(index.shape[-1], 0), index.reshape(-1)
    first = "gate_up_proj" if layer.has_gate else "up_proj"
    out = torch.zeros_like(rows)
    for expert in chosen.unique().tolist():
        mine = (chosen == expert).nonzero()[:, 0]
        part = rows[mine]
        for name in (first, "down_proj"):
            weight, scales = getattr(layer, name)[expert], getattr(layer, f"{name}_scale_inv")[expert]
            part = _fp8_product(layer, part, weight, scales)
            if name == first:
                part = layer._apply_gate(part) if layer.has_gate else layer.act_fn(part)
        out[mine] = part
    slots = (out * weights.reshape(-1, 1).to(out.dtype)).view(*index.shape, -1).float().unbind(1)
    return functools.reduce(torch.add, slots).to(x.dtype)


def _fbgemm_linear(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """As FBGEMM: scales of rows, those of x up to a limit; a bfloat16 result, and a bias added to that."""
    from nondet.kernels.scaled.functions import quantize_row

    if x.dtype != torch.bfloat16:
        raise Leave(f"activations of {x.dtype}")
    quantize = functools.partial(quantize_row, limit=layer.input_scale_ub)
    out = _scaled_product(quantize, x, layer.weight, layer.weight_scale.float().t())
    return out if layer.bias is None else out + layer.bias


def _fp8_product(
    layer: Any, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [.., K] times a weight [N, K], quantized as the layer says."""
    from nondet.kernels.scaled.functions import BLOCK, FLOAT8, quantize_block, quantize_by, quantize_row

    block, static = layer.block_size, getattr(layer, "activation_scale", None)
    if weight.dtype not in FLOAT8:
        raise Leave(f"weights of {weight.dtype}")
    if block is None:
        quantize = quantize_row if static is None else functools.partial(quantize_by, static)
        return _scaled_product(quantize, x, weight, scales.float().reshape(1, 1), bias)
    if static is not None or tuple(block) != (BLOCK, BLOCK):
        raise Leave(f"blocks of {tuple(block)}, or a static scale beside blocks")
    return _scaled_product(quantize_block, x, weight, scales.float().t(), bias)


@guarded
def _scaled_product(
    quantize: Any, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    q, scale = quantize(x.reshape(-1, x.shape[-1]))
    out = kernels_for(x.device.type).scaled_matmul(q, weight.t(), scale, scales, x.dtype, bias)
    return out.view(*x.shape[:-1], len(weight))


_FP8_LAYERS: dict[str, Callable[..., torch.Tensor]] = {
    "FP8Linear": lambda layer, x: _fp8_product(layer, x, layer.weight, layer.weight_scale_inv, layer.bias),
    "FP8GroupedLinear": _fp8_groups,
    "FP8Experts": _fp8_experts,
    "FbgemmFp8Linear": _fbgemm_linear,
}


REPLACEMENTS = (
    Replacement(
        "use_gqa_in_sdpa",
        lambda _, original: _grouped(original),
        modules=r"transformers\.integrations\.sdpa_attention$",
    ),
    Replacement("_batched_linear", lambda _, original: _telling(original), modules=r"transformers\.integrations\.moe$"),
    Replacement("forward", lambda _, original: _counted(original), "RotaryEmbedding"),
    Replacement("forward", lambda cls, original: gated(original) if is_known(cls) else None, "MLP"),
    Replacement("forward", _where_known(form_of, fused), "RMSNorm"),
    Replacement("forward", _where_known(form_of_projections, projecting), "Attention"),
    *(
        Replacement("forward", lambda _, original: _fp8(original), name, r"transformers\.integrations\.\w*_fp8$")
        for name in (*_FP8_LAYERS, "FbgemmFp8Llama4TextExperts")
    ),
    Replacement(_NAME_ROTARY, lambda module, original: rotating(original) if rotates(module, original) else None),
)
