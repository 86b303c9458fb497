"""Ranks of our own: started together, asked together, and never left behind.

The caller is no rank. It starts one process a rank (spawned, as torch.multiprocessing does), hands all of them the same
question, and waits for an answer of each within a time limit. A rank that dies, or that says nothing in time, ends the
whole group: the others may be waiting for it in a collective, and would for ever. A rank whose parent is gone ends
itself. The ranks meet through a store that the caller holds on a port which the system picks, so that no port can be in
use, whatever MASTER_PORT says.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing import connection
from typing import Any

from nondet.core.processes import no_main, obituary
from nondet.errors import UserError, one_line
from nondet.ranks.stacks import forget_stacks, where
from nondet.ranks.worker import Answer, serve

__all__ = ["LIMIT_S", "RankError", "RankGroup", "check_ranks", "limit_or", "parse_ranks", "shared_group"]

LIMIT_S = 120.0  # for one question, and for starting
_PLACES = 4  # silent ranks of which it is told where they were
_GRACE_S = 2.0  # after the first failure: what the others have to say, before they are ended


class RankError(RuntimeError):
    """A rank failed, died or hung; the group is ended."""


class RankGroup:
    """`world` processes with a process group over all of them.

    Args:
        world: Ranks.
        device: "cpu" (gloo) or "cuda" (NCCL, rank i on GPU i).
        environment: Variables that the ranks have beside their parent's, NCCL_ALGO for instance.
        limit_s: For each question.

    Raises:
        RankError: a rank did not come up in time.
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
        """Whether the group can still be asked."""
        return bool(self._processes) and all(p.is_alive() for p in self._processes)

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [p.pid for p in self._processes]

    def ask(self, target: str, *args: Any, limit_s: float | None = None) -> list[Any]:
        """Call "module:function" with the arguments on every rank, and give what each returned, by rank.

        Raises:
            NotImplementedError: every rank raised it: the question does not apply here. The group stays.
            RankError: anything else went wrong. The group is ended.
        """
        try:
            for pipe in self._pipes:
                pipe.send((target, args))
        except (BrokenPipeError, OSError):
            pass  # a rank is gone: what became of it is said below
        return self._gather(target, limit_s)

    def close(self) -> None:
        """End the ranks, now."""
        for process in self._processes:
            process.kill()  # a rank that waits in a collective hears nothing softer
        for process in self._processes:
            process.join(5.0)
            forget_stacks(process.pid)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _gather(self, what: str, limit_s: float | None = None) -> list[Any]:
        limit = self.limit_s if limit_s is None else limit_s
        until = time.monotonic() + limit
        answers: dict[int, Answer] = {}
        trouble: dict[int, str] = {}
        while len(answers) + len(trouble) < self.world:
            waiting: dict[Any, int] = {
                self._pipes[r]: r for r in range(self.world) if r not in answers and r not in trouble
            }
            ready: list[Any] = connection.wait(list(waiting), max(0.0, until - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, OSError):
                    trouble[rank] = obituary(self._processes[rank])
            if trouble or any(a.failure for a in answers.values()):
                until = min(until, time.monotonic() + _GRACE_S)
        silent = [r for r in range(self.world) if r not in answers and r not in trouble]
        failures = {r: a for r, a in answers.items() if a.failure}
        if not trouble and not failures and not silent:
            return [answers[r].value for r in range(self.world)]
        if len(failures) == self.world and all(a.kind == "NotImplementedError" for a in failures.values()):
            raise NotImplementedError(failures[0].failure)
        first = [f"rank {r} of {self.world} {text}" for r, text in trouble.items()]
        first += [f"rank {r} of {self.world}: {a.kind}: {a.failure}" for r, a in failures.items()]
        if not first:
            names = ", ".join(map(str, silent))
            first = [f"rank {names} of {self.world} gave no answer within {limit:g} s"]
            places = [(r, where(self._processes[r].pid)) for r in silent[:_PLACES]]
            first[0] += "".join(f"; rank {r} was in {place}" for r, place in places if place)
        self.close()
        raise RankError(f"{first[0]} (in {what})")


def limit_or(default: float) -> float:
    """Seconds that a question may take: NONDET_RANKS_LIMIT_S where it is set.

    Raises:
        UserError: that is no number of seconds.
    """
    text = os.environ.get("NONDET_RANKS_LIMIT_S", "")
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise UserError(f"NONDET_RANKS_LIMIT_S={one_line(text)} is no number of seconds", "Set it as in 120.")
    return seconds


_shared: RankGroup | None = None


def shared_group(
    world: int, device: str, environment: dict[str, str] | None = None, limit_s: float = LIMIT_S
) -> RankGroup:
    """The group of that kind, kept from one call to the next; there is one at a time.

    Args:
        limit_s: For starting and for each question, where it is started now and NONDET_RANKS_LIMIT_S says nothing.
    """
    global _shared
    wanted = (world, device, dict(environment or {}))
    if _shared is not None and (not _shared.alive or (_shared.world, _shared.device, _shared.environment) != wanted):
        _shared.close()
        _shared = None
    if _shared is None:
        _shared = RankGroup(world, device, environment, limit_or(limit_s))
    return _shared


def _close_shared() -> None:
    if _shared is not None:
        _shared.close()


atexit.register(_close_shared)


def parse_ranks(text: str | None) -> tuple[int, ...] | None:
    """As "2,4"; None for None.

    Raises:
        UserError: that is no list of numbers.
    """
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 4 for part in parts):
        raise UserError(f"--ranks {one_line(text)} is no list of numbers", "Give them as in --ranks 2,4.")
    return tuple(dict.fromkeys(int(part) for part in parts))


def check_ranks(ranks: Sequence[int], device: str, gpus: int) -> None:
    """Refuse numbers of ranks that can't be had.

    Args:
        gpus: GPUs at hand, where the device is "cuda".

    Raises:
        UserError: fewer than two, more than 64, or more ranks than GPUs; a time limit that is none.
    """
    limit_or(LIMIT_S)
    for world in ranks:
        if not 2 <= world <= 64:
            raise UserError(f"--ranks {world} is no group of ranks", "Give 2 or more, as in --ranks 2,4.")
        if device == "cuda" and world > gpus:
            here = "no GPU is" if not gpus else "1 GPU is" if gpus == 1 else f"{gpus} GPUs are"
            raise UserError(f"--ranks {world} needs {world} GPUs, and {here} here", "Use fewer, or --device cpu.")
