"""Gradients of class "fold": the same bits for every micro-batch size, padding and packing; refused where unknown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import nondet
from nondet.errors import UserError
from nondet.kernels.fold.gradients import STEP, Layout, Span, fold_lookup, fold_product, fold_rows, layout_of
from tests.kernels.tiers import at_length

LENGTHS = (5, 33, 16, 47, 20, 64, 9, 31)
VOCABULARY = 96


class Tiny(torch.nn.Module):
    """A language model without attention: each token by itself, so that sums over tokens are all there is."""

    def __init__(self, dtype: torch.dtype = torch.float32, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(VOCABULARY, 48)
        self.norm, self.heads = LlamaRMSNorm(48), LlamaRMSNorm(12)
        self.up, self.down = torch.nn.Linear(48, 80), torch.nn.Linear(80, 48, bias=False)
        self.head = torch.nn.Linear(48, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.to(dtype)

    def forward(  # noqa: D102
        self,
        input_ids: Any,
        attention_mask: Any = None,
        position_ids: Any = None,
        logits_to_keep: int = 0,
        more: Any = None,
    ) -> torch.Tensor:
        x = self.embed(input_ids)
        x = self.heads(x.view(*x.shape[:2], -1, 12)).flatten(2)
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        out: torch.Tensor = self.head(x[:, -logits_to_keep:])
        return out


def sequences() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens, and the weight in the loss that each of them has; few tokens, so that most come often."""
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(1, VOCABULARY, (n,), generator=generator) for n in LENGTHS]
    return [(ids, torch.randn(len(ids), generator=generator)) for ids in drawn]


def batches(micro: int, layout: str, width: int) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """The sequences in micro-batches: arguments of the model, and each token's weight in the loss."""
    known = sequences()
    for first in range(0, len(known), micro):
        part = known[first : first + micro]
        if layout == "packed":
            ids, weights = (torch.cat(x)[None] for x in zip(*part, strict=True))
            places = torch.cat([torch.arange(len(x)) for x, _ in part])[None]
            yield {"input_ids": ids, "position_ids": places}, weights
            continue
        rows = torch.zeros(3, len(part), width)
        for row, (ids, weights) in enumerate(part):
            begin = width - len(ids) if layout == "left" else 0
            at = slice(begin, begin + len(ids))
            rows[0, row, at], rows[1, row, at], rows[2, row, at] = ids.float(), 1.0, weights
        mask = rows[1].long()
        yield (
            {
                "input_ids": rows[0].long(),
                "attention_mask": mask,
                "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
            },
            rows[2],
        )


def backward(model: torch.nn.Module, micro: int = 8, layout: str = "right", width: int = 64, **more: Any) -> None:
    """A sum over tokens of what the model says about each, with weights fixed beforehand."""
    for arguments, weights in batches(micro, layout, width):
        scores = model(**arguments, **more)
        weights = weights[:, -scores.shape[1] :]
        (torch.tanh(scores[..., 1].float()) + scores[..., 2].float()).mul(weights).sum().backward()


def gradients(dtype: torch.dtype, tied: bool = True, **how: Any) -> dict[str, torch.Tensor]:
    model = Tiny(dtype, tied)
    with nondet.batch_invariant(training=True), nondet.fold(model) as sums:
        backward(model, **how)
        got = {name: sums.main_grad(p) for name, p in model.named_parameters()}
    assert all(g is not None and g.dtype is torch.float32 for g in got.values())
    assert all(p.requires_grad for p in model.parameters())
    return {name: g.clone() for name, g in got.items() if g is not None}


def stock(dtype: torch.dtype, **how: Any) -> dict[str, torch.Tensor]:
    model = Tiny(dtype)
    backward(model, **how)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


