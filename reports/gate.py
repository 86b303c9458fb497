"""A gate's decision for people and for CI: terminal lines, a GitHub step summary, JUnit XML, JSON."""

from __future__ import annotations

import json
from xml.etree import ElementTree

from nondet.core.records import Run
from nondet.core.statistics import percent
from nondet.errors import one_line
from nondet.reports.text import code, environment_line, escape, table
from nondet.verdict.findings import Verdict, subject_name
from nondet.verdict.gate import Decision, Outcome, power_text

_WORDS = {
    Outcome.OPEN: "open: no divergence observed",
    Outcome.SHUT: "shut: it diverged, or is wrong",
    Outcome.NO_ANSWER: "no answer",
    Outcome.NOT_ENOUGH: "not enough was compared",
}


def text(decision: Decision, run: Run) -> list[str]:
    """Lines for the terminal, the decision last."""
    lines = []
    for verdict in decision.verdicts:
        lines.append(one_line(f"{_subject(verdict, run)}: {verdict.text}", 600))
        lines += [f"  {one_line(note, 400)}" for note in verdict.notes[:4]]
    if decision.outcome != Outcome.SHUT:  # where something diverged there is nothing that might have been missed
        lines += [one_line(f"{power.impl}: {power_text(power)}", 600) for power in decision.power]
        if not decision.power and decision.outcome == Outcome.OPEN:
            lines.append(
                "A sweep over chosen sizes has counts, and no rate: nothing is said of sizes that were not tried."
            )
    lines.append(one_line(f"gate {_WORDS[decision.outcome]}: {decision.reason}", 800))
    return lines


def summary(decision: Decision, run: Run) -> str:
    """Markdown for a step summary or a pull request."""
    marks = {Outcome.OPEN: "✅", Outcome.SHUT: "❌"}
    blocks = [f"### {marks.get(decision.outcome, '⚠️')} nondet gate {_WORDS[decision.outcome]}"]
    blocks.append(escape(decision.reason, 1500))
    rows = [(escape(_subject(v, run), 200), escape(v.text, 600)) for v in decision.verdicts]
    blocks.append(table(("what", "finding"), rows))
    if decision.power:
        head = ("", "unit", "compared", "would have been seen with", "excluded")
        blocks.append(
            table(
                head,
                [
                    (
                        escape(p.impl, 100),
                        f"{by}s{'' if by == 'load' else ', if independent'}",
                        f"{p.tries(by):,}",
                        f"{percent(p.rate)}: {percent(p.seen(by), 'down')}",
                        f"{percent(p.bound(by), 'up')} and more, at {percent(p.confidence)}",
                    )
                    for p in decision.power
                    for by in ("load", "request")
                ],
            )
        )
    where = escape(environment_line(run.header.environment))
    blocks.append(f"{code(f'nondet {run.header.command}', cell=False)} on {where}")
    return "\n\n".join(blocks) + "\n"


def junit(decision: Decision, run: Run, seconds: float) -> str:
    """JUnit XML: a test case for each verdict, and one for the power."""
    cases: list[tuple[str, str, str, str]] = []  # name, kind of trouble, its message, its text
    for verdict in decision.verdicts:
        trouble = "failure" if verdict.is_fault and decision.outcome == Outcome.SHUT else ""
        cases.append((_subject(verdict, run), trouble, str(verdict.finding), "\n".join((verdict.text, *verdict.notes))))
    if decision.outcome in (Outcome.NO_ANSWER, Outcome.NOT_ENOUGH):
        kind = "error" if decision.outcome == Outcome.NO_ANSWER else "failure"
        cases.append(("power" if decision.power else "comparison", kind, decision.reason, decision.reason))
    elif decision.outcome == Outcome.OPEN and decision.power:
        cases.append(("power", "", "", "\n".join(power_text(p) for p in decision.power)))
    counts = {kind: sum(case[1] == kind for case in cases) for kind in ("failure", "error")}
    suite = ElementTree.Element(
        "testsuite",
        name="nondet gate",
        tests=str(len(cases)),
        failures=str(counts["failure"]),
        errors=str(counts["error"]),
        skipped="0",
        time=f"{seconds:.3f}",
        timestamp=one_line(run.header.started, 40),
    )
    for name, kind, message, body in cases:
        said = {"classname": one_line(f"nondet.{run.header.command}", 80), "name": one_line(name, 200), "time": "0"}
        case = ElementTree.SubElement(suite, "testcase", said)
        if kind:
            ElementTree.SubElement(case, kind, message=one_line(message, 400), type=kind).text = _lines(body)
        elif body:
            ElementTree.SubElement(case, "system-out").text = _lines(body)
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _lines(body: str) -> str:
    """Text that XML can hold: no control character, each line by itself."""
    return "\n".join(one_line(line, 2000) for line in body.splitlines())


def as_json(decision: Decision) -> str:
    """One JSON object on a line."""
    return json.dumps(
        {
            "outcome": decision.outcome,
            "code": decision.code,
            "reason": decision.reason,
            "verdicts": [
                {"impl": v.impl, "prompt": v.prompt, "findings": list(v.findings), "text": v.text, "notes": v.notes}
                for v in decision.verdicts
            ],
            "power": [
                {
                    "impl": p.impl,
                    "rate": p.rate,
                    "confidence": p.confidence,
                    "by": p.by,
                    "needed": p.needed,
                    "enough": p.enough,
                    "compared": {by: p.tries(by) for by in ("load", "request")},
                    "seen_with": {by: p.seen(by) for by in ("load", "request")},
                    "excluded": {by: p.bound(by) for by in ("load", "request")},
                }
                for p in decision.power
            ],
        },
        ensure_ascii=True,
    )


def _subject(verdict: Verdict, run: Run) -> str:
    return (
        verdict.impl if verdict.prompt is None else f"{verdict.impl}, {subject_name(run.header.plan, verdict.prompt)}"
    )
