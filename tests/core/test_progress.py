"""Off a terminal a run says each half minute how far it is; a clock of our own stands in for the waiting."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nondet.cli import main
from nondet.core.progress import EVERY_S, Lines, in_words
from tests.build import tiers
from tests.endpoint.honest import serving

Step = Callable[[Lines], object]


def lines_of(*steps: Step) -> list[str]:
    """What is said when each step is taken in a half minute of its own."""
    now, said, left = [0.0], list[str](), list(steps)

    def wait(seconds: float) -> bool:
        assert seconds == EVERY_S
        if not left:
            return True
        left.pop(0)(lines)
        now[0] += seconds
        return False

    lines = Lines(said.append, lambda: now[0], wait)
    lines.watch()
    return said


def test_done_total_and_about_how_long() -> None:
    """26 of 52 in a minute: a minute more. Without any progress the time still goes on. 500 of 1,000 are on disk: 10
    more in half a minute are not the 510 of a fast machine. A step of no known number has its own time."""
    assert lines_of(
        lambda p: p.add_task("probing", total=52),
        lambda p: p.update(p.tasks[0].id, advance=26, description="matmul (mine:f)"),
        lambda p: None,
    ) == [
        "probing: 0 of 52 after 30 s",
        "matmul (mine:f): 26 of 52 after 60 s, about 60 s left",
        "matmul (mine:f): 26 of 52 after 90 s, about 90 s left",
    ]
    assert lines_of(
        lambda p: (p.add_task("stock", total=1000), [p.update(p.tasks[0].id, completed=n) for n in range(501, 511)])
    ) == ["stock: 510 of 1,000 after 30 s, about 24 min left"]
    assert lines_of(
        lambda p: p.add_task("", total=None),
        lambda p: p.reset(p.tasks[0].id, description="coarse pass"),
        lambda p: None,
    ) == [": 30 s so far", "coarse pass: 30 s so far", "coarse pass: 60 s so far"]
    for seconds, words in [(0.4, "0 s"), (99, "99 s"), (100, "2 min"), (5900, "98 min"), (9000, "2.5 h")]:
        assert in_words(seconds) == words


def test_of_several_the_one_under_way() -> None:
    """An implementation that has not begun is not told of before the one that has; one that is over never."""
    took = lines_of(
        lambda p: [p.add_task(name, total=4, start=False) for name in ("stock", "invariant")],
        lambda p: (p.start_task(p.tasks[0].id), p.update(p.tasks[0].id, completed=2)),
        lambda p: (p.update(p.tasks[0].id, completed=4), p.start_task(p.tasks[1].id)),
        lambda p: p.update(p.tasks[1].id, completed=4),
    )
    assert [line.partition(",")[0] for line in took] == [
        "stock: 0 of 4 after 30 s", "stock: 2 of 4 after 30 s", "invariant: 0 of 4 after 30 s",
    ]  # fmt: skip


def test_nothing_is_said_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that is being said when the run ends is said before what comes next, not after it."""
    monkeypatch.setattr("nondet.core.progress.EVERY_S", 0.001)
    said, begun = list[str](), threading.Event()

    def slowly(line: str) -> None:
        begun.set()
        time.sleep(0.1)
        said.append(line)

    with Lines(slowly) as progress:
        progress.add_task("probing", total=None)
        assert begun.wait(5)
    said.append("verdict")
    time.sleep(0.2)
    assert said == ["probing: 0 s so far", "verdict"]


CPU = ("--device", "cpu")
SMALL = ("--dtype", "float32", "--m", "4", "--k", "64")
MODEL = ("--model", "random:qwen3-1x128", "--dtype", "float32")
SHORT = (*CPU, *MODEL, "--max-tokens", "4", "--load", "others=2,targets=2")
RAN = r"\d+ of \d+ after \d+ s"
STEPS = r"\d+ s so far"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "line"),
    tiers(
        [
            (("probe", "softmax", "--impl", "stock", *CPU, *SMALL), rf"softmax \(stock\): {RAN}"),
            (("sample", "--impl", "stock", "--n", "4", *SHORT), rf"stock, \d+ tokens: {RAN}"),
        ],
        [
            (("certify", "softmax", "--class", "cpu-rows", *CPU, "--k", "4096"), rf"cpu-rows .*: {RAN}"),
            (("trace", *SHORT), rf".+: {STEPS}"),
            (("bench", "softmax", *CPU, "--m", "4", "--k", "64"), rf"bench: {RAN}"),
        ],
    ),
)
def test_every_command_says_how_far_it_is(
    argv: tuple[str, ...], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    """Done and total of what is counted, of a search its step; under a short "half minute"."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("nondet.core.progress.EVERY_S", 0.001)
    assert main([*argv, "--out", "a.jsonl"]) == 0
    assert re.search(rf"^{line}", capsys.readouterr().err, re.MULTILINE)


def test_an_endpoint_is_named_at_once_and_told_of_arm_by_arm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its address before it has answered anything, then the plan, then lines."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("nondet.core.progress.EVERY_S", 0.005)
    with serving("vllm") as server:
        argv = ["sample", "--endpoint", server.url, "--prompt", "The following", "--arms", "solo=4,loaded=12"]
        assert main([*argv, "--max-tokens", "8"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"connecting to {server.url} ..."
    assert " requests" in said[1]
    assert any(re.match(rf"server, \w+: {RAN}", line) for line in said), said
