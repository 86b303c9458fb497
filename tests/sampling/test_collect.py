"""Collecting: rounds into a run file, so that stopping anywhere loses and repeats nothing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
from rich.progress import Progress

from nondet.cli import main
from nondet.core.records import Completion, Run
from nondet.core.runfile import read_run, traces_path
from nondet.core.traces import read_traces
from nondet.errors import EngineStoppedError, UnknownNameError, UserError
from nondet.sampling import collect as collecting
from nondet.sampling import engine
from nondet.sampling.analysis import NOT_IN_TURN, ratio_text, speed_ratio_of
from nondet.sampling.implementations import implementation
from nondet.sampling.model import LoadedModel
from nondet.sampling.plan import Plan
from nondet.services import options as o
from nondet.services.sample import Shown
from nondet.verdict.findings import Finding
from nondet.verdict.gate import judge
from tests.build import completion, tiers
from tests.sampling.conftest import Heard, change_bits, planned, sampled_into, untimed

PROMPT = "The following exceptions"
LOAD = "others=3,targets=4,spread=6,prompt=4-16,tokens=2-6,budget=16,page=4"
LONE = "others=1,targets=1,spread=2,prompt=4-8,tokens=2-3,budget=16,page=4"


def plan_of(loaded: LoadedModel, n: int = 10) -> Plan:
    return planned(loaded, LOAD, PROMPT, n=n, new=5)


def sample(loaded: LoadedModel, path: Path, impls: Sequence[str] = ("stock",), *, n: int = 10, **options: Any) -> Run:
    return sampled_into(path, loaded, plan_of(loaded, n), impls, **options)


def cut_off(whole: Path, folder: Path, lines: int | None = None, torn: int = 0) -> Path:
    """A copy of the run, of so many lines and some bytes of the next."""
    path, all_lines = folder / "run.jsonl", whole.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(all_lines[:lines]) + (all_lines[lines][:torn] if lines is not None and torn else b""))
    traces_path(path).write_bytes(traces_path(whole).read_bytes())
    return path


@pytest.fixture(scope="module")
def whole(tiny: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    path = tmp_path_factory.mktemp("whole") / "run.jsonl"
    return sample(tiny, path), path


def test_a_run_holds_everybody(whole: tuple[Run, Path], tiny: LoadedModel) -> None:
    """Ten completions in three rounds, each with its trace, text and batches; the others' schedules beside them."""
    run, path = whole
    traces, pieces = read_traces(path)
    assert run.complete
    assert [r.targets for r in run.rounds] == [4, 4, 2]
    assert all(len(r.background) == r.others == 3 for r in run.rounds)
    assert len({c.key for c in run.completions}) == len(run.completions) == 10
    for c in run.completions:
        trace = traces[c.trace]
        assert (c.status, c.finish, c.n_tokens) == ("ok", "length", 5)
        assert len(trace.token_ids) == len(trace.logprob_array) == len(trace.margin_array) == len(trace.runner_up) == 5
        assert trace.text == tiny.decode(trace.token_ids)
        assert set(trace.token_ids) | set(trace.runner_up) <= set(pieces)
    assert all(r.seconds > 0 and r.tokens > 20 for r in run.rounds)
    # the header has what decides the records, as plain JSON; requests are drawn again, not stored
    plan = run.header.plan
    assert (plan["n"], plan["load"]["budget"], plan["impls"], len(json.dumps(plan)) < 2000) == (10, 16, ["stock"], True)
    # the first round runs twice: else batch-dependent could not be distinguished from run-to-run nondeterministic
    (row,) = run.rows
    assert (row.varied, row.status, row.trials, row.distinct, row.extra["requests"]) == ("run", "identical", 2, 1, 7)


