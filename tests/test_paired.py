"""Comparisons of pairs, against brute force and their definitions."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from nondet.core.statistics import k3, mcnemar, paired_permutation, superiority


def test_mcnemar_counts_coin_tosses() -> None:
    """The exact p is that of a fair coin, counted outright; published: 8 against 1 gives 0.0391."""
    for b, c in itertools.product(range(7), repeat=2):
        total = b + c
        tosses = list(itertools.product((0, 1), repeat=total))
        tail = sum(abs(2 * sum(t) - total) >= abs(b - c) for t in tosses) / len(tosses)
        assert mcnemar(b, c) == pytest.approx(tail)
    assert mcnemar(8, 1) == pytest.approx(0.0390625)
    assert mcnemar(0, 0) == 1.0
    assert 0.0 < mcnemar(900, 1100) < 1e-4
    with pytest.raises(ValueError, match="no counts"):
        mcnemar(-1, 2)


def test_the_permutation_test_enumerates_and_draws_alike() -> None:
    """Few prompts are enumerated; many are drawn, from a fixed seed, to the same p within its error."""
    first, second = [0.5, 0.25, 0.0, 0.75, 0.0], [0.0, 0.0, 0.0, 0.0, 0.125]
    signs = list(itertools.product((1, -1), repeat=4))
    d = [0.5, 0.25, 0.75, -0.125]
    exact = sum(abs(sum(s * x for s, x in zip(sign, d, strict=True))) >= abs(sum(d)) for sign in signs) / len(signs)
    assert paired_permutation(first, second) == pytest.approx(exact)
    assert paired_permutation(first, first) == 1.0
    rng = random.Random(5)  # noqa: S311 - a simulation
    noise = [rng.gauss(0, 1) for _ in range(40)]
    null = paired_permutation(noise, [0.0] * 40)
    assert null == paired_permutation(noise, [0.0] * 40)
    assert null == pytest.approx(math.erfc(abs(sum(noise)) / math.sqrt(2 * sum(x * x for x in noise))), abs=0.03)
    assert paired_permutation([x + 3 for x in noise], [0.0] * 40) == pytest.approx(1e-4, abs=1e-4)
    with pytest.raises(ValueError, match="no pairs"):
        paired_permutation([1.0], [])


def test_superiority_counts_pairs() -> None:
    """The share of pairs, ties half."""
    small, large = [0.0, 1.0, 1.0], [1.0, 2.0]
    pairs = [(a, b) for a in small for b in large]
    assert superiority(small, large) == pytest.approx(sum((b > a) + (a == b) / 2 for a, b in pairs) / len(pairs))
    assert superiority([1.0], [1.0]) == 0.5
    with pytest.raises(ValueError, match="empty"):
        superiority([], [1.0])


def test_k3_estimates_the_divergence_it_is_named_for() -> None:
    """Of tokens drawn from the reference its mean is KL; it is 0 for equal bits, and never below."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.45, 0.3, 0.25])
    exact = float((p * np.log(p / q)).sum())
    drawn = np.random.default_rng(0).choice(3, size=400_000, p=p)
    estimate = k3(np.log(p)[drawn].astype("<f4"), np.log(q)[drawn].astype("<f4"))
    assert estimate == pytest.approx(exact, rel=0.02)
    same = np.log(p).astype("<f4")
    assert k3(same, same) == 0.0
    assert k3(same, np.nextafter(same, np.float32(0))) >= 0.0
    with pytest.raises(ValueError, match="same tokens"):
        k3(same, same[:2])
