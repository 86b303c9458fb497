"""A running SGLang, solo and under load: traces as solo, tokens a second, time by kernel. One file a server.

    python lab/sglang_load.py model 0.6b|8b|tiny FOLDER
    python lab/sglang_load.py bits|speed|kernels URL FOLDER OUT.json [--loads 2] [--copies 100] [--others 200]
    python lab/sglang_load.py summary OUT

`model` makes a folder that SGLang loads as it is: Qwen3's shape with random weights, drawn on the GPU if there is one
(SGLang's own dummy weights are so small that nothing can diverge). `bits` sends two targets solo, the first time cold,
then loads of copies among random prompts, in turn with the prompts' prefixes cached and, by a salt, not; tokens and
float32 logprobs are compared bit by bit. `summary` puts servers beside each other. Needs aiohttp.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import glob
import gzip
import hashlib
import json
import math
import os
import random
import statistics
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lab.vllm_load import SHAPES

VOCABULARY = {"tiny": 8192}
TOKENIZER = Path(__file__).resolve().parent.parent / "nondet" / "embedded"


def options() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["model", "bits", "speed", "kernels", "summary"])
    parser.add_argument("where", help="a shape, an URL, or a folder of results")
    parser.add_argument("folder", nargs="?", type=Path, help="the model's")
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--loads", type=int, default=2)
    parser.add_argument("--copies", type=int, default=100)
    parser.add_argument("--others", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--most", type=int, default=256, help="requests at a time")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def make_model(shape: str, out: Path) -> None:
    """Norms 1, the embedding N(0, 1), the rest N(0, 1 / fan-in), and a head of its own: layers then matter to the next
    token. The tokenizer is the embedded model's, with a word for each further id."""
    import torch
    from safetensors.torch import save_file

    layers, hidden, inner, heads, kv_heads = SHAPES[shape]
    dim, vocabulary = 128, VOCABULARY.get(shape, 151936)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = json.loads((TOKENIZER / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words.update({f"Ġt{i}": i for i in range(len(words), vocabulary)})
    (out / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    config = json.loads((TOKENIZER / "tokenizer_config.json").read_text()) | {"model_max_length": 8192}
    (out / "tokenizer_config.json").write_text(json.dumps(config))
    values = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16", "num_hidden_layers": layers,
        "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": dim, "vocab_size": vocabulary, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False,
        "bos_token_id": None, "eos_token_id": 0, "use_sliding_window": False, "sliding_window": None,
        "max_window_layers": layers, "layer_types": ["full_attention"] * layers,
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(values))
    index: dict[str, str] = {}
    seeds = iter(range(1, 1 << 20))

    def drawn(*size: int, deviation: float | None = None) -> torch.Tensor:
        rng = torch.Generator(device=device).manual_seed(next(seeds))
        empty = torch.empty(*size, dtype=torch.bfloat16, device=device)
        return empty.normal_(0, deviation or 1 / math.sqrt(size[-1]), generator=rng).cpu()

    def save(part: str, tensors: dict[str, torch.Tensor]) -> None:
        name = f"model-{part}.safetensors"
        save_file(tensors, out / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, name))

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    save(
        "ends",
        {
            "model.embed_tokens.weight": drawn(vocabulary, hidden, deviation=1.0),
            "lm_head.weight": drawn(vocabulary, hidden),
            "model.norm.weight": ones(hidden),
        },
    )
    for layer in range(layers):
        at = f"model.layers.{layer}."
        products = {
            "self_attn.q_proj": (heads * dim, hidden),
            "self_attn.k_proj": (kv_heads * dim, hidden),
            "self_attn.v_proj": (kv_heads * dim, hidden),
            "self_attn.o_proj": (hidden, heads * dim),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        norms = {"self_attn.q_norm": dim, "self_attn.k_norm": dim, "input_layernorm": hidden}
        norms["post_attention_layernorm"] = hidden
        tensors = {f"{at}{name}.weight": drawn(*size) for name, size in products.items()}
        save(f"{layer:02d}", tensors | {f"{at}{name}.weight": ones(size) for name, size in norms.items()})
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


class Client:
    """Requests of token ids to one server, all at once."""

    def __init__(self, url: str, folder: Path, tokens: int) -> None:
        self.url, self.tokens, self.salts = url, tokens, 0
        self.vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]

    def prompt(self, rng: random.Random, length: int) -> list[int]:
        """Random ids."""
        return [rng.randrange(1, self.vocabulary) for _ in range(length)]

    async def ask(self, session: Any, ids: list[int], tokens: int, *, traced: bool = False, cold: bool = False) -> Any:
        """(tokens, their logprobs' bits, cached tokens of the prompt)."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body: dict[str, Any] = {"input_ids": ids, "sampling_params": sampling}
        if traced:
            body |= {"return_logprob": True, "logprob_start_len": -1}
        if cold:
            self.salts += 1
            body["extra_key"] = f"salt-{os.getpid()}-{self.salts}"
        async with session.post(f"{self.url}/generate", json=body) as answer:
            said = await answer.json(content_type=None)
        if "output_ids" not in said:
            raise SystemExit(f"no answer: {str(said)[:400]}")
        meta = said["meta_info"]
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]] if traced else []
        return tuple(said["output_ids"]), struct.pack(f"<{len(logprobs)}f", *logprobs), meta.get("cached_tokens")

    def session(self) -> Any:
        """Of as many connections as are asked for; none is used again after 2 s, because SGLang closes one after 5."""
        import aiohttp

        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
        return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300))


async def bits(asked: argparse.Namespace, client: Client) -> dict[str, Any]:
    """Traces solo and under load."""
    rng = random.Random(7)  # noqa: S311 - the same at every call
    targets = {"short": client.prompt(rng, 32), "long": client.prompt(rng, 700)}
    made: dict[str, Any] = {"solo": {}, "loads": []}
    alone: dict[str, Any] = {}
    sha = hashlib.sha256()
    async with client.session() as session:
        for name, ids in targets.items():
            runs = [await client.ask(session, ids, client.tokens, traced=True) for _ in range(3)]
            alone[name] = runs[0][:2]
            sha.update(repr(alone[name]).encode())
            traces = len({run[:2] for run in runs})
            made["solo"][name] = {"distinct": traces, "cached": [run[2] for run in runs]}
        made["digest"] = sha.hexdigest()[:16]
        print("solo", made["solo"], made["digest"], flush=True)
        for load in range(asked.loads):
            cold = load % 2 == 1
            jobs: list[tuple[Any, ...]] = [
                (name, ids, client.tokens) for name, ids in targets.items() for _ in range(asked.copies)
            ]
            jobs += [
                (None, client.prompt(rng, rng.randrange(8, 880)), rng.randrange(8, client.tokens + 1))
                for _ in range(asked.others)
            ]
            rng.shuffle(jobs)
            began = time.perf_counter()
            answers = await asyncio.gather(
                *(client.ask(session, ids, n, traced=name is not None, cold=cold) for name, ids, n in jobs)
            )
            row: dict[str, Any] = {"cold": cold, "seconds": round(time.perf_counter() - began, 2)}
            for name in targets:
                mine = [answer for answer, job in zip(answers, jobs, strict=True) if job[0] == name]
                row[name] = {
                    "copies": len(mine),
                    "distinct_traces": len({answer[:2] for answer in mine}),
                    "traces_as_solo": sum(answer[:2] == alone[name] for answer in mine),
                    "tokens_as_solo": sum(answer[0] == alone[name][0] for answer in mine),
                    "cached": dict(collections.Counter(answer[2] for answer in mine).most_common(4)),
                }
            print("load", row, flush=True)
            made["loads"].append(row)
    return made


async def speed(asked: argparse.Namespace, client: Client) -> dict[str, Any]:
    """Output tokens a second of prompts of 256 tokens."""
    rng = random.Random(8)  # noqa: S311 - the same at every call
    work = [client.prompt(rng, 256) for _ in range(asked.most)]
    made: dict[str, Any] = {}
    async with client.session() as session:
        await asyncio.gather(*(client.ask(session, ids, 8, cold=True) for ids in work))
        for count in (asked.most, 16, 1):
            times, answers = [], []
            for _ in range(asked.repeats):
                began = time.perf_counter()
                answers.append(
                    await asyncio.gather(*(client.ask(session, ids, client.tokens, cold=True) for ids in work[:count]))
                )
                times.append(time.perf_counter() - began)
            middle = statistics.median(times)
            changed = sum(len({run[i][0] for run in answers}) > 1 for i in range(count))
            made[str(count)] = {
                "seconds": [round(t, 3) for t in times],
                "tokens_per_s": round(count * client.tokens / middle),
                "ms_per_step": round(middle / client.tokens * 1e3, 3),
                "changed_between_runs": changed,
            }
            print("speed", count, made[str(count)], flush=True)
    return made


def kernels(client: Client, folder: Path) -> dict[str, Any]:
    """SGLang's own profile of 64 requests, and of one, summed by kernel; ms."""
    import urllib.request

    rng = random.Random(9)  # noqa: S311 - the same at every call
    made: dict[str, Any] = {}

    def post(path: str, body: dict[str, Any]) -> None:
        request = urllib.request.Request(  # noqa: S310 - the URL is this script's caller's
            f"{client.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=120).read()  # noqa: S310 - the same

    def load(count: int, tokens: int) -> None:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        post("/generate", {"input_ids": [client.prompt(rng, 256) for _ in range(count)], "sampling_params": sampling})

    for count in (64, 1):
        load(count, 4)
        at = folder / str(count)
        at.mkdir(parents=True, exist_ok=True)
        post("/start_profile", {"output_dir": str(at), "activities": ["GPU"]})
        load(count, 32)
        ended = threading.Thread(target=post, args=("/stop_profile", {}))
        ended.start()
        ended.join(60)
        for _ in range(30):
            if found := glob.glob(f"{at}/*.trace.json.gz"):
                break
            time.sleep(1)
        else:
            continue
        time.sleep(1)
        total: collections.Counter[str] = collections.Counter()
        calls: collections.Counter[str] = collections.Counter()
        for event in json.loads(gzip.decompress(Path(found[0]).read_bytes()))["traceEvents"]:
            if event.get("cat") == "kernel":
                total[event["name"]] += event["dur"]
                calls[event["name"]] += 1
        Path(found[0]).unlink()
        most = [(round(us / 1e3, 3), calls[name], name[:110]) for name, us in total.most_common(24)]
        made[str(count)] = {"kernels_ms": round(sum(total.values()) / 1e3, 2), "most": most}
        print(f"{count} requests: kernels {made[str(count)]['kernels_ms']} ms")
        for ms, times, name in most:
            print(f"  {ms:9.3f} ms {times:6d} x {name}")
    return made


def summary(folder: Path) -> None:
    """What every server's files say, side by side."""
    names = sorted({path.name.split(".")[0] for path in folder.glob("*.bits.json")} | {"stock"})

    def read(name: str, what: str) -> dict[str, Any]:
        path = folder / f"{name}.{what}.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    base, base_kernels = read("stock", "speed"), read("stock", "kernels")
    for name in names:
        for row in read(name, "bits").get("loads", ()):
            cells = [f"{t} {row[t]['traces_as_solo']} of {row[t]['copies']}" for t in ("short", "long")]
            print(f"{name}: {'cold' if row['cold'] else 'cached'}: traces as solo {', '.join(cells)}")
        found = read(name, "bits")
        print(f"{name}: digest {found.get('digest', 'none')}, solo {found.get('solo')}")
        for count, row in read(name, "speed").items():
            ratio = row["tokens_per_s"] / base[count]["tokens_per_s"] if count in base else math.nan
            print(f"{name}: {count} requests: {row['tokens_per_s']} tokens/s, {ratio:.3f} of stock")
        for count, row in read(name, "kernels").items():
            ratio = row["kernels_ms"] / base_kernels[count]["kernels_ms"] if count in base_kernels else math.nan
            print(f"{name}: {count} requests: kernels {row['kernels_ms']} ms, {ratio:.3f} of stock")


def main() -> None:
    """One of the five."""
    asked = options()
    if asked.what == "model":
        make_model(asked.where, asked.folder)
        return
    if asked.what == "summary":
        summary(Path(asked.where))
        return
    client = Client(asked.where, asked.folder, asked.tokens)
    if asked.what == "kernels":
        made = kernels(client, asked.out.with_suffix(""))
    else:
        made = asyncio.run({"bits": bits, "speed": speed}[asked.what](asked, client))
    asked.out.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
