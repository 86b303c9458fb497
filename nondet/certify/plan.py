"""The questions of `nondet certify` for each class, and the members that answer them. Both come from the operators'
declarations: `Operator.questions` has the sizes, `Operator.claims` the members."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from nondet.core.inputs import generator, make, order_revealing
from nondet.core.operator import (
    INVARIANT,
    ONE_ROW,
    AttentionForm,
    GroupedForm,
    Layer,
    Operand,
    ProductForm,
    QuestionForm,
    RowForm,
    ScaledForm,
)
from nondet.core.proof import PRODUCT_INPUTS, product_inputs
from nondet.core.registry import NumericsClass, class_operators, classes_for, declared, load_implementation, load_object
from nondet.errors import UnknownNameError, UserError

# A question fixes operator, dtype, shape and layout, and lists variants (batch sizes, ways to cut a prompt). The anchor
# answers once, for the largest batch or the whole prompt; a member answers every variant, and each is compared with its
# part of the anchor's answer. So the class's bits and batch invariance are tested at once.

Call = Callable[..., torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Question:
    """The common part of the questions of all operators.

    Attributes:
        shape: Named sizes without what varies, for the row.
        layout: Strides of operands, and further options: "nt", "nt, bias", "strided", "GQA", ...
        values: The variants.
        kinds: Inputs, each tested in turn; all of them have to agree.
        one_row: The anchor is the invariant implementation on each row by itself.
    """

    operator: str
    cls: str
    dtype: str
    device: str
    shape: dict[str, int]
    layout: str
    values: tuple[int | str, ...]
    kinds: tuple[str, ...]
    one_row: bool = False
    seed: int = 0

    @property
    def name(self) -> str:
        """Unique within class, dtype, device and member."""
        sizes = " ".join(f"{axis}={size}" for axis, size in self.shape.items())
        return f"{self.cls} {self.operator} {sizes} {self.layout}".strip()

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch has it."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def prepare(self, kind: str) -> Any:
        """The inputs."""
        raise NotImplementedError

    def expected(self, inputs: Any, anchor: Call) -> torch.Tensor:
        """The anchor's whole answer."""
        return self.answer(inputs, anchor, self.whole)

    def part(self, whole: torch.Tensor, value: int | str) -> torch.Tensor:
        """The part of the whole answer that a variant must give: its first rows, where variants are batch sizes."""
        return whole[: int(value)]

    def answer(self, inputs: Any, call: Call, value: int | str) -> torch.Tensor:
        """A member's answer for a variant."""
        raise NotImplementedError

    def reference(self, inputs: Any) -> tuple[int | str, torch.Tensor] | None:
        """A variant and its float64 answer, to distinguish a less precise accumulator from another order; or None."""
        return None

    @property
    def axis(self) -> str:
        """What the variants count, as in "M = 16"; "form" where they are names."""
        return "M" if all(isinstance(v, int) for v in self.values) else "form"

    @property
    def whole(self) -> int | str:
        """The variant that computes everything."""
        return self._rows if self.axis == "M" else self.values[0]

    @property
    def _rows(self) -> int:
        return max(v for v in self.values if isinstance(v, int))


@dataclass(frozen=True, kw_only=True)
class ProductQuestion(Question):
    """x [M, K] times a weight: operator linear (weight [N, K], bias [N]) or matmul (b [K, N], batched or not).

    Layouts: "nt" (linear's own) has the second operand by columns, "nn" by rows, "tn" also the first by columns;
    "strided" takes every second row of a longer x; "offset" starts at an unaligned address; with B in the shape both
    operands are batched.
    """

    def prepare(self, kind: str) -> Any:
        """(a, b, bias) as the operator takes them, for the largest M."""
        batch = self.shape.get("B", 1)
        sizes = (self._rows, self.shape["N"], self.shape["K"], self.torch_dtype, self.device)
        draws = product_inputs(*sizes, bias="bias" in self.layout, batch=batch, kinds=(kind,), seed=self.seed)
        x, weight, bias = next(iter(draws))[1]
        if "strided" in self.layout:
            x = x.repeat_interleave(2, 0)[::2]
        if "offset" in self.layout:  # operands at an unaligned address, as a slice of a cache does
            x, weight = (torch.nn.functional.pad(t, (1, 0))[..., 1:] for t in (x, weight))
        if self.operator == "linear":
            return x, weight, bias
        b = weight.mT
        return x, b if "nt" in self.layout else b.contiguous(), None

    def expected(self, inputs: Any, anchor: Call) -> torch.Tensor:
        """[.., M, N] for the largest M."""
        if not self.one_row:
            return self._run(inputs, anchor, self._rows)
        x = inputs[0]
        return torch.cat([self._run((x[..., i : i + 1, :], *inputs[1:]), anchor, 1) for i in range(self._rows)], -2)

    def part(self, whole: torch.Tensor, value: int | str) -> torch.Tensor:
        """The first M rows."""
        return whole[..., :value, :]

    def answer(self, inputs: Any, call: Call, value: int | str) -> torch.Tensor:
        """The answer for only the first M rows."""
        return self._run(inputs, call, int(value))

    def reference(self, inputs: Any) -> tuple[int | str, torch.Tensor] | None:
        """The float64 answer at the largest M up to 64."""
        rows = max((v for v in self.values if int(v) <= 64), default=self.values[0], key=int)
        x, other, bias = inputs
        right = other.double().mT if self.operator == "linear" else other.double()
        out = x[..., : int(rows), :].double() @ right
        return rows, out if bias is None else out + bias.double()

    def _run(self, inputs: Any, call: Call, rows: int) -> torch.Tensor:
        x, other, bias = inputs
        x = x[..., :rows, :]
        if "tn" in self.layout:
            x = x.mT.contiguous().mT
        elif x.ndim == 3:
            x = x.contiguous()
        return call(x, other) if bias is None else call(x, other, bias)


