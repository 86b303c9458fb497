"""Workers share a plan out: the same rows as one process gives, whoever dies, and nobody is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch

from nondet.core.records import Row, Status
from nondet.core.runfile import open_run, read_run
from nondet.errors import UserError
from nondet.probes.base import Options
from nondet.probes.jobs import (
    Crew,
    Order,
    SharedRun,
    Worker,
    _measure,
    _takes_several,
    default_workers,
    settings,
    workers_ahead,
)
from nondet.probes.runner import Job, plan_jobs, run_jobs
from nondet.services.probe import ProbeRequest

SMALL = Options(dtypes=("float32",), m=8, k=128, n=64)
needs_proc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells what became of a process")


def dies(x: torch.Tensor) -> torch.Tensor:
    """A user's log_softmax that takes its process with it where the input has large values."""
    if float(x.abs().max()) > 100:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.log_softmax(x, -1)


def _plan(crew: Crew, probes: list[str], impls: list[str]) -> list[Job]:
    crew.brief(Order.of(probes, impls, SMALL, 0))
    return plan_jobs(probes, impls, SMALL)


def _timeless(rows: list[Row]) -> list[Row]:
    return [msgspec.structs.replace(row, seconds=0.0) for row in rows]


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def _children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    return condition()


@pytest.mark.slow
def test_two_workers_give_the_rows_of_one_process_and_go_on_with_a_run(tmp_path):
    """Bits, classes, figures and reasons: all but the seconds, read in the plan's order, with rows of before kept."""
    with Crew(3) as crew:
        jobs = _plan(crew, ["pointwise", "softmax"], ["stock", "invariant"])
        alone = list(run_jobs(jobs, 0))
        assert {row.status for row in alone} == {Status.IDENTICAL, Status.DIVERGENT}
        writer = open_run(tmp_path / "r.jsonl", command="probe", plan={}, environment={})
        for row in alone[3:6]:
            writer.write(row)
        children = _children(os.getpid())
        shared = SharedRun(crew, jobs, writer.done, 2, print)
        assert len({*children} - {*_children(os.getpid())}) == 1, "whom nobody needs is ended before the first case"
        for row in shared.rows():
            writer.write(row)
    writer.finish()
    rows = read_run(tmp_path / "r.jsonl").rows
    assert _timeless(rows) == _timeless(alone)
    lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    places = [line["place"] for line in lines if line["type"] == "row"]
    assert places[:3] == [3, 4, 5], "rows are written as they are finished"
    assert sorted(places) == list(range(len(jobs)))


@pytest.mark.nightly
def test_a_worker_that_dies_is_a_row_with_its_reason_and_the_others_are_measured():
    """Its other cases go to a process that takes its place."""
    with Crew() as crew:
        jobs = _plan(crew, ["log-softmax"], ["stock", "tests.probes.test_jobs:dies"])
        rows = {row.key: row for row in SharedRun(crew, jobs, set(), 2, print).rows()}
    assert rows.keys() == {job.key for job in jobs}
    failed = [row for row in rows.values() if row.status == Status.ERROR]
    assert {row.reason for row in failed} == {
        "the process that measured it was killed by SIGKILL; it ran beside other processes: --jobs 1 runs only one"
    }
    assert {row.impl for row in failed} == {"tests.probes.test_jobs:dies"}
    assert {row.impl for row in rows.values() if row.measured} == {"stock", "tests.probes.test_jobs:dies"}


