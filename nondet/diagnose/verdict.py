"""What a diagnosis may say: a function of the records of its run file, and no further than they go. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nondet.core.records import AxisTried, Completion, Culprit, Diagnosis, Replay, Run, Step
from nondet.core.statistics import one_sided_bound, percent, percent_range, round_interval
from nondet.sampling.analysis import coverage_of
from nondet.sampling.plan import Outcome, Session
from nondet.verdict.findings import Finding, plural
from nondet.verdict.samples import replays

Top = tuple[float, float, int, int]  # the two largest logits, their token ids


@dataclass(frozen=True)
class Flip:
    """The first token of a completion that is not the one that it has alone.

    Attributes:
        index: Which generated token.
        margin: Top-1 minus top-2 logit, alone; other: in company.
    """

    index: int
    margin: float
    other: float

    @property
    def tie(self) -> bool:
        """Whether the two largest logits are equal on one side: then the choice hangs on the order of token ids."""
        return self.margin == 0 or self.other == 0


@dataclass
class Noise:
    """What was measured over completions in company against the one alone, as long as their tokens agree.

    Attributes:
        spread: Largest distance between the arms of one token's logit, at steps where the same token was chosen.
        moved: Logits compared there whose bits differ; compared: all of them.
        near: Its tokens whose margin is at most twice the spread: two logits may both move.
        tokens: Its tokens.
    """

    spread: float = 0.0
    moved: int = 0
    compared: int = 0
    near: int = 0
    tokens: int = 0
    flips: list[Flip] = field(default_factory=list)

    @property
    def within(self) -> int:
        """Flips whose margin alone is at most twice the spread."""
        return sum(flip.margin <= 2 * self.spread for flip in self.flips)


def measure_noise(alone: Session, companies: Iterable[Session]) -> Noise:
    """Compare the logits of the two largest tokens of each step, alone and in company.

    Contexts are equal up to and including the first token that differs: its own logits are those of the flip, and what
    the spread is measured on are the steps before it.
    """
    noise = Noise()
    reference = alone.outcomes[0]
    tops = alone.tops.get(reference.request.id, [])
    for session in companies:
        for outcome in session.outcomes:
            if outcome.request.target and outcome.finish != "error":
                _compare(noise, reference, tops, outcome, session.tops.get(outcome.request.id, []))
    margins = [first - second for first, second, _, _ in tops]
    noise.tokens = len(margins)
    noise.near = sum(margin <= 2 * noise.spread for margin in margins)
    return noise


def _compare(noise: Noise, a: Outcome, tops_a: Sequence[Top], b: Outcome, tops_b: Sequence[Top]) -> None:
    for index in range(min(len(a.token_ids), len(b.token_ids), len(tops_a), len(tops_b))):
        one, two = tops_a[index], tops_b[index]
        if a.token_ids[index] != b.token_ids[index]:
            noise.flips.append(Flip(index, one[0] - one[1], two[0] - two[1]))
            return
        logits = dict(zip(one[2:], one[:2], strict=True)), dict(zip(two[2:], two[:2], strict=True))
        for token in logits[0].keys() & logits[1].keys():
            distance = abs(logits[0][token] - logits[1][token])
            noise.compared += 1
            noise.moved += distance > 0
            noise.spread = max(noise.spread, distance)


def run_step(run: Run, impl: str, alone: Sequence[str]) -> Step:
    """Whether the same requests in the same batches gave the same bits.

    Args:
        alone: Digests of the traces of the request alone, once for each time.
    """
    rows = replays(run).get(impl, [])
    round_parted = any(row.parted for row in rows)
    alone_parted = len(set(alone)) > 1
    requests = sum(int(row.extra.get("requests", 0)) for row in rows)
    other = sum(int(row.extra.get("requests_parted", 0)) for row in rows)
    if not rows:
        failed = next((r.reason for r in run.rows if r.impl == impl and r.varied == "run"), "it was not run again")
        return Step(name="run", outcome="unknown", sentence=f"the first round could not be compared: {failed}")
    sentence = (
        f"the prompt alone, {len(alone)} times: {plural(len(set(alone)), 'trace')}; the first round twice: "
        f"{f'{other} of {requests} requests differ' if round_parted else f'all {requests} requests equal in every bit'}"
    )
    return Step(
        name="run",
        outcome="no" if round_parted or alone_parted else "yes",
        sentence=sentence,
        figures={"alone": len(alone), "alone_traces": len(set(alone)), "requests": requests, "requests_parted": other},
    )


def batch_step(run: Run, impl: str, alone: Mapping[str, str]) -> Step:
    """How many completions in company are not the one alone: traces first, then tokens.

    Args:
        alone: Its "trace" and "tokens", as digests.
    """
    good = _completions(run, impl)
    sizes, traces, tokens = _by_round(good, alone)
    n, rounds = len(good), len(sizes)
    figures = {
        "n": float(n),
        "rounds": float(rounds),
        "traces": float(sum(traces)),
        "tokens": float(sum(tokens)),
        "rounds_traces": float(sum(k > 0 for k in traces)),
        "rounds_tokens": float(sum(k > 0 for k in tokens)),
        # of the round that came again equal: what parted there has been laid to the batch already
        "repeated_round_traces": float(traces[0] if traces else 0),
        "distinct_traces": float(len({c.trace for c in good})),
        "distinct_completions": float(len({c.tokens_digest for c in good})),
    }
    if not n:
        return Step(name="batch", outcome="unknown", sentence="no completion came to its end", figures=figures)
    parts = [
        f"of {plural(n, 'completion')} in {plural(rounds, 'round')}, {sum(traces)} have other logprob bits than "
        f"the same prompt alone ({_share(traces, sizes)}), in {sum(k > 0 for k in traces)} of "
        f"{plural(rounds, 'round')}",
        f"{sum(tokens)} have other tokens ({_share(tokens, sizes)}), in {sum(k > 0 for k in tokens)} of "
        f"{plural(rounds, 'round')}",
    ]
    return Step(name="batch", outcome="yes" if sum(traces) else "no", sentence="; ".join(parts), figures=figures)


def companies(run: Run, impl: str, alone: str, gaps: Sequence[str]) -> Step:
    """What is left of the divergence under another implementation, with what that implementation did not reach.

    Args:
        alone: Digest of the trace of the request alone, under it.
        gaps: Calls that it left stock without proof.
    """
    good = _completions(run, impl)
    traces = {c.trace for c in good} | {alone}
    rows = replays(run).get(impl, [])
    unsteady = any(row.parted for row in rows)
    axes = [a for a in run.axes if a.impl == impl]
    tried, differ = sum(a.tried for a in axes), sum(a.traces for a in axes)
    failed = sum(c.impl == impl and c.status != "ok" for c in run.completions)
    lost = sum(c.nonfinite > 0 for c in good)  # NaN agrees with itself: that is no cure
    parted = len(traces) > 1 or unsteady or bool(differ) or bool(lost)
    # a sample with holes, or without a round that came again, shows neither a cure nor that there is none
    cured = not parted and bool(good) and bool(rows) and not failed
    rounds = len({c.round for c in good})
    seen = f"{plural(len(traces), 'distinct trace')} of {plural(len(good), 'completion')}"
    parts = [f"{seen} in company and the one alone"]
    if cured:
        parts[0] += f" (at 95%, one-sided: below {percent(one_sided_bound(rounds), 'up')} of rounds, below "
        parts[0] += f"{percent(one_sided_bound(len(good)), 'up')} of completions if they were independent)"
    if axes:
        parts.append(f"of the axes that parted, {differ} of {tried} completions differ from the one alone")
    if failed:
        parts.append(f"{plural(failed, 'completion')} failed")
    if lost:
        parts.append(f"{plural(lost, 'completion')} hold NaN or infinite logprobs")
    if rows:
        again = "the first round, run again, differs from itself" if unsteady else "the first round came again equal"
    else:
        again = "no round was run again"
    parts.append(again)
    parts.append(
        f"its coverage is not complete: {', '.join(gaps)}"
        if gaps
        else "its coverage is complete: no call was left stock without proof, none is at risk"
    )
    return Step(
        name="cure",
        outcome="no" if parted else "yes" if cured else "unknown",
        sentence="; ".join(parts),
        figures={
            "n": float(len(good)), "rounds": float(rounds), "traces": float(len(traces)), "gaps": float(len(gaps)),
            "axes_tried": float(tried), "axes_traces": float(differ), "unsteady": float(unsteady),
        },
        facts={"gaps": "; ".join(gaps)},
    )  # fmt: skip


def parted_rounds(run: Run, impl: str, alone: Mapping[str, str]) -> list[int]:
    """Rounds with a completion that is not the one alone: those with other tokens first, then by number."""
    good = _completions(run, impl)
    tokens = {c.round for c in good if c.tokens_digest != alone.get("tokens")}
    traces = {c.round for c in good if c.trace != alone.get("trace")}
    return sorted(traces, key=lambda number: (number not in tokens, number))


def flip_text(noise: Noise) -> tuple[str, str]:
    """The sentence on margins, and the answer to whether every flip is within the noise."""
    spread = (
        f"the logits of the top tokens move by up to {noise.spread:.4g} between the arms ({noise.moved:,} of "
        f"{noise.compared:,} compared move at all)"
    )
    near = f"{noise.near} of {noise.tokens} tokens alone have a margin of at most twice that"
    if not noise.flips:
        return f"no token flipped in the rounds looked at; {spread}; {near}", "unknown"
    count = len(noise.flips)
    first = min(flip.index for flip in noise.flips)
    largest = max(flip.margin for flip in noise.flips)
    ties = sum(flip.tie for flip in noise.flips)
    sentence = (
        f"{plural(count, 'completion')} flipped, the first at token {first}, where the two largest logits alone are at "
        f"most {largest:.4g} apart; {spread}, so {noise.within} of {count} flips are within it (at most twice that); "
        f"{ties} of {count} are exact ties in one arm; {near}"
    )
    return sentence, "yes" if noise.within == count else "no"


def _completions(run: Run, impl: str) -> list[Completion]:
    return [c for c in run.completions if c.impl == impl and c.status == "ok"]


def _by_round(good: Sequence[Completion], alone: Mapping[str, str]) -> tuple[list[int], list[int], list[int]]:
    """(completions, those with another trace, those with other tokens), of each round."""
    rounds = sorted({c.round for c in good})
    mine = [[c for c in good if c.round == number] for number in rounds]
    return (
        [len(cs) for cs in mine],
        [sum(c.trace != alone["trace"] for c in cs) for cs in mine],
        [sum(c.tokens_digest != alone["tokens"] for c in cs) for cs in mine],
    )


def _share(hits: Sequence[int], sizes: Sequence[int]) -> str:
    """The interval of a rate over rounds; where nothing was seen, or nothing else, the bound by either unit."""
    bounds = one_sided_bound(len(sizes)), one_sided_bound(sum(sizes))
    if not any(hits):
        by_round, by_completion = (f"below {percent(bound, 'up')}" for bound in bounds)
    elif list(hits) == list(sizes):
        by_round, by_completion = (f"above {percent(1.0 - bound, 'down')}" for bound in bounds)
    else:
        return f"95%: {percent_range(*round_interval(hits, sizes))}"
    return f"at 95%, one-sided: {by_round} of rounds, {by_completion} of completions if they were independent"


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
