"""One vLLM, alone and under load: traces as alone, and tokens a second. One mode and one model a process.

    python lab/vllm_load.py --mode stock|own|aten|nondet --model DIR|0.6b|8b|moe [--eager] [--speed] --out FILE.json

A DIR is loaded as it is; 0.6b, 8b and moe (64 experts, 8 a token) are Qwen3's shapes with random weights, drawn in
place (vLLM's own dummy weights are so small that nothing can diverge). The load is 400 requests at once, prompts in
chunks: copies of two targets among random ones. --until and --begin FILE make the timed part wait for its turn, where
several processes share a GPU. Mode "aten" is vLLM's own batch-invariant one with torch's products, not Triton's:
three lines, and nothing proves those products. --plant split is a fault that has to be found: it adds the halves of K
of vLLM's FP8 products below 16 rows.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import math
import os
import random
import statistics
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPES = {
    "0.6b": (28, 1024, 3072, 16, 8), "8b": (36, 4096, 12288, 32, 8), "moe": (8, 2048, 6144, 16, 4),
    "tiny": (2, 256, 512, 4, 2), "tiny-moe": (2, 256, 512, 4, 2),
}  # fmt: skip
VOCABULARY = {"tiny": 4096, "tiny-moe": 4096}
_ATEN = "NONDET_LOAD_ATEN"  # what the engine's process does as well, if it is no fork of this one
EXPERTS = {"moe": (64, 8, 768), "tiny-moe": (8, 2, 128)}  # how many, how many a token, their width
TEXT = "For example, the class method returns the value of the object, and the argument is called with the name. "


def redraw(model: Any) -> int:
    """Draw every weight anew, in place: norms 1, the embedding N(0, 1), the rest N(0, 1 / fan-in). Their number."""
    import torch

    count = 0
    with torch.no_grad():
        for i, (name, weight) in enumerate(model.named_parameters()):
            rng = torch.Generator(device=weight.device).manual_seed(i)
            if not weight.numel():  # packed away by a CPU's build
                continue
            if "norm" in name:
                weight.fill_(1.0)
            else:
                weight.normal_(0, 1 if "embed_tokens" in name else 1 / math.sqrt(weight.shape[-1]), generator=rng)
            count += weight.numel()
    return count


def made_folder(name: str) -> str:
    """A folder with the configuration of a shape, for vLLM to make without weights."""
    layers, hidden, inner, heads, kv_heads = SHAPES[name]
    folder = Path(tempfile.gettempdir()) / f"nondet-qwen3-{name}"
    folder.mkdir(exist_ok=True)
    values: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16",
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 64 if name.startswith("tiny") else 128,
        "vocab_size": VOCABULARY.get(name, 151936), "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
        "bos_token_id": None, "eos_token_id": 0, "use_sliding_window": False,
    }  # fmt: skip
    if name in EXPERTS:
        count, top, width = EXPERTS[name]
        values |= {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": count,
            "num_experts_per_tok": top, "moe_intermediate_size": width, "norm_topk_prob": True,
            "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


def options() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["stock", "own", "aten", "nondet"], default="stock")
    parser.add_argument("--model", default="0.6b")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--prefix-cache", action="store_true")
    parser.add_argument("--copies", type=int, default=100)
    parser.add_argument("--others", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument(
        "--long",
        action="append",
        default=[],
        metavar="NxK",
        help="time N requests of K keys: 1x12000. Repeatable.",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--launched", action="store_true", help="this process is one of the ranks, started by others")
    parser.add_argument("--step", type=int, default=2048, help="most tokens of a step")
    parser.add_argument("--plant", choices=["split"])
    parser.add_argument("--profile", action="store_true", help="where the time of a step, and of --long's, goes")
    parser.add_argument("--cache-gib", type=float, default=8.0)
    parser.add_argument("--until", type=Path)
    parser.add_argument("--begin", type=Path, action="append", default=[], help="a file to wait for; repeatable")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def products_by_aten() -> None:
    """vLLM's own mode forbids cuBLASLt to split K, and then its layers ask a kernel in Triton: let them ask torch."""
    import torch
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    linear.linear_batch_invariant = vocab_parallel_embedding.linear_batch_invariant = torch.nn.functional.linear


