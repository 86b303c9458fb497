"""The verdict on a server's completions, arm by arm: what is on record, the finding, and remarks.

Existence is judged on traces (tokens and logprob bits), consequence on tokens. A difference is blamed on the load, or
on the prefix cache, only where no other cause is left: the arms agree with themselves, the load or the hits are proven,
the server was one server and greedy, and chance is unlikely to put the differing answers in one arm only. Where nothing
differed, only a proven load shows anything about loads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from nondet.core.records import Completion, Round, Run, Traffic
from nondet.sampling.plan import KEYS_LEAST
from nondet.verdict.findings import Finding, Tally, Verdict, bounds_of, change_of, grouped, sort_impls, successful
from nondet.verdict.wording import Reason, reason, stated, words

# arms whose requests go one at a time, those under load, and the arms with which some are compared
_ALONE = ("solo", "cold", "warm", "first")
_LOADED = ("chunked", "equal", "loaded")
_BASES = {"warm": "cold", "chunked": "solo", "equal": "solo", "loaded": "solo"}
_HITS = ("prefix_cache_hits", "cached_tokens", "cache_hits")  # in names of counters of cached prompt tokens
# Contract questions without whose "yes" a comparison means less; their codes explain a "no".
_BROKEN = ("greedy", "max-tokens", "sums", "repeatable", "repeatable-bits")
_CHANCE = 0.01  # if chance puts the differing answers in one of two arms more often, they are not attributed

Answers = Counter[tuple[str, str]]  # (trace, reason why it ended) -> completions
Apart = tuple[int, int]  # answers whose trace, and those whose tokens, the arm that is compared with does not have


def is_endpoint(run: Run) -> bool:
    """Whether the run's completions come from servers."""
    return "endpoint" in run.header.plan


class ArmEvidence(Tally):
    """The completions of one prompt in one arm, and what shows that the arm was what it is called."""

    def __init__(self, arm: str, completions: Sequence[Completion], known: Mapping[tuple[str, int], Round]) -> None:
        super().__init__(completions)
        self.arm = arm
        rounds = [known[number] for number in dict.fromkeys((c.impl, c.round) for c in completions) if number in known]
        seen = [(r, r.traffic) for r in rounds if r.traffic is not None]
        traffic = [t for _, t in seen]
        counted = [[v for name, v in t.counters.items() if any(h in name for h in _HITS)] for t in traffic]
        hits = sum(map(sum, counted)) if counted and all(counted) else None
        # prompt tokens that the server had cached -> the answers; None where it does not report them
        self.by_cache: dict[int | None, Answers] = {}
        for c in self.good:
            cached = c.served.cached_tokens if c.served else None
            # where an answer does not report its cached tokens, the server's counter shows none if it did not change
            self.by_cache.setdefault(0 if cached is None and hits == 0 else cached, Counter())[c.trace, c.finish] += 1
        # so many completions at least ran beside another request: those of a round that did not may be this prompt's
        of_round = Counter(c.round for c in self.good)
        self.concurrent = sum(max(0, of_round[r.round] - max(0, r.targets - t.in_company)) for r, t in seen)
        self.rounds = sum(_formed(t) for t in traffic)  # in which a request under study ran with others
        self.fingerprints = {name for t in traffic for name in t.fingerprints}
        # whether anything shows that the arm was what it is called, and what, with figures
        self.proof, self.shown = _proof(arm, traffic, list(self.by_cache), hits)
        if self.proof and arm not in _ALONE and not self.concurrent:
            self.proof, self.shown = False, reason("none-among", proof=self.shown)

    @property
    def steady(self) -> bool:
        """Whether completions with as many cached tokens agree with each other."""
        return all(len(answers) <= 1 for answers in self.by_cache.values())

    def held_against(self, base: ArmEvidence) -> Iterator[tuple[Answers, Answers]]:
        """The answers with each number of cached tokens, and the base's with as many, or else all of them."""
        for cached, answers in self.by_cache.items():
            yield answers, base.by_cache.get(cached, base.answers)

    def beside(self, *others: ArmEvidence | None) -> ArmEvidence:
        """The arm, and the others' answers with numbers of cached tokens that it did not have."""
        more = [(cached, some) for arm in others if arm and arm.proof for cached, some in arm.by_cache.items()]
        known = {cached: some for cached, some in more if cached not in self.by_cache and None not in self.by_cache}
        base = copy(self)
        base.answers, base.by_cache = sum(known.values(), self.answers), {**self.by_cache, **known}
        return base


