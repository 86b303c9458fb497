"""Orders that were planted are found and proven; what is no sum, or rounds elsewhere, is reported as unproven."""

from __future__ import annotations

import functools
import os
import random
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from nondet.core.records import Row
from nondet.core.registry import load_object
from nondet.kernels.emulator import (
    UNITS,
    VECTOR_WEIGHTS,
    Arithmetic,
    Tree,
    _canonical,
    chain,
    fused_step,
    predict,
    round_to,
)
from nondet.kernels.order_words import compared, words
from nondet.probes import matmul, reduction_order
from nondet.probes.base import Options
from nondet.probes.reduction_order import (
    NotASumError,
    ReductionOrder,
    find,
    of_attention,
    of_product,
    of_ranks,
    of_rows,
    prove,
    trees_of,
)
from nondet.probes.runner import plan_jobs, run_jobs
from nondet.ranks.operators import Message
from nondet.reports.text import sizes
from tests.build import tiers

Node = int | tuple["Node", "Node"]


def in_chain(parts: Sequence[Node]) -> Node:
    return functools.reduce(lambda total, part: (total, part), parts)


def in_pairs(parts: Sequence[Node]) -> Node:
    left = list(parts)
    while len(left) > 1:
        paired: list[Node] = [(a, b) for a, b in zip(left[::2], left[1::2], strict=False)]
        left = paired + left[len(left) // 2 * 2 :]
    return left[0]


def lanes(leaves: Sequence[int], count: int) -> list[Node]:
    return [in_chain(leaves[i::count]) for i in range(count)]


def splits(leaves: Sequence[int], edges: Sequence[int]) -> list[Node]:
    return [in_chain(leaves[a:b]) for a, b in zip((0, *edges), (*edges, len(leaves)), strict=True)]


def drawn(rng: random.Random, leaves: list[int], depth: int = 0) -> Node:
    """An order from a grammar: chains, lanes, splits of any size, trees, reversed and shuffled, one in another."""
    if len(leaves) < 4 or depth == 3:
        return in_chain(leaves) if len(leaves) > 1 else leaves[0]
    if rng.random() < 0.3:
        leaves = rng.choice([leaves[::-1], rng.sample(leaves, len(leaves))])
    count = rng.randint(2, min(8, len(leaves) // 2))
    parts = [leaves[i::count] for i in range(count)]
    if rng.random() < 0.5:
        cuts = sorted(rng.sample(range(1, len(leaves)), count - 1))
        parts = [leaves[a:b] for a, b in zip((0, *cuts), (*cuts, len(leaves)), strict=True)]
    join = rng.choice([in_chain, in_pairs])
    return join([drawn(rng, part, depth + 1) for part in parts])


def as_tree(root: Node, leaves: int) -> Tree:
    nodes: list[tuple[int, ...]] = []

    def number(node: Node) -> int:
        if isinstance(node, int):
            return node
        nodes.append(tuple(map(number, node)))
        return leaves + len(nodes) - 1

    number(root)
    return Tree(leaves, tuple(nodes))


def with_two_exchanged(rng: random.Random, tree: Tree) -> Tree:
    one, other = rng.sample(range(tree.leaves), 2)
    exchanged = {one: other, other: one}
    return tree._replace(nodes=tuple(tuple(exchanged.get(c, c) for c in node) for node in tree.nodes))


def added(tree: Tree, x: torch.Tensor) -> torch.Tensor:
    """The sums [M] of x [M, K] in the order of the tree."""
    values = list(x.unbind(1))
    for one, other in tree.nodes:
        values.append(values[one] + values[other])
    return values[-1]


def adder(tree: Tree, dtype: torch.dtype = torch.float32) -> Callable[[torch.Tensor], torch.Tensor]:
    """A sum over the last axis in the order of the tree."""
    return lambda x: added(tree, x.float().to(dtype)).float().to(x.dtype)


def found(tree: Tree, **more: Any) -> Any:
    return find(of_rows(adder(tree, **more), 1, tree.leaves, torch.float32, "cpu"))


PLANTED: dict[str, tuple[Node, str]] = {
    "chain": (in_chain(range(100)), "one chain of 100"),
    "reversed chain": (in_chain(range(99, -1, -1)), "one chain of 100, the last first"),
    "8 lanes": (in_chain(lanes(range(96), 8)), "8 lanes of stride 8, added in order; each one chain of 12 of stride 8"),
    "4 lanes": (in_pairs(lanes(range(96), 4)), "4 lanes of stride 4, a binary tree; each one chain of 24 of stride 4"),
    "pairwise": (in_pairs(range(64)), "a binary tree over 64"),
    "4 splits": (in_chain(splits(range(96), (24, 48, 72))), "4 splits of 24, added in order; each one chain of 24"),
    "two accumulators": (
        in_chain(lanes(range(100), 2)),
        "2 lanes of stride 2, added; each one chain of 50 of stride 2",
    ),
    "an interleaved chain": (
        in_chain([*range(0, 100, 2), *range(1, 100, 2)]),
        "one chain of 100, in the order 0, 2, 4, 6, ... 99 (digest d30db57a)",
    ),
    "unequal splits": (
        in_chain(splits(range(100), (60,))),
        "2 parts, added in order; first one chain of 60; then one chain of 40",
    ),
}


def test_a_planted_order_is_found_proven_and_named() -> None:
    for name, (root, said) in PLANTED.items():
        tree = as_tree(root, 1 + max(map(int, re.findall(r"\d+", str(root)))))
        result = found(tree)
        assert (result.tree.digest, words(result.tree)) == (tree.digest, said), name
        assert result.proven is not None, name
        assert result.proven.words == "in float32"


def fused_by(tree: Tree) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """x [M, K], w [N, K] -> [M, N], every row as row 0: products fused into their additions, as the C library does it
    (tests/kernels/test_emulator.py)."""

    def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        row = predict(tree, x[:1].expand_as(w).double().numpy(), w.double().numpy(), Arithmetic(fused=True))
        return torch.from_numpy(row).float().expand(len(x), -1).clone()

    return linear


@pytest.mark.parametrize("time", tiers([0], range(8)))
@pytest.mark.parametrize("how", ["plain", "fused", "float64", "a dropped tail", "a dropped tail of bfloat16"])
def test_an_order_that_nobody_has_seen_is_found_and_proven(how: str, time: int) -> None:
    """Another seed in each run. NONDET_ORDER_SEED=N repeats one that failed. Numbers and their negatives stand where
    something is added: else no short sum is small, and none shows an order."""
    seed = int(os.environ.get("NONDET_ORDER_SEED", secrets.randbits(32)))
    rng = random.Random(seed)  # noqa: S311 - an order, nothing secret
    short = how == "a dropped tail of bfloat16"
    leaves = 100 if short else rng.randint(4, 60 if how == "fused" else 200)
    kept = leaves - rng.randint(30 if short else 1, 70 if short else leaves // 4) if "tail" in how else leaves
    tree = as_tree(drawn(rng, list(range(kept))), kept)
    if how == "fused":
        ordered = tuple(tuple(sorted(node)) for node in tree.nodes)  # of two products the lower number is the first
        tree = tree._replace(nodes=ordered)
        result = find(of_product(fused_by(tree), 2, leaves, 16, torch.float32, "cpu"))
    elif "tail" in how:
        inner, dtype = adder(tree), torch.bfloat16 if short else torch.float32
        result = find(of_rows(lambda x: inner(x[:, :kept]), 1, leaves, dtype, "cpu"))
        assert result.tree.dropped == list(range(kept, leaves)), seed
        assert f"not added: {leaves - kept} of {leaves}" in words(result.tree)
        more = leaves - kept  # the same nodes over more leaves, which nobody names
        tree = Tree(leaves, tuple(tuple(c + more if c >= kept else c for c in node) for node in tree.nodes))
    else:
        result = found(tree, dtype=torch.float64 if how == "float64" else torch.float32)
    assert result.tree.digest == tree.digest, seed
    assert result.missed == 0, seed
    assert result.proven is not None, (seed, result.failed_on)
    # sums of so few terms may be the same with the products rounded, or in more digits, or not
    assert how != "fused" or result.proven.fused, (seed, result.proven)
    assert how != "float64" or result.proven.accumulator == "float64", (seed, result.proven)


@pytest.mark.parametrize("seed", tiers([0], range(30)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tree_that_is_wrong_in_two_leaves_is_not_proven(seed: int, dtype: torch.dtype) -> None:
    """The proof's own test: what it predicts with has to be the very order."""
    rng = random.Random(seed)  # noqa: S311 - an order, nothing secret
    leaves = rng.randint(30, 150)
    tree = as_tree(drawn(rng, list(range(leaves))), leaves)
    asked = of_rows(adder(tree), 1, leaves, dtype, "cpu")
    assert prove(asked, tree).proven is not None
    wrong = with_two_exchanged(rng, tree)
    assert (prove(asked, wrong).proven is None) == (wrong.digest != tree.digest)


@pytest.mark.parametrize("dtype", tiers([torch.float16], [torch.bfloat16]))
@pytest.mark.parametrize("seed", tiers([0], range(6)))
def test_three_short_numbers_show_their_order(seed: int, dtype: torch.dtype) -> None:
    """Added in float64, of which float16's masks tell nothing: no tree that is proven may be another, or of float32."""
    result = find(of_rows(lambda x: x.double().sum(-1).to(dtype), 1, 3, dtype, "cpu"), seed)
    assert result.proven is None or (result.tree.digest, result.proven.accumulator) == (chain(3).digest, "float64")
    sound = find(of_rows(adder(chain(3)), 1, 3, dtype, "cpu"), seed)
    assert (sound.tree.digest, sound.proven is not None) == (chain(3).digest, True)


def backwards_where(rule: Callable[[torch.Tensor], torch.Tensor], forwards: Tree, backwards: Tree | None = None) -> Any:
    """A sum that adds the rows of which the rule holds backwards."""
    other = adder(backwards or chain(forwards.leaves, range(forwards.leaves - 1, -1, -1)))
    return lambda x: torch.where(rule(x), other(x), adder(forwards)(x))


def large(x: torch.Tensor) -> torch.Tensor:
    """Of sums that are not small beside their terms: those of masks are."""
    total, other = (added(chain(x.shape[1]), rows) for rows in (x, x.flip(-1)))
    return torch.where(total.abs() < x.abs().amax(-1) / 8, total, other)


def without_zeros(x: torch.Tensor) -> torch.Tensor:
    order = range(33) if (x == 0).any() or x.abs().max() > 2**60 else range(32, -1, -1)
    return x[:, list(order)].cumsum(-1)[:, -1]


LANES = as_tree(in_chain(lanes(range(96), 8)), 96), as_tree(in_chain(lanes(range(95, -1, -1), 8)), 96)
ONE_SIGN = backwards_where(lambda x: (x >= 0).all(-1), *LANES)
# name -> the function, its dtype, its tree in masks, and what shows that its order follows the numbers
BY_NUMBERS: dict[str, tuple[Any, torch.dtype, Tree, str]] = {
    "small numbers": (backwards_where(lambda x: x.abs().amax(-1) <= 1.5, chain(33)), torch.bfloat16, chain(33), ""),
    "without zeros": (without_zeros, torch.float64, chain(33), ""),
    "large sums of float64": (large, torch.float64, chain(33), "zeros"),
    "large sums": (lambda x: large(x.float()).to(x.dtype), torch.bfloat16, chain(33), "zeros"),
    "small float16": (backwards_where(lambda x: x.abs().amax(-1) <= 64, chain(33)), torch.float16, chain(33), "zeros"),
    "one sign": (ONE_SIGN, torch.float32, LANES[0], "one sign"),
    "one sign of bfloat16": (ONE_SIGN, torch.bfloat16, LANES[0], "one sign"),
    "rounded first": (lambda x: added(chain(96), x.bfloat16().float()), torch.float32, chain(96), ""),
}


@pytest.mark.parametrize("name", BY_NUMBERS)
def test_what_more_than_the_order_decides_is_unproven(name: str) -> None:
    """Numbers of all sizes and of one sign, with zeros and without, and sums that are small or not, are all drawn: of
    float32 numbers float64 sums are exact in any order, and a short result shows none, but midway between two."""
    function, dtype, tree, shown = BY_NUMBERS[name]
    result = find(of_rows(function, 1, tree.leaves, dtype, "cpu"))
    assert result.tree.digest == tree.digest
    assert (result.proven, bool(result.missed), result.record()["hidden"]) == (None, True, "")
    assert f"{shown} numbers" in result.failed_on if shown else "other bits in" in result.failed_on


def test_an_order_of_products_that_follows_their_signs_is_unproven() -> None:
    """Of products none of which is negative, and by the sign of x."""

    def of_products(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ONE_SIGN(x[:1].float() * w.float()).to(x.dtype).expand(len(x), -1)

    def of_x(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return fused_chain_of(range(64) if x[0, 0] > 0 else range(63, -1, -1))(x.float(), w.float()).to(x.dtype)

    result = find(of_product(of_products, 1, 96, 24, torch.bfloat16, "cpu"))
    assert (result.tree.digest, result.proven) == (LANES[0].digest, None)
    assert "one sign numbers" in result.failed_on
    assert find(of_rows(adder(LANES[0]), 1, 96, torch.bfloat16, "cpu")).proven is not None
    result = find(of_product(of_x, 1, 64, 8, torch.bfloat16, "cpu"))
    assert (result.proven, "zeros numbers" in result.failed_on) == (None, True)


def in_float64(fused: bool) -> Any:
    """Of numbers with all digits: products of float32 numbers are exact in float64, and fused as well as not."""

    def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        total = (x[:1] * w)[:, 0]
        for k in range(1, 24):
            a, b = x[0, k].item(), w[:, k].tolist()
            rounded = [a * other for other in b]
            exact = [Fraction(a) * Fraction(other) for other in b] if fused else rounded
            sums = [float(Fraction(t) + Fraction(p)) for t, p in zip(total.tolist(), exact, strict=True)]
            total = torch.tensor(sums, dtype=torch.float64)
        return total.to(x.dtype).expand(len(x), -1).clone()

    return linear


def in_float16(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Its partial sums have no room for 16 times the largest number."""
    total = torch.zeros(len(x), len(w), dtype=torch.float16)
    for k in range(40):
        more = total.double() + x[:, k, None].double() * w[None, :, k].double()
        total = torch.from_numpy(round_to(more.numpy(), "float16")).half()
    return total


def of_float64_sums(once: bool) -> Any:
    """Rounded to a short dtype at once, or as torch does it, to float32 before."""

    def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        total = (x.double()[:, None] * w.double()).cumsum(-1)[..., -1]
        return torch.from_numpy(round_to(total.numpy(), str(x.dtype)[6:])).to(x.dtype) if once else total.to(x.dtype)

    return linear


@pytest.mark.parametrize(
    ("linear", "K", "N", "dtype", "how"),
    tiers(
        [
            (in_float64(False), 24, 8, torch.float64, ("float64", False, False)),
            (in_float64(True), 24, 8, torch.float64, ("float64", True, False)),
            (in_float16, 40, 8, torch.float16, ("float16", True, False)),
        ],
        [
            (of_float64_sums(False), 33, 1, torch.bfloat16, ("float64", False, True)),
            (of_float64_sums(True), 33, 1, torch.bfloat16, ("float64", False, False)),
            (of_float64_sums(True), 33, 1, torch.float32, ("float64", False, False)),
        ],
    ),
)
def test_where_partial_sums_of_a_product_are_kept(
    linear: Any, K: int, N: int, dtype: torch.dtype, how: tuple[str, bool, bool]
) -> None:
    """In which dtype, whether products are fused into their additions, and whether the result is rounded twice."""
    result = find(of_product(linear, 1, K, N, dtype, "cpu"))
    assert result.tree.digest == chain(K).digest
    assert result.proven is not None, result.failed_on
    assert (result.proven.accumulator, result.proven.fused, result.proven.twice) == how


@pytest.mark.parametrize(("K", "times"), tiers([(33, True)], [(64, False), (33, False), (64, True)]))
def test_what_short_results_do_not_tell_of_a_mean_is_not_said(K: int, times: bool) -> None:
    """Whether a sum was divided by K, or multiplied: in bfloat16 no result may show it, and by 64 both are the same."""

    def mean(x: torch.Tensor) -> torch.Tensor:
        total = added(chain(K), x.float())
        return (total * torch.tensor(1 / K) if times else total / K).to(x.dtype)

    finishes = ("divided by K", "times 1/K")
    result = find(of_rows(mean, 1, K, torch.bfloat16, "cpu", finishes))
    assert result.proven is not None
    assert result.proven.finish == ("divided by K" if K == 64 else "divided by K or times 1/K")
    single = find(of_rows(mean, 1, K, torch.float32, "cpu", finishes))
    assert single.proven is not None
    assert single.proven.finish == finishes[times and K == 33]


def squares(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum(-1)


def planted_sum(x: torch.Tensor) -> torch.Tensor:
    """One chain from 16 rows on, two splits below."""
    root = in_chain(range(96)) if len(x) >= 16 else in_chain(splits(range(96), (48,)))
    return adder(as_tree(root, 96))(x)


def same_order_other_digits(x: torch.Tensor) -> torch.Tensor:
    return adder(chain(96), torch.float64 if len(x) >= 16 else torch.float32)(x)


def run(impl: str, **options: Any) -> list[Row]:
    jobs = plan_jobs(["reduction-order"], [impl], Options(dtypes=("float32",), **options))
    return list(run_jobs(jobs, 0))


def test_one_tree_and_other_bits_are_something_else_than_order() -> None:
    """Where the arithmetic differs; of one arithmetic, both proven, other bits are not in what was tested."""
    (row,) = run(f"sum={__name__}:same_order_other_digits", k=96)
    trees = row.extra["reduction_trees"]
    assert {t["digest"] for t in trees["classes"]} == {chain(96).digest}
    assert "something else than the order (in float32; and in float64)" in trees["between"][0]
    tested = of_product(chain_of_48, 1, 48, 64, torch.float32, "cpu")
    (between,) = trees_of([tested, tested], [1, 2])["reduction_trees"]["between"]
    assert "what differs is not in the sums that were tested" in between


def test_what_is_no_sum_has_no_tree_and_the_row_says_why() -> None:
    for function in (squares, lambda x: x.amax(-1), lambda x: 2 * x.sum(-1), lambda x: x[:, 0]):
        with pytest.raises(NotASumError):
            find(of_rows(function, 1, 96, torch.float32, "cpu"))
    (row,) = run(f"sum={__name__}:squares", k=96)
    (said,) = row.extra["reduction_trees"]["classes"]
    assert (said["words"], said["proven"]) == ("no tree", False)
    assert "ones" in said["failed_on"]


def fused_chain_of(order: Sequence[int]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """linear by one chain of products that are rounded before they are added."""

    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(x), len(weight))
        for k in order:
            total = total + x[:, k, None] * weight[None, :, k]
        return total

    return linear


def test_products_take_masks_as_columns() -> None:
    order = list(range(0, 64, 2)) + list(range(1, 64, 2))
    counted = Mock(side_effect=fused_chain_of(order))
    result = find(of_product(counted, 3, 64, 16, torch.float32, "cpu"))
    assert (result.tree.digest, result.proven.fused) == (chain(64, order).digest, False)
    assert {call.args[0].shape for call in counted.mock_calls} == {(3, 64)}, "never another number of rows"
    assert counted.call_count < 40, "masks share calls"


def linear_by_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One chain from 8 rows on, the last first below."""
    return fused_chain_of(range(48)[:: 1 if len(x) >= 8 else -1])(x, weight)


def linear_by_columns(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The last first; in columns 1, 17, 33, ... the first."""
    out = fused_chain_of(range(47, -1, -1))(x, weight)
    out[:, 1::16] = chain_of_48(x, weight)[:, 1::16]
    return out


def linear_of_many(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Another order at each M."""
    return fused_chain_of([*range(len(x), 24), *range(len(x))])(x, w)


chain_of_48 = fused_chain_of(range(48))


def of_batches(name: str, **options: Any) -> Row:
    """The sweep of the matmul probe's plain layout."""
    chosen = Options(dtypes=("float32",), inputs=("order",), **options)
    jobs = plan_jobs(["matmul"], [f"linear={__name__}:{name}"], chosen)
    (row,) = run_jobs([j for j in jobs if j.case.varied == "batch_size" and not j.case.data["layout"]], 0)
    return row


def test_the_matmul_probe_names_the_trees_at_a_border(monkeypatch: pytest.MonkeyPatch) -> None:
    """And counts the classes whose trees were not measured."""
    sizes = {"k": 48, "n": 32, "m": 16}
    assert "reduction_trees" not in of_batches("chain_of_48", **sizes).extra
    trees = of_batches("linear_by_rows", **sizes).extra["reduction_trees"]["classes"]
    wanted = [(1, "one chain of 48, the last first", True), (8, "one chain of 48", True)]
    assert [(t["M"], t["words"], t["proven"]) for t in trees] == wanted
    monkeypatch.setattr(matmul, "TREES", (2, 3))
    row = of_batches("linear_of_many", k=24, n=8, m=4)
    trees = row.extra["reduction_trees"]
    assert (len(trees["classes"]), len(row.class_sizes)) == (2, 4)
    assert trees["between"][-1] == "2 more of the classes: not asked for their trees"


def test_columns_of_several_orders_are_asked_by_alignment() -> None:
    asked = of_product(linear_by_columns, 1, 48, 64, torch.float32, "cpu")
    assert find(asked).proven is None
    (said,) = trees_of([asked], [1])["reduction_trees"]["classes"]
    assert (said["proven"], said["which"]) == (True, "every 16th column")
    assert said["words"] == "one chain of 48, the last first"


def grouped_by_rows(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """As `linear_by_rows`, by the rows of each expert."""
    parts = torch.tensor_split(x, offsets[:-1].tolist())
    return torch.cat([linear_by_rows(part, w.T) for part, w in zip(parts, weight, strict=True) if len(part)])


def split_by_rows(a: torch.Tensor, b: torch.Tensor, *, splits: int, ordered: bool) -> torch.Tensor:
    """K in parts, added in order; from 8 rows on as one."""
    assert ordered
    if len(a) >= 8:
        return chain_of_48(a, b.T)
    total = torch.zeros(len(a), b.shape[1])
    for x, w in zip(a.tensor_split(splits, 1), b.tensor_split(splits, 0), strict=True):
        total = total + fused_chain_of(range(x.shape[1]))(x, w.T)
    return total


def attention_by_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
    """Equal weights whatever the scores: the values in one chain, the last first for up to 8 queries."""
    order = range(64) if q.shape[2] > 8 else range(63, -1, -1)
    return fused_chain_of(order)(torch.ones(1, 64), v[0, 0].T).expand(q.shape[2:])[None, None] / 64


LARGER = {
    "sum": ("planted_sum", 96, ["2 splits of 48, added; each one chain of 48", "one chain of 96"]),
    "grouped_matmul": ("grouped_by_rows", 48, ["one chain of 48, the last first", "one chain of 48"]),
    "split_k": ("split_by_rows", 48, ["4 splits of 12, added in order; each one chain of 12", "one chain of 48"]),
    "attention": ("attention_by_rows", 64, ["one chain of 64, the last first", "one chain of 64"]),
}


@pytest.mark.parametrize("operator", LARGER)
def test_a_planted_order_is_found_at_the_rows_that_have_it(operator: str) -> None:
    function, K, said = LARGER[operator]
    row = next(r for r in run(f"{operator}={__name__}:{function}", k=K, n=32) if r.operator == operator)
    trees = row.extra["reduction_trees"]
    assert [(t["words"], t["proven"]) for t in trees["classes"]] == [(words, True) for words in said]
    assert row.status in ("divergent", "wrong")  # attention of equal weights is no attention, and its trees are its own
    assert "elements 0 and" in trees["between"][0]
    assert operator != "sum" or [t["M"] for t in trees["classes"]] == [1, 16]


def staged_in_tf32(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
    """As CUTLASS adds float32 values of equal weight: three TF32 steps for 8 of them, each fourth added in float32."""
    values = v[0, 0].T.double().numpy()
    big = (values.astype(np.float32).view(np.uint32) & 0xFFFFE000).view(np.float32).astype(np.float64)
    rest = ((values - big).astype(np.float32).view(np.uint32) + 0x1000).view(np.float32).astype(np.float64)
    unit = UNITS["Hopper", "tf32"]
    total = now = np.zeros(len(values))
    for at in range(0, values.shape[1], 8):
        for part in (rest, 0 * big, big):
            some = part[:, at : at + 8]
            now = fused_step(np.ones_like(some), some, now, "tf32", unit).astype(np.float64)
        if at % 32 == 0 or at + 8 == values.shape[1]:
            total, now = (total + now).astype(np.float32).astype(np.float64), 0 * now
    return torch.from_numpy(total / values.shape[1]).float().expand(1, 1, q.shape[2], -1)


@pytest.mark.parametrize("rounded", [False, True])
def test_three_steps_of_tf32_for_a_step_of_float32_are_proven(monkeypatch: pytest.MonkeyPatch, rounded: bool) -> None:
    """A second rounding that CUTLASS does not do is refuted: the same tree, in no arithmetic that is known."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    turned = (lambda v: v.bfloat16().float() * 1.5) if rounded else (lambda v: v)
    asked = of_attention(lambda q, k, v: staged_in_tf32(q, k, turned(v)), 1, 128, torch.float32, "cpu")

    def draw(kind: str, seed: int) -> Any:
        rows, _, got = asked.sample(kind, seed)
        return torch.ones_like(rows), rows, got

    tree = find(asked if not rounded else of_attention(staged_in_tf32, 1, 128, torch.float32, "cpu")).tree
    result = prove(asked._replace(device="cuda", sample=draw), tree)
    assert "first one chain of 4 groups of 8; then one fused step of 8: 0" in words(tree)
    assert (result.proven is not None) == (not rounded), result.failed_on
    assert rounded or result.proven.words == "in float32, 8 products a fused step of 3xTF32, divided by K"


@pytest.mark.parametrize(("off", "finish"), [(0, "divided by K or times 1/K"), (896, VECTOR_WEIGHTS), (2000, None)])
def test_weights_that_a_fast_exponential_gave_are_seen_in_their_sum(off: int, finish: str | None) -> None:
    """As torch's attention has them in bfloat16 on a CPU: rounded to 1, but divided by the sum of what exp gave."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(v.shape[-1])
        for row in v[0, 0].float():
            total += row
        by = torch.tensor(1.0) / (500 - 496 * off / 2**24)
        return (total * by).to(v.dtype).expand(q.shape[2:])[None, None]

    result = find(of_attention(attention, 1, 500, torch.bfloat16, "cpu"))
    assert result.tree == chain(500)
    assert (result.proven.finish if result.proven is not None else None) == finish, result.failed_on


@pytest.mark.nightly
def test_a_ring_adds_each_piece_of_a_message_from_another_rank_on() -> None:
    """gloo's: as many pieces as ranks, each proven; the message's last row is in another one as it grows."""
    (row,) = run(f"all_reduce={Message.__module__}:stock", ranks=(3,), m=2)
    assert (row.status, sizes(row)) == ("divergent", [("ranks", 3), ("m", 2)])  # what is said to ask it again
    found = row.extra["reduction_trees"]["classes"]
    assert all(tree["proven"] and tree["words"].startswith("one chain of 3") for tree in found)
    assert [tree["M"] for tree in found] == [1] * 3 + [2] * 3
    for pieces in (found[:3], found[3:]):
        assert len({tree["digest"] for tree in pieces}) == 3
        edges = [[int(word.replace(",", "")) for word in tree["which"].split()[1:4:2]] for tree in pieces]
        assert [start for start, _ in edges] == [0, *(stop + 1 for _, stop in edges[:-1])]


def test_ranks_share_a_gpu_where_they_are_asked_for_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each such row says how they ran; by default there are as many ranks as GPUs, or none."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(reduction_order, "require_memory", lambda *_: None)
    options = Options(device="cuda", dtypes=("float32",), ranks=(3, 4))
    three, four = [case.name for case in ReductionOrder().cases(options) if case.operator == "all_reduce"]
    assert "3 ranks on 1 GPU, each posing as a host, over sockets" in three
    assert "4 ranks on 1 GPU" in four
    assert not [c for c in ReductionOrder().cases(replace(options, ranks=None)) if c.operator == "all_reduce"]


def ranks_in(*orders: Tree, dtype: torch.dtype, edges: Sequence[int]) -> Callable[[Message], torch.Tensor]:
    """All sums of a message whose pieces are added in these orders, rounded at each hop."""

    def all_reduce(message: Message) -> torch.Tensor:
        lists = torch.tensor(message.terms, dtype=dtype)
        x = lists[torch.arange(message.rows * message.width) % len(lists)]
        return torch.cat([added(order, part) for order, part in zip(orders, x.tensor_split(edges), strict=True)])

    return all_reduce


@pytest.mark.parametrize("dtype", tiers([torch.bfloat16], [torch.float32]))
@pytest.mark.parametrize("K", tiers([3], [4, 8]))
def test_pieces_of_a_message_have_their_borders_and_orders(K: int, dtype: torch.dtype) -> None:
    """A single number among them, and rings that begin at ranks drawn at random, and a tree."""
    rng = random.Random(K)  # noqa: S311 - an order
    start = rng.randrange(1, K)
    ring = chain(K, [(start + i) % K for i in range(K)])
    tree = as_tree(in_pairs(range(K)), K)
    operator = ranks_in(chain(K), ring, tree, dtype=dtype, edges=(37, 38))
    message = Message(K, "cpu", "all_reduce", "stock", str(dtype).removeprefix("torch."), 2, 64)
    found = [(one.which, find(one)) for one in of_ranks(operator, message)]
    planted = {chain(K).digest: "numbers 0 to 36 of 128", ring.digest: "numbers 37 to 37 of 128"}
    planted[tree.digest] = "numbers 38 to 127 of 128"
    if K == 3:  # where the tree is the chain
        planted = {chain(K).digest: "127 of 128 numbers, in 2 runs from 0 on", ring.digest: planted[ring.digest]}
    assert {result.tree.digest: which for which, result in found} == planted
    assert all(result.proven is not None and result.checked >= 24 for _, result in found), found


def test_a_piece_that_masks_do_not_show_is_no_proof() -> None:
    """Numbers that are added in another order where a rank's term is small: masks are all large."""
    ordinary = ranks_in(chain(4), dtype=torch.float32, edges=())
    other = ranks_in(chain(4, [3, 2, 1, 0]), dtype=torch.float32, edges=())

    def all_reduce(message: Message) -> torch.Tensor:
        most = max(map(abs, map(float, np.ravel(message.terms))))
        sums = ordinary(message)
        return sums if most >= 2.0**90 else torch.cat([sums[:-1], other(message)[-1:]])

    (piece,) = of_ranks(all_reduce, Message(4, "cpu", "all_reduce", "stock", "float32", 2, 64))
    assert find(piece).proven is None


_SUMS = [(64, torch.float32, "cpu"), (64, torch.bfloat16, "cpu")]
_LONGER = [(1000, dtype, "cpu") for dtype in (torch.float32, torch.bfloat16)]
_ON_A_GPU = pytest.param(1000, torch.float32, "cuda", marks=pytest.mark.gpu)


@pytest.mark.parametrize(("K", "dtype", "device"), [*tiers(_SUMS, _LONGER), _ON_A_GPU])
def test_torch_s_sum_on_this_machine_is_proven(K: int, dtype: torch.dtype, device: str) -> None:
    """Whatever the order is here: it must predict every bit."""
    for M in (1, 5):
        result = find(of_rows(lambda x: x.sum(-1), M, K, dtype, device))
        assert result.proven is not None, result.failed_on


@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="only interpreted kernels take tensors of the CPU")
@pytest.mark.slow
@pytest.mark.parametrize("operator", tiers(["rows.cuda:sum"], ["attention.cuda:attention"]))
def test_the_order_of_a_kernel_for_gpus_is_proven_under_the_interpreter(operator: str) -> None:
    """Class "lanes" of a sum as it is written down; of attention whatever the interpreter's products add."""
    pytest.importorskip("triton")
    function = load_object(f"nondet.kernels.{operator}")
    if operator == "rows.cuda:sum":
        result = find(of_rows(function, 2, 16, torch.float32, "cpu"))
        assert words(result.tree) == "a binary tree over 16"
    else:
        result = find(of_attention(function, 2, 32, torch.float32, "cpu"))
    assert result.proven is not None, result.failed_on


def test_no_two_trees_share_their_words() -> None:
    """Orders drawn at random, and each with two elements exchanged: what words leave out, a digest tells."""
    rng = random.Random(25)  # noqa: S311 - an order, nothing secret
    seen: dict[tuple[int, str], str] = {}
    for time in range(300):
        leaves = rng.choice([4, 5, 6, 8, 12, 16, 32])
        root = drawn(rng, list(range(leaves))) if time % 2 else in_pairs(lanes(rng.sample(range(leaves), leaves), 4))
        tree = as_tree(root, leaves)
        for nodes in (tree.nodes, with_two_exchanged(rng, tree).nodes):
            made = _canonical(leaves, list(nodes), leaves + len(nodes) - 1)
            assert seen.setdefault((leaves, words(made)), made.digest) == made.digest, words(made)


def test_what_a_page_says_of_a_tree() -> None:
    """Lines that leave out which numbers stand in the middle differ in two trees. Of n sums without a miss a share of
    rows below 3 / n would not be seen."""
    orders = [*range(0, 40, 2), *range(1, 40, 2)], [0, 2, 4, 6, 12, 10, 8, *range(14, 40, 2), *range(1, 40, 2)]
    one, other = (found(chain(40, order)).record() for order in orders)
    assert one["drawn"][0][1].endswith(f"(digest {one['digest'][:8]})")
    assert one["drawn"] != other["drawn"]
    plain = found(chain(40)).record()
    assert plain["drawn"] == [[0, "one chain of 40: 0, 1, 2, 3, ... 39"]]
    share = float(re.search(r"fewer than ([\d.]+)% of such rows", plain["hidden"])[1])
    assert share * plain["checked"] / 100 == pytest.approx(3, rel=0.03)


def test_words_tell_neighbours_from_halves_and_splits_that_are_added_otherwise() -> None:
    def said(root: Node, leaves: int) -> str:
        tree = as_tree(root, leaves)
        return words(_canonical(leaves, list(tree.nodes), leaves + len(tree.nodes) - 1))

    def halves(left: list[Any]) -> Any:
        while len(left) > 1:
            left = [(a, b) for a, b in zip(left[: len(left) // 2], left[len(left) // 2 :], strict=True)]
        return left[0]

    assert compared(chain(8), chain(8)) == "the same reduction tree"
    assert compared(chain(8), chain(8, reversed(range(8)))) == "elements 0 and 1 meet in a sum of 2, and of 8"
    assert words(chain(1024, terms=16)) == "one chain of 64 groups of 16"
    assert said(in_pairs(range(16)), 16) == "a binary tree over 16"
    assert said(halves(list(range(16))), 16) == "a binary tree over 16 by halves"
    assert said(halves(lanes(range(32), 4)), 32) == (
        "4 lanes of stride 4, a binary tree by halves; each one chain of 8 of stride 4"
    )
    one_turned = in_chain([in_chain(range(8)), in_chain(range(15, 7, -1)), in_chain(range(16, 24))])
    plain = "3 splits of 8, added in order; each one chain of 8"
    assert said(in_chain(splits(range(24), (8, 16))), 24) == plain
    assert said(one_turned, 24).startswith(f"{plain} (digest ")
    assert said(in_chain([1, 3, 2, 0]), 4) != said(in_chain([3, 2, 1, 0]), 4) == "one chain of 4, the last first"


@pytest.mark.gpu
def test_the_trees_of_larger_operators_on_a_gpu_are_found() -> None:
    """What is proven there is for the machine to say; that there is a tree, or a reason, is asked."""
    options = Options(dtypes=("bfloat16", "float32"), device="cuda", k=1024, n=64, m=16)
    jobs = plan_jobs(["reduction-order"], ["stock"], options)
    for row in run_jobs([j for j in jobs if j.case.operator in ("split_k", "grouped_matmul", "attention")], 0):
        trees = row.extra.get("reduction_trees", {"classes": []})["classes"]
        assert trees or (row.status == "skipped" and row.reason), (row.case, row.dtype, row.status, row.reason)
        assert all(tree["proven"] or tree["failed_on"] for tree in trees)


@pytest.mark.parametrize(
    ("dtype", "flushed"),
    tiers([(torch.float32, True)], [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]),
)
def test_an_order_that_flushes_subnormal_numbers_is_proven_but_for_them(dtype: torch.dtype, flushed: bool) -> None:
    """Before, nothing was said of them, and their sums' bits were others than predicted."""

    def total(x: torch.Tensor) -> torch.Tensor:
        least, sums = (2.0**-126 if flushed else 0.0), torch.zeros(len(x))
        for term in x.float().unbind(1):
            sums = sums + torch.where(term.abs() < least, 0.0, term)
            sums = torch.where(sums.abs() < least, 0.0, sums)
        return sums.to(x.dtype)

    asked = of_rows(total, 1, 24, dtype, "cpu")
    result = find(asked)
    assert result.proven is not None
    assert ("but for numbers that are not normal" in result.record()["arithmetic"]) == flushed
    assert ("such sums" in result.record()["arithmetic"]) == flushed
    (between,) = trees_of([asked, asked], [1, 2])["reduction_trees"]["between"]  # two that flush may differ in these
    assert ("not in the sums that were tested" in between) != flushed
