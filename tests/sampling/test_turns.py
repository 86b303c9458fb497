"""`nondet sample --turns`: implementations take turns round by round; only then the report has a speed ratio."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from nondet.cli import main
from nondet.core.records import Round, Run
from nondet.core.runfile import read_run
from nondet.sampling.analysis import NOT_IN_TURN, ratio_text, speed_ratio_of
from nondet.sampling.collect import _beside_captures
from nondet.sampling.model import random_config
from nondet.sampling.plan import Pace, Session

LOAD = "others=1,targets=2,spread=2,prompt=4-8,tokens=2-4,budget=16,page=4"
SMALL = f"--model random:qwen3-1x128 --dtype float32 --device cpu --threads 1 --load {LOAD} --max-tokens 3 --n 12 -q"


def sample(out: Path, *more: str) -> Run:
    assert main(["sample", *SMALL.split(), "--prompt", "The following", "--out", str(out), *more]) == 0
    return read_run(out)


def order(run: Run) -> list[tuple[str, int]]:
    return [(r.impl, r.round) for r in run.rounds]


@pytest.mark.slow
def test_every_round_is_played_under_each_before_the_next(tmp_path: Path) -> None:
    """The order turns each round; the answers are those of a run without turns; a run that was cut off goes on."""
    plain, turned = sample(tmp_path / "plain.jsonl"), sample(tmp_path / "turns.jsonl", "--turns")
    assert [number for _, number in order(turned)] == [number for number in range(6) for _ in range(2)]
    assert [impl for impl, _ in order(turned)[:4]] == ["stock", "invariant", "invariant", "stock"]
    assert [impl for impl, _ in order(plain)] == ["stock"] * 6 + ["invariant"] * 6
    answers = [sorted((c.impl, c.request, c.trace) for c in run.completions) for run in (plain, turned)]
    assert answers[0] == answers[1]
    assert {row.impl for row in turned.rows} == {"stock", "invariant"}, "the first round was repeated"
    speeds = [speed_ratio_of(run) for run in (plain, turned)]
    assert speeds[0] is not None
    assert speeds[1] is not None
    assert (speeds[0].is_cost, speeds[1].is_cost, speeds[1].rounds) == (False, True, 6)
    assert NOT_IN_TURN in ratio_text(speeds[0])
    lines = (tmp_path / "turns.jsonl").read_bytes().splitlines(keepends=True)
    cut = [i for i, line in enumerate(lines) if json.loads(line)["type"] == "round"][4]
    (tmp_path / "turns.jsonl").write_bytes(b"".join(lines[: cut + 1]))
    assert order(sample(tmp_path / "turns.jsonl", "--turns", "--resume")) == order(turned)


def rounds(*seconds: float, impl: str, **more: dict[str, int]) -> list[Round]:
    return [
        Round(impl=impl, round=i, targets=1, others=0, steps=4, tokens=100, seconds=s, **more)
        for i, s in enumerate(seconds)
    ]


def test_a_ratio_is_of_rounds_with_equal_steps(tmp_path: Path) -> None:
    """A round whose batches were others says nothing of the kernels; what capturing took is in no rate."""
    from tests.build import sampled

    run = sampled(tmp_path, n=8, impls=["stock"])
    run.header.plan["turns"] = True
    run.rounds[:] = [*rounds(*[4.0] * 7, impl="stock"), *rounds(*[2.0] * 7, impl="invariant")]
    speed = speed_ratio_of(run)
    assert speed is not None
    assert (speed.ratio, speed.interval, speed.rounds) == (2.0, (2.0, 2.0), 7)
    run.rounds[7] = msgspec.structs.replace(run.rounds[7], steps=5)
    speed = speed_ratio_of(run)
    assert speed is not None
    assert speed.rounds == 6
    pace = [Pace(3.0, 10, True), Pace(0.5, 8, False), Pace(0.25, 8, False)]
    captured = Session(outcomes=[], steps=3, tokens=26, seconds=3.75, pace=pace)
    figures = _beside_captures(captured)
    run.rounds[:] = rounds(*[3.75] * 7, impl="stock", figures=figures) + rounds(*[1.0] * 7, impl="invariant")
    speed = speed_ratio_of(run)
    assert speed is not None
    assert speed.stock == pytest.approx(16 / 0.75)
    assert _beside_captures(Session(outcomes=[], steps=1, tokens=8, seconds=0.5, pace=pace[1:])) == {}


def test_who_can_not_take_turns_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """One implementation alone, axes, a server, vLLM; and the old name of the command answers."""
    for argv, said in [
        (["sample", "--turns", "--impl", "stock"], "--turns and one --impl, stock,"),
        (["sample", "--turns", "--vary", "chunk"], "--turns and --vary"),
        (["sample", "--turns", "--endpoint", "http://127.0.0.1:1"], "--endpoint and --turns"),
        (["sample", "--turns", "--engine", "vllm"], "--engine vllm and --turns"),
        (
            ["bench", "engine", "--threads", "1"],
            "no nondet bench engine any more. Type nondet sample --turns.",
        ),
        (["bench", "host"], "Run python scripts/host.py"),
    ]:
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1


def test_published_shapes_are_those_of_the_models() -> None:
    """Their parameters, counted from the config, are what the models' names say."""
    for name, billions in (("qwen3-0.6b", 0.596), ("qwen3-8b", 8.19)):
        c = random_config(f"random:{name}", 4096)
        heads = (c.num_attention_heads + c.num_key_value_heads) * c.head_dim
        layer = 2 * c.hidden_size * heads + 3 * c.hidden_size * c.intermediate_size
        count = c.num_hidden_layers * layer + c.vocab_size * c.hidden_size * (1 if c.tie_word_embeddings else 2)
        assert abs(count / 1e9 - billions) < 0.01, name
