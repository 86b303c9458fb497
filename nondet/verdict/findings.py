"""Findings about an implementation, strongest first, and how completions ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeVar

from nondet.core.records import Completion, Role, role_of
from nondet.core.statistics import one_sided_bound
from nondet.verdict.wording import Reason, phrase, reason, stated, words
from nondet.verdict.wording import plural as plural  # the reports' too

_T = TypeVar("_T")
_K = TypeVar("_K", bound=Hashable)


class Finding(StrEnum):
    """What was found of one implementation, in the words of the report, the strongest first."""

    WRONG = "wrong"
    RUN_TO_RUN = "run-to-run nondeterministic"
    BATCH = "batch-dependent"
    CACHE = "dependent on the prefix cache"
    UNATTRIBUTED = "divergent"
    OTHER = "dependent on what was varied"
    MISMATCH = "mismatched"
    ORDER = "dependent on the order of reduction"
    CLEAN = "no divergence observed"
    UNPROVEN = "no divergence observed under a load that is unproven"
    UNTESTED = "nothing compared"

    @property
    def is_fault(self) -> bool:
        """Whether a gate must fail: bits differ that a user would want equal, or the result is no answer at all."""
        return self not in (Finding.ORDER, Finding.CLEAN, Finding.UNPROVEN, Finding.UNTESTED)


class Effect(StrEnum):
    """What a finding changes for a user of the result, as a report's first words; the gravest first."""

    WRONG = "Wrong result"
    OUTPUT = "Output changes"
    LOGPROBS = "Only logprobs change"
    RUNS = "Runs differ"
    MODEL = "Kernels differ in the model"
    KERNELS = "Kernels differ in isolation"
    SIDES = "Sampler and trainer differ"
    NEIGHBOURS = "Nearest neighbours change"
    VECTORS = "Only vector bits change"
    NONE = "No difference seen"
    SO_FAR = "No difference seen so far"
    UNPROVEN = "No difference seen, load unproven"
    ORDER = "Sums depend on their order"
    NOTHING = "Nothing compared"
    NO_STOCK = "Stock not measured"
    NOT_GREEDY = "Not greedy"
    UNKNOWN = "Not known"
    SPEED = "Speed measured"

    @property
    def rank(self) -> int:
        """The position in the order of gravity: 0 is the gravest."""
        return list(Effect).index(self)

    @property
    def is_change(self) -> bool:
        """Whether anything that a user would want equal is not."""
        return self.rank < Effect.NONE.rank

    @property
    def is_answer(self) -> bool:
        """Whether it says that something changes, or that nothing was seen to."""
        return self.rank <= Effect.UNPROVEN.rank


# The effect of these findings, whatever was compared.
_EFFECTS = {Finding.WRONG: Effect.WRONG, Finding.MISMATCH: Effect.SIDES, Finding.ORDER: Effect.ORDER}
_EFFECTS |= {Finding.CLEAN: Effect.NONE, Finding.UNPROVEN: Effect.UNPROVEN, Finding.UNTESTED: Effect.NOTHING}


def change_of(texts: int, findings: Iterable[str]) -> Effect:
    """What a divergence of completions changes: the output if there are several texts, else the run or the logprobs."""
    if texts > 1:
        return Effect.OUTPUT
    return Effect.RUNS if Finding.RUN_TO_RUN in findings else Effect.LOGPROBS


@dataclass(frozen=True)
class Verdict:
    """What a run shows of one implementation: facts, whose words `nondet.verdict.wording` has."""

    impl: str
    findings: tuple[Finding, ...]  # the strongest first; the others are of other cases
    counts: tuple[Reason, ...]  # what was compared and the result, clause by clause
    reasons: tuple[Reason, ...] = ()  # what the verdict does not cover, and what supports or weakens it
    prompt: int | None = None  # index of the prompt, for a sampled run
    bounds: tuple[Reason, ...] = ()  # what can be excluded where nothing diverged, and what can't
    # what changes where bits differ; for operators tested by themselves, their results
    changes: Effect = Effect.KERNELS

    @property
    def effect(self) -> Effect:
        """The verdict's effect for a user."""
        return _EFFECTS.get(self.finding, self.changes)

    @property
    def finding(self) -> Finding:
        """The strongest finding."""
        return self.findings[0]

    @property
    def clauses(self) -> tuple[Reason, ...]:
        """Counts and bounds."""
        return (*self.counts, *self.bounds)

    @property
    def text(self) -> str:
        """The verdict in a phrase that follows "impl: "."""
        return phrase(self.clauses)

    @property
    def notes(self) -> tuple[str, ...]:
        """The reasons as whole sentences, each once."""
        return tuple(dict.fromkeys(map(words, self.reasons)))

    @property
    def is_fault(self) -> bool:
        """Whether any finding is one."""
        return any(finding.is_fault for finding in self.findings)

    def called_wrong(self, why: Reason) -> Verdict:
        """The verdict on completions some of which are wrong: NaN agrees with NaN, whatever was computed. A clean
        verdict goes, with its bounds and its last count, which says that it was clean; a divergence stays."""
        clean = self.finding in (Finding.CLEAN, Finding.UNPROVEN)
        findings = (Finding.WRONG,) if clean else (Finding.WRONG, *self.findings)
        counts = (why, *(self.counts[:-1] if clean else self.counts))
        return replace(self, findings=findings, counts=counts, bounds=() if clean else self.bounds)

    @property
    def role(self) -> Role:
        """What the implementation is."""
        return role_of(self.impl)


