"""Assertions for a test suite: that a kernel's bits don't depend on its batch, and that two results have equal bits.

    >>> from nondet.testing import assert_batch_invariant, assert_same_bits
    >>> assert_batch_invariant(my_linear, operator="linear")

Importing this loads no torch: pytest imports it in every project of an environment that nondet is installed in.
"""

from nondet.testing.assertions import assert_batch_invariant, assert_same_bits

__all__ = ["assert_batch_invariant", "assert_same_bits"]
