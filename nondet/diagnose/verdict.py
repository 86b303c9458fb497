"""The verdict of a diagnosis: a function of the records of its run file only. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nondet.core.records import (
    AxisTried,
    Completion,
    Culprit,
    Diagnosis,
    Replay,
    Role,
    Run,
    Step,
    TraceVerdict,
    role_of,
)
from nondet.core.statistics import one_sided_bound, percent, percent_range, round_interval
from nondet.sampling.analysis import coverages
from nondet.verdict.findings import Effect, Finding, change_of, plural, successful
from nondet.verdict.samples import replays


def run_step(run: Run, impl: str, solo: Sequence[str]) -> Step:
    """Whether the same requests in the same batches gave the same bits; `solo` has the digest of each solo trace."""
    rows = replays(run).get(impl, [])
    if not rows:
        failed = next((r.reason for r in run.rows if r.impl == impl and r.varied == "run"), "it was not repeated")
        return Step(name="run", outcome="unknown", sentence=f"the first round could not be compared: {failed}")
    round_differs, traces = any(row.differs for row in rows), len(set(solo))
    requests, other = (sum(int(r.extra.get(key, 0)) for r in rows) for key in ("requests", "requests_parted"))
    seen = f"{other} of {requests} requests differ" if round_differs else f"all {requests} requests equal in every bit"
    return Step(
        name="run",
        outcome="no" if round_differs or traces > 1 else "yes",
        sentence=f"the prompt solo, {len(solo)} times: {plural(traces, 'trace')}; the first round, twice: {seen}",
        figures={"alone": len(solo), "alone_traces": traces, "requests": requests, "requests_parted": other},
    )


def batch_step(run: Run, impl: str, solo: Mapping[str, str]) -> Step:
    """How many completions with concurrent requests differ from the solo one, by its digests "trace" and "tokens"."""
    good = _completions(run, impl)
    rounds = [[c for c in good if c.round == number] for number in sorted({c.round for c in good})]
    sizes = list(map(len, rounds))
    traces = [sum(c.trace != solo["trace"] for c in cs) for cs in rounds]
    tokens = [sum(c.tokens_digest != solo["tokens"] for c in cs) for cs in rounds]
    hit_traces, hit_tokens = (sum(k > 0 for k in hits) for hits in (traces, tokens))
    figures: dict[str, float] = {
        "n": len(good),
        "rounds": len(rounds),
        "traces": sum(traces),
        "tokens": sum(tokens),
        "rounds_traces": hit_traces,
        "rounds_tokens": hit_tokens,
        # of the round whose repetition was equal: differences there are attributed to the batch already
        "repeated_round_traces": traces[0] if traces else 0,
        "distinct_traces": len({c.trace for c in good}),
        "distinct_completions": len({c.tokens_digest for c in good}),
    }
    if not good:
        return Step(name="batch", outcome="unknown", sentence="no completion finished", figures=figures)
    in_rounds = plural(len(rounds), "round")
    sentence = (
        f"of {plural(len(good), 'completion')} in {in_rounds}, {sum(traces)} have other logprob bits than the same "
        f"prompt solo ({_share(traces, sizes)}), in {hit_traces} of {in_rounds}; {sum(tokens)} have other tokens "
        f"({_share(tokens, sizes)}), in {hit_tokens} of {in_rounds}"
    )
    return Step(name="batch", outcome="yes" if sum(traces) else "no", sentence=sentence, figures=figures)


def cure_step(run: Run, impl: str, solo: str, gaps: Sequence[str]) -> Step:
    """What is left of the divergence under `impl`, whose solo trace is `solo` and which left `gaps` stock."""
    good, rows = _completions(run, impl), replays(run).get(impl, [])
    traces, rounds = {c.trace for c in good} | {solo}, len({c.round for c in good})
    unsteady = any(row.differs for row in rows)
    axes = [a for a in run.axes if a.impl == impl]
    tried, differ = sum(a.tried for a in axes), sum(a.traces for a in axes)
    failed = sum(c.impl == impl and c.status != "ok" for c in run.completions)
    lost = sum(c.nonfinite > 0 for c in good)  # NaN agrees with itself: that is not a fix
    diverged = len(traces) > 1 or unsteady or bool(differ) or bool(lost)
    # a sample with failures, or without a round whose repetition was equal, shows neither that the fix works nor that
    # it fails
    cured = not diverged and bool(good) and bool(rows) and not failed
    bound = f" ({_bounds(rounds, len(good))})" if cured else ""
    counted = f"{plural(len(traces), 'distinct trace')} in {plural(len(good), 'completion')}"
    parts = [f"{counted} under load and the solo one{bound}"]
    if axes:
        parts.append(f"on the axes where stock differs, {differ} of {tried} completions differ from the solo run")
    parts += [f"{plural(failed, 'completion')} failed"] if failed else []
    parts += [f"{plural(lost, 'completion')} hold NaN or infinite logprobs"] if lost else []
    again = f"the first round, repeated, {'differs from itself' if unsteady else 'is bit-identical'}"
    coverage = "complete: no call was left stock without proof, none is at risk"
    coverage = f"not complete: {', '.join(gaps)}" if gaps else coverage
    parts += [again if rows else "no round was repeated", f"its coverage is {coverage}"]
    figures: dict[str, float] = {"n": len(good), "rounds": rounds, "traces": len(traces), "gaps": len(gaps)}
    figures |= {"axes_tried": tried, "axes_traces": differ, "unsteady": int(unsteady)}
    return Step(
        name="cure",
        outcome="no" if diverged else "yes" if cured else "unknown",
        sentence="; ".join(parts),
        figures=figures,
        facts={"gaps": "; ".join(gaps)},
    )


def differing_rounds(run: Run, impl: str, solo: Mapping[str, str]) -> list[int]:
    """Rounds with a completion that is not the solo one: those with other tokens first, then by number."""
    good = _completions(run, impl)
    tokens = {c.round for c in good if c.tokens_digest != solo.get("tokens")}
    traces = {c.round for c in good if c.trace != solo.get("trace")}
    return sorted(traces, key=lambda number: (number not in tokens, number))


def _completions(run: Run, impl: str) -> list[Completion]:
    return [c for c in successful(run.completions) if c.impl == impl]


def _share(hits: Sequence[int], sizes: Sequence[int]) -> str:
    """The interval of a rate over rounds; where none or all differed, the bound per round and per completion."""
    if any(hits) and list(hits) != list(sizes):
        return f"95%: {percent_range(*round_interval(hits, sizes))}"
    return _bounds(len(sizes), sum(sizes), none=not any(hits))


def _bounds(rounds: int, completions: int, *, none: bool = True) -> str:
    """What is excluded where none differed, or all did."""
    rates = map(one_sided_bound, (rounds, completions))
    a, b = (f"below {percent(rate, 'up')}" if none else f"above {percent(1.0 - rate, 'down')}" for rate in rates)
    return f"at 95%, one-sided: {a} of rounds, {b} of completions if they were independent"


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


def steps_of(run: Run) -> dict[str, Step]:
    """Question -> the step that answers it; one without an outcome where the run ended before it."""
    missing = {name: Step(name=name, outcome="", sentence="nothing was recorded") for name in QUESTIONS}
    return missing | {s.name: s for s in run.steps}


def settled(run: Run, name: str) -> str:
    """Why the step of that name is not needed after the steps before it; "" where it is."""
    outcome = {s.name: s.outcome for s in run.steps}
    unsteady, both = outcome.get("run") == "no", (outcome.get("batch", "yes"), outcome.get("axes", "yes"))
    clean = "yes" not in both and not unsteady  # without an answer there is nothing to trace
    if outcome.get("greedy") == "no":
        return "" if name == "greedy" else "tokens are not chosen by their logits, which has to be understood first"
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
            "on a GPU each call of a diagnosis is launched from the host, whose work can outweigh the GPU's, so a "
            "ratio of such rounds is not the cost of the kernels; nondet sample --turns measures it"
        )
    return ""


def axis_title(name: str) -> str:
    """The name of an axis of the records in sentences."""
    return "ragged batch" if name == "ragged company" else name


def coverage_gaps(run: Run, impl: str) -> list[str]:
    """What an invariant implementation left stock without proof, with counts: "at risk: mm bfloat16 (12)"."""
    groups = coverages(run).get(impl, {})
    unproven = (g for g in groups if g not in ("replaced", "certified stock"))
    return [f"{group}: {name} ({n:,})" for group in unproven for name, n in groups[group].most_common()]


def cause_of(run: Run) -> str:
    """The cause in a trace's records: a `Finding`, or that other requests' values or a wrong sum are in the result."""
    finding = run.trace_verdicts[-1].finding if run.trace_verdicts else UNKNOWN
    if finding in (Finding.CLEAN, UNKNOWN):
        return finding
    if finding == "run-to-run" or _replay(run.culprits, "repeat"):
        return Finding.RUN_TO_RUN
    return DEFECT if _replay(run.culprits, "values") or _replay(run.culprits, "exact") else Finding.BATCH


def blamed(run: Run, finding: str) -> list[Culprit]:
    """The culprits behind the finding, in order. A culprit named between two batches is not behind a run-to-run change,
    unless it also changed by itself."""
    culprits = sorted(run.culprits, key=lambda c: c.number)
    if finding != Finding.RUN_TO_RUN or any(v.finding == "run-to-run" for v in run.trace_verdicts[-1:]):
        return culprits
    return [c for c in culprits if _replay([c], "repeat")]


def conclude(run: Run) -> Diagnosis:
    """The verdict on the steps of the run."""
    step = steps_of(run)
    axes = [a for a in run.axes if a.impl == "stock"]
    finding, limits = _finding(run, step), _limits(run, step)
    if finding == Finding.CLEAN:
        return Diagnosis(finding=finding, whether=_clean(step, axes), limits=limits)
    greedy, batch = step["greedy"].sentence, step["batch"].sentence
    how = "not in the load as sampled, but where one property of the batch was changed"
    whether = {
        NOT_GREEDY: f"Decoding is not greedy: {greedy}.",
        Finding.WRONG: f"Wrong: {greedy}. Whether the batch matters was not tested.",
        Finding.RUN_TO_RUN: f"Run-to-run nondeterministic: {_unsteady(run, step)}. Whether the batch matters too is "
        "not known.",
        UNKNOWN: "Not known: a step that is needed has no answer.",
        Finding.UNATTRIBUTED: f"Divergent, because of the batch or from run to run: {batch}.",
    }.get(finding, f"Batch-dependent: {batch if step['batch'].outcome == 'yes' else how}.")
    return Diagnosis(
        finding=finding,
        whether=whether,
        where=_where(step, axes),
        why=_why(run, finding),
        cure=_cure(step, finding),
        cost=_cost(step),
        limits=limits,
    )


def _finding(run: Run, step: Mapping[str, Step]) -> str:
    """The finding in a word. The batch is blamed only where equal batches have been seen to give equal bits."""
    if step["greedy"].outcome == "no":
        return Finding.WRONG if step["greedy"].figures.get("nonfinite") else NOT_GREEDY
    cause, both = cause_of(run), (step["batch"].outcome, step["axes"].outcome)
    if step["run"].outcome == "no" or cause == Finding.RUN_TO_RUN:
        return Finding.RUN_TO_RUN
    if "yes" not in both:
        return Finding.CLEAN if both == ("no", "no") else UNKNOWN
    if cause in (DEFECT, Finding.BATCH):
        return cause
    repeated = step["batch"].figures.get("repeated_round_traces", 0)
    return Finding.BATCH if repeated and step["run"].outcome == "yes" else Finding.UNATTRIBUTED


def diagnosed_effect(run: Run, finding: str) -> Effect:
    """What a diagnosis shows to change: in stock's completions, by the figures of its steps."""
    named = {Finding.WRONG: Effect.WRONG, DEFECT: Effect.WRONG, Finding.CLEAN: Effect.NONE}
    named |= {NOT_GREEDY: Effect.NOT_GREEDY, UNKNOWN: Effect.UNKNOWN}
    if finding in named:
        return named[finding]
    other = [s.figures.get("tokens", 0) for s in run.steps if s.name == "batch"]
    other += [a.tokens for a in run.axes if role_of(a.impl) in (Role.STOCK, Role.BACKEND)]
    return change_of(2 if any(other) else 1, (finding,))


