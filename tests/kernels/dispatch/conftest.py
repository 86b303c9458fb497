"""What tests of blocks share."""

from collections.abc import Iterator

import pytest

from nondet.kernels.dispatch.block import batch_invariant


@pytest.fixture(scope="module")
def held() -> Iterator[None]:
    """A block of no family around a file's tests: those in it are entered sooner, and what is stock stays stock."""
    with batch_invariant([]):
        yield