def evidence(run: Run) -> dict[tuple[str, int], dict[str, ArmEvidence]]:
    """(server, prompt) -> arm -> its evidence, arms in the order of the plan. One pass: prompts may be many."""
    order = {arm: i for i, arm in enumerate(run.header.plan.get("arms", {}))}
    rounds = {(r.impl, r.round): r for r in run.rounds}
    found = {}
    for subject, mine in grouped(run.completions, lambda c: (c.impl, c.prompt)).items():
        arms = sorted(grouped(mine, lambda c: c.arm).items(), key=lambda item: order.get(item[0], len(order)))
        found[subject] = {arm: ArmEvidence(arm, completions, rounds) for arm, completions in arms}
    return found


def _proven(arms: Mapping[str, ArmEvidence]) -> tuple[int, int]:
    """(requests that ran with others, loads that formed) of one prompt, in arms that are proven. Without a solo arm the
    others are compared with the first of each, so it does not count."""
    proven, first = [a for a in arms.values() if a.arm in _LOADED and a.proof], "solo" not in arms
    return sum(a.concurrent for a in proven) - first, sum(a.rounds for a in proven) - first


def proven_tries(run: Run, impl: str) -> tuple[int, int]:
    """The same over all prompts, which share loads: the tries of a bound."""
    mine = [arms for (name, _), arms in evidence(run).items() if name == impl]
    traffic = [r.traffic for r in run.rounds if r.impl == impl and r.arm in _LOADED and r.traffic is not None]
    loads = sum(map(_formed, traffic)) - any("solo" not in arms for arms in mine)
    return sum(max(0, _proven(arms)[0]) for arms in mine), max(0, loads)


def _formed(traffic: Traffic) -> bool:
    """Whether a round is known to have run requests concurrently, one under study among them."""
    return max(traffic.decoding_most, traffic.running_most or 0) >= 2 and traffic.in_company > 0


def _proof(
    arm: str, traffic: Sequence[Traffic], cached: Sequence[int | None], hits: float | None
) -> tuple[bool, Reason]:
    """Whether anything shows that the arm was what it is called, and what, with figures."""
    if arm in ("cold", "warm"):
        known = [tokens for tokens in cached if tokens is not None]
        if known and None not in cached:
            low, high = min(known), max(known)
            shown = reason("cached", tokens=low if low == high else f"{low}-{high}")
            return low > 0 if arm == "warm" else high == 0, shown
        if hits is None:
            return False, reason("cached-unsaid")
        return (hits > 0) == (arm == "warm"), reason("counter", hits=hits)
    polls, decoding = sum(t.polls for t in traffic), max((t.decoding_most for t in traffic), default=0)
    running = max((t.running_most for t in traffic if t.running_most is not None), default=-1.0)
    reported = running >= 0 and polls > 0
    if arm in _ALONE:
        code = "one-at-a-time" if not reported else "ran-most" if running <= 1 else "others-too"
    elif running >= 2 or decoding >= 2:
        code = "ran-at-once" if running >= 2 else "streamed"
    else:
        code = "not-formed" if reported else "not-streamed"
    return code in ("ran-most", "ran-at-once", "streamed"), reason(code, running=running, polls=polls, n=decoding)


