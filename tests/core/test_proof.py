"""The dispatchers' proof, and the inputs that it rests on."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from nondet.core import launch
from nondet.core.certificates import Certificates
from nondet.core.launch import FirstUses, first_uses, proving
from nondet.core.proof import PRODUCT_INPUTS, Claim, distinct, operands_key, product_inputs, prove, settings
from tests.build import absent, linear, split_k

K, N = 48, 24


def verdict(call: Any, inputs: Any, kept: Certificates) -> bool | None:
    return prove([Claim("member", "key", call)], linear, inputs, kept)[0]


def test_prove_compares_and_records_what_it_saw(kept: Certificates) -> None:
    inputs = list(product_inputs((3, N, K), torch.bfloat16, "cpu"))
    for kind, (_, _, bias) in product_inputs((3, N, K), torch.bfloat16, "cpu", bias=True, kinds=PRODUCT_INPUTS[:2]):
        assert 0 < float(bias.abs().max()) < (2.0**-12 if kind == "order" else 1.0)  # it hides no rounding errors
    infinite = [("inf", (torch.full((2, K), torch.inf), torch.ones(N, K)))]
    assert (verdict(linear, [], kept), verdict(linear, infinite, kept), kept.all()) == (None, None, [])
    for call, proven, stands in [(linear, True, True), (split_k, False, False), (linear, True, False)]:
        assert verdict(call, inputs, kept) is proven
        assert kept.standing("member", "key") is stands
        words = "elements equal to the anchor's on order" if stands else "elements differ"
        assert words in kept.all()[0].evidence
    claims = [Claim(name, "key", call) for name, call in (("a", linear), ("b", split_k), ("c", absent), ("d", linear))]
    assert prove(claims, linear, inputs, kept) == [True, False, None, True]
    assert [(c.member, c.holds) for c in kept.all()[:3]] == [("a", True), ("b", False), ("d", True)]


def test_a_failure_is_no_exclusion() -> None:
    """It may have been the driver's hiccup. A full memory is not even remembered within the process."""

    def full(*_: Any) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    def wide(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x, weight, bias).double()

    for call, standing in [(absent, False), (wide, False), (full, None)]:
        kept = Certificates({"device": "cpu"}, None)
        assert verdict(call, product_inputs((3, N, K), torch.bfloat16, "cpu"), kept) is None
        assert kept.standing("member", "key") is standing
        assert kept.all() == []
        assert list(kept.aside()) == ([("member", "key")] if standing is False else [])
        # asked again by `certify`
        assert verdict(linear, product_inputs((3, N, K), torch.bfloat16, "cpu"), kept) is True
        assert kept.standing("member", "key") is True
        assert kept.aside() == {}


def test_a_key_has_what_may_change_bits_and_nothing_else() -> None:
    x, bias = torch.zeros(4, 8), torch.zeros(8)
    keys = [
        operands_key("chain", (x, None)),
        operands_key("chain-tf32", (x, None)),
        operands_key("chain", (x, bias)),
        operands_key("chain", (x.double(), None)),
        operands_key("chain", (x[:3], None)),
        operands_key("chain", (torch.zeros(8, 4).T, None)),
        operands_key("chain", (torch.zeros(4, 9)[:, :8], None)),
        operands_key("chain", (torch.zeros(4, 9)[:, 1:], None)),
        operands_key("chain", (x, None), ["float32=high"]),
    ]
    assert len(set(keys)) == len(keys)
    row = torch.zeros(3, 8)[1:2]
    assert operands_key("chain", (row,), alignment=16) == operands_key("chain", (torch.zeros(1, 8),), alignment=16)
    assert operands_key("chain", (torch.ones(4, 8), None)) == keys[0]
    whole = operands_key("chain", (torch.zeros(1, 8), None, [2]), ["bias", "tf32=no"], alignment=64)
    assert whole == "chain | float32[1,8]/0,1@64 None (2) | bias tf32=no"  # kept certificates are found by it


def test_a_switch_changes_the_key() -> None:
    products = torch.backends.cuda.matmul
    for device, owner, name, value in (
        ("cuda", products, "allow_bf16_reduced_precision_reduction", False),
        ("cuda", products, "allow_fp16_reduced_precision_reduction", False),
        ("cuda", products, "allow_fp16_accumulation", True),
        ("cpu", torch.backends.mkldnn, "enabled", False),
    ):
        before = settings(device)
        now = getattr(owner, name)  # fp32_precision is left out: torch refuses to mix it with older switches
        setattr(owner, name, value)
        try:
            assert settings(device) != before, name
        finally:
            setattr(owner, name, now)
        assert settings(device) == before


def test_elements_with_places_of_their_own() -> None:
    for sizes, steps, apart in [
        ((3, 4), (4, 1), True), ((3, 1), (1, 0), True), ((2, 1, 4), (4, 0, 1), True), ((), (), True),
        ((2, 2), (1, 1), False), ((2, 2), (2, 1), True), ((2, 2), (9, 1), True),
        ((3, 4), (3, 1), False),  # each row begins in the one before it
        ((3, 4), (0, 1), False),  # expanded
        ((1, 4), (0, 1), True),  # a step that is never taken, whatever it is
    ]:  # fmt: skip
        x = torch.zeros(64).as_strided(sizes, steps)
        assert distinct(x) == apart
        places = [sum(i * s for i, s in zip(at, steps, strict=True)) for at in np.ndindex(*sizes)]
        assert (len(set(places)) == x.numel()) == apart


def test_no_use_is_lost_between_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that change over between reading a count and writing it, each time, still end at the sum."""

    class Slow(FirstUses):
        def __getattribute__(self, name: str) -> Any:
            seen = super().__getattribute__(name)
            time.sleep(0.001 if name == "proofs" else 0)
            return seen

    def prove() -> None:
        for _ in range(5):
            with proving():
                pass

    monkeypatch.setattr(launch, "FirstUses", Slow)
    with first_uses() as uses:
        threads = [threading.Thread(target=prove) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (uses.proofs, len(uses.stretches)) == (20, 20)
