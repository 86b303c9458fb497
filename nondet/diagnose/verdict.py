"""The verdict of a diagnosis: a function of the records of its run file only. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from nondet.core.records import Completion, Culprit, Diagnosis, Replay, Role, Run, Step, TraceVerdict, role_of
from nondet.core.statistics import one_sided_bound, percent, percent_range, round_interval
from nondet.verdict.findings import Effect, Finding, Tally, change_of, grouped, plural, successful
from nondet.verdict.samples import repetition, replays
from nondet.verdict.wording import words

STOCK, INVARIANT = "stock", "invariant"
NOT_GREEDY, DEFECT, UNKNOWN = "not greedy", "a defect", "unknown"

NOT_MET = (
    "each arm was bit-identical when it was repeated for the trace, so the run-to-run difference was not reproduced, "
    "and what differs between the arms need not be its cause"
)

# Step -> the question that it answers, in order.
QUESTIONS: dict[str, str] = {
    "greedy": "Is greedy decoding greedy?",
    "run": "Is it deterministic from run to run?",
    "batch": "Does the batch matter?",
    "axes": "Is one property of the batch enough?",
    "operator": "Can the first operator to differ be named?",
    "margin": "Are the flips within the noise of the logits?",
    "cure": "Does batch_invariant() cure it?",
    "cost": "Is the cost measured?",
}


def run_step(run: Run, solo: Sequence[str]) -> Step:
    """Whether the same requests in the same batches gave the same bits; `solo` has the digest of each solo trace."""
    rows, traces = replays(run).get(STOCK, []), len(set(solo))
    if not rows:
        failed = next((r.reason for r in run.rows if r.impl == STOCK and r.varied == "run"), "it was not repeated")
        return Step(name="run", outcome="unknown", sentence=f"the first round could not be compared: {failed}")
    outcome = "no" if traces > 1 or any(row.differs for row in rows) else "yes"
    alone = f"the prompt solo, {len(solo)} times: {plural(traces, 'trace')}"
    return Step(name="run", outcome=outcome, sentence=f"{alone}; the first round, again: {words(repetition(rows))}")


def batch_step(run: Run) -> Step:
    """How many completions with concurrent requests differ from the solo one, by trace and by tokens."""
    solo, rounds = solo_of(run), grouped(_completions(run), lambda c: c.round).values()
    sizes, counted = list(map(len, rounds)), plural(len(rounds), "round")
    traces = [sum(c.trace != solo["trace"] for c in cs) for cs in rounds]
    tokens = [sum(c.tokens_digest != solo["tokens"] for c in cs) for cs in rounds]
    figures: dict[str, float] = {"n": sum(sizes), "rounds": len(sizes), "traces": sum(traces), "tokens": sum(tokens)}
    # of the round whose repetition was equal: differences there are attributed to the batch already
    figures["repeated_round_traces"] = traces[0] if traces else 0
    if not rounds:
        return Step(name="batch", outcome="unknown", sentence="no completion finished", figures=figures)
    by_trace, by_tokens = (
        f"({_share(hits, sizes)}), in {sum(k > 0 for k in hits)} of {counted}" for hits in (traces, tokens)
    )
    sentence = (
        f"of {plural(sum(sizes), 'completion')} in {counted}, {sum(traces)} have other logprob bits than the same "
        f"prompt solo {by_trace}; {sum(tokens)} have other tokens {by_tokens}"
    )
    return Step(name="batch", outcome="yes" if sum(traces) else "no", sentence=sentence, figures=figures)


def _share(hits: Sequence[int], sizes: Sequence[int]) -> str:
    """The interval of a rate over rounds; where none or all differed, the bound per round and per completion."""
    if any(hits) and list(hits) != list(sizes):
        return f"95%: {percent_range(*round_interval(hits, sizes))}"
    rates = map(one_sided_bound, (len(sizes), sum(sizes)))
    a, b = (f"above {percent(1.0 - rate, 'down')}" if any(hits) else f"below {percent(rate, 'up')}" for rate in rates)
    return f"at 95%, one-sided: {a} of rounds, {b} of completions if they were independent"


def cure_step(run: Run, solo: str) -> Step:
    """What is left of the divergence under the invariant implementation, whose solo trace is `solo`."""
    seen, rows = Tally(c for c in run.completions if c.impl == INVARIANT), replays(run).get(INVARIANT, [])
    traces, sizes = {*seen.traces, solo}, list(Counter(c.round for c in seen.good).values())
    axes = [a for a in run.axes if a.impl == INVARIANT]
    tried, differ = sum(a.tried for a in axes), sum(a.traces for a in axes)
    failed, lost = seen.failed.total(), seen.nonfinite  # NaN agrees with itself: that is not a fix
    diverged = len(traces) > 1 or differ or lost or any(row.differs for row in rows)
    # a sample with failures, or without a round that was repeated, shows neither that the fix works nor that it fails
    cured = not diverged and seen.n and rows and not failed
    bound = f" ({_share([0] * len(sizes), sizes)})" if cured else ""
    counted = f"{plural(len(traces), 'distinct trace')} in {plural(seen.n, 'completion')}"
    parts = [f"{counted} under load and the solo one{bound}"]
    parts += [f"on the axes where stock differs, {differ} of {tried} completions differ from the solo run"] * bool(axes)
    parts += [f"{plural(failed, 'completion')} failed"] * bool(failed)
    parts += [f"{plural(lost, 'completion')} hold NaN or infinite logprobs"] * bool(lost)
    parts.append(f"run again: {words(repetition(rows))}")
    outcome = "no" if diverged else "yes" if cured else "unknown"
    figures: dict[str, float] = {"rounds": len(sizes), "traces": len(traces)}
    return Step(name="cure", outcome=outcome, sentence="; ".join(parts), figures=figures)


def axes_step(run: Run) -> Step:
    """Which properties of the batch change the bits by themselves, and which do not."""
    tried = [a for a in run.axes if a.impl == STOCK and a.tried]
    named = [(f"{axis_title(a.axis)} ({a.traces} of {a.tried} traces)", a.traces > 0) for a in tried]
    differing, clean = (", ".join(name for name, differs in named if differs == which) for which in (True, False))
    said = [f"changing only one property changes the logprobs: {differing}"] if differing else []
    said += [f"no difference seen from changing {clean}"] if clean else []
    outcome = "yes" if differing else "no" if clean else "unknown"
    return Step(name="axes", outcome=outcome, sentence="; ".join(said) or "no property could be changed by itself")


def axis_title(name: str) -> str:
    """The name of an axis of the records in sentences."""
    return "ragged batch" if name == "ragged company" else name


def differing_round(run: Run) -> int | None:
    """The first round with a completion that is not the solo one, if possible one with other tokens."""
    solo, good = solo_of(run), _completions(run)
    differing = [(c.tokens_digest == solo["tokens"], c.round) for c in good if c.trace != solo["trace"]]
    return min(differing)[1] if differing else None


def _completions(run: Run) -> list[Completion]:
    return sorted((c for c in successful(run.completions) if c.impl == STOCK), key=lambda c: c.round)


def solo_of(run: Run) -> Mapping[str, str]:
    """The digests of the solo run, "trace" and "tokens", as the first step kept them."""
    return steps_of(run)["greedy"].facts


def steps_of(run: Run) -> dict[str, Step]:
    """Question -> the step that answers it; one without an outcome where the run ended before it."""
    missing = {name: Step(name=name, outcome="", sentence="nothing was recorded") for name in QUESTIONS}
    return missing | {s.name: s for s in run.steps}


def settled(run: Run, name: str) -> str:
    """Why the step of that name is not needed after the steps before it; "" where it is."""
    outcome = {s.name: s.outcome for s in run.steps}
    unsteady, both = outcome.get("run") == "no", (outcome.get("batch", "yes"), outcome.get("axes", "yes"))
    clean = "yes" not in both and not unsteady  # without an answer there is nothing to trace
    if outcome.get("greedy") == "no" and name != "greedy":
        return "tokens are not chosen by their logits, which has to be understood first"
    if unsteady and name in ("batch", "axes", "margin"):
        return "equal batches already give other bits, so nothing can be attributed to the batch"
    if clean and name in ("operator", "margin", "cure", "cost"):
        return "nothing diverged" if both == ("no", "no") else "nothing that was tested diverged"
    if name == "margin" and outcome.get("batch") != "yes":
        return "no completion of the load differs"
    if name == "cost" and outcome.get("cure") == "no":
        return "batch_invariant() is no cure here"
    if name == "cost" and run.header.plan.get("device") == "cuda":
        return (
            "on a GPU the host's work can outweigh the GPU's, so a ratio of such rounds is not the cost of the "
            "kernels; nondet sample --turns measures it"
        )
    return ""


def cause_of(run: Run) -> str:
    """The cause in a trace's records: a `Finding`, or that other requests' values or a wrong sum are in the result."""
    finding = run.trace_verdicts[-1].finding if run.trace_verdicts else UNKNOWN
    if finding in (Finding.CLEAN, UNKNOWN):
        return finding
    if finding == "run-to-run" or _replay(run.culprits, "repeat"):
        return Finding.RUN_TO_RUN
    return DEFECT if _replay(run.culprits, "values", "exact") else Finding.BATCH


def blamed(run: Run, finding: str) -> list[Culprit]:
    """The culprits behind the finding, in order. A culprit named between two batches is not behind a run-to-run change,
    unless it also changed by itself."""
    culprits = sorted(run.culprits, key=lambda c: c.number)
    if finding != Finding.RUN_TO_RUN or any(v.finding == "run-to-run" for v in run.trace_verdicts[-1:]):
        return culprits
    return [c for c in culprits if _replay([c], "repeat")]


def _replay(culprits: Sequence[Culprit], *names: str) -> tuple[Culprit, Replay] | None:
    return next(((c, r) for c in culprits for r in c.replays if r.name in names and r.status == "divergent"), None)


def conclude(run: Run) -> Diagnosis:
    """The verdict on the steps of the run."""
    step, axes = steps_of(run), axes_step(run)
    finding, whether = _finding(run, step)
    cures = {
        "yes": f"batch_invariant() left no divergence: {step['cure'].sentence}.",
        "no": f"batch_invariant() is no cure here: {step['cure'].sentence}.",
        "unknown": f"Whether batch_invariant() is a cure here is not known: {step['cure'].sentence}.",
    }
    cure = cures.get(step["cure"].outcome, "")
    families = step["operator"].facts.get("families", "").replace("+", " and ")
    if families and finding != Finding.RUN_TO_RUN:  # what changes by itself may be equal in one pair
        named = f"Replacing {families} by the invariant implementation"
        cure = f"{named} removes the divergence of the pair traced. {cure}".strip()
    return Diagnosis(
        finding=finding,
        whether=whether,
        where="" if finding == Finding.CLEAN or axes.outcome == "unknown" else in_sentences(axes.sentence),
        why=in_sentences(*_why(run, finding)),
        cure=cure,
        cost=in_sentences(step["cost"].sentence) if step["cost"].outcome == "yes" else "",
        limits=list(map(in_sentences, _limits(run, step))),
    )


def _finding(run: Run, step: Mapping[str, Step]) -> tuple[str, str]:
    """The finding in a word, and in a sentence. The batch is blamed only where equal batches have been seen to give
    equal bits."""
    cause, greedy, both = cause_of(run), step["greedy"].sentence, (step["batch"].outcome, step["axes"].outcome)
    if step["greedy"].outcome == "no" and step["greedy"].figures.get("nonfinite"):
        return Finding.WRONG, f"Wrong: {greedy}. Whether the batch matters was not tested."
    if step["greedy"].outcome == "no":
        return NOT_GREEDY, f"Decoding is not greedy: {greedy}."
    if step["run"].outcome == "no" or cause == Finding.RUN_TO_RUN:
        seen = step["run"].sentence
        for traced in run.trace_verdicts[-1:] if step["run"].outcome != "no" else ():
            seen, raced = "; ".join(traced.sentences), _replay(run.culprits, "repeat")
            if raced and traced.finding != "run-to-run":
                seen = f"`{raced[0].call}` of {raced[0].module}: {raced[1].sentence}"
        what = f"Run-to-run nondeterministic: {seen}. Whether the batch matters too is not known."
        return Finding.RUN_TO_RUN, what
    batch = step["batch"].sentence
    if both == ("no", "no"):
        axes = f"{axes_step(run).sentence}. This is an observation on this load, not a proof."
        return Finding.CLEAN, f"No divergence observed: {batch}; {axes}"
    if "yes" not in both:
        return UNKNOWN, "Not known: a step that is needed has no answer."
    if both[0] != "yes":
        batch = "not in the load as sampled, but where one property of the batch was changed"
    repeated_equal = step["batch"].figures.get("repeated_round_traces") and step["run"].outcome == "yes"
    if cause in (DEFECT, Finding.BATCH) or repeated_equal:
        return cause if cause == DEFECT else Finding.BATCH, f"Batch-dependent: {batch}."
    return Finding.UNATTRIBUTED, f"Divergent, because of the batch or from run to run: {batch}."


def _why(run: Run, finding: str) -> list[str]:
    """The first responsible call, what the replays found, and the flips."""
    culprits, step = blamed(run, finding), steps_of(run)
    named, parts = next((c for c in culprits if c.call), None), list[str]()
    if named is not None:
        shown = ("repeat", "rows only", "values", "exact", "tree")
        parts = [f"the first operator to differ: {named.sentence}"]
        parts += [r.sentence for r in named.replays if r.name in shown and r.status != "error"]
    elif run.culprits or step["operator"].outcome in ("no", "unknown"):
        unnamed = culprits[0].sentence if culprits else NOT_MET if run.culprits else step["operator"].sentence
        parts = [f"no operator could be named: {unnamed}"]
    return parts + ([step["margin"].sentence] if step["margin"].outcome in ("yes", "no") else [])


def _limits(run: Run, step: Mapping[str, Step]) -> list[str]:
    kinds = {"skipped": "Not tested: ", "unknown": "No answer: "}
    lines = [f"{QUESTIONS[n]} {kinds[s.outcome]}{s.sentence}" for n, s in step.items() if s.outcome in kinds]
    lines += [f"{axis_title(a.axis)}: {a.note}" for a in run.axes if a.note]
    lines += [s.facts["less"] for s in run.steps if s.facts.get("less")]
    lines += [f"{QUESTIONS[name]} The run ended before it" for name in QUESTIONS if not step[name].outcome]
    lines.append("This covers one prompt, one load, one machine and these versions: other sizes may use other kernels")
    return lines


def in_sentences(*parts: str) -> str:
    """Each part as a sentence; "" where there is none."""
    return " ".join(f"{part[:1].upper()}{part[1:]}." for part in parts if part)


def diagnosed_effect(run: Run, finding: str) -> Effect:
    """What a diagnosis shows to change: in stock's completions, by the figures of its steps."""
    named = {Finding.WRONG: Effect.WRONG, DEFECT: Effect.WRONG, Finding.CLEAN: Effect.NONE}
    named |= {NOT_GREEDY: Effect.NOT_GREEDY, UNKNOWN: Effect.UNKNOWN}
    other = [s.figures.get("tokens", 0) for s in run.steps if s.name == "batch"]
    other += [a.tokens for a in run.axes if role_of(a.impl) in (Role.STOCK, Role.BACKEND)]
    return named.get(finding) or change_of(2 if any(other) else 1, (finding,))


def traced_effect(run: Run, verdict: TraceVerdict) -> Effect:
    """What a trace shows to change: by what its controls saw of the two arms and of the concurrent requests."""
    if not verdict.is_fault:
        return Effect.UNKNOWN if verdict.is_fault is None else Effect.NONE
    figures_of = {c.name: c.figures for c in run.controls}
    first, beside = figures_of.get("parting", {}), figures_of.get("company", {})
    if first.get("first_token", -1) >= 0 or beside.get("tokens", 0):
        return Effect.OUTPUT
    return Effect.LOGPROBS if first.get("first_logprob", -1) >= 0 and beside else Effect.MODEL
