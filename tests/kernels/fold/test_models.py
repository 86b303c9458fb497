"""Promise C on whole models of transformers: a training run has the same bits however its batch is cut and laid out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
)

import nondet
from nondet.errors import UserError
from tests.kernels.tiers import at_length

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MODELS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True)),
}
_PLAIN = {size: value for size, value in SIZES.items() if size != "head_dim"}
# Other modules: biases, projections in one, norms behind attention over all heads; attention written out.
OTHERS: dict[str, Callable[[], Any]] = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_PLAIN)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**_PLAIN, pad_token_id=0, eos_token_id=1)),
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**_PLAIN, eos_token_id=1)),
    "qwen3, eager": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, attn_implementation="eager")),
}
DTYPES = [torch.bfloat16, torch.float32]
WHERE = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTHS = (5, 33, 16, 47, 20, 64, 9, 31)  # one of them fills its row, and some whole steps of 16


class Way(NamedTuple):
    """How a batch of 8 sequences is cut and laid out."""

    micro: int
    layout: str = "right"
    width: int = 64
    checkpointing: bool = False


WHOLE = Way(8)
WAYS = [
    Way(4),
    Way(2),
    Way(1),
    Way(8, width=96),
    Way(4, "left", 71),
    Way(8, "packed"),
    Way(2, "packed"),
    Way(4, checkpointing=True),
]


def built(name: str, dtype: torch.dtype, device: str) -> Any:
    torch.manual_seed(0)
    return (MODELS | OTHERS)[name]().to(dtype).to(device).train()


def micro_batches(way: Way, device: str) -> list[tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]]:
    """(arguments, what each place has to say next, its weight in the loss), the weights fixed beforehand."""
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(1, 128, (n,), generator=generator) for n in LENGTHS]
    weights = [torch.randn(n, generator=generator) / 64 for n in LENGTHS]
    made = []
    for first in range(0, len(drawn), way.micro):
        part = range(first, min(first + way.micro, len(drawn)))
        columns = sum(LENGTHS[i] for i in part) if way.layout == "packed" else way.width
        rows = torch.zeros(5, 1 if way.layout == "packed" else len(part), columns)
        begin = 0
        for row, i in enumerate(part):
            n = LENGTHS[i]
            if way.layout != "packed":
                begin = columns - n if way.layout == "left" else 0
            at = rows[:, 0 if way.layout == "packed" else row, begin : begin + n]
            at[0], at[1], at[2] = drawn[i], 1, torch.arange(n)
            at[3, :-1], at[4, :-1] = drawn[i][1:], weights[i][1:]
            begin += n
        ids, mask, places, following = rows[:4].long().to(device)
        arguments = {"input_ids": ids, "attention_mask": mask, "position_ids": places}
        if way.layout == "packed":
            del arguments["attention_mask"]
        made.append((arguments, following, rows[4].to(device)))
    return made


def backward(model: Any, way: Way, ours: bool) -> None:
    for arguments, following, weights in micro_batches(way, model.device.type):
        logits = model(**arguments, use_cache=False).logits
        if ours:
            said = nondet.token_logprobs(logits, following)
        else:
            said = F.log_softmax(logits.float(), -1).gather(-1, following[..., None])[..., 0]
        (said * weights).sum().backward()


def gradients(name: str, dtype: torch.dtype, device: str, way: Way) -> dict[str, torch.Tensor]:
    model = built(name, dtype, device)
    if way.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with nondet.batch_invariant(training=True), nondet.fold(model) as sums:
        backward(model, way, True)
        got = {n: sums.main_grad(p) for n, p in model.named_parameters()}
    return {n: g.clone() for n, g in got.items() if g is not None}


@pytest.mark.parametrize(
    ("name", "dtype", "device"),
    [
        *((name, torch.float32, "cpu") for name in ("qwen3", "phi3", "olmo2")),
        *at_length(*((name, torch.float32, "cpu") for name in ("llama", "qwen2", "qwen3, eager"))),
        *at_length(*((name, torch.bfloat16, "cpu") for name in (*MODELS, *OTHERS))),
        *(pytest.param(n, dtype, "cuda", marks=pytest.mark.gpu) for n in (*MODELS, *OTHERS) for dtype in DTYPES),
    ],
)
def test_a_gradient_is_the_same_in_every_way(name: str, dtype: torch.dtype, device: str) -> None:
    """All tensors of every way equal those of the batch in one piece, in float32 before they are rounded."""
    whole = gradients(name, dtype, device, WHOLE)
    assert len(whole) == len(list(built(name, dtype, device).parameters()))
    for way in WAYS if device == "cuda" else WAYS[2:8:2] + WAYS[7:] * (name == "qwen3"):
        got = gradients(name, dtype, device, way)
        assert [n for n in whole if not torch.equal(whole[n], got[n])] == [], way


def test_a_loss_of_the_model_s_own() -> None:
    """A sum over tokens divided by a number that the trainer fixes, as transformers' Trainer asks for it."""

    def run(micro: int) -> list[torch.Tensor]:
        model = built("qwen3", torch.float32, "cpu")
        with nondet.batch_invariant(training=True), nondet.fold(model):
            for arguments, _, _ in micro_batches(Way(micro), "cpu"):
                labels = arguments["input_ids"].masked_fill(arguments["attention_mask"] == 0, -100)
                model(**arguments, labels=labels, num_items_in_batch=torch.tensor(217)).loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    whole, apart = run(8), run(1)
    assert len(whole) == 24
    assert all(torch.equal(a, b) for a, b in zip(whole, apart, strict=True))


