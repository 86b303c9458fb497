"""The functions registered for aten's operators, also under torch.compile. Made once in a process, never changed.

Each takes the dispatcher's key set and the operator's own arguments, and ends in a replacement or in the original.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from nondet.core.certificates import certificates
from nondet.core.compare import identical
from nondet.core.launch import proving
from nondet.core.proof import distinct, operands_key, settings, switches
from nondet.errors import UserError, one_line
from nondet.kernels.dispatch.again import ALIGNMENT, Binder
from nondet.kernels.dispatch.differentiable import Differentiable, has_gradient, needs_gradient
from nondet.kernels.dispatch.operators import CERTIFIABLE, COMPOSED, EXEMPT, OPERATORS, reason
from nondet.kernels.dispatch.state import (
    MOVED,
    Active,
    Kernels,
    Leave,
    count,
    current,
    floating,
    guarded,
    in_parts,
    inside,
    label,
    operator_of,
    over_batch,
    padded_in_front,
)

# Stock operators over one axis without a kernel of ours are proven at first use, for each shape, or at risk.
# The claim: each row has, in this batch, the bits that it has solo. The proof compares the bits of generated rows of
# the same shape, dtype and layout with those of single rows. A library chooses its kernel by exactly these, so the
# claim holds until the driver or torch changes (a certificate's machine key). It does not cover inputs that a kernel
# would treat differently; the inputs have wide exponents, cancel, and (for sort) are full of ties.

_MEMBER = "aten"
_ROWS_COMPARED = 48
_RUNNING = frozenset({"cumprod", "cumsum", "_logcumsumexp"})


def proven(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, str]:
    """Whether stock `name` gives each row its own bits at the shape of args[0], and why. At risk if a capture forbids
    proof.
    """
    x: torch.Tensor = args[0]
    device = x.device.type
    decisions, key = current().decisions, call_key(name, args, kwargs, ALIGNMENT[device], switches(device))
    form: _Form | None = decisions.get(key)
    if form is None:
        form = _form(name, x, args, kwargs)
        _decide(decisions, key, form)
    if form.reason:
        return form.holds, form.reason
    if form.axis == 0 and (mixes := over_batch(x, 0)):
        return False, mixes
    if name in _RUNNING and padded_in_front(x, form.axis):
        return False, MOVED
    known = certificates(device)
    standing = known.standing(_MEMBER, form.key)
    if standing is None:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return False, "not proven before a CUDA graph was captured"
        with proving():
            different = _first_different_row(name, x, form.axis, args[1:], kwargs)
        standing = different is None
        rows = min(_ROWS_COMPARED, x.numel() // max(1, x.shape[form.axis]))
        evidence = f"{rows} rows in the batch and alone: " + ("equal bits" if standing else f"row {different} differs")
        known.record(_MEMBER, form.key, standing, evidence)
    return (True, "each row as alone") if standing else (False, "a row's bits are not those that it has alone")


class _Form(NamedTuple):
    """The key of a call's certificate, or the answer and its reason; from all but the numbers. It is kept with the
    decisions, because a key in words takes far longer to build than to find.
    """

    axis: int = 0
    key: str = ""
    holds: bool = False
    reason: str = ""


def _form(name: str, x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Form:
    place = 2 if name == "linalg_vector_norm" else 1
    dim = args[place] if len(args) > place else kwargs.get("dim", -1 if name.startswith("sort") else None)
    if isinstance(dim, (list, tuple)) and len(dim) == 1:
        dim = dim[0]
    if not isinstance(dim, int) or not x.dim():
        return _Form(reason="over several axes, or over all")
    if not x.numel():
        return _Form(holds=True, reason="each row as alone")  # there is none
    if not distinct(x):
        return _Form(reason="elements that share a place in memory")
    axis = dim % x.dim()
    rest = [str(v) for v in (*args[1:], *sorted(kwargs.items())) if not isinstance(v, torch.Tensor)]
    key = operands_key(f"row-alone {name}", (x,), [f"axis={axis}", *rest, *settings(x.device.type)])
    return _Form(axis, key)


def _first_different_row(
    name: str, x: torch.Tensor, axis: int, rest: tuple[Any, ...], kwargs: dict[str, Any]
) -> int | None:
    """The first generated row whose bits in the batch differ from its solo bits; None where all agree."""
    operator = operator_of(name)
    span = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    batch = x.new_empty(span).as_strided(x.shape, x.stride()).copy_(_inputs(name, x))  # x's own layout, dense or not
    together = _tuple(operator(batch, *rest, **kwargs))
    others = [d for d in range(x.dim()) if d != axis]
    rows = x.numel() // max(1, x.shape[axis])
    for row in sorted({i * rows // _ROWS_COMPARED for i in range(_ROWS_COMPARED)} | {max(0, rows - 1)}):
        place: list[slice] = [slice(None)] * x.dim()
        left = row
        for d in reversed(others):
            place[d] = slice(left % x.shape[d], left % x.shape[d] + 1)
            left //= x.shape[d]
        alone = _tuple(operator(batch[tuple(place)].contiguous(), *rest, **kwargs))
        for part, whole in zip(alone, together, strict=True):
            kept = place if whole.dim() == x.dim() else [p for d, p in enumerate(place) if d != axis]
            own = whole[tuple(kept)].contiguous()
            if not identical(own, part.contiguous().view(own.shape)):
                return row
    return None


def _inputs(name: str, x: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(x.numel())
    drawn = torch.rand(x.shape, generator=generator, dtype=torch.float32)
    if name.startswith("sort"):
        return (drawn * 8).floor()
    if "prod" in name:
        return 0.5 + drawn
    signs = torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
    return signs * drawn * torch.exp2(torch.randint(-8, 8, x.shape, generator=generator).float())


def _tuple(out: Any) -> tuple[torch.Tensor, ...]:
    return (out,) if isinstance(out, torch.Tensor) else tuple(out)


# Where an operator's schema has a tensor and a number is passed (`x % 2.0`), torch gives Python functions the number.
# The original kernel takes only tensors, so it is wrapped again, without axes. Where x has axes the number does not
# influence the result's dtype, as in torch; elsewhere it gets the dtype that torch chooses.

_WIDEST = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def accepting_numbers(qualified: str, original: Any) -> Callable[..., Any]:
    """original.call_boxed for "aten::remainder.Tensor", or any operator, also with numbers instead of tensors."""
    call: Callable[..., Any] = original.call_boxed
    namespace, _, name = qualified.partition("::")
    operator = operator_of(name, namespace)
    arguments = () if operator is None else operator._schema.arguments
    places = frozenset(i for i, a in enumerate(arguments) if not a.kwarg_only and str(a.type) == "Tensor")
    if len(places) < 2:  # with one tensor no number is possible: its device would be unknown
        return call

    def stock(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if any(place < len(args) and args[place].__class__ in _WIDEST for place in places):
            args = _with_tensors(args, places)
        return call(keyset, *args, **kwargs)

    return stock


def _with_tensors(args: tuple[Any, ...], places: frozenset[int]) -> tuple[Any, ...]:
    first = next(x for x in args if isinstance(x, torch.Tensor))
    given = list(args)
    for place in places:
        kind = args[place].__class__ if place < len(args) else None
        if kind in _WIDEST:
            number, ends_in = torch.tensor(args[place], dtype=_WIDEST[kind]), torch.result_type(first, args[place])
            given[place] = number if first.dim() and ends_in == first.dtype else number.to(ends_in)
    return tuple(given)


# `batch_invariant()` under torch.compile.
# The backends "eager", "aot_eager" and "cudagraphs" keep aten's operators, so the replacements are reached as without
# compilation. scaled_dot_product_attention and rms_norm are decomposed while a graph is traced; so the trace gets an
# operator of ours instead, which calls the whole one when the graph runs.
#
# Inductor turns small products into sums, fuses reductions with what surrounds them, and chooses their order by the
# sizes that it compiles for. So in graphs compiled inside a block every product and every reduction that has a
# replacement becomes a call of ours. The rest is pointwise, and counted as at risk once per graph: each specialized
# shape is compiled again, and neither fusion and contraction nor (on a CPU) the formula of a loop's last elements is
# guaranteed to be the same.
#
# Graphs are compiled again when the outermost block is entered and left: one from outside would bypass it. Nested
# blocks change no graph.

_Note = Callable[[str], None]

# Replaced only on a CPU; inductor's own code for them is counted with all that is pointwise.
_POINTWISE = OPERATORS["pointwise"]
_WHOLE = ("scaled_dot_product_attention", "rms_norm")
_PRIMS_THAT_REDUCE = frozenset({"fft_c2c", "fft_c2r", "fft_r2c", "prod", "sum", "svd", "var"})
_installed: list[tuple[Any, _Note]] = []  # [(the compiler's entry as it was, who is notified)], while installed


def install_compile(note: _Note) -> None:
    """Make inductor compile our operators, and compile everything again."""
    wrapper = torch._TorchCompileInductorWrapper
    if not _installed:  # else an interrupt ended the last block's end, and the entry is ours
        _installed.append((wrapper.__call__, note))

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


def uninstall_compile() -> None:
    """Undo `install`; nothing where nothing is installed."""
    if _installed:
        torch._TorchCompileInductorWrapper.__call__ = _installed[0][0]  # type: ignore[method-assign]
        _installed.clear()
        _forget_graphs()


def traced(name: str, original: Any, keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A composed operator on a compiler's fake tensors, or on a tensor subclass."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    grad = needs_gradient(*args)
    compiler = any(isinstance(x, (FakeTensor, FunctionalTensor)) for x in args)
    if name in _WHOLE and compiler:
        if not grad and (name == "rms_norm" or _of_a_decoder(*args[:3])):
            return _operators()[operator_of(name)](*args, **kwargs)
        for _, note in _installed:
            note(f"{name}: taken apart by torch.compile, {'as a gradient is asked for' if grad else 'for its shapes'}")
    return original.call_boxed(keyset, *args, **kwargs)


def _forget_graphs() -> None:
    if "torch._dynamo" in sys.modules:
        # only if a frame was compiled since the last reset: on CUDA the first one imports inductor, which takes 1.5 s
        if getattr(torch._dynamo.convert_frame, "FRAME_COUNTER", 1):
            torch._dynamo.reset()
        for op in map(operator_of, _WHOLE):  # a trace caches whether an operator is decomposed, and is not notified
            op._dispatch_cache.clear()


@functools.cache
def _ours() -> dict[Any, str]:
    names = [n for family in OPERATORS.values() for n in family if n not in _POINTWISE and n not in COMPOSED]
    return {operator_of(n): n for n in (*names, *CERTIFIABLE) if not n.endswith("_")}


@functools.cache
def _operators() -> dict[Any, Any]:
    """aten operator -> one of ours with the same schema, opaque to compilers, that calls it when the graph runs."""
    library = torch.library.Library("nondet", "FRAGMENT")
    _operators_library.append(library)  # its operators live as long as it does
    found = {}
    for op in (*_ours(), *(operator_of(n) for n in _WHOLE)):
        name = op._schema.name.partition("::")[2] + ("" if op._overloadname == "default" else f"_{op._overloadname}")
        signature = str(op._schema).partition("(")[2]
        library.define(f"{name}({signature}")
        library.impl(name, functools.partial(_run, op), "CompositeExplicitAutograd")
        fake = _like_first if op in (operator_of(n) for n in _WHOLE) else functools.partial(_run, op)
        torch.library.register_fake(f"nondet::{name}", fake, lib=library)
        found[op] = getattr(torch.ops.nondet, name).default
    return found


_operators_library: list[torch.library.Library] = []


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The aten operator, replaced or not, with contiguous results: the graph was made for these strides."""
    out = op(*args, **kwargs)
    if isinstance(out, torch.Tensor):
        return out.contiguous()
    return tuple(None if x is None else x.contiguous() for x in out)  # an unneeded gradient is None


