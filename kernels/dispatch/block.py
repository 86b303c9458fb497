"""`batch_invariant()`: batch-invariant kernels under an unmodified PyTorch model, on CPU and CUDA, for a while.

Registered with torch.library under the aten operators themselves, so they reach every thread (an engine's own as well),
composed operators (linear, matmul, F.softmax), out= forms, no_grad, inference_mode and autograd, CUDA graphs, and what
torch.compile makes of a model (`nondet.kernels.dispatch.compile`). What a kernel can't take goes to the original, and
is counted: `Invariance.coverage()` tells what was replaced, what was left and why, and what remains at risk.

Which invariance holds is for the kernels to say: `nondet.kernels.matmul`, `attention`, `rows`, `experts`, ...
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from nondet.core.launch import FirstUses
from nondet.errors import UnknownNameError, UserError
from nondet.kernels import originals
from nondet.kernels.dispatch import compile as dispatch_compile
from nondet.kernels.dispatch.coverage import Coverage
from nondet.kernels.dispatch.operators import FAMILIES
from nondet.kernels.dispatch.packing import packing
from nondet.kernels.dispatch.preparing import Progress, prepare
from nondet.kernels.dispatch.registration import Registration
from nondet.kernels.dispatch.state import Active, Call, replace_now
from nondet.kernels.dispatch.tables import exact_ones, keep_originals
from nondet.kernels.dispatch.transformers import attention as hf_attention
from nondet.kernels.dispatch.transformers import eager as hf_eager
from nondet.kernels.dispatch.transformers import experts as hf_experts
from nondet.kernels.dispatch.transformers import frequencies as hf_frequencies
from nondet.kernels.dispatch.transformers import mlp as hf_mlp
from nondet.kernels.dispatch.transformers import norms as hf_norms
from nondet.kernels.dispatch.transformers import projections as hf_projections
from nondet.kernels.dispatch.transformers import rotary as hf_rotary

__all__ = ["FAMILIES", "Coverage", "Invariance", "batch_invariant", "listen", "unlisten"]


class Invariance:
    """One `with batch_invariant(...)`. May be entered again after it was left, not while it is entered."""

    def __init__(self, families: frozenset[str]) -> None:
        self.families = families
        self._coverage = Coverage()
        self._packed = ExitStack()

    def coverage(self) -> Coverage:
        """What happened so far inside this context, in any thread."""
        return self._coverage

    def prepare(
        self, model: Any, tokens: Iterable[int], requests: Iterable[int] | None = None, progress: Progress | None = None
    ) -> FirstUses:
        """Compile and prove now what the model's linear layers and norms will need at these numbers of tokens.

        See `nondet.kernels.dispatch.preparing.prepare`. For before a clock runs, or before a CUDA graph is captured.

        Raises:
            UserError: outside of the block, where the kernels are stock.
        """
        if not any(self is block for block in _entered):
            raise UserError("prepare() outside of its batch_invariant() block", "Call it inside of `with`.")
        return prepare(model, tokens, requests, progress)

    def pack(self, model: Any, most: int | None = None) -> int:
        """Keep copies of a model's linear weights in the layout that the CPU's library computes in; a matter of speed.

        The bits are those that the weights give without. The copies take as much memory as the weights, and stand
        until the block is left. THE WEIGHTS MUST NOT CHANGE MEANWHILE: a change that torch counts is seen, and the copy
        is not used any more, but one that goes around (`weight.data.copy_(...)`) is not.

        Args:
            model: What lies on a GPU, and weights that no copy helps, are left as they are.
            most: Bytes of copies; None: half of the machine's free memory.

        Returns:
            Bytes kept.

        Raises:
            UserError: outside of the block.
        """
        if not any(self is block for block in _entered):
            raise UserError("pack() outside of its batch_invariant() block", "Call it inside of `with`.")
        return self._packed.enter_context(packing(model, most))

    def __enter__(self) -> Invariance:
        with _lock:
            if any(self is other for other in _entered):
                raise UserError(
                    "this batch_invariant() block is entered already", "Call batch_invariant() again to nest."
                )
            if not _entered:
                _enter_first()
            _entered.append(self)
            try:
                _publish()
                _stand_in()
            except BaseException:  # Python calls no __exit__ then
                self._leave()
                raise
            for what, times in _compiled.items():  # graphs that an outer block had compiled are run by this one, too
                self._coverage.at_risk[what] += times
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as steps:
            steps.callback(self._leave)
            self._packed.close()

    def _leave(self) -> None:
        with _lock:
            _entered.remove(self)
            try:
                _publish()
            finally:
                if not _entered:
                    _leave_last()


def batch_invariant(families: Iterable[str] | None = None) -> Invariance:
    """Put batch-invariant kernels under everything that runs inside the `with` block, in all threads.

    Blocks nest: what is on is what any of them asks for. Leaving one, by an exception too, restores what was before it.
    Threads may compute while another enters and leaves nested blocks; a call goes by what was on when it began. Enter
    the outermost one before they do, if you can: a call of theirs that it finds under way, and that takes longer than
    10 ms more, may end in the block's kernels though it began in torch's (rms_norm is several operators). Don't leave
    the outermost one while another thread still computes under it: that thread's next calls are stock. A CUDA
    graph captured inside keeps the kernels that it was captured with. What torch.compile made before the outermost
    block, or in it, is compiled anew inside, and after it; nested blocks share their graphs, which look up what is on.

    Args:
        families: Names from `FAMILIES`; None for all of them. A subset leaves the rest stock, which tells which family
            a divergence comes from.

    Raises:
        UnknownNameError: no such family.
    """
    chosen = list(FAMILIES if families is None else families)
    for family in chosen:
        if family not in FAMILIES:
            raise UnknownNameError("operator family", family, FAMILIES)
    return Invariance(frozenset(chosen))


_STAND_INS = (hf_attention, hf_eager, hf_experts, hf_frequencies, hf_mlp, hf_norms, hf_projections, hf_rotary)
_lock = threading.RLock()  # of entering and leaving alone: calls take none
_entered: list[Invariance] = []
_hooks: list[Callable[[Call], None]] = []
_compiled: Counter[str] = Counter()  # what inductor generated since the outermost block was entered
_modules: dict[str, Any] = {}  # what was imported when the stand-ins were last looked after
# Seconds between putting functions under torch and having them compute, where other threads run: what they are in the
# midst of (rms_norm's mean is done, its root is not) ends in torch's kernels, as it began.
_GRACE = 0.01
_registration, _exact = Registration(keep_originals), Registration(exact_ones)


def listen(hook: Callable[[Call], None], *, exact: bool) -> None:
    """Add a hook, see `nondet.kernels.dispatch.hooks.on_call`."""
    with _lock:
        _registration.prepare()
        _exact.prepare()  # both while the kernels are torch's own
        _registration.enter()
        try:
            if exact:
                _exact.enter()
        except BaseException:
            _registration.leave()
            raise
        _hooks.append(hook)
        _publish()


def unlisten(hook: Callable[[Call], None], *, exact: bool) -> None:
    """Remove it."""
    with _lock:
        _hooks.remove(hook)
        _publish()
        if exact:
            _exact.leave()
        _registration.leave()


def _publish() -> None:
    wanted = frozenset().union(*(block.families for block in _entered))
    replace_now(Active(wanted, tuple(block.coverage() for block in _entered), tuple(_hooks)))


def _enter_first() -> None:
    _registration.enter()
    try:
        dispatch_compile.install(_note_compiled)
        originals.stand_under(True)
        if threading.active_count() > 1:
            time.sleep(_GRACE)
    except BaseException:
        _leave_last()
        raise


def _stand_in() -> None:
    """Stand-ins for transformers, also in what was imported since the last block was entered."""
    global _modules
    if _modules != sys.modules:  # not by their number: one may have gone as another came
        seen = dict(sys.modules)
        for stand_ins in _STAND_INS:
            stand_ins.install()
        _modules = seen


def _leave_last() -> None:
    """Undo everything, the latest first; what one step raises keeps none of the others from being done."""
    global _modules
    _modules = {}
    with ExitStack() as steps:
        steps.callback(_compiled.clear)
        steps.callback(_registration.leave)
        steps.callback(dispatch_compile.uninstall)
        for stand_ins in _STAND_INS:
            steps.callback(stand_ins.uninstall)
        steps.callback(originals.stand_under, False)


def _note_compiled(what: str) -> None:
    with _lock:
        _compiled[what] += 1
        for block in _entered:
            block.coverage().add("at_risk", what)
