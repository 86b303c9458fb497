"""Gradients of weights, linear layers', norms' and embeddings', as certified: `nondet.fold`'s, in every layout."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import nondet
from nondet.certify.check import ask
from nondet.certify.plan import WeightQuestion, Wish, plan
from nondet.core.certificates import Certificates
from nondet.core.compare import identical
from nondet.core.inputs import generator, make
from nondet.core.records import Status
from nondet.core.registry import load_implementation
from nondet.kernels import reference
from tests.kernels.tiers import at_length

LENGTHS = torch.tensor([20, 3, 16, 33])
WAYS = [(padding, micro) for padding in ("packed", "left", "right") for micro in (0, 1, 3)]


class Model(torch.nn.Module):
    """One layer, called as transformers' models are."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.inner.weight = torch.nn.Parameter(weight)

    def forward(self, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """[B, T, N]."""
        out: torch.Tensor = self.inner(inputs_embeds)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, *at_length(torch.bfloat16)])
def test_it_is_what_fold_adds_up_in_a_model(dtype: torch.dtype) -> None:
    """Padded on the right, all sequences at once; and stock's, another order, is not that, but as near to float64."""
    x, gradient = (make("bell", (72, n), dtype, "cpu", generator(i, "cpu")) for i, n in enumerate((40, 24)))
    model = Model(torch.zeros(24, 40, dtype=dtype))
    padded = [torch.nn.utils.rnn.pad_sequence(t.split(LENGTHS.tolist()), batch_first=True) for t in (x, gradient)]
    mask = (torch.arange(33)[None] < LENGTHS[:, None]).long()
    with nondet.batch_invariant(training=True), nondet.fold(model):
        model(inputs_embeds=padded[0], attention_mask=mask).backward(padded[1])
    stock, ours = (load_implementation("linear_weight_gradient", i, "cpu").call for i in ("stock", "invariant"))
    exact = gradient.double().t() @ x.double()
    for padding, micro in WAYS:
        assert identical(ours(x, gradient, LENGTHS, micro, padding), model.inner.weight.grad)
        assert float((stock(x, gradient, LENGTHS, micro, padding).double() - exact).norm() / exact.norm()) < 1e-2
    stocks = [stock(x, gradient, LENGTHS, micro, "packed") for micro in (0, 1, 3)]
    assert not all(identical(one, stocks[0]) for one in stocks[1:])


class Looks(torch.nn.Module):
    """An embedding and a norm, called as transformers' models are."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.table, self.norm = torch.nn.Embedding(*weight.shape), LlamaRMSNorm(weight.shape[1])
        self.table.weight = torch.nn.Parameter(weight)
        self.norm.weight = torch.nn.Parameter(torch.ones(weight.shape[1], dtype=weight.dtype))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """[B, T, H]."""
        self.looked_up = self.table(input_ids)
        self.looked_up.register_hook(lambda g: setattr(self, "above", g))
        out: torch.Tensor = self.norm(self.looked_up)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, *at_length(torch.bfloat16)])
def test_a_norm_s_and_an_embedding_s_are_what_fold_adds_up_in_a_model(dtype: torch.dtype) -> None:
    """The embedding by the gradient that reached it, the norm by its normalized rows; as near to float64 as stock's."""
    x, gradient = (make("bell", (72, n), dtype, "cpu", generator(i, "cpu")) for i, n in enumerate((9, 24)))
    model = Looks(make("bell", (9, 24), dtype, "cpu", generator(5, "cpu")))
    ids = x.argmax(-1)
    padded = [torch.nn.utils.rnn.pad_sequence(t.split(LENGTHS.tolist()), batch_first=True) for t in (ids, gradient)]
    there = torch.arange(33)[None] < LENGTHS[:, None]
    with nondet.batch_invariant(training=True), nondet.fold(model):
        model(input_ids=padded[0], attention_mask=there.long()).backward(padded[1])
        wide = model.looked_up.detach()[there].float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + model.norm.variance_epsilon)).to(dtype)
    cases = {
        "norm": (normed, gradient, model.norm.weight.grad),
        "embedding": (x, model.above[there], model.table.weight.grad),
    }
    for name, (given, above, found) in cases.items():
        stock, ours = (load_implementation(f"{name}_weight_gradient", i, "cpu").call for i in ("stock", "invariant"))
        exact = getattr(reference, f"{name}_weight_gradient")(given, above, LENGTHS)
        for padding, micro in WAYS:
            assert identical(ours(given, above, LENGTHS, micro, padding), found), name
            assert float((stock(given, above, LENGTHS, micro, padding).double() - exact).norm() / exact.norm()) < 1e-2
        assert float((found.double() - exact).norm() / exact.norm()) < 1e-2


@pytest.mark.parametrize("name", ["linear", "norm", "embedding"])
def test_certify_proves_it_and_refutes_a_sum_for_each_micro_batch(kept: Certificates, name: str) -> None:
    """A member that goes on from nothing at each micro-batch leaves the class where there are several, only there."""
    operator = f"{name}_weight_gradient"
    (first, *_) = plan(Wish("cpu", operators=(operator,), dtypes=("float32",), inputs=("bell",)))
    question = first.question
    assert isinstance(question, WeightQuestion)
    ours = first.members["invariant"]

    def apart(x: torch.Tensor, gradient: torch.Tensor, lengths: torch.Tensor, micro: int, padding: str) -> torch.Tensor:
        out, start = None, 0
        for part in lengths.split(micro or len(lengths)):
            stop = start + int(part.sum())
            mine = ours(x[start:stop], gradient[start:stop], part, 0, padding)
            out, start = mine if out is None else out + mine, stop
        assert out is not None
        return out

    rows = {r.impl: r for r in ask(question, {"ours": ours, "apart": apart}, first.anchor, kept)}
    assert rows["ours"].status == Status.IDENTICAL
    assert rows["apart"].status == Status.DIVERGENT
    assert rows["apart"].extra["left_at"] == [v for v in question.values if not str(v).endswith(" 0")]
