"""A whole diagnosis: what it says of a model that parts and of one that does not, and that a killed one goes on."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from nondet.core.records import Record, Run, Step, TraceVerdict
from nondet.core.runfile import open_run, read_run
from nondet.diagnose import steps
from nondet.diagnose.steps import Budget, Diagnoser
from nondet.diagnose.verdict import QUESTIONS
from nondet.sampling.collect import describe
from nondet.sampling.implementations import implementation
from nondet.sampling.model import LoadedModel, load_model
from nondet.sampling.plan import Plan, build_plan, parse_load
from tests.diagnose.test_verdict import run_of, traced

_LOAD = "default,targets=5,others=4,spread=10,prompt=8-60,tokens=4-16,budget=32,page=4"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests share the machine, and the thread count changes bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def embedded() -> LoadedModel:
    return load_model(None, "bfloat16", "cpu")


def plan_of(loaded: LoadedModel, n: int = 10) -> tuple[Plan, dict[str, Any]]:
    text = "For example, the"
    tokens = loaded.encode(text)
    plan = build_plan(
        parse_load(_LOAD), n=n, seed=0, prompt=tokens, max_new_tokens=12, context=256, encode=loaded.encode_plain
    )
    more = {"prompt": text, "prompt_tokens": len(tokens), "max_new_tokens": 12, "seed": 0, "impls": ["stock"]}
    return plan, describe(loaded, plan, **more)


def diagnosed(loaded: LoadedModel, path: Path, *, stop_at: str = "", resume: bool = False) -> Run:
    """A diagnosis; `stop_at` kills it as the step of that name is to be written."""
    plan, described = plan_of(loaded)
    writer = open_run(path, command="diagnose", plan=described, environment={}, resume=resume)
    write = writer.write

    def write_or_die(record: Record) -> None:
        if isinstance(record, Step) and record.name == stop_at:
            raise KeyboardInterrupt
        write(record)

    writer.write = write_or_die  # type: ignore[method-assign] # a process that is killed there
    try:
        Diagnoser(loaded, plan, writer, 0, 1, lambda _: None).run()
        writer.finish()
    except KeyboardInterrupt:
        writer.close()
    return read_run(path, allow_truncated=True)


def comparable(run: Run) -> list[Any]:
    """Every record without what a clock decided."""
    records = []
    for record in run.records():
        data = msgspec.to_builtins(record)
        data.pop("seconds", None)
        if data.get("name") == "run":
            data["figures"] = {k: v for k, v in data["figures"].items() if k not in ("round_s", "alone_s")}
        if data.get("name") == "cost" or data["type"] in ("round", "trace_verdict"):
            data = {k: data[k] for k in ("type", "name", "round", "impl", "finding", "families") if k in data}
        if data["type"] == "diagnosis":
            data["cost"] = ""
        if data.get("name") == "capture":
            data["figures"], data["sentence"] = {}, re.sub(r"[\d.]+ times", "", data["sentence"])
        if data["type"] == "row":
            data["extra"] = {k: v for k, v in data["extra"].items() if "second" not in k}
        records.append(data)
    return records


def test_stock_attention_is_named_and_the_cure_holds(whole: Run) -> None:
    """The embedded model's completions depend on their batch on every CPU tried, and attention alone does it."""
    run = whole
    verdict = run.diagnoses[0]
    assert verdict.finding == "batch-dependent"
    assert run.culprits[0].family == "attention"
    assert "scaled_dot_product_attention" in verdict.why
    steps = {s.name: s for s in run.steps}
    assert list(steps) == list(QUESTIONS)
    assert steps["greedy"].outcome == steps["run"].outcome == steps["batch"].outcome == steps["cure"].outcome == "yes"
    assert steps["cure"].figures["traces"] == 1
    assert "left no divergence" in verdict.cure
    assert steps["cost"].figures["invariant_ratio"] > 0
    assert "tokens/s" in verdict.cost
    axes = {a.axis: a for a in run.axes if a.impl == "stock"}
    assert axes["batch size"].traces
    assert axes["prefix sharing"].tried == 2
    assert all(a.traces == 0 for a in run.axes if a.impl == "invariant")


