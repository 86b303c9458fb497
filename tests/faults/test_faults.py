"""Every planted fault is named for what it is, by a question about its cause; nothing is said of sound kernels."""

from __future__ import annotations

import inspect
import itertools
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tests.faults.__main__ as command
from nondet.core.registry import OPERATOR_PROBES, PROBES, LoadedImplementation, load_object, load_probe, operators
from nondet.probes import attention, base
from nondet.probes.base import Options
from nondet.probes.runner import Job, run_jobs
from tests.faults import grammar
from tests.faults.models import MODELS, PlantedModel, judge_model
from tests.faults.operators import PLANTED, Judged, Planted, drawn, judge
from tests.kernels.tiers import at_length

# Sizes and inputs that no list holds. One seed in CI, so that a landing is not a throw of dice; fresh ones by
# `python -m tests.faults --seeds ...`, or here by NONDET_FAULT_SEED.
SEED = int(os.environ.get("NONDET_FAULT_SEED", "101"))


# A fault of each kind, and what is sound, of the operators that are asked about most; the others at length, among them
# those that tests/probes has as well.
_SHORT = (
    *("linear__order__bias__from_8", "linear_shared_scale", "linear_unsteady", "linear__order__any__first"),
    *("linear_one_buffer", "linear_lost_tail", "linear_sound", "linear_by_address", "linear_remembers_weights"),
    *("linear__order__any__nth_100", "linear_wide_result", "grouped_matmul__order__any__place_3"),
    *("rms_norm__eps__any__place_2", "softmax_shared_maximum", "sum_last_row", "attention_cache_apart"),
    *("attention_tile_by_longest", "attention_later_requests", "attention_shared_maximum", "fp8_rescales"),
    "index_add_loses_twins",
)
_BY_TIER = [
    *(p for p in PLANTED if p.function in _SHORT),
    *at_length(*(p for p in PLANTED if p.function not in _SHORT)),
]
# A few of the grammar's in CI; all of them, under any seed: python -m tests.faults.
DRAWN = random.Random(SEED).sample([p for p in drawn(SEED) if p.finding], 10)  # noqa: S311 - which of them, nothing secret
_SOUND = [p for p in drawn(SEED) if not p.finding and p.probe != "matmul"]
CONTROLS = random.Random(SEED).sample(_SOUND, 2)  # noqa: S311 - the same; products of a control take ten seconds
_BY_SEED = [*DRAWN[:2], CONTROLS[0], *at_length(*DRAWN[2:], *CONTROLS[1:])]


@pytest.mark.parametrize("planted", [*_BY_TIER, *_BY_SEED], ids=lambda p: p.name)
def test_the_verdict_of_planted(planted: Planted) -> None:
    """The finding is right, and a case that is about the cause of a fault shows it."""
    short = planted.function in _SHORT or planted not in PLANTED
    told = judge(planted, SEED, hasty=short, first=short)
    assert (told.ok, told.cause) == (True, True), told


def test_the_grammar_draws_others_for_another_seed() -> None:
    assert grammar.faults(1) == grammar.faults(1)
    assert len({*grammar.faults(1)} - {*grammar.faults(2)}) > 20
    words = [sentence.split("__") for seed in range(20) for sentence in grammar.faults(seed)]
    assert {effect.partition("_")[0] for _, effect, _, _ in words} == {
        *("order", "drop", "negate", "shift", "flush", "finite", "unmask", "eps", "unscaled", "stale")
    }
    contexts = {"any", "bias", "stored", "turned", "fused", "scale", "full", "long", "tiny", "denormal"}
    contexts |= {"infinite", "masked", "twin", "prefix", "hidden", "signed", "column", "narrow", "poisoned"}
    contexts |= {"later", "empty", "tile"}
    assert {where for _, _, where, _ in words} == contexts
    moments = {"always", "m", "from", "every", "share", "place", "first", "nth", "grown", "tuned", "third"}
    assert {when.partition("_")[0] for *_, when in words} == moments


# Every argument of every operator that has a probe is asked about: an implementation that mishandles one is wrong.

# Arguments that the reference has and a probe's cases do not give: what its other value means is asked elsewhere.
_NOT_GIVEN = {
    ("attention", "mask"): "additive masks are asked of stock alone, at the sizes that a trace met",
    **{(o, "dtype"): "a result of another is refused" for o in ("scaled_matmul", "scaled_grouped_matmul")},
}
_SIZES: dict[str, Any] = {"m": 17, "k": 96, "n": 8, "runs": 2}
_ATTENTION = {"config": {"heads": 4, "kv_heads": 2, "head_dim": 8}}
_PROBES = {o: OPERATOR_PROBES.get(o, o.replace("_", "-")) for o in operators()}
# Demonstrations and collectives have implementations with arguments of their own.
_OWN = {"split_k", "all_reduce", "reduce_scatter", "all_gather"}
_OWN |= {"quantize"}  # has no one right answer: tests/probes/test_scaled_matmul.py plants its faults
# `nondet certify` alone holds these.
UNPROBED = {"matmul", "cross_entropy", "rms_norm_residual", "topk"}
# `nondet probe backward` asks these of autograd itself, under its own names.
UNPROBED |= {o for o in operators() if o.endswith("_gradient")}
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
        return out.to(next((x for x in arguments if isinstance(x, torch.dtype)), arguments[0].dtype))

    return call


