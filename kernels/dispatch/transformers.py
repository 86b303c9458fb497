"""Stand-ins for parts of transformers that no aten operator covers as a whole: norms, rotary, experts, FP8 layers."""

from __future__ import annotations

import ast
import functools
import importlib
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

from nondet.kernels.dispatch.state import Leave, count, current, guarded, inside, kernels_for


class Replacement(NamedTuple):
    """What replaces an attribute of modules of transformers, or of classes in them, while a block is entered."""

    attribute: str  # a function of the module, or a method of the class
    make: Callable[[Any, Any], Any]  # make(owner, original) -> the stand-in; None keeps the original
    classes: str = ""  # how the names of the classes end; "" for the module itself
    modules: str = r"transformers\.models\..*\.modeling_"  # a pattern of the modules' names


_replaced: dict[tuple[Any, str], tuple[Any, Any]] = {}  # (owner, attribute) -> (the original, the stand-in)


def install(replacements: Iterable[Replacement]) -> None:
    """Install stand-ins for known originals in what is imported by now; installed ones stay."""
    imported = tuple(name for name in list(sys.modules) if name.startswith("transformers."))
    for replacement in replacements:
        for name in _matching(replacement.modules, imported):
            if (module := sys.modules.get(name)) is not None:
                for owner in _owners(replacement, name, module):
                    _stand_in(owner, replacement)


@functools.lru_cache(maxsize=64)
def _matching(pattern: str, names: tuple[str, ...]) -> list[str]:
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
    """Restore the originals, if anything was installed. A thread inside a stand-in finishes in it."""
    for (owner, attribute), (original, _) in _replaced.items():
        setattr(owner, attribute, original)
    _replaced.clear()


class Imports(importlib.abc.MetaPathFinder):
    """Calls `then` once modules of transformers are imported, while this leads sys.meta_path."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then, self._under_way = then, threading.local()

    def find_spec(self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None) -> Any:
        """Python's own spec, for modules in transformers' files."""
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
    """(the original, our stand-in), whatever is there now; (None, None) where nothing was installed."""
    return _replaced.get((owner, attribute), (None, None))


def note_traced(what: str) -> None:
    """Count as at risk, once per trace, because a compiler takes the result as a constant."""
    count("at_risk", what)


note_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result


# `inspect.getsource` follows `__wrapped__`, and a stand-in that trusted it would skip what a foreign wrapper does. So a
# function must be the one that its source shows. transformers' own decorators are allowed: stock calls them too.


@functools.cache
def source_of(function: Any) -> tuple[tuple[str, ...], str]:
    """(names of its arguments, its body without docstring and comments); both empty where there is no own source."""
    layer = function
    while (inner := getattr(layer, "__wrapped__", None)) is not None:
        code = getattr(layer, "__code__", None)
        if code is None or f"{os.sep}transformers{os.sep}" not in code.co_filename:
            return (), ""
        layer = inner
    try:
        text = inspect.getsource(layer) if isinstance(layer, types.FunctionType) else ""
        (definition, *_) = ast.parse(textwrap.dedent(text)).body
    except (OSError, SyntaxError, ValueError):
        return (), ""
    if not isinstance(definition, ast.FunctionDef):
        return (), ""
    body = definition.body[ast.get_docstring(definition, clean=False) is not None :]
    return tuple(argument.arg for argument in definition.args.args), "\n".join(map(ast.unparse, body))


def _body(text: str) -> str:
    return ast.unparse(ast.parse(text.strip()))


# transformers' experts in decoding: which operand of a batched product is the weight.
# With "batched_mm" each token's expert weight [N, K] is gathered and multiplied with the token as a vector: bmm(weights
# [S, N, K], tokens [S, K, 1]). A product takes the last operand as the weight, whose shape may decide an order; here
# that would be the token. So while transformers' `_batched_linear` runs, each vector is one row of the product with its
# weight, as in the grouped product of prefill. While torch.compile traces, the product is that of any `bmm`: as
# invariant, but in float32 on a CPU not in the bits of the grouped product.

_EXPERTS_TRACED = "transformers experts, compiled: batched products not in the grouped product's bits"


def _with_weights_first(_: Any, original: Any) -> Any:
    @functools.wraps(original)
    def batched_linear(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            note_traced(_EXPERTS_TRACED)
            return original(*args, **kwargs)
        before, inside.weights_first = inside.weights_first, True
        try:
            return original(*args, **kwargs)
        finally:
            inside.weights_first = before

    return batched_linear


# Rotary embeddings whose frequencies depend on the longest request of a step are at risk.
# With the rope types "dynamic" and "longrope" (Phi-3's long contexts) transformers chooses all requests' frequencies by
# the largest position of the whole batch. No kernel can prevent that. Up to the model's original length all requests
# have the original ones, and nothing is counted.


def _counted(_: Any, original: Any) -> Any:
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        kind = getattr(self, "rope_type", None)
        if kind not in ("default", "linear", "llama3", "yarn", None):  # the usual ones need no further check
            given = {**dict(zip(("x", "position_ids", "layer_type"), args, strict=False)), **kwargs}
            layer_type = given.get("layer_type")
            kind = kind.get(layer_type, "") if isinstance(kind, dict) else kind  # by the layers' type
            what = f"transformers rotary embedding {kind!r}: frequencies by the longest request of the step"
            follows = "dynamic" in kind or kind == "longrope"
            if follows and torch.compiler.is_compiling():
                note_traced(what)
            elif follows and _is_beyond(self, layer_type, given.get("position_ids")):
                count("at_risk", what)
        return original(self, *args, **kwargs)

    return forward


def _is_beyond(module: Any, layer_type: str | None, positions: torch.Tensor | None) -> bool:
    """True also where that can't be read."""
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    parameters = parameters.get(layer_type, parameters)
    limit = parameters.get("original_max_position_embeddings") or getattr(module, "original_max_seq_len", None)
    capturing = positions is not None and positions.is_cuda and torch.cuda.is_current_stream_capturing()
    if limit is None or positions is None or capturing or positions.is_meta:
        return True
    return int(positions.max()) + 1 >= limit  # at the limit itself "dynamic" keeps the frequencies of an earlier step


