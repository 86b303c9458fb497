"""Products on a CPU: a row's bits are its own, for every batch, place, layout, dtype and thread."""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import torch

from nondet import batch_invariant
from nondet.core import inputs
from nondet.core.certificates import Certificate, Certificates
from nondet.core.compare import error_against, identical
from nondet.core.inputs import generator, make, order_revealing, product_operands
from nondet.core.launch import listen
from nondet.errors import UserError
from nondet.kernels import reference
from nondet.kernels.matmul import cpu, cpu_tiles, split_k_cpu, split_k_cuda
from nondet.kernels.matmul.cpu_tiles import Case, NotInvariantError, Tiles, prove
from nondet.kernels.matmul.cuda import matmul
from tests.build import DEVICE, accuracy_bound
from tests.kernels.tiers import at_length

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = (1, 2, 3, 5, 8, 16, 17, 33, 64, 77, 130)


def operands(dtype: torch.dtype, k: int, n: int, kind: str = "bell") -> tuple[torch.Tensor, torch.Tensor]:
    rng = generator(1, "cpu")
    return make(kind, (max(ROWS), k), dtype, "cpu", rng), make("bell", (n, k), dtype, "cpu", rng) / 16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["cancel", *at_length("bell")])
def test_a_row_does_not_depend_on_the_batch(threads: int, dtype: torch.dtype, kind: str) -> None:
    narrow = ((33, 1), (33, 2), (33, 9), (33, 16)) if dtype == torch.float32 else ()
    for depth, columns in ((72, 200), *narrow):
        x, weight = operands(dtype, depth, columns, kind)
        for b in (weight.t(), weight.t().contiguous())[: 2 if narrow else 1]:
            with ThreadPoolExecutor(1) as engine:
                whole = engine.submit(cpu.matmul, x, b).result()
            for rows in ROWS:
                for start in (0, 1, max(ROWS) - rows):
                    assert identical(cpu.matmul(x[start : start + rows], b), whole[start : start + rows]), columns


