"""The verdict on a server's completions, arm by arm: what is on record, the finding, and what is said beside it.

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

from nondet.core.records import Completion, Round, Run, Traffic
from nondet.core.statistics import one_sided_bound
from nondet.verdict.findings import Ends, Finding, Verdict, distinct, ends_of, ends_reasons, sort_impls
from nondet.verdict.wording import Reason, reason, words

# Arms whose requests go one at a time, and those under load.
ALONE = ("solo", "cold", "warm")
LOADED = ("chunked", "loaded")
# Counters of cached prompt tokens that were used, by parts of their names.
_HITS = ("prefix_cache_hits", "cached_tokens", "cache_hit")


def is_endpoint(run: Run) -> bool:
    """Whether the run's completions come from servers."""
    return "endpoint" in run.header.plan


@dataclass(frozen=True)
class ArmEvidence:
    """The completions of one prompt in one arm, and what shows that the arm was what it is called.

    Attributes:
        traces: Trace -> completions.
        answers: The same, of traces with the reasons why they ended.
        texts: Text -> completions; "" stands for those of older files, which don't say.
        ends: Trace -> reason why it ended -> completions.
        cached: Prompt tokens that the server had cached -> completions; None where it does not say.
        proof: "metrics" where the server's counters show it, "streams" where answers streamed at the same time,
            "" where nothing does.
        shown: The same with figures.
        tokens: Tokens of the completions, all together.
        in_company: Completions that are known to have run beside another request: no fewer than these.
        rounds: Rounds that have an end on record; under load those in which a request under study had company.
    """

    arm: str
    n: int
    tokens: int
    failed: Mapping[str, int]
    nonfinite: int
    completions: Mapping[str, int]
    traces: Mapping[str, int]
    answers: Mapping[str, int]
    texts: Mapping[str, int]
    ends: Ends
    by_cache: Mapping[int | None, Mapping[str, int]]
    cached: Mapping[int | None, int]
    proof: str
    shown: Reason
    in_company: int
    rounds: int
    traffic: Sequence[Traffic]

    @property
    def proof_words(self) -> str:
        """What shows, or fails to show, that the arm was what it is called, in a phrase."""
        return words(self.shown)

    @property
    def consistent(self) -> bool:
        """Whether all of them agree in every bit, and in how they ended."""
        return len(self.answers) <= 1


def evidence(run: Run) -> dict[tuple[str, int], dict[str, ArmEvidence]]:
    """(server, prompt) -> arm -> its evidence, arms in the order of the plan. One pass: there may be many prompts."""
    members: dict[tuple[str, int], dict[str, list[Completion]]] = {}
    for completion in run.completions:
        place = members.setdefault((completion.impl, completion.prompt), {})
        place.setdefault(completion.arm, []).append(completion)
    rounds = {(r.impl, r.round): r for r in run.rounds if r.traffic is not None}
    order = list(run.header.plan.get("arms", {}))
    return {
        (impl, prompt): {
            arm: _arm(arm, arms[arm], rounds)
            for arm in sorted(arms, key=lambda name: order.index(name) if name in order else len(order))
        }
        for (impl, prompt), arms in members.items()
    }


def arm_evidence(run: Run, impl: str, prompt: int) -> dict[str, ArmEvidence]:
    """Of one server and prompt alone."""
    return evidence(run).get((impl, prompt), {})