def _of_a_decoder(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    if not q.dim() == k.dim() == v.dim() == 4:
        return False
    return q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1] <= q.shape[1] and v.shape[3] == q.shape[3]


def _like_first(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return q.new_empty(q.shape)


def _pass(note: _Note, theirs: Any) -> Any:
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
            return None  # inductor then caches nothing on disk: a graph from there would skip this pass

    return Pass()


def _risky(graph: torch.fx.Graph) -> set[str]:
    """Operators of the graph that are not ours, not pointwise (they are counted together) and not exact."""
    called = (node.target for node in graph.nodes if node.op == "call_function")
    operators = {op for op in called if isinstance(op, torch._ops.OpOverload)}
    return {
        str(op)
        for op in operators
        if (op.namespace == "aten" and torch.Tag.pointwise not in op.tags and not reason(_name(op), "CPU"))
        or (op.namespace == "prims" and _name(op) in _PRIMS_THAT_REDUCE)
    }


def _name(op: torch._ops.OpOverload) -> str:
    packet = op._schema.name.partition("::")[2]
    return packet if op._overloadname == "default" else f"{packet}.{op._overloadname}"


_PLAIN = _TENSOR, _PARAMETER = torch.Tensor, torch.nn.Parameter


def _keys(*names: str) -> int:
    """Bits of a dispatch key set that one of these tensors sets and no dense one does."""
    found = 0
    for name in names:
        found |= torch._C.DispatchKeySet(torch._C._dispatch_key_parse(name)).raw_repr()
    return found & ~torch._C.DispatchKeySet(torch._C.DispatchKey.CPU).raw_repr()


# A composed operator is called before torch materializes its tensors: one may be marked as negated, and one may have no
# memory of its own. For all other operators torch does that.
_NEGATED = _keys("Negative")
_NOT_DENSE = _keys("ZeroTensor", "SparseCPU", "SparseCsrCPU", "NestedTensorCPU", "QuantizedCPU", "MkldnnCPU")
_UNUSUAL = _NEGATED | _NOT_DENSE


def replacing(
    name: str,
    family: str,
    kernels: Callable[[], Kernels],
    original: Any,
    replacement: Callable[..., Any],
    binder: Binder | None = None,
) -> Callable[..., Any]:
    """Compute by `replacement` while `family` is on; else, or where it declines, run the original and count it.

    Args:
        binder: What it binds is called for later calls of the same `call_key`; None where there is nothing shorter.
    """
    composed, stock, keyed = name in COMPOSED, original.call_boxed, binder is not None
    bind, settings = (None, tuple) if binder is None else binder
    first = _first(name, family, kernels, original, replacement, bind)

    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if inside.active:
            return stock(keyset, *args, **kwargs)
        if composed and (unusual := keyset.raw_repr() & _UNUSUAL):
            if unusual & _NEGATED:
                args, kwargs = tuple(map(_resolved, args)), {key: _resolved(value) for key, value in kwargs.items()}
            if unusual & _NOT_DENSE:
                return _not_dense(name, stock, keyset, args, kwargs)
        now = current()
        key: tuple[object, ...] = ()
        if keyed and family in now.families:
            key = call_key(name, args, kwargs, ALIGNMENT["cuda"], settings())
            decided = now.decisions.get(key)
            if decided is not None:
                inside.active = True
                try:
                    out = decided(*args, **kwargs)
                finally:
                    inside.active = False
                for coverage in now.coverages:
                    coverage.add("replaced", name)
                return out
        return first(now, key, keyset, args, kwargs)

    return run


def _first(
    name: str,
    family: str,
    kernels: Callable[[], Kernels],
    original: Any,
    replacement: Callable[..., Any],
    bind: Callable[..., Callable[..., Any] | None] | None,
) -> Callable[..., Any]:
    """What runs a call that nothing is decided of: by the replacement, which checks everything; or it is left."""
    composed, stock, exempt = name in COMPOSED, original.call_boxed, EXEMPT.get(name)
    counted_by_parts = name == "linear"  # made of products, which say themselves what became of them
    bound = None if bind is None else guarded(bind)

    @guarded
    def computed(gradient: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if gradient:
            return replacement(Differentiable(kernels()), *args, **kwargs)
        if composed or not torch.is_grad_enabled():  # no gradient is needed of a composed one
            return replacement(kernels(), *args, **kwargs)
        with torch.no_grad():  # a gradient, if any, is recorded by the caller, for the operator as a whole
            return replacement(kernels(), *args, **kwargs)

    def left(now: Active, keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return in_parts(now, stock, keyset, *args, **kwargs) if composed else stock(keyset, *args, **kwargs)

    def run(now: Active, key: tuple[object, ...], keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not composed and not now.coverages:  # the block has ended
            return stock(keyset, *args, **kwargs)
        empty, stands_for_others = _kinds(args)
        if empty or (exempt is not None and exempt(*args, **kwargs)):
            return left(now, keyset, args, kwargs)  # there is nothing to count
        if composed and stands_for_others:
            return traced(name, original, keyset, args, kwargs)
        how, reason, fault = "at_risk", "", None
        if family in now.families:
            how, gradient = "left", _gradient(args) if composed else ""
            if gradient and not (gradient == "a gradient" and now.training and has_gradient(name, *args)):
                reason = f"{gradient} is asked for, so its bits may not be those without one"
            else:
                try:
                    out = computed(bool(gradient), args, kwargs)
                except (Leave, RuntimeError, ValueError, IndexError) as error:
                    reason, fault = _why(error)
                else:
                    for coverage in now.coverages:
                        coverage.add("replaced", name)
                    if key and bound is not None and (decision := bound(*args, **kwargs)) is not None:
                        _decide(now.decisions, key, decision)
                    return out
        out = left(now, keyset, args, kwargs)
        if fault is not None:
            _warn_of(f"aten::{name}", fault)
        if (fault is not None or not counted_by_parts) and floating(args, kwargs, out):  # integers are exact
            count(how, label(name, args, reason))
        return out

    return run


def _why(error: Exception) -> tuple[str, Exception | None]:
    """(why a call is left, the error if it is a fault of ours); an error that is meant for the user is raised."""
    if isinstance(error, UserError):
        raise error
    if isinstance(error, (Leave, NotImplementedError)):  # launchers raise the latter for what they lack
        return str(error), None
    # of bad arguments the original raises, too
    return f"{type(error).__name__} in our kernel: {one_line(str(error), 200)}", error


def _not_dense(name: str, stock: Callable[..., Any], keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = in_parts(current(), stock, keyset, *args, **kwargs)
    if name != "linear":  # its products say themselves what became of them
        count("left", label(name, args, "a tensor that is not dense"))
    return out


def _resolved(value: Any) -> Any:
    """A negated tensor, materialized; anything else unchanged."""
    return value.resolve_neg() if isinstance(value, torch.Tensor) else value


def _warn_of(qualified: str, error: Exception) -> None:
    """Once per operator and error: stock accepted what our kernel failed at, so it is our fault, or memory."""
    said = (qualified, type(error).__name__)
    if said not in _warned:
        _warned.add(said)
        warnings.warn(
            f"nondet: {qualified} was left to torch, since the batch-invariant kernel failed: "
            f"{type(error).__name__}: {one_line(str(error), 200)}",
            RuntimeWarning,
            stacklevel=3,
        )


_warned: set[tuple[str, str]] = set()


def _kinds(args: tuple[Any, ...]) -> tuple[bool, bool]:
    """(a tensor is empty, so torch's own shapes, constants and errors apply; one is a tracer's or quantized)"""
    empty = stands_for_others = False
    for x in args:  # one loop, since this runs at every call
        if isinstance(x, torch.Tensor):
            empty = empty or not x.numel()
            stands_for_others = stands_for_others or type(x) not in _PLAIN
    return empty, stands_for_others


_DECISIONS_KEPT = 4096
_NUMBERS = frozenset({type(None), bool, int, float, torch.dtype})


def call_key(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], alignment: int, settings: object
) -> tuple[object, ...]:
    """All of a call but the numbers in its tensors, and `settings`; () where a gradient is needed, or for arguments of
    other kinds. `alignment`: how many bytes of an address decide, a power of two.
    """
    if forward_ad._current_level >= 0:
        return ()
    recorded, low = torch.is_grad_enabled(), alignment - 1
    key: list[object] = [name, settings]
    for x in (*args, *kwargs.values()) if kwargs else args:
        kind = type(x)
        if kind is _TENSOR or kind is _PARAMETER:
            if recorded and x.requires_grad:
                return ()
            key += (x.dtype, x.shape, x.stride(), x.data_ptr() & low, x.get_device())
        elif kind in _NUMBERS:
            key.append(x)
        elif kind is list:
            key.append((*x,))
        else:
            return ()
    key += kwargs
    return tuple(key)


def _decide(decisions: dict[tuple[object, ...], Any], key: tuple[object, ...], decision: object) -> None:
    if len(decisions) >= _DECISIONS_KEPT:
        decisions.clear()
    if key:
        decisions[key] = decision


def _gradient(args: tuple[Any, ...]) -> str:
    """Which gradient of a composed operator is needed, forward or backward: our whole operators have neither.

    Left to torch, attention is torch's, and a norm is made of its replaced parts, which round in between: both may have
    different bits from those without a gradient. So a trainer does not compute what a sampler did.
    """
    if forward_ad._current_level >= 0:
        return "a forward gradient"
    return "a gradient" if needs_gradient(*args) else ""


def watching(qualified: str, original: Any, matters: Callable[..., bool | str] | None = None) -> Callable[..., Any]:
    """Run the original; count it as at risk if it computes floating point and `matters` (None: always) is true."""
    name = qualified.removeprefix("aten::")
    stock = accepting_numbers(qualified, original)

    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if inside.active or not current().coverages:
            return stock(keyset, *args, **kwargs)
        out = stock(keyset, *args, **kwargs)
        why = matters is None or matters(*args, **kwargs)
        if why and floating(args, kwargs, out):
            count("at_risk", label(name, args, "" if why is True else why))
        return out

    return run


def certifying(name: str, original: Any) -> Callable[..., Any]:
    """Run the original, and count whether it is proven to give each row its own bits."""
    stock = original.call_boxed

    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if inside.active or not current().coverages:
            return stock(keyset, *args, **kwargs)
        if floating(args, kwargs, None):
            inside.active = True
            try:
                with torch.no_grad():
                    holds, reason = proven(name, args, kwargs)
            finally:
                inside.active = False
            count("certified" if holds else "at_risk", label(name, args, reason))
        return stock(keyset, *args, **kwargs)

    return run


# torch.compile must not trace these functions: in a frame that it leaves to Python (a graph break within `try` or
# `with`) its tracer would look at each function that is called.
_eval_frame = torch._C._dynamo.eval_frame
_AS_IT_IS = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)
for _maker in (replacing, accepting_numbers, watching, certifying):
    for _code in filter(inspect.iscode, _maker.__code__.co_consts):
        _eval_frame.set_code_exec_strategy(_code, _AS_IT_IS)
