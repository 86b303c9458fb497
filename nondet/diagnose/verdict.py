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
from nondet.sampling.plan import Session
from nondet.verdict.findings import Effect, Finding, change_of, plural, successful
from nondet.verdict.samples import replays


def margin_step(solo: Session, other: Session) -> Step:
    """Whether the margins of flips are within the effect of concurrent requests on the logits, while tokens agree.

    Compares the logits of the two largest tokens of each step, in the solo run and with concurrent requests. Contexts
    are equal up to and including the first token that differs: its own logits are those of the flip, and the spread is
    measured on the steps before it. Both logits may change, so a margin is within the noise up to twice the spread.
    """
    flips: list[tuple[int, float, float]] = []  # token; margin of the two largest logits, solo and with others
    distances: list[float] = []
    reference = solo.outcomes[0]
    tops = solo.tops.get(reference.request.id, [])
    for outcome in other.outcomes:
        if not outcome.request.target or outcome.finish == "error":
            continue
        theirs = zip(outcome.token_ids, other.tops.get(outcome.request.id, []), strict=False)
        pairs = zip(zip(reference.token_ids, tops, strict=False), theirs, strict=False)
        for index, ((token, one), (second_token, two)) in enumerate(pairs):
            if token != second_token:
                flips.append((index, one[0] - one[1], two[0] - two[1]))
                break
            logits = dict(zip(one[2:], one[:2], strict=True)), dict(zip(two[2:], two[:2], strict=True))
            distances += [abs(logits[0][t] - logits[1][t]) for t in logits[0].keys() & logits[1].keys()]
    spread = max([0.0, *distances])  # max() ignores NaN
    near = sum(first - second <= 2 * spread for first, second, _, _ in tops)
    within = sum(margin <= 2 * spread for _, margin, _ in flips)
    # two largest logits that are equal: then the choice depends on the order of token ids
    ties = sum(0 in both for _, *both in flips)
    largest, first_flip = (max((f[1] for f in flips), default=-1.0), min((f[0] for f in flips), default=-1))
    moved = (
        f"the logits of the top tokens differ by up to {spread:.4g} between the arms "
        f"({sum(d > 0 for d in distances):,} of {len(distances):,} compared differ)"
    )
    sentence = f"no token flipped in the rounds that were compared; {moved}"
    if flips:
        sentence = (
            f"{plural(len(flips), 'completion')} flipped, the first at token {first_flip}; solo, the two largest "
            f"logits at a flip are at most {largest:.4g} apart; {moved}, so {within} of {len(flips)} flips are within "
            f"it (at most twice that); {ties} of {len(flips)} are exact ties in one arm"
        )
    return Step(
        name="margin",
        outcome=("yes" if within == len(flips) else "no") if flips else "unknown",
        sentence=f"{sentence}; solo, {near} of {len(tops)} tokens have a margin of at most twice that",
        figures={
            "flips": len(flips), "ties": ties, "within": within, "largest_margin": largest, "spread": spread,
            "near": near, "tokens": len(tops), "first_flip": first_flip,
        },
    )  # fmt: skip


def run_step(run: Run, impl: str, solo: Sequence[str]) -> Step:
    """Whether the same requests in the same batches gave the same bits; `solo` has the digest of each solo trace."""
    rows = replays(run).get(impl, [])
    if not rows:
        failed = next((r.reason for r in run.rows if r.impl == impl and r.varied == "run"), "it was not repeated")
        return Step(name="run", outcome="unknown", sentence=f"the first round could not be compared: {failed}")
    round_differs, traces = any(row.parted for row in rows), len(set(solo))
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
    in_rounds = [sum(k > 0 for k in hits) for hits in (traces, tokens)]
    figures: dict[str, float] = {"n": len(good), "rounds": len(rounds), "traces": sum(traces), "tokens": sum(tokens)}
    figures |= {"rounds_traces": in_rounds[0], "rounds_tokens": in_rounds[1]}
    # of the round whose repetition was equal: differences there are attributed to the batch already
    figures["repeated_round_traces"] = traces[0] if traces else 0
    figures["distinct_traces"] = len({c.trace for c in good})
    figures["distinct_completions"] = len({c.tokens_digest for c in good})
    if not good:
        return Step(name="batch", outcome="unknown", sentence="no completion finished", figures=figures)
    of_rounds = f"of {plural(len(rounds), 'round')}"
    sentence = (
        f"of {plural(len(good), 'completion')} in {plural(len(rounds), 'round')}, {sum(traces)} have other logprob "
        f"bits than the same prompt solo ({_share(traces, sizes)}), in {in_rounds[0]} {of_rounds}; {sum(tokens)} have "
        f"other tokens ({_share(tokens, sizes)}), in {in_rounds[1]} {of_rounds}"
    )
    return Step(name="batch", outcome="yes" if sum(traces) else "no", sentence=sentence, figures=figures)


