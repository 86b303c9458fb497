"""What is said of a server's completions beside the finding: counts, bounds, the contract, loads, a second server."""

from __future__ import annotations

from collections.abc import Mapping

from nondet.core.records import Run
from nondet.core.statistics import one_sided_bound, percent
from nondet.verdict.ends import ended_otherwise, ends_text
from nondet.verdict.findings import plural
from nondet.verdict.served_arms import ArmEvidence, is_endpoint

__all__ = ["beside", "bounds", "counts_text", "notes_on", "off", "parted", "unanswered", "unseeded"]

# Contract questions without whose "yes" a comparison means less, and what their "no" means.
_BROKEN = {
    "greedy": "temperature 0 does not take the likeliest token here: what parts may be sampling",
    "max-tokens": "max_tokens is not kept",
    "sums": "logprobs are no probabilities: their bits say nothing",
    "repeatable": "the same request, alone, twice gave other tokens in the contract check",
    "repeatable-bits": "the same request, alone, twice gave other logprob bits in the contract check",
}


def parted(n: int, traces_off: int, tokens_off: int) -> str:
    """ "180 of 200 part, 3 in tokens".

    Args:
        traces_off: Answers of which the other arm has none with these tokens, these logprobs and this end.
        tokens_off: Of which it has none with these tokens.
    """
    if not traces_off:
        return f"{n:,} alike"
    return f"{traces_off:,} of {n:,} part, {f'{tokens_off:,}' if tokens_off else 'none'} in tokens"


def off(arm: Mapping[str, int], base: Mapping[str, int]) -> int:
    """Answers of the arm that the base has not."""
    return sum(count for digest, count in arm.items() if digest not in base)


def unanswered(run: Run, arms: Mapping[str, ArmEvidence]) -> tuple[list[str], bool]:
    """Planned arms under load of which no answer came, and whether that leaves no load at all."""
    planned = [name for name in ("chunked", "loaded") if name in run.header.plan.get("arms", {})]
    without = [name for name in planned if name not in arms or not arms[name].n]
    return without, bool(planned) and len(without) == len(planned)


def counts_text(n: int, arms: Mapping[str, ArmEvidence], run: Run, impl: str) -> str:
    """How many distinct completions and traces there are, and how many equal ones ended otherwise."""
    completions = len({digest for arm in arms.values() for digest in arm.completions})
    traces = len({digest for arm in arms.values() for digest in arm.ends})
    odd = ended_otherwise([arm.ends for arm in arms.values()])
    return _distinct(n, completions, traces, run, impl) + (
        f", {odd:,} of which ended otherwise than equal ones" if odd else ""
    )


def _distinct(n: int, completions: int, traces: int, run: Run, impl: str) -> str:
    seen = next((s for s in run.servers if s.impl == impl), None)
    known = "" if seen is None or seen.known_by == "ids" else f", compared by {seen.known_by}"
    text = f"{plural(completions, 'distinct completion')} of {n:,}{known}"
    if seen is not None and not seen.logprobs:
        return f"{text}, without logprobs"
    if completions == 1 and traces > 1:
        return f"tokens identical in {n:,} completions{known}, but {traces:,} distinct logprob traces"
    return text if traces == completions else f"{text} ({traces:,} distinct logprob traces)"


def bounds(arms: Mapping[str, ArmEvidence]) -> str:
    """What no divergence leaves, by loads and by requests; of proven loads alone."""
    proven = [a for a in (arms.get("loaded"), arms.get("chunked")) if a is not None and a.proof]
    n, rounds = sum(a.in_company for a in proven), sum(a.rounds for a in proven)
    if "solo" not in arms:  # then the first one is what the others are held against
        n, rounds = n - 1, rounds - 1
    if n < 1 or rounds < 1:
        return ""
    by_load, by_request = (percent(one_sided_bound(count), "up") for count in (rounds, n))
    return (
        f" (at 95%, one-sided: below {by_load} of loads ({plural(rounds, 'load')}), "
        f"below {by_request} of requests if they were independent ({n:,} that ran beside others))"
    )