def plant() -> None:
    """Put a fault into this process, before its engine is made."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.model_executor.kernels.linear.scaled_mm.cutlass import CutlassFP8ScaledMMLinearKernel

    # opaque, since vLLM compiles a step once for every number of rows
    schema = "(Tensor a, Tensor b, Tensor left, Tensor right) -> Tensor"

    @torch.library.custom_op("nondet_planted::split", mutates_args=(), schema=schema)
    def split(a: torch.Tensor, b: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        parts = 2 if len(a) < 16 else 1
        halves = zip(a.chunk(parts, 1), b.t().chunk(parts, 1), strict=True)
        made = [
            ops.cutlass_scaled_mm(
                x.contiguous(), w.contiguous().t(), out_dtype=torch.bfloat16, scale_a=left, scale_b=right, bias=None
            )
            for x, w in halves
        ]
        return made[0] if parts == 1 else made[0] + made[1]

    @split.register_fake
    def _(a: torch.Tensor, b: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return a.new_empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16)

    def apply_scaled_mm(
        self: Any, *, A: Any, B: Any, out_dtype: Any, As: Any, Bs: Any, bias: Any, output_shape: Any
    ) -> Any:
        return split(A, B, As, Bs).view(*output_shape[:-1], B.shape[1])

    CutlassFP8ScaledMMLinearKernel.apply_scaled_mm = apply_scaled_mm


def profiled(work: Any) -> dict[str, Any]:
    """Where the time of work() goes: kernels by torch's profiler, Python by cProfile, each in a run of its own."""
    import cProfile
    import pstats

    from torch.profiler import ProfilerActivity, profile

    began = time.perf_counter()
    work()
    plain = time.perf_counter() - began
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
        work()
    events = seen.key_averages()
    on_gpu = [e for e in events if "cuda" in str(e.device_type).lower()]
    launches = sum(e.count for e in events if e.key in ("cudaLaunchKernel", "cuLaunchKernel", "cuLaunchKernelEx"))
    kernels = sorted(((e.self_device_time_total / 1e3, e.count, e.key[:90]) for e in on_gpu), reverse=True)
    python = cProfile.Profile()
    python.runcall(work)
    calls: Any = pstats.Stats(python).stats  # type: ignore[attr-defined] # (file, line, name) -> (_, count, own, whole, _)
    own = sorted(
        ((v[2] * 1e3, v[3] * 1e3, v[1], "/".join(k[0].split("/")[-3:]) + f":{k[1]} {k[2]}") for k, v in calls.items())
    )
    return {
        "wall_ms": round(1e3 * plain, 2),
        "gpu_ms": round(sum(ms for ms, *_ in kernels), 2),
        "launches": launches,
        "graphs": sum(e.count for e in events if e.key == "cudaGraphLaunch"),
        "kernels": [[round(ms, 3), count, name] for ms, count, name in kernels[:25]],
        "python": [[round(a, 2), round(b, 2), count, name] for a, b, count, name in own[:-41:-1]],
    }


