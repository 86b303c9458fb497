"""What a shell completes: the closed sets of names that options take. Each is read from its registry when asked.

A name that none of them holds may still be right: a user's "package.module:function", a load of keys, a folder.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "bench_impls",
    "classes",
    "families",
    "loads",
    "operators",
    "presets",
    "probe_impls",
    "probes",
    "sample_impls",
]


def _starting(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]


def probes(incomplete: str) -> list[str]:
    """Probes, and all of them."""
    from nondet.core.registry import OPERATOR_PROBES, PROBES

    return _starting(incomplete, [*PROBES, *(name.replace("_", "-") for name in OPERATOR_PROBES), "all"])


def operators(incomplete: str) -> list[str]:
    """Operators that a numerics class has members of."""
    from nondet.core.registry import classes as known

    return _starting(incomplete, ["all", *(name.replace("_", "-") for c in known().values() for name in c.members)])


def classes(incomplete: str) -> list[str]:
    """Numerics classes."""
    from nondet.core.registry import classes as known

    return _starting(incomplete, known())


def probe_impls(incomplete: str) -> list[str]:
    """Implementations of any operator."""
    from nondet.core.registry import operators as known

    names = [i.name for operator in known().values() for i in operator.implementations]
    return _starting(incomplete, ["stock", "invariant", *names])


def bench_impls(incomplete: str) -> list[str]:
    """Those, and the rival libraries."""
    from nondet.bench.rivals import RIVALS

    return [*probe_impls(incomplete), *_starting(incomplete, RIVALS)]


def families() -> list[str]:
    """Families of operators that `batch_invariant` can replace by themselves."""
    from nondet.core.registry import declared

    return list(dict.fromkeys(o.family.name for o in declared().values() if o.family is not None))


def sample_impls(incomplete: str) -> list[str]:
    """What a model is sampled under; one family replaced by itself among them."""
    drawn = ["stock-seeded", "unseeded-invariant"]
    names = [
        "stock",
        "stock-no-cudnn",
        "stock-flash",
        "invariant",
        "both",
        *drawn,
        *(f"invariant:{f}" for f in families()),
    ]
    return _starting(incomplete, names)


def loads(incomplete: str) -> list[str]:
    """The load presets."""
    from nondet.sampling.plan import PRESETS

    return _starting(incomplete, PRESETS)


def presets(incomplete: str) -> list[str]:
    """Models whose layer shapes are known."""
    from nondet.probes.models import PRESETS

    return _starting(incomplete, PRESETS)
