"""A token's logprob: one formula for the draw and the trainer, its gradient, and what it refuses."""

from __future__ import annotations

import pytest
import torch

import nondet
from nondet.core.compare import identical
from nondet.errors import UserError
from nondet.sampling.engine import draw_rows
from nondet.sampling.plan import Sampling


def rows_of(count: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count * width)
    return (torch.randn(count, width, generator=generator) * 3).to(dtype)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_it_has_the_bits_that_the_draw_records(device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        rows = rows_of(48, 1003 if device == "cpu" else 32003, dtype).to(device)
        draws = draw_rows(rows.float(), [(Sampling(1.0, 0, 1.0, seed, True), 5) for seed in range(len(rows))])
        recorded = torch.tensor([draw.logprob for draw in draws])
        ids = torch.tensor([draw.token for draw in draws], device=device)
        for size in (48, 3):
            parts = [nondet.token_logprobs(rows[i : i + size], ids[i : i + size]) for i in range(0, 48, size)]
            assert identical(torch.cat(parts).cpu(), recorded)
        assert not identical(rows.float().log_softmax(-1).gather(-1, ids[:, None])[:, 0].cpu(), recorded)


@pytest.mark.parametrize("block", [False, True])
def test_a_row_has_its_bits_and_its_gradient_in_any_batch(block: bool) -> None:
    rows, ids = rows_of(48, 777), torch.arange(48) * 16

    def both(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        mine = rows[part].clone().requires_grad_()
        out = nondet.token_logprobs(mine, ids[part], 0.7)
        (out * torch.linspace(-1.0, 2.0, 48)[part]).sum().backward()
        return out.detach(), mine.grad

    with nondet.batch_invariant() if block else torch.enable_grad():
        whole = both(slice(0, 48))
        for size in (1, 5, 16):
            parts = [both(slice(i, i + size)) for i in range(0, 48, size)]
            assert identical(torch.cat([p[0] for p in parts]), whole[0])
            assert identical(torch.cat([p[1] for p in parts]), whole[1])


@pytest.mark.parametrize("support", [{}, {"top_k": 20}, {"top_p": 0.8}, {"top_k": 30, "top_p": 0.9}])
def test_values_and_gradient_against_float64(support: dict[str, float]) -> None:
    rows, ids = rows_of(20, 200).double().requires_grad_(), rows_of(20, 200).argmax(-1)
    kept = torch.zeros(rows.shape, dtype=torch.bool)
    for i, row in enumerate(rows.detach() / 1.5):
        order = row.argsort(descending=True)[: int(support.get("top_k", 200))]
        shares = row[order].softmax(-1).cumsum(-1)
        kept[i, order[: int((shares < support.get("top_p", 2.0)).sum()) + 1]] = True
    oracle = (rows / 1.5).masked_fill(~kept, -torch.inf).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    out = nondet.token_logprobs(rows, ids, 1.5, **support)
    assert torch.allclose(out, oracle, rtol=0, atol=1e-11)  # weights below 2^-44 of the largest are cut
    (expected,) = torch.autograd.grad(oracle.sum(), rows)
    (found,) = torch.autograd.grad(out.sum(), rows)
    assert torch.allclose(found, expected, rtol=0, atol=1e-11)
    assert nondet.token_logprobs(rows.detach().float(), ids, 1.5, **support).dtype is torch.float32


def test_what_is_not_kept_has_no_chance_and_no_gradient_and_no_numbers_none() -> None:
    rows = torch.tensor([[3.0, 2.0, 1.0, 0.0]], requires_grad=True)
    out = nondet.token_logprobs(rows, torch.tensor([3]), top_k=2)
    assert out.item() == -torch.inf
    out.backward(torch.ones(1))
    assert not rows.grad.any()
    rows = torch.tensor([[1.0, torch.nan], [torch.inf, 0.0], [1.0, -torch.inf]])
    out = nondet.token_logprobs(rows, torch.tensor([0, 0, 0]))
    assert out.isnan().tolist() == [True, True, False]
    assert out[2] == 0.0
    assert nondet.token_logprobs(torch.zeros(0, 5), torch.zeros(0, dtype=torch.long)).shape == (0,)
    rows = rows_of(6, 50)
    ids = torch.arange(6)
    flat = nondet.token_logprobs(rows, ids)
    assert identical(nondet.token_logprobs(rows.view(2, 3, 50), ids.view(2, 3)).view(-1), flat)


def test_bad_input_is_one_line() -> None:
    rows = torch.zeros(2, 3)
    for logits, ids, more, words in [
        (rows, [0, 0, 0], {}, "one for each row"),
        (rows, [0, 3], {}, "no token 3 of 3"),
        (rows, [0, -100], {}, "no token -100"),
        (rows.long(), [0, 1], {}, "no logits torch.int64"),
        (rows, [0, 1], {"temperature": 0.0}, "temperature 0.0"),
        (rows, [0, 1], {"top_p": 0.0}, "top_p 0.0"),
        ([[0.0]], [0], {}, "takes tensors"),
    ]:
        with pytest.raises(UserError, match=words):
            nondet.token_logprobs(logits, torch.tensor(ids), **more)
