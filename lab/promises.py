"""Promise A at length: tokens whose logprob has other bits in the trainer than in the sampler. Prints JSON lines.

python lab/promises.py SECONDS [large] [repeat]

The tiny models of tests/training/test_promises.py in turn, for so many seconds each: the engine samples under load,
the trainer computes the same tokens with gradients in another layout each time, every fifth with checkpointing, and
takes an optimizer's step; a hundred steps of six requests come before the seconds count. `large`:
then a model of Qwen3-0.6B's shape with random weights, 64 requests of 256 + 256 tokens, micro-batches of 16, on a GPU;
and what forward and backward cost there beside torch's flash attention and log_softmax, three passes each, the median.

`repeat`: promise B, after 50 steps of sampling and training in bfloat16, made twice, with one thread and with four.

python lab/promises.py 0 grid FILE

Promise A in every layout after 100 optimizer steps, each model in bfloat16 and float32: 1,280 tokens of their own
(3,200 on a GPU) for each of four layouts x micro-batches of 1 to 16 x with and without gradient checkpointing, every
fifth row of logits over the whole vocabulary; and a stock trainer, which must differ. Lines are added to FILE; what it
has is not done again, but for the 100 steps, which must end with the weights that it names. A last line that was cut
off is.

`bfloat16`, `float32`: in that dtype only. `only NAME`, in either: that model alone, so that one process a
model may run at once on a GPU, which waits for Python.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel

import nondet
from nondet.mismatch.trainer import Spec
from nondet.sampling.engine import pinned
from tests.training import test_promises as promises

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FEW = 100  # steps of six requests, before those that are counted by time
MANY = 384 if DEVICE == "cuda" else 96  # a GPU takes four times as many tokens in little more time
CELL = 80 if DEVICE == "cuda" else 32  # requests of a layout
WIDE = replace(promises.LOAD, budget=2 * MANY, requests=MANY)
LAYOUTS = ("right", "left", "packed", "wide")  # wide: padded on the right to three tokens more
CELLS = tuple(itertools.product(LAYOUTS, (1, 2, 4, 7, 16), (False, True)))
STOCK = ("left", 4, False, "stock")
LARGE = replace(promises.LOAD, budget=1024, requests=64)


def say(**what: Any) -> None:
    """One line."""
    print(json.dumps(what), flush=True)


def trained_in(model: Any, found: promises.Sampled, layout: str, micro: int, **how: Any) -> promises.Trained:
    """A pass over micro-batches of so many rollouts in one of `LAYOUTS`."""
    padding, wider = ("right", 3) if layout == "wide" else (layout, 0)
    return promises.train(model, found, Spec(padding=padding, micro=micro), wider=wider, **how)


def without_rows(found: promises.Sampled) -> promises.Sampled:
    """No row of logits is looked up, which takes time."""
    return found._replace(rows=frozenset())


def differing_in(found: promises.Sampled, trained: promises.Trained) -> int:
    """Tokens whose bits differ."""
    sampled = np.concatenate([r.sampler for r in found.rollouts])
    return int((sampled.view(np.int32) != trained.logprobs.numpy().view(np.int32)).sum())


def at_length(name: str, dtype: str, seconds: float) -> None:
    """Sample and train in turn: a step of few requests a hundred times, and then of many for so many seconds."""
    model = promises.make(name, dtype, DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    began, tokens, differing, step, early = 0.0, 0, 0, 0, 0
    while step <= FEW or time.monotonic() - began < seconds:
        if step == FEW:
            began, early = time.monotonic(), tokens
        many = MANY if step >= FEW else 6
        (model.gradient_checkpointing_enable if step % 5 == 4 else model.gradient_checkpointing_disable)()
        with nondet.batch_invariant(training=True):
            found = promises.sample(model, step, many, tokens=40, load=WIDE)
            micro = (many, 7, 16, many // 4)[(step // 4) % 4]
            trained = trained_in(model, without_rows(found), LAYOUTS[step % 4], micro)
        optimizer.step()
        optimizer.zero_grad()
        tokens, differing, step = tokens + len(trained.logprobs), differing + differing_in(found, trained), step + 1
        if step > FEW:  # a line a step: the last one holds, wherever it is cut off
            say(model=name, dtype=dtype, optimizer_steps=step, tokens=tokens, tokens_after_100=tokens - early,
                differing=differing)  # fmt: skip


def large() -> None:
    """Of Qwen3-0.6B's shape."""
    config = transformers.Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").cuda()
    with nondet.batch_invariant(training=True) as block:
        began = time.monotonic()
        found = promises.sample(model, 1, 64, tokens=256, load=LARGE, prompt=(256, 256), top_k=64)
        say(what="sampled", seconds=time.monotonic() - began, tokens=64 * 256)
        trained = trained_in(model, found, "left", 16)
    shape = {"requests": 64, "tokens": 512, "micro": 16}
    say(model="Qwen3-0.6B's shape", dtype="bfloat16", **shape, tokens_compared=len(trained.logprobs),
        differing=differing_in(found, trained), rows=len(trained.known), rows_equal=sum(trained.known))  # fmt: skip
    say(left_or_at_risk=[line for line in block.coverage().lines() if not line.startswith(("replaced", "nothing"))])

    def median(ours: bool) -> float:
        took = []
        for _ in range(4):  # the first warms up
            torch.cuda.synchronize()
            began = time.monotonic()
            trained_in(model, without_rows(found), "right", 16, stock_formula=not ours)
            model.zero_grad()
            torch.cuda.synchronize()
            took.append(time.monotonic() - began)
        return sorted(took[1:])[1]

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        stock = median(False)
    with nondet.batch_invariant(training=True):
        ours = median(True)
    say(what="forward and backward of all 64, seconds", stock_flash=stock, training=ours, ratio=ours / stock)


