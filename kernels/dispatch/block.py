"""`batch_invariant()`: batch-invariant kernels under an unmodified PyTorch model, on CPU and CUDA.

They are registered with torch.library for the aten operators themselves, so they reach every thread (including an
engine's own), composed operators (linear, matmul, F.softmax), out= forms, no_grad, inference_mode and autograd, CUDA
graphs, and compiled models (`nondet.kernels.dispatch.functions`). What a kernel can't take goes to the original, and is
counted: `Invariance.coverage()` shows what was replaced, what was not and why, and what remains at risk.

Each kernel module states its own invariance: `nondet.kernels.matmul`, `attention`, `rows`, `experts`, ...
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from types import TracebackType
from typing import Any

import torch

from nondet.core.launch import FirstUses, first_uses
from nondet.core.processes import free_memory
from nondet.errors import UnknownNameError, UserError
from nondet.kernels import originals
from nondet.kernels.dispatch import functions, replacements, state
from nondet.kernels.dispatch import transformers as hf
from nondet.kernels.dispatch import transformers_attention as hf_attention
from nondet.kernels.dispatch.again import BINDERS
from nondet.kernels.dispatch.operators import (
    CERTIFIABLE,
    COMPOSED,
    COMPUTES,
    CONDITIONS,
    FAMILIES,
    OPERATORS,
    ORDERED_BY_SIZES,
    reason,
    variants,
)
from nondet.kernels.dispatch.state import Active, Coverage, Kernels, kernels_for, replace_now

# torch's dispatcher does not lock its tables of kernels for callers. So functions are registered by the outermost block
# and removed at its end, not in between: they look up which families are on. Removed functions are kept alive for a
# while, because a thread may be inside one. One race is left, and it is torch's own: its table is written without a
# lock, a few nanoseconds per operator. Hold a block around threads that enter and leave others.

_parsed = functools.cache(torch._C._dispatch_key_parse)  # a few keys, at 1,000 operators
_has = torch._C._dispatch_has_kernel_for_dispatch_key
_KEPT = 12_000  # removed functions, a few hundred bytes each; some 1,300 at once


class Registration:
    """Functions registered for torch's operators, now or later.

    Args:
        make: Gives the functions, (operator with namespace and overload, dispatch key) -> function. It is called with
            nothing registered, at first and after operators have been added or removed.
    """

    def __init__(self, make: Callable[[], Mapping[tuple[str, str], Callable[..., Any]]]) -> None:
        self._make = make
        self._functions: Mapping[tuple[str, str], Callable[..., Any]] = {}
        self._operators: tuple[object, ...] = ()  # the operators when the functions were made
        self._libraries: dict[str, Any] = {}  # namespace -> torch's library, reused because each leaks a name
        self._kept: deque[Any] = deque(maxlen=_KEPT)

    def prepare(self) -> None:
        """Make the functions. Not while a block is entered."""
        self.take_away()  # an interrupt may have prevented the last block from it
        # compared by identity: an operator that was removed and defined again is another
        names = {id(name): name for name in torch.library._defs}
        operators = len(torch._C._dispatch_get_all_op_names()), names, len(torch.library._impls)
        if operators != self._operators:
            self._functions, self._operators = self._make(), operators

    def put(self) -> None:
        """Register the functions."""
        self.prepare()
        with warnings.catch_warnings():
            # torch warns, once, that an operator is overridden, which is intended here
            warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
            for (qualified, key), function in self._functions.items():
                namespace, _, name = qualified.partition("::")
                if namespace not in self._libraries:
                    self._libraries[namespace] = torch._C._dispatch_library("IMPL", namespace, "", __file__, 0)
                # not by `torch.library`: its checks, and parsing the key each time, take half of the time to enter
                self._libraries[namespace].impl(name, _parsed(key), function, True)
                self._kept.append(_original(qualified, key))

    def take_away(self) -> None:
        """Restore torch's own kernels, also where only some functions were registered."""
        for library in self._libraries.values():
            library.reset()


_Functions = dict[tuple[str, str], Callable[..., Any]]

# Dispatch keys of a device's tensors, plain and not. oneDNN's own tensors exist only on a CPU.
_FORMS = {
    "CPU": ("CPU", "QuantizedCPU", "MkldnnCPU", "SparseCPU", "SparseCsrCPU", "NestedTensorCPU"),
    "CUDA": ("CUDA", "QuantizedCUDA", "SparseCUDA", "SparseCsrCUDA", "NestedTensorCUDA"),
}

