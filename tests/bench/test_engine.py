"""`nondet bench engine`: whole models by the clock, their bits under every load, what is refused and what fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nondet.bench import engine
from nondet.bench.engine import EngineCase, Here, OverRanks, engine_impls, merged, plan_engine, session_of
from nondet.bench.summary import check_runs, sections
from nondet.cli import main
from nondet.core.records import Cell, Record, Row, Run
from nondet.core.runfile import read_run
from nondet.errors import UserError
from nondet.ranks.group import RankError
from nondet.sampling.engine import WarmEngine, run_session
from nondet.sampling.implementations import implementation
from nondet.sampling.model import load_model, random_config, random_model
from nondet.sampling.plan import Session, Span
from nondet.sampling.ranks import Played
from nondet.sampling.replay import digest_of

SMALL = ("--device", "cpu", "--dtype", "float32", "--models", "random:qwen3-1x128", "--requests", "2,8", "--runs", "2")


def bench(*argv: str) -> int:
    return main(["bench", "engine", *argv, "--quiet"])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    path = tmp_path_factory.mktemp("engine") / "r.jsonl"
    reports = [str(path.with_suffix(kind)) for kind in (".md", ".html")]
    assert bench(*SMALL, "--out", str(path), "--report", reports[0], "--report", reports[1]) == 0
    return path, read_run(path)


def test_every_load_is_timed_and_its_bits_are_compared(written: tuple[Path, Run]) -> None:
    """A cell for each load, with a figure for each run; stock float32 follows the load, invariant does not."""
    _, run = written
    assert [cell.shape["requests"] for cell in run.cells] == [2, 8]
    for cell in run.cells:
        assert {t.impl: (t.status, len(t.samples_us)) for t in cell.timed} == {
            "stock": ("timed", 2), "invariant": ("timed", 2)
        }  # fmt: skip
        assert cell.tokens == cell.shape["requests"] * cell.shape["tokens"]
        assert cell.calls >= cell.shape["tokens"], "a step gives each request one token at most"
        assert "no CUDA graphs" in cell.timed[0].ran
        assert any(name.startswith("replaced: ") for name in cell.timed[1].ran)
    rows = {row.impl: row for row in run.rows}
    assert (rows["invariant"].status, rows["invariant"].values, rows["invariant"].extra["parted"]) == (
        "identical", [2, 8], 0
    )  # fmt: skip
    assert rows["stock"].status == "divergent"
    assert rows["stock"].extra["parted"] > 0
    assert {(row.replays, row.replays_parted) for row in run.rows} == {(2, 0)}
    assert [s.impl for s in sections(run)[0].summaries] == ["invariant"]


def test_reports_say_tokens_and_what_was_left_out(written: tuple[Path, Run]) -> None:
    """In both reports: tokens a second beside the time of a step, and that nothing is captured on the clock."""
    path, _ = written
    for kind in (".md", ".html"):
        text = path.with_suffix(kind).read_text(encoding="utf-8")
        assert "µs (tokens/s)" in text
        assert "the capture of CUDA graphs come before" in text


def test_a_killed_run_goes_on(written: tuple[Path, Run], tmp_path: Path) -> None:
    """What was measured stays as it is, and what is missing is measured."""
    lines = written[0].read_bytes().splitlines(keepends=True)
    path = tmp_path / "r.jsonl"
    path.write_bytes(b"".join(lines[:3]))
    assert bench(*SMALL, "--out", str(path), "--resume") == 0
    again = path.read_bytes().splitlines(keepends=True)
    assert again[:3] == lines[:3]
    assert [json.loads(line)["type"] for line in again] == ["header", "cell", "cell", "row", "row", "end"]


def _digests(session: Session) -> list[str]:
    return [digest_of(outcome) for outcome in session.outcomes]


def test_a_warm_engine_serves_equal_waves() -> None:
    """Every wave meets the batches of the first and finds nothing of it in the cache: same steps, same bits."""
    loaded = load_model("random:qwen3-1x128", "float32", "cpu")
    case = plan_engine(["random:qwen3-1x128"], [5], "cpu", ["float32"], graphs=False)[0]
    requests = case.plan(loaded.identity["vocabulary"], 0)
    with (
        WarmEngine(loaded.model, requests, case.load) as engine,
        WarmEngine(loaded.model, requests[:2], case.load) as other,
    ):
        first = engine.serve()
        beside, again = other.serve(), engine.serve()
    assert (again.packs, _digests(again), again.steps, again.tokens) == (first.packs, _digests(first), first.steps, 40)
    assert beside.tokens == 16
    assert {span.rows for step in first.packs.values() for span in step if span.first == 0} > {1}, "were prefilled"
    apart = run_session(loaded.model, requests, case.load)
    assert _digests(apart) == _digests(first), "a fresh engine gives the same"


@pytest.mark.gpu
def test_graphs_are_captured_in_the_first_wave() -> None:
    """And replayed in the others, with the same batches; under invariant kernels with the bits of a run without."""
    loaded = load_model(None, "bfloat16", "cuda")
    case = plan_engine(["embedded"], [12], "cuda", None, graphs=True)[0]
    requests = case.plan(loaded.identity["vocabulary"], 0)
    with (
        WarmEngine(loaded.model, requests, case.load) as stock,
        WarmEngine(loaded.model, requests, case.load) as engine,
    ):
        with implementation("stock-flash"):
            assert stock.serve().figures["captured"] > 0
        with implementation("invariant"):
            first, second = engine.serve(), engine.serve()
        with implementation("stock-flash"):
            assert stock.serve().figures["captured"] == 0
    assert first.figures["captured"] > 0
    assert (second.figures["captured"], second.packs, _digests(second)) == (0, first.packs, _digests(first))
    with implementation("invariant"):
        apart = run_session(loaded.model, requests, replace(case.load, graphs=False))
    assert _digests(apart) == _digests(first)


def test_what_fails_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that can't be had, and a load that the engine can't serve, leave the rest alone."""

    def refuses(engine: WarmEngine) -> Session:
        if len(engine.requests) > 2:
            raise UserError("the engine's cache does not fit (in a test)", "")
        return original(engine)

    original = WarmEngine.serve
    monkeypatch.setattr(WarmEngine, "serve", refuses)
    path = tmp_path / "r.jsonl"
    assert bench(*SMALL, "--models", str(tmp_path / "nothing" / "there"), "--impl", "stock", "--out", str(path)) == 2
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    bench(*SMALL, "--models", str(tmp_path / "broken"), "--impl", "stock", "--out", str(path))
    cells = {
        (c.section.split(",")[1].rpartition("/")[2], c.shape["requests"]): c.timed[0] for c in read_run(path).cells
    }
    assert [cells[" random:qwen3-1x128", n].status for n in (2, 8)] == ["timed", "error"]
    assert "does not fit (in a test)" in cells[" random:qwen3-1x128", 8].reason
    assert {cells["broken", n].status for n in (2, 8)} == {"error"}


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, before anything is loaded."""
    for argv, words in [
        (("engine", "linear"), "by itself"),
        (("linear", "--runs", "2"), "is for engine"),
        (("engine", "--requests", "0,8"), "--requests '0,8' makes no sense"),
        (("engine", "--runs", "0"), "--runs 0 makes no sense"),
        (("engine", "--impl", "fast"), "unknown implementation 'fast'"),
        (("engine", "--impl", "stock-flash", "--device", "cpu"), "needs a CUDA device"),
        (("engine", "--cuda-graphs", "--device", "cpu"), "needs a CUDA device"),
        (("engine", "--m", "3"), "--m is not for engine"),
        (("engine", "--models", "random:qwen3-9b"), "makes no sense"),
    ]:
        assert main(["bench", *argv]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert len(error.strip().splitlines()) == 1


def test_a_load_holds_the_smaller_ones() -> None:
    """Its first requests are theirs, so their bits can be compared; another seed gives others."""
    small, large = plan_engine(None, [3, 5], "cpu", None, graphs=False)
    assert large.plan(512, 0)[:3] == small.plan(512, 0) != small.plan(512, 1)
    assert all(max(r.prompt) < 512 and r.arrival_step == 0 for r in large.plan(512, 0))
    assert isinstance(large, EngineCase)


def test_stock_stands_for_what_a_user_could_have() -> None:
    """On a GPU FlashAttention as well; without graphs not cuDNN's attention, which plans anew for every length."""
    assert engine_impls(["stock", "invariant"], "cuda", True) == ["stock", "stock-flash", "invariant"]
    assert engine_impls(["stock"], "cuda", False) == ["stock-no-cudnn", "stock-flash"]
    assert engine_impls(["stock"], "cpu", False) == ["stock"]


