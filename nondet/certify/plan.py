"""What `nondet certify` asks: the questions of each class, and the members that are put to them.

Both stand in the operators' declarations: `Operator.questions` says at which sizes, `Operator.claims` who is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from nondet.certify.questions import (
    AttentionQuestion,
    Call,
    GroupedQuestion,
    ProductQuestion,
    Question,
    RowsQuestion,
)
from nondet.core.operator import (
    INVARIANT,
    ONE_ROW,
    AttentionForm,
    GroupedForm,
    Layer,
    ProductForm,
    QuestionForm,
    RowForm,
)
from nondet.core.proof import PRODUCT_INPUTS
from nondet.core.registry import NumericsClass, class_operators, classes_for, declared, load_implementation, load_object
from nondet.errors import UnknownNameError, UserError

__all__ = ["Assignment", "Wish", "operator_named", "plan"]


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
class Assignment:
    """One question, the anchor, and the members put to it."""

    question: Question
    anchor: Call
    members: dict[str, Call]


def operator_named(name: str, device: str) -> str:
    """The operator that a name on the command line stands for.

    Raises:
        UnknownNameError: no class of the device has it.
    """
    operator = name.replace("-", "_")
    if operator not in class_operators(device):
        known = [op.replace("_", "-") for op in class_operators(device)]
        raise UnknownNameError(f"operator with a numerics class on {device}", name, [*known, "all"])
    return operator


def plan(wish: Wish) -> list[Assignment]:
    """Everything that will be asked, in order, before anything is.

    Raises:
        UserError: an unknown operator, class, member, dtype or input; sizes that make no sense; nothing to ask.
    """
    _check(wish)
    names = [operator_named(n, wish.device) for n in wish.operators]
    if not names:
        names = class_operators(wish.device)
        if wish.cls is not None:
            names = [op for op in names if wish.cls in {c.name for c in classes_for(op, wish.device)}]
            names = names or [
                next(iter(class_operators(wish.device)))
            ]  # an unknown or foreign class: refused just below
            names = names[:1] if wish.impls else names  # a function has one signature
    assignments: list[Assignment] = []
    known: dict[str, None] = {}
    for operator in dict.fromkeys(names):
        for cls in classes_for(operator, wish.device, wish.cls):
            assignments += _assignments(wish, operator, cls, known)
    unknown = [m for m in wish.members if not any(_fits(name, m) for name in known)]
    if unknown:
        raise UnknownNameError("member", unknown[0], known)
    if not assignments:
        raise UserError("nothing to certify: no class has such dtypes or inputs here", "See `nondet list`.")
    return assignments


def _assignments(wish: Wish, operator: str, cls: NumericsClass, known: dict[str, None]) -> Iterator[Assignment]:
    form = declared()[operator].questions[wish.device]
    for dtype in _dtypes(wish, cls, form):
        few, every = _members(operator, cls, dtype, wish.device)
        users = {impl: load_implementation(operator, impl, wish.device).call for impl in wish.impls}
        known.update(dict.fromkeys(every))
        chosen = {name: call for name, call in every.items() if any(_fits(name, m) for m in wish.members)}
        anchor = _anchor(operator, cls, wish.device)
        for question, wide in _FORMS[type(form)](_Topic(wish, operator, cls, dtype), form):
            members = chosen | users if wish.members or wish.impls else every if wide else few
            if members and question.kinds:
                yield Assignment(question, anchor, members)


def _fits(name: str, pattern: str) -> bool:
    return name == pattern or name.startswith(f"{pattern}/")


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
            every |= {f"{prefix}{tile}": call for tile, call in load_object(target)(dtype).items()}
            continue
        few[name] = every[name] = _load(operator, target, device)
    return few, every


def _dtypes(wish: Wish, cls: NumericsClass, form: QuestionForm) -> list[str]:
    chosen = wish.dtypes if wish.dtypes is not None else form.dtypes or cls.dtypes
    return [d for d in (chosen if wish.dtypes is not None else cls.dtypes) if d in cls.dtypes and d in chosen]


@dataclass(frozen=True)
class _Topic:
    """What all questions about one operator, class and dtype share."""

    wish: Wish
    operator: str
    cls: NumericsClass
    dtype: str

    def about(
        self, shape: dict[str, int], layout: str, values: tuple[int | str, ...], kinds: tuple[str, ...]
    ) -> dict[str, Any]:
        """The fields that every form of question has."""
        wanted = self.wish.inputs
        return {
            "operator": self.operator,
            "cls": self.cls.name,
            "dtype": self.dtype,
            "device": self.wish.device,
            "shape": shape,
            "layout": layout,
            "values": values,
            "kinds": kinds if wanted is None else tuple(k for k in kinds if k in wanted),
            "one_row": self.cls.anchors[self.operator] == ONE_ROW,
            "seed": self.wish.seed,
        }


_Questions = Iterator[tuple[Question, bool]]  # a question, and whether families of members are put to it


def _attention(topic: _Topic, form: AttentionForm) -> _Questions:
    wish = topic.wish
    values = ("prefill", "alone", "decode", "decode alone", *(f"chunks of {c}" for c in form.chunks), "ragged")
    heads = [h for h in form.heads if wish.full or h.default]
    for h in heads if topic.dtype == heads[0].dtype or wish.full or wish.dtypes else heads[:1]:
        shape = {"B": h.requests, "Hq": h.query, "Hkv": h.key, "T": form.tokens, "D": h.dim}
        layout = "GQA" if h.query != h.key else "MHA"
        yield AttentionQuestion(**topic.about(shape, layout, values, form.kinds)), True


def _grouped(topic: _Topic, form: GroupedForm) -> _Questions:
    wish = topic.wish
    batches = _batches(wish, form.batches)
    for experts, K, N in form.experts:
        shape = {"E": experts, "K": wish.k or K, "N": wish.n or N}
        wide = wish.full or (topic.dtype, K) == (topic.cls.dtypes[0], form.experts[0][1])
        yield GroupedQuestion(**topic.about(shape, "experts by columns", batches, PRODUCT_INPUTS)), wide


def _rows(topic: _Topic, form: RowForm) -> _Questions:
    wish = topic.wish
    for i, width in enumerate((wish.k,) if wish.k else form.widths):
        batches = _batches(wish, [m for m in form.batches if m * width <= form.elements])
        for layout in ("contiguous", "strided") if i == 0 else ("contiguous",):
            shared = topic.about({"W": width}, layout, batches, form.kinds)
            yield RowsQuestion(**shared, outlier_scale=form.outlier_scale), True


def _products(topic: _Topic, form: ProductForm) -> _Questions:
    wish = topic.wish
    if wish.k or wish.n:
        K = wish.k or wish.n or 0
        layers: tuple[Layer, ...] = (("", K, wish.n or K),)
    else:
        layers = wish.layers or form.layers[topic.dtype]
    first = layers[0][1:]
    leading = topic.dtype == next(iter(form.layers))

    def question(shape: dict[str, int], layout: str, batches: tuple[int, ...]) -> ProductQuestion:
        return ProductQuestion(**topic.about(shape, layout, batches, PRODUCT_INPUTS))

    if form.main is not None:
        for _, K, N in layers:
            batches = _batches(wish, form.batches if leading else form.few_batches)
            yield question({"K": K, "N": N}, form.main, batches), leading or wish.full
    given = bool(wish.k or wish.n or wish.layers)
    few = _batches(wish, form.few_batches)
    forms = [(*first, layout) for layout in form.layouts]
    if not given or form.odd == first:
        forms += [(*form.odd, layout) for layout in form.odd_layouts]
    if wish.full:
        forms += [(*first, layout) for layout in form.full_layouts]
    for K, N, layout in forms:
        yield question({"K": K, "N": N}, layout, few), wish.full
    if form.batched is not None:
        K, N = first if given else form.batched
        for layout in (*form.batched_layouts, *(form.full_batched_layouts if wish.full else ())):
            yield question({"B": 4, "K": K, "N": N}, layout, few), wish.full


# How each form of questions is put. A form is a class of `nondet.core.operator`.
_FORMS: dict[type[QuestionForm], Callable[[_Topic, Any], _Questions]] = {
    ProductForm: _products,
    RowForm: _rows,
    AttentionForm: _attention,
    GroupedForm: _grouped,
}


def _batches(wish: Wish, known: Iterable[int]) -> tuple[int, ...]:
    """Batch sizes up to --m, which is itself among them."""
    if wish.m is None:
        return tuple(known)
    return tuple(sorted({*(m for m in known if m <= wish.m), wish.m}))


def _check(wish: Wish) -> None:
    from nondet.core.compare import float_dtypes

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