def test_run_to_run_nondeterminism_is_seen(tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose results change from run to run gives a divergent row: the comparison can fail."""
    change_bits(monkeypatch, lambda call: call, most=1)
    (row,) = sample(tiny, tmp_path / "run.jsonl", n=2).rows
    assert (row.status, row.distinct, row.labels, row.extra["requests_parted"]) == ("divergent", 2, [0, 1], 1)


# lines that are left of a file, and bytes of the next: two completions of the second round, beside the first; killed in
# the middle of a line of the first; two completions of it; the header alone
@pytest.mark.parametrize(("lines", "torn"), tiers([(8, 0), (4, 25)], [(3, 0), (1, 0)]))
def test_a_partly_written_round_is_completed(tiny, whole, tmp_path, lines, torn) -> None:
    """Killed while a round was being written: it runs again identically, and no record is there twice."""
    path = cut_off(whole[1], tmp_path, lines, torn)
    assert untimed(sample(tiny, path, resume=True)) == untimed(whole[0])


def test_a_round_that_comes_out_otherwise_is_refused(tiny, whole, tmp_path) -> None:
    """A resumed round that differs from its first half must not be mixed with it."""
    path = cut_off(whole[1], tmp_path, 2)
    header, line = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(header + json.dumps(json.loads(line) | {"trace": "0" * 16}).encode() + b"\n")
    with pytest.raises(UserError, match="differs from before the stop"):
        sample(tiny, path, resume=True)


def test_another_bit_of_another_process_is_not_laid_to_the_batch(tiny, whole, tmp_path, monkeypatch) -> None:
    """Stopped after a round and resumed where every bit is another: the first round is held against the disk."""
    path = cut_off(whole[1], tmp_path, 7)
    assert len(read_run(path, allow_truncated=True).rounds) == 1
    change_bits(monkeypatch, lambda _: 1)
    run = sample(tiny, path, resume=True)
    assert [(r.status, r.extra["requests_parted"]) for r in run.rows] == [("divergent", 4)]
    assert {v.finding for v in judge(run)} == {Finding.RUN_TO_RUN}


def test_nothing_is_left_to_do_on_a_finished_run(tiny, whole, tmp_path, monkeypatch) -> None:
    """Resuming a complete run starts no engine."""
    path = cut_off(whole[1], tmp_path)
    monkeypatch.setattr(engine, "run_session", lambda *_, **__: pytest.fail("an engine was started"))
    assert untimed(sample(tiny, path, resume=True)) == untimed(whole[0])


def test_an_engine_that_dies_leaves_rows_and_says_so(tiny: LoadedModel, tmp_path: Path) -> None:
    """A crash in the second round: the first is whole, the second has a row for each request, with the reason."""
    path, hook = tmp_path / "run.jsonl", Mock(return_value=None)

    def arm(impl: str, arm: str, done: int, *_: int) -> None:
        hook.side_effect = RuntimeError("no such kernel") if done >= 4 else None

    stopped = pytest.raises(EngineStoppedError, match=r"round 1.*no such kernel")
    with tiny.model.register_forward_pre_hook(hook), stopped:
        sample(tiny, path, notes=Heard(progress=arm))
    run = read_run(path)
    assert [c.status for c in run.completions] == ["ok"] * 4 + ["error"] * 4
    assert all("no such kernel" in c.reason and not c.trace for c in run.completions[4:])


def test_every_implementation_gets_the_same_load(tiny, tmp_path, monkeypatch) -> None:
    """Stock and invariant meet the same requests at the same steps, and each engine runs inside its implementation. The
    thread count holds in the engine, and only there."""
    entered, threads, seen = list[str](), set[int](), list[tuple[str, int]]()

    def noted(name: str, _: Any) -> Any:
        entered.append(name)
        return nullcontext(Counter)

    monkeypatch.setattr(collecting, "implementation", noted)
    notes = Heard(progress=lambda impl, arm, done, tokens: seen.append((impl, done)))
    with tiny.model.register_forward_pre_hook(lambda *_: threads.add(torch.get_num_threads())):
        run = sample(tiny, tmp_path / "run.jsonl", ["stock", "invariant"], n=4, notes=notes, threads=2)
    assert (threads, torch.get_num_threads()) == ({2}, 1)
    assert entered == ["stock", "invariant"]
    assert seen == [(impl, i) for impl in entered for i in (1, 2, 3, 4)]
    stock, invariant = ([c for c in run.completions if c.impl == name] for name in entered)
    for one, other in zip(stock, invariant, strict=True):
        assert (one.request, one.schedule, one.arrival_step) == (other.request, other.schedule, other.arrival_step)
    assert run.rounds[0].background == run.rounds[1].background


def test_invariant_kernels_leave_one_trace_where_stock_leaves_several(tiny_float32, tmp_path) -> None:
    """The contrast that a run is made for, end to end, on the same load: stock parts, invariant does not."""
    run = sample(tiny_float32, tmp_path / "run.jsonl", ["stock", "invariant"], n=8)
    traces = {name: {c.trace for c in run.completions if c.impl == name} for name in ("stock", "invariant")}
    assert len(traces["stock"]) > 1
    assert len(traces["invariant"]) == 1
    ran = {r.impl: r.ran for r in run.rounds}
    assert not ran["stock"]
    assert any(name.startswith("cpu_matmul") for name in ran["invariant"])
    products = 7 * tiny_float32.identity["layers"] + 1
    assert all(r.ran["replaced: linear"] == products * r.steps for r in run.rounds if r.impl == "invariant")
    assert not any(name.startswith(("at risk", "left stock")) for name in ran["invariant"])


def test_implementations_that_are_unknown_or_need_a_gpu_are_refused() -> None:
    """A misspelt implementation never runs as stock; without cuDNN, on a CPU, it would be stock under another name."""
    for name in ("stok", "invariants", "stock:attention", "module:function"):
        with pytest.raises(UnknownNameError, match=name), implementation(name):
            pytest.fail("entered")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="needs a CUDA device"), implementation("stock-no-cudnn"):
            pytest.fail("entered")


@pytest.mark.gpu
def test_stock_without_cudnn_switches_it_off_for_a_while() -> None:
    """Inside, scaled_dot_product_attention has no cuDNN to choose; afterwards it has."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with implementation("stock-no-cudnn"):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_the_first_round_is_shown_before_the_others(tiny, tmp_path, capsys) -> None:
    """With its completions, before the second begins; not where there is but one round, or with -q."""
    seen: list[tuple[str, int, int]] = []

    def first(impl: str, completions: Sequence[Completion]) -> None:
        seen.append((impl, len(completions), len(read_run(tmp_path / "run.jsonl", allow_truncated=True).rounds)))

    notes = Heard(first_round=first)
    sample(tiny, tmp_path / "run.jsonl", n=5, notes=notes)
    assert seen == [("stock", 4, 1)]
    sample(tiny, tmp_path / "one.jsonl", n=4, notes=notes)
    assert len(seen) == 1
    given = [("a", "T"), ("a", "T"), ("b", "T"), ("b", "U"), ("d", "V"), ("d", "V")]
    made = [completion(trace=trace, tokens_digest=text, prompt=int(text == "V")) for trace, text in given]
    for quiet, count in ((False, 4), (False, 6), (True, 6)):
        sink: Any = SimpleNamespace(quiet=quiet, say=print)
        Shown(sink, Progress(disable=True), ["stock"], 9).first_round("stock", made[:count])
    assert capsys.readouterr().out.splitlines() == [
        "stock, so far: 1 of 4 completions differ from the most common one, 2 in their logprob bits",
        "stock, so far: 1 of 6 completions of 2 prompts, each within its own differ from the most common one, "
        "2 in their logprob bits",
    ]


def test_every_round_is_played_under_each_before_the_next(tiny: LoadedModel, tmp_path: Path) -> None:
    """The order turns each round; the answers are those of a run without turns; a run that was cut off goes on."""
    plan, impls = planned(tiny, LONE, PROMPT, n=6, new=2), ["stock", "invariant"]

    def turned(path: Path, turns: bool = True, resume: bool = False) -> Run:
        return sampled_into(path, tiny, plan, impls, turns=turns, resume=resume, header={"turns": turns})

    def order(run: Run) -> list[tuple[str, int]]:
        return [(r.impl, r.round) for r in run.rounds]

    path = tmp_path / "turns.jsonl"
    plain, taken = turned(tmp_path / "plain.jsonl", turns=False), turned(path)
    assert [number for _, number in order(taken)] == [number for number in range(6) for _ in range(2)]
    assert [impl for impl, _ in order(taken)[:4]] == ["stock", "invariant", "invariant", "stock"]
    assert [impl for impl, _ in order(plain)] == ["stock"] * 6 + ["invariant"] * 6
    answers = [sorted((c.impl, c.request, c.trace) for c in run.completions) for run in (plain, taken)]
    assert answers[0] == answers[1]
    assert {row.impl for row in taken.rows} == set(impls), "the first round was repeated"
    speeds = [speed_ratio_of(run) for run in (plain, taken)]
    assert [(s.no_cost, s.rounds) for s in speeds if s] == [(NOT_IN_TURN, 6), ("", 6)]
    assert NOT_IN_TURN in ratio_text(speeds[0])
    lines = path.read_bytes().splitlines(keepends=True)
    cut = [i for i, line in enumerate(lines) if json.loads(line)["type"] == "round"][9]
    path.write_bytes(b"".join(lines[: cut + 1]))
    assert order(turned(path, resume=True)) == order(taken)


class Theirs(collecting.Here):
    """Another engine, which answers as ours does."""

    grains: ClassVar[dict[str, int]] = {}
    graphs, check_installed = False, staticmethod(lambda: None)

    def __init__(self, loaded: LoadedModel, longest: int, grain: int) -> None:
        super().__init__(loaded)

    def describe(self, conditions: Any) -> dict[str, Any]:
        return {"version": 1}


@pytest.mark.slow
def test_another_engine_is_one_line(tmp_path, monkeypatch, capsys) -> None:
    """It plays the rounds under its own implementations, and its run names it: ours never replays that run."""
    monkeypatch.setitem(o.ENGINES, "vllm", (f"{__name__}:Theirs", ("stock",)))
    path = tmp_path / "r.jsonl"
    options = ["--engine", "vllm", "--device", "cpu", "--load", LONE, "--n", "2", "--max-tokens", "2"]
    assert main(["sample", *options, "--out", str(path)]) == 0
    run = read_run(path)
    assert run.header.plan["engine"] == {"name": "vllm", "version": 1, "impls": ["stock"]}
    assert {(c.impl, c.status) for c in run.completions} == {("stock", "ok")}
    assert {row.operator for row in run.rows} == {"engine"}, "no operator of ours explains it"
    capsys.readouterr()
    assert main(["trace", "--run", str(path), "--request", run.completions[0].request]) == 2
    assert "--engine vllm is not replayed" in capsys.readouterr().err


def test_who_can_not_take_turns_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """One implementation alone, axes, a server, vLLM; and the old name of the command answers."""
    for argv, said in [
        ("sample --turns --impl stock", "--turns and one --impl, stock,"),
        ("sample --turns --vary chunk", "--turns and --vary"),
        ("sample --turns --endpoint http://127.0.0.1:1", "--endpoint and --turns"),
        ("sample --turns --engine vllm", "--engine vllm and --turns"),
        ("bench engine --threads 1", "no nondet bench engine any more. Type nondet sample --turns."),
        ("bench host", "Run python scripts/host.py"),
    ]:
        assert main(argv.split()) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
