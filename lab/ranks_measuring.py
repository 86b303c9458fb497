"""What the sections of lab/ranks_gpu.py share: messages, digests, graphs that are timed, and the members."""

# ruff: noqa: D103 - names say what a helper is

from __future__ import annotations

import hashlib
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "SHAPES",
    "SWEEP",
    "WIDTH",
    "alone_us",
    "digest",
    "graph_us",
    "kernel_names",
    "labels",
    "members",
    "message",
    "say",
]

WIDTH = 4096
SWEEP = (1, 2, 3, 4, 5, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
SHAPES = {
    "qwen3-8b o_proj": (4096, 4096),
    "qwen3-8b down_proj": (12288, 4096),
    "qwen3-32b o_proj": (8192, 5120),
    "qwen3-32b down_proj": (25600, 5120),
}


def say(**facts: Any) -> None:
    """One line of the result, from rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        with Path(os.environ["RANKS_OUT"]).open("a") as stream:
            stream.write(json.dumps(facts) + "\n")


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()[:12]


def labels(results: list[str]) -> list[int]:
    seen: dict[str, int] = {}
    return [seen.setdefault(r, len(seen)) for r in results]


def message(m: int, dtype: torch.dtype, place: int, seed: int = 0) -> torch.Tensor:
    """[m, WIDTH] of this rank: one row is the same at every m, wide exponents, the rest is other numbers."""
    rank, device = dist.get_rank(), torch.device("cuda", torch.cuda.current_device())
    from nondet.core.inputs import generator, make

    x = make("bell", (m, WIDTH), dtype, device, generator(1000 * (rank + 1) + m + seed, device))
    x[place % m] = make("wide", (WIDTH,), dtype, device, generator(77 + rank, device))
    return x


def alone_us(call: Callable[[], object], calls: int = 10, replays: int = 5) -> float:
    """As `graph_us`, of this rank alone."""
    return round(graph_us(call, calls, replays, together=False), 2)


def graph_us(call: Callable[[], object], calls: int = 20, replays: int = 9, *, together: bool = True) -> float:
    """Median microseconds a call of replays of a graph, the slowest rank's."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    graph.replay()
    torch.cuda.synchronize()
    samples = []
    for _ in range(replays):
        if together and dist.is_initialized():
            dist.barrier()
            torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) * 1000 / calls)
    if not together or not dist.is_initialized():
        return statistics.median(samples)
    slowest = torch.tensor(samples, device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest.median())


def kernel_names(call: Callable[[], object]) -> list[str]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return [e.name for e in profiler.events() if "Memset" not in e.name and e.device_type.name == "CUDA"]


def members() -> dict[str, Callable[[torch.Tensor], None]]:
    from nondet.kernels.all_reduce import chain as all_members
    from nondet.kernels.all_reduce import symmetric

    group = dist.group.WORLD
    table: dict[str, Callable[[torch.Tensor], None]] = {
        name: (lambda x, f=f: f(x.view(-1), group)) for name, f in all_members.MEMBERS.items() if name != "library"
    }

    def peers(x: torch.Tensor, reduce: Any) -> None:
        space = symmetric.workspace(group, x.device, (x.numel() + 4096) * x.element_size())
        if space is None:
            raise NotImplementedError("no workspace")
        space.flat(x.numel(), x.dtype).copy_(x.view(-1))
        reduce(x.numel(), x.dtype, x.view(-1), "chain", space)

    table["peers_one_shot"] = lambda x: peers(x, symmetric.peers_one_shot)
    table["peers_two_shot"] = lambda x: peers(x, symmetric.peers_two_shot)
    table["nccl"] = lambda x: dist.all_reduce(x)
    return table
