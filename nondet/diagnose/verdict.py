"""What a diagnosis may say: a function of the records of its run file, and no further than they go. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from nondet.core.records import AxisTried, Culprit, Diagnosis, Replay, Run, Step
from nondet.core.statistics import one_sided_bound, percent
from nondet.sampling.analysis import coverage_of
from nondet.verdict import Finding, plural

__all__ = [
    "DEFECT", "NOT_GREEDY", "NOT_MET", "QUESTIONS", "UNKNOWN", "blamed", "cause_of", "conclude", "coverage_gaps",
    "settled",
]  # fmt: skip

NOT_GREEDY, DEFECT, UNKNOWN = "not greedy", "a defect", "unknown"

NOT_MET = (
    "each arm came again equal while it was traced, so what changes from run to run was not met, and what differs "
    "between the arms need not be it"
)

# Step -> the question that it answers, in the order in which they are asked.
QUESTIONS: dict[str, str] = {
    "greedy": "Is greedy decoding greedy?",
    "run": "Is it deterministic from run to run?",
    "batch": "Does the batch matter?",
    "axes": "Does one property of the batch do it alone?",
    "operator": "Can the guilty operator be named?",
    "margin": "Are the flips within the noise of the logits?",
    "cure": "Does batch_invariant() cure it?",
    "cost": "Is the cost measured?",
}


def settled(run: Run, name: str) -> str:
    """Why the step of that name need not be taken, going by the steps before it; "" where it has to be."""
    outcome = {s.name: s.outcome for s in run.steps}
    if outcome.get("greedy") == "no":
        return "" if name == "greedy" else "tokens are not chosen by their logits: that comes first"
    if outcome.get("run") == "no" and name in ("batch", "axes", "margin"):
        return "equal batches give other bits already, so that nothing can be laid to the batch"
    asked = "batch" in outcome and "axes" in outcome and outcome.get("run") != "no"
    clean = asked and "yes" not in (outcome["batch"], outcome["axes"])  # what has no answer gives nothing to trace
    if clean and name in ("operator", "margin", "cure", "cost"):
        both = outcome["batch"] == outcome["axes"] == "no"
        return "nothing diverged" if both else "nothing that was asked diverged"
    if name == "margin" and outcome.get("batch") != "yes":
        return "no completion of the load parted"
    if name == "cost" and outcome.get("cure") == "no":
        return "it is no cure here"
    return ""


def coverage_gaps(run: Run, impl: str) -> list[str]:
    """What an invariant implementation left stock without proof, with counts: "at risk: mm bfloat16 (12)"."""
    groups = coverage_of(run, impl)
    unproven = (g for g in groups if g not in ("replaced", "certified stock"))
    return [f"{group}: {name} ({n:,})" for group in unproven for name, n in groups[group].most_common()]


def cause_of(run: Run) -> str:
    """What a trace's records come to: a `Finding`, or that other people's values or a wrong sum are in the result."""
    if not run.trace_verdicts:
        return UNKNOWN
    finding = run.trace_verdicts[-1].finding
    if finding in (Finding.CLEAN, UNKNOWN):
        return finding
    if finding == "run-to-run" or _replay(run.culprits, "repeat"):
        return Finding.RUN_TO_RUN
    if _replay(run.culprits, "values") or _replay(run.culprits, "exact"):
        return DEFECT
    return Finding.BATCH


def blamed(run: Run, finding: str) -> list[Culprit]:
    """The culprits that are behind the finding, in order.

    What a trace named between two batches is not behind what changes from run to run, unless it did so alone, too.
    """
    culprits = sorted(run.culprits, key=lambda c: c.number)
    if finding != Finding.RUN_TO_RUN or any(v.finding == "run-to-run" for v in run.trace_verdicts[-1:]):
        return culprits
    return [c for c in culprits if _replay([c], "repeat")]


def conclude(run: Run) -> Diagnosis:
    """The verdict on the steps that there are."""
    step = {s.name: s for s in run.steps}
    axes = [a for a in run.axes if a.impl == "stock"]
    finding = _finding(run, step)
    whether = {
        NOT_GREEDY: f"Decoding is not greedy: {_said(step, 'greedy')}.",
        Finding.WRONG: f"Wrong: {_said(step, 'greedy')}. Whether the batch matters was not asked.",
        Finding.RUN_TO_RUN: f"Run-to-run nondeterministic: {_unsteady(run, step)}. Whether the batch matters beside "
        "that, nothing here can say.",
        UNKNOWN: "Not known: a step that had to be taken has no answer.",
        Finding.UNATTRIBUTED: f"Divergent, by the batch or from run to run: {_said(step, 'batch')}.",
    }
    if finding == Finding.CLEAN:
        return Diagnosis(finding=finding, whether=_clean(step, axes), limits=_limits(run, step))
    parted = "not in the load as sampled, but where one thing about the company was varied"
    if _is(step, "batch", "yes"):
        parted = step["batch"].sentence
    return Diagnosis(
        finding=finding,
        whether=whether.get(finding, f"Batch-dependent: {parted}."),
        where=_where(step, axes),
        why=_why(run, finding),
        cure=_cure(step, finding),
        cost=_cost(step),
        limits=_limits(run, step),
    )


def _finding(run: Run, step: dict[str, Step]) -> str:
    """In a word. The batch is blamed only where equal batches have been seen to give equal bits."""
    if _is(step, "greedy", "no"):
        return Finding.WRONG if step["greedy"].figures.get("nonfinite") else NOT_GREEDY
    cause = cause_of(run)
    if _is(step, "run", "no") or cause == Finding.RUN_TO_RUN:
        return Finding.RUN_TO_RUN
    if not (_is(step, "batch", "yes") or _is(step, "axes", "yes")):
        return Finding.CLEAN if _is(step, "batch", "no") and _is(step, "axes", "no") else UNKNOWN
    if cause in (DEFECT, Finding.BATCH):
        return cause
    repeated = step["batch"].figures.get("repeated_round_traces", 0) if "batch" in step else 0
    return Finding.BATCH if repeated and _is(step, "run", "yes") else Finding.UNATTRIBUTED


def _unsteady(run: Run, step: dict[str, Step]) -> str:
    if _is(step, "run", "no") or not run.trace_verdicts:
        return _said(step, "run")
    repeated = [(c, r) for c in run.culprits for r in c.replays if r.name == "repeat" and r.status == "divergent"]
    if repeated and run.trace_verdicts[-1].finding != "run-to-run":
        return f"`{repeated[0][0].call}` of {repeated[0][0].module}: {repeated[0][1].sentence}"
    return "; ".join(run.trace_verdicts[-1].sentences)


def _clean(step: dict[str, Step], axes: Sequence[AxisTried]) -> str:
    figures = step["batch"].figures
    n, rounds = int(figures["n"]), int(figures["rounds"])
    tried = ", ".join(f"{a.axis} {a.tried}" for a in axes if a.tried)
    return (
        f"No divergence observed: {plural(n, 'completion')} in {plural(rounds, 'round')} have the tokens and "
        f"logprob bits of the same prompt alone (at 95%, one-sided: below {percent(one_sided_bound(rounds), 'up')} of "
        f"rounds, below {percent(one_sided_bound(n), 'up')} of completions if they were independent), and so do all "
        f"completions with one thing varied ({tried}). That is an observation on this load, never a proof."
    )


def _where(step: dict[str, Step], axes: Sequence[AxisTried]) -> str:
    parts = []
    margin = step.get("margin")
    if margin is not None and margin.figures.get("first_flip", -1) >= 0:
        parts.append(f"the first token that flips is token {int(margin.figures['first_flip'])}")
    parted = [f"{a.axis} ({a.traces} of {a.tried} traces)" for a in axes if a.traces]
    clean = [f"{a.axis} (0 of {a.tried})" for a in axes if a.tried and not a.traces]
    if parted:
        parts.append(f"varied by itself, enough to change bits: {', '.join(parted)}")
    if clean:
        parts.append(f"no difference seen from {', '.join(clean)}")
    return _sentence("; ".join(parts))


def _why(run: Run, finding: str) -> str:
    """The first guilty call, the list where there are more, what the replays found, and the flips."""
    culprits = blamed(run, finding)
    named = [c for c in culprits if c.call]
    parts = []
    if run.culprits and not culprits:
        parts.append(f"No operator could be named: {NOT_MET}.")
    elif named:
        parts.append(_sentence(f"The first guilty operator: {named[0].sentence}"))
        if len(named) > 1:
            parts.append(_sentence("after it " + ", ".join(f"`{c.call}` of {c.module}" for c in named[1:])))
        telling = [r for r in named[0].replays if r.name in ("repeat", "rows only", "values", "exact")]
        parts += [_sentence(r.sentence) for r in telling if r.status != "error"]
    elif culprits:
        parts.append(_sentence(f"No operator could be named: {culprits[0].sentence}"))
    elif run.trace_verdicts:
        parts.append(_sentence(f"No operator could be named: {'; '.join(run.trace_verdicts[-1].sentences)}"))
    margin = next((s for s in run.steps if s.name == "margin" and s.outcome in ("yes", "no")), None)
    if margin is not None:
        parts.append(_sentence(margin.sentence))
        if margin.outcome == "no":
            parts.append("A flip beyond the noise measured is more than this rounding explains.")
    return " ".join(parts)


def _cure(step: dict[str, Step], finding: str) -> str:
    cure, operator = step.get("cure"), step.get("operator")
    parts = []
    families = operator.facts.get("families", "") if operator is not None else ""
    if families and finding != Finding.RUN_TO_RUN:  # what changes by itself may have been quiet in one pair
        named = families.replace("+", " and ")
        parts.append(f"Replacing {named} by the invariant implementation removes the divergence of the pair traced.")
    if cure is None or cure.outcome == "skipped":
        return " ".join(parts)
    lead = {
        "yes": "batch_invariant() left no divergence",
        "unknown": "whether batch_invariant() is a cure here is not known",
    }.get(cure.outcome, "batch_invariant() is no cure here")
    return " ".join([*parts, f"{lead}: {cure.sentence}."])


def _cost(step: dict[str, Step]) -> str:
    cost = step.get("cost")
    return _sentence(cost.sentence) if cost is not None and cost.outcome == "yes" else ""


def _limits(run: Run, step: dict[str, Step]) -> list[str]:
    lines = [f"{QUESTIONS[name]} Not asked: {s.sentence}." for name, s in step.items() if s.outcome == "skipped"]
    lines += [f"{QUESTIONS[name]} No answer: {s.sentence}." for name, s in step.items() if s.outcome == "unknown"]
    lines += [f"{a.axis}: {a.note}." for a in run.axes if a.note]
    lines += [_sentence(s.facts["less"]) for s in run.steps if s.facts.get("less")]
    lines += [f"{QUESTIONS[name]} The run ended before it." for name in QUESTIONS if name not in step]
    lines.append("One prompt, one load, this machine and these versions: other sizes may take other kernels.")
    return lines


def _replay(culprits: Sequence[Culprit], name: str) -> Replay | None:
    """The first replay of that name that came out otherwise."""
    replays = (r for c in culprits for r in c.replays if r.name == name)
    return next((r for r in replays if r.status == "divergent"), None)


def _is(step: dict[str, Step], name: str, outcome: str) -> bool:
    return name in step and step[name].outcome == outcome


def _said(step: dict[str, Step], name: str) -> str:
    return step[name].sentence if name in step else "nothing was recorded"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""
