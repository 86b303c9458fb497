"""A random 12-layer Qwen3 on several GPUs: python lab/ranks_model.py OUT [RANKS [BATCHES]], as 1,2,4 and 1,8.

JSON lines: one a trace (its batch, the digest of its tokens and of its logits' bits, seconds of the whole batch), and
one with the coverage, for every rank.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nondet.core.environment import collect
from nondet.ranks.group import RankGroup
from nondet.sampling.ranks import load

STEPS = 16

# What comes out is the trace of the request under study: its tokens and the bits of its logits at every step. A trace
# that changes with the number of other requests depends on the batch; one that changes with the ranks, on their
# number.

WAYS = ("stock", "invariant", "rank-free")


class Trace(NamedTuple):
    """One completion.

    Attributes:
        batch: Requests in the batch, this one among them.
        tokens: Digest of its tokens.
        logits: Digest of its logits' bits over all steps.
        seconds: Of the whole batch.
    """

    way: str
    batch: int
    tokens: str
    logits: str
    seconds: float


def write_model(folder: str, layers: int, hidden: int, seed: int = 0, dtype: str = "bfloat16") -> str:
    """A random Qwen3 of `layers` layers in `folder`; its weights follow from the seed."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads = max(8, hidden // 128)
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(4, heads // 4),
        head_dim=128 if hidden >= 1024 else 32,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def traces(
    folder: str, device: str, ways: tuple[str, ...], batches: tuple[int, ...], steps: int, seed: int = 0
) -> tuple[list[Trace], dict[str, list[str]]]:
    """In a rank, or alone: the trace of one prompt in batches of several sizes; and the coverage of each way."""
    import torch.distributed as dist

    import nondet
    from nondet.ranks.rank_free import rank_free

    rank = dist.get_rank() if dist.is_initialized() else 0
    place = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    model = load(str(Path(folder)), place)
    drawn = torch.Generator().manual_seed(seed)
    prompts = torch.randint(0, model.config.vocab_size, (max(batches), 24), generator=drawn).to(place)
    found: list[Trace] = []
    coverage: dict[str, list[str]] = {}
    for way in ways:
        with ExitStack() as stack, torch.no_grad():
            block = stack.enter_context(nondet.batch_invariant()) if way != "stock" else None
            if way == "rank-free":
                stack.enter_context(rank_free(model))
            _decode(model, prompts[:1], 2)  # first uses prove members
            for batch in batches:
                found.append(_trace(way, model, prompts[:batch], steps))
            coverage[way] = block.coverage().lines() if block is not None else []
    return found, coverage


def _trace(way: str, model: Any, prompts: torch.Tensor, steps: int) -> Trace:
    started = time.perf_counter()
    tokens, logits = _decode(model, prompts, steps)
    bits = hashlib.sha256()
    for step in logits:
        bits.update(step.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    seconds = time.perf_counter() - started
    chosen = hashlib.sha256(repr(tokens).encode()).hexdigest()[:16]
    return Trace(way, len(prompts), chosen, bits.hexdigest()[:16], seconds)


def _decode(model: Any, prompts: torch.Tensor, steps: int) -> tuple[list[int], list[torch.Tensor]]:
    """Greedy: tokens and logits [V] of the first request, step by step."""
    cache, ids = None, prompts
    tokens, rows = [], []
    for _ in range(steps):
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, logits = out.past_key_values, out.logits[:, -1]
        ids = logits.argmax(-1, keepdim=True)
        rows.append(logits[0].clone())
        tokens.append(ids[0, 0])
    return [int(t) for t in torch.stack(tokens)], rows


def main() -> None:
    """Write the traces of every number of ranks that the GPUs allow."""
    out = Path(sys.argv[1])
    worlds = [int(w) for w in (sys.argv[2] if len(sys.argv) > 2 else "1,2,4").split(",")]
    batches = tuple(int(b) for b in (sys.argv[3] if len(sys.argv) > 3 else "1,2,5,8,32").split(","))
    lines: list[dict[str, object]] = [{"environment": collect(0), "batches": batches, "steps": STEPS}]
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, layers=12, hidden=1024)
        for world in worlds:
            if world > torch.cuda.device_count():
                break
            question = (folder, "cuda", WAYS, batches, STEPS)
            if world == 1:
                answers = [traces(*question)]
            else:
                group = RankGroup(world, "cuda", limit_s=150)
                answers = group.call("ranks_model:traces", *question)
                group.close()
            for rank, (found, coverage) in enumerate(answers):
                lines += [{"world": world, "rank": rank, **trace._asdict()} for trace in found]
                lines.append({"world": world, "rank": rank, "coverage": coverage})
            out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