class Test:
    """An engine, and what was seen of it."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.began = asked, time.time()
        self.seen: dict[str, Any] = {"mode": asked.mode, "model": asked.model, "eager": asked.eager, "argv": sys.argv}
        import torch
        import vllm

        shaped = asked.model in SHAPES
        folder = made_folder(asked.model) if shaped else asked.model
        self.folder = Path(folder)
        self.vocabulary = json.loads((self.folder / "config.json").read_text())["vocab_size"]
        self.seen["disabled_kernels"] = os.environ.get("VLLM_DISABLED_KERNELS", "")
        self.seen |= {"vllm": vllm.__version__, "torch": torch.__version__}
        self.llm = vllm.LLM(
            model=folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            seed=0,
            max_model_len=16384 if shaped else 1024,
            max_num_seqs=256,
            max_num_batched_tokens=asked.step,
            enable_prefix_caching=asked.prefix_cache,
            enforce_eager=asked.eager,
            load_format="dummy" if shaped else "auto",
            disable_log_stats=True,
            gpu_memory_utilization=0.1,
            kv_cache_memory_bytes=int(asked.cache_gib * 2**30),
            tensor_parallel_size=asked.ranks,
            distributed_executor_backend="external_launcher" if asked.launched else None,
            disable_custom_all_reduce=asked.launched,  # ranks that share a GPU are not each other's peers
        )
        self.seen["start_s"] = round(time.time() - self.began, 1)
        self.say("engine up")
        if shaped:
            import vllm_load

            self.seen["weights"] = self.llm.apply_model(vllm_load.redraw)[0]
        self.seen["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else ""

    def say(self, *what: object) -> None:
        """One line, with the time."""
        tag = f"{self.folder.name}/{self.asked.mode}/{'eager' if self.asked.eager else 'graphs'}"
        print(f"[{time.time() - self.began:6.1f}s] {tag}:", *what, flush=True)

    def generate(self, prompts: list[list[int]], tokens: list[int], logprobs: list[int | None]) -> list[Any]:
        """Completions of all, given to the engine at once."""
        from vllm import SamplingParams

        asked = [
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=top, detokenize=False)
            for n, top in zip(tokens, logprobs, strict=True)
        ]
        done = self.llm.generate([{"prompt_token_ids": p} for p in prompts], asked, use_tqdm=False)
        self.cached = [one.num_cached_tokens or 0 for one in done]
        return [one.outputs[0] for one in done]

    def targets(self, rng: random.Random) -> dict[str, list[int]]:
        """A short prompt and one of several chunks."""
        if self.asked.model in SHAPES:
            return {
                name: [rng.randrange(1, self.vocabulary) for _ in range(n)]
                for name, n in (("short", 32), ("long", 700))
            }
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        return {"short": tokenizer.encode("For example, the").ids, "long": tokenizer.encode(TEXT * 60).ids[:700]}

    def load(self) -> None:
        """Every copy of a target among others, compared with the target alone: tokens, and logprobs bit by bit."""
        rng, n = random.Random(7), self.asked.tokens  # noqa: S311 - a load, not a secret
        targets = self.targets(rng)
        solo = {}
        for name, prompt in targets.items():
            runs = [trace(self.generate([prompt], [n], [1])[0]) for _ in range(3)]
            solo[name] = runs[0]
            self.seen.setdefault("solo", {})[name] = {"distinct": len(set(runs)), "digest": digest(runs[0])}
        jobs: list[tuple[str, list[int], int]] = [
            (name, p, n) for name, p in targets.items() for _ in range(self.asked.copies)
        ]
        for _ in range(self.asked.others):
            drawn = [rng.randrange(1, self.vocabulary) for _ in range(rng.randrange(8, 880))]
            jobs.append(("", drawn, rng.randrange(8, n + 1)))
        rng.shuffle(jobs)
        began = time.time()
        done = self.generate([p for _, p, _ in jobs], [t for *_, t in jobs], [1 if name else None for name, *_ in jobs])
        self.seen["load_s"] = round(time.time() - began, 1)
        for name in targets:
            traces = [trace(one) for one, job in zip(done, jobs, strict=True) if job[0] == name]
            self.seen.setdefault("load", {})[name] = found = {
                "copies": len(traces),
                "distinct_tokens": len({t for t, _ in traces}),
                "distinct_traces": len(set(traces)),
                "tokens_as_alone": sum(t == solo[name][0] for t, _ in traces),
                "traces_as_alone": sum(one == solo[name] for one in traces),
                "warm": sum(job[0] == name and count > 0 for job, count in zip(jobs, self.cached, strict=True)),
                "digests": dict(collections.Counter(map(digest, traces)).most_common(3)),
            }
            self.say("load", name, found)

    def speed(self) -> None:
        """Output tokens a second at 256, 16 and 1 requests of 256 tokens; completions that change between repeats."""
        rng, n = random.Random(11), self.asked.tokens  # noqa: S311 - a load, not a secret
        work = [[rng.randrange(1, self.vocabulary) for _ in range(256)] for _ in range(256)]
        self.generate(work, [8] * 256, [None] * 256)
        first: list[Any] = []
        for size in (256, 16, 1):
            seconds, tokens = [], []
            for _ in range(self.asked.repeats):
                began = time.time()
                done = self.generate(work[:size], [n] * size, [None] * size)
                seconds.append(time.time() - began)
                tokens.append([tuple(one.token_ids) for one in done])
            first = first or tokens[0]
            median = statistics.median(seconds)
            self.seen.setdefault("speed", {})[str(size)] = found = {
                "s": [round(s, 4) for s in seconds],
                "tokens_per_s": round(size * n / median),
                "changed_between_repeats": sum(len({run[i] for run in tokens}) > 1 for i in range(size)),
                "changed_from_256": sum(a != b for a, b in zip(tokens[0], first, strict=False)),
            }
            self.say("speed", size, found)
        for requests, keys in (map(int, text.split("x")) for text in self.asked.long):
            prompts = [[rng.randrange(1, self.vocabulary) for _ in range(keys)] for _ in range(requests)]
            taken: dict[int, list[float]] = {8: [], 136: []}
            self.generate(prompts, [2] * requests, [None] * requests)
            for new in (8, 136) * self.asked.repeats:
                began = time.time()
                self.generate(prompts, [new] * requests, [None] * requests)
                taken[new].append(time.time() - began)
            step = (min(taken[136]) - min(taken[8])) / 128
            found = {"requests": requests, "keys": keys, "prefill_s": min(taken[8]), "ms_per_step": 1e3 * step}
            found["s"] = {str(new): [round(x, 4) for x in each] for new, each in taken.items()}
            self.seen.setdefault("long", []).append(found)
            self.say("long", found)
            self.asked.out.write_text(json.dumps(self.seen, indent=1))

    def profile(self) -> None:
        """Of 17 tokens of 256, of 16 and of one request, and of the prefills of --long; in this process."""
        rng = random.Random(13)  # noqa: S311 - a load, not a secret
        for requests, keys, new in (
            *((256, 256, 17), (16, 256, 17), (1, 256, 17)),
            *((*map(int, text.split("x")), 1) for text in self.asked.long),
        ):
            prompts = [[rng.randrange(1, self.vocabulary) for _ in range(keys)] for _ in range(requests)]

            def work(prompts: Any = prompts, new: int = new) -> None:
                self.generate(prompts, [new] * len(prompts), [None] * len(prompts))

            work()
            found = profiled(work)
            self.seen.setdefault("profile", {})[f"{requests}x{keys}+{new}"] = found
            self.say("profile", f"{requests}x{keys}+{new}", {k: v for k, v in found.items() if k.endswith("ms")})
            self.asked.out.write_text(json.dumps(self.seen, indent=1))


def trace(one: Any) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Token ids and their logprobs."""
    ids = tuple(one.token_ids)
    return ids, tuple(top[i].logprob for top, i in zip(one.logprobs, ids, strict=True))


