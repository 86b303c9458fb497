"""What depends on the batch whatever kernel computes it is named: its own axis reduced, and places padding moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from nondet.core.compare import identical
from nondet.kernels.dispatch.block import batch_invariant
from tests.build import rand
from tests.kernels.tiers import at_length, tiny

pytestmark = pytest.mark.usefixtures("held")


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
    "of a packed row, as torchao asks": (lambda: X[:1].amax([1, 2], keepdim=True), f"amax float32: {WHOLE}"),
    "into out": (lambda: torch.amax(X, (0,), out=rand(5, 8)), f"amax.out float32: {FIRST}"),
    "a scale for each column": (lambda: X.amin(0), f"amin float32: {FIRST}"),
    "max.dim": (lambda: X.max(-3), f"max.dim float32: {FIRST}"),
    "mean": (lambda: X.mean((0, 1, 2)), f"mean float32: {WHOLE}"),
    "sum": (lambda: X.sum((0, 1)), f"sum float32: {FIRST}"),
    "an axis from behind": (lambda: X.sum(-3), f"sum float32: {FIRST}"),
    "sort": (lambda: X.sort(dim=0, stable=True), f"sort.stable float32: {FIRST}"),
    "softmax": (lambda: torch.softmax(X, 0), f"softmax float32: {FIRST}"),
    "logsumexp": (lambda: torch.logsumexp(X, 0), f"logsumexp float32: {FIRST}"),
    "var": (lambda: X.var(0), f"var.correction float32: {FIRST}"),
}


HARMLESS: dict[str, Callable[[], Any]] = {
    "a mask": lambda: ((X > 0).all(), (X > 0).any(0)),
    "positions": lambda: torch.arange(12).view(3, 4).max(),
    "each row's own": lambda: (X.amax(-1), X.abs().amax((1, 2)), X.max(1), X.sum(1), X.mean(-1), X.softmax(-1)),
    "each token's of a packed row": lambda: X[:1].amax([2]),
    "one row": lambda: (rand(1, 8).max(), rand(1, 1, 8).amax(), rand(8).max(), rand(1, 8).sum(0)),
    "counts": lambda: (torch.histc(X, 4, -1.0, 1.0), torch.bincount(torch.arange(4))),
    "a complex sum": lambda: torch.complex(X, X) + torch.complex(X, X),
    "a weight's scale": lambda: torch.nn.Parameter(X).amax(),
}


def test_a_reduction_over_the_batch_is_at_risk() -> None:
    """Exact or not, replaced or not: it hands each request the others' numbers, and the coverage says so in words. Not
    so truths, integers, rows by themselves and parameters."""
    for case, (call, words) in MIXES.items():
        assert at_risk(call) == [words], case
    for case, harmless in HARMLESS.items():
        assert at_risk(harmless) == [], case


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
    chosen = torch.tensor([[0, 1], [0, 2], [1, 3], [2, 3], [1, 2], [0, 3]])[..., None]
    return rand(6, 4, 8) * torch.zeros(6, 4, 1).scatter(1, chosen, 1)


MOVES = [f"cumsum float32: {MOVED}"]
SCANS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "a chunked scan": (lambda: padded(rand(9, 4), "left", 0.3).mT.reshape(2, 4, 3, 3).cumsum(-1), MOVES),
    "padding of one chunk": (lambda: padded(rand(9, 4), "left").cumsum(-2), MOVES),
    "padding behind": (lambda: padded(rand(9, 4), "right", 0.3).cumsum(-2), []),
    "no padding": (lambda: rand(2, 9, 4).cumsum(1), []),
    "padding of both": (lambda: padded(rand(9, 4), "left")[1:].expand(2, 9, 4).clone().cumsum(1), []),
    "a request of zeros": (lambda: torch.stack([torch.zeros(9, 4), rand(9, 4)]).cumsum(1), []),
    "a causal mask": (lambda: (rand(2, 9, 9) * torch.ones(9, 9).tril(-1)).cumsum(-2), []),
    "experts": (lambda: experts().sum(1), []),
    "top-p": (lambda: torch.tensor([[0.5, 0.5, 0.0], [0.6, 0.3, 0.1]]).cumsum(-1), []),
}


def test_padding_in_front_is_told_from_what_looks_like_it() -> None:
    """A running sum of some requests that begin with what padding leaves is at risk; masks, choices, ties are not."""
    for case, (call, said) in SCANS.items():
        assert at_risk(call) == said, case


_ORIGINAL = 16  # positions that the model was made for
_LONG = {"original_max_position_embeddings": _ORIGINAL, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
# rope type -> model type, its configuration, its rope's parameters
MODELS: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "longrope": ("phi3", {"max_position_embeddings": 64, "original_max_position_embeddings": _ORIGINAL}, _LONG),
    "dynamic": ("llama", {"max_position_embeddings": _ORIGINAL}, {"factor": 4.0}),
}


def logits_of_row_zero(kind: str, longest: int) -> tuple[bool, list[str]]:
    """A prompt of 7 tokens alone and beside one of `longest`: are its logits equal, and what the coverage says."""
    name, more, rope = MODELS[kind]
    rope = {"rope_type": kind, "rope_theta": 1e4} | rope
    model = tiny(name, num_hidden_layers=1, **more, rope_parameters=rope)
    ids, mask = torch.zeros(2, 2, longest, dtype=torch.long)
    ids[0, :7], mask[0, :7] = torch.arange(1, 8), 1
    ids[1], mask[1] = torch.arange(1, longest + 1), 1
    with torch.no_grad(), batch_invariant() as block:
        alone = model(input_ids=ids[:1, :7]).logits[0]
        beside = model(input_ids=ids, attention_mask=mask).logits[0, :7]
    coverage = block.coverage()
    return identical(alone, beside), [what for what in coverage.at_risk if kind in what]


@pytest.mark.parametrize("kind", MODELS)
def test_frequencies_of_the_longest_request_are_said(kind: str) -> None:
    """Beside a request beyond the original length the bits are others, and the coverage names the embedding; within it
    everybody has the original frequencies, and no word is said of them."""
    said = f"transformers rotary embedding '{kind}': frequencies by the longest request of the step"
    assert logits_of_row_zero(kind, 40) == (False, [said])
    assert logits_of_row_zero(kind, _ORIGINAL - 2) == (True, [])


LENGTHS, WIDTH = (5, 23, 11), 37
PLACES = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT = {"n_embd": 64, "n_head": 4, "n_layer": 1, "n_positions": 64}
NEO = {"hidden_size": 64, "num_heads": 4, "num_layers": 2, "max_position_embeddings": 64, "window_size": 8}
NEO |= {"attention_types": [[["global", "local"], 1]]}
# model type -> (its class, its configuration)
WRITTEN_OUT: dict[str, tuple[str, dict[str, Any]]] = {
    "mpt": ("MptForCausalLM", {"d_model": 64, "n_heads": 4, "n_layers": 1, "max_seq_len": 64}),
    "gptj": ("GPTJForCausalLM", {**GPT, "rotary_dim": 8}),
    "gpt_neo": ("GPTNeoForCausalLM", NEO),
}


def run(name: str, model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits, each request's positions counted from its own first token."""
    places = {} if name == "mpt" else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}  # it has alibi
    logits: torch.Tensor = model(input_ids=ids, attention_mask=mask, **places).logits
    return logits


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((n, torch.float32) for n in WRITTEN_OUT), *at_length(*((n, torch.bfloat16) for n in WRITTEN_OUT))],
)
def test_padding_changes_no_bit_or_is_said_to(name: str, dtype: torch.dtype) -> None:
    """Prompts alone against a batch padded on either side: what is not equal is named by the batch's own coverage."""
    class_name, sizes = WRITTEN_OUT[name]
    cls = getattr(transformers, class_name)
    torch.manual_seed(0)
    model = cls(cls.config_class(**PLACES, **sizes)).to(dtype).eval()
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(5, 128, (length,), generator=generator) for length in LENGTHS]
    with torch.no_grad(), batch_invariant():
        alone = [run(name, model, p[None], torch.ones(1, len(p), dtype=torch.long))[0] for p in prompts]
        for side in ("right", "left"):
            ids, mask = torch.zeros(2, len(prompts), WIDTH, dtype=torch.long)
            for row, prompt in enumerate(prompts):
                place = slice(WIDTH - len(prompt), WIDTH) if side == "left" else slice(len(prompt))
                ids[row, place], mask[row, place] = prompt, 1
            with batch_invariant() as block:
                logits = run(name, model, ids, mask)
            coverage = block.coverage()
            assert coverage.replaced
            differ = [not identical(a, logits[i][mask[i].bool()]) for i, a in enumerate(alone)]
            said = [what for what in (*coverage.left, *coverage.at_risk) if "softmax" in what]
            assert said or not any(differ), f"{side}: requests {differ} have other bits, and nothing says so"
        together = run(name, model, torch.stack([prompts[0]] * 3), torch.ones(3, LENGTHS[0], dtype=torch.long))
        assert all(identical(row, alone[0]) for row in together), "without padding too, so this shows nothing of it"