WAYS = [
    (4, "right", 64),
    (2, "right", 64),
    (1, "right", 64),
    (8, "right", 96),
    (4, "left", 71),
    (8, "packed", 0),
    (2, "packed", 0),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_layout_moves_a_bit(dtype: torch.dtype) -> None:
    """Micro-batches, padding on either side and packing: all tensors equal; stock's are not."""
    right, usual = gradients(dtype), stock(dtype)
    moved = set()
    for micro, layout, width in WAYS:
        got = gradients(dtype, micro=micro, layout=layout, width=width)
        assert [name for name in right if not torch.equal(right[name], got[name])] == [], (micro, layout, width)
        other = stock(dtype, micro=micro, layout=layout, width=width)
        moved |= {name for name in usual if not torch.equal(usual[name], other[name])}
    assert moved == right.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_as_near_to_float64_as_torchs(dtype: torch.dtype) -> None:
    """The whole gradient's error against autograd in float64 on the same weights, at most 1.1 times stock's."""
    oracle = Tiny(dtype, tied=False).double()
    oracle.norm.weight.data, oracle.heads.weight.data = (m.weight.data.double() for m in (oracle.norm, oracle.heads))

    def wide(self: LlamaRMSNorm, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))
        return out

    for norm in (oracle.norm, oracle.heads):
        norm.forward = wide.__get__(norm)
    for arguments, weights in batches(8, "right", 64):
        scores = oracle(**arguments)
        (torch.tanh(scores[..., 1]) + scores[..., 2]).mul(weights.double()).sum().backward()
    model = Tiny(dtype, tied=False)
    backward(model)
    ours = gradients(dtype, tied=False)
    right = torch.cat([p.grad.flatten() for p in oracle.parameters() if p.grad is not None])
    theirs = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    mine = torch.cat([ours[name].flatten() for name, _ in model.named_parameters()])
    assert (mine.double() - right).norm() <= 1.1 * (theirs.double() - right).norm()


@pytest.mark.parametrize("tokens", [48, *at_length(240, 1024)])
def test_sums_are_as_near_to_float64_as_torchs(tokens: int) -> None:
    """Of the same operands, each kind of sum by itself: at most 1.1 times the error of torch's own."""
    generator = torch.Generator().manual_seed(tokens)
    grad, x = torch.randn(tokens, 96, generator=generator), torch.randn(tokens, 80, generator=generator)
    ids = torch.randint(0, 9, (tokens,), generator=generator)
    ones = F.one_hot(ids, 9).double()
    product, rows, lookup = torch.zeros(96, 80), torch.zeros(96, dtype=torch.float64), torch.zeros(9, 96)
    fold_product(product, grad, x)
    fold_rows(rows, grad[:, None])
    fold_lookup(lookup, grad, ids)
    embedded = torch.ops.aten.embedding_dense_backward(grad, ids, 9, -1, False)
    for ours, theirs, right in (
        (product, grad.t() @ x, grad.double().t() @ x.double()),
        (rows.float(), grad.sum(0), grad.double().sum(0)),
        (lookup, embedded, ones.t() @ grad.double()),
    ):
        assert (ours.double() - right).norm() <= 1.1 * (theirs.double() - right).norm()


