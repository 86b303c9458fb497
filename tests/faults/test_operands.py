"""Every argument of every operator that has a probe is asked about: an implementation that mishandles one is wrong."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from nondet.core.registry import OPERATOR_PROBES, PROBES, LoadedImplementation, load_object, load_probe, operators
from nondet.probes import attention
from nondet.probes.base import Options
from nondet.probes.runner import Job, run_jobs

# Arguments that the reference has and a probe's cases do not give: what its other value means is asked elsewhere.
_NOT_GIVEN = {("attention", "mask"): "additive masks are asked of stock alone, at the sizes that a trace met"}
_SIZES: dict[str, Any] = {"m": 17, "k": 96, "n": 8, "runs": 2}
_ATTENTION = {"config": {"heads": 4, "kv_heads": 2, "head_dim": 8}}
_PROBES = {o: OPERATOR_PROBES.get(o, o.replace("_", "-")) for o in operators()}
# Demonstrations and collectives have implementations with arguments of their own.
_OWN = {"split_k", "all_reduce", "reduce_scatter", "all_gather"}
# Products of a times b are asked at what a trace met; the others are held by `nondet certify` alone.
UNPROBED = {"matmul", "cross_entropy", "rms_norm_residual", "topk"}
PROBED = {o: p for o, p in _PROBES.items() if o not in _OWN | UNPROBED}
ARGUMENTS = [
    (o, name)
    for o in PROBED
    for name in inspect.signature(load_object(operators()[o].reference or "")).parameters
    if (o, name) not in _NOT_GIVEN
]


def _mishandled(operator: str, name: str, how: Callable[[Any], Any]) -> Callable[..., torch.Tensor]:
    """The oracle, rounded, with one argument as `how` makes it, where the argument has a default or is given."""
    oracle = load_object(operators()[operator].reference or "")
    signature = inspect.signature(oracle)

    def call(*arguments: Any, **keywords: Any) -> torch.Tensor:
        bound = signature.bind(*arguments, **keywords)
        bound.apply_defaults()
        bound.arguments[name] = how(bound.arguments[name])
        out: torch.Tensor = oracle(*bound.args, **bound.kwargs)
        return out.to(arguments[0].dtype)

    return call


def _ignored(value: Any) -> Any:
    """What a kernel computes with that never reads it: zeros of a tensor, no number at all."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    return {bool: False, float: 0.0}.get(type(value))


def _turned(value: Any) -> Any:
    """Of a tensor the other sign, or the other end first where signs are of no use."""
    if not isinstance(value, torch.Tensor):
        return _ignored(value)
    return -value if value.is_floating_point() else value.flip(0)


@pytest.mark.parametrize("how", [_ignored, _turned], ids=["ignored", "turned"])
@pytest.mark.parametrize(("operator", "name"), ARGUMENTS)
def test_an_argument_that_is_mishandled_is_wrong(
    operator: str, name: str, how: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one case of its probe at least, by the oracle or by an answer that is exact: agreement is no excuse."""
    monkeypatch.setattr(attention, "_JOINED", (1, 16))
    probe = load_probe(PROBED[operator])
    options = Options(dtypes=("float32",), **(_ATTENTION if operator == "attention" else _SIZES))
    loaded = LoadedImplementation(operator, "mishandled", _mishandled(operator, name, how))
    cases = [c for c in probe.cases(options) if c.operator == operator and c.impls is None]
    jobs = [Job(probe, case, "mishandled", "cpu", loaded=loaded) for case in cases]
    with mock.patch.dict("nondet.probes.base.__dict__", {"_OTHER_CALLS": 2}):
        assert any(row.wrong for row in run_jobs(jobs, 0, set()))


@pytest.mark.parametrize("operator", PROBED)
def test_the_oracle_itself_is_not_wrong(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same function with its argument as it is: no case calls it wrong, whatever numbers the rows hold."""
    monkeypatch.setattr(attention, "_JOINED", (1, 16))
    probe = load_probe(PROBED[operator])
    options = Options(dtypes=("float32",), **(_ATTENTION if operator == "attention" else _SIZES))
    first = next(name for o, name in ARGUMENTS if o == operator)
    loaded = LoadedImplementation(operator, "sound", _mishandled(operator, first, lambda value: value))
    jobs = [Job(probe, c, "sound", "cpu", loaded=loaded) for c in probe.cases(options) if c.operator == operator]
    with mock.patch.dict("nondet.probes.base.__dict__", {"_OTHER_CALLS": 2}):
        rows = list(run_jobs(jobs, 0, set()))
    assert rows
    assert not [row.reason for row in rows if row.wrong or row.status == "error"]


def test_operators_without_a_probe_are_few_and_named() -> None:
    """A new operator has a probe whose cases are about it, or is named here."""
    assert set(operators()) >= UNPROBED | _OWN
    assert set(PROBED.values()) <= set(PROBES)
    assert len(ARGUMENTS) >= 20
