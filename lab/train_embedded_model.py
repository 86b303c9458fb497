"""Train the model that ships in nondet/embedded, from text that ships with Python.

Three stages, each reading what the one before left in the work folder (`--work`):

    corpus      the running Python's documentation topics, docstrings and longer comments -> documents.jsonl
    tokenizer   byte-level BPE on the training documents -> tokenizer.json, tokens.npz
    train       a small Qwen3-architecture model -> the model folder (`--out`)

The first two need no GPU and decide the bytes that the third sees, so they may run on another machine. `all` runs the
three. Only the text of the Python in use enters: nothing is fetched. Seeds are fixed; the same corpus on the same
machine and library versions gives the same tokenizer, and the same loss up to the GPU's own backward-pass atomics.

    python lab/train_embedded_model.py all --work .train --out nondet/embedded      # what made the shipped model
    python lab/train_embedded_model.py all --work /tmp/w --out /tmp/m --steps 5     # a smoke run on a CPU
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
from embedded_corpus import build_corpus  # beside this file

END = "<|endoftext|>"
VOCABULARY = 4096
HELD_OUT = 0.02
CONTEXT = 1024
SAMPLE_PROMPTS = ("For example, the", "This module provides", "Return a new", "If the argument is")


def build_tokenizer(work: Path) -> None:
    """Train byte-level BPE on the training documents and encode all of them into tokens.npz."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    documents = [json.loads(line) for line in (work / "documents.jsonl").open(encoding="utf-8")]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # The whole byte alphabet is in the vocabulary, so every text round-trips; there is no normalizer for that reason.
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((d["text"] for d in documents if not d["held_out"]), trainer)
    tokenizer.save(str(work / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    encoded = [[*tokenizer.encode(d["text"]).ids, end] for d in documents]
    np.savez_compressed(
        work / "tokens.npz",
        ids=np.concatenate([np.asarray(e, dtype=np.uint16) for e in encoded]),
        lengths=np.asarray([len(e) for e in encoded], dtype=np.int64),
        held_out=np.asarray([d["held_out"] for d in documents], dtype=bool),
        held_out_bytes=np.int64(sum(len(d["text"].encode()) for d in documents if d["held_out"])),
    )
    held = sum(len(e) for e, d in zip(encoded, documents, strict=True) if d["held_out"])
    print(f"tokenizer: {tokenizer.get_vocab_size()} tokens; text: {sum(map(len, encoded))} tokens, {held} held out")


def windows(documents: list[np.ndarray], width: int, rng: np.random.Generator | None) -> np.ndarray:
    """Join the documents, in an order drawn from `rng`, and cut them into rows [n, width + 1] that overlap by one.

    With `rng` the first cut is drawn too, so that no two epochs show the same rows; without, order and cut are fixed
    and the last row is padded with -100, which the loss ignores.
    """
    order = range(len(documents)) if rng is None else rng.permutation(len(documents))
    flat = np.concatenate([documents[i] for i in order]).astype(np.int64)
    if rng is not None:
        flat = np.roll(flat, -int(rng.integers(len(flat))))
        rows = (len(flat) - 1) // width
    else:
        rows = math.ceil((len(flat) - 1) / width)
        flat = np.concatenate([flat, np.full(rows * width + 1 - len(flat), -100)])
    return np.stack([flat[i * width : i * width + width + 1] for i in range(rows)])


def train(args: argparse.Namespace) -> None:
    """Train, report the held-out loss, save the averaged weights in bf16 and print samples of what was saved."""
    import torch
    from torch.nn import functional as F
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = np.load(args.work / "tokens.npz")
    documents = np.split(data["ids"], np.cumsum(data["lengths"])[:-1])
    held = windows([d for d, h in zip(documents, data["held_out"], strict=True) if h], CONTEXT, None)
    documents = [d for d, h in zip(documents, data["held_out"], strict=True) if not h]
    fast = PreTrainedTokenizerFast(
        tokenizer_file=str(args.work / "tokenizer.json"), eos_token=END, model_max_length=CONTEXT
    )
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        attn_implementation="sdpa",
    )
    model = Qwen3ForCausalLM(config).to(device)
    handles = add_dropout(model, args.dropout)
    averaged = {name: value.detach().clone() for name, value in model.state_dict().items()}
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.95), fused=device.type == "cuda")

    def loss_of(rows: np.ndarray) -> torch.Tensor:
        batch = torch.from_numpy(rows).to(device)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(input_ids=batch[:, :-1].clamp(min=0), use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten(), ignore_index=-100)

    def held_out_loss() -> float:
        # One row at a time, weighted by its tokens: the last row is shorter than the others.
        model.eval()
        with torch.no_grad():
            sums = [(float(loss_of(row[None])), int((row[1:] >= 0).sum())) for row in held]
        model.train()
        return sum(loss * n for loss, n in sums) / sum(n for _, n in sums)

    model.train()
    queue: list[np.ndarray] = []
    started = time.perf_counter()
    for step in range(args.steps):
        while len(queue) < args.batch:
            queue.extend(windows(documents, CONTEXT, rng))
        batch, queue = queue[: args.batch], queue[args.batch :]
        warm = min(1.0, (step + 1) / min(100, args.steps))
        scale = warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / args.steps)))
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * scale
        loss = loss_of(np.stack(batch))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        # An exponential average of the weights: a small set of text gains more from it than from more steps.
        decay = min(0.995, (step + 1) / (step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(averaged.values()), list(model.state_dict().values()), 1 - decay)
        if step % 500 == 0 or step == args.steps - 1:
            print(f"step {step} loss {float(loss.detach()):.3f} held out {held_out_loss():.3f}", flush=True)
    seconds = time.perf_counter() - started
    model.load_state_dict(averaged)
    model.to(torch.bfloat16)
    for handle in handles:
        handle.remove()
    final = held_out_loss()
    per_byte = final * int((held[:, 1:] >= 0).sum()) / int(data["held_out_bytes"]) / math.log(2)
    epochs = args.steps * args.batch * CONTEXT / sum(map(len, documents))
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(
        f"trained {model.num_parameters()} parameters, {args.steps} steps of {args.batch} x {CONTEXT} tokens "
        f"({epochs:.0f} epochs) in {seconds:.0f} s on {where}; "
        f"held out, averaged weights in bf16: {final:.4f} nats a token, {per_byte:.3f} bits a byte"
    )
    save(model, fast, args.out)
    print_samples(args.out, device)


def add_dropout(model: Any, probability: float) -> list[Any]:
    """Drop parts of what the embedding, each attention and each MLP adds to the residual stream, while training.

    Qwen3 has no such dropout of its own; hooks leave the saved architecture as it is. Returns their handles.
    """
    from torch.nn import functional as F

    def hook(module: Any, _inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (F.dropout(output[0], probability, module.training), *output[1:])
        return F.dropout(output, probability, module.training)

    modules = [m for layer in model.model.layers for m in (layer.self_attn, layer.mlp)]
    return [m.register_forward_hook(hook) for m in [model.model.embed_tokens, *modules]]


def save(model: Any, tokenizer: Any, out: Path) -> None:
    """Write the model folder: bf16 safetensors, configs and tokenizer, greedy by default."""
    from transformers import GenerationConfig

    out.mkdir(parents=True, exist_ok=True)
    model.config.dtype = "bfloat16"
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    for path in sorted(out.iterdir()):
        if path.is_file():
            print(f"  {path.name}: {path.stat().st_size} bytes")


def print_samples(folder: Path, device: Any) -> None:
    """Print greedy text and text drawn at temperature 0.8, from the folder as a user would load it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device).eval()
    for prompt in SAMPLE_PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt").to(device)
        for options in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8}):
            torch.manual_seed(0)
            ids = model.generate(**inputs, **options, max_new_tokens=120, pad_token_id=tokenizer.eos_token_id)
            print(f"--- {prompt!r} {options}\n{tokenizer.decode(ids[0], skip_special_tokens=True)}")


def main() -> None:
    """Run the stage that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["corpus", "tokenizer", "train", "all"])
    parser.add_argument("--work", type=Path, required=True, help="folder of the corpus and its tokens")
    parser.add_argument("--out", type=Path, help="folder of the model (train, all)")
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--batch", type=int, default=16, help="rows of 1024 tokens in a step")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=2.0)
    parser.add_argument("--dropout", type=float, default=0.15)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.stage in ("train", "all") and args.out is None:
        parser.error("--out names the model folder, and this stage needs it")
    if args.stage in ("corpus", "all"):
        build_corpus(args.work, HELD_OUT)
    if args.stage in ("tokenizer", "all"):
        build_tokenizer(args.work)
    if args.stage in ("train", "all"):
        train(args)


if __name__ == "__main__":
    main()