# transformers' RMSNorm modules: one kernel for the whole module.
# A module is recognized by the text of its `forward`, not by its name, because models bring classes of their own,
# mostly copies of three forms. Every other module and every call with a gradient uses the operators that are replaced
# one by one. Both ways must have the same bits (tests/kernels/rows), so that a trainer agrees with a sampler.


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
    """The form of that class's forward; None for an unknown or missing text."""
    return _form(module.__dict__.get("forward"), module.__dict__.get("_norm"))


@functools.cache
def _form(forward: Any, inner: Any) -> Form | None:
    form = _FORMS.get(_text_of(forward))
    return None if form is not None and form.plus_one and _text_of(inner) != _body(_GEMMA_NORM) else form


def _text_of(method: Any) -> str:
    names, text = source_of(method)
    if len(names) != 2:
        return ""
    body = ast.parse(text)
    for node in ast.walk(body):
        if isinstance(node, ast.Name) and node.id == names[1]:
            node.id = "x"
    return ast.unparse(body)


def _fused(cls: type, original: Any) -> Any:
    """A forward that uses the device's kernel, and `original` where that does not apply; None for an unknown text."""
    form = form_of(cls)
    if form is None:
        return None
    eps, round_first, plus_one = form

    @functools.wraps(original)
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not (x.is_cuda or x.is_cpu):
            return original(self, x)
        weight = self._parameters.get("weight")
        # a weight of another class may compute the product itself
        if "norm" not in current().families or type(weight) not in (torch.nn.Parameter, torch.Tensor):
            return original(self, x)
        kernel = _kernel_of("rows", "module_norm", x.device.type)
        with torch._C.DisableTorchFunction():  # a trace sees one module, and no steps of a kernel
            out = kernel(x, weight, getattr(self, eps), round_first=round_first, plus_one=plus_one)
        if out is None:
            return original(self, x)
        count("replaced", "RMSNorm module")
        return out

    return forward


