"""The exact models of `nondet.kernels.emulator` against rational numbers, the C library's fmaf, and planted trees."""

import ctypes
import ctypes.util
import gzip
import json
import math
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nondet.kernels import emulator
from nondet.kernels.emulator import UNITS, Arithmetic, Tree, Unit, chain, find_tree, fused_chain, fused_step, predict
from tests.kernels.tiers import at_length

ROOT = Path(__file__).resolve().parents[2]
Array = np.ndarray[Any, np.dtype[Any]]


def exponent_of(x: float, smallest: int) -> int:
    return max(math.frexp(x)[1] - 1, smallest)


def step_in_fractions(a: Array, b: Array, c: float, dtype: str, unit: Unit) -> float:
    """One fused step, term by term, in rational numbers: written from the description, not from the emulator."""
    form = emulator.FORMATS[dtype]
    terms = [
        (Fraction(float(p)) * Fraction(float(q)), exponent_of(p, form.smallest) + exponent_of(q, form.smallest))
        for p, q in zip(a, b, strict=True)
        if p * q
    ]
    terms += [(Fraction(float(c)), exponent_of(c, -126))] if c else []
    grid = Fraction(2) ** (max([unit.floor, *(e for _, e in terms)]) - unit.fraction)
    total = sum(math.trunc(value / grid) for value, _ in terms) * grid
    if not total:
        return 0.0
    exponent = 0
    while abs(total) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(total) < Fraction(2) ** exponent and exponent > -126:
        exponent -= 1
    digit = Fraction(2) ** (exponent - unit.kept)
    return float(math.trunc(total / digit) * digit)


def operands(rng: Any, shape: tuple[int, ...], dtype: str, kind: str) -> Array:
    x = rng.standard_normal(shape)
    if kind == "wide":
        x = x * 2.0 ** rng.integers(-8, 9, shape)
    elif kind == "tiny":
        low = -70 if emulator.FORMATS[dtype].smallest == -126 else emulator.FORMATS[dtype].smallest
        x = np.where(rng.random(shape) < 0.3, 0.0, x) * 2.0 ** rng.integers(low - 3, low + 5, shape)
    if dtype == "tf32":  # the last 13 bits of a float32 are dropped
        return (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    held: Array = torch.tensor(x).float().to(getattr(torch, dtype)).double().numpy()
    return held


@pytest.mark.parametrize(
    ("chip", "dtype", "kind"),
    [
        *((*unit, "tiny" if i % 2 else "cancel") for i, unit in enumerate(UNITS)),
        *at_length(*((*unit, kind) for unit in UNITS for kind in ("bell", "wide", "cancel", "tiny"))),
    ],
)
def test_a_fused_step_is_the_one_of_rational_numbers(chip: str, dtype: str, kind: str) -> None:
    unit, rng = UNITS[chip, dtype], np.random.default_rng(1)
    a, b = (operands(rng, (60, unit.terms), dtype, kind) for _ in "ab")
    c = rng.standard_normal(60) * rng.choice([0.0, 1.0, 2.0**-12, 2.0**-132 if kind == "tiny" else 2.0**9], 60)
    c = c.astype(np.float32).astype(np.float64)
    if kind == "cancel":
        a[:, 1::2], b[:, 1::2] = a[:, ::2], -b[:, ::2]
    expected = [step_in_fractions(x, y, z, dtype, unit) for x, y, z in zip(a, b, c, strict=True)]
    assert (fused_step(a, b, c, dtype, unit) == np.array(expected, np.float32)).all()


def test_a_step_cuts_in_no_order_and_keeps_what_is_not_finite() -> None:
    """1 + 15 terms just below a unit of the last place each: lost one by one on Hopper, kept where nothing is cut."""
    a, b = np.ones((1, 16)), np.full((1, 16), 2.0**-26)
    b[0, 0] = 1.0
    assert fused_step(a, b, np.zeros(1), "bfloat16", UNITS["Hopper", "bfloat16"])[0] == 1.0
    kept = fused_step(a, b, np.zeros(1), "bfloat16", Unit(40, 16))[0]
    assert kept == np.float32(1.0 + 2.0**-23), "15 * 2^-26, cut to 23 bits"
    a, b = np.ones((3, 16)), np.ones((3, 16))
    a[0, 3], b[1, 2], a[2, 0], b[2, 0] = np.inf, np.nan, np.inf, 0.0
    got = fused_step(a, b, np.zeros(3), "float16", UNITS["Hopper", "float16"])
    assert got[0] == np.inf
    assert np.isnan(got[1:]).all()
    rng, unit = np.random.default_rng(2), UNITS["Hopper", "bfloat16"]
    a, b = (operands(rng, (500, 64), "bfloat16", "wide") for _ in "ab")
    inside = np.concatenate([rng.permutation(16) + 16 * i for i in range(4)])
    across = np.concatenate([np.arange(16) + 16 * i for i in (3, 1, 0, 2)])
    straight = fused_chain(a, b, np.zeros(500), "bfloat16", unit)
    assert (fused_chain(a[:, inside], b[:, inside], np.zeros(500), "bfloat16", unit) == straight).all()
    assert (fused_chain(a[:, across], b[:, across], np.zeros(500), "bfloat16", unit) != straight).any()
    by_tree = predict(chain(64, terms=16), a, b, Arithmetic(unit=unit, dtype="bfloat16"))
    assert (by_tree.astype(np.float32) == straight).all()
    orders = [chain(8), chain(8, reversed(range(8))), chain(8, terms=2), chain(8, terms=4), chain(7)]
    assert len({tree.digest for tree in orders}) == len(orders)
    assert chain(8).digest == chain(8, [1, 0, 2, 3, 4, 5, 6, 7]).digest, "a + b is b + a"


def test_a_fused_multiply_add_is_the_c_library_s() -> None:
    library = ctypes.util.find_library("m")
    if library is None:
        pytest.skip("no libm by that name here")
    fmaf = ctypes.CDLL(library).fmaf
    fmaf.argtypes, fmaf.restype = [ctypes.c_float] * 3, ctypes.c_float
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal(20_000).astype(np.float32) for _ in "ab")
    c = (-(a * b) * rng.choice([1.0, 1 + 2.0**-20, 0.5, 1e-6, 1e6], 20_000)).astype(np.float32)
    expected = [fmaf(*three) for three in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]
    x, y = np.stack([c, a], 1).astype(float), np.stack([np.ones_like(b), b], 1).astype(float)
    got = predict(chain(2), x, y, Arithmetic(fused=True))
    assert (got == np.array(expected)).all()
    apart = predict(chain(2), x, y, Arithmetic())
    assert (apart != got).any(), "inputs that don't tell a fused product from a rounded one"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_roundings_are_torch_s(dtype: str) -> None:
    rng = np.random.default_rng(4)
    x = (rng.standard_normal(50_000) * 2.0 ** rng.integers(-30, 20, 50_000)).astype(np.float32)
    expected = torch.from_numpy(x).to(getattr(torch, dtype)).double().numpy()
    assert (emulator.round_to(x.astype(np.float64), dtype) == expected).all()


