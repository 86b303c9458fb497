"""What `nondet certify` asks: the questions of each class, and the members that are put to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from nondet.certify.questions import (
    AttentionQuestion,
    Call,
    GroupedQuestion,
    ProductQuestion,
    Question,
    RowsQuestion,
)
from nondet.certify.sizes import SIZES, Sizes
from nondet.errors import UnknownNameError, UserError
from nondet.kernels.classes import INVARIANT, ONE_ROW, NumericsClass, classes_for, operators
from nondet.proof import PRODUCT_INPUTS
from nondet.registry import load_implementation, load_object

__all__ = ["Asked", "Plan", "Wish", "operator_named", "plan"]

_ROWS_KINDS = {"sum": ("order", "wide", "cancel", "outlier", "bell"), "rms_norm": ("wide", "cancel", "outlier", "bell")}
_ROWS_KINDS |= {"mean": _ROWS_KINDS["sum"], "rms_norm_residual": _ROWS_KINDS["rms_norm"]}
_SOFTMAX_KINDS = ("bell", "outlier", "wide")
_ATTENTION_KINDS = ("bell", "wide", "outlier")


@dataclass(frozen=True)
class Wish:
    """What the command line asked for; None means: the default list.

    Attributes:
        operators: Names of operators, underscores or hyphens; empty: all.
        cls: A numerics class.
        members: Names of members, or of families ("triton").
        impls: "package.module:function", put to the class as one more member.
        m: Largest batch.
        layers: (name, K, N) of a model's linear layers.
        full: More shapes, head dims and layouts.
    """

    device: str
    operators: tuple[str, ...] = ()
    cls: str | None = None
    members: tuple[str, ...] = ()
    impls: tuple[str, ...] = ()
    dtypes: tuple[str, ...] | None = None
    m: int | None = None
    k: int | None = None
    n: int | None = None
    layers: tuple[tuple[str, int, int], ...] = ()
    inputs: tuple[str, ...] | None = None
    full: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Asked:
    """One question, the anchor, and the members put to it."""

    question: Question
    anchor: Call
    members: dict[str, Call]


Plan = list[Asked]


def operator_named(name: str, device: str) -> str:
    """The operator that a name on the command line stands for.

    Raises:
        UnknownNameError: no class of the device has it.
    """
    found = name.replace("-", "_")
    if found not in operators(device):
        known = [op.replace("_", "-") for op in operators(device)]
        raise UnknownNameError(f"operator with a numerics class on {device}", name, [*known, "all"])
    return found


def plan(wish: Wish) -> Plan:
    """Everything that will be asked, in order, before anything is.

    Raises:
        UserError: an unknown operator, class, member, dtype or input; sizes that make no sense; nothing to ask.
    """
    _check(wish)
    names = [operator_named(n, wish.device) for n in wish.operators]
    if not names:
        names = operators(wish.device)
        if wish.cls is not None:
            names = [op for op in names if wish.cls in {c.name for c in classes_for(op, wish.device)}]
            names = names or [next(iter(operators(wish.device)))]  # an unknown or foreign class: said just below
            names = names[:1] if wish.impls else names  # a function has one signature
    found: Plan = []
    known: dict[str, None] = {}
    for operator in dict.fromkeys(names):
        for cls in classes_for(operator, wish.device, wish.cls):
            found += _asked(wish, operator, cls, known)
    unknown = [m for m in wish.members if not any(_fits(name, m) for name in known)]
    if unknown:
        raise UnknownNameError("member", unknown[0], known)
    if not found:
        raise UserError("nothing to certify: no class has such dtypes or inputs here", "See `nondet list`.")
    return found


def _asked(wish: Wish, operator: str, cls: NumericsClass, known: dict[str, None]) -> Iterator[Asked]:
    sizes = SIZES[wish.device]
    for dtype in _dtypes(wish, cls, operator, sizes):
        few, every = _members(operator, cls, dtype, wish.device)
        users = {impl: load_implementation(operator, impl, wish.device).call for impl in wish.impls}
        known.update(dict.fromkeys(every))
        chosen = {name: call for name, call in every.items() if any(_fits(name, m) for m in wish.members)}
        anchor = _anchor(operator, cls, wish.device)
        for question, wide in _questions(wish, operator, cls, dtype, sizes):
            members = chosen | users if wish.members or wish.impls else every if wide else few
            if members and question.kinds:
                yield Asked(question, anchor, members)


def _fits(name: str, asked: str) -> bool:
    return name == asked or name.startswith(f"{asked}/")


def _anchor(operator: str, cls: NumericsClass, device: str) -> Call:
    target = cls.anchors[operator]
    return _load(operator, cls.members[operator][INVARIANT] if target == ONE_ROW else target, device)


def _load(operator: str, target: str, device: str) -> Call:
    if target == INVARIANT:
        return load_implementation(operator, INVARIANT, device).call
    call: Call = load_object(target)
    return call


def _members(operator: str, cls: NumericsClass, dtype: str, device: str) -> tuple[dict[str, Call], dict[str, Call]]:
    """Those without families, and all."""
    few: dict[str, Call] = {}
    every: dict[str, Call] = {}
    for name, target in cls.members[operator].items():
        if name.endswith("/*"):
            prefix = name.removesuffix("*")
            every |= {f"{prefix}{one}": call for one, call in load_object(target)(dtype).items()}
            continue
        few[name] = every[name] = _load(operator, target, device)
    return few, every


def _dtypes(wish: Wish, cls: NumericsClass, operator: str, sizes: Sizes) -> list[str]:
    if wish.dtypes is None:
        defaults = sizes.attention_dtypes if operator == "attention" else cls.dtypes
        return [d for d in cls.dtypes if d in defaults]
    return [d for d in wish.dtypes if d in cls.dtypes]


def _questions(
    wish: Wish, operator: str, cls: NumericsClass, dtype: str, sizes: Sizes
) -> Iterator[tuple[Question, bool]]:
    """(question, whether families of members are put to it)."""
    make = partial(_common, wish, operator, cls, dtype)
    if operator == "attention":
        forms = ("prefill", "alone", "decode", "decode alone", *(f"chunks of {c}" for c in sizes.chunks), "ragged")
        heads = [h for h in sizes.heads if wish.full or h.default]
        for h in heads if dtype == heads[0].dtype or wish.full or wish.dtypes else heads[:1]:
            shape = {"B": h.requests, "Hq": h.query, "Hkv": h.key, "T": sizes.tokens, "D": h.dim}
            layout = "GQA" if h.query != h.key else "MHA"
            yield AttentionQuestion(**make(shape, layout, forms, _ATTENTION_KINDS)), True
        return
    if operator == "grouped_matmul":
        batches = _batches(wish, sizes.batches)
        for experts, K, N in sizes.experts:
            shape = {"E": experts, "K": wish.k or K, "N": wish.n or N}
            wide = wish.full or (dtype, K) == (cls.dtypes[0], sizes.experts[0][1])
            yield GroupedQuestion(**make(shape, "experts by columns", batches, PRODUCT_INPUTS)), wide
        return
    if operator not in ("linear", "matmul"):
        kinds = _ROWS_KINDS.get(operator, _SOFTMAX_KINDS)
        widths = (wish.k,) if wish.k else sizes.widths
        for i, width in enumerate(widths):
            batches = _batches(wish, [m for m in sizes.row_batches if m * width <= sizes.row_elements])
            for layout in ("contiguous", "strided") if i == 0 else ("contiguous",):
                yield RowsQuestion(**make({"W": width}, layout, batches, kinds)), True
        return
    yield from _products(wish, operator, dtype, sizes, make)


def _products(
    wish: Wish, operator: str, dtype: str, sizes: Sizes, make: partial[dict[str, Any]]
) -> Iterator[tuple[Question, bool]]:
    if wish.k or wish.n:
        K = wish.k or wish.n or 0
        layers: Iterable[tuple[str, int, int]] = (("", K, wish.n or K),)
    else:
        layers = wish.layers or sizes.layers[dtype]
    layers = list(layers)
    first = layers[0][1:]
    main = dtype == next(iter(sizes.layers))
    if operator == "linear":
        for _, K, N in layers:
            batches = _batches(wish, sizes.batches if main else sizes.few_batches)
            yield ProductQuestion(**make({"K": K, "N": N}, "nt", batches, PRODUCT_INPUTS)), main or wish.full
        forms = [(*first, "nt, bias"), (*first, "nt, strided"), (*sizes.odd, "nt"), (*sizes.odd, "nt, bias")]
        if wish.full:
            forms += [(*first, "nt, offset"), (*first, "nt, strided, bias")]
    else:
        forms = [(*first, "nn"), (*first, "tn"), (*first, "nt"), (*sizes.odd, "nn")]
    given = bool(wish.k or wish.n or wish.layers)
    few = _batches(wish, sizes.few_batches)
    for K, N, layout in forms:
        if not (given and (K, N) == sizes.odd != first):
            yield ProductQuestion(**make({"K": K, "N": N}, layout, few, PRODUCT_INPUTS)), wish.full
    if operator == "matmul":
        K, N = first if given else sizes.batched
        for layout in ("nn", "nt") if wish.full else ("nn",):
            yield ProductQuestion(**make({"B": 4, "K": K, "N": N}, layout, few, PRODUCT_INPUTS)), wish.full


def _common(
    wish: Wish,
    operator: str,
    cls: NumericsClass,
    dtype: str,
    shape: dict[str, int],
    layout: str,
    values: tuple[int | str, ...],
    kinds: tuple[str, ...],
) -> dict[str, Any]:
    asked = kinds if wish.inputs is None else tuple(k for k in kinds if k in wish.inputs)
    return {
        "operator": operator,
        "cls": cls.name,
        "dtype": dtype,
        "device": wish.device,
        "shape": shape,
        "layout": layout,
        "values": values,
        "kinds": asked,
        "one_row": cls.anchors[operator] == ONE_ROW,
        "seed": wish.seed,
    }


def _batches(wish: Wish, known: Iterable[int]) -> tuple[int, ...]:
    """Batch sizes up to --m, which is itself among them."""
    if wish.m is None:
        return tuple(known)
    return tuple(sorted({*(m for m in known if m <= wish.m), wish.m}))


def _check(wish: Wish) -> None:
    from nondet.compare import float_dtypes

    if wish.impls and not wish.operators and wish.cls is None:
        raise UserError("--impl without an operator", "Name the one whose signature it has, as in `certify linear`.")
    for option, value in (("--m", wish.m), ("--k", wish.k), ("--n", wish.n)):
        if value is not None and not 1 <= value <= 2**24:
            raise UserError(f"{option} {value} makes no sense", "Give a size from 1 to 16,777,216.")
    for dtype in wish.dtypes or ():
        names = [str(d).removeprefix("torch.") for d in float_dtypes()]
        if dtype not in names:
            raise UnknownNameError("floating dtype", dtype, names)
    for kind in wish.inputs or ():
        if kind not in PRODUCT_INPUTS:
            raise UnknownNameError("kind of input", kind, PRODUCT_INPUTS)
