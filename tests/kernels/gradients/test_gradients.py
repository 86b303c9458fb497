"""Gradients as operators: the bits of autograd under the block, near float64, and no row sees another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import nondet
from nondet.certify.check import ask
from nondet.certify.plan import Wish, plan
from nondet.core.certificates import Certificates
from nondet.core.compare import identical
from nondet.core.inputs import generator, make
from nondet.core.records import Status
from nondet.core.registry import load_implementation, operators
from tests.kernels.tiers import at_length

FORWARD: dict[str, Any] = {
    "softmax_gradient": lambda x: x.softmax(-1),
    "log_softmax_gradient": lambda x: x.log_softmax(-1),
    "silu_gradient": F.silu,
    "rms_norm_gradient": lambda x, w: F.rms_norm(x, w.shape, w, 1e-6),
    "attention_gradient": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
}
SIZES = {"W": 300, "T": 20, "Hq": 2, "Hkv": 1, "D": 16}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def operands(name: str, dtype: str, device: str, rows: int = 9, seed: int = 5) -> list[torch.Tensor]:
    """Of the declaration's axes."""
    rng = generator(seed, device)
    sizes = [tuple(({"M": rows} | SIZES)[a] for a in operand.axes) for operand in operators()[name].operands]
    return [make("bell", size, getattr(torch, dtype), device, rng) for size in sizes]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", *at_length("bfloat16")])
@pytest.mark.parametrize("name", FORWARD)
def test_it_is_what_autograd_gives_under_the_block(name: str, dtype: str, device: str) -> None:
    """So what is certified and timed is what a trainer runs; and each row alone has the bits that it has in a batch."""
    call = load_implementation(name, "invariant", device).call
    x, gradient, *others = operands(name, dtype, device)
    found = call(x, gradient, *others)
    leaves = [t.clone().requires_grad_() for t in (x, *others)]
    with nondet.batch_invariant(training=True) as block:
        of = torch.autograd.grad(FORWARD[name](*leaves), leaves, gradient)
    assert not block.coverage().left
    assert not block.coverage().at_risk
    assert identical(found, torch.cat(of, 1) if name == "attention_gradient" else of[0])
    batched = [o.axes[0] == "M" for o in operators()[name].operands]
    for i in (0, 4, 8):
        alone = [t[i : i + 1] if mine else t for t, mine in zip((x, gradient, *others), batched, strict=True)]
        assert identical(call(*alone), found[i : i + 1])


@pytest.mark.parametrize("name", [n for n in FORWARD if "attention" not in n] + at_length("attention_gradient"))
def test_certify_proves_it_and_refutes_what_follows_the_batch(name: str, kept: Certificates) -> None:
    """A member that changes one bit's worth of its results in batches above 7 is excluded exactly there."""
    (first, *_) = plan(Wish(device="cpu", operators=(name,), dtypes=("float32",), m=(9,), k=48, inputs=("bell",)))
    question = first.question
    ours = first.members["invariant"]

    def follows(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = ours(x, *others)
        return out * (1 + 2**-20) if len(x) > 7 else out

    rows = {r.impl: r for r in ask(question, {"ours": ours, "follows": follows}, first.anchor, kept)}
    assert rows["ours"].status == Status.IDENTICAL
    assert rows["follows"].status == Status.DIVERGENT
    assert rows["follows"].extra["left_at"] == [v for v in question.values if int(v) > 7]