def test_what_a_trainer_sees() -> None:
    """`grad` is the float32 sum rounded once; zero_grad begins anew, to None or in place; a step follows."""
    model = Tiny(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = []
    with nondet.batch_invariant(training=True), nondet.fold(model) as sums:
        for to_none in (True, False, True):
            backward(model, micro=4)
            for parameter in model.parameters():
                total = sums.main_grad(parameter)
                assert total is not None
                assert parameter.grad is not None
                assert torch.equal(parameter.grad, total.to(torch.bfloat16))
            seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
    assert all(torch.equal(a, b) for other in seen[1:] for a, b in zip(seen[0], other, strict=True))


def test_steps_end_in_the_same_weights() -> None:
    """AdamW with clipping, micro-batches of 8, 3 and 1: the weights are those of one batch; stock's are not."""

    def trained(micro: int, ours: bool) -> list[torch.Tensor]:
        model = Tiny()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with ExitStack() as stack:
            if ours:
                stack.enter_context(nondet.batch_invariant(training=True))
                stack.enter_context(nondet.fold(model))
            for _ in range(3):
                backward(model, micro)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    whole = trained(8, True)
    for micro in (3, 1):
        assert all(torch.equal(a, b) for a, b in zip(whole, trained(micro, True), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(trained(8, False), trained(1, False), strict=True))


class Checkpointed(Tiny):
    """What lies between embedding and head is computed again on the way back."""

    reentrant = False

    def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None) -> torch.Tensor:  # noqa: D102
        def between(x: torch.Tensor) -> torch.Tensor:
            x = self.heads(x.view(*x.shape[:2], -1, 12)).flatten(2)
            return x + self.down(torch.relu(self.up(self.norm(x))))

        out: torch.Tensor = self.head(checkpoint(between, self.embed(input_ids), use_reentrant=self.reentrant))
        return out


def test_checkpointing_changes_nothing() -> None:
    """The bits without it, for whole batches and single sequences; the reentrant form is refused."""
    for micro in (8, 1):
        model = Checkpointed()
        with nondet.batch_invariant(training=True), nondet.fold(model) as sums:
            backward(model, micro)
            got = [sums.main_grad(p) for p in model.parameters()]
        assert all(
            g is not None and torch.equal(g, w) for g, w in zip(got, gradients(torch.float32).values(), strict=True)
        )
    model.reentrant = True
    model.zero_grad()
    with (
        nondet.batch_invariant(training=True),
        nondet.fold(model),
        pytest.raises(UserError, match="reentrant checkpointing"),
    ):
        backward(model)


@pytest.mark.parametrize("threads", [2, *at_length(1, 3)])
def test_autocast_and_threads(threads: int) -> None:
    """float32 weights under bfloat16 autocast, as trainers have it, on several threads."""
    torch.set_num_threads(threads)

    def run(micro: int) -> list[torch.Tensor]:
        model = Tiny()
        with nondet.batch_invariant(training=True), nondet.fold(model), torch.autocast("cpu", torch.bfloat16):
            backward(model, micro)
        return [p.grad for p in model.parameters() if p.grad is not None]

    whole, apart = run(8), run(1)
    assert len(whole) == len(gradients(torch.float32))
    assert all(torch.equal(a, b) for a, b in zip(whole, apart, strict=True))


def test_columns_that_the_head_leaves_out_change_nothing() -> None:
    """`logits_to_keep`, as TRL calls models, with a loss on the kept columns alone."""

    def run(keep: int) -> list[torch.Tensor]:
        model = Tiny()
        with nondet.batch_invariant(training=True), nondet.fold(model):
            for arguments, weights in batches(4, "left", 64):
                scores = model(**arguments, logits_to_keep=keep)[:, -6:]
                scores[..., 2].mul(weights[:, -6:]).sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert all(torch.equal(a, b) for a, b in zip(run(0), run(6), strict=True))


def test_as_many_tokens_as_heads() -> None:
    """Which axis is the tokens' has to be known from a call before; then 4 tokens of 4 heads are a batch, too."""
    ids = IDS[:1].repeat(1, 2)

    def run(*parts: torch.Tensor) -> list[torch.Tensor]:
        model = Tiny()
        with nondet.batch_invariant(training=True), nondet.fold(model):
            for part in parts:
                model(part)[..., 1].sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    places = torch.cat([torch.arange(8), torch.arange(4)])[None]
    model = Tiny()
    with nondet.batch_invariant(training=True), nondet.fold(model):
        model(ids, position_ids=places)[..., 1].sum().backward()
    got = run(ids[:, :8], ids[:, 8:])
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), got, strict=True) if p.grad is not None)
    with pytest.raises(UserError, match="which axis is the tokens'"):
        run(ids[:, 8:])