# Namespaces that are not watched: ours; collectives (those that reduce have functions of their own, and the rest copy);
# Python compositions of aten's operators; and those that compute nothing.
_NOT_WATCHED = frozenset(
    {
        *("nondet", "c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"),
        *("prims", "inductor_prims", "debugprims", "rngprims", "profiler", "debug_mode_ops", "export", "_test"),
    }
)


def devices() -> tuple[str, ...]:
    """The dispatch keys of the available devices."""
    return ("CPU", "CUDA") if torch.cuda.is_available() else ("CPU",)


def decided() -> _Functions:
    """Everything that is replaced, certified or at risk (all else with a kernel). Called with nothing registered."""
    originals.keep()
    made: _Functions = dict(replacements.functions(devices()))
    for device in devices():
        made |= _of_families(device)
        for name, mixes in ORDERED_BY_SIZES.items():
            for key, original in _originals(name, (device, f"Autograd{device}")):
                made[f"aten::{name}", key] = functions.watching(f"aten::{name}", original, mixes)
        for name in CERTIFIABLE:
            for key, original in _originals(name, (device,)):
                made[f"aten::{name}", key] = functions.certifying(name, original)
    for qualified, key in _kernels_there():
        namespace, _, name = qualified.partition("::")
        if namespace in _NOT_WATCHED or (qualified, key) in made:
            continue
        matters = None
        if namespace == "aten":
            device = "CUDA" if "CUDA" in key else "CPU"
            matters = CONDITIONS[device].get(name) if key == device else None
            if matters is None and reason(name, device):
                continue
        original = _original(qualified, key)
        if original is not None:
            made[qualified, key] = functions.watching(qualified, original, matters)
    return made


def _of_families(device: str) -> _Functions:
    made: _Functions = {}

    def kernels() -> Kernels:
        return kernels_for(device.lower())

    for family, operators in OPERATORS.items():
        if family == "pointwise" and device != "CPU":
            continue
        forms = [form for base, whole in operators.items() for form in variants(base, whole).items()]
        for name, replacement in forms:
            # a composed operator with a kernel only for the device loses its gradient
            keys = (device, f"Autograd{device}") if name in COMPOSED else (device,)
            for key, original in _originals(name, keys):
                binder = BINDERS.get(name) if device == "CUDA" else None
                made[f"aten::{name}", key] = functions.replacing(name, family, kernels, original, replacement, binder)
    return made


