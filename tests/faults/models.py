"""Faults planted in whole models, judged by a trace: what has to be said of each, and where it has to be found."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from nondet.core.records import Header, Run
from nondet.diagnose.verdict import DEFECT, cause_of
from nondet.verdict.findings import Finding
from tests.faults import modules
from tests.faults.modules import Counted, wrapped
from tests.trace.conftest import LOAD, arms_of, model_of, trace

__all__ = ["MODELS", "PlantedModel", "ToldOfModel", "judge_model"]

Plant = Callable[[Any, int], AbstractContextManager[None]]
_LOADS = 5
_MLP, _ATTENTION = "model.layers.1.mlp", "model.layers.1.self_attn"


@dataclass(frozen=True)
class PlantedModel:
    """One model.

    Attributes:
        plant: plant(model, seed) puts the fault in for a while.
        findings: What is right to say; none for a sound model.
        where: What the first culprit's module has to begin with; "" where no place is asked.
        loads: Loads that are tried until something parts: a fault at few sizes has to be met before it can show, and a
            sound model must stay clean under all.
    """

    name: str
    plant: Plant = field(repr=False)
    findings: frozenset[str] = frozenset()
    where: str = ""
    architecture: str = "llama"
    loads: int = _LOADS


@dataclass(frozen=True)
class ToldOfModel:
    """What was said: the finding, the first culprit's place and call, and what it took: seconds, and loads."""

    finding: str
    where: str
    call: str
    seconds: float
    loads: int = 1

    def right(self, planted: PlantedModel) -> bool:
        """Whether the finding is right: for a sound model that nothing was observed."""
        return self.finding in (planted.findings or {Finding.CLEAN})

    def cause(self, planted: PlantedModel) -> bool:
        """Whether it was found where it is."""
        return self.where.startswith(planted.where)


def _module(function: modules.Rows, path: str, *findings: str) -> PlantedModel:
    name = f"{function.__name__} in {path.rpartition('.')[2]}"
    return PlantedModel(
        name, lambda model, _: wrapped(model, path, function), frozenset(findings), path if findings else ""
    )


def _remembered(name: str, path: str, *findings: str) -> PlantedModel:
    return PlantedModel(
        f"{name} in {path.rpartition('.')[2]}",
        lambda model, seed: wrapped(model, path, getattr(Counted(seed), name)),
        frozenset(findings),
        path if name != "rarely" else "",
    )


def _steady(plant: Callable[[Any], AbstractContextManager[None]]) -> Plant:
    return lambda model, _: plant(model)


_BATCH, _RUN = Finding.BATCH, Finding.RUN_TO_RUN
_DOWN, _UP = f"{_MLP}.down_proj", f"{_MLP}.up_proj"
_NORM = "model.layers.1.post_attention_layernorm"
MODELS: tuple[PlantedModel, ...] = (
    _module(modules.splits_by_rows, _DOWN, _BATCH),
    _module(modules.splits_by_rows, f"{_ATTENTION}.o_proj", _BATCH),
    _module(modules.splits_by_rows, "lm_head", _BATCH),
    _module(modules.splits_in_the_middle, _UP, _BATCH),
    _module(modules.splits_where_single, _DOWN, _BATCH),
    _module(modules.first_row_apart, _DOWN, _BATCH),
    _module(modules.wrong_tail, _DOWN, _BATCH, DEFECT),
    _module(modules.capacity, _MLP, _BATCH, DEFECT),
    _module(modules.norm_by_rows, _NORM, _BATCH),
    _module(modules.shared_scale, _DOWN, DEFECT),
    _module(modules.batch_mean, _UP, DEFECT),
    _module(modules.reads_neighbour, _DOWN, DEFECT),
    _module(modules.shared_top, _UP, DEFECT),
    _remembered("drifts", _DOWN, _RUN),
    _remembered("rarely", _DOWN, _RUN),  # where a rare one is, one more look can't be relied on to say
    _remembered("dropout", _UP, _RUN),
    _remembered("stale_buffer", _DOWN, _RUN),
    PlantedModel("long_request_joins", _steady(modules.long_request_joins), frozenset({_BATCH}), _ATTENTION),
    PlantedModel(
        "wrong_cache_place", _steady(modules.wrong_cache_place), frozenset({_BATCH, DEFECT}), "model.layers.0"
    ),
    # ---- sound
    *(_module(function, _DOWN) for function in modules.SOUND),
    PlantedModel("qwen3 as it is", lambda *_: nullcontext(), architecture="qwen3"),
    PlantedModel("mistral with windows", lambda *_: nullcontext(), architecture="mistral"),
)


def judge_model(planted: PlantedModel, seed: int) -> ToldOfModel:
    """Trace a tiny random model with the fault in it, all else invariant, and say what the diagnosis says."""
    began = time.perf_counter()
    model = model_of(planted.architecture, torch.float32, seed)
    with planted.plant(model, seed):
        for number in range(planted.loads):
            traced = trace(model, LOAD, impl="invariant", arms=arms_of(LOAD, seed=seed + 1000 * number))
            if traced.verdict.finding != Finding.CLEAN:
                break
    header = Header(format="nondet-run", schema=3, command="trace", plan={}, environment={}, started="")
    run = Run(header=header, culprits=traced.culprits, trace_verdicts=[traced.verdict])
    first = traced.culprits[0] if traced.culprits else None
    return ToldOfModel(
        finding=cause_of(run),
        where=first.module if first is not None else "",
        call=first.call if first is not None else "",
        seconds=time.perf_counter() - began,
        loads=number + 1,
    )