@pytest.mark.parametrize("bias", [False, True])
def test_what_underflows_has_the_same_bits_in_every_batch(bias: bool) -> None:
    """oneDNN's kernels for few rows keep subnormal numbers and the sign of such a zero, those for many rows do not."""
    for dtype, k in itertools.product((torch.bfloat16, torch.float64), (3, 64)):
        x, weight = product_operands("underflow", (max(ROWS), k), (64, k), dtype, "cpu", 3)
        for size in (0.0, 2.0**-126, 2.0**-120):
            added = make("bell", (64,), dtype, "cpu", generator(2, "cpu")) * size if bias else None
            whole = cpu.linear(x, weight, added)
            for rows in ROWS:
                assert identical(cpu.linear(x[:rows], weight, added), whole[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_values(dtype: torch.dtype) -> None:
    for k, n, kind in ((1, 7, "bell"), (33, 1, "outlier"), (33, 9, "bell"), (1000, 40, "bell")):
        x, weight = operands(dtype, k, n, kind)
        bound = accuracy_bound(dtype, k)
        assert error_against(cpu.linear(x, weight), reference.linear(x, weight)).relative_norm <= bound, k
        b = weight.t().contiguous()
        assert error_against(cpu.matmul(x, b), reference.matmul(x, b)).relative_norm <= bound, k
    bias = make("bell", (40,), dtype, "cpu", generator(2, "cpu"))
    whole = cpu.linear(x, weight, bias)
    assert error_against(whole, reference.linear(x, weight, bias)).relative_norm <= 2 * bound
    assert all(identical(cpu.linear(x[:rows], weight, bias), whole[:rows]) for rows in ROWS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_of_the_left_operand_do_not_matter(dtype: torch.dtype) -> None:
    """Strided, transposed, misaligned or expanded: the bits of a contiguous batch; of several, each its own."""
    x, weight = operands(dtype, 72, 64)
    right = cpu.linear(x, weight)
    strided = torch.empty(x.shape[0], 2 * x.shape[1], dtype=dtype)[:, ::2].copy_(x)
    assert identical(cpu.linear(strided, weight), right)
    assert identical(cpu.linear(x.t().contiguous().t(), weight), right)
    shifted = torch.empty(x.numel() + 1, dtype=dtype)[1:].view(x.shape).copy_(x)
    assert identical(cpu.linear(shifted, weight), right)
    assert identical(cpu.linear(x[:1].expand(5, -1), weight), right[:1].expand(5, -1))
    rng = generator(3, "cpu")
    a, b = make("bell", (5, 9, 32), dtype, "cpu", rng), make("bell", (5, 32, 12), dtype, "cpu", rng)
    whole = cpu.matmul(a, b)
    for i in range(5):
        assert identical(cpu.matmul(a[i], b[i]), whole[i])
    shared = b[:1].expand(5, -1, -1)
    assert identical(cpu.matmul(a, shared)[3], cpu.matmul(a[3], b[0]))


def test_empty_and_misused() -> None:
    weight = torch.rand(4, 3)
    assert cpu.linear(torch.rand(0, 3), weight).shape == (0, 4)
    assert cpu.linear(torch.rand(2, 5, 3), weight).shape == (2, 5, 4)
    with pytest.raises(UserError, match="no gradients"):
        cpu.linear(torch.rand(2, 3), weight.requires_grad_())
    with pytest.raises(UserError, match="int64"):
        cpu.matmul(torch.ones(2, 3, dtype=torch.int64), torch.ones(3, 2, dtype=torch.int64))


ONEDNN_DTYPES = [torch.bfloat16, torch.float32]


def layer(dtype: torch.dtype, bias: bool) -> torch.nn.Linear:
    made = torch.nn.Linear(192, 160, bias=bias)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(make("wide", tuple(parameter.shape), torch.float32, "cpu", generator(3, "cpu")))
    return made.to(dtype)


def packs(dtype: torch.dtype) -> bool:
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(32, 32, dtype=dtype), None)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", ONEDNN_DTYPES)
def test_packed_and_plain_have_the_same_bits(dtype: torch.dtype, bias: bool) -> None:
    """At every number of rows, those between the certified ones too; and a row has its own bits in all of them."""
    module = layer(dtype, bias)
    x = make("wide", (70, 192), dtype, "cpu", generator(4, "cpu"))
    with torch.no_grad(), batch_invariant() as block:
        plain = {rows: module(x[:rows]) for rows in (1, 2, 3, 5, 16, 17, 33, 41, 70)}
        assert (block.pack(module) > 0) == packs(dtype)
        with listen() as notes:
            for rows, expected in plain.items():
                got = module(x[:rows])
                assert identical(got, expected)
                assert identical(got, plain[70][:rows])
        assert any("packed" in note for note in notes) == packs(dtype)
    assert not cpu.packed_copies


@pytest.mark.parametrize("dtype", ONEDNN_DTYPES)
def test_a_weight_that_changed_is_not_taken_from_its_copy(dtype: torch.dtype) -> None:
    """A step in the block, a weight turned around: the product is the new one's. Other copies still serve."""
    if not packs(dtype):
        pytest.skip("oneDNN has no layout for it here")
    module, other, square = layer(dtype, False), layer(dtype, False), torch.nn.Linear(192, 192, False, dtype=dtype)
    x = make("wide", (5, 192), dtype, "cpu", generator(4, "cpu"))
    with torch.no_grad(), batch_invariant() as block:
        block.pack(torch.nn.Sequential(module, other, square))
        before = module(x)
        square.weight.data = square.weight.data.t()
        assert identical(square(x), cpu.linear(x, square.weight.clone()))  # no copy of that one
        module.weight.mul_(2.0)
        with listen() as notes:
            after = module(x)
        assert not any("packed" in note for note in notes)
        assert identical(after, before * 2.0)
        with listen() as notes:
            assert identical(other(x), before)
        assert any("packed" in note for note in notes)


def test_no_more_is_copied_than_was_allowed() -> None:
    """Room for one of two weights: one is copied. A warning says where none is: without room, or of inference mode,
    which counts no changes. There is none outside of a block."""
    with torch.inference_mode():
        unseen = layer(torch.float32, False)
    modules = torch.nn.Sequential(layer(torch.float32, False), torch.nn.Linear(160, 192, bias=False))
    size = 192 * 160 * 4
    with torch.no_grad(), batch_invariant() as block:
        with pytest.warns(RuntimeWarning, match="kept no copy"):
            assert block.pack(modules, most=size - 1) == 0
        with pytest.warns(RuntimeWarning, match="kept no copy"):
            assert block.pack(unseen) == 0
        assert block.pack(modules, most=2 * size - 1) == size
        assert len(cpu.packed_copies) == 1
    with pytest.raises(UserError, match="outside"):
        block.pack(modules)
    module = layer(torch.float32, False)
    x = make("wide", (4, 192), torch.float32, "cpu", generator(4, "cpu"))
    with torch.no_grad():
        first, second = batch_invariant(), batch_invariant()
        first.__enter__().pack(module)
        second.__enter__().pack(module)
        first.__exit__(None, None, None)
        second.__exit__(None, None, None)
        assert not cpu.packed_copies
        module.weight.data.copy_(-module.weight)
        with batch_invariant():
            assert torch.allclose(module(x), torch.nn.functional.linear(x, module.weight), rtol=1e-3, atol=1e-1)


WIDTH, COLUMNS = 64, 8
SIZES = (1, 2, 4, 7, 8, 16, 32, 48)


def chain(x: torch.Tensor, w: torch.Tensor, backwards: bool = False) -> torch.Tensor:
    total = torch.zeros(x.shape[0], w.shape[1])
    for k in reversed(range(WIDTH)) if backwards else range(WIDTH):
        total += x[:, k : k + 1].float() * w[k].float()
    return total


def certify_toy(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dtype: torch.dtype) -> Tiles:
    """A certificate for a library that computes `product`."""

    def case(seed: int) -> Case:
        w = order_revealing(COLUMNS, WIDTH, dtype, seed, negate=False).t()
        x = order_revealing(max(SIZES), WIDTH, dtype, seed, negate=True)
        return (lambda tile: product(tile, w)), (x,)

    return prove("toy", [case(1), case(2)], SIZES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *at_length(torch.float32, torch.float16)])
def test_another_order_at_one_row_count_is_rejected(dtype: torch.dtype) -> None:
    """Another order shows even after rounding to 8 bits, and even if a single column of a single row count has it; a
    library with one order keeps all of its row counts, so that invariance costs nothing where it is given."""

    def library(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        out = chain(x, w)
        if x.shape[0] in (7, 32):
            out[:, 3] = chain(x, w, backwards=True)[:, 3]
        return out

    assert certify_toy(library, dtype).rejected == (7, 32)
    tiles = certify_toy(chain, dtype)
    assert (tiles.base, tiles.sizes, tiles.rejected) == (16, tuple(sorted({*SIZES, 16})), ())


def test_a_tile_that_minds_the_place_is_no_base() -> None:
    """A base tile whose last row has another order is passed over, and with every base so there is no certificate; nor
    is there one where all is NaN, which is equal everywhere and proves nothing."""

    def library(bad: set[int]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            out = chain(x, w)
            if x.shape[0] in bad:
                out[-1] = chain(x, w, backwards=True)[-1]
            return out

        return product

    tiles = certify_toy(library({16, 32}), torch.float32)
    assert (tiles.base, tiles.rejected) == (64, (16, 32))
    for nothing in (library({12, 16, 24, 48, 64}), lambda x, w: chain(x, w) * float("nan")):
        with pytest.raises(NotInvariantError, match="independent of a row's place"):
            certify_toy(nothing, torch.float32)


def tiles_of(sizes: tuple[int, ...]) -> Tiles:
    return Tiles("toy", sizes[0], sizes, ())


def test_a_plan_uses_certified_sizes_and_covers_the_rows() -> None:
    """No row count that was not certified is ever called, no row is left out, and only the last call is padded; each
    has the alignment and layout that were certified, and no value changes."""
    for sizes in ((16,), (1, 16, 64), (4, 8, 12, 100), (1,)):
        for rows in range(1, 300):
            plan = tiles_of(sizes).plan(rows).sizes
            assert set(plan) <= set(sizes)
            assert sum(plan) >= rows > sum(plan) - plan[-1]
    tiles = tiles_of((4, 16))
    seen = []

    def call(x: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous()
        assert x.data_ptr() % 64 == 0
        seen.append(x.shape[0])
        return x * 2.0

    for rows in (1, 4, 5, 16, 21, 40):
        for width in (5, 16, 33):
            x = torch.rand(rows + 1, width)[1:]  # misaligned, unless a row is a multiple of 64 bytes
            assert torch.equal(tiles.apply((x,), call), x * 2.0)
    assert set(seen) == {4, 16}


def test_the_next_process_finds_what_was_proven(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Read from the file, with no proof run and the same sizes; numbers that cannot be sizes are proven anew."""
    kept = Certificates({"device": "cpu"}, tmp_path)
    monkeypatch.setattr(cpu_tiles, "certificates", lambda device: kept)
    monkeypatch.setattr(cpu_tiles, "KNOWN", {})
    monkeypatch.setattr(cpu_tiles, "use_kept", True)
    weight = torch.rand(48, 40)
    first = cpu.tiles_of(weight)
    monkeypatch.setattr(cpu_tiles, "KNOWN", {})  # as another process
    kept = Certificates({"device": "cpu"}, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "prove", None)  # called, it would raise
        again = cpu.tiles_of(torch.rand(48, 40))
        assert all(getattr(again, name) == getattr(first, name) for name in ("what", "base", "sizes", "rejected"))
        assert again.plan(37).sizes
        with pytest.raises(TypeError):
            cpu.tiles_of(torch.rand(40, 48).T)  # another layout was not proven
    assert [(c.member, c.holds) for c in kept.all()] == [("tiles", True)]
    for numbers in ({}, {"base": [16], "sizes": [1, 2]}, {"base": [1], "sizes": [1, 0]}):
        proof = Certificate(member="tiles", key="k", holds=True, evidence="", proven="", numbers=numbers)
        assert cpu_tiles.restored("toy", proof) is None


MODULES = pytest.mark.parametrize("module", [split_k_cpu, pytest.param(split_k_cuda, marks=pytest.mark.slow)])


def split_operands(module, m=4, k=700, n=40, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    device = DEVICE if module is split_k_cuda else "cpu"
    rng = inputs.generator(0, device)
    return inputs.make("wide", (m, k), dtype, device, rng), inputs.make("bell", (k, n), dtype, device, rng)


def test_a_drawn_order_changes_bits_from_call_to_call() -> None:
    """Eight parts in an order drawn afresh give several results; two parts give one, since a sum of two commutes."""
    a, b = split_operands(split_k_cpu)
    with listen() as heard:
        split_k_cpu.split_k(a, b, splits=4, ordered=False)
    assert any("standing for atomics" in name for name in heard)
    eight = {split_k_cpu.split_k(a, b, splits=8, ordered=False).numpy().tobytes() for _ in range(20)}
    two = {split_k_cpu.split_k(a, b, splits=2, ordered=False).numpy().tobytes() for _ in range(20)}
    assert len(eight) > 1
    assert len(two) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_workers_nor_the_batch_change_fixed_chunks(dtype: torch.dtype) -> None:
    """Real threads, any number of them, and any number of rows: the same bits."""
    a, b = split_operands(split_k_cpu, 9, 1500, 20, dtype)
    whole = split_k_cpu.fixed_chunk(a, b, workers=1)
    for workers in (2, 3, 64):
        assert identical(split_k_cpu.fixed_chunk(a, b, workers=workers), whole)
    assert identical(split_k_cpu.fixed_chunk(a[4:5], b, workers=2), whole[4:5])
    if dtype == torch.float32:
        assert not identical(split_k_cpu.fixed_chunk(a, b, workers=1, chunk=100), whole)


@pytest.mark.slow
def test_fixed_chunks_of_triton_do_not_depend_on_workers() -> None:
    """One worker adding in registers or many leaving chunks to an ordered sum: the same bits. Other chunks: not."""
    a, b = split_operands(split_k_cuda)
    alone = split_k_cuda.fixed_chunk(a, b, workers=1, chunk=128)
    for workers in (3, 100):
        assert identical(split_k_cuda.fixed_chunk(a, b, workers=workers, chunk=128), alone)
    assert not identical(split_k_cuda.fixed_chunk(a, b, workers=1, chunk=64), alone)
    by_column = b.T.contiguous().T  # as a linear layer has it
    assert identical(split_k_cuda.fixed_chunk(a, by_column, workers=2, chunk=128), alone)
    # equal cuts are one order of reduction, and one part is the serial chain
    four = split_k_cuda.split_k(a[:, :512], b[:512], splits=4, ordered=True)
    assert identical(four, split_k_cuda.fixed_chunk(a[:, :512], b[:512], workers=2, chunk=128))
    for ordered in (True, False):
        assert identical(split_k_cuda.split_k(a, b, splits=1, ordered=ordered), matmul(a, b))


@MODULES
@pytest.mark.parametrize("dtype", [torch.float32, *at_length(torch.float16)])
def test_both_are_within_the_accuracy_bound(module: ModuleType, dtype: torch.dtype) -> None:
    """However K is cut, with tails in every direction, nothing is lost or counted twice."""
    a, b = split_operands(module, 3, 257, 33, dtype)
    results = [module.split_k(a, b, splits=s, ordered=o) for s in (1, 3, 40) for o in (True, False)]
    results += [module.fixed_chunk(a, b, workers=w, chunk=c) for w, c in ((1, 64), (2, 30), (9, 1000))]
    for out in results:
        assert out.dtype == dtype
        assert error_against(out, reference.matmul(a, b)).relative_norm <= accuracy_bound(dtype, 257)


@MODULES
def test_misuse_is_refused(module: ModuleType) -> None:
    a, b = split_operands(module, 3, 8, 4)
    for call, given, how, words in (
        (module.split_k, (a, b), {"splits": 0, "ordered": True}, "splits of at least 1, got 0"),
        (module.fixed_chunk, (a, b), {"workers": 1, "chunk": 0}, "chunk of at least 1"),
        (module.split_k, (a, a), {"splits": 1, "ordered": True}, "takes"),
        (module.fixed_chunk, (a.double(), b.double()), {"workers": 1}, "float64"),
    ):
        with pytest.raises(NotImplementedError if words == "float64" else ValueError, match=words):
            call(*given, **how)
    assert module.split_k(a[:0], b, splits=2, ordered=True).shape == (0, 4)
    assert not module.split_k(a[:, :0], b[:0], splits=3, ordered=True).any()