class Server:
    """What is known of a server besides its completions."""

    def __init__(self, run: Run, impl: str) -> None:
        good = successful(c for c in run.completions if c.impl == impl)
        lengths = [(c.served.prompt_tokens, c.served.completion_tokens) for c in good if c.served]
        self.impl = impl
        self.contract = {a.question: a for a in run.contract if a.impl == impl}
        # what it reported of itself; None where that is not on record
        self.seen = next((s for s in run.servers if s.impl == impl), None)
        self.drawn = bool(run.header.plan.get("temperature"))
        self.loads = [name for name in _LOADED if name in run.header.plan.get("arms", {})]  # planned arms under load
        # largest number of tokens of a request, prompt and answer; None where that is not known
        self.keys = max((p + a for p, a in lengths if p is not None and a is not None), default=None)

    def answer(self, question: str) -> str:
        """The contract's answer; "" where the question was not tested."""
        return self.contract[question].answer if question in self.contract else ""

    def unanswered(self, arms: Mapping[str, ArmEvidence]) -> list[str]:
        """Planned arms under load with no answers."""
        return [name for name in self.loads if name not in arms or not arms[name].n]


def unseeded(run: Run) -> dict[str, str]:
    """Servers that drew tokens and are not shown to respect a seed -> the contract's evidence."""
    servers = [Server(run, impl) for impl in dict.fromkeys(c.impl for c in run.completions)] if is_endpoint(run) else []
    drawn = [(s.impl, s.contract.get("seed")) for s in servers if s.drawn and s.answer("seed") != "yes"]
    return {impl: seed.evidence if seed else "it was not tested" for impl, seed in drawn}


def _off(arm: Mapping[Any, int], base: Mapping[Any, int]) -> int:
    return sum(count for answer, count in arm.items() if answer not in base)


def _apart(arm: ArmEvidence, base: ArmEvidence) -> Apart:
    return sum(_off(*pair) for pair in arm.held_against(base)), _off(arm.completions, base.completions)


def _differing(n: int, traces_off: int, tokens_off: int) -> Reason:
    tokens = f"{tokens_off:,}" if tokens_off else "none"
    return reason("differ" if traces_off else "alike", n=n, traces=traces_off, tokens=tokens)


class Comparison:
    """One arm compared with another, or with itself (`base` is then "itself"): of its n completions `apart` differ.
    `cause` is the finding where any do and nothing speaks against it, as `doubts` do."""

    def __init__(
        self, arm: str, base: str, n: int, apart: Apart, cause: Finding, doubts: Sequence[Reason], proven: bool = True
    ) -> None:
        self.arm, self.base, self.n, (self.traces_off, self.tokens_off) = arm, base, n, apart
        clean = Finding.CLEAN if proven else Finding.UNPROVEN
        self.finding = clean if not self.traces_off else Finding.UNATTRIBUTED if doubts else cause
        self.reasons = doubts if self.traces_off else ()  # why the cause of a difference can't be named
        self.why = tuple(map(words, self.reasons))
        self.seen = reason("against", arm=arm, base=base, seen=_differing(n, *apart))
        self.text = words(self.seen)  # "loaded compared with solo: 180 of 200 differ, 3 in tokens"


@dataclass(frozen=True)
class Subject:
    """One prompt of one server. Its comparisons: solo with itself, then each arm with its base."""

    server: Server
    prompt: int
    arms: Mapping[str, ArmEvidence]
    comparisons: tuple[Comparison, ...]


def subjects(run: Run) -> list[Subject]:
    """Every prompt of every server, in the order of the run."""
    known = evidence(run)
    servers = {impl: Server(run, impl) for impl, _ in known}
    # one prompt may be too few to decide, and all of them together enough
    odds = {impl: pooled_odds(known, impl) for impl in servers}
    return [
        Subject(servers[impl], prompt, arms, tuple(compare_arms(servers[impl], arms, odds[impl])))
        for (impl, prompt), arms in known.items()
    ]


