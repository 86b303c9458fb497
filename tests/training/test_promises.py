"""Two promises of `batch_invariant(training=True)`, each tested by itself, on whole models of four architectures.

A: the trainer's logprobs have the sampler's bits (KL is 0), however the trainer lays its batch out.
B: a run that is made again ends with the same weights.
"""

import functools
import hashlib
import itertools
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import nondet
from nondet.core.compare import identical
from nondet.mismatch.collect import rollouts_of
from nondet.mismatch.rollouts import Rollout
from nondet.mismatch.trainer import FORMULAS, Spec, micro_batches, predicting_rows
from nondet.sampling.engine import pinned, run_session
from nondet.sampling.plan import Load, Request, Sampling
from tests.build import Wide, tiers
from tests.kernels.tiers import exposed, tiny

VOCABULARY, TOKENS = 257, 12
LOAD = Load(others=0, targets=16, spread=8, prompt=(2, 40), tokens=(TOKENS, TOKENS), budget=24, requests=12)
GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
DTYPES = ["bfloat16", "float32"]
RIGHT, LEFT = Spec(), Spec(padding="left")
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"kind": "qwen3", "tie_word_embeddings": True},
    "llama": {"kind": "llama", "attention_bias": True, "mlp_bias": True},
    "gemma3": {
        "kind": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9,
        "query_pre_attn_scalar": 24, "final_logit_softcapping": 30.0,
    },
    "qwen3-moe": {
        "kind": "qwen3_moe", "moe_intermediate_size": 40, "num_experts": 8, "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
}  # fmt: skip


def cases(*kept: str, dtypes: Sequence[str] = DTYPES, devices: Sequence[str] = ("cpu", "cuda")) -> list[Any]:
    return [
        pytest.param(
            name, dtype, device,
            marks=GPU if device == "cuda" else pytest.mark.slow if f"{name} {dtype}" in kept else pytest.mark.nightly,
        )
        for name in MODELS for dtype in dtypes for device in devices
    ]  # fmt: skip


def make(name: str, dtype: str, device: str) -> Any:
    """A model of random weights, biases among them, that are large enough to tell tokens apart."""
    how = {"attn_implementation": "sdpa", "dtype": getattr(torch, dtype)}
    model = tiny(how=how, vocab_size=VOCABULARY, max_position_embeddings=256, **MODELS[name]).to(device)
    drawn = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=drawn)
            if weight.dim() > 1:
                weight.copy_(noise * (2.0 / weight.shape[-1] ** 0.5))
            else:  # what a norm or a bias begins with is a constant
                weight.add_((noise * 0.1).to(weight))
    return model


class Sampled(NamedTuple):
    """What the sampler gave, and the digests of every row of logits that it drew from."""

    rollouts: Sequence[Rollout]
    rows: frozenset[bytes]


def sample(
    model: Any,
    seed: int = 0,
    count: int = 16,
    *,
    tokens: int = TOKENS,
    load: Load = LOAD,
    prompt: tuple[int, int] = (2, 40),
    top_k: int = 0,
) -> Sampled:
    """Requests that come and go under a token budget, so that prefills are chunked; drawn at temperature 1."""
    draw = random.Random(seed)  # noqa: S311 - a plan, no secret
    requests = [
        Request(
            f"t{i:03d}", True, tuple(draw.randrange(1, VOCABULARY) for _ in range(draw.randint(*prompt))), tokens,
            draw.randrange(8), i, Sampling(1.0, top_k, 1.0, 1000 * seed + i, True),
        )
        for i in range(count)
    ]  # fmt: skip
    rows: set[bytes] = set()

    def keep(_module: Any, _args: Any, _kwargs: Any, output: Any) -> None:
        rows.update(map(digest, output.logits[0].cpu()))

    hook = model.register_forward_hook(keep, with_kwargs=True)
    with torch.no_grad():
        session = run_session(model.eval(), sorted(requests, key=lambda r: (r.arrival_step, r.id)), load)
    hook.remove()
    assert not session.fatal, session.fatal
    assert all(o.finish == "length" for o in session.outcomes)
    return Sampled(rollouts_of(session), frozenset(rows))


def digest(x: torch.Tensor) -> bytes:
    return hashlib.sha256(x.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()).digest()


class Trained(NamedTuple):
    """The trainer's side: logprobs of the sampled tokens; of rows of logits, whether each was drawn from."""

    logprobs: torch.Tensor
    known: list[bool]


