"""What depends on the batch whatever kernel computes it is named: its own axis reduced, and places padding moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nondet.core.compare import identical
from nondet.kernels.dispatch.block import batch_invariant
from tests.build import rand


def at_risk(call: Callable[[], Any]) -> list[str]:
    with torch.no_grad(), batch_invariant() as block:
        call()
    return list(block.coverage().at_risk)


X = rand(3, 5, 8)
WHOLE, FIRST = "over the whole tensor, the batch's axis included", "over the first axis, which may be the batch's"
MIXES: dict[str, tuple[Callable[[], Any], str]] = {
    "one scale for the batch": (lambda: X.abs().amax(), f"amax float32: {WHOLE}"),
    "its axes by name": (lambda: X.abs().amax((0, 1, 2), keepdim=True), f"amax float32: {WHOLE}"),
    "max": (lambda: X.max(), f"max float32: {WHOLE}"),
    "min": (lambda: torch.min(X), f"min float32: {WHOLE}"),
    "aminmax": (lambda: torch.aminmax(X), f"aminmax float32: {WHOLE}"),
    "of a packed row": (lambda: X[:1].amax(), f"amax float32: {WHOLE}"),
    "into out": (lambda: torch.amax(X, (0,), out=rand(5, 8)), f"amax.out float32: {FIRST}"),
    "a scale for each column": (lambda: X.amin(0), f"amin float32: {FIRST}"),
    "max.dim": (lambda: X.max(-3), f"max.dim float32: {FIRST}"),
    "mean": (lambda: X.mean((0, 1, 2)), f"mean float32: {WHOLE}"),
    "sum": (lambda: X.sum((0, 1)), f"sum float32: {FIRST}"),
    "softmax": (lambda: torch.softmax(X, 0), f"softmax float32: {FIRST}"),
    "logsumexp": (lambda: torch.logsumexp(X, 0), f"logsumexp float32: {FIRST}"),
    "var": (lambda: X.var(0), f"var.correction float32: {FIRST}"),
}


@pytest.mark.parametrize("case", MIXES)
def test_a_reduction_over_the_batch_is_at_risk(case: str) -> None:
    """Exact or not, replaced or not: it hands each request the others' numbers, and the coverage says so in words."""
    call, words = MIXES[case]
    assert at_risk(call) == [words]


HARMLESS: dict[str, Callable[[], Any]] = {
    "a mask": lambda: ((X > 0).all(), (X > 0).any(0)),
    "positions": lambda: torch.arange(12).view(3, 4).max(),
    "each row's own": lambda: (X.amax(-1), X.abs().amax((1, 2)), X.max(1), X.sum(1), X.mean(-1), torch.softmax(X, -1)),
    "one row": lambda: (rand(1, 8).max(), rand(1, 1, 8).amax(), rand(8).max(), rand(1, 8).sum(0)),
    "a weight's scale": lambda: torch.nn.Parameter(X).amax(),
}


@pytest.mark.parametrize("case", HARMLESS)
def test_what_mixes_no_requests_is_not_named(case: str) -> None:
    """Truths, integers, rows by themselves and parameters."""
    assert at_risk(HARMLESS[case]) == []


def test_a_gradient_sums_over_the_batch_and_is_not_named_for_it() -> None:
    """The sums of a backward pass over rows are what a gradient is."""
    weight, bias = rand(4, 8).requires_grad_(), rand(4).requires_grad_()
    with batch_invariant() as block:
        F.linear(rand(6, 8), weight, bias).backward(rand(6, 4))
    assert block.coverage().replaced["sum.dim_IntList"] == 1
    assert not block.coverage().at_risk


MOVED = "over places that padding in front moves"


def padded(rows: torch.Tensor, side: str, by: float = 0.0) -> torch.Tensor:
    """rows [T, H], the second of two requests, 3 places shorter than the first, in a batch [2, T, H]."""
    pad = torch.full((3, rows.shape[1]), by)
    short = torch.cat([pad, rows[3:]] if side == "left" else [rows[3:], pad])
    return torch.stack([rows, short])


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_sum_over_padded_places_is_named_where_its_bits_move(side: str) -> None:
    """Zeros in front move the chunks of a sum over a middle axis; zeros behind do not, and are not named."""
    rows = rand(70, 16)
    with torch.no_grad(), batch_invariant() as block:
        together = padded(rows, side).sum(1)[1]
        said = list(block.coverage().at_risk)
        alone = rows[None, 3:].sum(1)[0]
    assert identical(together, alone) == (side == "right")
    assert said == ([f"sum float32: {MOVED}"] if side == "left" else [])
    assert list(block.coverage().at_risk) == said, "alone nothing is padded"


