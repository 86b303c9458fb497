"""`batch_invariant()`: batch-invariant kernels under an unmodified PyTorch model, on CPU and CUDA, for a while.

Registered with torch.library under the aten operators themselves, so they reach every thread (an engine's own as well),
composed operators (linear, matmul, F.softmax), out= forms, no_grad, inference_mode and autograd, CUDA graphs, and what
torch.compile makes of a model (`nondet.kernels.dispatch.compile`). What a kernel can't take goes to the original, and
is counted: `Invariance.coverage()` tells what was replaced, what was left and why, and what remains at risk.

Which invariance holds is for the kernels to say: `nondet.kernels.matmul`, `attention`, `rows`, `experts`, ...
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch

from nondet.errors import UnknownNameError, UserError
from nondet.kernels.dispatch import compile as dispatch_compile
from nondet.kernels.dispatch.certified import proven
from nondet.kernels.dispatch.coverage import Coverage
from nondet.kernels.dispatch.kernels import Leave, kernels_for
from nondet.kernels.dispatch.operators import ADDS_IF, AT_RISK, CERTIFIABLE, COMPOSED, FAMILIES, OPERATORS, variants
from nondet.kernels.dispatch.transformers import attention as hf_attention
from nondet.kernels.dispatch.transformers import eager as hf_eager
from nondet.kernels.dispatch.transformers import norms as hf_norms
from nondet.kernels.dispatch.transformers import rotary as hf_rotary

__all__ = ["FAMILIES", "Coverage", "Invariance", "batch_invariant"]


class Invariance:
    """One `with batch_invariant(...)`. May be entered again after it was left, not while it is entered."""

    def __init__(self, families: frozenset[str]) -> None:
        self.families = families
        self._coverage = Coverage()

    def coverage(self) -> Coverage:
        """What happened so far inside this context, in any thread."""
        return self._coverage

    def __enter__(self) -> Invariance:
        with _lock:
            if any(self is other for other in _entered):
                raise UserError(
                    "this batch_invariant() block is entered already", "Call batch_invariant() again to nest."
                )
            _entered.append(self)
            try:
                _install()
            except BaseException:
                _entered.remove(self)
                _install()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _lock:
            _entered.remove(self)
            _install()


def batch_invariant(families: Iterable[str] | None = None) -> Invariance:
    """Put batch-invariant kernels under everything that runs inside the `with` block, in all threads.

    Blocks nest: what is on is what any of them asks for. Leaving one, by an exception too, restores what was before it.
    Do not leave it while another thread still computes under it. A CUDA graph captured inside keeps the kernels that it
    was captured with. What torch.compile made before the block, or in it, is compiled anew inside, and after it.

    Args:
        families: Names from `FAMILIES`; None for all of them. A subset leaves the rest stock, which tells which family
            a divergence comes from.

    Raises:
        UnknownNameError: no such family.
    """
    chosen = list(FAMILIES) if families is None else list(families)
    for family in chosen:
        if family not in FAMILIES:
            raise UnknownNameError("operator family", family, FAMILIES)
    return Invariance(frozenset(chosen))


class _Inside(threading.local):
    """Whether this thread is inside one of our kernels: its own torch calls go straight to the originals."""

    active = False


_lock = threading.RLock()
_entered: list[Invariance] = []
_replaced: list[Counter[str]] = []  # the entered contexts' counters, for the path that every call takes
_inside = _Inside()
_originals: dict[tuple[str, str], Any] = {}
_state: tuple[frozenset[str], torch.library.Library | None] = (frozenset(), None)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _install() -> None:
    """Make what is registered be what the entered contexts ask for together."""
    global _state
    _replaced[:] = [c.coverage().replaced for c in _entered]
    wanted = frozenset().union(*(c.families for c in _entered)) if _entered else frozenset[str]()
    before, library = _state
    if library is not None and _entered and wanted == before:
        return
    hf_attention.uninstall()
    hf_eager.uninstall()
    hf_norms.uninstall()
    hf_rotary.uninstall()
    if not _entered:
        dispatch_compile.uninstall()
        if library is not None:
            library._destroy()
        _originals.clear()
        _state = (frozenset(), None)
        return
    if library is None:
        _collect_originals()
    fresh = torch.library.Library("aten", "IMPL")
    try:
        for key in _keys():
            _register(fresh, key, wanted)
        dispatch_compile.install(_note)
        hf_attention.install(_note, _guarded, active="attention" in wanted)
        hf_eager.install(_note, _guarded, active="attention" in wanted)
        hf_norms.install(_note, active="norm" in wanted)
        hf_rotary.install(_note, active="pointwise" in wanted)
    except BaseException:
        fresh._destroy()
        raise
    _state = (wanted, fresh)
    if library is not None:
        library._destroy()


def _keys() -> tuple[str, ...]:
    return ("CPU", "CUDA") if torch.cuda.is_available() else ("CPU",)


def _where(name: str, key: str) -> tuple[str, ...]:
    """Dispatch keys to register under: a composed operator with a kernel for the device alone loses its gradient."""
    return (key, f"Autograd{key}") if name in COMPOSED else (key,)


def _collect_originals() -> None:
    """The kernels that run outside of any context; all of them first, since a registration changes what others are."""
    replaced = (v for operators in OPERATORS.values() for n, r in operators.items() for v in variants(n, r))
    for name in (*AT_RISK, *ADDS_IF, *CERTIFIABLE, *replaced):
        for key in _keys():
            if name in AT_RISK and _made_of_others(name, key):
                continue
            for where in _where(name, key):
                try:
                    _originals[name, where] = torch.library.get_kernel(f"aten::{name}", where)
                except RuntimeError:  # "no kernel for CUDA for aten::...": nothing can be called there
                    continue


def _made_of_others(name: str, key: str) -> bool:
    """Composed, on this device: what it is made of is counted, and a kernel for it would take its gradient away."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has(f"aten::{name}", "CompositeImplicitAutograd")) and not has(f"aten::{name}", key)


