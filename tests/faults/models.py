"""Faults planted in whole models, judged by a trace: what has to be said of each, and where it has to be found."""

from __future__ import annotations

import functools
import inspect
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from nondet.core.records import Header, Run
from nondet.diagnose.verdict import DEFECT, cause_of
from nondet.verdict.findings import Finding
from tests.faults.operators import Judged, said_of
from tests.trace.conftest import LOAD, arms_of, model_of, trace

# Functions put in the place of a model's own modules: faults that depend on the batch, the run, or other people's data.

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


def in_halves(x: torch.Tensor, inner: nn.Module) -> torch.Tensor:
    """K in two halves: another order than the library's."""
    half = x.shape[-1] // 2
    return F.linear(x[..., :half], inner.weight[:, :half]) + F.linear(x[..., half:], inner.weight[:, half:])


def halved_where(hit: Callable[[int], bool]) -> Rows:
    """In two halves in steps of so many rows."""
    return lambda x, inner: in_halves(x, inner) if hit(x.shape[-2]) else inner(x)


def wrong_tail(x: torch.Tensor, inner: nn.Module) -> torch.Tensor:
    """Rows past the last full tile of 4 lose the last columns of K."""
    out, rest = inner(x).clone(), x.shape[-2] % 4
    if rest and x.shape[-2] > 4:
        out[..., -rest:, :] = inner(F.pad(x[..., -rest:, :-8], (0, 8)))
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