def cure_step(run: Run, impl: str, solo: str, gaps: Sequence[str]) -> Step:
    """What is left of the divergence under `impl`, whose solo trace is `solo` and which left `gaps` stock."""
    good = _completions(run, impl)
    traces = {c.trace for c in good} | {solo}
    rows = replays(run).get(impl, [])
    unsteady = any(row.parted for row in rows)
    axes = [a for a in run.axes if a.impl == impl]
    tried, differ = sum(a.tried for a in axes), sum(a.traces for a in axes)
    failed = sum(c.impl == impl and c.status != "ok" for c in run.completions)
    lost = sum(c.nonfinite > 0 for c in good)  # NaN agrees with itself: that is not a fix
    diverged = len(traces) > 1 or unsteady or bool(differ) or bool(lost)
    # a sample with failures, or without a round whose repetition was equal, shows neither that the fix works nor that
    # it fails
    cured = not diverged and bool(good) and bool(rows) and not failed
    rounds = len({c.round for c in good})
    parts = [
        f"{plural(len(traces), 'distinct trace')} in {plural(len(good), 'completion')} under load and the solo one"
        f"{f' ({_excluded(rounds, len(good))})' if cured else ''}"
    ]
    if axes:
        parts.append(f"on the axes where stock differs, {differ} of {tried} completions differ from the solo run")
    if failed:
        parts.append(f"{plural(failed, 'completion')} failed")
    if lost:
        parts.append(f"{plural(lost, 'completion')} hold NaN or infinite logprobs")
    again = "the first round, repeated, " + ("differs from itself" if unsteady else "is bit-identical")
    parts.append(again if rows else "no round was repeated")
    coverage = "complete: no call was left stock without proof, none is at risk"
    if gaps:
        coverage = f"not complete: {', '.join(gaps)}"
    figures: dict[str, float] = {"n": len(good), "rounds": rounds, "traces": len(traces), "gaps": len(gaps)}
    figures |= {"axes_tried": tried, "axes_traces": differ, "unsteady": int(unsteady)}
    return Step(
        name="cure",
        outcome="no" if diverged else "yes" if cured else "unknown",
        sentence="; ".join([*parts, f"its coverage is {coverage}"]),
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
    if not any(hits):
        return _excluded(len(sizes), sum(sizes))
    if list(hits) != list(sizes):
        return f"95%: {percent_range(*round_interval(hits, sizes))}"
    by_round, by_completion = (percent(1.0 - one_sided_bound(n), "down") for n in (len(sizes), sum(sizes)))
    return _one_sided("above", by_round, by_completion)


def _excluded(rounds: int, completions: int) -> str:
    return _one_sided("below", *(percent(one_sided_bound(n), "up") for n in (rounds, completions)))


def _one_sided(side: str, by_round: str, by_completion: str) -> str:
    rates = f"{side} {by_round} of rounds, {side} {by_completion} of completions"
    return f"at 95%, one-sided: {rates} if they were independent"


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
    if outcome.get("greedy") == "no":
        return "" if name == "greedy" else "tokens are not chosen by their logits, which has to be understood first"
    if outcome.get("run") == "no" and name in ("batch", "axes", "margin"):
        return "equal batches already give other bits, so nothing can be attributed to the batch"
    both = (outcome.get("batch", "yes"), outcome.get("axes", "yes"))
    clean = "yes" not in both and outcome.get("run") != "no"  # without an answer there is nothing to trace
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
    finding = _finding(run, step)
    if finding == Finding.CLEAN:
        return Diagnosis(finding=finding, whether=_clean(step, axes), limits=_limits(run, step))
    how = "not in the load as sampled, but where one property of the batch was changed"
    if step["batch"].outcome == "yes":
        how = step["batch"].sentence
    whether = {
        NOT_GREEDY: f"Decoding is not greedy: {step['greedy'].sentence}.",
        Finding.WRONG: f"Wrong: {step['greedy'].sentence}. Whether the batch matters was not tested.",
        Finding.RUN_TO_RUN: f"Run-to-run nondeterministic: {_unsteady(run, step)}. Whether the batch matters too is "
        "not known.",
        UNKNOWN: "Not known: a step that is needed has no answer.",
        Finding.UNATTRIBUTED: f"Divergent, because of the batch or from run to run: {step['batch'].sentence}.",
    }.get(finding, f"Batch-dependent: {how}.")
    return Diagnosis(
        finding=finding,
        whether=whether,
        where=_where(step, axes),
        why=_why(run, finding),
        cure=_cure(step, finding),
        cost=_cost(step),
        limits=_limits(run, step),
    )


def _finding(run: Run, step: dict[str, Step]) -> str:
    """The finding in a word. The batch is blamed only where equal batches have been seen to give equal bits."""
    if step["greedy"].outcome == "no":
        return Finding.WRONG if step["greedy"].figures.get("nonfinite") else NOT_GREEDY
    cause = cause_of(run)
    if step["run"].outcome == "no" or cause == Finding.RUN_TO_RUN:
        return Finding.RUN_TO_RUN
    if not (step["batch"].outcome == "yes" or step["axes"].outcome == "yes"):
        return Finding.CLEAN if step["batch"].outcome == "no" and step["axes"].outcome == "no" else UNKNOWN
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


def _unsteady(run: Run, step: dict[str, Step]) -> str:
    if step["run"].outcome == "no" or not run.trace_verdicts:
        return step["run"].sentence
    unsteady = _replay(run.culprits, "repeat")
    if unsteady and run.trace_verdicts[-1].finding != "run-to-run":
        culprit, replay = unsteady
        return f"`{culprit.call}` of {culprit.module}: {replay.sentence}"
    return "; ".join(run.trace_verdicts[-1].sentences)


def _clean(step: dict[str, Step], axes: Sequence[AxisTried]) -> str:
    figures = step["batch"].figures
    n, rounds = int(figures["n"]), int(figures["rounds"])
    tried = ", ".join(f"{axis_title(a.axis)} {a.tried}" for a in axes if a.tried)
    return (
        f"No divergence observed: {plural(n, 'completion')} in {plural(rounds, 'round')} have the tokens and "
        f"logprob bits of the same prompt solo ({_excluded(rounds, n)}), and so do all completions with one property "
        f"changed ({tried}). This is an observation on this load, not a proof."
    )


def _where(step: dict[str, Step], axes: Sequence[AxisTried]) -> str:
    parts = []
    flip = step["margin"].figures.get("first_flip", -1)
    if flip >= 0:
        parts.append(f"the first token that flips is token {int(flip)}")
    differing = [f"{axis_title(a.axis)} ({a.traces} of {a.tried} traces)" for a in axes if a.traces]
    clean = [f"{axis_title(a.axis)} (0 of {a.tried})" for a in axes if a.tried and not a.traces]
    if differing:
        parts.append(f"changing only one property changes the logprobs: {', '.join(differing)}")
    if clean:
        parts.append(f"no difference seen from changing {', '.join(clean)}")
    return _sentence("; ".join(parts))


def _why(run: Run, finding: str) -> str:
    """The first responsible call, the list if there are more, what the replays found, and the flips."""
    culprits = blamed(run, finding)
    named = [c for c in culprits if c.call]
    parts = []
    if named:
        parts.append(_sentence(f"The first operator to differ: {named[0].sentence}"))
        if len(named) > 1:
            parts.append(_sentence("after it " + ", ".join(f"`{c.call}` of {c.module}" for c in named[1:])))
        shown = [r for r in named[0].replays if r.name in ("repeat", "rows only", "values", "exact", "tree")]
        parts += [_sentence(r.sentence) for r in shown if r.status != "error"]
    elif run.culprits or run.trace_verdicts:
        unnamed = culprits[0].sentence if culprits else NOT_MET
        if not run.culprits:
            unnamed = "; ".join(run.trace_verdicts[-1].sentences)
        parts.append(_sentence(f"No operator could be named: {unnamed}"))
    margin = next((s for s in run.steps if s.name == "margin" and s.outcome in ("yes", "no")), None)
    if margin is not None:
        parts.append(_sentence(margin.sentence))
        if margin.outcome == "no":
            parts.append("A flip beyond the measured noise is more than this rounding explains.")
    return " ".join(parts)


def _cure(step: dict[str, Step], finding: str) -> str:
    cure, families = step["cure"], step["operator"].facts.get("families", "")
    parts = []
    if families and finding != Finding.RUN_TO_RUN:  # what changes by itself may be equal in one pair
        named = " and ".join(families.split("+"))
        parts.append(f"Replacing {named} by the invariant implementation removes the divergence of the pair traced.")
    if cure.outcome in ("", "skipped"):
        return " ".join(parts)
    leads = {
        "yes": "batch_invariant() left no divergence",
        "unknown": "Whether batch_invariant() is a cure here is not known",
    }
    lead = leads.get(cure.outcome, "batch_invariant() is no cure here")
    return " ".join([*parts, f"{lead}: {cure.sentence}."])


def _cost(step: dict[str, Step]) -> str:
    cost = step["cost"]
    if cost.outcome == "yes":
        return _sentence(cost.sentence)
    cured = step["cure"].outcome in ("yes", "unknown") and cost.outcome == "skipped"
    return f"Not measured: {cost.sentence}." if cured else ""


def _limits(run: Run, step: dict[str, Step]) -> list[str]:
    lines = [f"{QUESTIONS[name]} Not tested: {s.sentence}." for name, s in step.items() if s.outcome == "skipped"]
    lines += [f"{QUESTIONS[name]} No answer: {s.sentence}." for name, s in step.items() if s.outcome == "unknown"]
    lines += [f"{axis_title(a.axis)}: {a.note}." for a in run.axes if a.note]
    lines += [_sentence(s.facts["less"]) for s in run.steps if s.facts.get("less")]
    lines += [f"{QUESTIONS[name]} The run ended before it." for name in QUESTIONS if not step[name].outcome]
    lines.append("This covers one prompt, one load, one machine and these versions: other sizes may use other kernels.")
    return lines


def _replay(culprits: Sequence[Culprit], name: str) -> tuple[Culprit, Replay] | None:
    return next(
        ((c, r) for c in culprits for r in c.replays if r.name == name and r.status == "divergent"),
        None,
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""
