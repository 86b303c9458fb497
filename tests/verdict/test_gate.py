"""Exit codes hang on verdicts: a gate passes on what was compared and found good, and on nothing else."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from nondet.cli import main
from nondet.core.records import Round, Run, Status
from nondet.core.runfile import write_run
from nondet.errors import UnknownNameError, UserError
from nondet.reports import gate
from nondet.sampling.plan import parse_load
from nondet.services.sample import _COMPLETIONS
from nondet.testing.assertions import assert_no_fault
from nondet.verdict.gate import CODES, Decision, Outcome, Power, decide, exit_code
from tests.build import beside, completion, failed, header, replayed, row, run_of

WRONG: dict[str, Any] = {"status": Status.WRONG, "reason": "the result is float32, not bfloat16"}


def test_an_implementation_that_was_asked_for_and_never_ran_is_no_pass() -> None:
    """Stock agreeing shows nothing of mine:kernel, nor does a killed run of what it did not come to."""
    skipped, undecided = {"status": Status.SKIPPED, "reason": "no kernel"}, "--fail-on divergent can't be decided: "
    mine = run_of(row([0, 0]), failed(impl="mine:kernel", **skipped))
    assert exit_code(mine, "divergent") == (1, f"{undecided}nothing was compared for mine:kernel.")
    along = run_of(row([0, 0]), failed(impl="stock-cudnn", **skipped))
    assert exit_code(along, "divergent") == (0, "")
    along.header.plan["impls"] = ["stock", "stock-cudnn"]
    assert exit_code(along, "divergent")[0] == 1
    killed = run_of(row([0, 0]), complete=False)
    assert exit_code(killed, "divergent") == (1, f"{undecided}the run did not finish.")
    assert exit_code(run_of(row([0, 1]), complete=False), "divergent") == (3, "")
    assert exit_code(killed, None) == (0, "")
    with pytest.raises(AssertionError, match="did not finish"):
        assert_no_fault(killed)


def loads(
    n: int, each: int = 2, *, parted: Collection[int] = (), impl: str = "stock", prompts: int = 1, alone: bool = False
) -> Run:
    """A sampled run of so many loads with so many completions of each prompt; those numbered in `parted` differ."""
    plan = {"prompts": [{"text": f"prompt {p}", "tokens": 4} for p in range(prompts)], "impls": [impl]}
    run = Run(header=header("sample", plan), rows=[replayed(impl, each)])
    figures: dict[str, Any] = {"targets": each * prompts, "others": 0, "steps": 99, "tokens": 9, "seconds": 1.0}
    for number in range(n):
        for i in range(each * prompts):
            trace = ("f" if number * each * prompts + i in parted else "0") * 15 + str(i % prompts)
            start = 9 * i if alone else i
            fields = {"round": number, "prompt": i % prompts, "schedule": [[start, 1, 4], [start + 1, 7, 1]]}
            run.completions.append(completion(f"t{number}-{i}", trace, impl=impl, **fields))
        background = {} if alone else {"b": [[0, 2 + number % 5, 3]]}
        run.rounds.append(Round(impl=impl, round=number, background=background, **figures))
    return run


def decision(run: Run, rate: float = 0.1, confidence: float = 0.95, by: str = "load", **options: object) -> Decision:
    return decide(run, rate=rate, confidence=confidence, by=by, **options)  # type: ignore[arg-type] # of decide's own


def test_a_gate_passes_on_enough_loads_and_not_on_one_fewer() -> None:
    """29 loads beside the first see a rate of 10%; the default sample has as many as the default rate needs."""
    for rate, needed in [(0.1, 29), (0.01, 299), (0.001, 2995), (0.5, 5)]:
        for tries, enough in ((needed, True), (needed - 1, False)):
            power = Power("stock", tries, tries, rate, 0.95, "load")
            assert (power.enough, power.seen("load") >= 0.95, power.bound("load") <= rate) == (enough,) * 3
            assert power.needed == needed
    for each in (1, 2):
        assert decision(loads(30, each)).outcome == Outcome.OPEN
        short = decision(loads(29, each))
        assert (short.outcome, short.code) == (Outcome.NOT_ENOUGH, 4)
        assert "28 loads were compared, and 29 are needed" in short.reason
    assert -(-_COMPLETIONS // parse_load("default").targets) == 30
    run = loads(3, each=100)  # three loads of a hundred are three loads, but for whoever asks by request
    by_request = decision(run, 0.01, by="request")
    assert (by_request.outcome, decision(run, 0.01).outcome) == (Outcome.OPEN, Outcome.NOT_ENOUGH)
    assert "if requests were independent" in "\n".join(gate.text(by_request, run))


def test_a_sweep_has_counts_and_no_rate() -> None:
    sweep = run_of(row([0, 0, 0]))
    assert (decision(sweep).outcome, decision(sweep).power) == (Outcome.OPEN, ())
    with pytest.raises(UserError, match="no sample"):
        decision(sweep, given=True)
    for labels, fields, said in [([0, 1], {}, "batch-dependent"), ([0, 0], WRONG, "wrong"), ([0, 1], WRONG, "wrong")]:
        run = run_of(row(labels, **fields))
        assert decision(run).outcome == Outcome.SHUT
        assert gate.text(decision(run), run)[-1].startswith(f"Gate failed: stock: {said}")


def test_implementations_are_judged_alone_where_they_are_named() -> None:
    run = beside(loads(30, parted=[3]), loads(30))
    for impls, outcome in [((), "shut"), (["invariant"], "open"), (["stock", "invariant"], "shut")]:
        assert decision(run, impls=impls).outcome == outcome
    with pytest.raises(UnknownNameError, match="invariant"):
        decision(run, impls=["invarient"])


def test_what_ci_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path, few = tmp_path / "r.jsonl", tmp_path / "few.jsonl"
    write_run(path, loads(3, parted=[3], impl="<b>\x1b[31m|`x`"))
    write_run(few, loads(6))
    xml, page = tmp_path / "gate.xml", tmp_path / "summary.md"
    page.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    assert main(["gate", str(path), "--junit", str(xml), "--json"]) == 3
    told = json.loads(capsys.readouterr().out)
    assert (told["outcome"], told["code"]) == ("shut", 3)
    # scripts of CI compare these words and codes
    codes = {"open": 0, "shut": 3, "no answer": 1, "not enough": 4}
    assert {str(outcome): CODES[outcome] for outcome in Outcome} == codes
    told = json.loads(gate.as_json(decision(loads(5))))
    assert (told["outcome"], told["verdicts"][0]["findings"]) == ("not enough", ["no divergence observed"])
    said = {"by": "load", "needed": 29, "enough": False, "compared": {"load": 4, "request": 9}}
    assert told["power"] == [told["power"][0] | said]
    suite = ElementTree.parse(xml).getroot()[0]  # noqa: S314 - written a line above
    assert [suite.get(name) for name in ("tests", "failures", "errors")] == ["1", "1", "0"]
    assert suite[0][0].tag == "failure"
    text = page.read_text()
    assert text.startswith("before\n### ❌ nondet: gate failed")
    assert not [bad for bad in ("<b>", "\x1b") if bad in text + xml.read_text()]
    assert main(["gate", str(path), "--junit", str(xml)]) == 2  # it exists
    capsys.readouterr()
    xml = tmp_path / "few.xml"  # a failed test case, too
    assert main(["gate", str(few), "--junit", str(xml), "-q"]) == 4
    assert capsys.readouterr().out.startswith("Gate failed, not enough data: stock: 5 loads were compared, and 29")
    assert [case[0].tag for case in ElementTree.parse(xml).getroot()[0]] == ["system-out", "failure"]  # noqa: S314 - ours
    assert main(["gate", str(few), "--rate", "50%"]) == 0
    assert "Gate passed" in capsys.readouterr().out


def typed(run: Run, *argv: str) -> Run:
    run.header.environment["argv"] = ["nondet", "sample", *argv]
    return run


def test_too_few_names_the_command_that_is_enough() -> None:
    own = "--load heavy,targets=9 --model 'my model' --n 40 --out x.jsonl --dtype=float32"
    several = "--prompts p.txt --trust-remote-code"
    for options, prompts, by, command in [
        ("", 1, "load", "--load targets=2 --n 60"),
        (own, 1, "load", "--load heavy,targets=2 --n 60 --model 'my model' --dtype=float32"),
        (several, 5, "load", f"--load targets=2 --n 13 {several}"),
        ("--load=light", 1, "request", "--load light --n 300"),
    ]:
        run = typed(loads(3, prompts=prompts), *shlex.split(options))
        rate = 0.1 if by == "load" else 0.01
        last = gate.text(decision(run, rate, by=by), run)[-1]
        assert last.startswith("Gate failed, not enough data: ")
        assert last.endswith(f" Run: nondet sample --impl stock {command}")
        n = int(command.partition("--n ")[2].split()[0])
        if by == "load":
            subjects = [[i for i in range(n * prompts) if i % prompts == p] for p in range(prompts)]
            assert len({i // 2 for mine in subjects for i in mine if i // 2 != mine[0] // 2}) >= 29
        else:
            assert decision(loads(150), rate, by=by).outcome == Outcome.OPEN
    # prompts that ride in the rounds of the one that was chosen count for nothing. Equal batches are no try, however
    # many there are: then the default load is what varies them
    run = typed(loads(3, alone=True), "--load", "none")
    plain = gate.text(decision(run), run)[-1]
    assert plain.endswith("Run: nondet sample --impl stock --load targets=2 --n 60")
    prompts = [*run.header.plan["prompts"], {"text": "x", "tokens": 300}, {"text": "y", "tokens": 700}]
    run.header.plan.update(prompts=prompts, riders=2)
    assert gate.text(decision(run), run)[-1] == plain