@functools.cache
def _kernel_of(folder: str, name: str, device: str) -> Any:
    return guarded(getattr(importlib.import_module(f"nondet.kernels.{folder}.{device}"), name))


# transformers' rotary embedding: one launch instead of twelve on CUDA, the same bits. It is recognized by the text of a
# model's `apply_rotary_pos_emb` and `rotate_half`. Any other text, device or dtype, or a gradient: the original.

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
        source_of(function) == (("q", "k", "cos", "sin", "unsqueeze_dim"), _TEXT_ROTARY)
        and defaults == (1,)
        and source_of(vars(module).get("rotate_half")) == (("x",), _HALVES)
    )


def rotating(module: Any, original: Any) -> Any:
    """The function by CUDA's kernel, `original` where that does not apply; None for an unknown text."""
    if not rotates(module, original):
        return None

    @functools.wraps(original)
    def apply(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> Any:
        plain = torch.compiler.is_compiling() or torch.is_grad_enabled() or unsqueeze_dim != 1 or q.dim() != 4
        if plain or not q.is_cuda or "pointwise" not in current().families:
            return original(q, k, cos, sin, unsqueeze_dim)
        out = _kernel_of("pointwise", "rotary", "cuda")(q, k, cos, sin)
        if out is None:
            return original(q, k, cos, sin, unsqueeze_dim)
        count("replaced", "rotary embedding")
        return out

    return apply


def _grouped(_: Any, original: Any) -> Any:
    """Whether sdpa gets keys without a copy for each query head: always in a block for training.

    With a mask transformers repeats them. A group's contributions to a key would then be rounded per head and added up
    outside of attention, so that a gradient's bits would depend on whether a batch is padded.
    """

    @functools.wraps(original)
    def grouped(*args: Any, **kwargs: Any) -> bool:
        now = current()
        ours = now.training and "attention" in now.families and torch.is_grad_enabled()
        return bool(ours or original(*args, **kwargs))

    return grouped


# transformers' FP8 layers, whose kernels come from its hub, DeepGEMM or FBGEMM and may be launched past the dispatcher,
# unnoticed. The family "fp8" computes them: activations by 1x128, by row or by the layer's own static scale, then one
# product: weights in blocks of 128x128 or with one scale, experts (a product for each chosen one), FBGEMM's scales of
# rows.


def _fp8(_: Any, original: Any) -> Any:
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        weight = getattr(self, "weight", None)
        if weight is not None and weight.element_size() > 1:
            return original(self, *args, **kwargs)  # a plain product, which is replaced itself
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
    groups = layer.n_groups
    if layer.block_size is None or layer.activation_scale is not None or len(layer.weight_scale_inv) % groups:
        raise Leave("groups without whole blocks, or with a static scale")
    tensors = (layer.weight, layer.weight_scale_inv, layer.bias)
    own = zip(*((None,) * groups if t is None else t.chunk(groups) for t in tensors), strict=True)
    return torch.stack([_fp8_product(layer, x[..., g, :], *given) for g, given in enumerate(own)], -2)


def _fp8_experts(layer: Any, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """x [T, H] by the experts index [T, k]: one product per row, added in float32. The host reads which were chosen."""
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
    Replacement("use_gqa_in_sdpa", _grouped, modules=r"transformers\.integrations\.sdpa_attention$"),
    Replacement("_batched_linear", _with_weights_first, modules=r"transformers\.integrations\.moe$"),
    Replacement("forward", _counted, "RotaryEmbedding"),
    Replacement("forward", _fused, "RMSNorm"),
    *(
        Replacement("forward", _fp8, name, r"transformers\.integrations\.\w*_fp8$")
        for name in (*_FP8_LAYERS, "FbgemmFp8Llama4TextExperts")
    ),
    Replacement(_NAME_ROTARY, rotating),
)
