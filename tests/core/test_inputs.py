"""Inputs are the same for one seed, of the kind that they are named after, and hard where they claim to be."""

from __future__ import annotations

import math

import pytest
import torch

from nondet.core.compare import digest
from nondet.core.inputs import KINDS, generator, make, product_operands

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def test_one_seed_means_one_input():
    """No kind overflows a dtype but two: infinities would make every kernel look alike."""
    for kind in KINDS:
        for dtype in DTYPES:
            a, b, c = (make(kind, (3, 64), dtype, "cpu", generator(seed, "cpu")) for seed in (1, 1, 2))
            assert digest(a) == digest(b) != digest(c)
            assert (a.shape, a.dtype) == ((3, 64), dtype)
            finite = torch.isfinite(make(kind, (64, 1000), dtype, "cpu", generator(0, "cpu")))
            assert finite[:, 0].all()
            assert finite.all() == (kind not in ("masked", "infinite"))


def test_numbers_that_ordinary_inputs_lack():
    for dtype in DTYPES:
        made = {
            kind: make(kind, (64, 1000), dtype, "cpu", generator(0, "cpu"))
            for kind in ("denormal", "tiny", "masked", "infinite")
        }
        small = made["denormal"].double().abs()
        assert 0.4 < float((small < torch.finfo(dtype).tiny).double().mean()) < 0.8
        assert float((small > 0).double().mean()) > 0.9
        assert float(made["tiny"].double().square().mean()) < 1e-7
        hidden = made["masked"] == -torch.inf
        assert (hidden.int().diff(dim=-1) >= 0).all()
        assert 0.4 < float(hidden.double().mean()) < 0.6
        assert (made["infinite"] == torch.inf).sum(-1).tolist() == [0, 1] * 32
    # of "mixed" the same weight makes ordinary results of even rows, and exactly nothing of odd ones
    x, w = product_operands("mixed", (8, 512), (16, 512), torch.float32, "cpu", 0)
    out = x.double() @ w.double().T
    assert float(out[0::2].abs().mean()) > 1.0
    assert float(out[1::2].abs().max()) < 1e-9
    assert float(x[1::2].abs().mean()) > 0.1


def test_bits_do_not_depend_on_the_cpu():
    """Drawn from uniforms alone, whose bits are those of every CPU: digests that scalar, AVX2 and AVX-512 code gave of
    numbers that were what their kinds are called."""
    drawn = {kind: digest(make(kind, (100, 333), torch.float32, "cpu", generator(7, "cpu"))) for kind in KINDS}
    assert drawn == {
        "bell": "ef8eeff0cf6e775b", "wide": "a98531ade8796280", "cancel": "fd54b55fbf53c1ea",
        "outlier": "489ce568ad7a6e25", "order": "92ab50e0379e30ae", "order-wide": "2451e3bcca218384",
        "mixed": "1f6056163bde8797", "tiny": "b76c769d50fae836", "denormal": "366ec72d479bf1aa",
        "masked": "f517bc3e059066c6", "infinite": "f442ab06cac00e51", "positive": "3c0d76549239fcfe",
        "integers": "ea7078a4d2f7b611", "underflow": "b616354afcbe31df",
    }  # fmt: skip
    with pytest.raises(ValueError, match="bell"):
        make("bel", (1,), torch.float32, "cpu", generator(0, "cpu"))


def test_order_revealing_operands_cancel_exactly_and_show_an_order():
    for kind in ["order", "order-wide"]:
        for dtype in [torch.float32, torch.bfloat16, torch.float16]:
            x, w = product_operands(kind, (8, 512), (64, 512), dtype, "cpu", 3)
            alone = make(kind, (8, 512), dtype, "cpu", generator(0, "cpu"))
            terms = torch.cat([(x.double()[:, None] * w.double()).flatten(0, 1), alone.double()])  # exact, as is fsum
            assert {math.fsum(row) for row in terms.tolist()} == {0.0}
            forwards, backwards = torch.zeros(8, 64), torch.zeros(8, 64)
            for k in range(512):
                forwards += x[:, k, None].float() * w[:, k].float()
                backwards += x[:, 511 - k, None].float() * w[:, 511 - k].float()
            assert float((forwards != backwards).float().mean()) > 0.9


def test_integers_are_exact_in_every_order():
    """Partial sums stay below 2^24, so that float32 additions in any order give the one answer."""
    for dtype in [torch.float32, torch.bfloat16, torch.float16]:
        x, w = product_operands("integers", (8, 4096), (16, 4096), dtype, "cpu", 3)
        exact = x.double() @ w.double().T
        assert float((x.double().abs() @ w.double().abs().T).max()) < 2**24
        assert torch.equal(x.float().flip(1) @ w.float().flip(1).T, exact.float())