def _arm(arm: str, completions: Sequence[Completion], known: Mapping[tuple[str, int], Round]) -> ArmEvidence:
    good = [c for c in completions if c.status == "ok"]
    numbers = dict.fromkeys((c.impl, c.round) for c in completions)
    rounds = [known[number] for number in numbers if number in known]
    traffic = [r.traffic for r in rounds if r.traffic is not None]
    hits = _hits(traffic)
    by_cache: dict[int | None, Counter[str]] = {}
    for c in good:
        told = c.served.cached_tokens if c.served else None
        # what an answer does not say the server's counter does, where it never moved
        by_cache.setdefault(0 if told is None and hits == 0 else told, Counter())[_answer(c)] += 1
    cached = {tokens: counts.total() for tokens, counts in by_cache.items()}
    # which of a round's targets were alone is not on record: they may all have been this prompt's
    good_in = Counter(c.round for c in good)
    company = sum(
        max(0, good_in[r.round] - max(0, r.targets - t.in_company)) for r, t in zip(rounds, traffic, strict=True)
    )
    proof, shown = _proof(arm, traffic, cached, hits)
    if proof and arm not in ALONE and not company:
        proof, shown = "", reason("none-among", proof=shown)
    return ArmEvidence(
        arm=arm,
        n=len(good),
        tokens=sum(c.n_tokens for c in good),
        failed=Counter((c.served.kind if c.served else "") or "error" for c in completions if c.status != "ok"),
        nonfinite=sum(c.nonfinite > 0 for c in good),
        completions=Counter(c.tokens_digest for c in good),
        traces=Counter(c.trace for c in good),
        answers=Counter(map(_answer, good)),
        texts=Counter(c.served.text if c.served else "" for c in good),
        ends=ends_of(good),
        by_cache=by_cache,
        cached=cached,
        proof=proof,
        shown=shown,
        in_company=company,
        rounds=len(rounds) if arm in ALONE else sum(_formed(t) for t in traffic),
        traffic=traffic,
    )


def _answer(completion: Completion) -> str:
    """What two answers must have in common to be one."""
    return f"{completion.trace} {completion.finish}"


def proven_tries(run: Run, impl: str) -> tuple[int, int]:
    """(requests that ran beside others, loads that formed) over all prompts: what a bound may rest on.

    Without a solo arm the first of each is what the others are held against.
    """
    requests = without = 0
    for (name, _), arms in evidence(run).items():
        if name == impl:
            loaded = sum(a.in_company for a in arms.values() if a.arm not in ALONE and a.proof)
            requests += loaded if "solo" in arms else max(0, loaded - 1)
            without += "solo" not in arms
    loads = sum(
        r.traffic is not None and r.arm not in ALONE and _formed(r.traffic) for r in run.rounds if r.impl == impl
    )
    return requests, max(0, loads - 1) if without else loads


def _formed(traffic: Traffic) -> bool:
    """Whether a round is known to have run requests beside each other, one under study among them."""
    together = traffic.decoding_most >= 2 or (traffic.running_most is not None and traffic.running_most >= 2)
    return together and traffic.in_company > 0


def _hits(traffic: Sequence[Traffic]) -> float | None:
    """Cached prompt tokens that the server's own counter counted over the rounds; None where it has none."""
    moved = [[v for name, v in t.counters.items() if any(h in name for h in _HITS)] for t in traffic]
    return sum(map(sum, moved)) if moved and all(moved) else None


def _proof(
    arm: str, traffic: Sequence[Traffic], cached: Mapping[int | None, int], hits: float | None
) -> tuple[str, Reason]:
    """What shows that the arm was what it is called."""
    polls = sum(t.polls for t in traffic)
    running = max((t.running_most for t in traffic if t.running_most is not None), default=None)
    if arm in ("cold", "warm"):
        known = {tokens for tokens in cached if tokens is not None}
        if known and None not in cached:
            low, high = min(known), max(known)
            fits = high == 0 if arm == "cold" else low > 0
            shown = reason("cached", low=low, high=None if low == high else reason("up-to", n=high))
        elif hits is not None:
            fits, shown = (hits > 0) == (arm == "warm"), reason("counter", hits=hits)
        else:
            return "", reason("cached-unsaid")
        return ("metrics", shown) if fits else ("", reason("was-not", proof=shown, arm=arm))
    if arm == "solo":
        if running is None or not polls:
            return "", reason("one-at-a-time")
        if running <= 1:
            return "metrics", reason("ran-most", running=running, polls=polls)
        return "", reason("others-too", running=running)
    decoding = max((t.decoding_most for t in traffic), default=0)
    if running is not None and running >= 2:
        waiting = max((t.waiting_most for t in traffic if t.waiting_most is not None), default=0)
        queued = reason("waiting", n=waiting) if waiting else None
        return "metrics", reason("ran-at-once", running=running, waiting=queued, polls=polls)
    if decoding >= 2:
        return "streams", reason("streamed", n=decoding)
    if running is not None and polls:
        return "", reason("not-formed", running=running)
    return "", reason("not-streamed")


# Contract questions without whose "yes" a comparison means less; their codes say what a "no" means.
_BROKEN = ("greedy", "max-tokens", "sums", "repeatable", "repeatable-bits")