def train(
    model: Any,
    sampled: Sampled,
    spec: Spec = RIGHT,
    block: AbstractContextManager[Any] | None = None,
    *,
    wider: int = 0,
    stock_formula: bool = False,
) -> Trained:
    """A forward and a backward pass of each micro-batch, padded to so many tokens more; gradients are kept."""
    model.train()
    kept, known = [], list[bool]()
    with block or nullcontext():
        for part in micro_batches(sampled.rollouts, spec.micro):
            logits, ids, _ = predicting_rows(model, part, spec, [len(r.ids) + wider for r in part])
            formula = FORMULAS["log_softmax"] if stock_formula else nondet.token_logprobs
            out = formula(logits, ids)
            assert out.requires_grad
            (-out.sum() / 100).backward()
            kept.append(out.detach().cpu())
            known += [digest(row) in sampled.rows for row in (logits[::5].detach().cpu() if sampled.rows else ())]
    return Trained(torch.cat(kept), known)


@functools.cache
def sampled(name: str, dtype: str, device: str) -> Sampled:
    with pinned(1), nondet.batch_invariant():
        return sample(make(name, dtype, device), count=8)


def same(found: Sampled, trained: Trained) -> bool:
    return identical(torch.from_numpy(np.concatenate([r.sampler for r in found.rollouts])), trained.logprobs)


@pytest.mark.parametrize(("name", "dtype", "device"), cases("llama bfloat16", "gemma3 float32"))
def test_a_the_trainer_has_the_sampler_s_bits_in_every_layout(name: str, dtype: str, device: str) -> None:
    """Each sampled token's logprob, and every fifth position's row of logits over the whole vocabulary."""
    found = sampled(name, dtype, device)
    found = Sampled(found.rollouts[:5], found.rows)
    with pinned(1):
        for spec in (Spec(padding="packed"), Spec(micro=3), Spec(micro=1), Spec(padding="left", micro=2)):
            block, wider = nondet.batch_invariant(training=True), 3 * (spec.micro == 3)
            trained = train(make(name, dtype, device), found, spec, block, wider=wider)
            assert same(found, trained), spec
            assert set(trained.known) == {True}, spec


@pytest.mark.parametrize(("name", "dtype", "device"), cases("llama bfloat16"))
def test_what_is_not_so_is_seen(name: str, dtype: str, device: str) -> None:
    """A stock trainer, and one under a block that is not for training, come to other bits; so does another formula. On
    an H200 a model as small as these may have the same bits in bfloat16 by chance: there float32 alone is tested."""
    found = sampled(name, dtype, device)
    with pinned(1):
        if device == "cpu" or dtype == "float32":
            assert not same(found, train(make(name, dtype, device), found))
            assert not same(found, train(make(name, dtype, device), found, block=nondet.batch_invariant()))
        block = nondet.batch_invariant(training=True)
        assert not same(found, train(make(name, dtype, device), found, block=block, stock_formula=True))


@pytest.mark.parametrize(("name", "dtype", "device"), cases("qwen3 bfloat16", dtypes=["bfloat16"]))
def test_a_holds_with_gradient_checkpointing(name: str, dtype: str, device: str) -> None:
    found = sampled(name, dtype, device)
    gradients = []
    for checkpointing in (False, True):
        model = make(name, dtype, device)
        if checkpointing:
            model.gradient_checkpointing_enable()
        with pinned(1):
            assert same(found, train(model, found, LEFT, nondet.batch_invariant(training=True)))
        gradients.append([p.grad for p in model.parameters()])
    assert all(identical(a, b) for a, b in zip(*gradients, strict=True))


