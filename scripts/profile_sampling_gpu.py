"""Where the time of `nondet sample` goes on a GPU under stock kernels: host and device time of the top operators.

python scripts/profile_sampling_gpu.py
"""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from nondet.embedded import DEFAULT_PROMPT
from nondet.sampling.engine import run_session
from nondet.sampling.model import load_model
from nondet.sampling.plan import build_plan, parse_load

ROWS = 12


def main() -> None:
    """Run one round twice, the second time under the profiler."""
    loaded = load_model(None, "bfloat16", "cuda")
    plan = build_plan(
        parse_load("default"),
        n=40,
        seed=0,
        prompt=loaded.encode(DEFAULT_PROMPT),
        max_new_tokens=32,
        context=loaded.context or 1024,
        encode=loaded.encode_plain,
    )
    run_session(loaded.model, plan.rounds[0], plan.load)
    # the engine runs on a thread of its own
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], experimental_config=threads) as session:
        done = run_session(loaded.model, plan.rounds[0], plan.load)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{done.steps} steps, {done.tokens} tokens, {done.seconds:.2f} s under the profiler")
    for event in sorted(session.key_averages(), key=lambda e: -e.self_cpu_time_total)[:ROWS]:
        host, device = event.self_cpu_time_total / 1e3, event.self_device_time_total / 1e3
        print(f"{host:9.1f} ms host {device:9.1f} ms device {event.count:7d} calls  {event.key[:60]}")


if __name__ == "__main__":
    main()
