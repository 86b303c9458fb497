"""Stock operators proven at first use: the certificate says the layout that was computed, and no other."""

from __future__ import annotations

import pytest
import torch

from nondet.core.certificates import Certificates
from nondet.kernels.dispatch import functions


def test_strides_are_those_of_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row with gaps is proven with gaps, under a key that says so, with the settings; a dense one is another key."""
    kept = Certificates({"device": "test"}, None)
    monkeypatch.setattr(functions, "certificates", lambda device: kept)
    strides: list[tuple[int, ...]] = []
    honest = torch.Tensor.copy_

    def copied(self: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        strides.append(self.stride())
        return honest(self, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    x = torch.rand(6, 512)[:, ::2]
    assert functions.proven("cumsum", (x, -1), {})[0]
    assert functions.proven("cumsum", (x.contiguous(), -1), {})[0]
    assert strides == [(512, 2), (256, 1)]
    assert ["/512,2@" in c.key for c in kept.all()] == [False, True]
    assert all("float32=" in c.key for c in kept.all())


def test_what_has_no_layout_for_a_proof_is_at_risk() -> None:
    """Expanded rows share their places in memory; no rows at all need no proof."""
    assert not functions.proven("cumsum", (torch.rand(1, 8).expand(4, 8), -1), {})[0]
    assert functions.proven("cumsum", (torch.rand(0, 8), -1), {})[0]