def collated(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows of unlike lengths, padded to the longest of the micro-batch."""
    ids = [row["input_ids"] for row in rows]
    padded, labels = (torch.nn.utils.rnn.pad_sequence(ids, True, padding) for padding in (0, -100))
    return {"input_ids": padded, "attention_mask": (labels >= 0).long(), "labels": labels}


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, *at_length(True)], ids=["float32", "autocast"])
def test_a_trainer_that_knows_nothing_of_it(bf16: bool, tmp_path: Path) -> None:
    """transformers' Trainer, its accumulation, clipping, schedule and checkpointing: two context managers around it."""
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 40, (64,), generator=generator).tolist()
    data = [{"input_ids": torch.randint(1, 128, (n,), generator=generator)} for n in lengths]

    def run(micro: int, ours: bool, checkpointing: bool = False) -> list[torch.Tensor]:
        model = built("qwen3", torch.float32, "cpu")
        how = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": 8 // micro, "max_steps": 2}
        quiet = {
            "report_to": [],
            "save_strategy": "no",
            "logging_strategy": "no",
            "disable_tqdm": True,
            "use_cpu": True,
        }
        more = {"learning_rate": 1e-2, "bf16": bf16, "gradient_checkpointing": checkpointing}
        asked = TrainingArguments(str(tmp_path), **how, **quiet, **more)
        trainer = Trainer(model, asked, train_dataset=data, data_collator=collated)
        with ExitStack() as stack:
            if ours:
                stack.enter_context(nondet.batch_invariant(training=True))
                stack.enter_context(nondet.fold(model))
            trainer.train()
        return [p.detach().clone() for p in model.parameters()]

    whole = run(8, True)
    for other in (run(1, True), run(4, True, checkpointing=True)):
        assert all(torch.equal(a, b) for a, b in zip(whole, other, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(run(8, False), run(1, False), strict=True))


def test_models_that_are_not_known_are_refused_by_name() -> None:
    """Experts and scaled embeddings on entering; a padded sliding window, left to torch, before anything is added."""
    experts = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    for model, line in (
        (Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts)), r"gate_up_proj, down_proj of .*mlp\.experts"),
        (Gemma3ForCausalLM(Gemma3TextConfig(**SIZES)), r"weight of model\.embed_tokens \(Gemma3TextScaled"),
    ):
        with nondet.batch_invariant(training=True), pytest.raises(UserError, match=line):
            nondet.fold(model)
    windows = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8))
    with nondet.batch_invariant(training=True), nondet.fold(windows):
        with pytest.raises(UserError, match=r"at risk: scaled_dot_product_attention .* a window"):
            backward(windows, WHOLE, True)
        assert all(p.grad is None and p.requires_grad for p in windows.parameters())


def test_attention_without_a_gradient_of_ours_is_refused() -> None:
    """A custom attention is at risk, and no sum over it promises anything."""
    from transformers import AttentionInterface

    def plain(module: Any, q: Any, k: Any, v: Any, mask: Any, **more: Any) -> Any:
        return F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)).transpose(
            1, 2
        ), None

    AttentionInterface.register("plain", plain)
    model = built("qwen3", torch.float32, "cpu")
    model.set_attn_implementation("plain")
    with (
        nondet.batch_invariant(training=True),
        nondet.fold(model),
        pytest.raises(UserError, match=r"at risk: .*'plain'"),
    ):
        backward(model, WHOLE, True)
    assert all(p.grad is None for p in model.parameters())