def steps(name: str, dtype: str, device: str) -> tuple[bytes, int, int]:
    """Sample and train, twice: (digest of the weights, tokens, tokens whose bits differed)."""
    model = make(name, dtype, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    tokens = differing = 0
    with pinned(1):
        for step, spec in enumerate((Spec(padding="left", micro=2), Spec(padding="packed"))):
            with nondet.batch_invariant(training=True):
                found = sample(model, 7 + step, 4)
                trained = train(model, found, spec)
            optimizer.step()
            optimizer.zero_grad()
            tokens += len(trained.logprobs)
            sampler = np.concatenate([r.sampler for r in found.rollouts])
            differing += int((sampler.view(np.int32) != trained.logprobs.numpy().view(np.int32)).sum())
    return b"".join(digest(p) for p in model.parameters()), tokens, differing


@pytest.mark.parametrize(("name", "dtype", "device"), cases("llama bfloat16", dtypes=["bfloat16"]))
def test_b_a_run_repeats_and_a_holds_after_every_step(name: str, dtype: str, device: str) -> None:
    first, again = (steps(name, dtype, device) for _ in range(2))
    assert first == again
    assert first[1:] == (2 * 4 * TOKENS, 0)


@pytest.mark.parametrize("name", tiers(["llama"], ["qwen3", "gemma3"]))
def test_nothing_of_a_dense_pass_is_left_stock_or_at_risk(name: str) -> None:
    """Forward and backward; what is left is the loss's own sum over all tokens, which is the batch's by meaning."""
    model, found = make(name, "bfloat16", "cpu"), sampled(name, "bfloat16", "cpu")
    with nondet.batch_invariant(training=True) as block:
        train(model, found)
    coverage = block.coverage()
    assert coverage.replaced["attention_backward"] >= 2
    assert {what.partition(":")[0] for what in coverage.left} == {"sum.dim_IntList float32"}, coverage.left
    assert not coverage.at_risk, coverage.at_risk


def gradients(
    model: Any, found: Sampled, choices: list[torch.Tensor], block: AbstractContextManager[Any], ours: bool = False
) -> list[torch.Tensor]:
    """Of each parameter, in float64. Experts are those of `choices`, router call by router call; if empty, kept there:
    a choice that flips beside float64's outweighs all roundings."""
    given = iter(choices.copy()) if choices else None

    def route(_router: Any, _args: Any, out: Any) -> Any:
        logits, _, chosen = out
        if given is None:
            choices.append(chosen)
            return None
        chosen = next(given)
        shares = logits.softmax(-1, dtype=torch.float32).gather(-1, chosen)
        return logits, (shares / shares.sum(-1, keepdim=True)).to(logits.dtype), chosen

    for module in model.modules():
        if type(module).__name__ == "Qwen3MoeTopKRouter":
            module.register_forward_hook(route)
    with pinned(1):
        train(model, found, LEFT, block, stock_formula=not ours)
    return [p.grad.double() for p in model.parameters()]


# Most of stock's error, of all weights together; of one tensor twice that. Seen on an AMD EPYC without AVX-512, in 10
# rollouts of each model, with other kernels of MKL and oneDNN, and with torch 2.11: 0.77 to 1.07 in bfloat16 (a tensor
# 1.43), 0.68 to 1.28 in float32 (1.91).
MOST = {"bfloat16": 1.5, "float32": 3.0}


@pytest.mark.parametrize(("name", "dtype", "device"), cases("qwen3 float32", "gemma3 bfloat16", devices=["cpu"]))
def test_the_gradient_is_about_as_far_from_float64_as_stock_s(name: str, dtype: str, device: str) -> None:
    """A term that is lost, or a rounding to bfloat16 in a float32 model, is far beyond the bounds."""
    rollouts = sampled(name, dtype, device)
    exact, choices = make(name, dtype, device).double(), []
    exact.set_experts_implementation("eager")  # torch's grouped product has no float64
    oracle = gradients(exact, rollouts, choices, Wide())
    block = nondet.batch_invariant(training=True)
    ours = gradients(make(name, dtype, device), rollouts, choices, block, ours=True)
    stock = gradients(make(name, dtype, device), rollouts, choices, nullcontext())
    mine, theirs = (
        torch.stack([(x - of).norm() for x, of in zip(found, oracle, strict=True)]) for found in (ours, stock)
    )
    assert mine.norm() <= MOST[dtype] * theirs.norm()
    assert (mine <= 2 * MOST[dtype] * theirs).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", tiers(["bfloat16"], ["float32"]))
def test_a_linear_layer_keeps_its_bits_whatever_its_input_s_layout(dtype: str, device: str) -> None:
    """torch adds the bias after a rounding where it can't flatten the input and a gradient is asked for."""
    drawn = torch.Generator().manual_seed(2)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=drawn).to(device, getattr(torch, dtype))

    weight, x = tensor(96, 64), tensor(9, 7, 64)
    inputs = (x, x.transpose(0, 1), x[:, 2:5], x[0, 0], x[None, :, 1:])
    for bias, one in itertools.product((tensor(96), None), inputs):
        one = one.detach().requires_grad_()
        leaves = [t.requires_grad_() for t in (weight, bias) if t is not None]
        with nondet.batch_invariant(training=True) as block:
            with torch.no_grad():
                without = torch.nn.functional.linear(one, weight, bias)
            out = torch.nn.functional.linear(one, weight, bias)
            upstream = torch.ones_like(out) / 3
            found = torch.autograd.grad(out, [one, *leaves], upstream)
        assert identical(out.detach(), without), one.shape
        assert not exposed(block), one.shape
        wide = [t.detach().double().requires_grad_() for t in (one, *leaves)]
        exact = torch.autograd.grad(torch.nn.functional.linear(*wide), wide, upstream.double())
        for mine, right in zip(found, exact, strict=True):
            torch.testing.assert_close(mine.double(), right, rtol=2e-2 if dtype == "bfloat16" else 1e-4, atol=1e-3)
