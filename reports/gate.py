"""A gate's decision for people and for CI: terminal lines, a GitHub step summary, JUnit XML, JSON."""

from __future__ import annotations

import json
import math
from xml.etree import ElementTree

from nondet.core.records import Run
from nondet.errors import one_line
from nondet.reports.document import Bit, Block, Heading, Items, Paragraph
from nondet.reports.endpoint import machine_line
from nondet.reports.markdown import blocks as as_markdown
from nondet.reports.text import SAMPLE, SERVER, own_options, repeated, verdict_data
from nondet.verdict.findings import Verdict, subject_name
from nondet.verdict.gate import Decision, Outcome, power_text
from nondet.verdict.served import is_endpoint

_WORDS = {
    Outcome.OPEN: "Gate passed",
    Outcome.SHUT: "Gate failed",
    Outcome.NO_ANSWER: "Gate has no answer",
    Outcome.NOT_ENOUGH: "Gate failed, not enough data",
}


def _why(decision: Decision, run: Run) -> str:
    command = enough_command(decision, run) if decision.outcome == Outcome.NOT_ENOUGH else ""
    return f"{decision.reason}. Run: {command}" if command else decision.reason


# Options that the larger sample, or gate of a server, takes over from the one that was too small.
_LARGER = (*SAMPLE, "--seed", "--cuda-graphs", "--no-cuda-graphs")
_OF_SERVER = (*(name for name in SERVER if name not in ("--prompt-file", "--max-tokens")), "--seed")
_TARGETS = 2  # completions of a round that make it a load: the fewest


def enough_command(decision: Decision, run: Run) -> str:
    """The sample, or the gate of a server, that gives the requested power; "" where none is known to.

    A round of two completions counts as one load, like a round of many under the same other requests. The first load of
    each prompt is the reference of its later ones, so it does not count.
    """
    short = [p for p in decision.power if not p.enough]
    if run.header.command != "sample" or not short:
        return ""
    power = short[0]
    if is_endpoint(run):
        share = (f"--rate={power.rate:g}", f"--confidence={power.confidence:g}", f"--by={power.by}")
        return repeated(run.header, "gate", *share, names=_OF_SERVER)
    words = [word for p in short for word in ("--impl", p.impl)]
    load = [word.removeprefix("--load=") for word in own_options(run.header, ["--load"])[-1:]]
    plan = run.header.plan
    listed = max(1, len(plan.get("prompts") or []))
    subjects = listed - plan.get("riders", 0) * plan.get("sampling", {}).get("seeds", 1)  # riders come with each round
    if power.by == "load":
        parts = load[0].split(",") if load and any(p.requests for p in short) else []  # of a load that varied batches
        load = [",".join([*(part for part in parts if not part.strip().startswith("targets")), f"targets={_TARGETS}"])]
        first = math.ceil(subjects / _TARGETS)  # loads that hold a prompt's first completion
        n = math.ceil((power.needed + first) * _TARGETS / subjects)
    else:
        n = math.ceil(power.needed / subjects) + 1
    words += ["--load", *load] if load else []
    return repeated(run.header, "sample", *words, "--n", str(n), names=_LARGER)


def text(decision: Decision, run: Run) -> list[str]:
    """Lines for the terminal, the decision last."""
    lines = []
    for verdict in decision.verdicts:
        lines.append(one_line(f"{_subject(verdict, run)}: {verdict.text}", 600))
        lines += [f"  {one_line(note, 400)}" for note in verdict.notes[:4]]
    if decision.outcome != Outcome.SHUT:  # after a divergence the bound on what was missed is not needed
        lines += [one_line(f"{power.impl}: {power_text(power)}", 600) for power in decision.power]
        if run.rows and not decision.power and decision.outcome == Outcome.OPEN:
            lines.append("A sweep over chosen sizes has counts and no rate: sizes that were not tried are not covered.")
    lines.append(one_line(f"{_WORDS[decision.outcome]}: {_why(decision, run)}", 1200))
    return lines


def summary(decision: Decision, run: Run) -> str:
    """Markdown for a step summary or a pull request."""
    mark = {Outcome.OPEN: "✅", Outcome.SHUT: "❌"}.get(decision.outcome, "⚠️")
    *found, why = text(decision, run)
    made: list[Block] = [
        Heading(f"{mark} nondet: {_WORDS[decision.outcome].lower()}"),
        Paragraph(Bit(why)),
        Items([Bit(line) for line in found]),
        Paragraph((Bit(f"nondet {run.header.command}", "code"), " on ", Bit(machine_line(run)))),
    ]
    return "\n\n".join(as_markdown(made)) + "\n"


def junit(decision: Decision, run: Run, seconds: float) -> str:
    """JUnit XML: a test case for each verdict, and one for the power."""
    cases: list[tuple[str, str, str, str]] = []  # name, kind of trouble, its message, its text
    for verdict in decision.verdicts:
        at_fault = verdict.is_fault if decision.above is None else verdict.impl in decision.above
        trouble = "failure" if at_fault and decision.outcome == Outcome.SHUT else ""
        cases.append((_subject(verdict, run), trouble, str(verdict.finding), "\n".join((verdict.text, *verdict.notes))))
    if decision.outcome in (Outcome.NO_ANSWER, Outcome.NOT_ENOUGH):
        kind = "error" if decision.outcome == Outcome.NO_ANSWER else "failure"
        cases.append(("power" if decision.power else "comparison", kind, decision.reason, _why(decision, run)))
    elif decision.outcome == Outcome.OPEN and decision.power:
        cases.append(("power", "", "", "\n".join(power_text(p) for p in decision.power)))
    counts = {kind: sum(case[1] == kind for case in cases) for kind in ("failure", "error")}
    named = {"name": "nondet gate", "tests": str(len(cases)), "skipped": "0", "time": f"{seconds:.3f}"}
    named |= {"failures": str(counts["failure"]), "errors": str(counts["error"])}
    root = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(root, "testsuite", named, timestamp=one_line(run.header.started, 40))
    for name, kind, message, body in cases:
        said = {"classname": one_line(f"nondet.{run.header.command}", 80), "name": one_line(name, 200), "time": "0"}
        case = ElementTree.SubElement(suite, "testcase", said)
        lines = "\n".join(one_line(line, 2000) for line in body.splitlines())
        if kind:
            ElementTree.SubElement(case, kind, message=one_line(message, 400), type=kind).text = lines
        elif body:
            ElementTree.SubElement(case, "system-out").text = lines
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def as_json(decision: Decision) -> str:
    """One JSON object on a line."""
    data = {name: getattr(decision, name) for name in ("outcome", "code", "reason")}
    data |= {"verdicts": [verdict_data(v) for v in decision.verdicts], "power": []}
    for p in decision.power:
        one = {name: getattr(p, name) for name in ("impl", "rate", "confidence", "by", "needed", "enough")}
        for name, of in (("compared", p.tries), ("seen_with", p.seen), ("excluded", p.bound)):
            one[name] = {by: of(by) for by in ("load", "request")}
        data["power"].append(one)
    return json.dumps(data, ensure_ascii=True)


def _subject(verdict: Verdict, run: Run) -> str:
    return verdict.impl + ("" if verdict.prompt is None else f", {subject_name(run.header.plan, verdict.prompt)}")
