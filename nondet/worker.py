"""What runs in a worker of a shared probe run: it plans the jobs, then measures those that it is told."""

from __future__ import annotations

import importlib
import os
import threading
from typing import Any

from nondet.core.processes import begin_context, die_with_parent, end_with_parent, keep_freed_memory
from nondet.core.registry import operators
from nondet.crew import Order, Ready, Stopped, digest

__all__ = ["load", "serve", "serve_forked"]


def serve(pipe: Any) -> None:
    """A worker's life, which its parent ends: an `Order` comes first, then places of jobs."""
    threading.Thread(target=end_with_parent, args=(lambda: os._exit(1),), daemon=True).start()
    try:
        _measure(pipe)
    except (EOFError, BrokenPipeError):
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - a context that is lost, or whatever it is: the parent is told
        line = (str(error).strip() or type(error).__name__).splitlines()[0][:500]
        pipe.send(Stopped(f"{type(error).__name__}: {line}"))
        os._exit(1)


def serve_forked(pipe: Any, parents: Any, parent: int) -> None:
    """As `serve`, in a copy of process number `parent`, whose end of the pipe was copied with it."""
    die_with_parent(parent)
    parents.close()
    serve(pipe)


def load() -> None:
    """Load what a worker needs, and touch no device."""
    for name in ("torch", "nondet.core.environment", "nondet.core.measure", "nondet.runner"):
        importlib.import_module(name)
    operators()


def _measure(pipe: Any) -> None:
    context = begin_context()
    load()
    import torch

    from nondet.core.environment import deciding
    from nondet.core.measure import profile_variants
    from nondet.runner import plan_jobs, run_jobs

    keep_freed_memory()
    context.join()
    if torch.cuda.is_available():  # a context and a profiler, while the parent finds out what is to be measured
        with profile_variants("cuda"):
            pass
    order: Order = pipe.recv()
    torch.set_num_threads(order.threads)
    if order.gpu is not None:
        torch.cuda.set_device(order.gpu)
    jobs = plan_jobs(order.probes, order.impls, order.options)
    pipe.send(Ready(digest(jobs), deciding()))
    while True:
        places = pipe.recv()
        for row in run_jobs([jobs[place] for place in places], order.seed, set()):
            pipe.send(row)