def traced_effect(run: Run, verdict: TraceVerdict) -> Effect:
    """What a trace shows to change: by what its controls saw of the two arms and of the concurrent requests."""
    if not verdict.is_fault:
        return Effect.UNKNOWN if verdict.is_fault is None else Effect.NONE
    figures_of = {c.name: c.figures for c in run.controls}
    first, beside = figures_of.get("parting", {}), figures_of.get("company", {})
    if first.get("first_token", -1) >= 0 or beside.get("tokens", 0):
        return Effect.OUTPUT
    return Effect.LOGPROBS if first.get("first_logprob", -1) >= 0 and beside else Effect.MODEL


def _unsteady(run: Run, step: Mapping[str, Step]) -> str:
    if step["run"].outcome == "no" or not run.trace_verdicts:
        return step["run"].sentence
    unsteady = _replay(run.culprits, "repeat")
    if unsteady and run.trace_verdicts[-1].finding != "run-to-run":
        culprit, replay = unsteady
        return f"`{culprit.call}` of {culprit.module}: {replay.sentence}"
    return "; ".join(run.trace_verdicts[-1].sentences)


def _clean(step: Mapping[str, Step], axes: Sequence[AxisTried]) -> str:
    n, rounds = (int(step["batch"].figures[name]) for name in ("n", "rounds"))
    tried = ", ".join(f"{axis_title(a.axis)} {a.tried}" for a in axes if a.tried)
    return (
        f"No divergence observed: {plural(n, 'completion')} in {plural(rounds, 'round')} have the tokens and "
        f"logprob bits of the same prompt solo ({_bounds(rounds, n)}), and so do all completions with one property "
        f"changed ({tried}). This is an observation on this load, not a proof."
    )