def subject_unit(plan: Mapping[str, Any]) -> str:
    """What the subjects of a plan are called: "prompt", "seed" (of one prompt), or "seeded prompt"."""
    seeds = [p.get("seed") for p in plan.get("prompts") or []]
    if not seeds or seeds[0] is None:
        return "prompt"
    return "seed" if len(set(seeds)) == len(seeds) else "seeded prompt"


def subject_name(plan: Mapping[str, Any], index: int) -> str:
    """ "prompt 2" of a set, or "prompt 2, seed 7" where each prompt is drawn under several seeds."""
    prompts = plan.get("prompts") or []
    seed = prompts[index].get("seed") if index < len(prompts) else None
    if seed is None:
        return f"prompt {index + 1}"
    seeds = len({p.get("seed") for p in prompts})
    return f"prompt {index // seeds + 1}, seed {seed}" if len(prompts) > seeds else f"seed {seed}"


def sort_impls(names: Iterable[str]) -> list[str]:
    """Stock, its backends, invariant, its partial forms, then others in the order given; each once."""
    return sorted(dict.fromkeys(names), key=lambda name: list(Role).index(role_of(name)))


def bounds_of(n: int, of: str, groups: int = 0, group: str = "", each: Reason | None = None) -> Reason:
    """What no divergence excludes, by n completions or the like, and by groups of them: only these are independent."""
    by = reason("bounds-by", rate=one_sided_bound(groups), n=groups, of=group) if groups else None
    return reason("bounds", each=each, by=by, rate=one_sided_bound(n), n=n, of=of)


def grouped(items: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    """Items by their key, both in the order of the items."""
    groups: dict[_K, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def successful(completions: Iterable[Completion]) -> list[Completion]:
    """The completions that ended; the others only count as failures."""
    return [c for c in completions if c.status == "ok"]


class Tally:
    """Completions, counted by what they gave. One that ended for another reason than one with the same tokens and
    logprobs is a different answer: an end-of-text token is not always among the tokens."""

    def __init__(self, completions: Iterable[Completion]) -> None:
        self.every = list(completions)
        self.good = successful(self.every)  # those that failed are in no figure but `failed`
        self.n = len(self.good)
        self.completions = Counter(c.tokens_digest for c in self.good)
        self.traces = Counter(c.trace for c in self.good)  # the tokens with the bits of their logprobs
        self.ends = Counter(c.finish for c in self.good)
        self.texts = max(len(self.completions), len(self.ends))  # for a user another end is another text
        self.answers = Counter((c.trace, c.finish) for c in self.good)  # equal answers have both in common
        self.failed = Counter((c.served.kind if c.served else "") or "error" for c in self.every if c.status != "ok")
        self.nonfinite = sum(c.nonfinite > 0 for c in self.good)  # with a logprob that is NaN or infinite
        self.notes = stated(
            (self.failed, reason("failed", n=self.failed.total(), kinds=self.failed)),
            (len(self.ends) > 1, reason("ends", named=self.ends)),
        )
        most = {trace: n for (trace, _), n in reversed(self.answers.most_common())}  # a trace's last is its largest
        # completions that ended for another reason than most of those with the same tokens and logprobs
        self.ended_otherwise = self.n - sum(most.values())

    def checked(self, verdict: Verdict) -> Verdict:
        """The verdict on these completions, wrong if any holds a logprob that is no number."""
        return verdict.called_wrong(reason("nonfinite", n=self.nonfinite, of=self.n)) if self.nonfinite else verdict

    def clauses(self, by: Reason | None = None, *, logprobs: bool = True) -> list[Reason]:
        """Distinct completions, distinct traces if there are more, and how many equal ones ended differently; `by`:
        what they are compared by, where that is not their tokens. Without logprobs traces are tokens."""
        completions = len(self.completions)
        traces = len(self.traces) if logprobs else completions
        same_tokens = completions == 1 and traces > 1
        return stated(
            (True, reason("tokens-identical" if same_tokens else "distinct", n=completions, of=self.n, by=by)),
            (not logprobs, reason("no-logprobs")),
            (traces != completions, reason("one-but" if same_tokens else "traces", n=traces)),
            (self.ended_otherwise, reason("ended-otherwise", n=self.ended_otherwise)),
        )