def compare_arms(server: Server, arms: Mapping[str, ArmEvidence], odds: Mapping[str, float]) -> Iterator[Comparison]:
    """The comparisons of one prompt; `odds` is from `pooled_odds`, for all prompts."""
    fingerprints = {name for arm in arms.values() for name in arm.fingerprints}
    doubts = stated(
        (server.answer("greedy") == "no" and not server.drawn, reason("not-greedy")),
        (server.drawn and server.answer("seed") != "yes", reason("seed-not-shown")),
        (len(fingerprints) > 1, reason("servers", n=len(fingerprints))),
    )
    some = {name: arm for name, arm in arms.items() if arm.n}
    pairs = _pairs(arms)
    cold, warm = some.get("cold"), some.get("warm")
    caches_agree = bool(cold and warm and cold.proof and warm.proof and set(cold.answers) == set(warm.answers))
    yield from _opening(some, doubts)
    if "solo" in some and some["solo"].n > 1:
        yield _itself(some["solo"], doubts)
    for name in _BASES:
        if name in pairs:
            yield _against(*pairs[name], doubts, caches_agree, odds.get(name))
        elif name in _LOADED and name in some and some[name].n > 1:
            yield _itself(some[name], doubts)


def _pairs(arms: Mapping[str, ArmEvidence]) -> dict[str, tuple[ArmEvidence, ArmEvidence]]:
    """Arm -> the arm and its base, where both have answers; the base of a load also has those of cold and warm."""
    pairs = {}
    for name, base in _BASES.items():
        if name in arms and base in arms and arms[name].n and arms[base].n:
            others = (arms.get("cold"), arms.get("warm")) if base == "solo" else ()
            pairs[name] = (arms[name], arms[base].beside(*others))
    return pairs


def _opening(some: Mapping[str, ArmEvidence], doubts: Sequence[Reason]) -> Iterator[Comparison]:
    """The first answer, compared with all others that came one at a time, if there are any."""
    if "first" not in some:
        return
    opening = min(some["first"].good, key=lambda c: (c.round, c.request))
    alone = Tally(c for name in _ALONE if name in some for c in some[name].good if c is not opening)
    if alone.n:
        differs = (opening.trace, opening.finish) not in alone.answers
        why = reason("first-alone" if len(alone.answers) == 1 else "first-unsteady")
        apart = (int(differs), int(differs and opening.tokens_digest not in alone.completions))
        yield Comparison("first", "solo", 1, apart, Finding.UNATTRIBUTED, (*doubts, why))


def _itself(arm: ArmEvidence, doubts: Sequence[Reason]) -> Comparison:
    apart = (arm.n - max(arm.answers.values()), arm.n - max(arm.completions.values()))
    why = stated(
        (not arm.proof or arm.arm != "solo", reason("others-unknown")),
        (None in arm.by_cache, reason("cache-unknown")),
        (None not in arm.by_cache and arm.steady, reason("cache-split")),
    )
    return Comparison(arm.arm, "itself", arm.n, apart, Finding.RUN_TO_RUN, (*doubts, *why))


def chance_of(arm: ArmEvidence, base: ArmEvidence) -> float:
    """The probability that none of the arm's differing answers falls to the base, if all are dealt at random, as they
    are if the arms do not differ; answers of each number of cached tokens are dealt separately."""
    chance = 0.0
    for some, held in arm.held_against(base):
        n, both, odd = some.total(), some.total() + held.total(), _off(some, held)
        chance += math.lgamma(both - odd + 1) - math.lgamma(n - odd + 1) - (math.lgamma(both + 1) - math.lgamma(n + 1))
    return math.exp(chance)


