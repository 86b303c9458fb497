"""The questions of `nondet certify` for each class, and the members that answer them. Both come from the operators'
declarations: `Operator.questions` has the sizes, `Operator.claims` the members.

A question fixes operator, dtype, shape and layout, and lists variants (batch sizes, ways to cut a prompt). The anchor
answers once, for the largest batch or the whole prompt; a member answers every variant, and each is compared with its
part of the anchor's answer. So the class's bits and batch invariance are tested at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from nondet.core.inputs import generator, product_operands
from nondet.core.operands import drawn, laid_out, rows_of
from nondet.core.operator import INVARIANT, ONE_ROW, CertifyCell, Shape, Sizes
from nondet.core.proof import PRODUCT_INPUTS
from nondet.core.records import Row
from nondet.core.registry import NumericsClass, class_operators, classes_for, declared, load_implementation, load_object
from nondet.errors import UnknownNameError, UserError

Call = Callable[..., torch.Tensor]
Inputs = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Question(CertifyCell):
    """Rows of a batch, whose variants are the numbers of rows: products, operators over the last axis. The layout of
    products "nt" has the second operand by columns, "nn" by rows, "tn" also the first by columns; that of FP8 products
    has the scales and the result's dtype."""

    operator: str
    cls: str
    dtype: str
    device: str
    one_row: bool = False  # the anchor is the invariant implementation on each row by itself
    seed: int = 0

    @property
    def name(self) -> str:
        """Unique within class, dtype, device and member."""
        sizes = " ".join(f"{axis}={size}" for axis, size in self.shape.items())
        return f"{self.cls} {self.operator} {sizes} {self.layout}".strip()

    @property
    def axis(self) -> str:
        """What the variants count, as in "M = 16"; "form" where they are names."""
        return "M" if all(isinstance(v, int) for v in self.values) else "form"

    @property
    def whole(self) -> int | str:
        """The variant that computes everything: the most rows, or the first form."""
        return self.values[0] if self.axis == "form" else max(int(v) for v in self.values)

    @property
    def sizes(self) -> Shape:
        """The shape with the whole batch, or as many queries as keys, under the names that the operands have."""
        if self.axis == "form":
            return {**self.shape, "Tq": self.shape["T"], "Tk": self.shape["T"]}
        first = declared()[self.operator].operands[0].axes
        return {first[-1]: self.shape.get("W", 0), first[0]: int(self.whole), **self.shape}

    def head(self, member: str) -> Row:
        """The row of a member, with everything but figures."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in ("operator", "dtype", "device")}
        fields |= {"probe": "certify", "case": self.name, "inputs": "hard", "varied": "class", "impl": member}
        extra = {"class": self.cls, "layout": self.layout, "inputs": list(self.kinds)}
        return Row(shape=dict(self.shape), status="", extra=extra, **fields)

    def prepare(self, kind: str) -> Inputs:
        """The operands of the whole batch."""
        operator, dtype = declared()[self.operator], getattr(torch, self.dtype)
        if operator.drawn_by is not None:
            return tuple(load_object(operator.drawn_by)(kind, self.layout, self.sizes, dtype, self.device, self.seed))
        x, *others = drawn(operator, self.sizes, dtype, self.device, generator(self.seed, self.device), kind)
        return (laid_out(x, self.layout), *others)

    def expected(self, inputs: Inputs, anchor: Call) -> torch.Tensor:
        """The anchor's whole answer."""
        if not self.one_row:
            return self.answer(inputs, anchor, self.whole)
        alone = [self._of_rows(inputs, anchor, i, i + 1) for i in range(int(self.whole))]
        return torch.cat(alone, int("B" in self.shape))  # a product of batches has its rows within them

    def part(self, whole: torch.Tensor, value: int | str) -> torch.Tensor:
        """The part of the whole answer that a variant must give: its first rows."""
        return whole.narrow(int("B" in self.shape), 0, int(value))

    def answer(self, inputs: Inputs, call: Call, value: int | str) -> torch.Tensor:
        """A member's answer for a variant."""
        return self._of_rows(inputs, call, 0, int(value))

    def _of_rows(self, inputs: Inputs, call: Call, start: int, stop: int) -> torch.Tensor:
        x, *others = rows_of(declared()[self.operator], self.sizes, inputs, start, stop)
        if "tn" in self.layout:
            x = laid_out(x, "columns")
        elif "B" in self.shape:
            x = x.contiguous()
        out: Any = call(x, *others)
        return torch.stack(out, 1) if isinstance(out, tuple) else out  # rms_norm_residual returns the sum as well


