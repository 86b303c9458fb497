"""Gradients: whether their bits depend on the batch, the micro-batch, or the run.

`invariant` is autograd under `nondet.batch_invariant(training=True)`, `stock` is torch's. Tested are the gradient of a
row, or of a request of attention, in batches of M; of a weight, where the same sequences come in micro-batches and each
adds to `.grad` (that order depends on the micro-batch by definition, so only stock is tested); and the same call again,
because on a GPU torch adds with atomics in embeddings, gathers and attention's queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from nondet.core.inputs import generator, make
from nondet.core.measure import Trial
from nondet.probes import base
from nondet.probes.base import Case, Operator, Options, Probe, dtypes, kinds, require_memory

# Of x [M, W], and a weight [W] and a bias [W] where there are any, which get no gradient here.
ROWS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "silu_backward": lambda x, _: F.silu(x),
    "softmax_backward": lambda x, _: x.softmax(-1),
    "log_softmax_backward": lambda x, _: x.log_softmax(-1),
    "rms_norm_backward": lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-6),
    "layer_norm_backward": lambda x, weight: F.layer_norm(x, weight.shape, weight, -weight, 1e-5),
    "cross_entropy_backward": lambda x, _: F.cross_entropy(x, x.detach().argmin(-1), reduction="none"),
}
# Of a weight, x [tokens, K] and ids [tokens] below 40; `_GATHER` has no micro-batches.
_GATHER = "index_put_accumulate"
WEIGHTS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "linear_weight": lambda weight, x, _: F.linear(x, weight),
    "rms_norm_weight": lambda weight, x, _: F.rms_norm(x, weight.shape, weight, 1e-6),
    "embedding_weight": lambda weight, _, ids: F.embedding(ids, weight),
    _GATHER: lambda weight, _, ids: weight[ids],
}
_LOGITS = ("softmax_backward", "log_softmax_backward", "cross_entropy_backward")
_VOCABULARY = 40
_WIDTHS = {"cpu": (1000, 32000), "cuda": (4096, 151936)}  # hidden, vocabulary
_BATCHES = (1, 2, 3, 5, 8, 16, 17, 32, 64, 128)
_SEQUENCE, _SEQUENCES = 32, 16  # tokens of a sequence, and how many
_MICRO = (16, 8, 4, 2, 1)
_HEADS, _KEY_HEADS, _HEAD = 4, 2, 64
_TOKENS = 96
_RUNS = {"cpu": 10, "cuda": 20}


class Backward(Probe):
    """Backward operators as autograd calls them."""

    name = "backward"

    def cases(self, options: Options) -> Iterable[Case]:
        """Rows and requests in batches, weights in micro-batches, and repeated calls; --m, --k, --n: M, W and N."""
        K, N = options.k or 256, options.n or 192
        times = range(options.runs or _RUNS[options.device])
        tokens = _SEQUENCE * _SEQUENCES
        for dtype in dtypes(options, "backward", ("bfloat16", "float32")[: 1 if options.brief else 2]):
            needed = (tokens + K) * (K + N) * (getattr(torch, dtype).itemsize + 24)
            require_memory(options.device, needed, f"weights {K} x {N}")
            for kind in kinds(options, ("bell",)):
                about, weights = (dtype, kind), [name for name in WEIGHTS if name != _GATHER]
                for name in (*ROWS, "attention_backward"):
                    yield _in_batches(options, name, *about)
                for name in weights:
                    shape = {"T": tokens, "K": K} | ({"N": N} if name == "linear_weight" else {})
                    what = f": {_SEQUENCES} sequences in micro-batches"
                    yield _case(name, what, shape, *about, "micro_batch", _MICRO)
                again = {name: {"T": tokens, "K": K} for name in (_GATHER, *weights)}
                # as in batches: their kernels are compiled once
                again |= {name: {"M": 8, "W": _width(options, name)} for name in ROWS}
                for name, shape in {**again, "attention_backward": {"T": _TOKENS, "D": _HEAD}}.items():
                    yield _case(name, ": the same call again", shape, *about, "run", times, rows=8)

    def prepare(self, case: Case, device: str, seed: int) -> Any:
        """x of rows [M, 2, W] with their gradients, or requests [M, heads, T, D]; or a weight, x, ids, gradient."""
        rng, dtype, shape = generator(seed, device), case.torch_dtype, case.shape
        if case.operator == "attention_backward":
            count = max(shape.get("M", 0), case.data["rows"])
            return (make(case.inputs, (count, 2 * (_HEADS + _KEY_HEADS), _TOKENS, shape["D"]), dtype, device, rng),)
        if case.operator in ROWS:
            weight = make("bell", (shape["W"],), dtype, device, rng)
            return make(case.inputs, (max(shape["M"], case.data["rows"]), 2, shape["W"]), dtype, device, rng), weight
        T, K, N = shape["T"], shape["K"], shape.get("N", shape["K"])
        at = {"linear_weight": (N, K), "rms_norm_weight": (K,)}.get(case.operator, (_VOCABULARY, K))
        ids = torch.randint(0, _VOCABULARY, (T,), generator=rng, device=device)
        x, above = (make(case.inputs, (T, wide), dtype, device, rng) for wide in (K, N))
        return make("bell", at, dtype, device, rng), x, ids, above

    @contextmanager
    def own(self, case: Case, impl: str) -> Iterator[Operator]:
        """Autograd, plain or under `batch_invariant(training=True)`."""
        compute = _weight_gradient if case.operator in WEIGHTS else _gradient
        if impl == "stock":
            yield compute
            return
        from nondet.kernels.dispatch.block import batch_invariant

        def run(*arguments: Any) -> torch.Tensor:
            with batch_invariant(training=True) as block:
                out = compute(*arguments)
            seen = block.coverage()
            if risks := [*seen.left, *seen.at_risk]:
                raise NotImplementedError(f"batch_invariant(training=True) leaves {'; '.join(risks)}")
            return out

        with batch_invariant(training=True):  # entering the first block takes longer than a variant
            yield run

    def trials(self, case: Case, inputs: Any, operator: Operator) -> Iterator[Trial]:
        """The same rows in batches of M; the same sequences in micro-batches; the same call again."""
        call, (first, *others) = partial(operator, case.operator), inputs
        if case.operator not in WEIGHTS:
            yield from base.batch_trials(case, lambda batch: call(batch, *others), first, case.data["rows"])
            return
        for value in case.data["values"]:
            tokens = value * _SEQUENCE if case.varied == "micro_batch" else case.shape["T"]
            yield Trial(value, partial(call, tokens, *inputs))

    def reference(self, case: Case, inputs: Any) -> torch.Tensor | None:
        """Torch's autograd in float64."""
        wide = [x.double() if x.is_floating_point() else x for x in inputs]
        if case.operator in WEIGHTS:
            return _weight_gradient(case.operator, case.shape["T"], *wide)
        if case.varied == "batch_size":
            wide[0] = wide[0][: case.data["rows"]]
        return _gradient(case.operator, *wide)