def pooled_odds(known: Mapping[tuple[str, int], Mapping[str, ArmEvidence]], impl: str) -> dict[str, float]:
    """Arm -> the probability of what was seen in all prompts of a server, each of which is dealt separately. An arm
    whose base is inconsistent at some prompt has none: the prompts with a consistent base would be picked by luck, and
    a product of probabilities over such a choice is too small."""
    mine, odds = [_pairs(arms) for (name, _), arms in known.items() if name == impl], dict[str, float]()
    for arm in _BASES:
        pairs = [of[arm] for of in mine if arm in of]
        if pairs and all(base.steady for _, base in pairs):
            odds[arm] = math.prod(chance_of(*pair) for pair in pairs)
    return odds


def _against(
    arm: ArmEvidence, base: ArmEvidence, doubts: Sequence[Reason], caches_agree: bool, pooled: float | None
) -> Comparison:
    """The arm's answers that its base does not have, and whether the cause may be named."""
    of_cache, unknown, chance = arm.arm == "warm", None in arm.by_cache, chance_of(arm, base)
    if pooled is not None and base.steady:
        chance = min(chance, pooled)
    names = {"arm": arm.arm, "base": base.arm, "cause": "prefix cache" if of_cache else "load"}
    other_cache = not of_cache and not caches_agree and (unknown or set(arm.by_cache) - set(base.by_cache))
    why = stated(
        (not base.steady, reason("base-unsteady", **names)),
        (not arm.proof, reason("arm-unproven", arm=arm.arm, proof=arm.shown)),
        (of_cache and len(arm.answers) > 1, reason("arm-unsteady", **names)),
        (of_cache and not base.proof, reason("arm-unproven", arm=base.arm, proof=base.shown)),
        (other_cache, reason("cache-unknown" if unknown else "cache-differs")),
        (chance > _CHANCE, reason("chance", n=base.answers.total(), share=chance, **names)),
    )
    cause = Finding.CACHE if of_cache else Finding.BATCH
    return Comparison(arm.arm, base.arm, arm.n, _apart(arm, base), cause, (*doubts, *why), arm.proof)


def judge_served(run: Run) -> list[Verdict]:
    """A verdict for each prompt and server."""
    order = sort_impls(c.impl for c in run.completions)
    known = sorted(subjects(run), key=lambda s: (s.prompt, order.index(s.server.impl)))
    first = {s.prompt: s for s in known if s.server.impl == "server"}
    return [_judge(subject, first.get(subject.prompt)) for subject in known]


def _judge(subject: Subject, first: Subject | None) -> Verdict:
    """The verdict on one prompt's answers. `first`: the same prompt on the first server."""
    server, arms = subject.server, subject.arms
    whole = Tally(c for arm in arms.values() for c in arm.every)
    reasons = _reasons(server, arms, whole) + ([_beside(subject, first)] if server.impl != "server" else [])
    if whole.n > 1 and any(c.n_tokens for c in whole.good):
        verdict = _judge_bits(subject, whole, reasons)
    else:
        count = reason("too-few" if whole.n < 2 else "no-tokens", n=whole.n)
        verdict = Verdict(server.impl, (Finding.UNTESTED,), (count,), tuple(reasons), subject.prompt)
    verdict = whole.checked(verdict)
    for question in ("tempered", "independent"):
        if server.drawn and server.answer(question) == "no":
            verdict = verdict.called_wrong(reason(question, evidence=server.contract[question].evidence))
    return verdict