def experts() -> torch.Tensor:
    """Two of four experts' outputs for each of 6 tokens, zeros for the rest."""
    chosen = torch.zeros(6, 4, 1).scatter(
        1, torch.tensor([[0, 1], [0, 2], [1, 3], [2, 3], [1, 2], [0, 3]])[..., None], 1
    )
    return rand(6, 4, 8) * chosen


def in_chunks(x: torch.Tensor) -> torch.Tensor:
    return x.mT.reshape(2, 4, 3, 3)


SCANS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "a chunked scan": (lambda: in_chunks(padded(rand(9, 4), "left", 0.3)).cumsum(-1), [f"cumsum float32: {MOVED}"]),
    "padding of one chunk": (lambda: padded(rand(9, 4), "left").cumsum(-2), [f"cumsum float32: {MOVED}"]),
    "padding behind": (lambda: padded(rand(9, 4), "right", 0.3).cumsum(-2), []),
    "no padding": (lambda: rand(2, 9, 4).cumsum(1), []),
    "padding of both": (lambda: padded(rand(9, 4), "left")[1:].expand(2, 9, 4).clone().cumsum(1), []),
    "a causal mask": (lambda: (rand(2, 9, 9) * torch.ones(9, 9).tril(-1)).cumsum(-2), []),
    "experts": (lambda: experts().sum(1), []),
    "top-p": (lambda: torch.tensor([[0.5, 0.5, 0.0], [0.6, 0.3, 0.1]]).cumsum(-1), []),
}  # fmt: skip


@pytest.mark.parametrize("case", SCANS)
def test_padding_in_front_is_told_from_what_looks_like_it(case: str) -> None:
    """A running sum of some requests that begin with what padding leaves is at risk; masks, choices, ties are not."""
    call, said = SCANS[case]
    assert at_risk(call) == said


def by_hand(x: torch.Tensor, weight: torch.Tensor, bias: Any = None, padding: int = 0, **_: Any) -> torch.Tensor:
    """A convolution of each channel by itself, written as additions in one order."""
    x = F.pad(x, (padding, padding))
    places, out = x.shape[-1] - weight.shape[-1] + 1, torch.zeros(())
    for k in range(weight.shape[-1]):
        out = out + x[..., k : k + places] * weight[:, 0, k, None]
    return out if bias is None else out + bias[:, None]


def test_a_hybrid_without_a_convolution_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state-space layer scans in chunks that left padding moves: other bits, and not a clean coverage."""
    import transformers

    if not hasattr(transformers, "NemotronHForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no NemotronH")
    torch.manual_seed(0)
    config = transformers.NemotronHConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, layers_block_type=["mamba", "attention"],
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, mamba_num_heads=4,
        mamba_head_dim=32, ssm_state_size=16, n_groups=1, chunk_size=16,
    )  # fmt: skip
    model = transformers.NemotronHForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            weight.data *= 8.0  # as it is drawn, the scan is lost in the residual's rounding
        elif name.endswith("dt_bias"):
            weight.data.uniform_(-1.5, 0.5)
    monkeypatch.setattr(F, "conv1d", by_hand)
    ids = torch.randint(1, 128, (2, 75))
    mask = torch.ones_like(ids)
    mask[1, :21] = 0
    with torch.no_grad(), batch_invariant() as alone:
        solo = model(ids[1:, 21:], attention_mask=mask[1:, 21:], use_cache=False).logits[0]
        model(ids, attention_mask=torch.ones_like(ids), use_cache=False)
    assert not alone.coverage().at_risk
    with torch.no_grad(), batch_invariant() as block:
        together = model(ids, attention_mask=mask, use_cache=False).logits[1, 21:]
    assert not identical(solo, together)
    assert list(block.coverage().at_risk) == [f"cumsum float32: {MOVED}"]
