"""Several GPUs of one host, measured: python lab/ranks_gpu.py OUT [sections]. JSON lines, one fact a line.

Sections run on ranks of their own, within a time limit; one that hangs or dies does not take the others with it.
"""

# ruff: noqa: D103 - a script's main needs no docstring beside the script's own

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ranks_measuring import say
from ranks_sections import SECTIONS


def _rank(rank: int, world: int, port: int, sections: list[str], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    if sections == ["overlapping"]:
        store = dist.TCPStore("127.0.0.1", port, world, False, timedelta(seconds=60))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    elif world > 1:
        store = dist.TCPStore("127.0.0.1", port, world, False, timedelta(seconds=60))
        device = torch.device("cuda", rank)
        limit = timedelta(seconds=60)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=world, timeout=limit, device_id=device)
    for section in sections:
        started = time.perf_counter()
        SECTIONS[section](environment)
        torch.cuda.synchronize()
        say(finished=section, world=world, environment=environment, seconds=round(time.perf_counter() - started, 1))
    os._exit(0)  # NCCL's own tear-down takes seconds


def _spawn(world: int, sections: list[str], environment: dict[str, str]) -> str:
    """Run sections on ranks of their own: "" where they came to their end, else what happened."""
    limit = time.perf_counter() + float(os.environ.get("RANKS_LIMIT", "80"))
    store = dist.TCPStore("127.0.0.1", 0, world, True, timedelta(seconds=60), wait_for_workers=False)
    ranks = mp.start_processes(
        _rank, args=(world, store.port, sections, environment), nprocs=world, join=False, start_method="spawn"
    )
    note = ""
    try:
        while not ranks.join(timeout=1):
            if time.perf_counter() > limit:
                note = "out of time"
                break
    except Exception as error:  # noqa: BLE001
        note = f"{type(error).__name__}: {str(error)[-900:]}"
    for process in ranks.processes:
        process.kill()
    return note


def _finished(out: Path, world: int) -> set[str]:
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    return {line["finished"] for line in lines if line.get("world") == world and "finished" in line}


def main() -> None:
    out = Path(sys.argv[1])
    os.environ["RANKS_OUT"] = str(out)
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # NVLink multicast stays off, whatever the caller's environment says
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = os.environ["NVSHMEM_DISABLE_NVLS"] = "1"
    asked = sys.argv[2].split(",") if len(sys.argv) > 2 else list(SECTIONS)
    gpus = torch.cuda.device_count()
    say(
        section="environment",
        gpu=torch.cuda.get_device_name(0) if gpus else None,
        gpus=gpus,
        torch=torch.__version__,
        nccl=".".join(map(str, torch.cuda.nccl.version())),
        topology=subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True).stdout,  # noqa: S607
        variables={k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "TORCH_", "NVSHMEM_", "NONDET_"))},
    )
    pinned = [("Ring", "LL"), ("Ring", "Simple"), ("Tree", "LL"), ("Tree", "Simple")][: 4 if gpus > 2 else 2]
    several = [int(w) for w in os.environ.get("RANKS_WORLDS", "4,2,1").split(",")]
    worlds = {"row_parallel": (4, 2, 1), "tiles": (min(gpus, 4),), "algorithms": (), "overlapping": ()}
    jobs = [(w, [s for s in asked if w in worlds.get(s, (4, 2))], dict[str, str]()) for w in several]
    if "algorithms" in asked:
        jobs += [(min(gpus, 4), ["algorithms"], {"NCCL_ALGO": a, "NCCL_PROTO": p}) for a, p in pinned]
    if "overlapping" in asked:
        jobs.append((4, ["overlapping"], {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "GLOO_SOCKET_IFNAME": "lo"}))
    for world, sections, environment in jobs:
        if world > gpus and sections != ["overlapping"]:
            say(world=world, skipped=f"{gpus} GPUs")
            continue
        while sections:
            started = time.perf_counter()
            note = _spawn(world, sections, environment)
            seconds = round(time.perf_counter() - started, 1)
            say(world=world, ended=note or "done", environment=environment, seconds=seconds)
            print(world, sections, environment, note or "done", seconds, flush=True)
            # a section that died or hung is left out; those after it get ranks of their own
            left = [] if not note else [s for s in sections if s not in _finished(out, world)]
            sections = left[1:]


if __name__ == "__main__":
    main()
