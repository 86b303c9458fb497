"""What a probe is.

A case is one question: variants of one computation that ought to give equal bits. The runner computes every variant
under every implementation, sorts the results into classes, and writes a row. A probe only says what the cases are, what
the variants compute, and what the float64 reference is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from nondet.core.measure import Trial

__all__ = ["Case", "Options", "Probe", "Trial"]


@dataclass(frozen=True)
class Options:
    """What the command line asked for. None means: the probe's own default list.

    Attributes:
        device: "cpu" or "cuda".
        dtypes: Dtypes to ask about.
        m, k, n: Sizes given by the user; a probe takes those that its operator has.
        layers: (name, K, N) of real linear layers, from a preset or a model's config.
        config: Sizes of a model (heads, head_dim, hidden, vocabulary), from a preset or a model's config.
        inputs: Kinds of input (`nondet.core.inputs.KINDS`).
        runs: Repetitions of run-to-run cases.
        ranks: Numbers of ranks to start, for probes of collectives.
        full: The long sweep instead of the default list of under 20 s.
        met: (rows, keys, products or 0) that a trace met, see `nondet.probes.met`: they are among what is asked.
        own: Keys that the row in question saw there.
        operator: What it met, where the probe asks several.
    """

    device: str = "cpu"
    dtypes: tuple[str, ...] | None = None
    m: int | None = None
    k: int | None = None
    n: int | None = None
    layers: tuple[tuple[str, int, int], ...] = ()
    config: Mapping[str, int] = field(default_factory=dict)
    inputs: tuple[str, ...] | None = None
    runs: int | None = None
    ranks: tuple[int, ...] | None = None
    seed: int = 0
    full: bool = False
    met: tuple[tuple[int, int], ...] = ()
    own: int = 0
    operator: str = ""


@dataclass(frozen=True)
class Case:
    """One question.

    Attributes:
        name: Unique within the probe, device and dtype; it is part of the key that a resumed run skips by.
        operator: A declared operator (`nondet.core.registry.operators`); or a name of the probe's own, if it needs
            none.
        shape: Named sizes, for the row.
        varied: What differs between the variants: batch_size, position, run, query_chunk, split, order, ...
        axis: The kind of what varies, an `Axis` of `nondet.core.records`; None: what `varied` usually is.
        demonstration: The probe built the operator to show a cause: no verdict on what a library runs.
        exact: Every partial sum is exact, so that all orders must agree and what parts is a bug; None: by `inputs`.
        impls: The implementations that the case is put to; None: those the user asked for.
        data: Whatever else `prepare` and `trials` need.
    """

    name: str
    operator: str
    shape: Mapping[str, int]
    dtype: str
    varied: str
    inputs: str = "bell"
    impls: tuple[str, ...] | None = None
    axis: str | None = None
    demonstration: bool = False
    exact: bool | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch has it."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


class Probe(Protocol):
    """A probe: one file in `probes/`, one line in `nondet.core.registry.PROBES`, one test."""

    name: str

    def cases(self, options: Options) -> Iterable[Case]:
        """The cases for these options. Cheap: no tensors are made here.

        Raises:
            UserError: a size or dtype that makes no sense for the operator.
        """
        ...

    def prepare(self, case: Case, device: str, seed: int) -> Any:
        """The inputs of a case, shared by all implementations and variants."""
        ...

    def trials(self, case: Case, inputs: Any, operator: Callable[..., torch.Tensor]) -> Iterator[Trial]:
        """The variants, with `operator` the launcher of the implementation in hand."""
        ...

    def reference(self, case: Case, inputs: Any) -> torch.Tensor | None:
        """What the first variant ought to be, in float64; None where there is no such thing."""
        ...

    def extra(self, case: Case, inputs: Any, results: list[torch.Tensor]) -> dict[str, Any]:
        """What only this probe can say of the distinct results (representatives, by class), as JSON-able data."""
        ...