@dataclass(frozen=True, kw_only=True)
class AttentionQuestion(Question):
    """Causal attention over T tokens of B requests. Variants: "prefill" (all B), "alone" (of request 0), "chunks of c",
    "decode" and "decode alone" (single positions), "ragged" (requests cut to unequal lengths, some decode)."""

    def expected(self, inputs: Inputs, anchor: Call) -> torch.Tensor:
        """[B, Hq, T, D], each request prefilled solo."""
        return torch.cat([anchor(*(x[b : b + 1] for x in inputs)) for b in range(len(inputs[0]))])

    def _pieces(self, value: int | str) -> list[tuple[slice, int, int]]:
        """The variant's calls: which requests, and from which query to which end."""
        T, B, requests = self.shape["T"], self.shape["B"], slice(1 if str(value).endswith("alone") else None)
        if value == "ragged":  # a whole prompt, a chunk after cached keys, then decode steps
            ends = [(0, T), (T // 3, T - 5), *((T - 7 - b, T - 6 - b) for b in range(B))][:B]
            return [(slice(b, b + 1), lo, hi) for b, (lo, hi) in enumerate(ends)]
        if str(value).startswith("decode"):
            marks = (0, 1, 15, 31, 63, 64, 65, 127, 128, 300, 511, 512, 513, 640, 1023, 1024, 1536, 2047, T - 1)
            return [(requests, p, p + 1) for p in sorted({p for p in marks if p < T})]
        size = int(str(value).rpartition(" ")[2]) if str(value).startswith("chunks") else T
        return [(requests, s, min(s + size, T)) for s in range(0, T, size)]

    def part(self, whole: torch.Tensor, value: int | str) -> torch.Tensor:
        """The variant's queries, those of a ragged batch one after the other as [1, Hq, all, D]."""
        return torch.cat([whole[requests, :, lo:hi] for requests, lo, hi in self._pieces(value)], 2)

    def answer(self, inputs: Inputs, call: Call, value: int | str) -> torch.Tensor:
        """The variants of the class; an implementation of dense batches serves ragged requests one by one."""
        q, k, v = inputs
        pieces = [(q[at, :, lo:hi], k[at, :, :hi], v[at, :, :hi]) for at, lo, hi in self._pieces(value)]
        if value == "ragged" and (ragged := getattr(call, "ragged", None)) is not None:
            return torch.cat(ragged([tuple(x[0] for x in piece) for piece in pieces]), 1)[None]
        return torch.cat([call(*piece) for piece in pieces], 2)


@dataclass(frozen=True, kw_only=True)
class GroupedQuestion(Question):
    """x [R, K] times weight [E, K, N] of each row's expert; the variants are R, with rows spread over the experts."""

    def prepare(self, kind: str) -> Inputs:
        """(x, weight, experts by row): row i is always at the same expert."""
        E, K, N, R = (*(self.shape[axis] for axis in "EKN"), int(self.whole))
        x, weight = product_operands(kind, (R, K), (E * N, K), getattr(torch, self.dtype), self.device, self.seed)
        # squared, so that some experts have many rows, and some none
        spread = (torch.rand(R, generator=generator(self.seed, "cpu")).square() * E).long()
        return x, weight.view(E, N, K).mT, spread.to(self.device)

    def answer(self, inputs: Inputs, call: Call, value: int | str) -> torch.Tensor:
        """The first R rows, sorted by expert, multiplied, and put back into the order of x."""
        x, weight, experts = inputs
        at = experts[: int(value)]
        order = torch.sort(at, stable=True).indices
        offsets = torch.cumsum(torch.bincount(at, minlength=weight.shape[0]), 0).to(torch.int32)
        sorted_out = call(x[order], weight, offsets)
        return torch.empty_like(sorted_out).index_copy_(0, order, sorted_out)


_QUESTIONS = {"attention": AttentionQuestion, "grouped_matmul": GroupedQuestion}  # of operators without plain rows


@dataclass(frozen=True, kw_only=True)
class Wish(Sizes):
    """The request of the command line; None means the default list."""

    device: str
    operators: tuple[str, ...] = ()  # names of operators, underscores or hyphens; empty: all
    cls: str | None = None  # a numerics class
    members: tuple[str, ...] = ()  # names of members, or of families ("triton")
    impls: tuple[str, ...] = ()  # "package.module:function", tested as one more member of the class
    inputs: tuple[str, ...] | None = None
    seed: int = 0


class Assignment(NamedTuple):
    """One question, the anchor, and its members."""

    question: Question
    anchor: Call
    members: dict[str, Call]


def plan(wish: Wish) -> list[Assignment]:
    """All questions, in order, planned before the first is tested. Raises UserError: an unknown operator, class,
    member, dtype or input; sizes that make no sense; nothing to test."""
    if wish.impls and not wish.operators and wish.cls is None:
        raise UserError("--impl without an operator", "Name the one whose signature it has, as in `certify linear`.")
    every, names = class_operators(wish.device), [name.replace("-", "_") for name in wish.operators]
    for name, written in zip(names, wish.operators, strict=True):
        if name not in every:
            listed = [*(op.replace("_", "-") for op in every), "all"]
            raise UnknownNameError(f"operator with a numerics class on {wish.device}", written, listed)
    of_class = [op for op in every if wish.cls in (None, *(c.name for c in classes_for(op, wish.device)))]
    # a function has one signature; an unknown or foreign class is refused below
    names = names or of_class[: 1 if wish.impls else None] or every[:1]
    known: dict[str, None] = {}
    pairs = [(name, cls) for name in dict.fromkeys(names) for cls in classes_for(name, wish.device, wish.cls)]
    assignments = [assignment for pair in pairs for assignment in _assignments(wish, *pair, known)]
    unknown = [m for m in wish.members if not any(f"{name}/".startswith(f"{m}/") for name in known)]
    if unknown:
        raise UnknownNameError("member", unknown[0], known)
    if not assignments:
        given = [f"--{o} {', '.join(v)}" for o, v in (("dtype", wish.dtypes), ("inputs", wish.inputs)) if v]
        what = f"no class of {', '.join(wish.operators) or 'any operator'} on {wish.device}"
        raise UserError(f"nothing to certify: {what} takes {' with '.join(given)}", "See `nondet certify --help-all`.")
    return assignments


def _assignments(wish: Wish, operator: str, cls: NumericsClass, known: dict[str, None]) -> Iterator[Assignment]:
    questions, targets, device = declared()[operator].questions, cls.members[operator], wish.device
    if questions is None:
        return
    one_row, made = cls.anchors[operator] == ONE_ROW, _QUESTIONS.get(operator, Question)
    about: dict[str, Any] = {"operator": operator, "cls": cls.name, "one_row": one_row, "seed": wish.seed}

    def load(target: str) -> Call:
        return load_implementation(operator, target, device).call if target == INVARIANT else load_object(target)

    anchor = load(targets[INVARIANT] if one_row else cls.anchors[operator])
    users = {impl: load_implementation(operator, impl, device).call for impl in wish.impls}
    for dtype in (d for d in cls.dtypes if wish.dtypes is None or d in wish.dtypes):
        every: dict[str, Call] = {}
        for name, target in targets.items():
            family = load_object(target)(dtype) if name.endswith("/*") else {"": load(target)}
            every |= {name.removesuffix("*") + tile: call for tile, call in family.items()}
        known.update(dict.fromkeys(every))
        few = {name: call for name, call in every.items() if name in targets}
        chosen = {name: call for name, call in every.items() for m in wish.members if f"{name}/".startswith(f"{m}/")}
        for cell in questions(wish, device, dtype):
            members = chosen | users if wish.members or wish.impls else every if cell.tiles or wish.full else few
            kinds = tuple(k for k in cell.kinds or PRODUCT_INPUTS if wish.inputs is None or k in wish.inputs)
            values = cell.values
            if wish.m is not None and isinstance(values[0], int):
                values = tuple(sorted({*(int(v) for v in values if int(v) <= max(wish.m)), max(wish.m)}))
            if members and kinds:
                question = made(cell.shape, values, kinds, cell.layout, cell.tiles, dtype=dtype, device=device, **about)
                yield Assignment(question, anchor, members)