def _reasons(server: Server, arms: Mapping[str, ArmEvidence], whole: Tally) -> list[Reason]:
    reasons = [*whole.notes]
    for question, a in sorted(server.contract.items(), key=lambda item: item[0] == "seed"):  # that one last
        if (question in _BROKEN and a.answer == "no") or (question == "seed" and server.drawn):
            reasons.append(reason("contract", what=reason(question, answer=a.answer), evidence=a.evidence))
    reasons += stated((server.answer("greedy") == "unknown" and not server.drawn, reason("greedy-unknown")))
    for arm in arms.values():
        if arm.arm in (*_LOADED, "cold", "warm") and not arm.proof:
            reasons.append(reason("arm-unproven", arm=arm.arm, proof=arm.shown))
        elif arm.arm in _LOADED:
            solo = arm.n - arm.concurrent
            unshown = reason("arm-unshown", n=solo) if solo else None
            reasons.append(reason("arm-shown", arm=arm.arm, proof=arm.shown, unshown=unshown))
    reasons += [reason("arm-unanswered", arm=name) for name in server.unanswered(arms)]
    return reasons + stated(
        (not any(name in arms for name in _LOADED), reason("no-load")),
        (server.seen is not None and not server.seen.fingerprint, reason("no-fingerprint")),
    )


def _beside(subject: Subject, first: Subject | None) -> Reason:
    """A second server compared with the first: solo answers that the first does not have. Neither is at fault."""
    mine, theirs = subject.arms.get("solo"), first.arms.get("solo") if first else None
    if first is None or mine is None or theirs is None or not mine.n or not theirs.n:
        return reason("not-held")
    known = [s.server.seen.known_by if s.server.seen else None for s in (subject, first)]
    if known[0] == known[1]:
        return reason("beside", seen=_differing(mine.n, *_apart(mine, theirs)))
    # tokens are identified in different ways in both; text, which older files do not have, is not
    texts = [Counter(c.served.text if c.served else "" for c in arm.good) for arm in (mine, theirs)]
    if "" in texts[0] | texts[1]:
        return reason("known-otherwise", mine=known[0], first=known[1])
    odd_texts = _off(*texts)
    return reason("by-texts", seen=reason("differ-texts" if odd_texts else "alike", n=mine.n, traces=odd_texts))


def _judge_bits(subject: Subject, whole: Tally, reasons: Sequence[Reason]) -> Verdict:
    server, comparisons, bounds = subject.server, subject.comparisons, tuple[Reason, ...]()
    seen, keys = server.seen, server.keys
    by = None if seen is None or seen.known_by == "ids" else reason("compared-by", known_by=seen.known_by)
    counts = whole.clauses(by, logprobs=seen is None or seen.logprobs)
    findings: tuple[Finding, ...]
    if len(whole.answers) == 1:
        # about loads if one of them is proven, else that none is
        of_load = [c.finding for c in comparisons if c.arm in _LOADED]
        deciding = of_load or [c.finding for c in comparisons if c.arm == "warm"]
        silent = server.loads and len(server.unanswered(subject.arms)) == len(server.loads)
        clean = not silent and (not deciding or Finding.CLEAN in deciding)
        findings, (n, loads) = (Finding.CLEAN if clean else Finding.UNPROVEN,), _proven(subject.arms)
        bounds = (bounds_of(n, "request", loads, "load"),) if n > 0 and loads > 0 else ()
        counts.append(reason("finding", findings=findings))
        few = keys is not None and keys <= KEYS_LEAST and server.loads
        reasons = [*stated((few, reason("few-keys", n=keys))), *reasons]
    else:
        every = {c.finding for c in comparisons if c.finding.is_fault}
        findings = tuple(sorted(every, key=list(Finding).index))
        counts += stated((comparisons, reason("arms", comparisons=tuple(c.seen for c in comparisons))))
        counts.append(reason("findings", findings=findings or Finding.UNATTRIBUTED))
        # that an arm is unproven is among the reasons already
        doubts = ((c, why) for c in comparisons for why in c.reasons if why.code != "arm-unproven")
        apart = stated((not findings, reason("arms-apart")))
        reasons = [*reasons, *apart, *(reason("doubt", arm=c.arm, base=c.base, why=why) for c, why in doubts)]
        findings = findings or (Finding.UNATTRIBUTED,)
    changes = change_of(whole.texts, findings)
    return Verdict(server.impl, findings, tuple(counts), tuple(reasons), subject.prompt, bounds, changes)
