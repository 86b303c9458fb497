"""Off a terminal a run says each half minute how far it is; a clock of our own stands in for the waiting."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nondet.cli import main
from nondet.core.progress import Lines, in_words
from tests.build import tiers
from tests.endpoint.honest import serving

Step = Callable[[Lines], object]


def lines_of(*steps: Step) -> list[str]:
    """What is said when each step is taken in a half minute of its own."""
    now, said, left = [0.0], list[str](), list(steps)

    def wait(seconds: float) -> bool:
        if left:
            left.pop(0)(lines)
            now[0] += seconds
            return False
        return True

    lines = Lines(said.append, lambda: now[0], wait)
    lines.watch()
    return said


def test_done_total_and_about_how_long() -> None:
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
    assert [*map(in_words, (0.4, 99, 100, 5900, 9000))] == ["0 s", "99 s", "2 min", "98 min", "2.5 h"]
    # of several the one under way: one that has not begun comes after it, one that is over never
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


SMALL = "--device cpu --m 4 --k 64"
SHORT = "--device cpu --dtype float32 --model random:qwen3-1x128 --max-tokens 4 --load others=2,targets=2"
SERVED = "sample --endpoint {url} --prompt x --arms solo=4,loaded=12 --max-tokens 8"
RAN = r"\d+ of \d+ after \d+ s"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "line"),
    tiers(
        [
            (f"probe softmax --impl stock --dtype float32 {SMALL}", rf"softmax \(stock\): {RAN}"),
            (f"sample --impl stock --n 4 {SHORT}", rf"stock, \d+ tokens: {RAN}"),
            (SERVED, rf"server, \w+: {RAN}"),
        ],
        [
            ("certify softmax --class cpu-rows --device cpu --k 4096", rf"cpu-rows .*: {RAN}"),
            (f"trace {SHORT}", r".+: \d+ s so far"),
            (f"bench softmax {SMALL}", rf"bench: {RAN}"),
        ],
    ),
)
def test_every_command_says_how_far_it_is(
    typed: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("nondet.core.progress.EVERY_S", 0.001)
    with serving("vllm", token_s=0.001) as server:
        assert main([*typed.format(url=server.url).split(), "--out", "a.jsonl"]) == 0
    said = capsys.readouterr().err
    assert re.search(rf"^{line}", said, re.MULTILINE)
    if typed == SERVED:
        assert re.match(rf"connecting to {server.url} \.\.\.\n.* requests", said)
