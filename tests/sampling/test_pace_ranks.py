"""`nondet bench engine --ranks`: implementations in turn over two processes, and what becomes of ranks that fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nondet.bench import engine
from nondet.bench.engine import EngineCase, Here, OverRanks, Wave, merged, plan_engine
from nondet.bench.summary import check_runs, sections
from nondet.cli import main
from nondet.core.records import Cell, Record, Row
from nondet.core.runfile import read_run
from nondet.errors import UserError
from nondet.ranks.group import RankError
from nondet.sampling.model import load_model, random_config, random_model

MODEL, TASKS = "random:qwen3-1x256", "tests.sampling.pace_tasks"
IMPLS = ("stock", "invariant", "rank-free")


@pytest.fixture(scope="module")
def over_two() -> Iterator[OverRanks]:
    """The model on two ranks, one thread each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    model = OverRanks(MODEL, "bfloat16", "cpu", 2, graphs=False)
    yield model
    group = model._group
    model.close()
    if group is not None:
        group.close()
    torch.set_num_threads(before)


@pytest.fixture
def kept(over_two: OverRanks, monkeypatch: pytest.MonkeyPatch) -> OverRanks:
    """These ranks are what a run opens, and they outlive it."""
    monkeypatch.setattr(engine, "open_bench_model", lambda *_, **__: over_two)
    monkeypatch.setattr(over_two, "close", lambda: None)
    return over_two


def _cases(*requests: int) -> list[EngineCase]:
    return [
        replace(case, shape={**case.shape, "tokens": 3})
        for case in plan_engine([MODEL], requests, "cpu", ["bfloat16"], graphs=False, ranks=(2,))
    ]


def _split(records: list[Record]) -> tuple[list[Cell], dict[str, Row]]:
    rows = {r.impl: r for r in records if isinstance(r, Row)}
    return [r for r in records if isinstance(r, Cell)], rows


def test_implementations_take_turns_over_ranks(kept: OverRanks, tmp_path: Path) -> None:
    """The command: a figure a run for each, stock the divisor, bits for each; ranks in section, shape, plan, report."""
    path = tmp_path / "r.jsonl"
    options = f"--models {MODEL} --requests 2,4 --runs 2 --dtype bfloat16 --threads 1 --quiet".split()
    argv = ["bench", "engine", "--ranks", "2", "--device", "cpu", *options, "--out", str(path)]
    assert main([*argv, "--report", str(path.with_suffix(".md"))]) == 0
    run = read_run(path)
    assert run.header.plan["ranks"] == [2]
    assert [(cell.section, cell.shape["requests"], cell.shape["ranks"]) for cell in run.cells] == [
        (f"engine, {MODEL}, 2 ranks", 2, 2), (f"engine, {MODEL}, 2 ranks", 4, 2)
    ]  # fmt: skip
    for cell in run.cells:
        assert [(t.impl, t.status, len(t.samples_us)) for t in cell.timed] == [(impl, "timed", 2) for impl in IMPLS]
        assert cell.method.endswith("the slowest rank")
        assert any(name.startswith("replaced: all_reduce") for name in cell.timed[1].ran)
    rows = {row.impl: row for row in run.rows}
    assert {impl: (rows[impl].status, rows[impl].values) for impl in IMPLS[1:]} == {
        impl: ("identical", [2, 4]) for impl in IMPLS[1:]
    }
    assert rows["stock"].status in ("identical", "divergent")
    assert [s.impl for s in sections(run)[0].summaries] == ["invariant", "rank-free"]
    assert check_runs(run, run).notes[-1].startswith("4 ratios compared, 0 regressions")
    text = path.with_suffix(".md").read_text(encoding="utf-8")
    assert f"engine, {MODEL}, 2 ranks" in text
    assert "Over ranks a run" in text, "whose time it is"


def test_waves_are_equal_and_rank_free_ones_are_those_of_one_process(over_two: OverRanks) -> None:
    """The very weights, batches and, where rank-free, bits of the model in this process; invariant ones are others."""
    case = _cases(3)[0]
    here = Here(load_model(MODEL, "bfloat16", "cpu"))
    requests = case.plan(here.vocabulary, 0)
    assert over_two.vocabulary == here.vocabulary
    waves: dict[tuple[str, int], Wave] = {}
    for ranks, model in ((2, over_two), (1, here)):
        with model.stand(requests, case.load, IMPLS[1:]) as serve:
            for impl in IMPLS[1:]:
                waves[impl, ranks] = serve(impl)
            again = serve("invariant")
        assert (again.digests, again.packs) == (waves["invariant", ranks].digests, waves["invariant", ranks].packs)
    assert len({wave.packs for wave in waves.values()}) == 1
    assert waves["rank-free", 1].digests == waves["rank-free", 2].digests
    assert waves["invariant", 1].digests != waves["invariant", 2].digests, "the test would prove nothing"


