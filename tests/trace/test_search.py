"""Whole traces: on several architectures the responsible operator is named and cured; planted faults; a clean model."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nondet.core.compare import first_difference
from nondet.core.records import Culprit, Replay
from nondet.core.traces import trace_digest
from nondet.errors import EngineStoppedError
from nondet.kernels.scaled.functions import quantize_tensor
from nondet.sampling.engine import TransformersEngine
from nondet.sampling.implementations import implementation
from nondet.trace.capture import CoarseCapture
from nondet.trace.replays import RecordedCall, exact, operators_of, replays
from nondet.trace.repro import write_and_run
from nondet.trace.search import Search, Site, least_site
from nondet.verdict.gate import exit_code
from tests.build import run_of, tiers
from tests.trace.conftest import ARCHITECTURES, LOAD, FirstOnly, Traced, arms_of, model_of, trace

CALLS = {"linear", "matmul", "scaled_dot_product_attention", "softmax"}


@pytest.fixture(scope="module")
def stock() -> Traced:
    """A whole trace of a stock float32 model; its records are read by several tests."""
    return trace(model_of("llama"))


@pytest.mark.parametrize("name", tiers(["llama", "qwen3_moe"], ARCHITECTURES))
def test_float32_models_are_traced_to_a_cure(name: str, stock: Traced) -> None:
    """Stock float32 products depend on M on every CPU: calls are named, and replacing their families cures. With
    windows, soft caps and experts; chunked prefills beside decodes; page tables; every family is needed."""
    traced = stock if name == "llama" else trace(model_of(name))
    assert traced.verdict.finding == "batch-dependent"
    assert traced.verdict.families
    assert set(traced.verdict.families) <= {"matmul", "attention", "moe"}
    first = traced.culprits[0]
    assert first.call in CALLS or first.module.endswith("experts"), first.sentence
    assert first.digests
    assert not traced.search.left_out
    assert all(difference.mismatched for difference in first.differences.values())
    tried = [frozenset(s.families) for s in traced.substitutions]
    assert len(set(tried)) == len(tried)  # what was seen is not asked again
    agreed = [s for s in traced.substitutions if s.agree]
    assert set(traced.verdict.families) in [set(s.families) for s in agreed]
    for family in traced.verdict.families:
        rest = set(traced.verdict.families) - {family}
        assert not rest or any(not s.agree and set(s.families) == rest for s in traced.substitutions)
    assert traced.control("run to run").passed
    assert traced.control("capture").passed
    assert "; rounding (0." in traced.verdict.sentences[0]


def test_a_search_that_ends_with_its_first_culprit_says_what_it_left_out() -> None:
    traced = trace(model_of("llama"), search=FirstOnly, sweeps=False)
    assert (traced.verdict.finding, traced.verdict.families) == ("batch-dependent", None)
    assert [c.call in CALLS for c in traced.culprits] == [True]
    assert not {"M", "keys", "substitution"} & {r.name for r in traced.culprits[0].replays}  # no sweeps were wanted
    assert not traced.substitutions
    assert traced.search.left_out in traced.verdict.sentences
    assert not any("no available set of replacements" in line for line in traced.verdict.sentences)


def test_replays_of_a_product_say_that_the_shape_decides(stock: Traced) -> None:
    culprit = next(c for c in stock.culprits if c.call == "linear")
    by_name = {r.name: r for r in culprit.replays}
    assert by_name["repeat"].status == by_name["values"].status == by_name["exact"].status == "identical"
    assert by_name["rows only"].status == by_name["M"].status == "divergent"
    assert "the shape decides, as the values of other rows do not change its bits" in by_name["rows only"].sentence
    assert by_name["M"].distinct > 1
    assert by_name["substitution"].values == ["matmul"]
    tree = by_name["tree"]
    sizes = [f"M = {math.prod(shapes['0'][:-1])}" for shapes in culprit.shapes]
    assert tree.status != "error", tree.sentence
    assert tree.values == sizes
    assert all(f"{size}: " in tree.sentence for size in sizes)
    assert stock.verdict.sentences[-1:] == [r.sentence for r in stock.culprits[0].replays if r.name == "tree"]
    assert culprit.kernels[0][0].startswith("aten.")
    assert stock.search.named is not None


def test_a_clean_model_gives_no_culprit() -> None:
    traced = trace(model_of("qwen3"), impl="invariant")
    assert traced.verdict.finding == "no divergence observed"
    assert not traced.culprits
    assert "alongside 6 other requests" in traced.verdict.sentences[0]


def test_logits_that_are_no_numbers_are_nothing_to_trace() -> None:
    model = model_of("llama")
    model.lm_head.weight.data.fill_(torch.nan)
    traced = trace(model)
    assert (traced.verdict.finding, traced.culprits) == ("unknown", [])
    control = traced.control("capture")
    assert control.passed is False
    assert control.sentence.startswith("arm solo: logits of t0 are NaN or infinite")
    assert "NaN or infinite: the model is wrong, whatever the batch" in traced.verdict.sentences[0]


def test_with_prefix_sharing_the_donor_is_traced() -> None:
    load = replace(LOAD, targets=4, others=3, sharing=True, spread=12)
    traced = trace(model_of("llama"), load, arms=arms_of(load, prompt=17), sweeps=False, search=FirstOnly)
    assert traced.verdict.finding == "batch-dependent"
    assert traced.culprits[0].call


# Faults of the second layer's down projection: each gives [..., N] of [..., K].


def splits(at: Planted, x: torch.Tensor) -> torch.Tensor:
    """Adds in another order once more than 4 rows come together."""
    if x.shape[-2] <= 4:
        return F.linear(x, at.weight)
    half = x.shape[-1] // 2
    return F.linear(x[..., :half], at.weight[:, :half]) + F.linear(x[..., half:], at.weight[:, half:])


def shares_scale(at: Planted, x: torch.Tensor) -> torch.Tensor:
    """One activation scale over everybody's tokens."""
    scale = x.abs().amax() / 127
    return at.inner((x / scale).round() * scale)


