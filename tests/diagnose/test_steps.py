"""A whole diagnosis: what it says of a model that parts and of one that does not, and that a killed one goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from nondet.core.records import AxisTried, Diagnosis, Record, Run, Step, TraceVerdict
from nondet.core.runfile import open_run, read_run
from nondet.diagnose import steps
from nondet.diagnose.steps import Diagnoser, make_axes, try_axis
from nondet.diagnose.verdict import QUESTIONS
from nondet.errors import EngineStoppedError
from nondet.sampling.collect import describe
from nondet.sampling.engine import TransformersEngine
from nondet.sampling.implementations import implementation
from nondet.sampling.model import LoadedModel, load_model
from nondet.sampling.plan import Request, Session, parse_load
from nondet.verdict.gate import exit_code
from tests.build import Command, failed, row, tiers
from tests.build import run_of as made_run
from tests.diagnose.test_verdict import run_of, session, traced
from tests.sampling.conftest import planned
from tests.trace.conftest import model_of

_LOAD = "default,targets=5,others=3,spread=8,prompt=8-40,tokens=4-8,budget=32,page=4"


@pytest.fixture(scope="module")
def embedded() -> LoadedModel:
    return load_model(None, "bfloat16", "cpu")


def diagnoser(loaded: LoadedModel, path: Path, *, n: int = 5, resume: bool = False, **limits: Any) -> Diagnoser:
    """Of rounds of five completions."""
    text = "For example, the"
    plan = planned(loaded, _LOAD, text, n=n, new=8)
    prompts = [{"text": text, "tokens": len(loaded.encode(text))}]
    described = describe(loaded, plan, prompts, 8, 0, ["stock"])
    writer = open_run(path, command="diagnose", plan=described, environment={}, resume=resume, force=not resume)
    return Diagnoser(loaded, plan, writer, 0, 1, lambda _: None, **limits)


def diagnosed(loaded: LoadedModel, path: Path, *, within_s: float = 1e6, **options: Any) -> Run:
    """With a limit, if an ample one: one value of each property is enough where the first round differs."""
    made = diagnoser(loaded, path, within_s=within_s, **options)
    made.run()
    made.writer.finish()
    return read_run(path)


@pytest.mark.slow
def test_stock_attention_is_named_and_the_cure_holds(whole: Run) -> None:
    """The embedded model's completions depend on their batch on every CPU tried, and attention alone does it."""
    run = whole
    verdict = run.diagnoses[0]
    assert verdict.finding == "batch-dependent"
    assert run.culprits[0].family == "attention"
    assert "scaled_dot_product_attention" in verdict.why
    assert "left no divergence" in verdict.cure
    assert "tokens/s" in verdict.cost
    steps = {s.name: s for s in run.steps}
    assert list(steps) == list(QUESTIONS)
    assert steps["greedy"].outcome == steps["run"].outcome == steps["batch"].outcome == steps["cure"].outcome == "yes"
    assert steps["cure"].figures["traces"] == 1
    assert steps["cost"].figures["invariant_ratio_low"] > 0
    axes = {a.axis: a for a in run.axes if a.impl == "stock"}
    assert axes["batch size"].traces
    assert axes["prefix sharing"].tried == 2
    assert all(a.traces == 0 for a in run.axes if a.impl == "invariant")


@pytest.mark.slow
def test_a_model_that_does_not_differ_gets_a_clean_verdict(tiny_folder: Path, tmp_path: Path) -> None:
    """Under the invariant implementation the same load and questions show nothing, and nothing is blamed."""
    with implementation("invariant"):
        run = diagnosed(load_model(str(tiny_folder), "bfloat16", "cpu"), tmp_path / "run.jsonl", n=10, within_s=0)
    verdict = run.diagnoses[0]
    assert verdict.finding == "no divergence observed"
    assert "not a proof" in verdict.whether
    assert not run.culprits
    assert not verdict.why
    assert not verdict.cure
    outcome = {s.name: s.outcome for s in run.steps}
    assert outcome["batch"] == outcome["axes"] == "no"
    assert {outcome[name] for name in ("operator", "margin", "cure", "cost")} == {"skipped"}
    assert sum(a.tried for a in run.axes) > 70  # it was not clean for want of comparisons


@pytest.mark.nightly
def test_a_killed_diagnosis_goes_on_to_the_same_records(embedded: LoadedModel, tmp_path: Path, whole: Run) -> None:
    """Killed as its axes are to be written: steps that are on disk are not taken again, and nothing is missed that a
    dead process knew."""

    def dying(record: Record) -> None:
        if isinstance(record, Step) and record.name == "axes":
            raise KeyboardInterrupt
        write(record)

    made = diagnoser(embedded, tmp_path / "run.jsonl", within_s=1e6)
    write, made.writer.write = made.writer.write, dying  # type: ignore[assignment,method-assign] # killed there
    with pytest.raises(KeyboardInterrupt):
        made.run()
    made.writer.close()
    stopped = read_run(tmp_path / "run.jsonl", allow_truncated=True)
    assert not stopped.diagnoses
    before = {s.name: s.seconds for s in stopped.steps}
    assert list(before) == ["greedy", "run", "batch"]
    resumed = diagnosed(embedded, tmp_path / "run.jsonl", resume=True)
    assert {s.name: s.seconds for s in resumed.steps if s.name in before} == before
    assert told(resumed) == told(whole)