def parted(n: int, traces_off: int, tokens_off: int) -> Reason:
    """How many of n parted.

    Args:
        traces_off: Answers of which the other arm has none with these tokens, these logprobs and this end.
        tokens_off: Of which it has none with these tokens.
    """
    return reason("parted" if traces_off else "alike", n=n, traces=traces_off, tokens=tokens_off)


def off(arm: Mapping[str, int], base: Mapping[str, int]) -> int:
    """Answers of the arm that the base has not."""
    return sum(count for digest, count in arm.items() if digest not in base)


def unanswered(run: Run, arms: Mapping[str, ArmEvidence]) -> tuple[list[str], bool]:
    """Planned arms under load of which no answer came, and whether that leaves no load at all."""
    planned = [name for name in LOADED if name in run.header.plan.get("arms", {})]
    without = [name for name in planned if name not in arms or not arms[name].n]
    return without, bool(planned) and len(without) == len(planned)


def _distinct(n: int, arms: Mapping[str, ArmEvidence], run: Run, impl: str) -> list[Reason]:
    """How many distinct completions and traces there are, and how many equal ones ended otherwise."""
    ends = [arm.ends for arm in arms.values()]
    completions = len({digest for arm in arms.values() for digest in arm.completions})
    traces = len({trace for arm in ends for trace in arm})
    seen = next((s for s in run.servers if s.impl == impl), None)
    by = None if seen is None or seen.known_by == "ids" else reason("compared-by", known_by=seen.known_by)
    if seen is None or seen.logprobs:
        return distinct(n, completions, traces, ends, by, known=True)
    first, *rest = distinct(n, completions, completions, ends, by, known=True)
    return [first, reason("no-logprobs"), *rest]


def _bounds(arms: Mapping[str, ArmEvidence]) -> tuple[Reason, ...]:
    """What no divergence leaves, by loads and by requests; of proven loads alone."""
    proven = [a for a in (arms.get("loaded"), arms.get("chunked")) if a is not None and a.proof]
    n, rounds = sum(a.in_company for a in proven), sum(a.rounds for a in proven)
    if "solo" not in arms:  # then the first one is what the others are held against
        n, rounds = n - 1, rounds - 1
    if n < 1 or rounds < 1:
        return ()
    rate, requests = one_sided_bound(rounds), one_sided_bound(n)
    return (reason("bounds-loads", rate=rate, n=rounds, requests=requests, of=n),)


def _reasons(run: Run, impl: str, arms: Mapping[str, ArmEvidence], failed: Counter[str]) -> list[Reason]:
    """What a reader should know of the run beside the finding."""
    reasons = ends_reasons([arm.ends for arm in arms.values()])
    if failed:
        reasons.append(reason("kinds-failed", n=failed.total(), kinds=failed))
    answers = {a.question: a for a in run.contract if a.impl == impl}
    drawn = bool(run.header.plan.get("temperature"))
    told = [(q, a.evidence) for q, a in answers.items() if q in _BROKEN and a.answer == "no"]
    seed = answers.get("seed")
    if seed is not None and drawn:
        told.append((f"seed-{seed.answer if seed.answer in ('yes', 'no') else 'unknown'}", seed.evidence))
    reasons += [reason("contract", what=reason(code), evidence=evidence) for code, evidence in told]
    greedy = answers.get("greedy")
    if greedy is not None and greedy.answer == "unknown" and not drawn:
        reasons.append(reason("greedy-unknown"))
    for arm in arms.values():
        if arm.arm in (*LOADED, "cold", "warm") and not arm.proof:
            reasons.append(reason("arm-unproven", arm=arm.arm, proof=arm.shown))
        elif arm.arm in LOADED:
            alone = arm.n - arm.in_company
            beside = reason("arm-alone", n=alone) if alone else None
            reasons.append(reason("arm-shown", arm=arm.arm, proof=arm.shown, alone=beside))
    without, _ = unanswered(run, arms)
    reasons += [reason("arm-unanswered", arm=name) for name in without]
    if not any(name in arms for name in LOADED):
        reasons.append(reason("no-load"))
    seen = next((s for s in run.servers if s.impl == impl), None)
    if seen is not None and not seen.fingerprint:
        reasons.append(reason("no-fingerprint"))
    return reasons


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