def test_sequences_can_be_said() -> None:
    """An argument that nobody knows is refused, unless the caller says where the sequences lie."""
    arguments, weights = next(batches(2, "right", 64))
    arguments = {"input_ids": arguments["input_ids"], "more": arguments["attention_mask"]}
    model = Tiny()
    with nondet.batch_invariant(training=True), nondet.fold(model) as sums:
        with pytest.raises(UserError, match="'more' may move tokens"):
            model(**arguments)
        sums.sequences([(row, 0, n) for row, n in enumerate(LENGTHS[:2])])
        model(**arguments)[..., 1].mul(weights).sum().backward()
        said = [p.grad for p in model.parameters()]
    other = Tiny()
    with nondet.batch_invariant(training=True), nondet.fold(other):
        arguments, weights = next(batches(2, "left", 64))
        other(**arguments)[..., 1].mul(weights).sum().backward()
    assert all(a is not None and b is not None for a, b in zip(said, other.parameters(), strict=True))
    assert all(
        torch.equal(a, p.grad)
        for a, p in zip(said, other.parameters(), strict=True)
        if a is not None and p.grad is not None
    )


IDS = torch.ones(2, 6, dtype=torch.long)
MASK = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
PLACES = torch.arange(6).repeat(2, 1)


def test_layouts() -> None:
    """Whole rows; what the mask says; sequences where positions begin anew; borders of packed ones."""

    def spans(**arguments: Any) -> list[list[int]]:
        at = layout_of(arguments).places(next(iter(arguments.values())).numel(), torch.device("cpu"))
        assert at is not None
        return [at.rows.tolist(), at.slots.tolist(), [at.size]]

    whole = [[*range(12)], [*range(6), *range(STEP, STEP + 6)], [2 * STEP]]
    assert spans(input_ids=IDS) == whole
    assert spans(input_ids=IDS, position_ids=PLACES[:1]) == whole
    short = [[*range(4), *range(6, 12)], [*range(4), *range(STEP, STEP + 6)], [2 * STEP]]
    assert spans(input_ids=IDS, attention_mask=MASK) == short
    left = spans(input_ids=IDS, attention_mask=MASK.flip(-1), position_ids=(MASK.flip(-1).cumsum(-1) - 1).clamp(min=0))
    assert left == [[*range(2, 12)], *short[1:]]
    packed = torch.tensor([[0, 1, 2, 3, 0, 1]])
    assert spans(input_ids=IDS[:1], position_ids=packed) == [[*range(6)], [0, 1, 2, 3, STEP, STEP + 1], [2 * STEP]]
    borders = torch.tensor([0, 4, 6])
    assert spans(input_ids=IDS[:1], position_ids=packed, cu_seq_lens_q=borders)[1] == [0, 1, 2, 3, STEP, STEP + 1]
    assert layout_of({"input_ids": IDS}).places(7, torch.device("cpu")) is None


UNKNOWN: list[tuple[dict[str, Any], str]] = [
    ({}, "has no input_ids"),
    ({"attention_mask": MASK[:, None, None]}, "none of .B, T."),
    ({"attention_mask": MASK * 2}, "other numbers than 0 and 1"),
    ({"attention_mask": torch.tensor([[1, 0, 1, 1, 1, 1]] * 2)}, "a hole in row 0"),
    ({"attention_mask": MASK.flip(-1)}, "left padding without position_ids"),
    ({"attention_mask": MASK.flip(-1), "position_ids": PLACES}, "row 0 go on with 2 at column 2"),
    ({"attention_mask": MASK, "position_ids": torch.tensor([[0, 1, 0, 1, 2, 3]] * 2)}, "begin anew within"),
    ({"position_ids": PLACES + 1}, "go on with 1 at column 0"),
    ({"position_ids": PLACES[:, :4]}, "position_ids of .2, 4. are none"),
    ({"cu_seq_lens_q": torch.tensor([0, 4, 6])}, "not within one row"),
    ({"labels": IDS}, "mean over the micro-batch"),
    ({"token_type_ids": IDS}, "'token_type_ids' may move tokens"),
]