def _where(step: Mapping[str, Step], axes: Sequence[AxisTried]) -> str:
    flip = int(step["margin"].figures.get("first_flip", -1))
    differing = [f"{axis_title(a.axis)} ({a.traces} of {a.tried} traces)" for a in axes if a.traces]
    clean = [f"{axis_title(a.axis)} (0 of {a.tried})" for a in axes if a.tried and not a.traces]
    parts = [f"the first token that flips is token {flip}"] if flip >= 0 else []
    parts += [f"changing only one property changes the logprobs: {', '.join(differing)}"] if differing else []
    parts += [f"no difference seen from changing {', '.join(clean)}"] if clean else []
    return _sentence("; ".join(parts))


def _why(run: Run, finding: str) -> str:
    """The first responsible call, the list if there are more, what the replays found, and the flips."""
    culprits = blamed(run, finding)
    named, parts = [c for c in culprits if c.call], list[str]()
    if named:
        parts.append(f"the first operator to differ: {named[0].sentence}")
        parts += ["after it " + ", ".join(f"`{c.call}` of {c.module}" for c in named[1:])] if named[1:] else []
        shown = ("repeat", "rows only", "values", "exact", "tree")
        parts += [r.sentence for r in named[0].replays if r.name in shown and r.status != "error"]
    elif run.culprits:
        parts.append(f"no operator could be named: {culprits[0].sentence if culprits else NOT_MET}")
    elif run.trace_verdicts:
        parts.append(f"no operator could be named: {'; '.join(run.trace_verdicts[-1].sentences)}")
    margin = next((s for s in run.steps if s.name == "margin" and s.outcome in ("yes", "no")), None)
    parts += [margin.sentence] if margin is not None else []
    if margin is not None and margin.outcome == "no":
        parts.append("a flip beyond the measured noise is more than this rounding explains")
    return " ".join(map(_sentence, parts))


