"""nondet: whether an LLM's output depends on its batch, where it parts, why, and what the cure costs.

Importing this package imports neither torch nor transformers: the names below load on first use.
"""

from typing import Any

from nondet.version import VERSION

__all__ = ["__version__", "batch_invariant"]

__version__ = VERSION


def __getattr__(name: str) -> Any:
    """Load the heavy names lazily, so that `import nondet` stays free of torch."""
    if name == "batch_invariant":
        from nondet.kernels.dispatch.block import batch_invariant

        return batch_invariant
    raise AttributeError(f"module 'nondet' has no attribute {name!r}")