def _originals(name: str, keys: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """(dispatch key, kernel) of aten's operator, of keys that have one."""
    for key in keys:
        original = _original(f"aten::{name}", key)
        if original is not None:
            yield key, original


def _kernels_there() -> Iterator[tuple[str, str]]:
    """Operators with a kernel of their own at a device's key. Composed ones are seen as their parts."""
    for qualified in torch._C._dispatch_get_all_op_names():
        for device in devices():
            for key in _FORMS[device]:
                if _has(qualified, key):
                    yield qualified, key
            if not _has(qualified, device) and _computes(qualified):
                yield qualified, device


def _computes(qualified: str) -> bool:
    """Whether an operator registered as composed computes past the dispatcher, or is not torch's."""
    namespace, _, name = qualified.partition("::")
    if namespace == "aten":
        return name in COMPUTES
    return bool(_has(qualified, "CompositeExplicitAutograd"))


def _original(qualified: str, key: str) -> Any:
    try:
        # as torch.library.get_kernel, which does not know every key by its name ("MkldnnCPU")
        return torch._C._dispatch_get_computed_kernel_for_dispatch_key(qualified, _parsed(key))
    except RuntimeError:  # "no kernel for CUDA for aten::..."
        return None


Progress = Callable[[int, int, FirstUses], None]


def prepare(
    model: Any, tokens: Iterable[int], requests: Iterable[int] | None = None, progress: Progress | None = None
) -> FirstUses:
    """Call each kind of linear layer and norm of the model once at each size, and return what was proven and compiled.

    Then plans, certificates and compiled kernels exist before a clock runs, before requests come, and before a CUDA
    graph is captured, where nothing can be proven. Only a forward pass prepares attention and other layers.

    Args:
        model: With linear layers as torch.nn.Linear, and norms as modules with a weight [H] whose class is called
            ...Norm, as transformers has them.
        tokens: Query tokens of a step: rows of every layer but the output projection.
        requests: Rows of the output projection, one for each request of a step; None: as `tokens`.
        progress: Called with (calls done, calls, what was proven and compiled so far) before each call.
    """
    sizes, report = sorted(set(tokens)), progress or (lambda *_: None)
    ends = sizes if requests is None else sorted(set(requests))
    calls = [(module, width, size) for module, width, last in _kinds(model) for size in (ends if last else sizes)]
    wide = next((p.dtype for p in model.parameters() if p.is_floating_point() and p.element_size() > 1), torch.bfloat16)
    with first_uses() as uses, torch.no_grad():
        for done, (module, width, size) in enumerate(calls):
            report(done, len(calls), uses)
            weight: torch.Tensor = module.weight
            dtype = weight.dtype if weight.element_size() > 1 else wide  # FP8 layers take the other layers' dtype
            with suppress(Exception):  # a failure is reported in the run, where it is recorded
                module(torch.zeros(1, size, width, dtype=dtype, device=weight.device))
        report(len(calls), len(calls), uses)
    return uses


def _kinds(model: Any) -> Iterator[tuple[Any, int, bool]]:
    """(module, width of its input, whether it is the output projection), one of each kind that kernels distinguish."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    seen = set()
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.is_meta:
            continue
        if isinstance(module, torch.nn.Linear):
            kind: tuple[Any, ...] = (weight.shape, weight.stride(), module.bias is None, module is head)
        elif type(module).__name__.endswith("Norm") and weight.dim() == 1:
            kind = (type(module), weight.shape)
        else:
            continue
        kind += (weight.dtype, weight.device)
        if kind not in seen:
            seen.add(kind)
            yield module, weight.shape[-1], module is head


class Invariance:
    """One `with batch_invariant(...)`. You can enter it again after it was left, not while it is entered."""

    def __init__(self, families: frozenset[str], training: bool = False) -> None:
        self.families, self.training = families, training
        self._coverage, self._state = Coverage(), "not entered"
        self._packed, self.packs = ExitStack(), False

    def __repr__(self) -> str:
        names = ", ".join(name for name in FAMILIES if name in self.families)
        counts = (f"{sum(getattr(self._coverage, kind).values()):,} {label}" for kind, label in state.KINDS.items())
        return f"<batch_invariant: {self._state}; {names} on {' and '.join(devices())}; calls: {', '.join(counts)}>"

    def coverage(self) -> Coverage:
        """What happened so far inside this context, in any thread."""
        return self._coverage

    def prepare(
        self, model: Any, tokens: Iterable[int], requests: Iterable[int] | None = None, progress: Progress | None = None
    ) -> FirstUses:
        """Compile and prove now what the model's linear layers and norms will need at these numbers of tokens.

        See `nondet.kernels.dispatch.block.prepare`. UserError: outside of the block, where the kernels are stock.
        """
        if not any(self is block for block in _entered):
            raise UserError("prepare() outside of its batch_invariant() block", "Call it inside of `with`.")
        return prepare(model, tokens, requests, progress)

    def pack(self, model: Any, most: int | None = None) -> int:
        """Keep copies of a model's linear weights in the layout that the CPU's library computes in; this only changes
        speed.

        The copies take as much memory as the weights, and exist until the block is left. THE WEIGHTS MUST NOT CHANGE
        MEANWHILE: a change that torch counts is noticed, and the copy is not used any more, but one that bypasses the
        count (`weight.data.copy_(...)`) is not.

        Args:
            model: Weights on a GPU, and weights that no copy helps, are left as they are.
            most: Bytes of copies; None: half of the machine's free memory.

        Returns the bytes kept; 0 comes with a RuntimeWarning. UserError: outside of a block, or under one for training.
        """
        if not any(self is block for block in _entered):
            raise UserError("pack() outside of its batch_invariant() block", "Call it inside of `with`.")
        if any(block.training for block in _entered):
            raise UserError(
                "pack() under batch_invariant(training=True): a step changes the weights, and copies go stale",
                "Leave pack() out, or training=True where nothing is trained.",
            )
        from nondet.kernels.matmul.cpu import packed_weights

        self.packs = True
        layers = [module for module in model.modules() if type(module) is torch.nn.Linear]
        weights = [(layer.weight, layer.bias is not None) for layer in layers]
        most = free_memory() // 2 if most is None else most  # a step needs some, too
        # copies and proofs are not calls of the model
        kept: int = state.guarded(self._packed.enter_context)(packed_weights(weights, most))
        if not kept:
            warnings.warn(
                "nondet: pack() kept no copy of a weight. It keeps those of torch.nn.Linear on the CPU, in dtypes that "
                "oneDNN has a layout for on this machine, as far as `most` or half of the free memory allows.",
                RuntimeWarning,
                stacklevel=2,
            )
        return kept

    def __enter__(self) -> Invariance:
        with _lock:
            if any(self is other for other in _entered):
                raise UserError(
                    "this batch_invariant() block is entered already", "Call batch_invariant() again to nest."
                )
            if self.training and any(block.packs for block in _entered):
                raise UserError(
                    "batch_invariant(training=True) inside a block with packed weights, which training makes stale",
                    "Leave pack() out, or enter the block for training outside of it.",
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
            for what, times in _compiled.items():  # this block, too, runs graphs that an outer block had compiled
                self._coverage.at_risk[what] += times
        self._state = "open"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._packed.close()
            self.packs = False
        finally:
            self._state = "closed"
            self._leave()

    def _leave(self) -> None:
        with _lock:
            _entered.remove(self)
            try:
                _publish()
            finally:
                if not _entered:
                    _leave_last()


def batch_invariant(families: Iterable[str] | None = None, *, training: bool = False) -> Invariance:
    """Within `with batch_invariant():` the bits of each request no longer depend on the others in its batch.

    Torch's operators and transformers' functions compute by kernels with one order of addition for all batch sizes, in
    all threads; what has no such kernel stays torch's and is counted: `print(block.coverage().lines())`.

    Blocks nest: a family is on if any of them requests it. Leaving one, also by an exception, restores the state before
    it. Threads may compute while another enters and leaves nested blocks; a call uses what was on when it began. If you
    can, enter the outermost one before they compute: a call that is running then, and takes more than 10 ms longer, may
    end in the block's kernels though it began in torch's (rms_norm is several operators). Don't leave the outermost one
    while another thread still computes under it, because that thread's next calls are stock. A CUDA graph captured
    inside keeps the kernels that it was captured with. What torch.compile made before or in the outermost block is
    compiled again inside, and after it; nested blocks share their graphs, which look up what is on. Entering the
    outermost block takes tens of milliseconds: hold one around the life of a server or a trainer.

    Args:
        families: Names from `FAMILIES` (else UnknownNameError); None for all of them. A subset leaves the rest stock,
            which shows which family a divergence comes from.
        training: Where a gradient is needed, attention and norms keep the bits that they have without one, and get a
            gradient of ours (`nondet.kernels.dispatch.differentiable`); else they are left to torch, and counted.
    """
    chosen = list(FAMILIES if families is None else families)
    for family in chosen:
        if family not in FAMILIES:
            raise UnknownNameError("operator family", family, FAMILIES)
    return Invariance(frozenset(chosen), training)


_STAND_INS = (
    (hf_attention.install, hf_attention.uninstall),
    (partial(hf.install, (hf_attention.EAGER, *hf.REPLACEMENTS)), hf.uninstall),
)
_lock = threading.RLock()  # only for entering and leaving: calls don't take it
_entered: list[Invariance] = []
_compiled: Counter[str] = Counter()  # what inductor generated since the outermost block was entered
_modules: dict[str, Any] = {}  # the modules when the stand-ins were last updated
# Seconds between registering functions and activating them, if other threads run: an operator in progress (rms_norm's
# mean is done, its root is not) ends in torch's kernels, as it began.
_GRACE = 0.01
_registration = Registration(decided)


def _publish() -> None:
    wanted = frozenset().union(*(block.families for block in _entered))
    training = any(block.training for block in _entered)
    replace_now(Active(wanted, tuple(block.coverage() for block in _entered), training))


def make_ready() -> None:
    """Do now what the first block of a process does as it is entered, seconds on a GPU; torch stays as it is."""
    with _lock:
        if not _entered:
            _registration.prepare()


def _enter_first() -> None:
    try:
        _registration.put()
        functions.install_compile(_note_compiled)
        if _imports not in sys.meta_path:
            sys.meta_path.insert(0, _imports)
        if len(sys._current_frames()) > 1:
            time.sleep(_GRACE)
    except BaseException:
        _leave_last()
        raise


def _stand_in() -> None:
    global _modules
    if _modules != sys.modules:  # not by their number: one may have gone as another came
        seen = dict(sys.modules)
        for install, _ in _STAND_INS:
            install()
        _modules = seen


def _imported() -> None:
    """A model may be imported inside of the block. Does not wait: the holder of the lock may wait for this import."""
    global _modules
    _modules = {}  # the next block to be entered checks again
    if _lock.acquire(blocking=False):
        try:
            if _entered:
                _stand_in()
        finally:
            _lock.release()


_imports = hf.Imports(_imported)


def _leave_last() -> None:
    """Undo everything, the latest first; an error in one step does not prevent the others."""
    global _modules
    _modules = {}
    with ExitStack() as steps:
        steps.callback(_compiled.clear)
        steps.callback(_registration.take_away)
        steps.callback(functions.uninstall_compile)
        if _imports in sys.meta_path:
            sys.meta_path.remove(_imports)
        for _, uninstall in _STAND_INS:
            steps.callback(uninstall)


def _note_compiled(what: str) -> None:
    with _lock:
        _compiled[what] += 1
        for block in _entered:
            block.coverage().add("at_risk", what)