def _cure(step: Mapping[str, Step], finding: str) -> str:
    cure, families, parts = step["cure"], step["operator"].facts.get("families", ""), list[str]()
    if families and finding != Finding.RUN_TO_RUN:  # what changes by itself may be equal in one pair
        named = " and ".join(families.split("+"))
        parts.append(f"Replacing {named} by the invariant implementation removes the divergence of the pair traced.")
    leads = {
        "yes": "batch_invariant() left no divergence",
        "no": "batch_invariant() is no cure here",
        "unknown": "Whether batch_invariant() is a cure here is not known",
    }
    parts += [f"{leads[cure.outcome]}: {cure.sentence}."] if cure.outcome in leads else []
    return " ".join(parts)


def _cost(step: Mapping[str, Step]) -> str:
    cost = step["cost"]
    if cost.outcome == "yes":
        return _sentence(cost.sentence)
    cured = step["cure"].outcome in ("yes", "unknown") and cost.outcome == "skipped"
    return f"Not measured: {cost.sentence}." if cured else ""


def _limits(run: Run, step: Mapping[str, Step]) -> list[str]:
    lines = [f"{QUESTIONS[name]} Not tested: {s.sentence}." for name, s in step.items() if s.outcome == "skipped"]
    lines += [f"{QUESTIONS[name]} No answer: {s.sentence}." for name, s in step.items() if s.outcome == "unknown"]
    lines += [f"{axis_title(a.axis)}: {a.note}." for a in run.axes if a.note]
    lines += [_sentence(s.facts["less"]) for s in run.steps if s.facts.get("less")]
    lines += [f"{QUESTIONS[name]} The run ended before it." for name in QUESTIONS if not step[name].outcome]
    lines.append("This covers one prompt, one load, one machine and these versions: other sizes may use other kernels.")
    return lines


def _replay(culprits: Sequence[Culprit], name: str) -> tuple[Culprit, Replay] | None:
    return next(((c, r) for c in culprits for r in c.replays if r.name == name and r.status == "divergent"), None)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""
