"""`nondet bench engine`: whole models by the clock, their bits under every load, what is refused and what fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nondet.bench.engine import EngineCase, StandingEngine, Wave, engine_impls, plan_engine
from nondet.bench.summary import sections
from nondet.cli import main
from nondet.core.records import Run
from nondet.core.runfile import read_run
from nondet.errors import UserError
from nondet.sampling.engine import run_session
from nondet.sampling.implementations import implementation
from nondet.sampling.model import load_model, random_config
from nondet.sampling.replay import digest_of

SMALL = ("--device", "cpu", "--dtype", "float32", "--models", "random:qwen3-1x128", "--requests", "2,8", "--runs", "2")


def bench(*argv: str) -> int:
    return main(["bench", "engine", *argv, "--quiet"])


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """A run is gone on with under the thread count that it began with, whatever other tests of this process left."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


def test_a_standing_engine_serves_equal_waves() -> None:
    """Every wave meets the batches of the first and finds nothing of it in the cache: same steps, same bits."""
    loaded = load_model("random:qwen3-1x128", "float32", "cpu")
    case = plan_engine(["random:qwen3-1x128"], [5], "cpu", ["float32"], graphs=False)[0]
    requests = case.plan(loaded.identity["vocabulary"], 0)
    with (
        StandingEngine(loaded.model, requests, case.load) as engine,
        StandingEngine(loaded.model, requests[:2], case.load) as other,
    ):
        first = engine.wave()
        beside, again = other.wave(), engine.wave()
    assert (again.packs, again.digests, again.steps, again.tokens) == (first.packs, first.digests, first.steps, 40)
    assert beside.tokens == 16
    assert {rows for step in first.packs for _, at, rows in step if at == 0} > {1}, "prompts were prefilled"
    apart = run_session(loaded.model, requests, case.load)
    assert [digest_of(o) for o in apart.outcomes] == list(first.digests), "a fresh engine gives the same"


@pytest.mark.gpu
def test_graphs_are_captured_in_the_first_wave() -> None:
    """And replayed in the others, with the same batches; under invariant kernels with the bits of a run without."""
    loaded = load_model(None, "bfloat16", "cuda")
    case = plan_engine(["embedded"], [12], "cuda", None, graphs=True)[0]
    requests = case.plan(loaded.identity["vocabulary"], 0)
    with (
        StandingEngine(loaded.model, requests, case.load) as stock,
        StandingEngine(loaded.model, requests, case.load) as engine,
    ):
        with implementation("stock-flash"):
            assert stock.wave().captured > 0
        with implementation("invariant"):
            first, second = engine.wave(), engine.wave()
        with implementation("stock-flash"):
            assert stock.wave().captured == 0
    assert first.captured > 0
    assert (second.captured, second.packs, second.digests) == (0, first.packs, first.digests)
    with implementation("invariant"):
        apart = run_session(loaded.model, requests, replace(case.load, graphs=False))
    assert [digest_of(o) for o in apart.outcomes] == list(first.digests)


def test_what_fails_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that can't be had, and a load that the engine can't serve, leave the rest alone."""

    def refuses(engine: StandingEngine) -> Wave:
        if len(engine.requests) > 2:
            raise UserError("the engine's cache does not fit (in a test)", "")
        return original(engine)

    original = StandingEngine.wave
    monkeypatch.setattr(StandingEngine, "wave", refuses)
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


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("engine", "linear"), "by itself"),
        (("linear", "--runs", "2"), "is for engine"),
        (("engine", "--requests", "0,8"), "--requests '0,8' makes no sense"),
        (("engine", "--runs", "0"), "--runs 0 makes no sense"),
        (("engine", "--impl", "fast"), "unknown implementation 'fast'"),
        (("engine", "--impl", "stock-flash", "--device", "cpu"), "needs a CUDA device"),
        (("engine", "--cuda-graphs", "--device", "cpu"), "needs a CUDA device"),
        (("engine", "--m", "3"), "--m is not for engine"),
        (("engine", "--models", "random:qwen3-9b"), "makes no sense"),
    ],
)
def test_bad_input_is_one_line(argv: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, before anything is loaded."""
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
