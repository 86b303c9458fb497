"""What there is: names onto ("module:attribute", one line of help). Explicit tables; nothing is imported until used."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nondet.errors import UnknownNameError, UserError

__all__ = [
    "IMPLEMENTATIONS",
    "PROBES",
    "REPORTERS",
    "Implementation",
    "implementation_names",
    "load_implementation",
    "load_object",
    "load_probe",
]

PROBES: dict[str, tuple[str, str]] = {
    "float-sum": ("nondet.probes.float_sum:FloatSum", "the order of a sum alone: 102 results from one list of numbers"),
    "matmul": ("nondet.probes.matmul:Matmul", "one row of a product while M, its place and the run change"),
    "split-k": (
        "nondet.probes.split_k:SplitK",
        "one product with K cut into 1, 2, 4, 8 ... splits, ordered and atomic",
    ),
    "grouped-matmul": (
        "nondet.probes.grouped_matmul:GroupedMatmul",
        "one token at one expert while the other tokens, their experts and its place change",
    ),
    "attention": (
        "nondet.probes.attention:Attention",
        "prefill, chunked prefill and decode of one position, per backend",
    ),
    "rms-norm": ("nondet.probes.rms_norm:RMSNorm", "one row of RMSNorm while the number of rows changes"),
    "softmax": ("nondet.probes.softmax:Softmax", "one row of softmax while the number of rows changes"),
    "log-softmax": ("nondet.probes.softmax:LogSoftmax", "one row of log_softmax while the number of rows changes"),
    "reduction": ("nondet.probes.reduction:Reduction", "one row of sum and mean while the number of rows changes"),
    "atomics": ("nondet.probes.atomics:Atomics", "index_add and scatter_add, the same call again and again"),
    "pointwise": (
        "nondet.probes.pointwise:Pointwise",
        "one element of a pointwise op in a vector body or a scalar tail",
    ),
}

# operator -> implementation -> device type ("*": any) -> "module:attribute".
# Signatures are written down once, in nondet/kernels/reference.py.
IMPLEMENTATIONS: dict[str, dict[str, dict[str, str]]] = {
    "linear": {
        "reference": {"*": "nondet.kernels.reference:linear"},
        "stock": {"*": "nondet.kernels.stock:linear"},
        "invariant": {"cuda": "nondet.kernels.matmul.cuda:linear", "cpu": "nondet.kernels.matmul.cpu:linear"},
    },
    "matmul": {
        "reference": {"*": "nondet.kernels.reference:matmul"},
        "stock": {"*": "nondet.kernels.stock:matmul"},
        "invariant": {"cuda": "nondet.kernels.matmul.cuda:matmul", "cpu": "nondet.kernels.matmul.cpu:matmul"},
    },
    "grouped_matmul": {
        "reference": {"*": "nondet.kernels.reference:grouped_matmul"},
        "stock": {"*": "nondet.kernels.stock:grouped_matmul"},
        "invariant": {
            "cuda": "nondet.kernels.experts.cuda:grouped_matmul",
            "cpu": "nondet.kernels.experts.cpu:grouped_matmul",
        },
    },
    "split_k": {
        "reference": {"*": "nondet.kernels.reference:matmul"},
        "stock": {
            "cuda": "nondet.kernels.demos.split_k_cuda:split_k",
            "cpu": "nondet.kernels.demos.split_k_cpu:split_k",
        },
        "invariant": {
            "cuda": "nondet.kernels.demos.split_k_cuda:fixed_chunk",
            "cpu": "nondet.kernels.demos.split_k_cpu:fixed_chunk",
        },
    },
    "attention": {
        "reference": {"*": "nondet.kernels.reference:attention"},
        "stock": {"*": "nondet.kernels.stock:attention"},
        "stock-flash": {"*": "nondet.kernels.stock:attention_flash"},
        "stock-efficient": {"cuda": "nondet.kernels.stock:attention_efficient"},
        "stock-cudnn": {"cuda": "nondet.kernels.stock:attention_cudnn"},
        "stock-math": {"*": "nondet.kernels.stock:attention_math"},
        "invariant": {
            "cuda": "nondet.kernels.attention.cuda:attention",
            "cpu": "nondet.kernels.attention.cpu:attention",
        },
    },
    "rms_norm": {
        "reference": {"*": "nondet.kernels.reference:rms_norm"},
        "stock": {"*": "nondet.kernels.stock:rms_norm"},
        "stock-hf": {"*": "nondet.kernels.stock:rms_norm_hf"},
        "invariant": {"cuda": "nondet.kernels.rows.cuda:rms_norm", "cpu": "nondet.kernels.rows.cpu:rms_norm"},
    },
    "rms_norm_residual": {
        "reference": {"*": "nondet.kernels.reference:rms_norm_residual"},
        "stock": {"*": "nondet.kernels.stock:rms_norm_residual"},
        "invariant": {
            "cuda": "nondet.kernels.rows.cuda:rms_norm_residual",
            "cpu": "nondet.kernels.rows.cpu:rms_norm_residual",
        },
    },
    "softmax": {
        "reference": {"*": "nondet.kernels.reference:softmax"},
        "stock": {"*": "nondet.kernels.stock:softmax"},
        "invariant": {"cuda": "nondet.kernels.rows.cuda:softmax", "cpu": "nondet.kernels.rows.cpu:softmax"},
    },
    "log_softmax": {
        "reference": {"*": "nondet.kernels.reference:log_softmax"},
        "stock": {"*": "nondet.kernels.stock:log_softmax"},
        "invariant": {"cuda": "nondet.kernels.rows.cuda:log_softmax", "cpu": "nondet.kernels.rows.cpu:log_softmax"},
    },
    "logsumexp": {
        "reference": {"*": "nondet.kernels.reference:logsumexp"},
        "stock": {"*": "nondet.kernels.stock:logsumexp"},
        "invariant": {"cuda": "nondet.kernels.rows.cuda:logsumexp", "cpu": "nondet.kernels.rows.cpu:logsumexp"},
    },
    "cross_entropy": {
        "reference": {"*": "nondet.kernels.reference:cross_entropy"},
        "stock": {"*": "nondet.kernels.stock:cross_entropy"},
        "invariant": {
            "cuda": "nondet.kernels.rows.cuda:cross_entropy",
            "cpu": "nondet.kernels.rows.cpu:cross_entropy",
        },
    },
    "sum": {
        "reference": {"*": "nondet.kernels.reference:sum"},
        "stock": {"*": "nondet.kernels.stock:sum"},
        "invariant": {"cuda": "nondet.kernels.rows.cuda:sum", "cpu": "nondet.kernels.rows.cpu:sum"},
    },
    "mean": {
        "reference": {"*": "nondet.kernels.reference:mean"},
        "stock": {"*": "nondet.kernels.stock:mean"},
        "invariant": {"cuda": "nondet.kernels.rows.cuda:mean", "cpu": "nondet.kernels.rows.cpu:mean"},
    },
    # The stock forms of these two add in whatever order threads arrive; their invariant forms add in index order.
    "index_add": {
        "reference": {"*": "nondet.kernels.reference:index_add"},
        "stock": {"*": "nondet.kernels.stock:index_add"},
        "invariant": {"*": "nondet.kernels.scatter.ordered:index_add"},
    },
    "scatter_add": {
        "reference": {"*": "nondet.kernels.reference:scatter_add"},
        "stock": {"*": "nondet.kernels.stock:scatter_add"},
        "invariant": {"*": "nondet.kernels.scatter.ordered:scatter_add"},
    },
}

REPORTERS: dict[str, tuple[str, str]] = {
    ".html": ("nondet.reports.html:render", "one self-contained page"),
    ".md": ("nondet.reports.markdown:render", "markdown that reads well in a pull request"),
    "terminal": ("nondet.reports.terminal:render", "tables in the terminal"),
}


@dataclass(frozen=True)
class Implementation:
    """One implementation of one operator on one device type.

    Attributes:
        name: As asked for: stock, invariant, or a user's "module:function".
        call: The launcher, with the operator's signature (see `nondet.kernels.reference`).
    """

    operator: str
    name: str
    call: Callable[..., Any] = field(repr=False)


def load_object(target: str) -> Any:
    """Import "module:attribute"."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def load_probe(name: str) -> Any:
    """The probe of that name.

    Raises:
        UnknownNameError: no such probe; a close name is suggested.
    """
    if name not in PROBES:
        raise UnknownNameError("probe", name, [*PROBES, "all"])
    return load_object(PROBES[name][0])()