def _beside(run: Run, impl: str, arms: Mapping[str, ArmEvidence], first: Mapping[str, ArmEvidence]) -> list[Reason]:
    """A second server against the first: what its solo answers have that the first one's have not. No fault of any."""
    if impl == "server":
        return []
    mine, theirs = arms.get("solo"), first.get("solo")
    known = {s.impl: s.known_by for s in run.servers}
    if mine is None or theirs is None or not mine.n or not theirs.n:
        return [reason("not-held")]
    if known.get(impl) != known.get("server"):
        if "" not in {*mine.texts, *theirs.texts}:  # what tokens are known by is no one thing in both; text is
            odd = off(mine.texts, theirs.texts)
            return [reason("by-texts", seen=reason("parted-texts" if odd else "alike", n=mine.n, traces=odd))]
        return [reason("known-otherwise", mine=known.get(impl), first=known.get("server"))]
    seen = parted(mine.n, off(mine.answers, theirs.answers), off(mine.completions, theirs.completions))
    return [reason("beside", seen=seen)]


_Evidence = Mapping[tuple[str, int], Mapping[str, ArmEvidence]]
# Chance at which a split of the odd ones between two arms is taken for none.
_CHANCE = 0.01


@dataclass(frozen=True)
class Comparison:
    """One arm against another, or against itself.

    Attributes:
        arm, base: Their names; the base is "itself" where there is no other.
        n: Completions of the arm.
        traces_off, tokens_off: Those whose trace, whose tokens, the other arm has not.
        chance: That dealing the odd ones at random would put none of them into the other arm; None where that is no
            question.
        finding: What follows.
        reasons: What stands against naming the cause; empty where it is named or nothing parted.
    """

    arm: str
    base: str
    n: int
    traces_off: int
    tokens_off: int
    chance: float | None
    finding: Finding
    reasons: tuple[Reason, ...] = ()

    @property
    def name(self) -> str:
        """ "loaded against solo"."""
        return f"{self.arm} against {self.base}"

    @property
    def seen(self) -> Reason:
        """What came of it."""
        return reason("against", arm=self.arm, base=self.base, seen=parted(self.n, self.traces_off, self.tokens_off))

    @property
    def text(self) -> str:
        """ "loaded against solo: 180 of 200 part, 3 in tokens"."""
        return words(self.seen)

    @property
    def why(self) -> tuple[str, ...]:
        """The reasons, a sentence each."""
        return tuple(map(words, self.reasons))


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
    for name in LOADED:
        arm = arms.get(name)
        if arm is None or not arm.n:
            continue
        if solo is not None and solo.n:
            comparisons.append(_against(arm, solo, doubts, Finding.BATCH, caches_agree, odds.get(name)))
        elif arm.n > 1:
            comparisons.append(_itself(arm, [*doubts, reason("no-solo")]))
    return comparisons


def _doubts(run: Run, impl: str, arms: Mapping[str, ArmEvidence]) -> list[Reason]:
    """What stands against naming any cause."""
    doubts = []
    answers = {a.question: a.answer for a in run.contract if a.impl == impl}
    drawn = bool(run.header.plan.get("temperature"))
    if answers.get("greedy") == "no" and not drawn:
        doubts.append(reason("not-greedy"))
    if drawn and answers.get("seed") != "yes":
        doubts.append(reason("seed-not-shown"))
    fingerprints = {name for arm in arms.values() for t in arm.traffic for name in t.fingerprints}
    if len(fingerprints) > 1:
        doubts.append(reason("servers", n=len(fingerprints)))
    return doubts