def test_unknown_layouts_are_refused_in_one_line() -> None:
    """Never guessed: the line says what is not known."""
    for arguments, line in UNKNOWN:
        given = {"input_ids": IDS, **arguments} if arguments else {"ids": IDS}
        with pytest.raises(UserError, match=line) as caught:
            layout_of(given)
        assert "\n" not in str(caught.value)


def test_spans_lie_beside_each_other() -> None:
    """Beyond the batch, or over another sequence."""
    for spans in ([Span(0, 0, 7)], [Span(2, 0, 1)], [Span(0, -1, 2)], [Span(0, 0, 3), Span(0, 2, 2)]):
        with pytest.raises(UserError, match="lies outside"):
            Layout((2, 6), spans)


def twice(model: torch.nn.Module, arguments: dict[str, Any]) -> None:
    (model(**arguments).sum() + model(**arguments).sum()).backward()


def again(model: torch.nn.Module, arguments: dict[str, Any]) -> None:
    loss = model(**arguments).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def changed(model: torch.nn.Module, arguments: dict[str, Any]) -> None:
    for _ in range(2):
        model(**arguments).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-6)


def at_padding(model: torch.nn.Module, arguments: dict[str, Any]) -> None:
    model(**arguments, attention_mask=MASK).sum().backward()


def past_the_model(model: Any, arguments: dict[str, Any]) -> None:
    model.up(model.embed(arguments["input_ids"])).sum().backward()


@pytest.mark.parametrize(
    ("mistake", "line"),
    [
        (twice, "one micro-batch at a time"),
        (again, "one micro-batch at a time"),
        (changed, "was not made by this fold, or changed since"),
        (at_padding, "head: the loss has a gradient at padding"),
        (past_the_model, "embed was called past the model"),
    ],
)
def test_mistakes_are_refused_and_leave_nothing(mistake: Callable[..., None], line: str) -> None:
    """One line; parameters learn again; after zero_grad the sums are those of a fresh start."""
    model = Tiny()
    with nondet.batch_invariant(training=True), nondet.fold(model) as sums:
        with pytest.raises(UserError, match=line):
            mistake(model, {"input_ids": IDS})
        assert all(p.requires_grad and sums.main_grad(p) is None for p in model.parameters())
        model.zero_grad()
        backward(model)
        got = [p.grad for p in model.parameters()]
    assert all(g is not None and torch.equal(g, w) for g, w in zip(got, gradients(torch.float32).values(), strict=True))


def test_what_is_no_layer_of_ours_is_refused_by_name() -> None:
    """An unknown module with parameters, a frozen one not; a double weight; hooks on a gradient; no block; twice in."""
    model = Tiny()
    model.other = torch.nn.LayerNorm(4)
    with pytest.raises(UserError, match=r"weight, bias of other \(LayerNorm\)"):
        nondet.fold(model)
    model.other.requires_grad_(False)
    with nondet.batch_invariant(), pytest.raises(UserError, match=r"outside of batch_invariant\(training"):
        nondet.fold(model).__enter__()
    with (
        nondet.batch_invariant(training=True),
        nondet.fold(model) as sums,
        pytest.raises(UserError, match="entered already"),
    ):
        sums.__enter__()
    with pytest.raises(UserError, match=r"embed\.weight: Parameter of torch.float64"):
        nondet.fold(Tiny(torch.float64))
    model.up.weight.register_hook(lambda grad: grad)
    with pytest.raises(UserError, match=r"up\.weight has hooks"):
        nondet.fold(model)


class Shaky(Tiny):
    """An operator between the layers whose bits may follow the batch, and no kernel of ours."""

    def forward(self, input_ids: Any, **more: Any) -> torch.Tensor:  # noqa: D102
        x = self.embed(input_ids)
        out: torch.Tensor = self.head(F.conv1d(x.mT, torch.ones(48, 48, 1)).mT)
        return out


