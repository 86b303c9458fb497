"""Time the Triton kernels against stock PyTorch on the GPU at hand, in bfloat16: informal figures.

    python scripts/time_kernels_gpu.py

Each figure is the median over replays of a CUDA graph that walks over rotating inputs, in microseconds a call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton

from nondet.inputs import generator, make
from nondet.kernels import triton_rows
from nondet.kernels.triton_attention import attention
from nondet.kernels.triton_matmul import linear

REPLAYS = 15


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    """bfloat16 inputs on the GPU."""
    return make("bell", shape, torch.bfloat16, "cuda", generator(seed, "cuda"))


def graph_us(call: Callable[..., Any], arguments: list[tuple[Any, ...]]) -> float:
    """Median microseconds of one call, over graph replays that make one call for each tuple of arguments."""
    for args in arguments:
        call(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for args in arguments:
            call(*args)
    times = []
    for _ in range(REPLAYS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(arguments))
    return sorted(times[2:])[REPLAYS // 2]


def compare(what: str, stock: Callable[..., Any], ours: Callable[..., Any], arguments: list[tuple[Any, ...]]) -> None:
    """Print one line."""
    theirs_us, ours_us = graph_us(stock, arguments), graph_us(ours, arguments)
    print(f"{what:<44} {theirs_us:9.1f} {ours_us:9.1f} {theirs_us / ours_us:10.2f}", flush=True)


def stock_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """PyTorch's own."""
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def stock_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """PyTorch's own, by the backend that it chooses; a decode step needs no mask."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True)


def main() -> int:
    """Print the table."""
    if not torch.cuda.is_available():
        print("needs a CUDA device", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"{'microseconds, bfloat16':<44} {'stock':>9} {'ours':>9} {'stock/ours':>10}")
    for k, n in ((4096, 6144), (12288, 4096), (4096, 24576)):
        weights = [draw(n, k, seed=i) for i in range(4)]
        for m in (1, 16, 64, 256, 4096):
            x = draw(m, k)
            compare(f"linear M={m} K={k} N={n}", F.linear, linear, [(x, w) for w in weights])
    for m, width in ((1, 4096), (4096, 4096), (131072, 128)):
        arguments = [(draw(m, width, seed=i), draw(width)) for i in range(2)]
        compare(f"rms_norm M={m} H={width}", stock_rms_norm, triton_rows.rms_norm, arguments)
    for m in (1, 256):
        logits = [(draw(m, 151936, seed=i),) for i in range(2)]
        compare(f"log_softmax M={m} V=151936", lambda x: torch.log_softmax(x, -1), triton_rows.log_softmax, logits)
    for b, tq, tk in ((1, 1, 8192), (8, 1, 4096), (64, 1, 8192), (1, 1024, 1024), (1, 4096, 4096), (1, 16384, 16384)):
        qkv = [tuple(draw(b, h, t, 128, seed=i + h) for h, t in ((32, tq), (8, tk), (8, tk))) for i in range(2)]
        compare(f"attention 32/8 D=128 B={b} Tq={tq} KV={tk}", stock_attention, attention, qkv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