def test_a_model_that_does_not_part_gets_a_clean_verdict(embedded: LoadedModel, tmp_path: Path) -> None:
    """Under the invariant implementation the same model, load and questions show nothing, and nothing is blamed."""
    with implementation("invariant"):
        run = diagnosed(embedded, tmp_path / "run.jsonl")
    verdict = run.diagnoses[0]
    assert verdict.finding == "no divergence observed"
    assert "never a proof" in verdict.whether
    assert not run.culprits
    assert not verdict.why
    assert not verdict.cure
    outcome = {s.name: s.outcome for s in run.steps}
    assert outcome["batch"] == outcome["axes"] == "no"
    assert {outcome[name] for name in ("operator", "margin", "cure", "cost")} == {"skipped"}
    assert sum(a.tried for a in run.axes) > 70  # it was not clean for want of comparisons


def test_a_killed_diagnosis_goes_on_to_the_same_records(embedded: LoadedModel, tmp_path: Path, whole: Run) -> None:
    """Steps that are on disk are not taken again, and nothing that a dead process knew is missed."""
    path, stop_at = tmp_path / "run.jsonl", "axes"
    stopped = diagnosed(embedded, path, stop_at=stop_at)
    assert stop_at not in {s.name for s in stopped.steps}
    assert not stopped.diagnoses
    before = {s.name: s.seconds for s in stopped.steps}
    resumed = diagnosed(embedded, path, resume=True)
    assert {s.name: s.seconds for s in resumed.steps if s.name in before} == before
    assert comparable(resumed) == comparable(whole)


@pytest.fixture(scope="module")
def whole(embedded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Run:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return diagnosed(embedded, tmp_path_factory.mktemp("whole") / "run.jsonl")
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("known", [4, 3])
def test_a_bound_leaves_out_what_no_longer_fits(embedded: LoadedModel, tmp_path: Path, whole: Run, known: int) -> None:
    """The seconds are gone before the trace: what is known stays said, what is not asked is said, and nothing runs."""
    plan, described = plan_of(embedded)
    writer = open_run(tmp_path / "run.jsonl", command="diagnose", plan=described, environment={})
    first = list(QUESTIONS)[:known]
    for record in (*whole.completions, *whole.rounds, *whole.rows, *(whole.axes if "axes" in first else ())):
        if record.impl == "stock":
            writer.write(record)
    for step in whole.steps:
        if step.name in first:
            writer.write(msgspec.structs.replace(step, seconds=51.0 / known))
    ticks = itertools.count(1000.0, 0.001)
    stopwatch = lambda: next(ticks)  # noqa: E731 - a clock made by hand
    Diagnoser(embedded, plan, writer, 0, 1, lambda _: None, 50.0, bound=True, clock=stopwatch).run()
    writer.finish()
    run = read_run(tmp_path / "run.jsonl")
    rest = list(QUESTIONS)[known:]
    assert {s.name: s.outcome for s in run.steps if s.name not in first} == dict.fromkeys(rest, "skipped")
    verdict = run.diagnoses[0]
    assert verdict.finding == "batch-dependent"
    assert not verdict.why
    assert not verdict.cure
    skipped = [line for line in verdict.limits if "Not asked" in line and "of 50 s" in line and "--within 0" in line]
    assert len(skipped) == len(rest)


@pytest.mark.parametrize("finding", ["batch-dependent", "run-to-run"])
def test_what_a_trace_finds_between_batches_is_no_answer_to_noise(
    finding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where equal batches gave other bits, the step has an operator only if the trace met that, too."""
    records = traced(finding, ("repeat", "identical"))

    class Found:
        late = ""

        def __init__(self, *_: Any, write: Any, **__: Any) -> None:
            write(records["culprits"][0])

        def run(self) -> TraceVerdict:
            return records["trace_verdicts"][0]  # type: ignore[no-any-return] # a test's own

    monkeypatch.setattr(steps, "Search", Found)
    monkeypatch.setattr(Diagnoser, "_arms", lambda *_: (SimpleNamespace(name="alone"), SimpleNamespace(name="again")))
    monkeypatch.setattr(Diagnoser, "engine", None)
    writer = open_run(tmp_path / "run.jsonl", command="diagnose", plan={}, environment={})
    diagnoser = Diagnoser(SimpleNamespace(model=None), Plan(parse_load(_LOAD), ()), writer, 0, 1, lambda _: None)  # type: ignore[arg-type] # no model
    diagnoser._budget = Budget()
    step = diagnoser._operator(run_of({"greedy": "yes", "run": "no"}))
    assert step.outcome == ("yes" if finding == "run-to-run" else "unknown")
    assert step.sentence.startswith("each arm came again equal while it was traced") == (step.outcome == "unknown")
