"""What runs in a worker of a shared probe run: it plans the jobs, then measures those that it is told."""

from __future__ import annotations

import os
import threading
from typing import Any

from nondet.processes import end_with_parent
from nondet.sharing import Order, Ready, Stopped, digest

__all__ = ["serve"]


def serve(pipe: Any, order: Order) -> None:
    """A worker's life, which its parent ends."""
    threading.Thread(target=end_with_parent, args=(lambda: os._exit(1),), daemon=True).start()
    try:
        _measure(pipe, order)
    except (EOFError, BrokenPipeError):
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - a context that is lost, or whatever it is: the parent is told
        line = (str(error).strip() or type(error).__name__).splitlines()[0][:500]
        pipe.send(Stopped(f"{type(error).__name__}: {line}"))
        os._exit(1)


def _measure(pipe: Any, order: Order) -> None:
    import torch

    from nondet.environment import deciding
    from nondet.runner import plan_jobs, run_jobs

    torch.set_num_threads(order.threads)
    if order.gpu is not None:
        torch.cuda.set_device(order.gpu)
    jobs = plan_jobs(order.probes, order.impls, order.options)
    pipe.send(Ready(digest(jobs), deciding()))
    while True:
        places = pipe.recv()
        for row in run_jobs([jobs[place] for place in places], order.seed, set()):
            pipe.send(row)
