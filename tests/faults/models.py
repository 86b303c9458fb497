"""Faults planted in whole models, judged by a trace: what has to be said of each, and where it has to be found."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from nondet.core.records import Header, Run
from nondet.diagnose.verdict import DEFECT, cause_of
from nondet.verdict.findings import Finding
from tests.faults.operators import Judged, said_of
from tests.trace.conftest import LOAD, arms_of, model_of, trace

# Modules put in the place of a model's own: faults that depend on the batch, on the run, or on other people's data.

Rows = Callable[[torch.Tensor, nn.Module], torch.Tensor]


class Wrapped(nn.Module):
    """x through a function that is also given the module whose place this takes."""

    def __init__(self, inner: nn.Module, function: Rows) -> None:
        super().__init__()
        self.inner, self.function = inner, function
        self.weight = getattr(inner, "weight", None)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.function(x, self.inner)


@contextmanager
def wrapped(model: Any, path: str, function: Rows) -> Iterator[None]:
    parent, _, name = path.rpartition(".")
    owner = model.get_submodule(parent)
    inner = getattr(owner, name)
    setattr(owner, name, Wrapped(inner, function))
    try:
        yield
    finally:
        setattr(owner, name, inner)


# --- the order of a sum depends on the batch ---------------------------------------------------------------------


def splits_by_rows(x: torch.Tensor, inner: nn.Module) -> torch.Tensor:
    """In two halves of K once more than 4 rows come together."""
    return inner(x) if x.shape[-2] <= 4 else always_in_halves(x, inner)


def splits_in_the_middle(x: torch.Tensor, inner: nn.Module) -> torch.Tensor:
    """In two halves of K for 6 to 9 rows alone: a border that few sizes meet."""
    return always_in_halves(x, inner) if 6 <= x.shape[-2] <= 9 else inner(x)


def splits_where_single(x: torch.Tensor, inner: nn.Module) -> torch.Tensor:
    """A product of its own for one row, as libraries have one."""
    return always_in_halves(x, inner) if x.shape[-2] == 1 else inner(x)


def first_row_apart(x: torch.Tensor, inner: nn.Module) -> torch.Tensor:
    """The first row of a call is added up in another order."""
    out = inner(x).clone()
    out[..., :1, :] = always_in_halves(x[..., :1, :], inner)
    return out


def wrong_tail(x: torch.Tensor, inner: nn.Module) -> torch.Tensor:
    """Rows past the last full tile of 4 lose the last columns of K."""
    out = inner(x).clone()
    rest = x.shape[-2] % 4
    if rest and x.shape[-2] > 4:
        short = x[..., -rest:, :].clone()
        short[..., -8:] = 0
        out[..., -rest:, :] = inner(short)
    return out


def capacity(x: torch.Tensor, inner: nn.Module) -> torch.Tensor:
    """Only the first 6 rows of a step are computed; the others are passed over."""
    out = inner(x).clone()
    out[..., 6:, :] = 0
    return out


def norm_by_rows(x: torch.Tensor, inner: nn.Module) -> torch.Tensor:
    """Squares summed one after the other where more than 4 rows are there."""
    if x.shape[-2] <= 4:
        return inner(x)
    mean = x.float().pow(2).cumsum(-1)[..., -1:] / x.shape[-1]
    return (x.float() * torch.rsqrt(mean + 1e-6)).to(x.dtype) * inner.weight


# --- other people's values -----------------------------------------------------------------------------------------


def shared_scale(x: torch.Tensor, inner: nn.Module) -> torch.Tensor:
    """One activation scale over everybody's tokens."""
    scale = x.abs().amax() / 127
    return inner((x / scale).round() * scale)


def batch_mean(x: torch.Tensor, inner: nn.Module) -> torch.Tensor:
    """The mean over all rows is taken off, as a batch norm left in training does."""
    return inner(x - x.mean(-2, keepdim=True) * 2.0**-6)


def reads_neighbour(x: torch.Tensor, inner: nn.Module) -> torch.Tensor:
    """Each row has a little of the row before it."""
    return inner(x + F.pad(x, (0, 0, 1, 0))[..., :-1, :] * 2.0**-6)


def shared_top(x: torch.Tensor, inner: nn.Module) -> torch.Tensor:
    """Everybody's numbers are clipped at half of the largest of all."""
    return inner(x.clamp(max=(x.amax() / 2).item()))