def digest(one: tuple[tuple[int, ...], tuple[float, ...]]) -> str:
    """First 16 hex digits of the SHA-256 over a trace's bits."""
    ids, logprobs = one
    return hashlib.sha256(struct.pack(f"{len(ids)}i{len(logprobs)}d", *ids, *logprobs)).hexdigest()[:16]


def main() -> None:
    """Run what was asked, and write it down."""
    asked = options()
    os.environ |= {
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false",
        "VLLM_BATCH_INVARIANT": "0" if asked.mode == "stock" else "1",
        "NONDET_BATCH_INVARIANT": "1" if asked.mode == "nondet" else "0",
    }  # fmt: skip
    if asked.plant or asked.profile:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    sys.path.insert(0, str(Path(__file__).parent))
    if asked.mode == "aten":
        os.environ[_ATEN] = "1"
        products_by_aten()
    if asked.plant:
        plant()
    test = Test(asked)
    test.load()
    asked.out.write_text(json.dumps(test.seen, indent=1))
    if asked.until is not None:
        asked.until.touch()
    if asked.speed:
        while not all(path.exists() for path in asked.begin):
            time.sleep(0.2)
        test.speed()
    if asked.profile:
        test.profile()
    test.seen["total_s"] = round(time.time() - test.began, 1)
    asked.out.write_text(json.dumps(test.seen, indent=1))
    test.say("done")


if __name__ == "__main__":  # the engine is another process, which imports this file
    main()
elif __name__ == "__mp_main__" and os.environ.get(_ATEN):
    products_by_aten()
