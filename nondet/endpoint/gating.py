"""When a server has been asked enough for a gate: at the first divergence, or at the power that is wanted.

Looking after each load is free while nothing diverged: see `nondet.verdict.power`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from nondet.core.records import Completion, Round
from nondet.core.statistics import trials_to_see
from nondet.endpoint.load import EndpointLoad

__all__ = ["SOLO", "Watcher", "loaded_each"]

SOLO = 4  # answers of each prompt alone: two before the loads, two after them
_SPARE = 1.5  # loads that are planned for each one that is needed: not every load forms
_SPARE_LEAST = 4


def loaded_each(load: EndpointLoad, prompts: int, rate: float, confidence: float, by: str) -> int:
    """Completions of each prompt that the arm "loaded" is planned with, so that some loads may fail to form."""
    needed = trials_to_see(rate, confidence)
    targets = needed * load.targets if by == "load" else needed
    spare = max(_SPARE * targets, targets + _SPARE_LEAST * load.targets)
    return max(1, math.ceil(spare / prompts))


class Watcher:
    """Counts what was tried, load by load.

    Args:
        rate, confidence, by: The power that is wanted: see `nondet.verdict.power.Power`.
        prompts: How many there are; each must have met a load before enough was asked.

    Attributes:
        diverged: Whether an answer came that is another one than its prompt's first: in tokens, logprobs or its end.
    """

    def __init__(self, rate: float, confidence: float, by: str, prompts: int = 1) -> None:
        self._needed, self._by = trials_to_see(rate, confidence), by
        self._first: dict[tuple[str, int], tuple[str, str]] = {}
        self._tries: Counter[tuple[str, int]] = Counter()
        self._prompts = prompts
        self._loads: Counter[str] = Counter()
        self.diverged = False

    @property
    def loads(self) -> int:
        """Loads so far in which a request under study is known to have had company, of all servers."""
        return self._loads.total()

    def _requests(self, impl: str) -> int:
        """As `nondet.verdict.served_arms.proven_tries` counts them: those alone may all have been one prompt's."""
        return sum(count for (name, _), count in self._tries.items() if name == impl)

    def enough(self, ended: Round, completions: Sequence[Completion]) -> bool:
        """Whether nothing more needs to be asked of the round's server: the others' loads say nothing of it."""
        good: Counter[tuple[str, int]] = Counter()
        for completion in completions:
            if completion.status == "ok":
                who = (completion.impl, completion.prompt)
                answer = (completion.trace, completion.finish)
                self.diverged |= answer != self._first.setdefault(who, answer) or completion.nonfinite > 0
                good[who] += 1
        if ended.arm == "loaded":
            company = ended.traffic.in_company if ended.traffic is not None else 0
            alone = max(0, ended.targets - company)
            self._tries.update({who: count - alone for who, count in good.items() if count > alone})
            self._loads[ended.impl] += company > 0
        met = sum(impl == ended.impl for impl, _ in self._tries)
        tries = self._loads[ended.impl] if self._by == "load" else self._requests(ended.impl)
        return self.diverged or (tries >= self._needed and met >= self._prompts)
