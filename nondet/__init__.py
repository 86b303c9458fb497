"""nondet: whether an LLM's output depends on its batch, where it differs, why, and what the cure costs.

Importing this package imports neither torch nor transformers: the names below load on first use.
"""

from nondet.version import VERSION

TYPE_CHECKING = False  # as in typing, without importing it
if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "__version__",
    "batch_invariant",
    "check",
    "check_gradient",
    "check_operator",
    "find_mismatch",
    "load",
    "mismatch_of",
    "probe",
    "rank_free",
    "rl",
    "sample",
    "token_logprobs",
]

__version__ = VERSION

# name -> its module; loaded at first use
_LAZY = {
    "batch_invariant": "nondet.kernels.dispatch.block",
    "check": "nondet.api",
    "check_gradient": "nondet.api",
    "check_operator": "nondet.api",
    "find_mismatch": "nondet.api",
    "load": "nondet.api",
    "mismatch_of": "nondet.mismatch.trl",
    "probe": "nondet.api",
    "rank_free": "nondet.ranks.rank_free",
    "rl": "nondet.api",
    "sample": "nondet.api",
    "token_logprobs": "nondet.sampling.logprobs",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> "Any":
    """Load the heavy names lazily, so that `import nondet` stays free of torch."""
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'nondet' has no attribute {name!r}")