def test_a_share_is_what_transformers_loads(over_two: OverRanks, tmp_path: Path) -> None:
    """Cut in memory or loaded from a folder: the same bits at the same strides, and nothing of the whole is held."""
    random_model(random_config(MODEL, 512), torch.bfloat16).save_pretrained(tmp_path)
    assert over_two._group is not None
    for share in over_two._group.ask(f"{TASKS}:shares", MODEL, str(tmp_path)):
        assert share.pop("names")
        assert 0.5 < share.pop("share") < 0.6
        assert set(map(len, share.values())) == {0}


def test_ranks_that_came_to_other_answers_are_a_failure(kept: OverRanks) -> None:
    """Of that implementation, in that load, with its reason; the others' figures stand."""
    assert kept._group is not None
    kept._group.ask(f"{TASKS}:answer_otherwise", 3)  # two to warm up, and invariant comes first in the third turn
    records = list(engine.collect_engine(_cases(2), IMPLS[:2], "cpu", 0, 1))
    kept._group.ask(f"{TASKS}:as_it_was")
    cells, rows = _split(records)
    failed = [t for t in cells[0].timed if t.status == "error"]
    assert failed
    assert {t.reason for t in failed} == {"UserError: 2 ranks came to 2 different answers in one wave"}
    assert all(rows[t.impl].status == "error" for t in failed)


def test_a_dead_rank_is_an_error_of_its_load_and_the_next_asks_for_new_ranks(
    kept: OverRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What had not been timed by then says why, nothing waits for ever, no process stays. The last of these ranks.

    That new ranks can be had is what every other test here rests on; starting some takes seconds.
    """

    def no_more() -> None:
        raise RankError("no more ranks in a test")

    assert kept._group is not None
    before = kept.pids
    kept._group.ask(f"{TASKS}:die", 1)
    monkeypatch.setattr(kept, "_start", no_more)
    cells, rows = _split(list(engine.collect_engine(_cases(2, 3), IMPLS[:2], "cpu", 0, 1)))
    first, second = ({t.impl: t for t in cell.timed} for cell in cells)
    assert {t.status for t in [*first.values(), *second.values()]} == {"error"}
    assert all("was killed by SIGKILL" in t.reason for t in first.values())
    assert any(t.reason.startswith("under ") for t in first.values())
    assert {t.reason for t in second.values()} == {"no more ranks in a test"}
    assert {row.status for row in rows.values()} == {"error"}
    assert not [pid for pid in before if Path(f"/proc/{pid}").exists()]


def _wave(seconds: float, digest: str = "a", pack: int = 0) -> Wave:
    return Wave(seconds, 4, 8, (digest,), (((pack, 0, 1),),), int(seconds), seconds / 10, "sdpa")


def test_ranks_are_merged_into_one_wave() -> None:
    """The slowest one's time, graphs and proofs wherever they were; ranks that do not agree are no wave."""
    wave = merged([_wave(1.0), _wave(2.0)])
    assert (wave.seconds, wave.captured, wave.first_use_seconds, wave.steps) == (2.0, 2, 0.2, 4)
    assert wave.attention == "sdpa"
    with pytest.raises(UserError, match="2 different answers"):
        merged([_wave(1.0), _wave(1.0, digest="b")])
    with pytest.raises(UserError, match="different batches"):
        merged([_wave(1.0), _wave(1.0, pack=1)])
    with pytest.raises(UserError, match="does not fit"):
        merged([_wave(1.0), ("the cache does not fit", "")])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--ranks", "2", "--models", "random:qwen3-2x128"), "random:qwen3-2x128 has 1 key heads"),
        (("--ranks", "4", "--models", "embedded"), "embedded has 2 key heads"),
        (("--ranks", "two"), "is no list of numbers"),
        (("--ranks", "99"), "is no group of ranks"),
        (("--ranks", "2", "--impl", "invariant:matmul"), "does not run over ranks"),
        (("--impl", "rank-free"), "is for a model over ranks"),
    ],
)
def test_what_can_not_be_cut_is_one_line(
    argv: tuple[str, ...],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit code 2, before a rank is started or a run file begun."""
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "engine", "--device", "cpu", *argv]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_more_ranks_than_gpus_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Three ranks on two GPUs."""
    from nondet.services import bench

    monkeypatch.setattr(bench, "pick_device", lambda _: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert main(["bench", "engine", "--ranks", "3"]) == 2
    assert "--ranks 3 needs 3 GPUs, and 2 GPUs are here" in capsys.readouterr().err
