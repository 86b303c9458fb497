"""A whole transformers model under `batch_invariant()`: one row, one answer, however it is batched."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from nondet.core.compare import identical
from nondet.errors import UserError
from nondet.kernels.dispatch import block as dispatch_block
from nondet.kernels.dispatch import transformers_attention as hf_attention
from nondet.kernels.dispatch.block import batch_invariant
from nondet.kernels.dispatch.state import Coverage

LENGTH, PADDING, VOCABULARY = 75, 19, 384
DTYPES = [torch.bfloat16, torch.float32]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def model_of() -> Callable[[torch.dtype, str], Any]:
    """A tiny random Qwen3 with grouped heads, in each dtype, on each device."""
    return cache(lambda dtype, device: build().to(device, dtype))


def build(**more: Any) -> Any:
    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 96,
        "intermediate_size": 200,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "attn_implementation": "sdpa",
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**settings | more)).eval()


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


ROW = tokens(1, LENGTH)


def alone(model: Any) -> torch.Tensor:
    return model(ROW.to(model.device)).logits[0]


def in_a_batch(model: Any) -> torch.Tensor:
    return model(torch.cat([tokens(6, LENGTH, seed=2), ROW]).to(model.device)).logits[-1]


def left_padded(model: Any) -> torch.Tensor:
    ids = torch.cat([torch.zeros(1, PADDING, dtype=torch.long), ROW], 1)
    ids = torch.cat([ids, tokens(1, LENGTH + PADDING, seed=3)]).to(model.device)
    mask = torch.ones_like(ids)
    mask[0, :PADDING] = 0
    position = (mask.cumsum(-1) - 1).clamp_min(0)
    return model(ids, attention_mask=mask, position_ids=position).logits[0, PADDING:]


def right_padded(model: Any) -> torch.Tensor:
    ids = torch.cat([ROW, torch.zeros(1, PADDING, dtype=torch.long)], 1)
    ids = torch.cat([ids, tokens(1, LENGTH + PADDING, seed=4)]).to(model.device)
    mask = torch.ones_like(ids)
    mask[0, LENGTH:] = 0
    return model(ids, attention_mask=mask).logits[0, :LENGTH]


def chunked(*borders: int) -> Callable[[Any], torch.Tensor]:
    def run(model: Any) -> torch.Tensor:
        keys, out = transformers.DynamicCache(), []
        for start, end in zip((0, *borders), (*borders, LENGTH), strict=True):
            out.append(model(ROW[:, start:end].to(model.device), past_key_values=keys, use_cache=True).logits[0])
        return torch.cat(out)

    return run


def static_cache(model: Any) -> torch.Tensor:
    keys, out = transformers.StaticCache(config=model.config, max_cache_len=128), []
    for start, end in ((0, 20), (20, 60), (60, 61), (61, LENGTH)):
        position = torch.arange(start, end, device=model.device)
        out.append(
            model(
                ROW[:, start:end].to(model.device), past_key_values=keys, use_cache=True, cache_position=position
            ).logits[0]
        )
    return torch.cat(out)


def left_padded_decode(model: Any) -> torch.Tensor:
    ids = torch.cat([torch.zeros(1, PADDING, dtype=torch.long), ROW], 1)
    ids = torch.cat([ids, tokens(1, LENGTH + PADDING, seed=3)]).to(model.device)
    mask = torch.ones_like(ids)
    mask[0, :PADDING] = 0
    position = (mask.cumsum(-1) - 1).clamp_min(0)
    keys, out = transformers.DynamicCache(), []
    borders = (0, *range(LENGTH + PADDING - 6, LENGTH + PADDING + 1))
    for start, end in pairwise(borders):
        step = model(
            ids[:, start:end],
            attention_mask=mask[:, :end],
            position_ids=position[:, start:end],
            past_key_values=keys,
            use_cache=True,
        )
        out.append(step.logits[0])
    return torch.cat(out)[PADDING:]


WAYS: dict[str, Callable[[Any], torch.Tensor]] = {
    "in a batch of equal lengths": in_a_batch,
    "left-padded": left_padded,
    "right-padded": right_padded,
    "decoded token by token": chunked(*range(10, LENGTH)),
    "in chunks": chunked(7, 30, 31, 66),
    "with a static cache": static_cache,
    "left-padded and decoded": left_padded_decode,
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_a_row_has_one_answer(model_of: Callable[..., Any], dtype: torch.dtype, device: str, mode: Any) -> None:
    """A row's logits are bitwise equal, however it is batched, padded, chunked or cached; stock comes back after."""
    model = model_of(dtype, device)
    with mode():
        stock = alone(model)
        with batch_invariant() as block:
            right = alone(model)
            different = [name for name, way in WAYS.items() if not identical(way(model), right)]
        assert identical(alone(model), stock)
    assert different == []
    assert block.coverage().at_risk == {}
    assert set(block.coverage().left) <= {"sum.dim_IntList bool", "sum.dim_IntList int64"}  # of the masks: exact
    torch.testing.assert_close(right, stock, rtol=0.02, atol=0.02 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_stock_has_several(model_of: Callable[..., Any], dtype: torch.dtype, device: str) -> None:
    """The same ways without the block: at least one differs, or the test above shows nothing on this machine."""
    with torch.no_grad():
        model = model_of(dtype, device)
        right = alone(model)
        ways = {name: way(model) for name, way in WAYS.items()}
        for logits in ways.values():  # all of them ask the same question
            torch.testing.assert_close(logits, right, rtol=0.02, atol=0.02 if dtype == torch.bfloat16 else 1e-5)
        assert len(ways) == 7
        if all(identical(logits, right) for logits in ways.values()):
            pytest.skip(f"torch's own kernels gave one answer in {dtype} on {device} to: {', '.join(WAYS)}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_a_row_has_one_answer_in_a_window(dtype: torch.dtype, device: str) -> None:
    """A window hides first keys and its cache drops them: a row's logits stay what its prefill gave, or it is said."""
    model = build(use_sliding_window=True, sliding_window=16, max_window_layers=0).to(device, dtype)
    with torch.no_grad(), batch_invariant() as block:
        right = alone(model)
        different = [name for name, way in WAYS.items() if not identical(way(model), right)]
    coverage = block.coverage()
    said = [what for what in (*coverage.left, *coverage.at_risk) if "attention" in what]
    assert different == [] or said
    assert set(different) <= {"right-padded", "with a static cache"}  # their masks hide more than a window does


# --- continuous batching ---

_PROMPTS = [tokens(n, seed=n).tolist() for n in (50, 3, 90, 17, 41, 64, 7, 33, 65, 28, 12, 80)]
_TARGET = tokens(40, seed=40).tolist()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """The engine logs every refusal twice."""
    logger = logging.getLogger("ContinuousBatchingLogger")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


def generate(
    model: Any, prompts: list[list[int]], *, sharing: bool, budget: int, implementation: str = "sdpa"
) -> list[Any]:
    """(tokens, logprobs) of each prompt, in order, from transformers' own continuous batching."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    known = {f.name for f in fields(ContinuousBatchingConfig)}
    before = model.config._attn_implementation
    if "auto_switch_to_flash" not in known:  # transformers 5.17
        model.set_attn_implementation(f"paged|{implementation}")
    elif implementation == "eager":
        model.set_attn_implementation("paged|eager")
    config = ContinuousBatchingConfig(
        **{"page_size" if "page_size" in known else "block_size": 16},
        **({"auto_switch_to_flash": False} if "auto_switch_to_flash" in known else {}),
        num_blocks=200,
        max_batch_tokens=budget,
        max_blocks_per_request=0,
        allow_block_sharing=sharing,
        use_async_batching=False,
        use_cuda_graph=False,
        safety_margin=0.0,
        return_logprobs=True,
    )
    try:
        found = model.generate_batch(
            prompts,
            generation_config=transformers.GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=12),
            continuous_batching_config=config,
            progress_bar=False,
        )
    finally:
        model.set_attn_implementation(before)
    ordered = sorted(found.values(), key=lambda o: int(o.request_id.rsplit("_", 1)[-1]))
    return [(o.generated_tokens, o.logprobs) for o in ordered]


def under_load(model: Any) -> list[Any]:
    """The target's tokens and logprobs: alone, and among others."""
    return [
        generate(model, [_TARGET], sharing=False, budget=64)[0],
        generate(model, [*_PROMPTS, _TARGET], sharing=False, budget=64)[-1],
    ]


def under_other_loads(model: Any) -> list[Any]:
    """With another budget, so other chunks; and twice, so that a prefix is shared."""
    return [
        generate(model, [_TARGET, *_PROMPTS], sharing=False, budget=33)[0],
        *(generate(model, [_TARGET, *_PROMPTS[:4], _TARGET], sharing=True, budget=48)[i] for i in (0, -1)),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_a_request_has_one_answer_under_load(model_of: Callable[..., Any], dtype: torch.dtype, device: str) -> None:
    """Tokens and logprobs are equal bit for bit, whatever runs alongside; stock logprobs are not, on most machines."""
    model = model_of(dtype, device)
    with batch_invariant() as block:
        right, *others = [*under_load(model), *under_other_loads(model)]
    assert [other == right for other in others] == [True] * len(others)
    coverage: Coverage = block.coverage()
    assert sum(n for name, n in coverage.replaced.items() if name.endswith("paged")) > 0
    assert "scaled_dot_product_attention" not in coverage.replaced  # nothing slipped past the stand-in
    assert coverage.at_risk == {}
    stock, loaded = under_load(model)
    if loaded == stock:
        pytest.skip(f"the invariant half held; stock kernels gave one answer too, in {dtype} on {device} here")


def test_without_the_stand_in_the_mask_is_read(model_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers may be imported inside the block, past the stand-in: then the pack's mask tells the requests."""
    model = model_of(torch.float32, "cpu")
    with batch_invariant():
        right = under_load(model)
    others = [pair for pair in dispatch_block._STAND_INS if pair[0] is not hf_attention.install]
    monkeypatch.setattr(dispatch_block, "_STAND_INS", others)
    with batch_invariant() as block:
        assert under_load(model) == right
    assert not any("transformers" in name for name in block.coverage().replaced)
    assert not block.coverage().left


def test_it_is_attention_that_is_stock_without_the_family(model_of: Callable[..., Any]) -> None:
    """With matmul alone the engine's attention stays stock, and the coverage says so."""
    with batch_invariant(["matmul"]) as block:
        generate(model_of(torch.float32, "cpu"), [_TARGET], sharing=False, budget=64)
    assert not any("transformers" in name for name in block.coverage().replaced)
    assert block.coverage().at_risk["scaled_dot_product_attention float32"] > 0


def test_eager_paged_attention_is_replaced_too(model_of: Callable[..., Any]) -> None:
    """Under its own name the engine's eager attention has the same stand-in, so the same answer."""
    model = model_of(torch.float32, "cpu")
    with batch_invariant() as block:
        right = generate(model, [_TARGET], sharing=False, budget=64)
        assert generate(model, [_TARGET], sharing=False, budget=64, implementation="eager") == right
    assert block.coverage().replaced["transformers attention 'paged|eager', paged"] > 0


def test_the_table_of_functions_is_put_back() -> None:
    """After the block, nested or ended by an exception, transformers' table holds what it held before."""
    from transformers.modeling_utils import AttentionInterface

    before = dict(AttentionInterface())
    with batch_invariant(), batch_invariant(["attention"]):
        assert AttentionInterface()["sdpa"] is not before["sdpa"]
    assert dict(AttentionInterface()) == before
    block = batch_invariant()
    with pytest.raises(ZeroDivisionError), block:
        raise ZeroDivisionError
    assert dict(AttentionInterface()) == before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_a_request_has_one_answer_in_a_paged_window(dtype: torch.dtype, device: str) -> None:
    """Continuous batching drops keys that have left the window; the anchor, and so the bits, stay."""
    model = build(use_sliding_window=True, sliding_window=16, max_window_layers=0).to(device, dtype)
    with batch_invariant() as block:
        right, loaded = under_load(model)
        other = generate(model, [_TARGET, *_PROMPTS], sharing=False, budget=33)[0]
    assert [loaded == right, other == right] == [True, True]
    assert block.coverage().at_risk == {}


def test_a_paged_sliding_window_without_positions_is_refused() -> None:
    """Its cache drops first keys, so there is no anchor: an error that says so, not a quiet fall back to stock."""
    from nondet.kernels.dispatch.transformers_attention import _paged

    layer = torch.nn.Module()
    layer.layer_idx, layer.sliding_window = 3, 16  # type: ignore[assignment]  # as a model's layer has them
    x = torch.rand(1, 2, 4, 8)
    for kept in (SimpleNamespace(sliding_windows={3: 1}), SimpleNamespace(layer_to_allocator={3: object()})):
        with pytest.raises(UserError, match="layer 3 has a sliding window of 16, but its cache one of None"):
            _paged(layer, x, x, x, kept, {"sliding_window": 16})
    with pytest.raises(UserError, match="layer 3 has a sliding window of 16, but its cache one of 12"):
        _paged(layer, x, x, x, SimpleNamespace(sliding_windows={3: 12}), {"sliding_window": 16})
    with pytest.raises(UserError, match="layer 3 has a sliding window of 16, and its model does not pass position_ids"):
        _paged(layer, x, x, x, SimpleNamespace(sliding_windows={3: 16}), {"sliding_window": 16})
