"""Kernels compiled by copies of this process, while it goes on.

Attention's 14 kernels, one after the other, were most of a first start. Here they are launched with Triton told to run
nothing and to hand over what it would compile. Forked copies of this process compile that into Triton's folder on disk;
they never touch the GPU, and end with it. What a copy fails at is compiled where it is first launched.
"""

from __future__ import annotations

import contextvars
import os
import signal
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, ClassVar

import triton
from triton.runtime.jit import JITFunction

from nondet.core.processes import die_with_parent

_PATIENCE = 60.0  # seconds for all copies; then they are killed


class Ahead:
    """What was handed over, and the copies that compile it.

    Attributes:
        kernels: How many.
        copies: How many processes compile them: one less than there are cores for this one of the ranks.
        begun: Those that nobody has joined yet.
    """

    begun: ClassVar[list[Ahead]] = []

    def __init__(self, launch_all: Callable[[], object], ranks: int = 1) -> None:
        """Begin, and return while copies compile; of `launch_all`'s launches none runs."""
        self._jobs: list[tuple[Future[Any], Callable[[], Any]]] = []
        self._folder = triton.knobs.cache.dir  # vLLM chooses another one later
        self._mode = triton.AsyncCompileMode(self)
        contextvars.copy_context().run(self._listen, launch_all)  # the mode ends with the context
        self.kernels = len(self._jobs)
        self.copies = min(max(1, len(os.sched_getaffinity(0)) // ranks - 1), self.kernels)
        self._running = [self._copy(self._jobs[first :: self.copies]) for first in range(self.copies)]

    def _listen(self, launch_all: Callable[[], object]) -> None:
        run = JITFunction.run

        def only_compile(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            run(kernel, *args, grid=grid, warmup=True, **options)

        JITFunction.run = only_compile
        try:
            self._mode.__enter__()
            launch_all()
        finally:
            JITFunction.run = run

    def submit(self, compile_it: Callable[[], Any]) -> Future[Any]:
        """What Triton asks of an executor."""
        self._jobs.append((Future(), compile_it))
        return self._jobs[-1][0]

    def _copy(self, jobs: list[tuple[Future[Any], Callable[[], Any]]]) -> int:
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: a copy waits for none of them
            copy = os.fork()
        if copy:
            return copy
        try:
            die_with_parent(parent)
            for _, compile_it in jobs:
                with suppress(Exception):  # said by the parent, where it is launched
                    made = compile_it()
                    triton.runtime.driver.active.launcher_cls(made.src, made.metadata)  # by a C compiler
        finally:
            os._exit(0)

    def join(self) -> float:
        """Wait for the copies, and load what they have compiled. Seconds that this took."""
        began = time.perf_counter()
        for copy in self._running:
            with suppress(OSError):
                while os.waitpid(copy, os.WNOHANG) == (0, 0):
                    if time.perf_counter() - began > _PATIENCE:
                        os.kill(copy, signal.SIGKILL)
                    time.sleep(0.01)
        with triton.knobs.cache.scope():
            triton.knobs.cache.dir = self._folder
            for future, compile_it in self._jobs:
                try:
                    future.set_result(compile_it())
                except Exception as error:  # noqa: BLE001 - raised again where the kernel is launched
                    future.set_exception(error)
            for kernel in self._mode.future_kernels.values():
                with suppress(Exception):
                    kernel.result(True).run  # noqa: B018 - loads it, and its launcher
        return time.perf_counter() - began