def notes_on(run: Run, impl: str, arms: Mapping[str, ArmEvidence], failed: Mapping[str, int]) -> list[str]:
    """What a reader should know of the run beside the finding, a sentence each."""
    notes = []
    if ended := ends_text([arm.ends for arm in arms.values()]):
        notes.append(ended)
    if failed:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(failed.items()))
        notes.append(f"{plural(sum(failed.values()), 'failed request')} counted in no other figure: {kinds}.")
    answers = {a.question: a for a in run.contract if a.impl == impl}
    notes += [
        f"Contract: {_BROKEN[q]} ({a.evidence})." for q, a in answers.items() if q in _BROKEN and a.answer == "no"
    ]
    seed = answers.get("seed")
    if seed is not None and run.header.plan.get("temperature"):
        kept = {"yes": "the server keeps to a seed", "no": "the server does not keep to a seed"}
        told = kept.get(seed.answer, "whether the server keeps to a seed can't be told")
        notes.append(f"Contract: {told} ({seed.evidence}).")
    greedy = answers.get("greedy")
    if greedy is not None and greedy.answer == "unknown" and not run.header.plan.get("temperature"):
        notes.append("Contract: whether temperature 0 is greedy can't be told.")
    for arm in arms.values():
        if arm.arm in ("loaded", "chunked", "cold", "warm") and not arm.proof:
            notes.append(f"The arm {arm.arm} is unproven: {arm.proof_words}.")
        elif arm.arm in ("loaded", "chunked"):
            alone = arm.n - arm.in_company
            beside = f"; {plural(alone, 'completion')} of it not known to have had company" if alone else ""
            notes.append(f"{arm.arm.capitalize()}: {arm.proof_words}{beside}.")
    without, _ = unanswered(run, arms)
    notes += [f"The arm {name} was planned under load, and no answer came of it." for name in without]
    if "loaded" not in arms and "chunked" not in arms:
        notes.append("No arm put the server under load: this says nothing about the batch.")
    seen = next((s for s in run.servers if s.impl == impl), None)
    if seen is not None and not seen.fingerprint:
        notes.append("The server gives no fingerprint: that it stayed the same one is not known.")
    return notes


def unseeded(run: Run) -> dict[str, str]:
    """Servers that drew tokens and are not shown to keep to a seed -> what the contract saw of that."""
    if not is_endpoint(run) or not run.header.plan.get("temperature"):
        return {}
    asked = {a.impl: a for a in run.contract if a.question == "seed"}
    return {
        impl: asked[impl].evidence if impl in asked else "it was not asked"
        for impl in dict.fromkeys(c.impl for c in run.completions)
        if impl not in asked or asked[impl].answer != "yes"
    }


def beside(run: Run, impl: str, arms: Mapping[str, ArmEvidence], first: Mapping[str, ArmEvidence]) -> list[str]:
    """A second server against the first: what its solo answers have that the first one's have not. No fault of any."""
    if impl == "server":
        return []
    mine, theirs = arms.get("solo"), first.get("solo")
    known = {s.impl: s.known_by for s in run.servers}
    if mine is None or theirs is None or not mine.n or not theirs.n:
        return ["It was not held against server: one of them has no solo answers."]
    if known.get(impl) != known.get("server"):
        if "" not in {*mine.texts, *theirs.texts}:  # what tokens are known by is no one thing in both; text is
            odd = off(mine.texts, theirs.texts)
            seen = f"{odd:,} of {mine.n:,} part" if odd else f"{mine.n:,} alike"
            return [f"Solo, against server's, by their texts alone: {seen}."]
        return [f"It can't be held against server: {known.get(impl)} here, {known.get('server')} there."]
    seen = parted(mine.n, off(mine.answers, theirs.answers), off(mine.completions, theirs.completions))
    return [f"Solo, against server's: {seen}."]