@dataclass(frozen=True, kw_only=True)
class RowsQuestion(Question):
    """An operator over the last axis of x [M, W], with its declared options. "strided": rows W + 8 apart.
    `outlier_scale`: for inputs with outliers, in operators in which one term would dominate."""

    outlier_scale: float = 1.0

    def prepare(self, kind: str) -> Any:
        """(tensors of M rows, tensors that all rows share)."""
        M, W = self._rows, self.shape["W"]
        first, *others = declared()[self.operator].operands

        def size(operand: Operand) -> tuple[int, ...]:
            return tuple(M if axis == first.axes[0] else self.shape.get(axis, W) for axis in operand.axes)

        if kind == "order":
            x = order_revealing(M, W, self.torch_dtype, 2 * self.seed + 1, negate=True, device=self.device)
        else:
            x = make(kind, size(first), self.torch_dtype, self.device, generator(self.seed, self.device))
            x = x * self.outlier_scale if kind == "outlier" else x
        if "strided" in self.layout:
            x = torch.nn.functional.pad(x, (0, 8))[..., :W]
        rows: list[torch.Tensor] = [x]
        shared: list[torch.Tensor] = []
        rng = generator(self.seed + 1, self.device)
        for operand in others:
            if operand.axes[0] != first.axes[0]:
                shared.append(make("bell", size(operand), self.torch_dtype, self.device, rng))
            elif operand.below is not None:
                rows.append(torch.randint(0, W, size(operand), device=self.device, generator=rng))
            else:
                rows.append(make(kind, size(operand), self.torch_dtype, self.device, rng))
        return rows, shared

    def expected(self, inputs: Any, anchor: Call) -> torch.Tensor:
        """[M, ...]."""
        if not self.one_row:
            return self._run(inputs, anchor, 0, self._rows)
        return torch.cat([self._run(inputs, anchor, i, i + 1) for i in range(self._rows)])

    def answer(self, inputs: Any, call: Call, value: int | str) -> torch.Tensor:
        """The answer for only the first M rows."""
        return self._run(inputs, call, 0, int(value))

    def _run(self, inputs: Any, call: Call, start: int, stop: int) -> torch.Tensor:
        rows, shared = inputs
        out: Any = call(*(x[start:stop] for x in rows), *shared)
        return torch.stack(out, 1) if isinstance(out, tuple) else out  # rms_norm_residual returns the sum as well


