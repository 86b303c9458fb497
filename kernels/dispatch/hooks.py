"""A hook on every call that `batch_invariant()` decides about: for tracing, coverage and profiling, in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nondet.kernels.dispatch import block
from nondet.kernels.dispatch.state import Call

__all__ = ["Call", "on_call"]


@contextmanager
def on_call(hook: Callable[[Call], None], *, exact: bool = False) -> Iterator[None]:
    """Have `hook(call)` run after each call below, in the thread that made it, while the context is entered.

    Seen, in every thread (an engine's own as well), with or without a `batch_invariant()` block around it:

    - calls that reach an aten operator on a CPU or CUDA device which is replaced, certified, left or at risk;
    - with `exact`, also aten operators whose bits cannot depend on the batch (copies, views, correctly rounded
      arithmetic, ...), as "original": everything that reaches a CPU or CUDA kernel of aten through the dispatcher;
    - under a block, transformers' functions that have a stand-in, as one call in place of their parts.

    An operator that torch composes of others is seen as those others, or, where it is replaced or watched as a whole
    (`linear`, `scaled_dot_product_attention`, `rms_norm`), as the whole; one that is left is seen whole and then also
    in its parts, the parts first. A gradient's operators are seen as they run, in autograd's own threads.

    Not seen: calls that a kernel of ours makes inside, calls that C++ makes past the dispatcher, what a compiler
    (inductor) fused into its own code, replays of CUDA graphs, custom operators, and calls of tensor subclasses and
    fake tensors above their own unwrapping. A call that raises is not told.

    The hook runs before the operator's caller goes on, so what it does costs the caller time; its own torch calls are
    neither replaced nor told. It must not raise: what it raises comes out of the operator's call.
    """
    block.listen(hook, exact=exact)
    try:
        yield
    finally:
        block.unlisten(hook, exact=exact)