def _in_batches(options: Options, name: str, dtype: str, kind: str) -> Case:
    each = width = _width(options, name)
    most, shape = min(128, max(16, 2**20 // width)), {"W": width}
    if name == "attention_backward":
        each, most, shape = _TOKENS * _HEAD * 2 * (_HEADS + _KEY_HEADS), 16, {"T": _TOKENS, "D": _HEAD}
    largest = options.m or most
    require_memory(options.device, 40 * largest * each, f"{name} of M={largest}")
    values, shape = base.some(_BATCHES, largest, options), {"M": largest, **shape}
    return _case(name, " in batches of M", shape, dtype, kind, "batch_size", values, rows=min(8, largest))


def _case(
    name: str, what: str, shape: dict[str, int], dtype: str, kind: str, varied: str, values: Iterable[int],
    rows: int = 0,
) -> Case:  # fmt: skip
    impls = ("stock",) if varied == "micro_batch" else ("stock", "invariant")
    data = {"values": tuple(values), "rows": rows}
    return Case(f"{name}{what}, {kind}", name, shape, dtype, varied, kind, impls, data=data)


def _width(options: Options, name: str) -> int:
    return options.k or _WIDTHS[options.device][name in _LOGITS]


class _From(torch.autograd.Function):
    """A number whose gradient flows on as `above`. Autograd checks a gradient that it is given with sympy, whose import
    takes three seconds where a dozen processes do it."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
        """Any number."""
        ctx.save_for_backward(above)
        return out.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """`above`."""
        return ctx.saved_tensors[0], None


def _gradient(name: str, *tensors: torch.Tensor) -> torch.Tensor:
    """The gradient of rows by autograd; for attention those of q, k and v, concatenated along the heads."""
    with torch.enable_grad():
        if name == "attention_backward":
            parts = tensors[0].split([_HEADS, _KEY_HEADS, _KEY_HEADS, _HEADS], 1)
            *leaves, above = (x.detach().contiguous() for x in parts)
            q, k, v = (x.requires_grad_() for x in leaves)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return torch.cat(torch.autograd.grad(_From.apply(out, above), (q, k, v)), 1)
        x = tensors[0][:, 0].detach().contiguous().requires_grad_()
        out = ROWS[name](x, tensors[1])
        above = tensors[0][:, 1] if out.dim() == 2 else tensors[0][:, 1, 0]
        (of_x,) = torch.autograd.grad(_From.apply(out, above.contiguous()), x)
        return of_x


def _weight_gradient(
    name: str, tokens: int, weight: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, above: torch.Tensor
) -> torch.Tensor:
    leaf = weight.detach().clone().requires_grad_()
    with torch.enable_grad():
        for seen, looked_up, gradient in zip(x.split(tokens), ids.split(tokens), above.split(tokens), strict=True):
            _From.apply(WEIGHTS[name](leaf, seen, looked_up), gradient).backward()
    total: Any = leaf.grad  # each micro-batch has added to it
    return total
