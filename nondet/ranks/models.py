"""A transformers model on several ranks: loaded by its own tensor-parallel plan, decoded greedily beside others.

What comes out is the trace of the request under study: its tokens and the bits of its logits at every step. A trace
that changes with the number of other requests depends on the batch; one that changes with the ranks, on their number.
"""

from __future__ import annotations

import hashlib
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

__all__ = ["WAYS", "Trace", "cut", "traces", "write_model"]

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


def load(
    folder: str, device: torch.device, *, dtype: torch.dtype | str = "auto", trust_remote_code: bool = False
) -> Any:
    """The model on this rank: cut by its plan over all ranks, or whole where there is one."""
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    world = dist.get_world_size() if dist.is_initialized() else 1
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code, "use_safetensors": True}
    if world == 1:
        return AutoModelForCausalLM.from_pretrained(folder, **options).to(device).eval()
    from transformers.distributed import DistributedConfig

    # its bar comes with a lock of several processes, which a rank that is ended would leave behind
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    spread = DistributedConfig(tp_plan="auto", tp_size=world)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=spread, **options).eval()


class _Slices:
    """A tensor as a file of safetensors gives it: what is taken from it is a contiguous copy of that part alone."""

    def __init__(self, whole: torch.Tensor) -> None:
        self._whole = whole

    def get_shape(self) -> list[int]:
        return list(self._whole.shape)

    def get_dtype(self) -> str:
        return {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[self._whole.dtype]

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._whole[index].clone(memory_format=torch.contiguous_format)


def cut(whole: Any) -> Any:
    """This rank's share of a model that every rank holds whole, by its own plan; nothing goes by way of a disk.

    A share is a copy, so that the whole one's memory is free again once the caller lets go of it.

    Args:
        whole: A causal LM of transformers with the same weights on every rank.
    """
    import torch.distributed as dist
    from transformers.distributed import DistributedConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    tensors = {name: _Slices(parameter.detach()) for name, parameter in whole.named_parameters()}  # a tied one once
    spread = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
    return (
        type(whole)
        .from_pretrained(None, config=whole.config, state_dict=tensors, dtype=whole.dtype, distributed_config=spread)
        .eval()
    )


def traces(
    folder: str, device: str, ways: tuple[str, ...], batches: tuple[int, ...], steps: int, seed: int = 0
) -> tuple[list[Trace], dict[str, list[str]]]:
    """In a rank, or alone: the trace of one prompt in batches of several sizes; and the coverage of each way."""
    import torch.distributed as dist

    import nondet
    from nondet.kernels.dispatch.rank_free import rank_free

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
