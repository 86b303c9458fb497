"""The words that run files and --json hold: whoever reads them elsewhere reads these."""

from __future__ import annotations

from nondet.core.records import Axis, Role, Status
from nondet.verdict.findings import Finding


def test_findings_are_these_words_the_strongest_first() -> None:
    """Each with whether it is a divergence, and whether a gate stays shut on it."""
    assert [(f.value, f.is_divergence, f.is_fault) for f in Finding] == [
        ("wrong", False, True),
        ("run-to-run nondeterministic", True, True),
        ("batch-dependent", True, True),
        ("dependent on the prefix cache", True, True),
        ("divergent", True, True),
        ("dependent on what was varied", True, True),
        ("dependent on the order of reduction", False, False),
        ("no divergence observed", False, False),
        ("no divergence observed under a load that is unproven", False, False),
        ("nothing compared", False, False),
    ]


def test_statuses_roles_and_axes_are_these_words() -> None:
    """A file of another release means the same by them."""
    statuses = {v for k, v in vars(Status).items() if k.isupper() and isinstance(v, str)}
    assert statuses == {"identical", "divergent", "skipped", "error", "wrong", "timed"}
    assert [role.value for role in Role] == ["stock", "backend", "invariant", "part", "other"]
    assert [axis.value for axis in Axis] == ["run", "batch", "order", "other"]
