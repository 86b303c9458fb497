"""Kills: a run stopped anywhere, by any signal, goes on with --resume and becomes the run that it would have been."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nondet.core.records import Run
from nondet.core.runfile import read_run, traces_path
from nondet.core.traces import check_traces, read_traces
from tests.build import tiers
from tests.endpoint.honest import serving

COMMANDS: dict[str, list[str]] = {
    "probe": ["probe", "pointwise", "softmax", "matmul", "--m", "16", "--k", "64", "--n", "64", "--dtype", "float32"],
    "sample": [
        "sample", "--n", "6", "--load", "others=1,targets=2,spread=4,prompt=4-8,tokens=2-4", "--max-tokens", "4",
        "--dtype", "float32", "--impl", "stock",
    ],
    "bench": ["bench", "softmax", "--m", "1", "--m", "4", "--m", "9", "--k", "64", "--impl", "stock"],
    "endpoint": [
        "sample", "--prompt", "A prompt", "--n", "12", "--max-tokens", "6", "--arms",
        "solo=4,cold=2,warm=2,chunked=2,loaded", "--load", "others=4,targets=4,prompt=4-8,tokens=2-6",
    ],
}  # fmt: skip
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

# One process that imports everything and then forks a child for each run: importing torch and the parts of transformers
# that load late 40 times would be the test.
SERVER = """
import contextlib, io, os, signal, sys
import torch
import transformers.generation.continuous_batching, transformers.models.qwen3.modeling_qwen3
torch.set_num_threads(1)  # a fork takes no threads along
import nondet.bench.collect, nondet.probes.runner, nondet.sampling.engine, nondet.services.sample
from nondet.bench import cells
from nondet.cli import main
cells.PerfCounter.budget_us = cells.PerfCounter.replay_us = 2000.0
cells.COPY_BYTES, cells.PRODUCT_SIZES = {"cpu": 2**20}, {"cpu": 64}
with contextlib.redirect_stdout(io.StringIO()):  # the parts of the command that load late
    for typed in ("bench softmax --m 1 --k 8", "probe softmax --m 2 --k 8", "sample --n 1 --max-tokens 1 --load none"):
        main(f"{typed} --impl stock --threads 1 --device cpu --out warm.jsonl --force".split())
print("ready", flush=True)
for line in sys.stdin:
    argv = line.rstrip("\\n").split("\\t")
    child = os.fork()
    if not child:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.stdin = open(os.devnull)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        sys.argv = ["nondet", *argv]
        try:
            code = main(argv)
        except BaseException:
            import traceback
            traceback.print_exc()
            code = 99
        os._exit(code)
    print(child, flush=True)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
os._exit(0)  # without unloading torch
"""


class Process(subprocess.Popen[str]):
    """Runs commands in children of one warm process: after the id of the child comes its exit code."""

    def line(self) -> str:
        return self.stdout.readline().strip()

    def start(self, argv: list[str]) -> int:
        print(*argv, sep="\t", file=self.stdin, flush=True)
        return int(self.line())

    def run(self, argv: list[str]) -> int:
        self.start(argv)
        return int(self.line())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder, command = tmp_path_factory.mktemp("server"), [sys.executable, "-c", SERVER]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": folder}
    with (folder / "stderr").open("wb") as errors, Process(command, stderr=errors, **pipes) as server:
        assert server.line() == "ready"
        yield server


def wait_for(path: Path, size: int, pid: int) -> None:
    """Until the file has that many bytes, or a quarter of a minute is over."""
    for _ in range(15_000):
        if (path.exists() and path.stat().st_size >= size) or not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.001)


def facts(run: Run) -> dict[tuple[str, ...], Any]:
    """Every record without what a clock says: what a stopped run must share with one that ran through."""
    if run.servers:  # a server's rounds and answers are full of clocks
        return {c.key: (c.arm, c.prompt, c.tokens_digest, c.trace) for c in run.completions}
    found = {}
    for record in run.records():
        data = msgspec.to_builtins(record)
        for name in ("seconds", "samples_us", "rate", "limit_us", "limited_by", "calls", "what"):
            data.pop(name, None)
        data.pop("timed", None)  # times; which implementations there are is in `sets` of the rows
        if isinstance(data.get("ran"), list):  # the tiles of a kernel are chosen by speed, in each process anew
            data["ran"] = sorted({note.partition("[")[0] for note in data["ran"]})
        for name in list(data.get("extra", {})):
            # a resumed run holds its first round against the disk, which has the requests under study alone
            if "second" in name or (name == "requests" and data.get("probe") == "sample"):
                del data["extra"][name]
        found[record.key] = data
    return found


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs POSIX signals")
@pytest.mark.parametrize(
    ("name", "kills"), tiers([("probe", 1), ("sample", 1)], [("bench", 1), *((n, 16) for n in COMMANDS)])
)
def test_kills_lose_and_double_nothing(server: Process, tmp_path: Path, name: str, kills: int) -> None:
    rng = random.Random(f"kills of {name}")  # noqa: S311 - moments, not secrets
    codes: Counter[int] = Counter()
    in_time = (130, -9, -15, -1)  # kills that did not come too late
    with serving("vllm", token_s=0.001) as fake:
        where = ["--endpoint", fake.url] if name == "endpoint" else ["--threads", "1", "--device", "cpu"]
        whole = tmp_path / "whole.jsonl"
        assert server.run([*COMMANDS[name], *where, "--out", str(whole)]) == 0
        expected, size = facts(read_run(whole)), whole.stat().st_size
        for number in range(kills + 4):
            if number >= kills and any(codes[code] for code in in_time):
                break
            path = tmp_path / f"{number}.jsonl"
            argv = [*COMMANDS[name], *where, "--out", str(path)]
            pid = server.start(argv)
            wait_for(path, rng.randrange(1, 2 * size // 3), pid)
            time.sleep(rng.random() * 0.005)
            with suppress(ProcessLookupError):  # it was through already
                os.kill(pid, SIGNALS[(number + list(COMMANDS).index(name)) % len(SIGNALS)])
            codes[int(server.line())] += 1
            assert server.run([*argv, "--resume"]) == 0, path
            run = read_run(path)
            assert run.complete
            assert facts(run) == expected
            if traces_path(path).exists():
                check_traces(run, read_traces(path)[0])
    assert 99 not in codes, codes  # no traceback
    assert sum(codes[code] for code in in_time) > kills // 3, codes  # most kills did hit