# as on a GPU, where workers are copies of a process that has loaded torch
COPIES = """
import sys
from nondet.probes import jobs as crew
crew.workers_ahead = lambda *_: 2
from nondet.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.nightly
@needs_proc
@pytest.mark.parametrize(("number", "copies"), [(signal.SIGKILL, False), (signal.SIGKILL, True), (signal.SIGINT, True)])
def test_no_worker_outlives_its_parent(tmp_path, number, copies):
    """Killed outright, or by Ctrl-C, which the terminal sends to all: it says how to go on, and nobody else a word."""
    out = tmp_path / "r.jsonl"
    argv = [sys.executable, *(["-c", COPIES] if copies else ["-m", "nondet.cli"])]
    argv += ["probe", "matmul", "attention", "--dtype", "float32", "--jobs", "2", "--device", "cpu", "--out", str(out)]
    parent = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert _wait(lambda: out.exists() and out.read_bytes().count(b"\n") > 1, 60), "no row"
        children = _children(parent.pid)
        assert len(children) >= 2
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (parent.pid, *children)]
        assert commands.count(commands[0]) == (3 if copies else 1)
        if number == signal.SIGKILL:
            parent.kill()
        else:
            os.killpg(parent.pid, number)
        _, err = parent.communicate(timeout=30)
        assert _wait(lambda: all(map(_gone, children)), 20)
    finally:
        parent.kill()
        parent.wait()
    if number == signal.SIGINT:
        assert parent.returncode == 130
        assert err.startswith("loading torch ...\nnondet: stopped; ")
        assert "Traceback" not in err


class _Shared:
    """A run whose two workers are no processes: what they are given, and what the user reads."""

    def __init__(self, probe_names: list[str]) -> None:
        self.given: list[list[int]] = []
        self.said: list[str] = []
        self.workers: list[Any] = []
        crew = Crew()
        crew.take = self._started  # type: ignore[method-assign]
        self.jobs = _plan(crew, probe_names, ["stock"])
        self.run = SharedRun(crew, self.jobs, set(), 2, self.said.append)

    def _started(self) -> Worker:
        pipe = SimpleNamespace(close=lambda: None, send=self.given.append)
        self.workers.append(Worker(SimpleNamespace(kill=lambda: None, join=lambda _: None, pid=0), pipe))
        return self.workers[-1]

    def hear(self, worker: Any, word: Any) -> list[Row]:
        worker.pipe.recv = lambda: word
        return list(self.run._heard(worker))


def test_a_worker_with_other_settings_measures_nothing():
    """Its rows would not be this process's: which settings, and that one process measures, is said."""
    shared = _Shared(["float-sum"])
    for worker in shared.workers:
        assert shared.hear(worker, settings(shared.jobs) | {"float32_matmul_precision": "high"}) == []
    assert len(list(shared.run.rows())) == len(shared.jobs)
    assert shared.given == []
    line = "nondet: measured by one process: workers would not have its settings (float32_matmul_precision)."
    assert shared.said == [line]
    assert settings(shared.jobs[1:]) != settings(shared.jobs), "another plan has other positions"


def test_memory_that_neighbours_took_is_no_finding():
    """What ran out of memory beside others is measured again alone, and that is its row."""
    shared = _Shared(["float-sum"])
    first, second = shared.workers
    for worker in shared.workers:
        shared.hear(worker, settings(shared.jobs))
    head = shared.jobs[shared.given[0][0]].head
    row = msgspec.structs.replace(head, status=Status.ERROR, reason="OutOfMemoryError: CUDA out of memory.")
    other = msgspec.structs.replace(row, reason="RuntimeError: another")
    assert (shared.hear(first, row), shared.hear(second, other)) == ([], [other])
    for worker in list(shared.run._workers):
        shared.run._dismiss(worker)
    rows = {row.key: row for row in shared.run.rows()}
    assert rows[head.key].status != Status.ERROR


def test_a_worker_stays_with_its_probe_and_collectives_with_one_worker():
    """Cases of a probe and dtype share kernels; two groups of ranks at once would wait for the same devices."""
    shared = _Shared(["softmax", "pointwise", "all-reduce"])
    jobs, given = shared.jobs, shared.given
    for worker in shared.workers:
        shared.hear(worker, settings(jobs))
    groups = [{jobs[place].probe.name for place in places} for places in given]
    assert len(given[0]) == sum(job.probe.name == "all-reduce" for job in jobs)
    assert groups == [{"all-reduce"}, {"softmax"}]
    second = shared.workers[1]
    while second.left:
        shared.hear(second, jobs[second.left[0]].head)
    assert {jobs[place].probe.name for place in given[2]} == {"softmax"}
    assert sorted(place for places in given for place in places) == list(range(len(jobs)))