def test_sums_that_an_h200_gave_are_predicted() -> None:
    """Those that the script kept because the floor that was read, -132, missed them."""
    seen = 0
    with gzip.open(ROOT / "docs" / "evidence" / "h200" / "emulator.txt.gz", "rt", encoding="utf-8") as lines:
        for line in map(json.loads, lines):
            if line.get("differences", 0) not in (1, 9):  # fp8 under mma.sync ran as fp16: no comparison
                continue
            a, b = (np.array([[float.fromhex(x) for x in one[key]] for one in line["examples"]]) for key in "ab")
            c, got = (np.array([float.fromhex(one[key]) for one in line["examples"]]) for key in ("c", "got"))
            unit = UNITS["Hopper", line["dtype"]]
            assert (fused_chain(a, b, c, line["dtype"], unit) == got).all()
            assert (fused_chain(a, b, c, line["dtype"], unit._replace(floor=-132)) != got).all()
            seen += len(got)
    assert seen == 19


def random_tree(rng: random.Random, widest: int) -> Tree:
    """Nodes that join what is there at random, up to `widest` at once."""
    leaves = rng.randint(2, 70)
    left, nodes = list(range(leaves)), []
    while len(left) > 1:
        count = min(len(left), rng.randint(2, widest))
        nodes.append(tuple(left.pop(rng.randrange(len(left))) for _ in range(count)))
        left.append(leaves + len(nodes) - 1)
    return Tree(leaves, tuple(nodes))


def survivors_of(tree: Tree, digits: int) -> Any:
    """What masks would show of a tree, counts rounded to so many digits as a short result dtype would."""
    above: dict[int, int] = {c: tree.leaves + i for i, node in enumerate(tree.nodes) for c in node}
    under: list[set[int]] = [{leaf} for leaf in range(tree.leaves)]
    for node in tree.nodes:
        under.append(set().union(*(under[c] for c in node)))

    def survivors(masks: Any) -> list[Array]:
        found = []
        for i, js, ones in masks:
            counts = []
            for j in js.tolist():
                at = i
                while j not in under[at]:
                    at = above[at]
                counts.append(len(set(ones.tolist()) - under[at] - {i, j}))
            m, e = np.frexp(np.array(counts, float))
            found.append(np.ldexp(np.rint(np.ldexp(m, digits)), e - digits))
        return found

    return survivors


@pytest.mark.parametrize("widest", [2, 5])
@pytest.mark.parametrize("seed", [0, 1, *at_length(*range(2, 30))])
def test_a_tree_drawn_at_random_is_found(seed: int, widest: int) -> None:
    tree = random_tree(random.Random(seed), widest)  # noqa: S311 - a tree, nothing secret
    for digits in (24, 3):
        found = find_tree(survivors_of(tree, digits), range(tree.leaves), tree.leaves, 2**digits, seed)
        assert found.digest == tree.digest, f"from {digits} digits"