def _register(library: torch.library.Library, key: str, wanted: frozenset[str]) -> None:
    for family, operators in OPERATORS.items():
        if family == "pointwise" and key != "CPU":
            continue
        for base, whole in operators.items():
            for name, replacement in variants(base, whole).items():
                for where in _where(name, key):
                    original = _originals.get((name, where))
                    if original is None:
                        continue
                    if family in wanted:
                        _impl(library, name, where, _replacing(name, key, original, replacement))
                    elif name != "linear":  # it is made of products, which are watched themselves
                        _impl(library, name, where, _watching(name, original))
    for name in (*AT_RISK, *ADDS_IF):
        original = _originals.get((name, key))
        if original is not None:
            _impl(library, name, key, _watching(name, original, ADDS_IF.get(name)))
    for name in CERTIFIABLE:
        original = _originals.get((name, key))
        if original is not None:
            _impl(library, name, key, _certifying(name, original))


def _impl(library: torch.library.Library, name: str, key: str, function: Callable[..., Any]) -> None:
    with warnings.catch_warnings():
        # torch says, once, that an operator is overridden: that is what this module is for
        warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
        library.impl(name, function, key, with_keyset=True, allow_override=True)


def _replacing(name: str, key: str, original: Any, replacement: Callable[..., Any]) -> Callable[..., Any]:
    kernels = kernels_for(key.lower())
    composed = name in COMPOSED

    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if _inside.active:
            return original.call_boxed(keyset, *args, **kwargs)
        if composed:
            for x in args:
                if type(x) not in _PLAIN and isinstance(x, torch.Tensor):  # a compiler's tracing, or a quantized weight
                    return dispatch_compile.traced(name, original, keyset, args, kwargs)
            if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
                if name != "linear":  # that one is made of products, which keep their gradient and are replaced
                    _note("left", _called(name, args, "a gradient is asked for"))
                return original.call_boxed(keyset, *args, **kwargs)
        _inside.active = True
        try:
            if torch.is_grad_enabled():
                with torch.no_grad():  # a gradient, if any, is recorded by the caller, for the operator as a whole
                    out = replacement(kernels, *args, **kwargs)
            else:
                out = replacement(kernels, *args, **kwargs)
        except (Leave, NotImplementedError) as reason:  # the latter is a launcher's word for a dtype or shape it lacks
            if name != "linear" and _floating(args):  # what linear is made of says so itself, and integers are exact
                _note("left", _called(name, args, reason))
        else:
            for counter in _replaced:
                counter[name] += 1
            return out
        finally:
            _inside.active = False
        return original.call_boxed(keyset, *args, **kwargs)

    return run


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its own torch calls going straight to the originals."""

    def run(*args: Any, **kwargs: Any) -> Any:
        _inside.active = True
        try:
            return function(*args, **kwargs)
        finally:
            _inside.active = False

    return run


def _watching(name: str, original: Any, flag: int | None = None) -> Callable[..., Any]:
    """Run the original, and count it where its order of additions can matter: always, or where the flag is set."""

    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        adds = flag is None or (len(args) > flag and args[flag]) or kwargs.get("accumulate", False)
        if adds and not _inside.active and _floating(args):
            _note("at_risk", _called(name, args))
        return original.call_boxed(keyset, *args, **kwargs)

    return run


def _certifying(name: str, original: Any) -> Callable[..., Any]:
    """Run the original, and say whether it is proven to give each row its own bits."""

    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if not _inside.active and _floating(args):
            _inside.active = True
            try:
                with torch.no_grad():
                    holds, reason = proven(name, args, kwargs)
            finally:
                _inside.active = False
            _note("certified" if holds else "at_risk", _called(name, args, reason))
        return original.call_boxed(keyset, *args, **kwargs)

    return run


def _floating(args: tuple[Any, ...]) -> bool:
    return any(isinstance(x, torch.Tensor) and x.dtype.is_floating_point for x in args)


def _called(name: str, args: tuple[Any, ...], reason: object = "") -> str:
    """As "mm float64" or "scaled_dot_product_attention bfloat16: dropout"."""
    dtype = next((str(x.dtype).removeprefix("torch.") for x in args if isinstance(x, torch.Tensor)), "")
    return f"{name} {dtype}: {reason}" if str(reason) else f"{name} {dtype}"


def _note(kind: str, what: str) -> None:
    for context in _entered:
        getattr(context.coverage(), kind)[what] += 1
