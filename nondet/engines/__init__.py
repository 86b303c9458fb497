"""What the plugins of serving engines share: hooks, coverage, layers and attention. Each engine has its own package.

Importing this package imports neither torch nor an engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

ENABLED, ALLOWED, WRITTEN = "NONDET_BATCH_INVARIANT", "NONDET_ALLOW_AT_RISK", "NONDET_COVERAGE"


class Engine(NamedTuple):
    """An engine in whose processes a plugin runs: its name, its package, its version."""

    name: str
    package: str
    version: str
    tried: tuple[str, ...]  # versions whose signatures fit, and that were run
    log: Callable[[str], None]

    @property
    def stock(self) -> str:
        """What a user can do about any refusal."""
        return f"Unset {ENABLED} to run {self.name} as it is."

    def never_run(self) -> None:
        """Log where this version was not run with nondet."""
        if self.version not in self.tried:
            fits = f"{self.name} {self.version} has every function that nondet replaces"
            were = f"{' and '.join(self.tried)} {'were' if len(self.tried) > 1 else 'was'}"
            self.log(f"{fits}, and was never run under nondet: {were}.")