def test_hidden_scores_are_seen_whatever_hides_them() -> None:
    """A softmax over scores hidden by any of the numbers in use is at risk; one over scores near each other is not."""
    scores = torch.randn(2, 4, 9, 9, generator=torch.Generator().manual_seed(1))
    for hides in (0.0, -1e4, -1e9, torch.finfo(torch.float32).min, -torch.inf):
        said = at_risk(lambda mask=hides: torch.softmax(scores + torch.where(torch.arange(9) > 6, mask, 0.0), -1))
        assert said == ["softmax float32: over scores of which some are hidden"] * bool(hides), hides


def test_what_a_gradient_sums_over_the_batch_is_said() -> None:
    """ "replaced" promises a row's bits, and of a weight's gradient no more than that it repeats."""
    said = "; what gradients sum over the batch repeats, and follows micro-batches)"
    w, bias = rand(6, 8).requires_grad_(), rand(6).requires_grad_()
    with batch_invariant(training=True) as block:
        out = F.silu(F.rms_norm(F.linear(X, w, bias), (6,), rand(6).requires_grad_(), 1e-6))
        assert not any(line.endswith(said) for line in block.coverage().lines())
        out.backward(out.detach())
    lines = {line.split(" ")[1]: line for line in block.coverage().lines()}
    assert all(lines[name].endswith(said) for name in ("mm", "rms_norm_backward"))
    assert not any(lines[name].endswith(said) for name in ("silu", "silu_backward", "rms_norm"))
    assert {"mm", "rms_norm_backward"} <= block.coverage().summed.keys()
    assert "replaced: mm" in block.coverage().counts(), "a run file has the names alone"
    assert not block.coverage().at_risk, "sums over rows are what a gradient is"