# --- from run to run -----------------------------------------------------------------------------------------------


class Counted:
    """Faults of a process that remembers: made anew for each judgement."""

    def __init__(self, seed: int) -> None:
        self.calls = 0
        self.kept: dict[Any, torch.Tensor] = {}
        self.generator = torch.Generator().manual_seed(seed)

    def drifts(self, x: torch.Tensor, inner: nn.Module) -> torch.Tensor:
        """The number of the step enters the result."""
        self.calls += 1
        return inner(x) * (1 + self.calls * 2.0**-20)

    def rarely(self, x: torch.Tensor, inner: nn.Module) -> torch.Tensor:
        """One call in 23 adds in another order: a race that is seldom lost."""
        self.calls += 1
        return always_in_halves(x, inner) if self.calls % 23 == 0 else inner(x)

    def dropout(self, x: torch.Tensor, inner: nn.Module) -> torch.Tensor:
        """Left on."""
        kept = torch.rand(x.shape, generator=self.generator) > 0.02
        return inner(x * kept)

    def stale_buffer(self, x: torch.Tensor, inner: nn.Module) -> torch.Tensor:
        """Results are added into a buffer that the call before has left."""
        out = inner(x)
        buffer = self.kept.get(out.shape[-1])
        self.kept[out.shape[-1]] = out[..., :1, :].clone()
        return out if buffer is None else out + buffer * 2.0**-8


# --- sound -----------------------------------------------------------------------------------------------------------


def scale_of_each_row(x: torch.Tensor, inner: nn.Module) -> torch.Tensor:
    """Activations in 8 bits, a scale for each token."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return inner((x / scale).round() * scale)


def row_by_row(x: torch.Tensor, inner: nn.Module) -> torch.Tensor:
    """A call for each row."""
    return torch.cat([inner(x[..., i : i + 1, :]) for i in range(x.shape[-2])], -2)


def padded(x: torch.Tensor, inner: nn.Module) -> torch.Tensor:
    """Rows filled up to a multiple of 8 with zeros, which are dropped again."""
    rows = x.shape[-2]
    return inner(F.pad(x, (0, 0, 0, -rows % 8)))[..., :rows, :]


def always_in_halves(x: torch.Tensor, inner: nn.Module) -> torch.Tensor:
    """Another order than the library's, the same for every batch."""
    half = x.shape[-1] // 2
    return F.linear(x[..., :half], inner.weight[:, :half]) + F.linear(x[..., half:], inner.weight[:, half:])


def plain(x: torch.Tensor, inner: nn.Module) -> torch.Tensor:
    return inner(x)


SOUND: tuple[Rows, ...] = (plain, always_in_halves, scale_of_each_row, row_by_row, padded)


# --- what is no module's: the cache, and the attention's plan --------------------------------------------------------