def implementation_names(operator: str, device: str) -> list[str]:
    """Implementations of `operator` that exist on the device type, the float64 reference left out."""
    table = IMPLEMENTATIONS[operator]
    return [n for n, where in table.items() if n != "reference" and ("*" in where or device in where)]


def load_implementation(operator: str, name: str, device: str) -> Implementation:
    """The implementation of that name, or the user's "package.module:function".

    Raises:
        UnknownNameError: no such implementation.
        UserError: it exists, but not on this device; or the user's function can't be imported or called.
    """
    if ":" in name:
        return Implementation(operator, name, _user_function(name))
    table = IMPLEMENTATIONS[operator]
    if name not in table:
        raise UnknownNameError(f"implementation of {operator}", name, [n for n in table if n != "reference"])
    target = table[name].get(device, table[name].get("*"))
    if target is None:
        raise UserError(
            f"{operator} has no {name!r} implementation on {device}", f"It has one on {', '.join(table[name])}."
        )
    return Implementation(operator, name, load_object(target))


def _user_function(target: str) -> Callable[..., Any]:
    try:
        found = load_object(target)
    except Exception as error:
        raise UserError(
            f"--impl {target!r} can't be imported: {type(error).__name__}: {error}",
            "Give package.module:function, importable from the current directory or the environment.",
        ) from error
    if not callable(found):
        raise UserError(f"--impl {target!r} is a {type(found).__name__}, not a function", "Name a callable.")
    call: Callable[..., Any] = found
    return call