def test_a_gradient_at_risk_is_refused() -> None:
    """A sum of parts that follow the batch follows it as well: what is not covered is named."""
    model = Shaky()
    with nondet.batch_invariant(training=True), nondet.fold(model):
        with pytest.raises(UserError, match=r"at risk: .*convolution.*Take a model"):
            model(IDS).sum().backward()
        assert all(p.grad is None for p in model.parameters())


def test_a_model_is_as_before_afterwards() -> None:
    """Without gradients nothing is counted or asked; after the block autograd is torch's."""
    model = Tiny()
    with nondet.batch_invariant(training=True), nondet.fold(model):
        with torch.no_grad():
            model(IDS, more=IDS)
        inside = model(IDS)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    backward(model)
    usual = stock(torch.float32)
    assert all(p.grad is not None and torch.equal(p.grad, usual[n]) for n, p in model.named_parameters())
    assert inside.requires_grad


def test_a_chain_goes_on_from_what_was_there() -> None:
    """In one call or in several, cut at multiples of 16; another cut is another order, and shows."""
    generator = torch.Generator().manual_seed(5)
    grad, x = torch.randn(96, 40, generator=generator), torch.randn(96, 24, generator=generator)

    def product(*borders: int) -> torch.Tensor:
        acc = torch.zeros(40, 24)
        for begin, end in zip((0, *borders), (*borders, 96), strict=True):
            fold_product(acc, grad[begin:end], x[begin:end])
        return acc

    def rows(*borders: int) -> torch.Tensor:
        acc = torch.zeros(40, dtype=torch.float64)
        for begin, end in zip((0, *borders), (*borders, 96), strict=True):
            fold_rows(acc, grad[begin:end, None])
        return acc

    assert torch.equal(product(), product(16, 80))
    assert torch.equal(rows(), rows(48))
    whole = grad.double().t() @ x.double()
    assert (product() - whole).norm() / whole.norm() < 1e-6
    separate = product() * 0
    for begin in (0, 48):
        part = torch.zeros(40, 24)
        fold_product(part, grad[begin : begin + 48], x[begin : begin + 48])
        separate += part
    assert not torch.equal(separate, product())


def test_a_layout_that_was_met_is_not_laid_out_again() -> None:
    """By what it says, not by the call; tokens that lie in their places already are left there."""
    spans = [Span(0, 1, 16), Span(1, 0, 17)]
    one, same = (Layout((2, 17), spans).places(34, torch.device("cpu")) for _ in range(2))
    other = Layout((2, 17), spans[::-1]).places(34, torch.device("cpu"))
    assert one is not None
    assert other is not None
    assert one is same
    assert one.rows is not other.rows
    assert one.taken is not None
    for shape, spans, there in (((2, 16), [Span(0, 0, 16), Span(1, 0, 16)], True), ((1, 17), [Span(0, 0, 17)], False)):
        places = Layout(shape, spans).places(shape[0] * shape[1], torch.device("cpu"))
        assert places is not None
        assert (places.taken is None) == there
    assert torch.equal(one.taken[one.slots].long(), one.rows)
    assert (one.taken >= 0).sum() == len(one.rows) == 33


def test_lookups_are_added_in_order() -> None:
    """As one addition after the other, whatever comes often."""
    generator = torch.Generator().manual_seed(6)
    ids, rows = torch.randint(0, 5, (60,), generator=generator), torch.randn(60, 8, generator=generator)
    acc = torch.zeros(7, 8)
    fold_lookup(acc, rows[:23], ids[:23])
    fold_lookup(acc, rows[23:], ids[23:])
    right = np.zeros((7, 8), np.float32)
    for at, row in zip(ids.tolist(), rows.numpy(), strict=True):
        right[at] += row
    assert np.array_equal(acc.numpy(), right)