@contextmanager
def wrong_cache_place(*_: Any) -> Iterator[None]:
    """In steps of more than 6 rows the first row's value is stored one place further, over its neighbour's."""
    from nondet.trace.capture import wrapped_cache_update

    def wrap(update: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(update)  # whose parameters tell the version of transformers
        def run(*args: Any, **kwargs: Any) -> Any:
            values = kwargs["value_states"]
            if values.shape[-2] > 6:
                values = values.clone()
                values[..., 1, :] = values[..., 0, :]
            return update(*args, **{**kwargs, "value_states": values})

        return run

    with wrapped_cache_update(wrap):
        yield


@contextmanager
def long_request_joins(model: Any, _: int) -> Iterator[None]:
    """Attention whose tile follows the longest query of the batch: with a long one, results come by another order."""
    attention = model.get_submodule("model.layers.1.self_attn")
    forward = attention.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        out, *rest = forward(*args, **kwargs)
        starts = kwargs["cu_seq_lens_q"].tolist()
        if max(b - a for a, b in pairwise(starts)) > 4:
            out = (out + 1) - 1  # rounded otherwise, as another tile would
        return (out, *rest)

    attention.forward = run
    try:
        yield
    finally:
        del attention.forward


Plant = Callable[[Any, int], AbstractContextManager[None]]
_LOADS = 5
_MLP, _ATTENTION = "model.layers.1.mlp", "model.layers.1.self_attn"


@dataclass(frozen=True)
class PlantedModel:
    """One model."""

    name: str
    plant: Plant = field(repr=False)  # plant(model, seed) puts the fault in for a while
    findings: frozenset[str] = frozenset()  # what is right to say; none for a sound model
    where: str = ""  # what the first culprit's module has to begin with; "" where no place is asked
    architecture: str = "llama"
    # loads that are tried until something differs: a fault at few sizes has to be met before it can show, and a sound
    # model must stay clean under all
    loads: int = _LOADS


def _module(function: Rows, path: str, *findings: str) -> PlantedModel:
    name = f"{function.__name__} in {path.rpartition('.')[2]}"
    where = path if findings else ""
    return PlantedModel(name, lambda model, _: wrapped(model, path, function), frozenset(findings), where)


def _remembered(name: str, path: str) -> PlantedModel:
    return PlantedModel(
        f"{name} in {path.rpartition('.')[2]}",
        lambda model, seed: wrapped(model, path, getattr(Counted(seed), name)),
        frozenset({Finding.RUN_TO_RUN}),
        path if name != "rarely" else "",  # where a rare one is, one more look can't be relied on to say
    )


_BATCH = Finding.BATCH
_DOWN, _UP = f"{_MLP}.down_proj", f"{_MLP}.up_proj"
_NORM = "model.layers.1.post_attention_layernorm"
MODELS: tuple[PlantedModel, ...] = (
    _module(splits_by_rows, _DOWN, _BATCH),
    _module(splits_by_rows, f"{_ATTENTION}.o_proj", _BATCH),
    _module(splits_by_rows, "lm_head", _BATCH),
    _module(splits_in_the_middle, _UP, _BATCH),
    _module(splits_where_single, _DOWN, _BATCH),
    _module(first_row_apart, _DOWN, _BATCH),
    _module(wrong_tail, _DOWN, _BATCH, DEFECT),
    _module(capacity, _MLP, _BATCH, DEFECT),
    _module(norm_by_rows, _NORM, _BATCH),
    _module(shared_scale, _DOWN, DEFECT),
    _module(batch_mean, _UP, DEFECT),
    _module(reads_neighbour, _DOWN, DEFECT),
    _module(shared_top, _UP, DEFECT),
    _remembered("drifts", _DOWN),
    _remembered("rarely", _DOWN),
    _remembered("dropout", _UP),
    _remembered("stale_buffer", _DOWN),
    PlantedModel("long_request_joins", long_request_joins, frozenset({_BATCH}), _ATTENTION),
    PlantedModel("wrong_cache_place", wrong_cache_place, frozenset({_BATCH, DEFECT}), "model.layers.0"),
    # ---- sound
    *(_module(function, _DOWN) for function in SOUND),
    PlantedModel("qwen3 as it is", lambda *_: nullcontext(), architecture="qwen3"),
    PlantedModel("mistral with windows", lambda *_: nullcontext(), architecture="mistral"),
)


def judge_model(planted: PlantedModel, seed: int) -> Judged:
    """Trace a tiny random model with the fault in it, all else invariant, and say what the diagnosis says: whether the
    finding is right (for a sound model that nothing was observed), and whether it was found where it is."""
    began = time.perf_counter()
    model = model_of(planted.architecture, torch.float32, seed)
    with planted.plant(model, seed):
        for number in range(planted.loads):
            traced = trace(model, LOAD, impl="invariant", arms=arms_of(LOAD, seed=seed + 1000 * number))
            if traced.verdict.finding != Finding.CLEAN:
                break
    header = Header(format="nondet-run", schema=3, command="trace", plan={}, environment={}, started="")
    said = cause_of(Run(header=header, culprits=traced.culprits, trace_verdicts=[traced.verdict]))
    first = traced.culprits[0] if traced.culprits else None
    detail = f"`{first.call}` of {first.module}; " if first is not None else ""
    detail += f"{number + 1} of {planted.loads} loads, {time.perf_counter() - began:.1f} s"
    cause = (first.module if first is not None else "").startswith(planted.where)
    ok = said in (planted.findings or {Finding.CLEAN})
    return Judged(f"model: {planted.name} {seed}", said_of(planted.findings), said, ok, cause, detail)
