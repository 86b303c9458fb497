"""The verdict on a server's completions, arm by arm: solo against itself, then each arm against what it is held to.

Existence is judged on traces (tokens and logprob bits), consequence on tokens. What parts is blamed on the load, or on
the prefix cache, only where nothing else is left: the arms agree with themselves, the load or the hits are proven, the
server was one server and greedy, and chance would hardly deal the odd ones to one arm alone. Where nothing parted, only
a load that is proven says anything about loads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nondet.core.records import Run
from nondet.core.statistics import percent
from nondet.verdict.findings import Finding, Verdict, plural, sort_impls
from nondet.verdict.served_arms import ArmEvidence, arm_evidence, evidence
from nondet.verdict.served_notes import beside, bounds, counts_text, notes_on, off, parted, unanswered

__all__ = ["Comparison", "chance_of", "compare_arms", "judge_served", "pooled_odds"]

_Evidence = Mapping[tuple[str, int], Mapping[str, ArmEvidence]]
# Chance at which a split of the odd ones between two arms is taken for none.
_CHANCE = 0.01


@dataclass(frozen=True)
class Comparison:
    """One arm against another, or against itself.

    Attributes:
        name: "solo against itself", "loaded against solo", ...
        n: Completions of the arm.
        traces_off, tokens_off: Those whose trace, whose tokens, the other arm has not.
        chance: That dealing the odd ones at random would put none of them into the other arm; None where that is no
            question.
        finding: What follows.
        why: What stands against naming the cause, a sentence each; empty where it is named or nothing parted.
    """

    name: str
    n: int
    traces_off: int
    tokens_off: int
    chance: float | None
    finding: Finding
    why: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """ "loaded against solo: 180 of 200 part, 3 in tokens"."""
        return f"{self.name}: {parted(self.n, self.traces_off, self.tokens_off)}"


def compare_arms(
    run: Run,
    impl: str,
    prompt: int,
    arms: Mapping[str, ArmEvidence] | None = None,
    odds: Mapping[str, float] | None = None,
) -> list[Comparison]:
    """Solo against itself, then each arm against what it is held to.

    Args:
        odds: Arm -> `chance_of` over all prompts of this server, where there are several: one prompt alone may be too
            few to tell, and all of them together not.
    """
    arms = arm_evidence(run, impl, prompt) if arms is None else arms
    doubts = _doubts(run, impl, arms)
    comparisons = []
    odds = {} if odds is None else odds
    solo = arms.get("solo")
    if solo is not None and solo.n > 1:
        comparisons.append(_itself(solo, doubts))
    cold, warm = arms.get("cold"), arms.get("warm")
    if cold is not None and warm is not None and cold.n and warm.n:
        comparisons.append(_against(warm, cold, doubts, Finding.CACHE, pooled=odds.get("warm")))
    caches_agree = bool(
        cold and warm and cold.n and warm.n and cold.proof and warm.proof and set(cold.answers) == set(warm.answers)
    )
    for name in ("chunked", "loaded"):
        arm = arms.get(name)
        if arm is None or not arm.n:
            continue
        if solo is not None and solo.n:
            comparisons.append(_against(arm, solo, doubts, Finding.BATCH, caches_agree, odds.get(name)))
        elif arm.n > 1:
            comparisons.append(_itself(arm, [*doubts, "There is no solo arm to hold it against."]))
    return comparisons


def _doubts(run: Run, impl: str, arms: Mapping[str, ArmEvidence]) -> list[str]:
    """What stands against naming any cause."""
    doubts = []
    answers = {a.question: a.answer for a in run.contract if a.impl == impl}
    if answers.get("greedy") == "no" and not run.header.plan.get("temperature"):
        doubts.append("Temperature 0 is not greedy here: sampling may be the cause.")
    if run.header.plan.get("temperature") and answers.get("seed") != "yes":
        doubts.append("At this temperature nothing shows that the server keeps to a seed: sampling may be the cause.")
    fingerprints = {name for arm in arms.values() for t in arm.traffic for name in t.fingerprints}
    if len(fingerprints) > 1:
        doubts.append(f"Answers came from {len(fingerprints)} servers by their fingerprints: that may be the cause.")
    return doubts


def _itself(arm: ArmEvidence, doubts: Sequence[str]) -> Comparison:
    """Whether the arm agrees with itself."""
    traces_off = arm.n - max(arm.answers.values())
    tokens_off = arm.n - max(arm.completions.values())
    name = f"{arm.arm} against itself"
    if not traces_off:
        return Comparison(name, arm.n, 0, 0, None, Finding.CLEAN)
    why = list(doubts)
    if not arm.proof or arm.arm != "solo":
        why.append("Whether the server ran other requests meanwhile is not known: batch or run may be the cause.")
    if None in arm.cached:
        why.append("What the server had cached is not known: the prefix cache may be the cause.")
    elif all(len(traces) == 1 for traces in arm.by_cache.values()):
        why.append("Answers with as many cached prompt tokens agree: the prefix cache may be the cause.")
    return Comparison(
        name, arm.n, traces_off, tokens_off, None, Finding.UNATTRIBUTED if why else Finding.RUN_TO_RUN, tuple(why)
    )


def chance_of(arm: ArmEvidence, base: ArmEvidence) -> float:
    """The odd ones of the arm, dealt at random over both: the chance that none of them falls to the base.

    If the two arms differ in nothing, every deal is as likely as the one that was seen.
    """
    odd = off(arm.answers, base.answers)
    both = arm.n + base.n
    return math.exp(
        math.lgamma(both - odd + 1) - math.lgamma(arm.n - odd + 1) - (math.lgamma(both + 1) - math.lgamma(arm.n + 1))
    )


def pooled_odds(known: Mapping[tuple[str, int], Mapping[str, ArmEvidence]], impl: str) -> dict[str, float]:
    """Arm -> the chance of what was seen of all prompts of a server, which are dealt apart from each other.

    An arm whose base does not agree with itself at some prompt has none: the prompts whose base does agree would be
    picked by their luck, and chances multiplied over such a choice are too small.
    """
    odds: dict[str, float] = {}
    unsteady: set[str] = set()
    for (name, _), arms in known.items():
        for arm, base in (("warm", "cold"), ("chunked", "solo"), ("loaded", "solo")):
            a, b = arms.get(arm), arms.get(base)
            if name == impl and a is not None and b is not None and a.n and b.n:
                if b.consistent:
                    odds[arm] = odds.get(arm, 1.0) * chance_of(a, b)
                else:
                    unsteady.add(arm)
    return {arm: chance for arm, chance in odds.items() if arm not in unsteady}


def _against(
    arm: ArmEvidence,
    base: ArmEvidence,
    doubts: Sequence[str],
    cause: Finding,
    caches_agree: bool = False,
    pooled: float | None = None,
) -> Comparison:
    """What the arm has that its base has not, and whether the cause may be named."""
    traces_off, tokens_off = off(arm.answers, base.answers), off(arm.completions, base.completions)
    name = f"{arm.arm} against {base.arm}"
    if not traces_off:
        clean = Finding.CLEAN if arm.proof and base.n else Finding.UNPROVEN
        return Comparison(name, arm.n, 0, 0, None, clean)
    chance = chance_of(arm, base)
    if pooled is not None and base.consistent:
        chance = min(chance, pooled)
    why = list(doubts)
    if not base.consistent:
        why.append(f"{base.arm.capitalize()} does not agree with itself either: run or {arm.arm} may be the cause.")
    if not arm.proof:
        why.append(f"That {arm.arm} was {arm.arm} is unproven: {arm.proof_words}.")
    if cause == Finding.CACHE:
        if not arm.consistent:
            why.append(f"{arm.arm.capitalize()} does not agree with itself.")
        if not base.proof:
            why.append(f"That {base.arm} was {base.arm} is unproven: {base.proof_words}.")
    elif not caches_agree and (None in arm.cached or set(arm.cached) - set(base.cached)):
        told = "is not known" if None in arm.cached else "was not the same in both arms"
        why.append(f"What the server had cached {told}: the prefix cache may be the cause.")
    if chance > _CHANCE:
        why.append(
            f"With {plural(base.n, 'answer')} in {base.arm}, chance alone would leave it without an odd one in "
            f"{percent(chance)} of cases: run or {arm.arm} may be the cause. More of --arms {base.arm}= would tell."
        )
    finding = Finding.UNATTRIBUTED if why else cause
    return Comparison(name, arm.n, traces_off, tokens_off, chance, finding, tuple(why))


def judge_served(run: Run) -> list[Verdict]:
    """A verdict for each prompt and server."""
    order = {impl: i for i, impl in enumerate(sort_impls(c.impl for c in run.completions))}
    known = evidence(run)
    subjects = sorted((prompt, order[impl], impl) for impl, prompt in known)
    odds = {impl: pooled_odds(known, impl) for impl in order}
    return [_judge(run, impl, prompt, known, odds[impl]) for prompt, _, impl in subjects]


def _judge(run: Run, impl: str, prompt: int, known: _Evidence, odds: Mapping[str, float]) -> Verdict:
    arms = known[impl, prompt]
    comparisons = compare_arms(run, impl, prompt, arms, odds)
    n = sum(arm.n for arm in arms.values())
    failed: Counter[str] = Counter()
    for arm in arms.values():
        failed.update(arm.failed)
    notes = notes_on(run, impl, arms, failed)
    notes += beside(run, impl, arms, known.get(("server", prompt), {}))
    nonfinite = sum(arm.nonfinite for arm in arms.values())
    lost = f"{plural(nonfinite, 'completion')} of {n:,} hold NaN or infinite logprobs: wrong; " if nonfinite else ""
    if n < 2:
        text = f"{lost}{plural(n, 'completion')}, so nothing was compared"
        if failed:
            text += f"; {plural(failed.total(), 'request')} failed"
        first, *others = [Finding.WRONG] * bool(nonfinite) + [Finding.UNTESTED]
        return Verdict(impl, first, text, tuple(notes), prompt, tuple(others))
    if not any(arm.tokens for arm in arms.values()):
        text = f"{plural(n, 'completion')} without a token, so nothing was compared"
        return Verdict(impl, Finding.UNTESTED, text, tuple(notes), prompt)
    findings = {c.finding for c in comparisons if c.finding.is_divergence} or {_undiverged(run, arms, comparisons)}
    answers = len({key for arm in arms.values() for key in arm.answers})
    text = counts_text(n, arms, run, impl)
    if nonfinite:
        findings = (findings - {Finding.CLEAN, Finding.UNPROVEN}) | {Finding.WRONG}
        text = lost + text
    elif answers > 1 and not any(f.is_divergence for f in findings):
        findings.add(Finding.UNATTRIBUTED)
        notes.append("The arms that part were not held against one another: run, cache or load may be the cause.")
    if answers > 1:
        findings -= {Finding.CLEAN, Finding.UNPROVEN}
        text += f": {'; '.join(c.text for c in comparisons)}" if comparisons else ""
        notes += [f"{c.name.capitalize()}: {line}" for c in comparisons for line in c.why]
    ordered = [f for f in Finding if f in findings]
    if ordered[0] in (Finding.CLEAN, Finding.UNPROVEN):
        text = f"{text}, {ordered[0]}{bounds(arms)}"
    else:
        text = f"{text}: {', '.join(ordered)}" if answers > 1 else text
    first, *others = ordered
    return Verdict(impl, first, text, tuple(dict.fromkeys(notes)), prompt, tuple(others), "")


def _undiverged(run: Run, arms: Mapping[str, ArmEvidence], comparisons: Sequence[Comparison]) -> Finding:
    """What may be said where nothing parted: of loads if one of them is proven, else that none is."""
    if unanswered(run, arms)[1]:
        return Finding.UNPROVEN
    of_load = [c.finding for c in comparisons if c.name.startswith(("loaded", "chunked"))]
    of_cache = [c.finding for c in comparisons if c.name.startswith("warm")]
    deciding = of_load or of_cache
    return Finding.CLEAN if not deciding or Finding.CLEAN in deciding else Finding.UNPROVEN
