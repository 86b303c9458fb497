"""Explicit tables of "module:attribute", and the numerics classes. What computes is imported at first use."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from nondet.core.operator import Operator, OrderClass
from nondet.errors import MisfitError, UnknownNameError, UserError

# The operators' declarations, each an `Operator` in the folder of its kernels, in the order of lists and help.
DECLARATIONS: tuple[str, ...] = (
    "nondet.kernels.matmul.operator:LINEAR",
    "nondet.kernels.matmul.operator:MATMUL",
    "nondet.kernels.matmul.operator:SPLIT_K",
    "nondet.kernels.attention.operator:ATTENTION",
    "nondet.kernels.rows.operator:RMS_NORM",
    "nondet.kernels.rows.operator:RMS_NORM_RESIDUAL",
    "nondet.kernels.rows.operator:LAYER_NORM",
    "nondet.kernels.rows.operator:MEAN",
    "nondet.kernels.rows.operator:SOFTMAX",
    "nondet.kernels.rows.operator:LOG_SOFTMAX",
    "nondet.kernels.rows.operator:LOGSUMEXP",
    "nondet.kernels.rows.operator:CROSS_ENTROPY",
    "nondet.kernels.rows.operator:SUM",
    "nondet.kernels.rows.operator:CUMSUM",
    "nondet.kernels.pointwise.operator:POINTWISE",
    "nondet.kernels.gradients.operator:SOFTMAX_GRADIENT",
    "nondet.kernels.gradients.operator:LOG_SOFTMAX_GRADIENT",
    "nondet.kernels.gradients.operator:SILU_GRADIENT",
    "nondet.kernels.gradients.operator:RMS_NORM_GRADIENT",
    "nondet.kernels.gradients.operator:ATTENTION_GRADIENT",
    "nondet.kernels.experts.operator:GROUPED_MATMUL",
    "nondet.kernels.experts.operator:TOPK",
    "nondet.kernels.experts.operator:INDEX_ADD",
    "nondet.kernels.experts.operator:SCATTER_ADD",
    "nondet.kernels.scaled.operator:SCALED_MATMUL",
    "nondet.kernels.scaled.operator:SCALED_GROUPED_MATMUL",
    "nondet.kernels.scaled.operator:QUANTIZE",
    "nondet.kernels.all_reduce.operator:ALL_REDUCE",
    "nondet.kernels.all_reduce.operator:REDUCE_SCATTER",
    "nondet.kernels.all_reduce.operator:ALL_GATHER",
)

# The operators' float64 references, whose signatures a user's function has to share.
_REFERENCES = "nondet.kernels.reference:"

REPORTERS: dict[str, tuple[str, str]] = {
    ".html": ("nondet.reports.html:render", "one self-contained page"),
    ".md": ("nondet.reports.markdown:render", "markdown that reads well in a pull request"),
    "terminal": ("nondet.reports.terminal:render", "tables in the terminal"),
}


@dataclass(frozen=True)
class LoadedImplementation:
    """One implementation of one operator on one device type; `call` has the signature in `nondet.kernels.reference`."""

    operator: str
    name: str
    call: Callable[..., Any] = field(repr=False)
    stock: bool = False
    invariant: bool = False


def load_object(target: str) -> Any:
    """Import "module:attribute", or what a user's "operator=module:attribute" names."""
    module, _, attribute = target.rpartition("=")[2].partition(":")
    return getattr(importlib.import_module(module), attribute)


def declared() -> dict[str, Operator]:
    """Every declared operator by name, those without implementations of their own among them."""
    return _declared(DECLARATIONS)


@functools.cache
def _declared(targets: tuple[str, ...]) -> dict[str, Operator]:
    by_name: dict[str, Operator] = {}
    for operator in map(load_object, targets):
        if operator.name in by_name:
            raise ValueError(f"declared twice: {operator.name}")
        by_name[operator.name] = operator
    return by_name


def operators() -> dict[str, Operator]:
    """The operators that have implementations, which can be probed, by name."""
    return {name: operator for name, operator in declared().items() if operator.implementations}


def load_probe(name: str) -> Any:
    """The probe of that name. Raises UnknownNameError: no such probe; a close name is suggested."""
    if name not in PROBES:
        raise UnknownNameError("probe", name, [*PROBES, "all"])
    target, _ = PROBES[name]
    operator = declared().get(name.replace("-", "_"))
    return load_object(target)() if operator is None or operator.probe is None else load_object(target).of(operator)


