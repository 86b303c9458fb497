"""Processes with ranks of our own: started and called together, never left behind.

The caller is not a rank. It starts one process per rank (spawned, as torch.multiprocessing does), sends all of them the
same call, and waits for each answer within a time limit. A rank that dies or times out ends the whole group, because
the others may wait for it in a collective forever. A rank whose parent has ended ends itself. The ranks connect through
a store that the caller holds on a port chosen by the system, so that no port can be in use, whatever MASTER_PORT is.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import multiprocessing
import os
import re
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any, NoReturn

from nondet.core.processes import end_with_parent, no_main, obituary
from nondet.errors import UserError, each_once, one_line

_CHOICE = re.compile(r"Algo(?:rithm)? (\w+)\W+(?:proto|protocol) (\w+)", re.IGNORECASE)
_read = 0  # characters of NCCL's log that were read
_pipe: Any = None  # to the parent, once this process is a rank


@dataclass(frozen=True)
class Answer:
    """A rank's answer: a value, or the failure's first line (never empty, and "" without one) and its kind."""

    value: Any = None
    failure: str = ""
    kind: str = ""


def serve(
    pipe: Any, rank: int, world: int, device: str, port: int, environment: dict[str, str], limit_s: float
) -> None:
    """The main function of a rank. It exits without NCCL's own shutdown, which takes seconds and can hang."""
    global _pipe
    _pipe = pipe
    threading.Thread(target=end_with_parent, args=(lambda: _leave(1),), daemon=True).start()
    os.environ.update(environment)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}  # as transformers reads them
    # NVLink multicast stays off: a program that uses it can put shared GPUs out of service, and it adds in the switch
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = os.environ["NVSHMEM_DISABLE_NVLS"] = "1"
    try:
        join_group(rank, world, device, port, limit_s)
        pipe.send(Answer())
    except BaseException as error:  # noqa: BLE001 - the parent gets any error
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
    """Report to the parent at once, from any thread: the other ranks wait for this one, and it may wait for them."""
    if _pipe is not None:
        _pipe.send(_failure(error))


def join_group(rank: int, world: int, device: str, port: int, limit_s: float) -> None:
    """In a rank: join the process group of all, on a GPU of its own where there is one."""
    import torch
    import torch.distributed as dist

    # each call has a time limit of the parent's, which names the rank; c10d's own comes later
    limit = timedelta(seconds=limit_s + 30)
    store = dist.TCPStore("127.0.0.1", port, world, False, limit)
    # ranks of one host: gloo, which an engine may start in addition to NCCL, needs no name service and no network
    if os.path.isdir("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device == "cuda":
        if "NCCL_DEBUG" not in os.environ:  # NCCL logs which algorithm and protocol it takes; `library_choice` reads it
            os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "TUNING", "NCCL_DEBUG_FILE": _log_path()}
        gpus = torch.cuda.device_count()
        if world > gpus:  # see `shared_gpus`
            os.environ |= {"NCCL_HOSTID": f"nondet-{rank}"} | _AS_HOSTS
        gpu = torch.device("cuda", rank % gpus)
        torch.cuda.set_device(gpu)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=world, timeout=limit, device_id=gpu)
        return
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)


# NCCL refuses two ranks of one host on one GPU. As if on separate hosts it runs, over sockets of this machine.
_AS_HOSTS = {f"NCCL_{name}_DISABLE": "1" for name in ("IB", "P2P", "SHM")}
_AS_HOSTS |= {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}


def shared_gpus(world: int) -> str:
    """How ranks that outnumber the GPUs run, to be reported with their results; "" where they do not. An order of
    additions is that of NCCL's algorithm. NCCL may choose the algorithm, and the number of pieces, by the connection
    between ranks; and what reads another rank's memory does not run."""
    import torch

    gpus = torch.cuda.device_count()
    on = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    return f", {world} ranks on {on}, each posing as a host, over sockets" if world > gpus else ""


def _log_path() -> str:
    return str(Path(tempfile.gettempdir()) / f"nondet-nccl-{os.getpid()}.log")


def library_choice() -> list[str]:
    """As "RING LL": what NCCL has chosen since the last call, in order; [] where it does not log it."""
    global _read
    try:
        text = Path(_log_path()).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    fresh, _read = text[_read:], len(text)
    return list(dict.fromkeys(f"{a.upper()} {p.upper()}" for a, p in _CHOICE.findall(fresh)))


def _leave(code: int) -> NoReturn:
    Path(_log_path()).unlink(missing_ok=True)
    os._exit(code)


def _failure(error: BaseException) -> Answer:
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return Answer(failure=lines[0][:300], kind=type(error).__name__)


LIMIT_S = 120.0  # for one call, and for starting
_GRACE_S = 2.0  # after the first failure: time for the others' answers, before they are ended


class RankError(RuntimeError):
    """A rank failed, died or hung; the group is ended."""