@dataclass(frozen=True, kw_only=True)
class AttentionQuestion(Question):
    """Causal attention over T tokens of B requests: prefill, chunks, decode, fewer requests, ragged requests.

    Variants: "prefill" (all B), "alone" (a prefill of request 0), "chunks of c", "decode" and "decode alone" (single
    positions), "ragged" (the requests cut to unequal lengths, one of them decoding).
    """

    def prepare(self, kind: str) -> Any:
        """q [B, Hq, T, D], k and v [B, Hkv, T, D]; the kind is v's, along the tokens, and k's where it is outlier."""
        B, Hq, Hkv, T, D = (self.shape[axis] for axis in ("B", "Hq", "Hkv", "T", "D"))
        rng = generator(self.seed, self.device)
        q = make("bell", (B, Hq, T, D), self.torch_dtype, self.device, rng)
        k = make("outlier" if kind == "outlier" else "bell", (B, Hkv, T, D), self.torch_dtype, self.device, rng)
        v = make(kind, (B, Hkv, D, T), self.torch_dtype, self.device, rng).mT.contiguous()
        return q, k, v

    def expected(self, inputs: Any, anchor: Call) -> torch.Tensor:
        """[B, Hq, T, D], each request prefilled solo."""
        q, k, v = inputs
        return torch.cat([anchor(q[b : b + 1], k[b : b + 1], v[b : b + 1]) for b in range(q.shape[0])])

    def _positions(self) -> list[int]:
        T = self.shape["T"]
        marks = (0, 1, 15, 31, 63, 64, 65, 127, 128, 300, 511, 512, 513, 640, 1023, 1024, 1536, 2047, T - 1)
        return sorted({p for p in marks if p < T})

    def _ragged(self) -> list[tuple[int, int]]:
        """(first query, end) of each request: a whole prompt, a chunk after cached keys, then decode steps."""
        T, B = self.shape["T"], self.shape["B"]
        return [(0, T), (T // 3, T - 5), *((T - 7 - b, T - 6 - b) for b in range(B))][:B]

    def part(self, whole: torch.Tensor, value: int | str) -> torch.Tensor:
        """The variant's queries, those of a ragged batch one after the other as [1, Hq, all, D]."""
        if value == "ragged":
            return torch.cat([whole[b : b + 1, :, lo:hi] for b, (lo, hi) in enumerate(self._ragged())], 2)
        if value in ("alone", "decode alone"):
            whole = whole[:1]
        return whole[:, :, self._positions()] if str(value).startswith("decode") else whole

    def answer(self, inputs: Any, call: Call, value: int | str) -> torch.Tensor:
        """The variants of the class; each piece is one call."""
        q, k, v = inputs
        T = q.shape[2]

        def piece(lo: int, hi: int, B: int = q.shape[0]) -> torch.Tensor:
            return call(q[:B, :, lo:hi], k[:B, :, :hi], v[:B, :, :hi])

        if value == "prefill":
            return piece(0, T)
        if value == "alone":
            return piece(0, T, 1)
        if value in ("decode", "decode alone"):
            B = 1 if value == "decode alone" else q.shape[0]
            return torch.cat([piece(p, p + 1, B) for p in self._positions()], 2)
        if value == "ragged":
            spans = list(enumerate(self._ragged()))
            ragged = getattr(call, "ragged", None)
            if ragged is None:  # an implementation of dense batches serves them one by one
                alone = [(q[b : b + 1, :, lo:hi], k[b : b + 1, :, :hi], v[b : b + 1, :, :hi]) for b, (lo, hi) in spans]
                return torch.cat([call(*request) for request in alone], 2)
            return torch.cat(ragged([(q[b, :, lo:hi], k[b, :, :hi], v[b, :, :hi]) for b, (lo, hi) in spans]), 1)[None]
        size = int(str(value).rpartition(" ")[2])
        return torch.cat([piece(s, min(s + size, T)) for s in range(0, T, size)], 2)


@dataclass(frozen=True, kw_only=True)
class GroupedQuestion(Question):
    """x [R, K] times weight [E, K, N] of each row's expert; the variants are R, with rows spread over the experts."""

    def prepare(self, kind: str) -> Any:
        """(x, weight, experts by row): row i is always at the same expert."""
        E, K, N = (self.shape[axis] for axis in "EKN")
        draws = product_inputs(self._rows, E * N, K, self.torch_dtype, self.device, kinds=(kind,), seed=self.seed)
        x, weight, _ = next(iter(draws))[1]
        # squared, so that some experts have many rows, and some none
        spread = (torch.rand(self._rows, generator=generator(self.seed, "cpu")).square() * E).long()
        return x, weight.view(E, N, K).mT, spread.to(self.device)

    def answer(self, inputs: Any, call: Call, value: int | str) -> torch.Tensor:
        """The first R rows, sorted by expert, multiplied, and put back into the order of x."""
        x, weight, experts = inputs
        at = experts[: int(value)]
        order = torch.sort(at, stable=True).indices
        offsets = torch.cumsum(torch.bincount(at, minlength=weight.shape[0]), 0).to(torch.int32)
        sorted_out = call(x[order], weight, offsets)
        out = torch.empty_like(sorted_out)
        out[order] = sorted_out
        return out


@dataclass(frozen=True, kw_only=True)
class ScaledQuestion(Question):
    """FP8 a [M, K] times b [K, N] with scales: "tensor", "row" or "block", into bfloat16 or float32."""

    def prepare(self, kind: str) -> Any:
        """(a, b, scale_a, scale_b) for the largest M."""
        from nondet.kernels.scaled.functions import operands

        sizes = (self._rows, self.shape["K"], self.shape["N"])
        return operands(kind, self.layout.split()[0], sizes, (self.torch_dtype,) * 2, self.device, self.seed)

    def answer(self, inputs: Any, call: Call, value: int | str) -> torch.Tensor:
        """The answer for only the first M rows."""
        a, b, scale_a, scale_b = inputs
        rows = int(value)
        scale = scale_a if len(scale_a) == 1 else scale_a[:rows]
        return call(a[:rows], b, scale, scale_b, getattr(torch, self.layout.split()[-1]))

    def reference(self, inputs: Any) -> tuple[int | str, torch.Tensor]:
        """The first question's rows, in float64."""
        from nondet.kernels.reference import scaled_matmul

        few = self.values[0]
        return few, self.answer(inputs, scaled_matmul, few)


@dataclass(frozen=True)
class Wish:
    """The request of the command line; None means the default list.

    Attributes:
        operators: Names of operators, underscores or hyphens; empty: all.
        cls: A numerics class.
        members: Names of members, or of families ("triton").
        impls: "package.module:function", tested as one more member of the class.
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
    """One question, the anchor, and its members."""

    question: Question
    anchor: Call
    members: dict[str, Call]


def operator_named(name: str, device: str) -> str:
    """The operator of a name on the command line; an `UnknownNameError` where no class has it."""
    operator = name.replace("-", "_")
    if operator not in class_operators(device):
        known = [op.replace("_", "-") for op in class_operators(device)]
        raise UnknownNameError(f"operator with a numerics class on {device}", name, [*known, "all"])
    return operator


def plan(wish: Wish) -> list[Assignment]:
    """All questions, in order, planned before the first is tested. Raises UserError: an unknown operator, class,
    member, dtype or input; sizes that make no sense; nothing to test."""
    _check(wish)
    names = [operator_named(n, wish.device) for n in wish.operators]
    if not names:
        names = class_operators(wish.device)
        if wish.cls is not None:
            names = [op for op in names if wish.cls in {c.name for c in classes_for(op, wish.device)}]
            # an unknown or foreign class: refused below
            names = names or [next(iter(class_operators(wish.device)))]
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
        given = [f"--{o} {', '.join(v)}" for o, v in (("dtype", wish.dtypes), ("inputs", wish.inputs)) if v]
        what = (
            f"no class of {', '.join(wish.operators) or 'any operator'} on {wish.device} takes {' with '.join(given)}"
        )
        raise UserError(f"nothing to certify: {what}", "See `nondet certify --help-all`.")
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
    """The members without families, and all members."""
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


_Questions = Iterator[tuple[Question, bool]]  # a question, and whether families of members answer it


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


def _scaled(topic: _Topic, form: ScaledForm) -> _Questions:
    wish = topic.wish
    batches = _batches(wish, form.batches)
    given = ((wish.k or wish.n or 0, wish.n or wish.k or 0),) if wish.k or wish.n else None
    for place, (K, N) in enumerate(given or form.layers):
        for how in ("tensor", "row", "block"):
            for dtype in ("float32", "bfloat16") if place == 0 else ("float32",):
                yield (
                    ScaledQuestion(**topic.about({"K": K, "N": N}, f"{how} into {dtype}", batches, PRODUCT_INPUTS)),
                    True,
                )


def _rows(topic: _Topic, form: RowForm) -> _Questions:
    wish = topic.wish
    for i, width in enumerate((wish.k,) if wish.k else form.widths):
        batches = _batches(wish, [m for m in form.batches if m * width <= form.elements])
        for layout in ("contiguous", "strided") if i == 0 else ("contiguous",):
            shared = topic.about({"W": width, **form.sizes}, layout, batches, form.kinds)
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


# Form of questions (a class of `nondet.core.operator`) -> the function that makes them.
_FORMS: dict[type[QuestionForm], Callable[[_Topic, Any], _Questions]] = {
    ProductForm: _products,
    RowForm: _rows,
    AttentionForm: _attention,
    GroupedForm: _grouped,
    ScaledForm: _scaled,
}


def _batches(wish: Wish, known: Iterable[int]) -> tuple[int, ...]:
    """Batch sizes up to --m, including it."""
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