@pytest.mark.parametrize(("modes", "several"), [([0, 0], True), ([0, 3], False), ([], True), (None, True)])
def test_a_gpu_that_takes_one_process_gets_one(monkeypatch, modes, several):
    """A cluster's card may be set to "exclusive process": a second context is refused there, whoever asks for it."""

    def put(at: Any, value: int) -> int:
        at._obj.value = value
        return 0

    driver = SimpleNamespace(
        nvmlInit_v2=lambda: 0,
        nvmlShutdown=lambda: 0,
        nvmlDeviceGetCount_v2=lambda count: put(count, len(modes)),
        nvmlDeviceGetHandleByIndex_v2=lambda place, handle: put(handle, place.value + 1),
        nvmlDeviceGetComputeMode=lambda handle, mode: put(mode, modes[handle.value - 1]),
    )
    monkeypatch.setattr("ctypes.CDLL", Mock(return_value=driver, side_effect=OSError if modes is None else None))
    assert _takes_several.__wrapped__() is several
    monkeypatch.setattr("nondet.probes.jobs._takes_several", lambda: several)
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/dev/nvidiactl")
    monkeypatch.setattr("nondet.probes.jobs._cores", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert workers_ahead(["all"], "auto", [], None) == (8 if several else 0)
    assert several or default_workers("cuda", ["stock"], 700) == 1


@pytest.fixture
def cores(monkeypatch, tmp_path) -> Path:
    """16 cores, a GPU, and a process that may fork; the file that limits the cores."""
    monkeypatch.setattr("nondet.probes.jobs._takes_several", lambda: True)
    monkeypatch.setattr("nondet.probes.jobs._can_fork", lambda: True)
    monkeypatch.setenv("NONDET_CACHE", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("nondet.probes.jobs._QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16), raising=False)
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/dev/nvidiactl")
    return tmp_path / "cpu.max"


def test_how_many_workers_on_a_gpu(monkeypatch, cores):
    """By cores, memory and what there is to do; never for a function of the user's."""
    card = SimpleNamespace(total_memory=140 * 2**30)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    for impls, jobs, count in ((["stock"], 700, 16), (["stock"], 59, 2), (["stock", "mine:softmax"], 700, 1)):
        assert default_workers("cuda", impls, jobs) == count
    for text, count in (("max 100000", 16), ("400000 100000", 4), ("50000 100000", 1), ("", 16)):
        cores.write_text(text)
        assert default_workers("cuda", ["stock"], 700) == count
    card.total_memory = 24 * 2**30
    assert default_workers("cuda", ["stock"], 700) == 4
    assert workers_ahead(["all"], "auto", [], None) == 16
    card.total_memory = 80 * 2**30
    assert default_workers("cuda", ["stock"], 700) == 13
    assert workers_ahead(["all"], "cuda", ["stock"], 3) == 3
    for names, impls, count in ((["all"], [], 1), (["matmul"], [], None), (["all"], ["mine:softmax"], None)):
        assert workers_ahead(names, "auto", impls, count) == 0
    for number in (0, -1, 1000):
        with pytest.raises(UserError, match="--jobs"):
            ProbeRequest(names=["all"], workers=number)


def test_how_many_workers_on_a_cpu(monkeypatch, cores):
    """Two for all, copies of a process that has loaded torch; where that can't be copied, one, as for a few probes."""
    assert workers_ahead(["all"], "cpu", [], None) == 2
    assert workers_ahead(["matmul"], "cpu", [], None) == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert workers_ahead(["all"], "auto", [], None) == 2
    cores.write_text("100000 100000")
    assert workers_ahead(["all"], "auto", [], None) == 0
    assert [default_workers("cpu", ["stock"], 1000, ahead) for ahead in (0, 2)] == [1, 2]
    assert default_workers("cpu", ["mine:softmax"], 1000, 2) == 1
    monkeypatch.setattr("nondet.probes.jobs._can_fork", lambda: False)
    assert workers_ahead(["all"], "cpu", [], 2) == 0


def test_a_worker_for_a_cpu_takes_no_gpu(monkeypatch):
    """A context there takes memory and seconds, and is refused on a card that takes one process."""
    taken: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("nondet.core.measure.profile_variants", lambda device: taken.append(device) or nullcontext())
    ended = SimpleNamespace(recv=Mock(side_effect=EOFError))
    for device in ("cpu", "auto"):
        with pytest.raises(EOFError):
            _measure(ended, device)
    assert taken == ["cuda"]
