"""`batch_invariant()`: batch-invariant kernels under an unmodified PyTorch model, on CPU and CUDA, for a while.

Registered with torch.library under the aten operators themselves, so they reach every thread (an engine's own as well),
composed operators (linear, matmul, F.softmax), no_grad, inference_mode and autograd. What a kernel can't take goes to
the original, and is counted: `Invariance.coverage()` tells what was replaced, what was left and what remains at risk.

Which invariance holds is for the kernels to say: `nondet.kernels.cpu_*` and `nondet.kernels.triton_*`.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from nondet.errors import UnknownNameError, UserError
from nondet.kernels import hf_attention
from nondet.kernels.dispatch_operators import AT_RISK, COMPOSED, FAMILIES, OPERATORS, Leave, kernels_for

__all__ = ["FAMILIES", "Coverage", "Invariance", "batch_invariant"]


@dataclass
class Coverage:
    """Calls while a context was entered, by operator.

    Attributes:
        replaced: Computed by an invariant kernel.
        left: Of a family that is on, but left to the stock kernel: "mm float64", with the reason where there is one.
        at_risk: Stock, because no invariant kernel exists or the operator's family is off.
    """

    replaced: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    at_risk: Counter[str] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """One line for each operator, the commonest first."""
        groups = (("replaced", self.replaced), ("left stock", self.left), ("at risk", self.at_risk))
        return [f"{kind}: {name} ({n} calls)" for kind, counts in groups for name, n in counts.most_common()]


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
    Do not leave it while another thread still computes under it.

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


_lock = threading.RLock()
_entered: list[Invariance] = []
_inside = threading.local()  # a kernel's own torch calls go straight to the originals
_originals: dict[tuple[str, str], Any] = {}
_state: tuple[frozenset[str], torch.library.Library | None] = (frozenset(), None)


def _install() -> None:
    """Make what is registered be what the entered contexts ask for together."""
    global _state
    wanted = frozenset().union(*(c.families for c in _entered)) if _entered else frozenset[str]()
    before, library = _state
    if library is not None and _entered and wanted == before:
        return
    if not _entered:
        hf_attention.uninstall()
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
        hf_attention.uninstall()
        hf_attention.install(_note, _guarded, active="attention" in wanted)
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
    for name in (*AT_RISK, *(n for operators in OPERATORS.values() for n in operators)):
        for key in _keys():
            for where in _where(name, key):
                try:
                    _originals[name, where] = torch.library.get_kernel(f"aten::{name}", where)
                except RuntimeError:  # "no kernel for CUDA for aten::...": nothing can be called there
                    continue


def _register(library: torch.library.Library, key: str, wanted: frozenset[str]) -> None:
    for family, operators in OPERATORS.items():
        if family == "pointwise" and key != "CPU":
            continue
        for name, replacement in operators.items():
            for where in _where(name, key):
                original = _originals.get((name, where))
                if original is None:
                    continue
                if family in wanted:
                    _impl(library, name, where, _replacing(name, key, original, replacement))
                else:
                    _impl(library, name, where, _watching(name, original))
    for name in AT_RISK:
        original = _originals.get((name, key))
        if original is not None:
            _impl(library, name, key, _watching(name, original))


def _impl(library: torch.library.Library, name: str, key: str, function: Callable[..., Any]) -> None:
    with warnings.catch_warnings():
        # torch says, once, that an operator is overridden: that is what this module is for
        warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
        library.impl(name, function, key, with_keyset=True, allow_override=True)


def _replacing(name: str, key: str, original: Any, replacement: Callable[..., Any]) -> Callable[..., Any]:
    kernels = kernels_for(key.lower())

    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(_inside, "active", False):
            return original.call_boxed(keyset, *args, **kwargs)
        _inside.active = True
        try:
            if torch.is_grad_enabled():
                if name in COMPOSED and any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
                    raise Leave("a gradient is asked for")
                with torch.no_grad():  # a gradient, if any, is recorded by the caller, for the operator as a whole
                    out = replacement(kernels, *args, **kwargs)
            else:
                out = replacement(kernels, *args, **kwargs)
        except Leave as reason:
            _note("left", _called(name, args, reason))
        except NotImplementedError as reason:  # a launcher's word for a dtype or shape that it has no kernel for
            _note("left", _called(name, args, reason))
        else:
            _note("replaced", name)
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


def _watching(name: str, original: Any) -> Callable[..., Any]:
    """Run the original, and count it where its order of additions can matter."""

    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(_inside, "active", False) and _floating(args):
            _note("at_risk", _called(name, args))
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
