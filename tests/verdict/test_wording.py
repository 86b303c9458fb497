"""Words of verdicts: every code that a judge gives has its sentence, every sentence its judge, and facts stay facts."""

from __future__ import annotations

import ast
from pathlib import Path
from string import Formatter

import nondet.verdict
from nondet.core.records import Axis, Role, Status
from nondet.verdict.findings import Finding
from nondet.verdict.gate import judge
from nondet.verdict.wording import WORDS, phrase, reason, words
from tests.build import row, run_of
from tests.verdict.test_samples import BASE, varied
from tests.verdict.test_served import simple

SOURCES = sorted(Path(nondet.verdict.__path__[0]).glob("*.py"))


def reasons(path: Path) -> list[ast.Call]:
    """Where a source makes a reason."""
    calls = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Call)]
    return [call for call in calls if getattr(call.func, "id", "") == "reason"]


def test_every_sentence_has_a_judge_and_every_code_a_sentence() -> None:
    """Codes are literals: those in the judges (and in messages for tests) and those in the table are the same."""
    literals: set[str] = set()
    codes: set[str] = set()
    for path in [*SOURCES, SOURCES[0].parents[1] / "testing" / "messages.py"]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        table = [n for n in tree.body if isinstance(n, ast.AnnAssign) and getattr(n.target, "id", "") == "WORDS"]
        literals |= {
            n.value for part in tree.body if part not in table for n in ast.walk(part)
            if isinstance(n, ast.Constant) and isinstance(n.value, str)
        }  # fmt: skip
        codes |= {c.args[0].value for c in reasons(path) if isinstance(c.args[0], ast.Constant)}
    assert len(codes) > 80
    assert codes <= WORDS.keys()
    assert {code for code in WORDS if not code.startswith("seed-")} <= literals


def fields(sentence: str) -> set[str]:
    """What it is filled in with; a noun may hold a field as well."""
    parts = [(name, spec or "") for _, name, spec, _ in Formatter().parse(sentence) if name is not None]
    return {name for name, _ in parts} | {name for _, spec in parts for name in fields(spec)}


def test_every_sentence_is_given_its_numbers() -> None:
    """Where a reason is made its code's fields are named: none is missed only once somebody reads the verdict. They are
    names and numbers: outside the table no literal of several words goes into one."""
    missed, made, texts = [], 0, list[str]()
    for call in [call for path in SOURCES for call in reasons(path)]:
        given = {keyword.arg for keyword in call.keywords}
        codes = [n.value for n in ast.walk(call.args[0]) if isinstance(n, ast.Constant) and n.value in WORDS]
        missed += [code for code in codes if None not in given and not fields(WORDS[code]) <= given]
        made += len(codes)
        texts += [n.value for n in ast.walk(call) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    assert (missed, made > 100, len(texts) > 100) == ([], True, True)
    assert [text for text in texts if text.count(" ") > 1] == []


def test_text_is_made_of_facts() -> None:
    """What a sentence says is in the verdict as code and numbers: nobody has to read it back. One case, two thousand
    cases; braces in a name are no field."""
    [verdict] = judge(run_of(row([0, 1]), row([0, 0], case="b")))
    [clause] = verdict.counts
    hits = (("linear", True), ("linear", False))
    assert (clause.code, clause.numbers["finding"], clause.numbers["hits"]) == ("rows", Finding.BATCH, hits)
    assert verdict.text == phrase(verdict.counts) == "batch-dependent in 1 of 2 cases (linear)"
    [served] = judge(simple())
    [bound] = served.bounds
    assert (bound.code, bound.numbers["n"], bound.numbers["by"].numbers["n"]) == ("bounds", 120, 30)
    assert served.text == phrase(served.counts) + words(bound)
    [axes] = judge(varied(BASE | {"chunk=5": "AABA"}))
    assert next((c.code, c.numbers.get("n")) for c in axes.counts) == ("axes-followed", 1)
    for n, text in [(1, "1 case failed"), (2000, "2,000 cases failed")]:
        assert words(reason("cases", n=n, what="failed")) == text
        assert words(reason("of-impls", impls=("{n}", "b"))) == " for {n}, b"


# The words that run files and --json hold: whoever reads them elsewhere reads these.


def test_findings_are_these_words_the_strongest_first() -> None:
    """Each with whether a gate fails on it."""
    assert [(f.value, f.is_fault) for f in Finding] == [
        ("wrong", True),
        ("run-to-run nondeterministic", True),
        ("batch-dependent", True),
        ("dependent on the prefix cache", True),
        ("divergent", True),
        ("dependent on what was varied", True),
        ("mismatched", True),
        ("dependent on the order of reduction", False),
        ("no divergence observed", False),
        ("no divergence observed under a load that is unproven", False),
        ("nothing compared", False),
    ]
    # a file of another release means the same by these
    statuses = {v for k, v in vars(Status).items() if k.isupper() and isinstance(v, str)}
    assert statuses == {"identical", "divergent", "skipped", "error", "wrong", "timed"}
    assert [role.value for role in Role] == ["stock", "backend", "invariant", "part", "other"]
    assert [axis.value for axis in Axis] == ["run", "batch", "order", "other"]