def test_published_shapes_are_those_of_the_models() -> None:
    """Their parameters, counted from the config, are what the models' names say."""
    for name, billions in (("qwen3-0.6b", 0.596), ("qwen3-8b", 8.19)):
        c = random_config(f"random:{name}", 4096)
        heads = (c.num_attention_heads + c.num_key_value_heads) * c.head_dim
        layer = 2 * c.hidden_size * heads + 3 * c.hidden_size * c.intermediate_size
        count = c.num_hidden_layers * layer + c.vocab_size * c.hidden_size * (1 if c.tie_word_embeddings else 2)
        assert abs(count / 1e9 - billions) < 0.01, name


# `nondet bench engine --ranks`: implementations in turn over two processes, and what becomes of ranks that fail.

MODEL, TASKS = "random:qwen3-1x256", "tests.ranks.tasks"
IMPLS = ("stock", "invariant", "rank-free")


@pytest.fixture(scope="module")
def over_two() -> Iterator[OverRanks]:
    """The model on two ranks, one thread each."""
    model = OverRanks(MODEL, "bfloat16", "cpu", 2, graphs=False)
    yield model
    group = model._group
    model.close()
    if group is not None:
        group.close()


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


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_waves_are_equal_and_rank_free_ones_are_those_of_one_process(over_two: OverRanks) -> None:
    """The very weights, batches and, where rank-free, bits of the model in this process; invariant ones are others."""
    case = _cases(3)[0]
    here = Here(load_model(MODEL, "bfloat16", "cpu"))
    requests = case.plan(here.vocabulary, 0)
    assert over_two.vocabulary == here.vocabulary
    waves: dict[tuple[str, int], Session] = {}
    for ranks, model in ((2, over_two), (1, here)):
        with model.stand(requests, case.load, IMPLS[1:]) as serve:
            for impl in IMPLS[1:]:
                waves[impl, ranks] = session_of(serve(impl))
            again = session_of(serve("invariant"))
        before = waves["invariant", ranks]
        assert (_digests(again), again.packs) == (_digests(before), before.packs)
    assert all(wave.packs == again.packs for wave in waves.values())
    traces = {key: _digests(wave) for key, wave in waves.items()}
    assert traces["rank-free", 1] == traces["rank-free", 2]
    assert traces["invariant", 1] != traces["invariant", 2], "the test would prove nothing"