def in_8_bits(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    scale = largest / 127
    return (x / scale).round() * scale


FUNCTIONS: dict[str, Rows] = {
    # the order of a sum depends on the batch
    "splits_by_rows": halved_where(lambda rows: rows > 4),
    "splits_in_the_middle": halved_where(lambda rows: 6 <= rows <= 9),  # a border that few sizes meet
    "splits_where_single": halved_where(lambda rows: rows == 1),  # a product of its own, as libraries have one
    "first_row_apart": lambda x, inner: torch.cat([in_halves(x[..., :1, :], inner), inner(x)[..., 1:, :]], -2),
    "norm_by_rows": norm_by_rows,
    # rows that are not computed, or wrongly
    "wrong_tail": wrong_tail,
    "capacity": capacity,
    # other requests' values: one scale for all tokens, a batch norm left in training, the row before, one largest
    "shared_scale": lambda x, inner: inner(in_8_bits(x, x.abs().amax())),
    "batch_mean": lambda x, inner: inner(x - x.mean(-2, keepdim=True) * 2.0**-6),
    "reads_neighbour": lambda x, inner: inner(x + F.pad(x, (0, 0, 1, 0))[..., :-1, :] * 2.0**-6),
    "shared_top": lambda x, inner: inner(x.clamp(max=(x.amax() / 2).item())),
    # sound
    "plain": lambda x, inner: inner(x),
    "always_in_halves": in_halves,
    "scale_of_each_row": lambda x, inner: inner(in_8_bits(x, x.abs().amax(-1, keepdim=True))),
    "row_by_row": lambda x, inner: torch.cat([inner(row) for row in x.split(1, -2)], -2),
    "padded": lambda x, inner: inner(F.pad(x, (0, 0, 0, -x.shape[-2] % 8)))[..., : x.shape[-2], :],
}


def remembering(seed: int) -> dict[str, Rows]:
    """Faults of a process that remembers: made anew for each judgement."""
    calls, kept, generator = itertools.count(1), dict[Any, torch.Tensor](), torch.Generator().manual_seed(seed)

    def stale_buffer(x: torch.Tensor, inner: nn.Module) -> torch.Tensor:
        out = inner(x)
        buffer, kept[out.shape[-1]] = kept.get(out.shape[-1]), out[..., :1, :].clone()
        return out if buffer is None else out + buffer * 2.0**-8

    return {
        # the number of the step enters the result
        "drifts": lambda x, inner: inner(x) * (1 + next(calls) * 2.0**-20),
        # a race that is seldom lost: one call in 23 adds in another order
        "rarely": lambda x, inner: in_halves(x, inner) if next(calls) % 23 == 0 else inner(x),
        # left on
        "dropout": lambda x, inner: inner(x * (torch.rand(x.shape, generator=generator) > 0.02)),
        # results are added into a buffer that the call before has left
        "stale_buffer": stale_buffer,
    }


# What is no module's: the cache, and the attention's plan.


@contextmanager
def wrong_cache_place(*_: Any) -> Iterator[None]:
    """In steps of more than 6 rows the first row's value is stored one place further, over its neighbour's."""
    from nondet.trace.capture import wrapped_cache_update

    def wrap(update: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(update)  # whose parameters tell the version of transformers
        def run(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(update).bind(*args, **kwargs)
            values = given.arguments["value_states"]
            if values.shape[-2] > 6:
                given.arguments["value_states"] = values = values.clone()
                values[..., 1, :] = values[..., 0, :]
            return update(*given.args, **given.kwargs)

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
        if max(b - a for a, b in itertools.pairwise(starts)) > 4:
            out = (out + 1) - 1  # rounded otherwise, as another tile would
        return (out, *rest)

    attention.forward = run
    try:
        yield
    finally:
        del attention.forward


# Loads that are tried until something differs: a fault at few sizes has to be met; a sound model is clean under all.
_LOADS = 5


@dataclass(frozen=True)
class PlantedModel:
    """One model."""

    name: str
    # plant(model, seed) puts the fault in for a while
    plant: Callable[[Any, int], AbstractContextManager[None]] = field(repr=False)
    findings: frozenset[str] = frozenset()  # what is right to say; none for a sound model
    where: str = ""  # what the first culprit's module has to begin with; "" where no place is asked
    architecture: str = "llama"


def _in(path: str, names: str, *findings: str, found: bool = True) -> Iterator[PlantedModel]:
    """A model for each of the names, whose function stands at this path; `found`: so says the first culprit."""

    def plant(name: str, model: Any, seed: int) -> AbstractContextManager[None]:
        return wrapped(model, path, (FUNCTIONS | remembering(seed))[name])

    for name in names.split():
        shown, where = f"{name} in {path.rpartition('.')[2]}", path if findings and found else ""
        yield PlantedModel(shown, functools.partial(plant, name), frozenset(findings), where)


_BATCH, _RUN = Finding.BATCH, Finding.RUN_TO_RUN
_MLP, _ATTENTION = "model.layers.1.mlp", "model.layers.1.self_attn"
_DOWN, _UP = f"{_MLP}.down_proj", f"{_MLP}.up_proj"
MODELS: tuple[PlantedModel, ...] = (
    *_in(_DOWN, "splits_by_rows splits_where_single first_row_apart", _BATCH),
    *_in(f"{_ATTENTION}.o_proj", "splits_by_rows", _BATCH),
    *_in("lm_head", "splits_by_rows", _BATCH),
    *_in(_UP, "splits_in_the_middle", _BATCH),
    *_in("model.layers.1.post_attention_layernorm", "norm_by_rows", _BATCH),
    *_in(_DOWN, "wrong_tail", _BATCH, DEFECT),
    *_in(_MLP, "capacity", _BATCH, DEFECT),
    *_in(_DOWN, "shared_scale reads_neighbour", DEFECT),
    *_in(_UP, "batch_mean shared_top", DEFECT),
    *_in(_DOWN, "drifts stale_buffer", _RUN),
    *_in(_UP, "dropout", _RUN),
    *_in(_DOWN, "rarely", _RUN, found=False),  # where a rare one is, one more look can't be relied on to say
    PlantedModel("long_request_joins", long_request_joins, frozenset({_BATCH}), _ATTENTION),
    PlantedModel("wrong_cache_place", wrong_cache_place, frozenset({_BATCH, DEFECT}), "model.layers.0"),
    # ---- sound
    *_in(_DOWN, "plain always_in_halves scale_of_each_row row_by_row padded"),
    PlantedModel("qwen3 as it is", lambda *_: nullcontext(), architecture="qwen3"),
    PlantedModel("mistral with windows", lambda *_: nullcontext(), architecture="mistral"),
)


def judge_model(planted: PlantedModel, seed: int) -> Judged:
    """Trace a tiny random model with the fault in it, all else invariant, and say what the diagnosis says: whether the
    finding is right (for a sound model that nothing was observed), and whether it was found where it is."""
    began = time.perf_counter()
    model = model_of(planted.architecture, torch.float32, seed)
    with planted.plant(model, seed):
        for number in range(_LOADS):
            traced = trace(model, LOAD, impl="invariant", arms=arms_of(LOAD, seed=seed + 1000 * number))
            if traced.verdict.finding != Finding.CLEAN:
                break
    header = Header(format="nondet-run", schema=3, command="trace", plan={}, environment={}, started="")
    said = cause_of(Run(header=header, culprits=traced.culprits, trace_verdicts=[traced.verdict]))
    first = traced.culprits[0] if traced.culprits else None
    detail = f"`{first.call}` of {first.module}; " if first is not None else ""
    detail += f"{number + 1} of {_LOADS} loads, {time.perf_counter() - began:.1f} s"
    cause = (first.module if first is not None else "").startswith(planted.where)
    ok = said in (planted.findings or {Finding.CLEAN})
    return Judged(f"model: {planted.name} {seed}", said_of(planted.findings), said, ok, cause, detail)
