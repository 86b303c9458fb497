"""What runs in a rank: it joins the process group, then answers one question after another until its parent is gone."""

from __future__ import annotations

import importlib
import os
import re
import tempfile
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from nondet.core.processes import end_with_parent
from nondet.ranks.stacks import forget_stacks, listen_for_stacks

__all__ = ["Answer", "fail_now", "library_choice", "serve"]

_CHOICE = re.compile(r"Algo(?:rithm)? (\w+)\W+(?:proto|protocol) (\w+)", re.IGNORECASE)
_read = 0  # characters of NCCL's log that were looked at
_pipe: Any = None  # to the parent, once this process is a rank


@dataclass(frozen=True)
class Answer:
    """What a rank says: a value, or the failure's first line and its kind.

    Attributes:
        failure: "" where there is none; never empty for a failure.
    """

    value: Any = None
    failure: str = ""
    kind: str = ""


def serve(
    pipe: Any, rank: int, world: int, device: str, port: int, environment: dict[str, str], limit_s: float
) -> None:
    """A rank's life. Leaves without NCCL's own farewell, which takes seconds and can hang."""
    global _pipe
    _pipe = pipe
    threading.Thread(target=end_with_parent, args=(lambda: _leave(1),), daemon=True).start()
    listen_for_stacks()
    os.environ.update(environment)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}  # as transformers reads them
    # NVLink multicast stays off: a program that uses it can put shared GPUs out of service, and it adds in the switch
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = os.environ["NVSHMEM_DISABLE_NVLS"] = "1"
    try:
        _join(rank, world, device, port, limit_s)
        pipe.send(Answer())
    except BaseException as error:  # noqa: BLE001 - the parent is told, whatever it is
        pipe.send(_failure(error))
        _leave(1)
    while True:
        try:
            target, args = pipe.recv()
        except (EOFError, OSError):
            _leave(0)
        try:
            module, _, name = target.partition(":")
            answer = Answer(getattr(importlib.import_module(module), name)(*args))
        except BaseException as error:  # noqa: BLE001 - as above
            answer = _failure(error)
        pipe.send(answer)


def fail_now(error: BaseException) -> None:
    """Tell the parent at once, from whatever thread: the other ranks wait for this one, and it may wait for them."""
    if _pipe is not None:
        _pipe.send(_failure(error))


def _join(rank: int, world: int, device: str, port: int, limit_s: float) -> None:
    import torch
    import torch.distributed as dist

    # each question has a time limit of the parent's, which names the rank; c10d's own comes later
    limit = timedelta(seconds=limit_s + 30)
    store = dist.TCPStore("127.0.0.1", port, world, False, limit)
    # ranks of one host: gloo, which an engine may start beside NCCL, needs no name service and no network
    if os.path.isdir("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device == "cuda":
        if "NCCL_DEBUG" not in os.environ:  # NCCL says which algorithm and protocol it takes; `library_choice` reads it
            os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "TUNING", "NCCL_DEBUG_FILE": _log_path()}
        torch.cuda.set_device(rank)
        place = torch.device("cuda", rank)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=world, timeout=limit, device_id=place)
        return
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)


def _log_path() -> str:
    return str(Path(tempfile.gettempdir()) / f"nondet-nccl-{os.getpid()}.log")


def library_choice() -> list[str]:
    """As "RING LL": what NCCL has chosen since the last time this was asked, in order; [] where it does not say."""
    global _read
    try:
        text = Path(_log_path()).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    fresh, _read = text[_read:], len(text)
    return list(dict.fromkeys(f"{a.upper()} {p.upper()}" for a, p in _CHOICE.findall(fresh)))


def _leave(code: int) -> NoReturn:
    Path(_log_path()).unlink(missing_ok=True)
    forget_stacks(os.getpid())
    os._exit(code)


def _failure(error: BaseException) -> Answer:
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return Answer(failure=lines[0][:300], kind=type(error).__name__)