class RankGroup:
    """`world` processes with a process group over all of them. Raises RankError: a rank did not start in time.

    Args:
        world: Ranks.
        device: "cpu" (gloo) or "cuda" (NCCL, rank i on GPU i; more ranks than GPUs share them, see `shared_gpus`).
        environment: Variables of the ranks in addition to their parent's, for example NCCL_ALGO.
        limit_s: For each call.
    """

    def __init__(
        self, world: int, device: str, environment: dict[str, str] | None = None, limit_s: float = LIMIT_S
    ) -> None:
        import torch.distributed as dist

        self.world, self.device, self.environment = world, device, dict(environment or {})
        self.limit_s = limit_s
        self._store = dist.TCPStore("127.0.0.1", 0, world, True, timedelta(seconds=limit_s), wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve,
                args=(theirs, rank, world, device, self._store.port, self.environment, limit_s),
                name=f"nondet-rank-{rank}",
                daemon=True,
            )
            with no_main():
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        try:
            self._gather("started")
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        """Whether the group can still be called."""
        return bool(self._processes) and all(p.is_alive() for p in self._processes)

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [p.pid for p in self._processes]

    def call(self, target: str, *args: Any, limit_s: float | None = None) -> list[Any]:
        """Call "module:function" with the arguments on every rank, and return each result, by rank. Raises
        NotImplementedError: every rank raised it, because the call does not apply here; the group stays. Raises
        RankError: anything else went wrong; the group is ended."""
        with contextlib.suppress(OSError):  # a rank has ended: the reason is reported below
            for pipe in self._pipes:
                pipe.send((target, args))
        return self._gather(target, limit_s)

    def close(self) -> None:
        """End the ranks, now."""
        for process in self._processes:
            process.kill()  # a rank that waits in a collective ignores gentler signals
        for process in self._processes:
            process.join(5.0)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _gather(self, what: str, limit_s: float | None = None) -> list[Any]:
        limit = self.limit_s if limit_s is None else limit_s
        until = time.monotonic() + limit
        answers: dict[int, Answer] = {}
        trouble: dict[int, str] = {}
        silent: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while silent:
            ready: list[Any] = connection.wait(list(silent), max(0.0, until - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = silent.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, OSError):
                    trouble[rank] = obituary(self._processes[rank])
            if trouble or any(a.failure for a in answers.values()):
                until = min(until, time.monotonic() + _GRACE_S)
        failures = {r: a for r, a in answers.items() if a.failure}
        if not trouble and not failures and not silent:
            return [answers[r].value for r in range(self.world)]
        if len(failures) == self.world and all(a.kind == "NotImplementedError" for a in failures.values()):
            raise NotImplementedError(failures[0].failure)
        first = [f"rank {r} of {self.world} {text}" for r, text in trouble.items()]
        first += [f"rank {r} of {self.world}: {a.kind}: {a.failure}" for r, a in failures.items()]
        if not first:
            first = [f"rank {', '.join(map(str, silent.values()))} of {self.world} gave no answer within {limit:g} s"]
        self.close()
        raise RankError(f"{first[0]} (in {what})")


def limit_or(default: float) -> float:
    """Seconds that a call may take: NONDET_RANKS_LIMIT_S where it is set, a `UserError` if that is not a number."""
    text = os.environ.get("NONDET_RANKS_LIMIT_S", "")
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise UserError(f"NONDET_RANKS_LIMIT_S={one_line(text)} is not a number of seconds", "Set it as in 120.")
    return seconds


_shared: list[RankGroup] = []  # at most one


def shared_group(world: int, device: str, environment: dict[str, str] | None = None) -> RankGroup:
    """The group of that kind, kept from one call to the next; there is one at a time."""
    wanted = (world, device, dict(environment or {}))
    if not (_shared and _shared[0].alive and (_shared[0].world, _shared[0].device, _shared[0].environment) == wanted):
        _close_shared()
        _shared.append(RankGroup(world, device, environment, limit_or(LIMIT_S)))
    return _shared[0]


def _close_shared() -> None:
    while _shared:
        _shared.pop().close()


atexit.register(_close_shared)


def parse_ranks(text: str | None) -> tuple[int, ...] | None:
    """As "2,4"; None for None, a `UserError` of anything but a list of numbers."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 4 for part in parts):
        raise UserError(f"--ranks {one_line(text)} is not a list of numbers", "Give them as in --ranks 2,4.")
    return tuple(map(int, each_once("--ranks", (str(int(part)) for part in parts))))


def check_ranks(ranks: Sequence[int], device: str, gpus: int) -> None:
    """Refuse, as a `UserError`, fewer than two ranks, more than 64 or than `gpus`, and an invalid limit."""
    limit_or(LIMIT_S)
    for world in ranks:
        if not 2 <= world <= 64:
            raise UserError(f"--ranks {world} is not a group of ranks", "Give 2 or more, as in --ranks 2,4.")
        if device == "cuda" and world > gpus:
            here = "no GPU is" if not gpus else "1 GPU is" if gpus == 1 else f"{gpus} GPUs are"
            raise UserError(f"--ranks {world} needs {world} GPUs, and {here} here", "Use fewer, or --device cpu.")