def steps(name: str, threads: int) -> tuple[bytes, int, int]:
    """50 steps of sampling and training: (digest of the weights, tokens, tokens whose bits differed)."""
    model = promises.make(name, "bfloat16", DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    tokens = differing = 0
    with pinned(threads), nondet.batch_invariant(training=True):
        for step in range(50):
            found = without_rows(promises.sample(model, 7 + step, 4))
            trained = trained_in(model, found, ("left", "packed")[step % 2], 2 + 3 * (step % 2))
            optimizer.step()
            optimizer.zero_grad()
            tokens, differing = tokens + len(trained.logprobs), differing + differing_in(found, trained)
    return b"".join(map(promises.digest, model.parameters())), tokens, differing


def repeat(name: str, threads: int) -> None:
    """Two runs."""
    once, again = (steps(name, threads) for _ in range(2))
    equal = once[0] == again[0]
    say(what="B", model=name, threads=threads, steps=50, weights_equal=equal, tokens=2 * once[1],
        differing=once[2] + again[2])  # fmt: skip


def grid(name: str, dtype: str, path: Path) -> None:
    """One model: 100 steps, and then every cell at these weights."""
    whole = path.read_bytes() if path.exists() else b""
    if not whole.endswith(b"\n"):
        path.write_bytes(whole[: whole.rfind(b"\n") + 1])  # a run that was killed in the midst of a line
    known = [json.loads(line) for line in path.read_text().splitlines()]
    known = [line for line in known if (line["model"], line["dtype"]) == (name, dtype)]
    done = {(line["layout"], line["micro"], line["checkpointing"], line["trainer"]) for line in known}
    if len(done) > len(CELLS):
        return
    began, model = time.monotonic(), promises.make(name, dtype, DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for step in range(100):
        with nondet.batch_invariant(training=True):
            found = without_rows(promises.sample(model, step, 6))
            trained_in(model, found, LAYOUTS[step % 3], 1 + step % 6)
        optimizer.step()
        optimizer.zero_grad()
    weights = hashlib.sha256(b"".join(map(promises.digest, model.parameters()))).hexdigest()[:16]
    if any(line["weights"] != weights for line in known):
        raise SystemExit(f"{name} {dtype}: the 100 steps do not end with the weights of {path}")
    for i, (layout, micro, checkpointing, trainer) in enumerate([*((*c, "invariant") for c in CELLS), STOCK]):
        if (layout, micro, checkpointing, trainer) in done:
            continue
        (model.gradient_checkpointing_enable if checkpointing else model.gradient_checkpointing_disable)()
        with nondet.batch_invariant(training=True):
            found = promises.sample(model, 1000 + i, CELL, tokens=40, load=WIDE)
        block = nondet.batch_invariant(training=True) if trainer == "invariant" else None
        trained = trained_in(model, found, layout, micro, block=block)
        model.zero_grad()
        line = {"model": name, "dtype": dtype, "weights": weights, "optimizer_steps": 100, "layout": layout,
                "micro": micro, "checkpointing": checkpointing, "trainer": trainer, "tokens": len(trained.logprobs),
                "differing": differing_in(found, trained), "rows": len(trained.known), "rows_equal": sum(trained.known),
                "values": len(trained.logprobs.unique()), "logprob": round(float(trained.logprobs.mean()), 3),
                "seconds": round(time.monotonic() - began, 1)}  # fmt: skip
        with path.open("a") as file:
            print(json.dumps(line), file=file, flush=True)
        began = time.monotonic()


def main() -> None:
    """All of it."""
    dtypes = [d for d in ("bfloat16", "float32") if d in sys.argv] or ["bfloat16", "float32"]
    names = [name for name in promises.MODELS if "only" not in sys.argv or name in sys.argv]
    if "grid" in sys.argv:
        for name in names:
            for dtype in dtypes:
                with pinned(1):
                    grid(name, dtype, Path(sys.argv[3]))
        return
    gpu = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    say(device=gpu, torch=torch.__version__, transformers=transformers.__version__, nondet=nondet.__version__)
    for name in names if float(sys.argv[1]) else ():
        for dtype in dtypes:
            with pinned(1):
                at_length(name, dtype, float(sys.argv[1]))
    if "large" in sys.argv:
        large()
    if "repeat" in sys.argv:
        for threads in (1, 4) if DEVICE == "cpu" else (1,):  # of a CPU's products
            for name in names:
                repeat(name, threads)


if __name__ == "__main__":
    main()
