"""Members put to questions: each way to leave a class is caught, named, and excluded where it leaves."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from nondet.certify.check import ask, estimate, row_key, where_it_differs
from nondet.certify.plan import Assignment, Call, Question
from nondet.core.certificates import Certificates
from nondet.core.proof import PRODUCT_INPUTS
from nondet.core.records import Row, Status
from tests.build import absent, tiers

K, N = 48, 24
BATCHES = (1, 2, 7, 16, 33)


def chain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, lo: int = 0, hi: int = K) -> Any:
    """k after k in float32: elementwise, so that no library has an order to choose."""
    acc = torch.zeros(x.shape[0], weight.shape[0])
    for k in range(lo, hi):
        acc += x[:, k : k + 1].float() * weight[:, k].float()
    return (acc if bias is None else acc + bias.float()).to(x.dtype)


def narrow(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    cut = range(0, weight.shape[0], 5)
    return torch.cat([chain(x, weight[i : i + 5], None if bias is None else bias[i : i + 5]) for i in cut], 1)


def split_k(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    acc = chain(x.float(), weight.float(), hi=K // 2) + chain(x.float(), weight.float(), lo=K // 2)
    return (acc if bias is None else acc + bias.float()).to(x.dtype)


def changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    """Right, but for what is done to the result."""
    return lambda x, weight, bias=None: change(chain(x, weight, bias))


def wrong_at(bad: Callable[[int], bool]) -> Call:
    return lambda x, weight, bias=None: (split_k if bad(x.shape[0]) else chain)(x, weight, bias)


def question(dtype: str = "bfloat16", layout: str = "nt", values: tuple[int, ...] = BATCHES) -> Question:
    return Question(
        operator="linear", cls="cpu-tiles", dtype=dtype, device="cpu", shape={"K": K, "N": N}, layout=layout,
        values=values, kinds=PRODUCT_INPUTS,
    )  # fmt: skip


def rows_of(key: str) -> int:
    """M of the first operand: "... bfloat16[7,48]/48,1@64 ..."."""
    return int(key.partition("[")[2].partition(",")[0])


def put(member: Call, kept: Certificates, **how: Any) -> Row:
    (row,) = ask(question(**how), {"member": member}, chain, kept)
    return row


@pytest.mark.parametrize("dtype", tiers(["bfloat16"], ["float32", "float16"]))
@pytest.mark.parametrize("layout", ["nt", "nt, bias", "nt, strided"])
def test_another_tile_holds_and_another_order_does_not(kept: Certificates, dtype: str, layout: str) -> None:
    """In every dtype and layout, also where a bias follows: split-K is caught at M = 1, where few elements tell."""
    good = put(narrow, kept, dtype=dtype, layout=layout)
    assert good.key == row_key(question(dtype, layout), "member"), "so that a run resumes"
    assert good.status == Status.IDENTICAL, good.reason
    assert good.extra["left_at"] == []
    assert {c.holds for c in kept.all()} == {True}
    assert len(kept.all()) == len(BATCHES)
    bad = put(split_k, kept, dtype=dtype, layout=layout)
    assert bad.status == Status.DIVERGENT
    assert bad.extra["left_at"] == list(BATCHES)
    assert bad.values == ["anchor", *BATCHES]
    assert [label == 0 for label in bad.labels] == [True] + [False] * len(BATCHES)
    assert "differs at every M tried" in bad.reason
    assert "with one result at all of them: another order" in bad.reason


def test_a_member_is_excluded_where_it_leaves_and_stands_elsewhere() -> None:
    """The exclusion names the batches that parted, and no others; the verdict says what such a pattern suggests."""
    ways: list[tuple[Callable[[int], bool], list[int], str]] = [
        (lambda m: m == 1, [1], "at M = 1, not at 2, 7, 16, 33"),
        (lambda m: m >= 16, [16, 33], "at M = 16, 33, not at 1, 2, 7"),
        (lambda m: m % 2 > 0, [1, 7, 33], "at M = 1, 7, 33, not at 2, 16"),
    ]
    for bad, left, said in ways:
        kept = Certificates({"device": "cpu"}, None)
        row = put(wrong_at(bad), kept)
        assert row.extra["left_at"] == left
        assert said in row.reason
        assert row.difference.mismatched > 0
        assert {rows_of(c.key): c.holds for c in kept.all()} == {m: m not in left for m in BATCHES}
        assert f"; first: M = {left[0]}, element [" in row.reason


def test_nan_on_one_side_is_no_equality(kept: Certificates) -> None:
    """A member that gives NaN where the anchor has a number leaves the class, though most of its inputs agree."""
    row = put(changed(lambda out: out.masked_fill(out.abs() > 1e6, torch.nan)), kept, dtype="float32")
    assert row.status == Status.DIVERGENT
    assert "NaN or infinity" in row.reason
    assert row.difference.nonfinite > 0


def test_a_bias_added_after_the_rounding_is_another_class(kept: Certificates) -> None:
    """Two roundings instead of one: caught with a bias, and equal without."""
    afterwards: Call = lambda x, weight, bias=None: chain(x, weight) + (-0.0 if bias is None else bias)  # noqa: E731
    assert put(afterwards, kept).status == Status.IDENTICAL
    assert put(afterwards, kept, layout="nt, bias").status == Status.DIVERGENT


def test_a_nondeterministic_member_has_no_class(kept: Certificates) -> None:
    """Where the same call gives other bits, nothing stands, not even at batches that agreed by chance."""
    calls = itertools.count()
    row = put(wrong_at(lambda _: next(calls) % 2 > 0), kept)
    assert row.replays_parted > 0
    assert row.status == Status.DIVERGENT
    assert not any(c.holds for c in kept.all())
    assert row.reason.startswith("the same call again gives other bits")


def test_what_does_not_run_is_not_proven_and_not_excluded(kept: Certificates) -> None:
    """A refusal is skipped, a wrong result type an error with its reason; neither leaves a certificate."""
    refused, mistyped = put(absent, kept), put(changed(torch.Tensor.double), kept)
    assert (refused.status, refused.reason) == (Status.SKIPPED, "not on this machine")
    assert mistyped.status == Status.ERROR
    assert "float64" in mistyped.reason
    assert kept.all() == []


def test_a_crash_at_one_batch_does_not_pass_for_a_proof(kept: Certificates) -> None:
    """Equal wherever it ran, and yet no clean row: what crashed is named, and only what ran is certified."""

    def crashes(out: torch.Tensor) -> torch.Tensor:
        if len(out) == 7:
            raise RuntimeError("too many resources requested")
        return out

    row = put(changed(crashes), kept)
    assert row.status == Status.ERROR
    assert "M = 7: RuntimeError: too many" in row.reason
    assert {rows_of(c.key) for c in kept.all()} == {1, 2, 16, 33}


def test_certificates_say_what_was_proven(kept: Certificates) -> None:
    """Shape, strides, bias and settings of the very calls: another layout is another certificate."""
    put(narrow, kept, layout="nt, strided", values=(2,))
    (strided,) = kept.all()
    parts = (f"bfloat16[2,{K}]/{2 * K},1@", f"bfloat16[{N},{K}]/{K},1@", "float32=")
    assert all(part in strided.key for part in parts), strided.key
    put(narrow, kept, layout="nt", values=(2,))
    assert [f"bfloat16[2,{K}]/{K},1@" in c.key for c in kept.all() if c != strided] == [True]


def test_a_call_that_held_elsewhere_is_not_what_parted(kept: Certificates) -> None:
    """Of a form's several calls the one that no other form proves is excluded; its neighbour stands."""

    class Sized:
        def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
            whole = chain(x[:1], weight, bias) if x.shape[0] == 1 else None
            return whole if whole is not None else torch.cat([self(x[:1], weight, bias), split_k(x[1:], weight, bias)])

        def claim(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[str, str]:
            return "sized", f"M={x.shape[0]}"

    put(Sized(), kept, values=(1, 2))
    assert kept.standing("sized", "M=1") is True
    assert kept.standing("sized", "M=2") is False


def test_a_failing_anchor_proves_nothing(kept: Certificates) -> None:
    rows = list(ask(question(), {"a": chain, "b": split_k}, absent, kept))
    assert [r.status for r in rows] == [Status.ERROR] * 2
    assert all("anchor failed" in r.reason for r in rows)
    assert kept.all() == []


def test_where_forms_differ() -> None:
    """Variants are named; one order of its own at all of them is not said to depend on the batch."""
    forms = ["prefill", "decode"]
    assert where_it_differs("form", forms, ["decode"], alike=False) == "differs at form = decode, not at prefill"
    assert "depends on the batch" in where_it_differs("form", forms, forms, alike=False)
    assert "depends on the batch" not in where_it_differs("form", forms, forms, alike=True)


def test_rows_that_share_a_sum_are_caught(kept: Certificates) -> None:
    """A softmax whose sum runs over pairs of rows for an even batch is right at odd ones only."""

    def paired(x: torch.Tensor) -> torch.Tensor:
        e = torch.exp(x - x.amax(-1, keepdim=True))
        return e / (e.sum(-1, keepdim=True) if x.shape[0] % 2 else e.flip(-1).cumsum(-1)[:, -1:])

    one = Question(
        operator="softmax", cls="cpu-rows", dtype="float32", device="cpu", shape={"W": 1000}, layout="contiguous",
        values=(1, 2, 3, 4, 15), kinds=("bell", "outlier"), one_row=True,
    )  # fmt: skip
    (row,) = ask(one, {"paired": paired}, paired, kept)
    assert row.extra["left_at"] == [2, 4]


def test_a_member_that_writes_or_fails_when_repeated_fails_alone(kept: Certificates) -> None:
    """Neither is said of the anchor, nor of the members after it, which get the operands that they should."""

    def scales(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = chain(x, weight, bias)
        x.mul_(0.5)
        return out

    def once(out: torch.Tensor) -> torch.Tensor:
        if next(calls) == 1:
            raise RuntimeError("no second time")
        return out

    calls = itertools.count()
    members = {"scales": scales, "once": changed(once), "narrow": narrow}
    first, second, third = ask(question(layout="nt, strided"), members, chain, kept)
    assert [row.status for row in (first, second, third)] == [Status.ERROR, Status.ERROR, Status.IDENTICAL]
    assert "writes to its operands" in first.reason
    assert "M = 1: RuntimeError: no second time" in second.reason
    certified = {c.member for c in kept.all()}
    assert ("narrow" in certified, "scales" in certified) == (True, False)


def test_how_long_it_takes_is_said_within_a_factor_of_two(kept: Certificates) -> None:
    """Before anything is asked, from a few questions: members that cost by the row, and a first call that loads."""
    spent, calls = [0.0], itertools.count()

    def costs(seconds: float) -> Call:
        def member(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            spent[0] += seconds * (1 + len(x) * weight.shape[0] / 100) + 3.0 * (next(calls) == 0)
            return x @ weight.mT

        return member

    sizes = [(width, values) for width in (8, 24, 64, 96) for values in ((1, 2), BATCHES, (1, 64))]
    asked = [replace(question(values=values), shape={"K": K, "N": width}) for width, values in sizes]
    planned = [Assignment(q, costs(0.01), {"one": costs(0.01), "other": costs(0.012)}) for q in asked]
    said = sum(estimate(planned, lambda: spent[0]))
    sampled, spent[0] = spent[0], 0.0
    assert sampled < 10.0
    for item in planned:
        list(ask(item.question, item.members, item.anchor, kept))
    assert spent[0] / 2 < said < spent[0] * 2
    assert estimate([]) == []