def implementation_names(operator: str, device: str) -> list[str]:
    """Implementations of `operator` that exist on the device type, without the float64 reference."""
    return [i.name for i in operators()[operator].implementations if i.target(device)]


def load_implementation(operator: str, name: str, device: str) -> LoadedImplementation:
    """The implementation of that name, or the user's "package.module:function" or "operator=package.module:function".
    An `UnknownNameError` or `UserError` if there is none on the device, or a user's function does not fit."""
    if ":" in name:
        named, _, theirs = name.rpartition("=")
        if named not in ("", operator):
            raise UserError(f"--impl {name!r} is no {operator}", f"Test {named}, or give {operator}={theirs}.")
        function = _user_function(theirs)
        check_signature(function, operator, f"--impl {theirs!r}")
        return LoadedImplementation(operator, name, function)
    declaration = operators()[operator]
    chosen = declaration.implementation(name)
    if chosen is None:
        raise UnknownNameError(f"implementation of {operator}", name, [i.name for i in declaration.implementations])
    if (target := chosen.target(device)) is None:
        hint = f"It has one on {', '.join(chosen.targets)}."
        raise UserError(f"{operator} has no {name!r} implementation on {device}", hint)
    return LoadedImplementation(operator, name, load_object(target), chosen.stock, chosen.invariant)


@contextmanager
def _current_folder() -> Iterator[None]:
    """Allow a user's own module to be imported from the current folder, but load our own imports first. Otherwise a
    json.py or torch.py in a downloaded model's folder would be executed instead of the real one."""
    for name in ("numpy", "torch", "triton"):
        with suppress(ImportError):
            importlib.import_module(name)
    sys.path.insert(0, "")
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.path.remove("")


def _user_function(target: str) -> Callable[..., Any]:
    try:
        with _current_folder():
            function: Callable[..., Any] = load_object(target)
    except Exception as error:
        hint = "Give package.module:function, importable from the current directory or the environment."
        if ".py:" in target:
            module = target.replace(".py:", ":").replace("/", ".").lstrip(".")
            hint = f"Write {module}, a module's name and no file's."
        what = f"--impl {target!r} can't be imported: {type(error).__name__}: {error}"
        raise UserError(what, hint) from error
    if not callable(function):
        raise UserError(f"--impl {target!r} is of type {type(function).__name__}, not a function", "Name a callable.")
    return function


def check_signature(function: Callable[..., Any], operator: str, who: str) -> None:
    """Refuse a function that can't be called as the operator's float64 reference is, before it fails in every case: a
    `UserError` with the signature that is needed. Without a reference or a readable signature all are accepted."""
    declaration = operators().get(operator)
    if declaration is None or declaration.reference is None or not declaration.reference.startswith(_REFERENCES):
        return
    reference = load_object(declaration.reference)
    wanted = inspect.signature(reference)
    try:
        taken = inspect.signature(function)
    except (TypeError, ValueError):
        return
    needed = [p for p in wanted.parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    try:
        taken.bind(*needed)
    except TypeError:
        given = ", ".join(p.name for p in needed)
        what = f"{who} takes ({', '.join(taken.parameters)}), but {operator} is called with ({given})"
        raise UserError(what, form_of(operator, reference)) from None


def form_of(operator: str, reference: Callable[..., Any]) -> str:
    """How a user writes a function that replaces this operator, as a hint."""
    parameters = inspect.signature(reference).parameters.values()
    arguments = ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters)
    return f"Write it as {operator}({arguments}): {(inspect.getdoc(reference) or '').partition(chr(10))[0]}"


def misfit(function: Callable[..., Any], operator: str, who: str, operands: Sequence[Any], fault: str) -> MisfitError:
    """The error for a function that takes other operands than the operator's, as its first call showed."""
    reference = load_object(operators()[operator].reference or "")
    names = list(inspect.signature(reference).parameters)
    given = ", ".join(f"{n} {list(getattr(x, 'shape', []))}" for n, x in zip(names, operands, strict=False))
    try:
        taken = f" takes ({', '.join(inspect.signature(function).parameters)}), and"
    except (TypeError, ValueError):
        taken = ""
    what = f"{who}{taken} can't be called as {operator} is, with {given}: {fault}"
    return MisfitError(what, form_of(operator, reference))


