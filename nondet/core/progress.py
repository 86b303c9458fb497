"""Progress of a run where stderr is not a terminal: a line each half minute. On a terminal it is rich's bar."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rich.progress import Progress, TaskID

EVERY_S = 30.0


class Lines(Progress):
    """Replaces rich's bar; `say` is called with a line each half minute, until `wait`(seconds) returns True."""

    def __init__(
        self,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        super().__init__(disable=True, get_time=clock)
        self._say, self._over, self._began = say, threading.Event(), clock()
        self._wait = wait or self._over.wait
        self._first: dict[TaskID, float] = {}
        self._reporter: threading.Thread | None = None

    def start(self) -> None:
        """Begin to report, on a thread, because a case may take longer than half a minute."""
        self._reporter = threading.Thread(target=self.watch, daemon=True)
        self._reporter.start()

    def stop(self) -> None:
        """Stop reporting: what follows has stderr to itself, unless that takes nothing for a second."""
        self._over.set()
        if self._reporter is not None:
            self._reporter.join(1.0)

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """As rich's; what a resumed run had done before does not count towards this one's time."""
        if "advance" in changes:
            self._first.setdefault(task_id, self._tasks[task_id].completed)
        elif "completed" in changes:
            self._first.setdefault(task_id, max(0, changes["completed"] - 1))
        super().update(task_id, **changes)

    def watch(self) -> None:
        """A line each half minute, until the run ends."""
        while not self._wait(EVERY_S):
            line = self.line()
            if line:
                with suppress(OSError, ValueError):  # stderr is closed
                    self._say(line)

    def line(self) -> str:
        """What is under way, how much of it is done, for how long, and about how long is left; "" of nothing."""
        left = [task for task in self.tasks if not task.finished]
        task = next((task for task in reversed(left) if task.started), left[0] if left else None)
        if task is None:
            return ""
        took = task.elapsed if task.elapsed is not None else self.get_time() - self._began
        if task.total is None:
            return f"{task.description}: {in_words(took)} so far"
        text = f"{task.description}: {task.completed:,.0f} of {task.total:,.0f} after {in_words(took)}"
        new = task.completed - self._first.get(task.id, task.completed)
        return f"{text}, about {in_words(took * (task.total - task.completed) / new)} left" if new else text


def in_words(seconds: float) -> str:
    """ "40 s", "3 min", "2.5 h"."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 99.5 * 60 else f"{seconds / 3600:.1f} h"
