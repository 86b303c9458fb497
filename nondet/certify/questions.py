"""What a member is asked: one computation in many forms, whose every form must have the anchor's bits.

A question fixes operator, dtype, shape and layout, and lists variants (batch sizes, ways to cut a prompt). The anchor
answers once, for the largest batch or the whole prompt; a member answers every variant, and each is compared with its
part of the anchor's answer. So a member is held to the class's bits and to batch invariance at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nondet.core.inputs import generator, make, order_revealing
from nondet.core.proof import product_inputs
from nondet.core.registry import declared

__all__ = ["AttentionQuestion", "GroupedQuestion", "ProductQuestion", "Question", "RowsQuestion"]

Call = Callable[..., torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Question:
    """What the forms of all operators share.

    Attributes:
        cls: Name of the numerics class.
        shape: Named sizes without what varies, for the row.
        layout: How operands lie, and what else there is: "nt", "nt, bias", "strided", "GQA", ...
        values: The variants.
        kinds: Inputs, each asked in turn; all of them have to agree.
        one_row: The anchor is the invariant implementation on each row alone.
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
        raise NotImplementedError

    def part(self, whole: torch.Tensor, value: int | str) -> torch.Tensor:
        """What of the whole answer a variant has to give."""
        raise NotImplementedError

    def answer(self, inputs: Any, call: Call, value: int | str) -> torch.Tensor:
        """What a member gives for a variant."""
        raise NotImplementedError

    def reference(self, inputs: Any) -> tuple[int | str, torch.Tensor] | None:
        """A variant and its float64 answer, to tell a lesser accumulator from another order; None: there is none."""
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
    "strided" takes every second row of a longer x; "offset" starts at no aligned address; with B in the shape both
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
        if "offset" in self.layout:  # operands that start at no boundary, as a slice of a cache does
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
        """The first M rows alone."""
        return self._run(inputs, call, int(value))

    def reference(self, inputs: Any) -> tuple[int | str, torch.Tensor] | None:
        """In float64, at the largest M up to 64."""
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
    """An operator over the last axis of x [M, W], and of what else its declaration says. "strided": rows W + 8 apart.

    Attributes:
        outlier_scale: On inputs with outliers, for operators in which one term would be all.
    """

    outlier_scale: float = 1.0

    def prepare(self, kind: str) -> Any:
        """(tensors of M rows, tensors that all rows share)."""
        M, W = self._rows, self.shape["W"]
        if kind == "order":
            x = order_revealing(M, W, self.torch_dtype, 2 * self.seed + 1, negate=True, device=self.device)
        else:
            x = make(kind, (M, W), self.torch_dtype, self.device, generator(self.seed, self.device))
            x = x * self.outlier_scale if kind == "outlier" else x
        if "strided" in self.layout:
            x = torch.nn.functional.pad(x, (0, 8))[:, :W]
        rows: list[torch.Tensor] = [x]
        shared: list[torch.Tensor] = []
        rng = generator(self.seed + 1, self.device)
        first, *others = declared()[self.operator].operands
        for operand in others:
            size = tuple(M if axis == first.axes[0] else W for axis in operand.axes)
            if operand.axes[0] != first.axes[0]:
                shared.append(make("bell", size, self.torch_dtype, self.device, rng))
            elif operand.below is not None:
                rows.append(torch.randint(0, W, size, device=self.device, generator=rng))
            else:
                rows.append(make(kind, size, self.torch_dtype, self.device, rng))
        return rows, shared

    def expected(self, inputs: Any, anchor: Call) -> torch.Tensor:
        """[M, ...]."""
        if not self.one_row:
            return self._run(inputs, anchor, 0, self._rows)
        return torch.cat([self._run(inputs, anchor, i, i + 1) for i in range(self._rows)])

    def part(self, whole: torch.Tensor, value: int | str) -> torch.Tensor:
        """The first M rows."""
        return whole[: int(value)]

    def answer(self, inputs: Any, call: Call, value: int | str) -> torch.Tensor:
        """The first M rows alone."""
        return self._run(inputs, call, 0, int(value))

    def _run(self, inputs: Any, call: Call, start: int, stop: int) -> torch.Tensor:
        rows, shared = inputs
        out: Any = call(*(x[start:stop] for x in rows), *shared)
        return torch.stack(out, 1) if isinstance(out, tuple) else out  # rms_norm_residual gives the sum as well


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
        """[B, Hq, T, D], each request prefilled alone."""
        q, k, v = inputs
        return torch.cat([anchor(q[b : b + 1], k[b : b + 1], v[b : b + 1]) for b in range(q.shape[0])])

    def _positions(self) -> list[int]:
        T = self.shape["T"]
        marks = (0, 1, 15, 31, 63, 64, 65, 127, 128, 300, 511, 512, 513, 640, 1023, 1024, 1536, 2047, T - 1)
        return sorted({p for p in marks if p < T})

    def _ragged(self) -> list[tuple[int, int]]:
        """(first query, end) of each request: a whole prompt, a chunk after a cached part, then decode steps."""
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
        """As the class says; pieces are computed one call each."""
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

    def expected(self, inputs: Any, anchor: Call) -> torch.Tensor:
        """[R, N] in the order of x."""
        return self.answer(inputs, anchor, self._rows)

    def part(self, whole: torch.Tensor, value: int | str) -> torch.Tensor:
        """The first R rows."""
        return whole[: int(value)]

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
