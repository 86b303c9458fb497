"""Words of verdicts: every code that a judge gives has its sentence, every sentence its judge, and facts stay facts."""

from __future__ import annotations

import ast
from pathlib import Path
from string import Formatter

import nondet.verdict
from nondet.core.records import Axis, Role, Status
from nondet.verdict.findings import Finding
from nondet.verdict.gate import judge
from nondet.verdict.wording import WORDS, reason, words
from tests.build import row, run_of

SOURCES = sorted(Path(nondet.verdict.__path__[0]).glob("*.py"))


def fields(sentence: str) -> set[str]:
    parts = [(name, spec or "") for _, name, spec, _ in Formatter().parse(sentence) if name is not None]
    return {name for name, _ in parts} | {name for _, spec in parts for name in fields(spec)}


def test_every_sentence_has_a_judge_and_every_code_its_sentence_and_numbers() -> None:
    """Codes are literals, each with a sentence whose fields are all given; no literal of several words goes in."""
    literals, codes, missed, texts = set[str](), set[str](), list[str](), list[str]()
    for path in [*SOURCES, SOURCES[0].parents[1] / "testing" / "messages.py"]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        parts = [n for n in tree.body if getattr(getattr(n, "target", None), "id", "") != "WORDS"]
        nodes = [n for part in parts for n in ast.walk(part)]
        literals |= {n.value for n in nodes if isinstance(n, ast.Constant) and n.value in WORDS}
        for call in [n for n in nodes if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "reason"]:
            given = {keyword.arg for keyword in call.keywords}
            possible = [n.value for n in ast.walk(call.args[0]) if isinstance(n, ast.Constant) and n.value in WORDS]
            missed += [code for code in possible if None not in given and not fields(WORDS[code]) <= given]
            texts += [n.value for n in ast.walk(call) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            codes |= {call.args[0].value} if isinstance(call.args[0], ast.Constant) else set()
    assert (missed, len(codes) > 80, len(texts) > 100) == ([], True, True)
    assert codes <= WORDS.keys() == literals
    assert [text for text in texts if text.count(" ") > 1] == []


def test_text_is_made_of_facts() -> None:
    [verdict] = judge(run_of(row([0, 1]), row([0, 0], case="b")))
    hits = (("linear", True), ("linear", False))
    assert verdict.counts == (reason("rows", finding=Finding.BATCH, hits=hits),)
    assert verdict.text == "batch-dependent in 1 of 2 cases (linear)"
    for n, text in [(1, "1 case failed"), (2000, "2,000 cases failed")]:
        assert words(reason("cases", n=n, what="failed")) == text
    assert words(reason("of-impls", impls=("{n}", "b"))) == " for {n}, b"


def test_findings_are_these_words_the_strongest_first() -> None:
    faults = "wrong, run-to-run nondeterministic, batch-dependent, dependent on the prefix cache, divergent, "
    faults += "dependent on what was varied, mismatched"
    others = "dependent on the order of reduction, no divergence observed, "
    others += "no divergence observed under a load that is unproven, nothing compared"
    assert ", ".join(Finding) == f"{faults}, {others}"
    assert ", ".join(f for f in Finding if f.is_fault) == faults
    # a file of another release means the same by these
    statuses = {v for k, v in vars(Status).items() if k.isupper() and isinstance(v, str)}
    assert statuses == {"identical", "divergent", "skipped", "error", "wrong", "timed"}
    assert [role.value for role in Role] == ["stock", "backend", "invariant", "part", "other"]
    assert [axis.value for axis in Axis] == ["run", "batch", "order", "other"]
