"""Ranks are started, asked and ended; one that dies, hangs or fails is one line, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from nondet.errors import UserError
from nondet.ranks.group import RankError, RankGroup, check_ranks, limit_or, parse_ranks

TASKS = "tests.ranks.tasks"


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat") as stat:  # a zombie is waited for by init, and computes nothing
        return stat.read().rpartition(")")[2].split()[0] == "Z"


@pytest.fixture
def group():
    """Two ranks on the CPU."""
    made = RankGroup(2, "cpu", limit_s=60)
    yield made
    made.close()


def test_ranks_answer_whatever_port_is_busy_and_a_killed_one_is_one_line(monkeypatch):
    """Answers come by rank, while MASTER_PORT is somebody else's.

    The rank that dies is named with its signal, at once, and the one that waits for it in a collective is ended.
    """
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        group = RankGroup(2, "cpu", limit_s=60)
        try:
            assert group.ask(f"{TASKS}:rank_and_sum") == [(0, 3.0), (1, 3.0)]
            with pytest.raises(NotImplementedError, match="not here"):
                group.ask(f"{TASKS}:refuse")
            assert group.alive, "a question that does not apply ends nobody"
            pids = group.pids
            started = time.monotonic()
            with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL"):
                group.ask(f"{TASKS}:die_in_the_middle")
            assert time.monotonic() - started < 30
            assert all(map(_gone, pids))
        finally:
            group.close()


def test_a_hanging_rank_is_one_line_within_the_limit(group):
    """A rank that says nothing is named when the time is over, with where it was, and no process or file stays."""
    pids = group.pids
    line = r"rank 1 of 2 gave no answer within 2 s; rank 1 was in hang \(tasks.py:\d+\) < serve"
    with pytest.raises(RankError, match=line):
        group.ask(f"{TASKS}:hang", limit_s=2)
    assert all(map(_gone, pids))
    assert not [pid for pid in pids if (Path(tempfile.gettempdir()) / f"nondet-stacks-{pid}.txt").exists()]


def test_a_failing_rank_says_what_failed(group):
    """The first line of the failure reaches the caller, with the rank's number."""
    with pytest.raises(RankError, match="rank 0 of 2: ValueError: no such thing"):
        group.ask(f"{TASKS}:fail")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells what became of a process")
def test_no_rank_outlives_a_killed_parent():
    """Ranks of a parent that is killed outright end themselves."""
    code = (
        "from nondet.ranks.group import RankGroup\nimport time\n"
        "if __name__ == '__main__':\n    print(*RankGroup(2, 'cpu').pids, flush=True)\n    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(p) for p in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until = time.monotonic() + 10
    while not all(map(_gone, pids)) and time.monotonic() < until:
        time.sleep(0.1)
    assert all(map(_gone, pids))


def test_ranks_that_cannot_be_had_are_one_line():
    """Too many for the GPUs, one alone, and what is no number: each says what to give instead."""
    with pytest.raises(UserError, match="--ranks 3 needs 3 GPUs, and 2 GPUs are here"):
        check_ranks([2, 3], "cuda", 2)
    with pytest.raises(UserError, match="needs 2 GPUs, and no GPU is here"):
        check_ranks([2], "cuda", 0)
    with pytest.raises(UserError, match="--ranks 1 is no group"):
        check_ranks([1], "cpu", 0)
    check_ranks([2, 4], "cpu", 0)
    assert parse_ranks("2,4,2") == (2, 4)
    assert parse_ranks(None) is None
    for text in ("two", "2,", "", "-2", "2;4"):
        with pytest.raises(UserError, match="no list of numbers"):
            parse_ranks(text)


def test_a_time_limit_that_is_none_is_one_line(monkeypatch):
    """The variable's number of seconds is taken; what is none is refused in one line."""
    assert limit_or(7.0) == 7.0
    monkeypatch.setenv("NONDET_RANKS_LIMIT_S", "2.5")
    assert limit_or(7.0) == 2.5
    for text in ("soon", "-1", "0", "nan", "inf"):
        monkeypatch.setenv("NONDET_RANKS_LIMIT_S", text)
        with pytest.raises(UserError, match="no number of seconds"):
            limit_or(7.0)
