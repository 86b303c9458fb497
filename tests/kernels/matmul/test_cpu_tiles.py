"""The certificate: what a library would have to do to pass it, and what it must not get away with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nondet.core.certificates import Certificate, Certificates
from nondet.core.inputs import order_revealing
from nondet.kernels.matmul import cpu, cpu_tiles
from nondet.kernels.matmul.cpu_tiles import NotInvariantError, Tiles, prove, proven

WIDTH, COLUMNS = 64, 8
SIZES = (1, 2, 4, 7, 8, 16, 32, 48)


def chain(x: torch.Tensor, w: torch.Tensor, backwards: bool = False) -> torch.Tensor:
    """A product whose order along K is in our hands."""
    total = torch.zeros(x.shape[0], w.shape[1])
    for k in reversed(range(WIDTH)) if backwards else range(WIDTH):
        total += x[:, k : k + 1].float() * w[k].float()
    return total


def certify_toy(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dtype: torch.dtype) -> Tiles:
    """A certificate for a library that computes `product`."""

    def case(seed: int) -> tuple[Callable[..., object], tuple[torch.Tensor]]:
        w = order_revealing(COLUMNS, WIDTH, dtype, seed, negate=False).t()
        x = order_revealing(max(SIZES), WIDTH, dtype, seed, negate=True)
        return (lambda tile, out: out.copy_(product(tile, w))), (x,)

    return prove("toy", [case(1), case(2)], lambda n: torch.empty(n, COLUMNS, dtype=dtype), SIZES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_order_is_one_class(dtype: torch.dtype) -> None:
    """A library with one order keeps all of its row counts, so that invariance costs nothing where it is given."""
    tiles = certify_toy(chain, dtype)
    assert tiles.base == 16
    assert tiles.sizes == tuple(sorted({*SIZES, 16}))
    assert tiles.rejected == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_another_order_at_one_row_count_is_rejected(dtype: torch.dtype) -> None:
    """Another order shows even after rounding to 8 bits, and even if a single column of a single row count has it."""

    def library(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        out = chain(x, w)
        if x.shape[0] in (7, 32):
            out[:, 3] = chain(x, w, backwards=True)[:, 3]
        return out

    tiles = certify_toy(library, dtype)
    assert tiles.rejected == (7, 32)


def test_a_tile_that_minds_the_place_is_no_base() -> None:
    """A base tile whose last row has another order is passed over, and with every base so there is no certificate."""

    def library(bad: set[int]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            out = chain(x, w)
            if x.shape[0] in bad:
                out[-1] = chain(x, w, backwards=True)[-1]
            return out

        return product

    tiles = certify_toy(library({16, 32}), torch.float32)
    assert tiles.base == 64
    assert tiles.rejected == (16, 32)
    with pytest.raises(NotInvariantError, match="independent of a row's place"):
        certify_toy(library({12, 16, 24, 48, 64}), torch.float32)


def test_a_result_that_tells_nothing_is_no_certificate() -> None:
    """NaN everywhere is equal everywhere, which proves nothing."""
    with pytest.raises(NotInvariantError):
        certify_toy(lambda x, w: chain(x, w) * float("nan"), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("seed", "width"), [(1, 64), (1, 257), (1, 1000), (2, 6), (2, 64), (2, 257), (2, 1000)])
def test_the_inputs_reveal_an_order(dtype: torch.dtype, seed: int, width: int) -> None:
    """Forwards and pairwise summation of a row differ in the dtype itself, in many rows: the check is not blind."""
    x = order_revealing(64, width, dtype, seed, negate=True)
    w = order_revealing(64, width, dtype, seed, negate=False)
    terms = x.float() * w.float()
    forwards = torch.zeros(64)
    for k in range(width):
        forwards += terms[:, k]
    halves = terms[:, : width // 2].cumsum(1)[:, -1] + terms[:, width // 2 :].cumsum(1)[:, -1]
    assert (forwards.to(dtype) != halves.to(dtype)).sum() >= 16
    exact = (x.double() * w.double()).sum(1).abs()
    assert (exact <= terms.abs().amax(1) * 2.0**-20).all()


def tiles_of(sizes: tuple[int, ...]) -> Tiles:
    return Tiles("toy", sizes[0], sizes, (), {s: 1.0 + 0.1 * s for s in sizes})


@pytest.mark.parametrize("sizes", [(16,), (1, 16, 64), (4, 8, 12, 100), (1,)])
def test_a_plan_uses_certified_sizes_and_covers_the_rows(sizes: tuple[int, ...]) -> None:
    """No row count that was not certified is ever called, no row is left out, and only the last call is padded."""
    for rows in range(1, 300):
        plan = tiles_of(sizes).plan(rows).sizes
        assert set(plan) <= set(sizes)
        assert sum(plan) >= rows > sum(plan) - plan[-1]


@pytest.mark.parametrize("width", [5, 16, 33])
def test_tiles_are_called_aligned_contiguous_and_in_certified_sizes(width: int) -> None:
    """What was certified is what is called: size, alignment and layout, whatever the batch; and no value changes."""
    tiles = tiles_of((4, 16))
    seen = []

    def call(x: torch.Tensor, out: torch.Tensor) -> None:
        for t in (x, out):
            assert t.is_contiguous()
            assert t.data_ptr() % 64 == 0
        seen.append(x.shape[0])
        out.copy_(x * 2.0)

    for rows in (1, 4, 5, 16, 21, 40):
        x = torch.rand(rows + 1, width)[1:]  # misaligned, unless a row is a multiple of 64 bytes
        assert torch.equal(tiles.apply((x,), torch.empty(rows, width), call), x * 2.0)
    assert set(seen) == {4, 16}


def test_a_failure_is_remembered() -> None:
    """An operator without a certificate fails at every call with the same words, and is not tried again."""
    tried = []

    def make() -> Tiles:
        tried.append(1)
        raise NotInvariantError("toy: no tile")

    for _ in range(2):
        with pytest.raises(NotInvariantError, match="toy: no tile"):
            proven("a test's own", ("a test's own key",), make)
    assert tried == [1]


def test_the_next_process_finds_what_was_proven(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What `nondet certify` or a first use proved is read from the file: no proof is run, the sizes are the same."""
    kept = Certificates({"device": "cpu"}, tmp_path)
    monkeypatch.setattr(cpu_tiles, "certificates", lambda device: kept)
    monkeypatch.setattr(cpu_tiles, "_known", {})
    monkeypatch.setattr(cpu_tiles, "_use_kept", True)
    weight = torch.rand(48, 40)
    first = cpu.tiles_of(weight)
    monkeypatch.setattr(cpu_tiles, "_known", {})  # as another process
    kept = Certificates({"device": "cpu"}, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "prove", None)  # called, it would raise
        again = cpu.tiles_of(torch.rand(48, 40))
        assert (again.what, again.base, again.sizes, again.rejected) == (
            first.what,
            first.base,
            first.sizes,
            first.rejected,
        )
        assert again.plan(37).sizes
        with pytest.raises(TypeError):
            cpu.tiles_of(torch.rand(40, 48).T)  # another layout was not proven
    assert [(c.member, c.holds) for c in kept.all()] == [("tiles", True)]


def test_a_certificate_that_lists_no_tiles_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that cannot be sizes are proven anew."""
    for numbers in ({}, {"base": [16], "sizes": [1, 2], "nanoseconds": [1, 2]}, {"base": [1], "sizes": [1, 0]}):
        proof = Certificate(member="tiles", key="k", holds=True, evidence="", proven="", sources="", numbers=numbers)
        assert cpu_tiles.restored("toy", proof) is None
