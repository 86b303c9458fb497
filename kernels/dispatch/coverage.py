"""What happened under `batch_invariant()`, operator by operator: plain counts, in four groups."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

__all__ = ["KINDS", "Coverage"]

# attribute of `Coverage` -> what it is called for people, in run files too
KINDS: dict[str, str] = {
    "replaced": "replaced",
    "certified": "certified stock",
    "left": "left stock",
    "at_risk": "at risk",
}

_lock = threading.Lock()  # of all counts: `counter[what] += 1` is three steps, between which threads change


@dataclass
class Coverage:
    """Calls while a context was entered, by operator.

    Attributes:
        replaced: Computed by an invariant kernel. Which member of its class ran, `nondet.kernels.launch` says: it may
            be a library's own kernel, where this machine's certificates say that its bits are those of the class.
        certified: Stock, because stock was proven on this machine to give each row the bits that the row has alone, at
            this very shape and dtype (`nondet.kernels.dispatch.certified`).
        left: Of a family that is on, but left to the stock kernel: "mm float64", with the reason where there is one.
            Its bits may depend on the batch.
        at_risk: Stock, because no invariant kernel exists or the operator's family is off.
    """

    replaced: Counter[str] = field(default_factory=Counter)
    certified: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    at_risk: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, what: str, times: int = 1) -> None:
        """Count one call, or several; from any thread, and none is lost."""
        counter: Counter[str] = getattr(self, kind)
        with _lock:
            counter[what] += times

    def lines(self) -> list[str]:
        """One line for each operator, the commonest first."""
        with _lock:
            return [
                f"{label}: {name} ({n} calls)"
                for kind, label in KINDS.items()
                for name, n in getattr(self, kind).most_common()
            ]

    def counts(self) -> Counter[str]:
        """All of it in one counter, for a run file: "replaced: mm" -> calls."""
        with _lock:
            return Counter(
                {f"{label}: {name}": n for kind, label in KINDS.items() for name, n in getattr(self, kind).items()}
            )