def told(run: Run) -> list[Any]:
    """The records without what a clock decided."""
    steps = [(s.name, s.outcome, s.sentence) for s in run.steps if s.name != "cost"]
    traces, calls = [(c.key, c.trace) for c in run.completions], [c.sentence for c in run.culprits]
    return [steps, traces, calls, run.axes, run.substitutions, [d.finding for d in run.diagnoses]]


@pytest.fixture(scope="module")
def whole(embedded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return diagnosed(embedded, tmp_path_factory.mktemp("whole") / "run.jsonl")


@pytest.mark.parametrize("known", [4, 3])
def test_a_bound_leaves_out_what_no_longer_fits(embedded: LoadedModel, tmp_path: Path, whole: Run, known: int) -> None:
    """The seconds are gone before the trace: what is known stays said, what is not asked is said, and nothing runs."""
    made = diagnoser(embedded, tmp_path / "run.jsonl", within_s=50.0, bound=True)
    first = list(QUESTIONS)[:known]
    for record in (*whole.completions, *whole.rounds, *whole.rows, *(whole.axes if "axes" in first else ())):
        if record.impl == "stock":
            made.writer.write(record)
    for step in whole.steps[:known]:
        made.writer.write(msgspec.structs.replace(step, seconds=51.0 / known))
    made.run()
    made.writer.finish()
    run = read_run(tmp_path / "run.jsonl")
    rest = list(QUESTIONS)[known:]
    assert {s.name: s.outcome for s in run.steps if s.name not in first} == dict.fromkeys(rest, "skipped")
    verdict = run.diagnoses[0]
    assert verdict.finding == "batch-dependent"
    assert not verdict.why
    assert not verdict.cure
    skipped = [line for line in verdict.limits if "Not tested" in line and "of 50 s" in line and "--within 0" in line]
    assert len(skipped) == len(rest)


@pytest.mark.parametrize("finding", ["batch-dependent", "run-to-run"])
def test_what_a_trace_finds_between_batches_is_no_answer_to_noise(
    finding: str, embedded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where equal batches gave other bits, the step has an operator only if the trace met that, too."""
    records = traced(finding, ("repeat", "identical"))

    def search(*_: Any, write: Any, **__: Any) -> Any:
        write(records["culprits"][0])
        return SimpleNamespace(run=lambda: records["trace_verdicts"][0])

    monkeypatch.setattr(steps, "Search", search)
    monkeypatch.setattr(Diagnoser, "_arms", lambda *_: (SimpleNamespace(name="alone"), SimpleNamespace(name="again")))
    made = diagnoser(embedded, tmp_path / "run.jsonl")
    for step in run_of({"greedy": "yes", "run": "no"}).steps:
        made.writer.write(step)
    step = made.answer("operator")
    assert step.outcome == ("yes" if finding == "run-to-run" else "unknown")
    assert step.sentence.startswith("each arm was bit-identical when it was repeated") == (step.outcome == "unknown")


def test_a_limit_takes_rounds_and_values_and_says_so(
    embedded: LoadedModel, tmp_path: Path, whole: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the first round is proof, one value of each property and as many rounds as a rate takes; of a clean run,
    what fits if all take as long as the first round, and at least two rounds: completions of one are not independent. A
    diagnosis without a limit runs everything."""
    played: list[str] = []

    def tried(engine: Any, axis: Any, impl: str) -> AxisTried:
        played.extend(t.name for t in axis.trials)
        counts: dict[str, Any] = {"parted": [], "tried": 1, "traces": 0, "tokens": 0}
        return AxisTried(axis=axis.name, impl=impl, held="", values=[t.name for t in axis.trials], **counts)

    monkeypatch.setattr(steps, "try_axis", tried)
    monkeypatch.setattr(Diagnoser, "_collect", lambda _, impl, count: played.extend(["round"] * count))
    first = {"completions": [c for c in whole.completions if c.impl == "stock" and c.round == 0]}
    known = [s for s in whole.steps if s.name in ("greedy", "run")]
    alike = {"completions": [msgspec.structs.replace(c, trace=known[0].facts["trace"]) for c in first["completions"]]}
    unsure = [known[0], msgspec.structs.replace(known[1], outcome="unknown")]  # the round was not repeated: no proof
    for completions, before, within, spent, seconds, expected in [
        (first, known, 100.0, 10.0, 2.0, (5, 1)),
        (first, known, 100.0, 10.0, 3.0, (4, 1)),  # in 8 s, the last as long as the very first session, 1 s
        (first, known, 100.0, 200.0, 9.0, (2, 1)),
        (first, unsure, 100.0, 10.0, 2.0, (5, 6)),
        (first, known, 0.0, 1e6, 1e6, (5, 6)),
        (alike, known, 100.0, 10.0, 2.0, (5, 6)),
        (alike, known, 100.0, 10.0, 15.0, (4, 1)),  # until half of the limit
        (alike, known, 100.0, 200.0, 1.0, (2, 1)),
    ]:
        made = diagnoser(embedded, tmp_path / "run.jsonl", n=25, within_s=within)
        took = [msgspec.structs.replace(s, seconds=spent / 2) for s in before]
        rounds = [msgspec.structs.replace(r, seconds=seconds) for r in whole.rounds[:1]]
        monkeypatch.setattr(Diagnoser, "_so_far", run_of({}, **completions, steps=took, rounds=rounds))
        made._kept = {None: session("1" * 64, []), 0: session("1", [])}
        played.clear()
        step, axes = made.answer("batch"), made.answer("axes")
        assert played.count("round") == expected[0]
        assert sum(name.endswith("requests") and name[0].isdigit() for name in played) == expected[1]
        assert ("values of the axes run (--within 0 runs all)" in axes.facts.get("less", "")) == (expected[1] == 1)
        less = f"{expected[0]} round{'s' * (expected[0] > 1)} of 5 run (--within 0 runs all)"
        assert step.facts["less"].endswith(less) == (expected[0] < 5)
        assert step.figures["rounds"] == 1
        made.writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("beyond", tiers([512], [128]))
def test_bits_that_change_beyond_a_tile_of_keys_are_seen_by_the_long_prompt_alone(beyond: int) -> None:
    """Rows from that position on have other bits beside others: no short prompt gets there, whatever its batch."""
    model = model_of("llama", max_position_embeddings=1024)
    engine, plain = TransformersEngine(model), model.model.rotary_emb.forward

    def changed(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        far = (position_ids >= beyond).unsqueeze(-1) & (x.shape[1] > 1)
        return tuple(part + 2.0**-12 * far * part for part in plain(x, position_ids))

    axes = {axis.name: axis for axis in make_axes(parse_load("default"), range(1, 5), range(5, 69), 1024)}
    with implementation("invariant"):
        assert not try_axis(engine, axes["long prompt"], "invariant").traces
        model.model.rotary_emb.forward = changed
        assert try_axis(engine, axes["long prompt"], "invariant").traces
        assert not try_axis(engine, axes["batch size"], "invariant").traces


class Engine:
    """Answers each request with the same token, takes no keys from a cache, and fails those named."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing

    def run(self, requests: Sequence[Request], *_: Any, **__: Any) -> Session:
        ends = [{"finish": "error", "reason": "no memory"} if r.id in self.failing else {} for r in requests]
        outcomes = [session("1", [], request=r, **end).outcomes[0] for r, end in zip(requests, ends, strict=True)]
        return Session(outcomes=outcomes, steps=1, tokens=1, seconds=1.0, figures={"hits": 0})


def test_what_did_not_happen_is_no_agreement() -> None:
    """A prefix that was not shared is no trial, and a session in which any request failed ends the diagnosis."""
    axes = {axis.name: axis for axis in make_axes(parse_load("default"), range(1, 5), range(5, 69), 1024)}
    shared = try_axis(Engine(), axes["prefix sharing"], "stock")
    assert (shared.tried, shared.values) == (0, [])
    assert shared.note == "the engine took no keys from the cache: the whole prompt, its first half"
    assert try_axis(Engine(), axes["batch size"], "stock").tried == 65
    with pytest.raises(EngineStoppedError, match="t7 failed: no memory"):
        try_axis(Engine("t7"), axes["batch size"], "stock")


def test_bad_input_is_one_line(run: Command, tmp_path: Path) -> None:
    """Exit 2, what and what to try, and no run file is left behind."""
    for arguments, reason in [
        (["--n", "1"], "--n 1 makes no sense"),
        (["--load", "none"], "every request would run solo"),
        (["--load", "graphs=on"], "can't be diagnosed"),
        (["--load", "others=0,targets=1"], "every request would run solo"),
        (["--prompt", " "], "the prompt is empty"),
        (["--out", "x.txt"], "not a .jsonl file"),
        (["/no/such/model"], "there is no model folder"),
        (["--fail-on", "anything"], "unknown --fail-on"),
    ]:
        code, _, error = run("diagnose", *arguments)
        assert (code, len(error.strip().splitlines())) == (2, 1)
        assert reason in error
        assert not list(tmp_path.rglob("*.jsonl"))


def test_the_gate_opens_on_a_whole_and_clean_verdict_alone() -> None:
    """1 and why where the run was cut short, or where a case failed; tests/verdict/test_judges.py has the findings."""
    clean, undecided = "no divergence observed", "--fail-on divergent can't be decided: "
    for concluded in [
        {"diagnoses": [Diagnosis(finding=clean, whether="None.")]},
        {"trace_verdicts": [TraceVerdict(finding=clean, culprits=[], families=None, sentences=[])]},
    ]:
        assert exit_code(made_run(row([0, 0]), **concluded), "divergent") == (0, "")
        short = made_run(row([0, 0]), complete=False, **concluded)
        assert exit_code(short, "divergent") == (1, f"{undecided}the run did not finish.")
        holed = made_run(row([0, 0]), failed(), **concluded)
        assert exit_code(holed, "divergent") == (1, f"{undecided}1 case failed.")