PROBES: dict[str, tuple[str, str]] = {
    "float-sum": ("nondet.probes.additions:FloatSum", "only the order of a sum: 102 results from one list of numbers"),
    "matmul": ("nondet.probes.matmul:Matmul", "matmul rows while batch size, position, neighbours and call order vary"),
    "split-k": ("nondet.probes.additions:SplitK", "one product with K cut into 1, 2, 4 ... splits, ordered and atomic"),
    "grouped-matmul": (
        "nondet.probes.grouped_matmul:GroupedMatmul",
        "tokens at their experts while other tokens, their experts and positions change",
    ),
    "scaled-matmul": (
        "nondet.probes.scaled_matmul:ScaledMatmul",
        "FP8 products with scales, and what one scale for a whole batch does",
    ),
    "attention": (
        "nondet.probes.attention:Attention",
        "decode in a batch, prefill, chunks and other concurrent requests, per backend",
    ),
    **{  # of operators over rows that have none of their own: their declarations say what to test
        name.replace("_", "-"): ("nondet.probes.rows:RowProbe", f"one row of {name} while the number of rows changes")
        for name, operator in operators().items()
        if operator.probe is not None
    },
    "reduction-order": (
        "nondet.probes.reduction_order:ReductionOrder",
        "in which order row 0 of a sum or product is added: its reduction tree, proven by predicting bits",
    ),
    "reduction": ("nondet.probes.rows:Reduction", "one row of sum and mean while the number of rows changes"),
    "atomics": ("nondet.probes.additions:Atomics", "index_add and scatter_add, the same call again and again"),
    "backward": (
        "nondet.probes.backward:Backward",
        "gradients while batch and micro-batch change, and run to run: attention, norms, softmaxes, weights",
    ),
    "all-reduce": (
        "nondet.probes.all_reduce:AllReduce",
        "one row of a sum over ranks while the message's size, its position, the run and the rank change",
    ),
    "pointwise": ("nondet.probes.pointwise:Pointwise", "one element of a pointwise op in a vector body or scalar tail"),
}

# Operator -> the probe that tests it, where the two have different names; `nondet probe` takes both.
OPERATOR_PROBES: dict[str, str] = {
    "linear": "matmul",
    "scaled_grouped_matmul": "scaled-matmul",
    "quantize": "scaled-matmul",
    "sum": "reduction",
    "mean": "reduction",
    "index_add": "atomics",
    "scatter_add": "atomics",
}


@dataclass(frozen=True, kw_only=True)
class NumericsClass(OrderClass):
    """An order class with everything that claims it. A claim counts only where it was proven: hardware and libraries
    decide whether a chain of matrix instructions really adds in the order in which its source is written."""

    anchors: Mapping[str, str]  # operator -> target, or `ONE_ROW`
    members: Mapping[str, Mapping[str, str]]  # operator -> name -> target, or `INVARIANT`


def classes() -> dict[str, NumericsClass]:
    """Every class that some declared operator claims, CUDA's first, in the order of the declarations."""
    claims = [(operator.name, claim) for operator in declared().values() for claim in operator.claims]
    orders = {claim.order.name: claim.order for _, claim in claims}
    return {
        name: NumericsClass(
            **asdict(order),
            anchors={operator: claim.anchor for operator, claim in claims if claim.order.name == name},
            members={operator: claim.members for operator, claim in claims if claim.order.name == name},
        )
        for name, order in sorted(orders.items(), key=lambda item: item[1].device != "cuda")
    }


def class_operators(device: str) -> list[str]:
    """Every operator that some class of the device has members for."""
    return list(dict.fromkeys(op for c in classes().values() if c.device == device for op in c.members))


def classes_for(operator: str, device: str, name: str | None = None) -> list[NumericsClass]:
    """The classes that an operator has on a device, or the named one; a `UserError` if it has none."""
    fitting = [c for c in classes().values() if c.device == device and operator in c.members]
    if name is None:
        return fitting
    if name not in classes():
        raise UnknownNameError("numerics class", name, classes())
    chosen = classes()[name]
    if chosen.device != device:
        known = f"On {device} {operator} has: {', '.join(c.name for c in fitting)}." if fitting else ""
        raise UserError(f"class {name!r} belongs to {chosen.device}, and this is {device}", known or "Try --device.")
    if operator not in chosen.members:
        raise UserError(f"class {name!r} has no {operator}", f"It has: {', '.join(chosen.members)}.")
    return [chosen]
