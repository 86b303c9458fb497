"""First uses told from several threads at once: none is lost, and no listener."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from nondet.core import launch
from nondet.core.launch import FirstUses, first_uses, proving


def in_threads(*works: Callable[[], None]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_no_use_is_lost_between_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that change over between reading a count and writing it, each time, still end at the sum."""

    class Slow(FirstUses):
        @property
        def proofs(self) -> int:  # type: ignore[override]  # the field, with a wait behind it
            seen = self.__dict__["proofs"]
            time.sleep(0.001)
            return int(seen)

        @proofs.setter
        def proofs(self, value: int) -> None:
            self.__dict__["proofs"] = value

    def prove() -> None:
        for _ in range(5):
            with proving():
                pass

    monkeypatch.setattr(launch, "FirstUses", Slow)
    with first_uses() as uses:
        in_threads(*[prove] * 4)
    assert (uses.proofs, len(uses.stretches)) == (20, 20)


def test_a_listener_is_not_lost_as_another_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes while another one looks for itself in the list is told; and who goes is itself, not its equal."""
    leaving, gone = threading.Event(), threading.Event()

    class Slow(list[FirstUses]):
        def __iter__(self) -> Iterator[FirstUses]:
            for one in self.copy():
                yield one
                leaving.set()
                time.sleep(0.05)

    def come_and_go() -> None:
        with first_uses():
            pass
        gone.set()

    def come_meanwhile() -> None:
        leaving.wait(0.3)
        with first_uses() as late:
            assert gone.wait(30)
            with proving():
                pass
            proofs.append(late.proofs)

    proofs: list[int] = []
    monkeypatch.setattr(launch, "_listeners_first_use", Slow())
    with first_uses() as early:
        in_threads(come_and_go, come_meanwhile)
        with proving():
            pass
    assert proofs == [1]
    assert early.proofs == 2
