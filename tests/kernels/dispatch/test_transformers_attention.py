"""A whole transformers model under `batch_invariant()`: one row, one answer, however it is batched."""

import functools
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers.models.llama import modeling_llama as modeling

from nondet.core.compare import identical
from nondet.core.inputs import generator, make
from nondet.errors import UserError
from nondet.kernels.dispatch import block as dispatch_block
from nondet.kernels.dispatch import transformers_attention as hf_attention
from nondet.kernels.dispatch.block import batch_invariant
from tests.kernels.tiers import at_length, exposed, tiny

LENGTH, PADDING, VOCABULARY = 75, 19, 384
_LAYERS = ["sliding_attention", "full_attention"]
# name -> (model type, what is its own); Gemma 2 with a window in its first layer, and caps low enough to bend
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 512}),
    "gemma3": ("gemma3_text", {"query_pre_attn_scalar": 32, "layer_types": _LAYERS}),
    "experts": ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}),
    "windows": ("qwen3", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}),
    "eager": ("qwen3", {"attn_implementation": "eager"}),
    "eager gemma2": (
        "gemma2",
        {
            "attn_implementation": "eager", "sliding_window": 12, "layer_types": _LAYERS, "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 0.5,
        },
    ),
}  # fmt: skip


@functools.cache
def built(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    kind, more = ARCHITECTURES[name]
    own = {"hidden_size": 96, "intermediate_size": 200, "head_dim": 32} | more
    how = {"attn_implementation": own.pop("attn_implementation", "sdpa")}
    return tiny(kind, how, **own).to(device, dtype)


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


ROW = tokens(1, LENGTH)


def alone(model: Any) -> torch.Tensor:
    return model(ROW.to(model.device)).logits[0]


def padded_on_the_left(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.cat([torch.zeros(1, PADDING, dtype=torch.long), ROW], 1)
    ids = torch.cat([ids, tokens(1, LENGTH + PADDING, seed=3)]).to(device)
    mask = torch.ones_like(ids)
    mask[0, :PADDING] = 0
    return ids, mask, (mask.cumsum(-1) - 1).clamp_min(0)


def left_padded(model: Any) -> torch.Tensor:
    ids, mask, position = padded_on_the_left(model.device)
    return model(ids, attention_mask=mask, position_ids=position).logits[0, PADDING:]


def right_padded(model: Any) -> torch.Tensor:
    ids = torch.cat([ROW, torch.zeros(1, PADDING, dtype=torch.long)], 1)
    ids = torch.cat([ids, tokens(1, LENGTH + PADDING, seed=4)]).to(model.device)
    mask = torch.ones_like(ids)
    mask[0, LENGTH:] = 0
    return model(ids, attention_mask=mask).logits[0, :LENGTH]


def cached(model, keys, ids, borders, mask=None, places=None) -> torch.Tensor:
    """The first row's logits, in steps that end at the borders."""
    out, ids = [], ids.to(model.device)
    for start, end in pairwise((0, *borders, ids.shape[1])):
        position = torch.arange(start, end, device=model.device)
        more = {} if mask is None else {"attention_mask": mask[:, :end], "position_ids": places[:, start:end]}
        step = model(ids[:, start:end], past_key_values=keys, use_cache=True, cache_position=position, **more)
        out.append(step.logits[0])
    return torch.cat(out)


def chunked(*borders: int, dropping: bool = False) -> Callable[[Any], torch.Tensor]:
    """From a cache that keeps all keys, or drops those that have left a window."""

    def run(model: Any) -> torch.Tensor:
        return cached(model, transformers.DynamicCache(**({"config": model.config} if dropping else {})), ROW, borders)

    return run


def static_cache(model: Any) -> torch.Tensor:
    return cached(model, transformers.StaticCache(config=model.config, max_cache_len=128), ROW, (20, 60, 61))


def left_padded_decode(model: Any) -> torch.Tensor:
    ids, mask, position = padded_on_the_left(model.device)
    end = LENGTH + PADDING
    return cached(model, transformers.DynamicCache(), ids, range(end - 3, end), mask, position)[PADDING:]


WAYS: dict[str, Callable[[Any], torch.Tensor]] = {
    "in a batch": lambda model: model(torch.cat([tokens(6, LENGTH, seed=2), ROW]).to(model.device)).logits[-1],
    "left-padded": left_padded,
    "right-padded": right_padded,
    "decoded token by token": chunked(*range(70, LENGTH)),
    "in chunks": chunked(7, 30, 31, 66),
    "with a static cache": static_cache,
    "left-padded and decoded": left_padded_decode,
}
EAGER = {name: WAYS[name] for name in ("in a batch", "left-padded", "in chunks")}
EAGER["from a cache that drops keys"] = chunked(5, *range(70, LENGTH), dropping=True)
EXACT = {"sum.dim_IntList bool", "sum.dim_IntList int64"}  # of masks


@pytest.mark.parametrize(
    ("name", "device", "dtype"),
    [
        *((name, "cpu", torch.float32) for name in ("qwen3", "gemma3", "experts", "windows", "eager gemma2", "eager")),
        *at_length(*((name, "cpu", torch.float32) for name in ("llama", "mistral"))),
        *at_length(*((name, "cpu", torch.bfloat16) for name in ("qwen3", "windows"))),
        *(
            pytest.param(name, "cuda", dtype, marks=pytest.mark.gpu)
            for name in ("qwen3", "windows")
            for dtype in (torch.bfloat16, torch.float32)
        ),
        *(pytest.param(name, "cuda", torch.float32, marks=pytest.mark.gpu) for name in ("eager gemma2", "eager")),
    ],
)
def test_a_row_has_one_answer(name: str, dtype: torch.dtype, device: str) -> None:
    """A row's logits are bitwise equal, however it is batched, padded, chunked or cached; stock comes back after."""
    model, most = built(name, dtype, device), 0.02 if dtype == torch.bfloat16 else 1e-4
    ways = EAGER if "eager" in name else WAYS
    with torch.inference_mode():
        stock, others = alone(model), [way(model) for way in ways.values()]
        with batch_invariant() as block:
            right = alone(model)
            different = [what for what, way in ways.items() if not identical(way(model), right)]
        assert identical(alone(model), stock)
    differs = not all(identical(other, stock) for other in others)
    assert differs or (device, ways) == ("cuda", WAYS), "stock should differ somewhere, or this shows nothing"
    coverage = block.coverage()
    assert "eager" not in name or coverage.replaced["transformers eager attention"] > 0
    if name == "windows":  # masks that hide more than the window does are said to
        assert set(different) <= {"right-padded", "with a static cache"}
        assert [what for what in exposed(block) if "attention" in what] or not different
    else:
        assert (different, coverage.at_risk) == ([], {})
        assert set(coverage.left) <= EXACT
    for logits in (right, *others):
        torch.testing.assert_close(logits, stock, rtol=0.02, atol=most)


_PROMPTS = [tokens(n, seed=n).tolist() for n in (50, 3, 65, 28)]
_TARGET = tokens(40, seed=40).tolist()


def generate(model, prompts, *, budget, sharing=False, implementation="sdpa") -> list[Any]:
    """(tokens, logprobs) of each prompt, in order, from transformers' own continuous batching."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    known = {f.name for f in fields(ContinuousBatchingConfig)}
    before = model.config._attn_implementation
    if "auto_switch_to_flash" not in known:  # transformers 5.17
        model.set_attn_implementation(f"paged|{implementation}")
    elif implementation == "eager":
        model.set_attn_implementation("paged|eager")
    given = {"num_blocks": 200, "max_batch_tokens": budget, "max_blocks_per_request": 0, "safety_margin": 0.0}
    given |= {"allow_block_sharing": sharing, "use_async_batching": False, "use_cuda_graph": False}
    given |= {"page_size" if "page_size" in known else "block_size": 16}
    given |= dict.fromkeys(known & {"auto_switch_to_flash"}, False)
    config = ContinuousBatchingConfig(**given, return_logprobs=True)
    greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=6)
    how = {"generation_config": greedy, "continuous_batching_config": config, "progress_bar": False}
    try:
        found = model.generate_batch(prompts, **how)
    finally:
        model.set_attn_implementation(before)
    ordered = sorted(found.values(), key=lambda o: int(o.request_id.rsplit("_", 1)[-1]))
    return [(o.generated_tokens, o.logprobs) for o in ordered]


@pytest.mark.parametrize(
    ("name", "device", "dtype"),
    [
        ("qwen3", "cpu", torch.float32),
        ("eager gemma2", "cpu", torch.float32),  # paged caches of a window and of all keys, and a soft cap
        *at_length(("windows", "cpu", torch.float32), ("qwen3", "cpu", torch.bfloat16)),
        *(
            pytest.param(name, "cuda", dtype, marks=pytest.mark.gpu)
            for name in ("qwen3", "windows", "eager gemma2")
            for dtype in (torch.bfloat16, torch.float32)[name.startswith("eager") :]
        ),
    ],
)
def test_a_request_has_one_answer_under_load(name: str, device: str, dtype: torch.dtype) -> None:
    model, sharing, how = built(name, dtype, device), name == "qwen3", "eager" if "eager" in name else "sdpa"
    with batch_invariant() as block:
        right = generate(model, [_TARGET], budget=64, implementation=how)[0]
        loaded = generate(model, [*_PROMPTS, _TARGET], budget=64, implementation=how)[-1]
        again = [_TARGET, *_PROMPTS[:2], _TARGET]
        others = generate(model, again, budget=33, sharing=sharing, implementation=how)
    assert [x == right for x in (loaded, others[0], others[-1])] == [True] * 3
    coverage = block.coverage()
    assert any(name.startswith("transformers attention") and name.endswith("paged") for name in coverage.replaced)
    assert "scaled_dot_product_attention" not in coverage.replaced  # nothing slipped past the stand-in
    assert coverage.at_risk == {}
    if how == "eager":  # whether there is a cap under pages follows the version of transformers
        stock = generate(model, [_TARGET], budget=64, implementation=how)[0]
        assert right[0][0] == stock[0][0]
        assert right[1][0] == pytest.approx(stock[1][0], abs=1e-4)


def test_without_the_stand_in_the_mask_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers may be imported inside the block, past the stand-in: then the pack's mask shows the requests. With
    matmul alone the engine's attention stays stock, and the coverage says so; its eager attention is replaced, too."""
    model = built("qwen3")
    with batch_invariant() as block:
        right = generate(model, [_TARGET], budget=64)
        assert generate(model, [_TARGET], budget=64, implementation="eager") == right
    assert block.coverage().replaced["transformers attention 'paged|eager', paged"] > 0
    others = [pair for pair in dispatch_block._STAND_INS if pair[0] is not hf_attention.install]
    monkeypatch.setattr(dispatch_block, "_STAND_INS", others)
    with batch_invariant() as block:
        assert generate(model, [_PROMPTS[0], _TARGET], budget=64)[-1:] == right
    assert not any("transformers" in name for name in block.coverage().replaced)
    assert not block.coverage().left
    with batch_invariant(["matmul"]) as block:
        generate(model, [_TARGET], budget=64)
    assert block.coverage().at_risk["scaled_dot_product_attention float32"] > 0


def test_the_table_of_functions_is_put_back_and_a_paged_window_without_positions_is_refused() -> None:
    """Its cache drops first keys, so there is no anchor: an error that says so, not a quiet fall back to stock."""
    from transformers.modeling_utils import AttentionInterface

    before = dict(AttentionInterface())
    with suppress(ZeroDivisionError), batch_invariant(), batch_invariant(["attention"]):
        assert AttentionInterface()["sdpa"] is not before["sdpa"]
        raise ZeroDivisionError
    assert dict(AttentionInterface()) == before
    from transformers.modeling_utils import AttentionInterface

    layer = torch.nn.Module()
    layer.layer_idx, layer.sliding_window = 3, 16  # type: ignore[assignment]  # as a model's layer has them
    x = torch.rand(1, 2, 4, 8)
    caches = {
        "but its cache one of None": [{"sliding_windows": {3: 1}}, {"layer_to_allocator": {3: object()}}],
        "but its cache one of 12": [{"sliding_windows": {3: 12}}],
        "and its model does not pass position_ids": [{"sliding_windows": {3: 16}}],
    }
    with batch_invariant(["attention"]):
        attend = AttentionInterface()["sdpa"]
        for words, kept in caches.items():
            for one in kept:
                with pytest.raises(UserError, match=f"layer 3 has a sliding window of 16, {words}"):
                    attend(layer, x, x, x, None, cache=SimpleNamespace(**one), sliding_window=16)


AT_RISK = "transformers eager attention: sums over padded keys"


def test_what_it_cannot_compute_or_trace_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights asked for, attention left out, torch.compile, which would take kernels apart: stock, and said."""
    model = built("eager")
    ids = tokens(1, 9, seed=3)
    with torch.no_grad(), batch_invariant() as block:
        found = model(ids, output_attentions=True).attentions
    assert [tuple(x.shape) for x in found] == [(1, 4, 9, 9)] * 2
    assert block.coverage().at_risk[AT_RISK] == 2
    with torch.no_grad(), batch_invariant(["matmul"]) as block:
        model(ids)
    assert block.coverage().at_risk[AT_RISK] == 2
    model = built("eager gemma2")
    q, k, v = (torch.rand(1, h, 9, 32, generator=torch.Generator().manual_seed(h)) for h in (4, 2, 2))
    with torch.no_grad(), batch_invariant() as block:
        attend = sys.modules[type(model).__module__].eager_attention_forward
        call = functools.partial(attend, model.model.layers[0].self_attn, q, k, v, None, softcap=0.5)
        torch.testing.assert_close(torch.compile(call, backend="eager")()[0], call()[0], rtol=1e-4, atol=1e-5)
    assert block.coverage().at_risk[AT_RISK] == 1
    assert block.coverage().replaced["transformers eager attention"] == 1
    other = ModuleType("transformers.models.other.modeling_other")
    other.eager_attention_forward = original = lambda *args, **kwargs: "its own"  # type: ignore[attr-defined]  # a model's
    monkeypatch.setitem(sys.modules, other.__name__, other)
    with batch_invariant() as block:
        assert other.eager_attention_forward(None, None, None, None, None) == "its own"
    assert block.coverage().at_risk == {AT_RISK: 1}
    assert other.eager_attention_forward is original


_WINDOW, _LENGTH = 8, 20
_VARIANT_PROMPTS = [list(range(3, 3 + n)) for n in (30, 7, 19)]


def window() -> torch.Tensor:
    ahead = torch.arange(_LENGTH)[:, None] - torch.arange(_LENGTH)
    return ((ahead >= 0) & (ahead < _WINDOW))[None, None]


def called(mask, size=_WINDOW, cap=None, values=torch.float32) -> Any:
    """What transformers' table has under "sdpa" gives for one layer with a window, or the reason that it gives none."""
    from transformers.modeling_utils import AttentionInterface

    q, k, v = (4 * torch.rand(1, h, _LENGTH, 16, generator=torch.Generator().manual_seed(h)) for h in (4, 2, 2))
    layer = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    places: dict[str, Any] = {"position_ids": torch.arange(_LENGTH)[None], "sliding_window": size}
    try:
        return AttentionInterface()["sdpa"](layer, q, k, v.to(values), mask, scaling=0.25, softcap=cap, **places)[0]
    except ValueError as error:
        return str(error)


def test_sdpa_makes_of_a_cap_a_mask_and_autocast_what_it_makes_of_them_outside() -> None:
    """transformers' sdpa leaves a cap out before 5.23 and refuses it since; the stand-in does so in a window, too."""
    for mask in (None, window()):
        stock = called(mask, cap=0.5)
        with torch.no_grad(), batch_invariant():
            capped, plain = called(mask, cap=0.5), called(mask)
        if isinstance(stock, str):
            assert capped == stock
        else:
            assert identical(capped, plain)
            torch.testing.assert_close(capped, stock, rtol=1e-4, atol=1e-5)
    # what another mask shows (both ways, or another layer's window) is computed, and not the layer's window
    for mask, size in ((torch.ones(1, 1, _LENGTH, _LENGTH).bool(), 2 * _LENGTH), (window(), _WINDOW + 1)):
        stock = called(mask, size)
        with torch.no_grad(), batch_invariant():
            torch.testing.assert_close(called(mask, size), stock)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        stock = called(window(), values=torch.bfloat16)
        with batch_invariant() as block:
            found = called(window(), values=torch.bfloat16)
    assert block.coverage().replaced["transformers attention 'sdpa', windowed"] == 1
    assert found.dtype == stock.dtype == torch.bfloat16
    torch.testing.assert_close(found, stock, rtol=2e-2, atol=4e-2)
    layer, rows = torch.nn.Linear(64, 64), make("bell", (64, 64), torch.float32, "cpu", generator(8, "cpu"))
    with torch.no_grad(), batch_invariant():
        layer(rows)
        with torch.autocast("cpu", torch.bfloat16):
            whole, part = layer(rows), layer(rows[:16].clone())
    assert whole.dtype == part.dtype == torch.bfloat16
    assert identical(whole[:16], part)


# what the engine makes of it -> model type, what is its own, the engine's attention
ENGINES: dict[str, tuple[str, dict[str, Any], str]] = {
    "no soft cap": ("gemma2", {"query_pre_attn_scalar": 1, "attn_logit_softcapping": 0.05}, "eager"),
    "a window in the mask alone": ("phimoe", {"num_local_experts": 2, "num_experts_per_tok": 1}, "sdpa"),
    "the call's window, not the module's": ("exaone4", {"sliding_window_pattern": 2}, "sdpa"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", ENGINES)
def test_the_engine_computes_the_same_model_as_stock(what: str) -> None:
    """The engine's attention has no cap; EXAONE 4's full layers keep a window's size, Phi-3.5-MoE's name none."""
    name, more, implementation = ENGINES[what]
    more = {"sliding_window": 16, "initializer_range": 0.3} | more
    model = tiny(name, {"attn_implementation": implementation}, **more)
    stock = generate(model, _VARIANT_PROMPTS, budget=24, implementation=implementation)
    with batch_invariant() as block:
        found = generate(model, _VARIANT_PROMPTS, budget=24, implementation=implementation)
        assert generate(model, _VARIANT_PROMPTS[:1], budget=64, implementation=implementation) == found[:1]
    assert [what for what in exposed(block) if "attention" in what] == []
    for (tokens, logprobs), (stock_tokens, stock_logprobs) in zip(found, stock, strict=True):
        assert tokens == stock_tokens
        torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(stock_logprobs), rtol=1e-3, atol=1e-4)


def doubled(function: Any) -> Any:
    """What gives twice as much; but for torch's own function it says that it is what it wraps."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        return (out[0] * 2, *out[1:]) if isinstance(out, tuple) else out * 2

    return wrapper if function is F.linear else functools.wraps(function)(wrapper)


@torch.no_grad()
def test_what_stands_in_a_functions_place_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody's function in the place of one that a stand-in would skip, with functools.wraps or without, put there
    before a block, inside of one or after one has ended: skipped, logits are off by tenths; by other sums, by 2e-4."""
    model = tiny("llama", num_hidden_layers=1, initializer_range=0.2)
    ids, attention, norm = torch.arange(1, 20)[None], modeling.LlamaAttention, modeling.LlamaRMSNorm

    def gives(wanted: torch.Tensor) -> bool:
        return torch.allclose(model(ids).logits, wanted, rtol=1e-4, atol=1e-3)

    plain = model(ids).logits
    for owner, name in ((F, "linear"), (attention, "forward"), (norm, "forward"), (modeling, "apply_rotary_pos_emb")):
        own = vars(owner)[name]
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, doubled(own))
            wanted = model(ids).logits
            assert not torch.allclose(wanted, plain, atol=1e-2), "the patch changes something"
            with batch_invariant():
                assert gives(wanted), name
        with batch_invariant():
            assert gives(plain), name
            with monkeypatch.context() as patch:  # in the place of a stand-in of ours
                patch.setattr(owner, name, doubled(own))
                assert gives(wanted), name