def _name_of(value: Any) -> str:
    return "-".join(value) if isinstance(value, tuple) else value.__name__.strip("_")


def _ignored(value: Any) -> Any:
    """What a kernel computes with that never reads it: zeros of a tensor, no number at all."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    return {bool: False, float: 0.0}.get(type(value))


def _turned(value: Any) -> Any:
    """Of a tensor the other sign, or the other end first where signs are of no use."""
    if not isinstance(value, torch.Tensor):
        return _ignored(value)
    if value.is_floating_point() and value.element_size() == 1:  # float8 has no arithmetic
        return (-value.float()).to(value.dtype)
    return -value if value.is_floating_point() else value.flip(0)


def _asked(operator: str, name: str, how: Callable[[Any], Any]) -> list[Job]:
    """The cases of the operator's probe, of an implementation that makes one argument otherwise."""
    probe = load_probe(PROBED[operator])
    options = Options(dtypes=("float32",), **(_ATTENTION if operator == "attention" else _SIZES))
    loaded = LoadedImplementation(operator, "planted", _mishandled(operator, name, how))
    cases = [c for c in probe.cases(options) if c.operator == operator and c.impls is None]
    return [Job(probe, case, "planted", "cpu", loaded=loaded) for case in cases]


@pytest.fixture
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "JOINED", (1, 16))
    monkeypatch.setattr(base, "OTHER_CALLS", 2)


# By default one way for each argument, by turns; both at length.
_WAYS = list(itertools.product(ARGUMENTS, (_ignored, _turned)))
_BY_TURNS = [(a, how) for i, (a, how) in enumerate(_WAYS) if i % 4 in (0, 3)]


@pytest.mark.usefixtures("few_calls")
@pytest.mark.parametrize(
    ("argument", "how"), [*_BY_TURNS, *at_length(*(way for way in _WAYS if way not in _BY_TURNS))], ids=_name_of
)
def test_an_argument_that_is_mishandled_is_wrong(argument: tuple[str, str], how: Callable[[Any], Any]) -> None:
    """In one case of its probe at least, by the oracle or by an answer that is exact: agreement is no excuse."""
    assert any(row.wrong for row in run_jobs(_asked(*argument, how), 0, set()))


# By default of one operator of each kind of operands: probes have every kind of rows in common.
_SOUND_OF = ("linear", "attention", "rms_norm", "softmax", "index_add")


@pytest.mark.usefixtures("few_calls")
@pytest.mark.parametrize("operator", [*_SOUND_OF, *at_length(*(o for o in PROBED if o not in _SOUND_OF))])
def test_the_oracle_itself_is_not_wrong(operator: str) -> None:
    """The same function with its argument as it is: no case calls it wrong, whatever numbers the rows hold."""
    first = next(name for o, name in ARGUMENTS if o == operator)
    rows = list(run_jobs(_asked(operator, first, lambda value: value), 0, set()))
    assert rows
    assert not [row.reason for row in rows if row.wrong or row.status == "error"]


# A fault of each kind and one that is none, under five loads; tests/trace plants its own by default.
_HERE = (
    "splits_by_rows in down_proj", "shared_scale in down_proj", "drifts in down_proj", "long_request_joins",
    "scale_of_each_row in down_proj",
)  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("planted", [m for m in MODELS if m.name in _HERE], ids=lambda m: m.name)
def test_the_diagnosis_of_a_planted_model(planted: PlantedModel) -> None:
    told = judge_model(planted, SEED)
    assert (told.ok, told.cause) == (True, True), told


def test_there_are_enough_of_both() -> None:
    assert len({p.name for p in PLANTED}) == len(PLANTED)
    planted = [bool(p.finding) for p in {p.name: p for p in (*PLANTED, *drawn(SEED))}.values()]
    models = [bool(m.findings) for m in {m.name: m for m in MODELS}.values()]
    assert (planted.count(True) >= 60, planted.count(False) >= 20) == (True, True)
    assert (models.count(True) >= 15, models.count(False) >= 5) == (True, True)
    assert {*_SHORT, *_HERE} <= {p.function for p in PLANTED} | {m.name for m in MODELS}
    # a new operator has a probe whose cases are about it, or is named here
    assert set(operators()) >= UNPROBED | _OWN
    assert set(PROBED.values()) <= set(PROBES)
    assert len(ARGUMENTS) >= 20


def test_the_matrix_counts_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    batch = "batch-dependent"
    told = iter(
        [
            Judged("missed", batch, "no divergence observed", ok=False, cause=True),
            Judged("elsewhere", batch, batch, ok=True, cause=False),
            Judged("found", batch, batch, ok=True, cause=True),
        ]
    )
    monkeypatch.setattr(command, "judge_model", lambda *_: next(told))
    assert command.main(["splits_where_single", "--seeds", "0", "1"]) == 1
    text = capsys.readouterr().out
    assert "fault: 2, said wrongly: 1, cause wrong: 1" in text
    assert text.splitlines()[-2].split()[-2:] == ["1", "1"]
    assert command.main(["splits_where_single", "--seeds", "0"]) == 0
    assert command.main(["pointwise square", "--seeds", "1"]) == 0  # an operator's, judged for good
    assert command.main(["no such name"]) == 1