def turns_first_row(at: Planted, x: torch.Tensor) -> torch.Tensor:
    """The row at place 0 takes another way."""
    out = at.inner(x)
    return torch.cat([out[..., :1, :] * 1.0001, out[..., 1:, :]], dim=-2)


def drifts(at: Planted, x: torch.Tensor) -> torch.Tensor:
    """Something is carried over from call to call."""
    at.calls += 1
    return at.inner(x) * (1 + 1e-6 * at.calls)


def warms_up(at: Planted, x: torch.Tensor) -> torch.Tensor:
    """The first call of each number of rows takes another order, as a tuner's does."""
    first = x.shape[-2] not in at.seen
    at.seen.add(x.shape[-2])
    return at.inner(x) * (1 + 2.0**-20 * first)


def is_out_of_reach(at: Planted, x: torch.Tensor) -> torch.Tensor:
    """Follows its number of rows in the engine alone: a replay of it finds a cure that is none."""
    out = F.linear(x, at.weight)
    elsewhere = threading.current_thread() is not threading.main_thread()
    return out * (1 + 2.0**-20 * x.shape[-2]) if elsewhere else out


class Planted(nn.Module):
    """In the place of the projection."""

    def __init__(self, inner: nn.Linear, fault: Callable[[Planted, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.weight, self.fault, self.calls, self.seen = inner, inner.weight, fault, 0, set[int]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fault(self, x)


class Scalars(nn.Module):
    """An activation whose elements are computed one by one, and several at once where many rows come together."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-2] > 11:
            return F.silu(F.pad(x, (0, -x.shape[-1] % 64)))[..., : x.shape[-1]]
        return torch.cat([F.silu(part) for part in x.split(7, -1)], -1)


DOWN = "model.layers.1.mlp.down_proj"
PLAIN, OTHERS = "batch-dependent: the first operator", "other requests' data in this request's row, not rounding ("


def planted(fault: Callable[..., torch.Tensor], impl: str = "invariant", **options: Any) -> Traced:
    """The trace of a model with that module around the second layer's down projection."""
    model = model_of("llama")
    mlp = model.model.layers[1].mlp
    mlp.down_proj = Planted(mlp.down_proj, fault)
    return trace(model, impl=impl, **options)


def named(culprit: Culprit) -> tuple[str, str]:
    return culprit.module, culprit.call.removeprefix("Tensor.")


@pytest.mark.parametrize(
    ("fault", "call", "replays", "said", "begins"),
    [
        # its parts are others in either arm; no replacement at hand cures it
        (splits, "Planted", {"M": "divergent", "values": "identical"}, "no available set of replacements", PLAIN),
        # the call that takes the maximum is where others' data come in: replacing their values changes this row
        (shares_scale, "amax", {"values": "divergent", "rows only": "divergent"}, "data of other requests", OTHERS),
        (turns_first_row, "", {"order": "divergent"}, "depends on its position", "not rounding ("),
    ],
)
def test_a_planted_fault_is_found(
    fault: Callable[..., torch.Tensor], call: str, replays: dict[str, str], said: str, begins: str
) -> None:
    traced = planted(fault) if fault is splits else planted(fault, sweeps=False, search=FirstOnly)
    first, found = traced.culprits[0], {r.name: r for r in traced.culprits[0].replays}
    assert traced.verdict.finding == "batch-dependent"
    assert first.module == DOWN
    assert call in ("", first.call.removeprefix("Tensor."))
    assert {name: found[name].status for name in replays} == replays
    sentences = [*traced.verdict.sentences, *(r.sentence for r in first.replays)]
    assert any(said in sentence for sentence in sentences)
    assert traced.verdict.sentences[0].startswith(begins)
    if fault is splits:
        assert "; rounding (" in traced.verdict.sentences[0]
        assert any("down_proj add" in x or "down_proj linear" in x for x in first.unmatched)
        assert traced.verdict.families is None
    if fault is shares_scale:
        assert "reach this row" in found["rows only"].sentence
        assert "the shape decides" not in found["rows only"].sentence


class Float8Toy(torch.Tensor):
    """A weight made of float8 numbers and their scale, as torchao's; one scale over everybody's activations."""

    numbers: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, scale: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)
        made.numbers, made.scale = numbers, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> torch.Tensor:
        return Float8Toy(**inner)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear:
            return super().__torch_function__(func, types, args, kwargs or {})
        x, weight = args[:2]
        q, scale = quantize_tensor(x.flatten(0, -2))
        out = torch._scaled_mm(q, weight.numbers.t(), scale, weight.scale, out_dtype=torch.float32)
        return out.unflatten(0, x.shape[:-1])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.detach.default, func
        return cls(args[0].numbers, args[0].scale)


@pytest.mark.usefixtures("stock_fp8")
def test_a_weight_made_of_others_stays_in_replays_and_what_no_order_mends_is_named(tmp_path: Path) -> None:
    """Plain numbers in its place would ask another operator for its errors and its tree: these replays are refused."""
    model = model_of("llama")
    layer = model.model.layers[1].mlp.down_proj
    layer.weight = nn.Parameter(Float8Toy(*quantize_tensor(layer.weight.detach())), requires_grad=False)
    traced = trace(model, impl="invariant", search=FirstOnly)
    first = traced.culprits[0]
    assert named(first) == (DOWN, "linear[Float8Toy]")
    told = {r.name: r for r in first.replays}
    assert "tree" not in told
    assert told["exact"].status == "error"
    assert "a Float8Toy stays as it is" in told["exact"].sentence
    assert told["values"].status == told["substitution"].status == "divergent"
    assert traced.verdict.sentences[-1].endswith(
        "at risk under all of them: amax float32: over the whole tensor, the batch's axis included"
    )
    assert "aten._scaled_mm at" in first.sentence
    assert traced.search.named is not None
    assert write_and_run(tmp_path / "repro.py", traced.search.named) == (
        "no script: not torch but another package makes the operands of linear[Float8Toy]"
    )
    assert not list(tmp_path.iterdir())


def test_the_next_responsible_call_is_named_and_both_of_their_families_are_needed() -> None:
    """Attention and the activation; which diverges at an earlier position, a CPU's products decide."""
    model = model_of("llama", intermediate_size=97)
    model.model.layers[0].mlp.act_fn = Scalars()
    traced = trace(model, impl="invariant:matmul", sweeps=False)
    found = {("model.layers.0.self_attn", "attention"), ("model.layers.0.mlp.act_fn", "Scalars")}
    assert len(traced.culprits) == 2
    assert {named(c) for c in traced.culprits} == found
    assert {c.layer for c in traced.culprits} == {"0"}
    assert traced.culprits[0].position <= traced.culprits[1].position
    assert traced.verdict.finding == "batch-dependent"
    assert set(traced.verdict.families or []) == {"attention", "pointwise"}


def test_a_call_that_its_replacement_does_not_reach_is_named_once() -> None:
    traced = planted(is_out_of_reach, "invariant:attention")
    (culprit,) = traced.culprits
    assert culprit.module == DOWN
    assert culprit.family == "matmul"
    assert any("the replacement does not reach" in line for line in traced.said)
    assert traced.verdict.families is None


def test_what_changes_from_run_to_run_is_no_batch_dependence() -> None:
    for fault in (drifts, warms_up):
        traced = planted(fault)
        assert traced.verdict.finding == "run-to-run"
        assert traced.control("run to run").passed is False
        assert exit_code(run_of(trace_verdicts=[traced.verdict]), "divergent")[0] == 3
        if fault is drifts:
            assert traced.culprits[0].module == DOWN
            assert [r.name for r in traced.culprits[0].replays] == ["repeat", "substitution"]  # the rest would be noise
    assert "first session in this process differs" in traced.verdict.sentences[0]


def test_what_is_given_to_a_layer_from_outside_was_not_written_in_between() -> None:
    model = model_of("llama")
    rotary = model.model.rotary_emb
    plain = rotary.forward
    rotary.forward = lambda x, *a, **k: tuple(part * (1 + 2.0**-12 * x.shape[1]) for part in plain(x, *a, **k))
    traced = trace(model, impl="invariant", search=FirstOnly)
    assert traced.verdict.finding == "batch-dependent"
    assert "given to the layer from outside" in traced.culprits[0].sentence
    assert not traced.culprits[0].call


def test_nothing_follows_from_replays_that_do_not_give_what_was_recorded() -> None:
    call = product(F.linear, torch.float32)
    recorded = call.run() + 1
    done = list(replays(call, call, call.run(), recorded, "linear"))
    assert [replay.name for replay in done] == ["repeat", "substitution"]
    assert "not the recorded one" in done[0].sentence


def test_memory_that_is_allocated_is_no_kernel() -> None:
    assert operators_of(lambda: torch.empty(3).fill_(1.0)) == ["aten.fill_.Scalar"]


def test_an_arm_that_dies_leaves_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:

    def broken(*_: Any) -> None:
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr("nondet.trace.capture.visible_keys", broken)  # which the fine pass calls
    records: list[Any] = []
    with pytest.raises(EngineStoppedError, match=r"arm solo: the engine stopped in step 1: .*a kernel failed"):
        trace(model_of("llama"), records=records)
    assert [r.name for r in records][-2:] == ["capture", "run to run"]


@pytest.mark.gpu
def test_a_trace_sees_keys_that_the_kernel_would_read_in_place() -> None:
    """On CUDA invariant attention reads the cache where it lies; while traced it goes through the cache's update."""
    model = model_of("qwen3", torch.bfloat16).cuda()
    alone, _ = arms_of(LOAD)
    capture = CoarseCapture(alone.request, sharing=False)
    with implementation("invariant", model):
        alone.run(TransformersEngine(model), capture)
    assert {"0.k", "0.v", "1.k", "1.v"} <= set(capture.names)
    assert len(capture.rows) > 11


def test_the_request_whose_tokens_differ_is_taken_and_a_record_of_another_machine_is_said() -> None:
    load = replace(LOAD, targets=6, others=3)
    model = model_of("llama")
    alone, company = arms_of(load, new=6)
    engine = TransformersEngine(model)
    reference = alone.outcome(alone.run(engine))
    targets = [o for o in company.run(engine).outcomes if o.request.target]
    positions = [first_difference(reference, outcome) for outcome in targets]
    differing = [(token is None, logprob, i) for i, (token, logprob) in enumerate(positions) if logprob is not None]
    assert differing

    class EndedError(Exception):
        pass

    def say(line: str) -> None:
        if line.startswith("coarse pass"):
            raise EndedError

    records: list[Any] = []
    wanted = {"alone": trace_digest(reference.token_ids, reference.logprobs), "in company": "0" * 16}
    arms, about = arms_of(load, new=6), {"write": records.append, "say": say, "expected": wanted}
    search = Search(engine, model, *arms, impl="stock", **about)
    with pytest.raises(EndedError):
        search.run()
    figures = {r.name: r.figures for r in records}
    first = min(differing)[2]
    assert search.b.request == targets[first].request.id
    tokens = float(sum(not same for same, _, _ in differing))
    assert figures["company"] == {"requests": 6.0, "logprobs": float(len(differing)), "tokens": tokens}
    token, logprob = positions[first]
    assert figures["parting"] == {"first_logprob": logprob, "first_token": -1 if token is None else token}
    again = [r for r in records if r.name.startswith("record of")]
    assert [r.passed for r in again] == [True, False]
    assert "and is traced as it is now" in again[1].sentence


# A bug told from rounding: calls on ones and small integers, sound ones in any order and broken ones.


def product(function: Callable[..., torch.Tensor], dtype: torch.dtype) -> RecordedCall:
    """Row 3 of 7 rows times a weight."""
    x, weight = torch.randn(7, 1000).to(dtype), torch.randn(24, 1000).to(dtype)
    roles: dict[str, Any] = {"0": ("tokens", ""), "1": ("", ""), "": ("tokens", "")}
    return RecordedCall(function, (x, weight), {}, roles, "tokens", 3, 7, range(0), 0)


def attention(function: Callable[..., torch.Tensor], dtype: torch.dtype) -> RecordedCall:
    """The last of 5 queries over 133 keys of its own."""
    q, k, v = (torch.randn(1, 2, n, 16).to(dtype) for n in (5, 133, 133))
    queries, keys = ("", "", "tokens", ""), ("", "", "keys", "")
    roles: dict[str, Any] = {"0": queries, "1": keys, "2": keys, "": queries}
    return RecordedCall(function, (q, k, v), {}, roles, "tokens", 4, 5, range(133), 133)


def split(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """K in four parts, each rounded to the format: another order, and as right as the format allows."""
    return sum((F.linear(x[:, i::4], w[:, i::4]) for i in range(1, 4)), F.linear(x[:, ::4], w[:, ::4]))


# The faults below are of one kernel: the float64 one, which the oracle runs, is another and has none. A fault of every
# dtype alike can't be seen this way, and the docstring of `exact` says so.
def lost_tail(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The last 40 of K are missing."""
    return F.linear(x, w) if x.dtype == torch.float64 else F.linear(x[:, :-40], w[:, :-40])


def lost_keys(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The last block of keys counts in the sum of weights alone."""
    values = v if q.dtype == torch.float64 else torch.cat([v[:, :, :-32], v[:, :, -32:] * 0], 2)
    return F.scaled_dot_product_attention(q, k, values)


def test_rounding_is_no_bug() -> None:
    """Whatever the order, and near zero, where the distance in ULP is in the thousands, and means nothing."""
    for dtype in [torch.bfloat16, torch.float16, torch.float32]:
        assert exact(product(F.linear, dtype), "linear").status == "identical"
        if dtype != torch.float16:  # its sums of ones need 10 bits on the way, as every fp16 sum of 1,000 does
            assert exact(product(split, dtype), "linear").status == "identical"
        mean = attention(F.scaled_dot_product_attention, dtype)
        assert exact(mean, "scaled_dot_product_attention").status == "identical"


def test_a_wrong_sum_is_a_bug() -> None:
    for dtype in [torch.bfloat16, torch.float32]:
        replay = exact(product(lost_tail, dtype), "linear")
        assert replay.status == "divergent"
        assert "a bug" in replay.sentence
    assert exact(attention(lost_keys, torch.bfloat16), "scaled_dot_product_attention").status == "divergent"


# The trees of the responsible call in both arms: planted orders, the same order, and what is no order.


def by_hand(
    order: Sequence[int], x: torch.Tensor, w: torch.Tensor, digits: torch.dtype = torch.float32
) -> torch.Tensor:
    """x [M, K] times w [N, K], added in that order in that dtype."""
    total = torch.zeros(len(x), len(w), dtype=digits)
    for k in order:
        total = total + x[:, k, None].to(digits) * w[None, :, k].to(digits)
    return total.float()


def turned(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """One chain; from 4 rows on the last first."""
    return by_hand(range(40) if len(x) < 4 else range(39, -1, -1), x, w)


def values_turned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention whose values are added in one chain; from 4 queries on the last key first."""
    weights = torch.softmax(q @ k.mT + mask, -1)[0, 0]
    keys = range(k.shape[2]) if q.shape[2] < 4 else range(k.shape[2] - 1, -1, -1)
    return by_hand(keys, weights, v[0, 0].T)[None, None]


def tree_of(name: str, function: Callable[..., torch.Tensor]) -> Replay:
    """The replay of a call of 1 row and of 6, of which this request's is the third."""
    calls, outs = [], []
    for rows, row in ((1, 0), (6, 2)):
        x, roles = torch.randn(rows, 40), {"0": ("tokens", ""), "1": ("", ""), "out": ("tokens", "")}
        args: tuple[torch.Tensor, ...] = (x, torch.randn(24, 40) if name == "linear" else torch.randn(40, 24))
        keys, own = 0, range(0)
        if name == "mean":
            args, roles = (x,), {"0": ("tokens", ""), "out": ("tokens",)}
        if name == "scaled_dot_product_attention":
            keys, own = 8 * rows, range(8 * row, 8 * row + 8)
            mask = torch.full((1, 1, rows, keys), -torch.inf)
            for i in range(rows):
                mask[..., i, 8 * i : 8 * i + 8] = 0.0
            args = (*(torch.randn(1, 1, n, 16) for n in (rows, keys, keys)), mask)
            queries, held = ("", "", "tokens", ""), ("", "", "keys", "")
            roles = {"0": queries, "1": held, "2": held, "3": ("", "", "tokens", "keys"), "out": queries}
        calls.append(RecordedCall(function, args, {}, roles, "tokens", row, rows, own, keys))
        outs.append(calls[-1].run())
    return next(r for r in replays(calls[0], calls[1], outs[0], outs[1], name) if r.name == "tree")


_TURNED = (
    "differs in the arms: M = 1: one chain of 40; M = 6: one chain of 40, the last first",
    "differs in the arms: M = 1, 8 keys: one chain of 8; M = 6, 48 keys: one chain of 8, the last first",
)
TREES: dict[str, tuple[str, Callable[..., torch.Tensor], str]] = {
    "turned": ("linear", turned, _TURNED[0]),
    "mm": ("mm", lambda x, w: turned(x, w.T), _TURNED[0]),
    "mean": ("mean", lambda x: turned(x, torch.ones(1, 40))[:, 0] / 40, _TURNED[0]),
    "values": ("scaled_dot_product_attention", values_turned, _TURNED[1]),
    "digits": (
        "linear",
        lambda x, w: by_hand(range(40), x, w, torch.float64 if len(x) >= 4 else torch.float32),
        "something else than the order (in float32; and in float64)",
    ),
    "alike": ("linear", lambda x, w: by_hand(range(40), x, w), "what differs is not in the sums that were tested"),
    "coarser": (
        "linear",
        lambda x, w: by_hand(range(40), x if len(x) < 4 else x.bfloat16().float(), w),
        "both arms seem to add the sum in the same order; what differs is something else than",
    ),
}


@pytest.mark.parametrize("name", tiers(("turned", "values", "digits", "coarser"), TREES))
def test_a_trace_ends_with_the_trees_of_both_arms(name: str) -> None:
    operator, function, said = TREES[name]
    replay = tree_of(operator, function)
    assert said in replay.sentence
    assert (replay.status == "divergent") == (said in _TURNED)
    assert ("each proven by the bits of" in replay.sentence) == (name != "coarser")


def test_a_product_of_two_arguments_of_the_request_s_own_has_no_tree_and_says_why() -> None:
    call = attention(lambda q, k, v: q @ k.mT, torch.float32)
    tree = next(r for r in replays(call, call, call.run(), call.run(), "matmul") if r.name == "tree")
    assert tree.status == "error"
    assert tree.sentence == "the reduction tree is not known: its operands are not rows and one weight"


# The least place where two arms' records differ.


def kept_of(rows: dict[tuple[str, int], list[int]], readers: str = "", **logits: int) -> CoarseCapture:
    """Hashes of one layer's input, keys and output by (request, position); `readers` read them at the first one's."""
    capture = CoarseCapture("t", sharing=False)
    capture.names = ["input", "0.k", "0.out"]
    capture.rows = {owner: np.array(hashes) for owner, hashes in rows.items()}
    capture.logits = {(name, 0): value for name, value in logits.items()}
    capture.foreign = {reader: {next(iter(rows))[1]: set(rows)} for reader in readers}
    return capture


T0, T1, D0 = ("t", 0), ("t", 1), ("d", 0)


def test_the_least_place_is_the_first_that_differs() -> None:
    """By position, then in the order of computation, and the logits last."""
    for a, b, site in [
        (kept_of({T0: [1, 2, 3]}), kept_of({T0: [1, 2, 3]}), None),
        (kept_of({T0: [1, 2, 3]}), kept_of({T0: [1, 5, 6]}), Site(("t", "t"), 0, "0.k")),
        # a position of which one arm has no record says nothing, and hides nothing behind it
        (kept_of({T0: [1, 2, 3], T1: [1, 2, 3]}), kept_of({T1: [1, 2, 4]}), Site(("t", "t"), 1, "0.out")),
        # of a donor's row this request saw the keys alone
        (kept_of({T0: [1, 2, 3]}), kept_of({D0: [1, 2, 4]}, "t"), None),
        (kept_of({T0: [1, 2, 3]}), kept_of({D0: [1, 4, 4]}, "t"), Site(("t", "d"), 0, "0.k")),
        (kept_of({T0: [1, 2, 3]}, t=7), kept_of({T0: [1, 2, 3]}, t=8), Site(("t", "t"), 0, "logits")),
    ]:
        assert least_site(a, b, ("t", "t")) == site
