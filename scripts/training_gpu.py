"""Promise A on a GPU at a usual size, that a step repeats, and what forward and backward cost beside stock.

python scripts/training_gpu.py [OUT.jsonl]     Qwen3-0.6B's shape with random weights, 512 tokens a sequence, bfloat16

Writes a line for the environment, then one a figure: how many numbers of the last hidden states differ between forwards
with and without a gradient, over 10^6 fresh tokens; sequences alone compared with the batch; every parameter's
gradient, twice; seconds of forward and backward in turns, under torch's FlashAttention and under
`batch_invariant(training=True)`; what the block left stock or counts as at risk.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen3Config, Qwen3ForCausalLM

import nondet
from nondet.core.compare import bits, same
from nondet.core.environment import collect

BATCH, TOKENS, TURNS = 16, 512, 5


def main() -> None:
    """Measure and write."""
    out = open(sys.argv[1], "w", encoding="utf-8") if len(sys.argv) > 1 else sys.stdout  # noqa: SIM115

    def say(**line: Any) -> None:
        print(json.dumps(line), file=out, flush=True)

    say(environment=collect(0))
    model, backwards = _model()
    ids = [torch.randint(0, model.config.vocab_size, (BATCH, TOKENS), device="cuda") for _ in range(2)]
    times: dict[str, list[float]] = {"stock-flash": [], "training": []}
    for turn in range(TURNS + 1):  # the first is a warm-up: it proves and compiles
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            stock = _seconds(lambda: backwards(ids[0]))
        with nondet.batch_invariant(training=True) as invariance:
            ours = _seconds(lambda: backwards(ids[0]))
        if turn:
            times["stock-flash"].append(stock)
            times["training"].append(ours)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    ratio = statistics.median(o / s for s, o in zip(*times.values(), strict=True))
    say(what="forward and backward", sequences=BATCH, tokens=TOKENS, seconds=medians, ratio=ratio, turns=times)
    say(what="coverage", left=dict(invariance.coverage().left), at_risk=dict(invariance.coverage().at_risk))

    def differ(a: torch.Tensor, b: torch.Tensor) -> int:
        return int((~same(a, b)).sum())

    def hidden(tokens: torch.Tensor) -> torch.Tensor:
        return model.model(input_ids=tokens).last_hidden_state.detach()

    with nondet.batch_invariant(training=True):
        differing = tokens = 0
        while tokens < 10**6:
            fresh = torch.randint(0, model.config.vocab_size, (BATCH, TOKENS), device="cuda")
            with torch.no_grad():
                without = hidden(fresh)
            differing += differ(without, hidden(fresh))
            tokens += fresh.numel()
        width = model.config.hidden_size
        say(what="with a gradient and without", tokens=tokens, numbers=tokens * width, differing=differing)
        alone = torch.cat([hidden(ids[0][i : i + 1]) for i in range(BATCH)])
        say(what="alone and in the batch", numbers=alone.numel(), differing=differ(alone, hidden(ids[0])))
        once, again, other = (_gradients(model, backwards, x) for x in (ids[0], ids[0], ids[1]))
        equal = [sum(torch.equal(a, b) for a, b in zip(once, x, strict=True)) for x in (again, other)]
        say(what="gradients that are equal", tensors=len(once), again=equal[0], other_tokens=equal[1])


def _model() -> tuple[Any, Callable[[torch.Tensor], None]]:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16).train()
    model.config.use_cache = False

    def backwards(tokens: torch.Tensor) -> None:
        model.zero_grad()
        model.model(input_ids=tokens).last_hidden_state.float().square().mean(-1).sum(-1).sum(0).backward()

    return model, backwards


def _gradients(model: Any, backwards: Callable[[torch.Tensor], None], tokens: torch.Tensor) -> list[torch.Tensor]:
    backwards(tokens)
    return [bits(p.grad).cpu() for p in model.parameters() if p.grad is not None]


def _seconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
