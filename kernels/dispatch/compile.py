"""`batch_invariant()` under torch.compile.

The backends "eager", "aot_eager" and "cudagraphs" keep aten's operators, so the replacements are reached as without
compilation. scaled_dot_product_attention and rms_norm are taken apart while a graph is traced, before anything runs;
so the trace is given an operator of ours in their place, which calls the whole one when the graph runs.

Inductor writes kernels of its own: it turns small products into sums, fuses reductions with what surrounds them, and
chooses their order of additions by the sizes that it compiles for. So for graphs compiled inside a context every
product and every reduction that has a replacement becomes a call of ours, which reaches the replacement when it runs.
What inductor still generates is pointwise. It is counted as at risk, once a graph: it is compiled anew for each
specialized shape, and neither what is fused and contracted there nor (on a CPU) the formula of a loop's last elements
is promised to be the same.

Graphs are compiled anew when the outermost context is entered and when it is left: one from outside would bypass it. A
nested one with other families changes nothing in a graph: ours are in it whatever is on, and look that up when it runs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from nondet.kernels.dispatch.exact import reason
from nondet.kernels.dispatch.operators import CERTIFIABLE, COMPOSED, OPERATORS

__all__ = ["install", "traced", "uninstall"]

_Note = Callable[[str], None]

# Replaced on a CPU only; inductor's own code for them is counted with all that is pointwise.
_POINTWISE = frozenset(OPERATORS["pointwise"])
_WHOLE = ("scaled_dot_product_attention", "rms_norm")
_PRIMS_THAT_REDUCE = frozenset({"fft_c2c", "fft_c2r", "fft_r2c", "prod", "sum", "svd", "var"})
_saved: list[Any] = []  # [the compiler's entry as it was], while installed


def install(note: _Note) -> None:
    """Have inductor compile for us, and have everything compiled anew."""
    wrapper = torch._TorchCompileInductorWrapper
    _saved.append(wrapper.__call__)

    def call(self: Any, model: Any, inputs: Any, *, config_patches: dict[str, Any] | None = None) -> Any:
        from torch._inductor.compile_fx import compile_fx
        from torch._inductor.decomposition import select_decomp_table

        kept = _ours()
        table = {op: how for op, how in select_decomp_table().items() if op not in kept}
        patches = {**self.config, **(config_patches or {})}
        theirs = patches.get("post_grad_custom_pre_pass")
        patches["post_grad_custom_pre_pass"] = _pass(note, theirs)
        return compile_fx(model, inputs, config_patches=patches, decompositions=table)

    wrapper.__call__ = call  # type: ignore[method-assign]  # undone by `uninstall`
    _forget_graphs()


def uninstall() -> None:
    """Undo `install`; nothing where nothing is installed."""
    if _saved:
        torch._TorchCompileInductorWrapper.__call__ = _saved.pop()  # type: ignore[method-assign]
        _forget_graphs()


def traced(name: str, original: Any, keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A composed operator on tensors that stand for others: fake ones of a compiler, or a subclass."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    grad = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in args)
    compiler = any(isinstance(x, (FakeTensor, FunctionalTensor)) for x in args)
    if name in _WHOLE and compiler and not grad:
        return _operators()[_overload(name)](*args, **kwargs)
    return original.call_boxed(keyset, *args, **kwargs)


def _forget_graphs() -> None:
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def _overload(name: str) -> Any:
    """torch.ops.aten.mean.dim for "mean.dim"."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


@functools.cache
def _ours() -> dict[Any, str]:
    """aten operators that must not be taken apart: operator -> name."""
    names = [n for family in OPERATORS.values() for n in family if n not in _POINTWISE and n not in COMPOSED]
    return {_overload(n): n for n in (*names, *CERTIFIABLE) if not n.endswith("_")}


@functools.cache
def _operators() -> dict[Any, Any]:
    """aten operator -> one of ours with the same schema, opaque to compilers, that calls it when the graph runs."""
    library = torch.library.Library("nondet", "FRAGMENT")
    _operators_library.append(library)  # its operators live as long as it does
    found = {}
    for op in (*_ours(), *(_overload(n) for n in _WHOLE)):
        name = op._schema.name.partition("::")[2] + ("" if op._overloadname == "default" else f"_{op._overloadname}")
        signature = str(op._schema).partition("(")[2]
        library.define(f"{name}({signature}")
        library.impl(name, functools.partial(_run, op), "CompositeExplicitAutograd")
        fake = _like_first if op in (_overload(n) for n in _WHOLE) else functools.partial(_run, op)
        torch.library.register_fake(f"nondet::{name}", fake, lib=library)
        found[op] = getattr(torch.ops.nondet, name).default
    return found


_operators_library: list[torch.library.Library] = []


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The aten operator, replaced or not, its results contiguous: their strides are promised when the graph is made."""
    out = op(*args, **kwargs)
    return out.contiguous() if isinstance(out, torch.Tensor) else tuple(x.contiguous() for x in out)


def _like_first(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Attention's result has the queries' shape, since keys and values have one head dim; a norm's its input's."""
    return q.new_empty(q.shape)


def _pass(note: _Note, theirs: Any) -> Any:
    """A pass over inductor's graphs: what has a replacement becomes an operator of ours, and what is left is noted."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Pass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            if theirs is not None:
                theirs(graph)
            ours = _operators()
            for node in graph.nodes:
                if node.op == "call_function" and node.target in ours:
                    node.target = ours[node.target]
            for name in sorted(_risky(graph)):
                note(f"{name}: compiled by inductor")
            note("torch.compile: pointwise code generated by inductor")

        def uuid(self) -> Any:
            return None  # inductor then caches nothing on disk: a graph from there would not be looked at

    return Pass()


def _risky(graph: torch.fx.Graph) -> set[str]:
    """Operators of the graph that are none of ours, not pointwise (they are counted together) and not exact."""
    called = (node.target for node in graph.nodes if node.op == "call_function")
    operators = {op for op in called if isinstance(op, torch._ops.OpOverload)}
    return {
        str(op)
        for op in operators
        if (op.namespace == "aten" and torch.Tag.pointwise not in op.tags and not reason(_name(op), "CPU"))
        or (op.namespace == "prims" and _name(op) in _PRIMS_THAT_REDUCE)
    }


def _name(op: torch._ops.OpOverload) -> str:
    """ "mean.dim" for torch.ops.aten.mean.dim."""
    packet = op._schema.name.partition("::")[2]
    return packet if op._overloadname == "default" else f"{packet}.{op._overloadname}"