def _itself(arm: ArmEvidence, doubts: Sequence[Reason]) -> Comparison:
    """Whether the arm agrees with itself."""
    traces_off = arm.n - max(arm.answers.values())
    tokens_off = arm.n - max(arm.completions.values())
    if not traces_off:
        return Comparison(arm.arm, "itself", arm.n, 0, 0, None, Finding.CLEAN)
    why = list(doubts)
    if not arm.proof or arm.arm != "solo":
        why.append(reason("others-unknown"))
    if None in arm.cached:
        why.append(reason("cache-unknown"))
    elif all(len(traces) == 1 for traces in arm.by_cache.values()):
        why.append(reason("cache-split"))
    finding = Finding.UNATTRIBUTED if why else Finding.RUN_TO_RUN
    return Comparison(arm.arm, "itself", arm.n, traces_off, tokens_off, None, finding, tuple(why))


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
    doubts: Sequence[Reason],
    cause: Finding,
    caches_agree: bool = False,
    pooled: float | None = None,
) -> Comparison:
    """What the arm has that its base has not, and whether the cause may be named."""
    traces_off, tokens_off = off(arm.answers, base.answers), off(arm.completions, base.completions)
    if not traces_off:
        clean = Finding.CLEAN if arm.proof and base.n else Finding.UNPROVEN
        return Comparison(arm.arm, base.arm, arm.n, 0, 0, None, clean)
    chance = chance_of(arm, base)
    if pooled is not None and base.consistent:
        chance = min(chance, pooled)
    names = {"arm": arm.arm, "base": base.arm}
    why = list(doubts)
    if not base.consistent:
        why.append(reason("base-unsteady", **names))
    if not arm.proof:
        why.append(reason("not-shown", arm=arm.arm, proof=arm.shown))
    if cause == Finding.CACHE:
        if not arm.consistent:
            why.append(reason("arm-unsteady", **names))
        if not base.proof:
            why.append(reason("not-shown", arm=base.arm, proof=base.shown))
    elif not caches_agree and (None in arm.cached or set(arm.cached) - set(base.cached)):
        why.append(reason("cache-unknown" if None in arm.cached else "cache-differs"))
    if chance > _CHANCE:
        why.append(reason("chance", n=base.n, share=chance, **names))
    finding = Finding.UNATTRIBUTED if why else cause
    return Comparison(arm.arm, base.arm, arm.n, traces_off, tokens_off, chance, finding, tuple(why))


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
    reasons = _reasons(run, impl, arms, failed) + _beside(run, impl, arms, known.get(("server", prompt), {}))
    lost = sum(arm.nonfinite for arm in arms.values())
    clauses = [reason("nonfinite", n=lost, of=n)] if lost else []
    answers = len({key for arm in arms.values() for key in arm.answers})
    bounds: tuple[Reason, ...] = ()
    if n < 2:
        clauses.append(reason("too-few", n=n))
        clauses += [reason("failed-beside", n=failed.total())] if failed else []
        findings = {Finding.UNTESTED} | ({Finding.WRONG} if lost else set())
    elif not any(arm.tokens for arm in arms.values()):
        clauses, findings = [reason("no-tokens", n=n)], {Finding.UNTESTED}
    else:
        clauses += _distinct(n, arms, run, impl)
        findings = {c.finding for c in comparisons if c.finding.is_divergence} or {_undiverged(run, arms, comparisons)}
        if lost:
            findings = (findings - {Finding.CLEAN, Finding.UNPROVEN}) | {Finding.WRONG}
        elif answers > 1 and not any(f.is_divergence for f in findings):
            findings = {Finding.UNATTRIBUTED}
            reasons.append(reason("arms-apart"))
        if answers > 1:
            clauses += [reason("arms", comparisons=tuple(c.seen for c in comparisons))] if comparisons else []
            reasons += [reason("doubt", arm=c.arm, base=c.base, why=why) for c in comparisons for why in c.reasons]
    ordered = tuple(f for f in Finding if f in findings)
    if ordered[0] in (Finding.CLEAN, Finding.UNPROVEN):
        clauses.append(reason("finding", findings=ordered[0]))
        bounds = _bounds(arms)
    elif answers > 1 and ordered[-1] != Finding.UNTESTED:
        clauses.append(reason("findings", findings=ordered))
    return Verdict(impl, ordered[0], tuple(clauses), tuple(reasons), prompt, ordered[1:], bounds)


def _undiverged(run: Run, arms: Mapping[str, ArmEvidence], comparisons: Sequence[Comparison]) -> Finding:
    """What may be said where nothing parted: of loads if one of them is proven, else that none is."""
    if unanswered(run, arms)[1]:
        return Finding.UNPROVEN
    of_load = [c.finding for c in comparisons if c.arm in LOADED]
    of_cache = [c.finding for c in comparisons if c.arm == "warm"]
    deciding = of_load or of_cache
    return Finding.CLEAN if not deciding or Finding.CLEAN in deciding else Finding.UNPROVEN
