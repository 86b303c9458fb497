"""Where the time of `nondet sample` goes on a GPU: milliseconds a step, top operators, and top Python functions.

python lab/profile_sampling_gpu.py [IMPL] [MODEL] [LOAD] [TOKENS]

as in `nondet sample`; stock, the embedded model, the default load and 32 tokens where left out. One round is run five
times: first, again, on a thread that has run none (cuDNN's plans belong to a thread), under torch's profiler, and under
Python's.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from nondet.embedded import DEFAULT_PROMPT
from nondet.sampling import engine
from nondet.sampling.engine import run_session
from nondet.sampling.implementations import implementation
from nondet.sampling.model import load_model
from nondet.sampling.plan import Session, build_plan, parse_load

ROWS = 24


def main(impl: str = "stock", model: str = "embedded", load: str = "default", tokens: str = "32") -> None:
    """Profile one round of the load under one implementation."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = load_model(None if model == "embedded" else model, "bfloat16", device)
    parsed = parse_load(load)
    plan = build_plan(
        parsed,
        n=parsed.targets,
        seed=0,
        prompts=[loaded.encode(DEFAULT_PROMPT)],
        max_new_tokens=int(tokens),
        context=loaded.context or 1024,
        encode=loaded.encode_plain,
    )

    def once() -> Session:
        return run_session(loaded.model, plan.rounds[0], plan.load)

    print(f"{impl}, {loaded.name}, load {load}; torch {torch.__version__}, {device}")
    with implementation(impl) as said:
        for what in ("first", "again", "on a new thread"):
            if what == "on a new thread":
                engine._LOOPS = ThreadPoolExecutor(1)
            timed = once()
            if timed.fatal:
                raise SystemExit(timed.fatal)
            rate, step = timed.tokens / timed.seconds, 1e3 * timed.seconds / timed.steps
            print(f"{what}: {timed.steps} steps, {timed.tokens} tokens: {step:.2f} ms a step, {rate:.0f} tokens/s")
        for line, calls in said().most_common():
            print(f"  {calls:7d}  {line}")
        operators(once)
        functions(once)


def operators(once: Any) -> None:
    """Host and device time of the top operators and kernels."""
    # the engine runs on a thread of its own
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=kinds, experimental_config=threads) as session:
        done = once()
    events = session.key_averages()
    device = sum(e.self_device_time_total for e in events if not e.key.startswith("aten::")) / 1e3 / done.steps
    print(
        f"under torch's profiler {1e3 * done.seconds / done.steps:.2f} ms a step; kernels on the device {device:.2f} ms"
    )
    for event in sorted(events, key=lambda e: -e.self_cpu_time_total)[:ROWS]:
        host, busy = event.self_cpu_time_total / 1e3, event.self_device_time_total / 1e3
        print(f"{host:9.1f} ms host {busy:9.1f} ms device {event.count:7d} calls  {event.key[:70]}")
    print("by device time")
    for event in sorted(events, key=lambda e: -e.self_device_time_total)[:ROWS]:
        print(f"{event.self_device_time_total / 1e3:9.1f} ms device {event.count:7d} calls  {event.key[:90]}")


def functions(once: Any) -> None:
    """Python functions of the engine's thread, by their own time."""
    recorder = cProfile.Profile()
    original = ContinuousBatchingManager._run_generation_loop

    def run(self: Any) -> None:
        recorder.runcall(original, self)

    ContinuousBatchingManager._run_generation_loop = run
    try:
        done = once()
    finally:
        ContinuousBatchingManager._run_generation_loop = original
    print(f"under cProfile {1e3 * done.seconds / done.steps:.2f} ms a step")
    pstats.Stats(recorder).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main(*sys.argv[1:])
