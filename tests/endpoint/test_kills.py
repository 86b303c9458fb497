"""Endpoint runs that are killed anywhere go on with --resume: every completion once, none lost.

`NONDET_KILLS=100 pytest tests/endpoint/test_kills.py` does it a hundred times.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from nondet.core.records import Run
from nondet.core.runfile import read_run
from nondet.core.traces import check_traces, read_traces
from tests.endpoint.honest import serving
from tests.hostile.test_kills import SIGNALS, Server

KILLS = int(os.environ.get("NONDET_KILLS", "3"))
OPTIONS = (
    "--n", "12", "--max-tokens", "6", "--arms", "solo=4,cold=2,warm=2,chunked=2,loaded", "--load",
    "others=4,targets=4,prompt=4-8,tokens=2-6", "--concurrency", "6",
)  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("server"))
    yield made
    made.process.stdin.close()  # type: ignore[union-attr] # it is a pipe
    made.process.wait(timeout=20)
    made.errors.close()


def texts(run: Run) -> dict[tuple[str, str, int, int], tuple[str, str]]:
    """What of a completion no clock says."""
    return {(c.request, c.arm, c.round, c.prompt): (c.tokens_digest, c.trace) for c in run.completions}


def _wait_for(path: Path, size: float) -> None:
    """Until a file has so many bytes: a moment of the run whatever else the machine does, where a time is not."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not (path.exists() and path.stat().st_size >= size):
        time.sleep(0.001)


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs POSIX signals")
def test_kills_lose_and_double_nothing(server: Server, tmp_path: Path) -> None:
    """Whatever was on disk when it was killed is there afterwards as it was, and the rest is asked for once."""
    rng = random.Random("kills of an endpoint run")  # noqa: S311 - moments, not secrets
    codes: Counter[int] = Counter()
    with serving("vllm", token_s=0.001) as fake:
        argv = ["sample", "--endpoint", fake.url, *OPTIONS]
        whole = tmp_path / "whole.jsonl"
        assert server.run([*argv, "--out", str(whole)]) == 0
        size = whole.stat().st_size
        expected = texts(read_run(whole))
        kept = 0
        for number in range(KILLS):
            path = tmp_path / f"{number}.jsonl"
            pid = server.start([*argv, "--out", str(path)])
            _wait_for(path, rng.random() * size)
            try:
                with suppress(ProcessLookupError):  # it was through already
                    os.kill(pid, SIGNALS[number % len(SIGNALS)])
            finally:
                codes[int(server.line())] += 1
            before = texts(read_run(path, allow_truncated=True)) if path.exists() and path.stat().st_size else {}
            assert server.run([*argv, "--out", str(path), "--resume"]) == 0, path
            run = read_run(path)
            assert run.complete
            assert texts(run) == expected
            assert len(run.completions) == len(expected)
            assert before.items() <= texts(run).items()
            check_traces(run, read_traces(path)[0])
            kept += len(before)
    assert 99 not in codes, codes  # no traceback
    assert sum(codes[code] for code in (130, -9, -15, -1)) >= KILLS // 3, codes  # enough kills did hit
    assert kept, "no kill came after a completion"
    told = f"{KILLS} kills, exit codes {dict(codes)}: {kept} completions on disk when it died, none lost, none twice"
    print(told)  # noqa: T201 - docs/evidence keeps it
