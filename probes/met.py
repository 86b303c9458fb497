"""What a trace met: the guilty operator's probe, and the very shapes at which its call parted."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from nondet.core.records import Culprit, Run
from nondet.errors import UserError
from nondet.probes.base import Options
from nondet.probes.pointwise import OPERATORS

__all__ = ["Met", "met_in"]

# What torch calls it -> the probe that asks it.
_PROBES: dict[str, str] = {
    "linear": "matmul",
    "matmul": "matmul",
    "mm": "matmul",
    "addmm": "matmul",
    "bmm": "matmul",
    "grouped_mm": "grouped-matmul",
    "scaled_dot_product_attention": "attention",
    "attention": "attention",
    "softmax": "softmax",
    "log_softmax": "log-softmax",
    "mean": "reduction",
    "sum": "reduction",
    "logsumexp": "logsumexp",
    "cumsum": "cumsum",
    "rms_norm": "rms-norm",
}


@dataclass(frozen=True)
class Met:
    """A culprit as a probe can ask it.

    Attributes:
        shapes: Of the call in either arm: (rows, keys), (rows, products of the batch) or (elements, 0).
        own: Keys that the row in question sees.
        operator: Which of the probe's, where it asks several.
        k, n: Sizes of the operator's axes; config: heads, where it has any.
    """

    probe: str
    shapes: tuple[tuple[int, int], ...]
    dtype: str
    own: int = 0
    k: int | None = None
    n: int | None = None
    config: dict[str, int] = field(default_factory=dict)
    operator: str = ""

    def options(self, options: Options) -> Options:
        """The options with these sizes; what the user gave himself stays."""
        return replace(
            options,
            k=self.k if options.k is None else options.k,
            n=self.n if options.n is None else options.n,
            config=options.config or self.config,
            dtypes=options.dtypes or (self.dtype,),
            met=self.shapes,
            own=self.own,
            operator=self.operator,
        )


def met_in(run: Run) -> Met:
    """The first guilty operator that the run's trace names.

    Raises:
        UserError: the run names none, or one that no probe asks.
    """
    culprit = next((c for c in run.culprits if c.call), None)
    if culprit is None:
        what = "its trace named no operator" if run.culprits or run.trace_verdicts else "it holds no trace"
        raise UserError(f"{run.source or 'the run'} has no guilty operator: {what}", "Give one of `nondet trace`.")
    name = culprit.call.removeprefix("Tensor.").removeprefix("_")
    probe = "rms-norm" if name.endswith("RMSNorm") else "pointwise" if name in OPERATORS else _PROBES.get(name)
    shapes = [{place: size for place, size in arm.items() if size} for arm in culprit.shapes]
    dtype = str(run.header.plan.get("dtype", "bfloat16"))
    met = None if probe is None or len(shapes) != 2 else _met(probe, name, culprit, shapes, dtype)
    if met is None:
        raise UserError(
            f"no probe asks `{culprit.call}` of {culprit.module} at the shapes of {run.source or 'the run'}",
            f"Probes ask {', '.join([*_PROBES, *OPERATORS])}.",
        )
    return met


def _met(probe: str, name: str, culprit: Culprit, shapes: list[dict[str, list[int]]], dtype: str) -> Met | None:
    if probe == "attention":
        query, key = ("0", "1") if "1" in shapes[0] else ("query", "keys")
        sizes = [(arm.get(query, []), arm.get(key, arm.get("key", []))) for arm in shapes]
        if any(len(q) != 4 or len(k) != 4 for q, k in sizes):
            return None
        (q, k), _ = sizes
        return Met(
            probe,
            tuple((arm_q[2], arm_k[2]) for arm_q, arm_k in sizes),
            dtype,
            own=min(culprit.position + 1, *(arm_k[2] for _, arm_k in sizes)),
            config={"heads": q[1], "kv_heads": k[1], "head_dim": q[3]},
        )
    if probe == "pointwise":
        counts = tuple((_product(arm.get("0", [])), 0) for arm in shapes)
        return Met(probe, counts, dtype, k=max(count for count, _ in counts), operator=name)
    rows = [arm.get("1" if name == "addmm" else "0", []) for arm in shapes]
    if name == "bmm" or (name == "matmul" and all(len(arm.get("1", [])) > 2 for arm in shapes)):
        return _batched(rows, [arm.get("1", []) for arm in shapes], dtype)
    if any(len(shape) < 2 for shape in rows):
        return None
    counts = tuple((_product(shape[:-1]), 0) for shape in rows)
    if probe == "grouped-matmul":
        weights = shapes[0].get("1", [])
        if len(weights) != 3:
            return None
        return Met(probe, counts, dtype, k=weights[1], n=weights[2], config={"experts": weights[0]})
    if probe != "matmul":
        return Met(probe, counts, dtype, k=rows[0][-1])
    out = shapes[0].get("out", [])
    weight = shapes[0].get("2" if name == "addmm" else "1", [])
    return Met(probe, counts, dtype, k=rows[0][-1], n=out[-1]) if len(weight) == 2 and out else None


def _batched(left: list[list[int]], right: list[list[int]], dtype: str) -> Met | None:
    """Products in batches; None where their depth or width follows the batch: then they are no one question."""
    sizes = {(a[-1], b[-1]) for a, b in zip(left, right, strict=True) if len(a) > 2 and a[:-2] == b[:-2]}
    if len(sizes) != 1 or any(len(a) < 3 for a in left):
        return None
    ((k, n),) = sizes
    return Met("matmul", tuple((a[-2], _product(a[:-2])) for a in left), dtype, k=k, n=n)


def _product(sizes: list[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