@pytest.mark.nightly
def test_a_share_is_what_transformers_loads(over_two: OverRanks, tmp_path: Path) -> None:
    """Cut in memory or loaded from a folder: the same bits at the same strides, and nothing of the whole is held."""
    random_model(random_config(MODEL, 512), torch.bfloat16).save_pretrained(tmp_path)
    assert over_two._group is not None
    for share in over_two._group.ask(f"{TASKS}:shares", MODEL, str(tmp_path)):
        assert share.pop("names")
        assert 0.5 < share.pop("share") < 0.6
        assert set(map(len, share.values())) == {0}


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_a_dead_rank_is_an_error_of_its_load_and_the_next_asks_for_new_ranks(
    kept: OverRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What had not been timed by then says why, nothing waits for ever, no process stays. The last of these ranks.

    That new ranks can be had is what every other test here rests on; starting some takes seconds.
    """

    def no_more() -> None:
        raise RankError("no more ranks in a test")

    assert kept._group is not None
    before = kept._group.pids
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


def _wave(seconds: float, digest: str = "a", pack: int = 0) -> Played:
    packs = {0: (Span("t0", pack, 1, True),)}
    figures = {"captured": int(seconds)}
    return Played(digest, Session([], 4, 8, seconds, packs=packs, figures=figures, first_use_seconds=seconds / 10))


def test_ranks_are_merged_into_one_wave() -> None:
    """The slowest one's time, graphs and proofs wherever they were; ranks that do not agree are no wave."""
    wave = session_of(merged([_wave(1.0), _wave(2.0)]))
    assert (wave.seconds, wave.figures["captured"], wave.first_use_seconds, wave.steps) == (2.0, 2, 0.2, 4)
    with pytest.raises(UserError, match="2 different answers"):
        merged([_wave(1.0), _wave(1.0, digest="b")])
    with pytest.raises(UserError, match="different batches"):
        merged([_wave(1.0), _wave(1.0, pack=1)])
    with pytest.raises(UserError, match="does not fit"):
        merged([_wave(1.0), Played(refusal=("the cache does not fit", ""))])


def test_what_can_not_be_cut_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2, before a rank is started or a run file begun."""
    for argv, words in [
        (("--ranks", "2", "--models", "random:qwen3-2x128"), "random:qwen3-2x128 has 1 key heads"),
        (("--ranks", "4", "--models", "embedded"), "embedded has 2 key heads"),
        (("--ranks", "two"), "is no list of numbers"),
        (("--ranks", "99"), "is no group of ranks"),
        (("--ranks", "2", "--impl", "invariant:matmul"), "does not run over ranks"),
        (("--impl", "rank-free"), "is for a model over ranks"),
    ]:
        tmp_path = tmp_path_factory.mktemp("case")
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
