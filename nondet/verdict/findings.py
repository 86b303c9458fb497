"""The words of a verdict: what can be found of an implementation, strongest first, and what comes with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from nondet.core.records import Role, role_of

__all__ = ["Finding", "Verdict", "plural", "sort_impls", "subject_name", "subject_unit"]


class Finding(StrEnum):
    """What was found of one implementation, in the words of the report, the strongest first."""

    WRONG = "wrong"
    RUN_TO_RUN = "run-to-run nondeterministic"
    BATCH = "batch-dependent"
    CACHE = "dependent on the prefix cache"
    UNATTRIBUTED = "divergent"
    OTHER = "dependent on what was varied"
    ORDER = "dependent on the order of reduction"
    CLEAN = "no divergence observed"
    UNPROVEN = "no divergence observed under a load that is unproven"
    UNTESTED = "nothing compared"

    @property
    def is_divergence(self) -> bool:
        """Whether bits parted that a user would want equal."""
        return self in (Finding.RUN_TO_RUN, Finding.BATCH, Finding.CACHE, Finding.UNATTRIBUTED, Finding.OTHER)

    @property
    def is_fault(self) -> bool:
        """Whether a gate must stay shut: bits parted, or the result is no answer at all."""
        return self == Finding.WRONG or self.is_divergence


@dataclass(frozen=True)
class Verdict:
    """What a run shows of one implementation.

    Attributes:
        finding: The strongest one.
        text: The verdict in a phrase that follows "impl: ".
        brief: The same without the list of operators, for the headline; empty where the text is short already.
        notes: Whole sentences: what the verdict does not cover.
        prompt: Index of the prompt, for a sampled run.
        others: Further findings, in other cases.
    """

    impl: str
    finding: Finding
    text: str
    notes: tuple[str, ...] = ()
    prompt: int | None = None
    others: tuple[Finding, ...] = ()
    brief: str = ""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All of them, the strongest first."""
        return (self.finding, *self.others)

    @property
    def is_fault(self) -> bool:
        """Whether any finding is one."""
        return any(finding.is_fault for finding in self.findings)

    @property
    def role(self) -> Role:
        """What the implementation is."""
        return role_of(self.impl)


def plural(count: int, noun: str, many: str = "") -> str:
    """ "1 case", "2,000 cases"."""
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


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


_RANKS = {role: rank for rank, role in enumerate(Role)}


def sort_impls(names: Iterable[str]) -> list[str]:
    """Stock, its backends, invariant, its partial forms, then others as they came; each once."""
    return sorted(dict.fromkeys(names), key=lambda name: _RANKS[role_of(name)])
