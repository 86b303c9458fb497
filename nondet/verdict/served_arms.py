"""What is on record of each arm of an endpoint run: its completions by what they gave, and the proof of its load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nondet.core.records import Completion, Round, Run, Traffic
from nondet.verdict.ends import Ends, ends_of
from nondet.verdict.findings import plural

__all__ = ["ALONE", "ArmEvidence", "arm_evidence", "evidence", "is_endpoint", "proven_tries"]

# Arms whose requests go one at a time.
ALONE = ("solo", "cold", "warm")
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
        proof_words: The same with figures.
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
    proof_words: str
    in_company: int
    rounds: int
    traffic: Sequence[Traffic]

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
    proof, words = _proof(arm, traffic, cached, hits)
    if proof and arm not in ALONE and not company:
        proof, words = "", f"{words}, and none of these is known to have been among them"
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
        proof_words=words,
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
) -> tuple[str, str]:
    """What shows that the arm was what it is called."""
    polls = sum(t.polls for t in traffic)
    running = max((t.running_most for t in traffic if t.running_most is not None), default=None)
    if arm in ("cold", "warm"):
        known = {tokens for tokens in cached if tokens is not None}
        if known and None not in cached:
            low, high = min(known), max(known)
            span = f"{low}" if low == high else f"{low} to {high}"
            fits = high == 0 if arm == "cold" else low > 0
            words = f"the server had {span} prompt tokens cached"
            return ("metrics", words) if fits else ("", f"{words}, so it was not {arm}")
        if hits is not None:
            words = f"the server's counter moved by {hits:g} cached prompt tokens"
            return ("metrics", words) if (hits > 0) == (arm == "warm") else ("", f"{words}, so it was not {arm}")
        return "", "the server does not say what it had cached"
    if arm == "solo":
        if running is None or not polls:
            return "", "one at a time from here; whether others asked the server is not known"
        if running <= 1:
            return "metrics", f"the server ran {running:g} at most, in {plural(polls, 'poll')}"
        return "", f"the server ran up to {running:g}: others asked it too"
    decoding = max((t.decoding_most for t in traffic), default=0)
    if running is not None and running >= 2:
        waiting = max((t.waiting_most for t in traffic if t.waiting_most is not None), default=0)
        queued = f", {waiting:g} waiting" if waiting else ""
        return "metrics", f"the server ran up to {running:g} at once{queued}, in {plural(polls, 'poll')}"
    if decoding >= 2:
        return "streams", f"up to {decoding} answers streamed at the same time"
    if running is not None and polls:
        return "", f"the server ran {running:g} at most: the load did not form"
    return "", "answers did not stream, and the server does not say what it runs"
