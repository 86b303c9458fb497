"""The dispatcher of class "chain": right for every layout, and never a member without standing."""

import functools
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.tune import write
from nondet.core import compare, inputs
from nondet.core.certificates import Certificates
from nondet.core.compare import identical
from nondet.core.launch import listen
from nondet.kernels import reference
from nondet.kernels.matmul import cuda as choice
from nondet.kernels.matmul import hopper
from nondet.kernels.matmul import triton_kernels as triton_matmul
from nondet.kernels.matmul.cublaslt import Problem, problem_of
from nondet.kernels.matmul.cuda import (
    Member,
    Operands,
    Row,
    Table,
    choices,
    linear,
    matmul,
    member,
    mm,
    proof_inputs,
    rule,
)
from nondet.kernels.matmul.gluon_kernels import barriers_of
from nondet.kernels.matmul.hopper import HOPPER_TILES, bind_hopper, hopper_takes
from nondet.kernels.matmul.triton_kernels import (
    TMA_TILES,
    Tile,
    anchor,
    bind_tma,
    matmul_chain,
    tile_named,
    tiles,
    tma_takes,
)
from tests.build import DEVICE, accuracy_bound, bell, error
from tests.kernels.tiers import at_length, captured, on_hopper, untouched

pytestmark = pytest.mark.slow
DTYPES = [torch.float32, *at_length(torch.float16, *[torch.bfloat16] * (DEVICE == "cuda"))]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    choice.forget()
    yield
    choice.forget()


@pytest.fixture
def book(monkeypatch: pytest.MonkeyPatch) -> Certificates:
    """Certificates in memory, empty."""
    found = Certificates({"device": "test"}, None)
    monkeypatch.setattr(choice, "certificates", lambda: found)
    return found


@pytest.fixture
def steered(monkeypatch: pytest.MonkeyPatch, book: Certificates) -> dict[str, Any]:
    """The dispatcher as it is on a GPU, with two members made up: "right" and "wrong", asked for in the order given."""
    state: dict[str, Any] = {"names": ["right"], "capturing": False, "launched": []}

    def made_up(name: str, given: Operands) -> Member | None:
        a, b = given[:2]
        if name == anchor(a.dtype).name:
            return member(name, given)
        if name == "absent":
            return None
        (batch, m, _), n = a.shape, b.shape[2]

        def launch(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
            state["launched"].append(name)
            flat = out.view(batch, m, n)
            weight = b.view(-1, b.shape[-1])
            left = a.reshape(batch, m, -1)
            right = weight.T[None] if weight.shape[0] == n else b.reshape(batch, -1, n)
            tile = anchor(a.dtype)
            triton_matmul.bind_chain(left, right, bias, tile)(left, right, bias, flat)
            if name == "wrong":
                flat[0, 0, 0] += 1.0

        return Member("cublaslt", f"key of {name}", name, launch, False)

    monkeypatch.setattr(choice, "INTERPRETED", False)
    monkeypatch.setattr(choice, "choices", lambda *unused: state["names"])
    monkeypatch.setattr(choice, "member", made_up)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    return state


steering = pytest.mark.skipif(DEVICE == "cuda", reason="steers the dispatcher on the interpreter")
BY_ANCHOR = f"matmul_chain[{anchor(torch.float32)}]"


def noted() -> list[str]:
    x, weight = bell(5, 24), bell(8, 24, seed=1)
    with listen() as notes:
        out = linear(x, weight)
    assert error(out, reference.linear(x, weight)) < 1e-6
    return list(notes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k", "n"), [(16, 64, 32), (17, 63, 65), *at_length((70, 1, 1), (130, 65, 40))])
def test_products_are_within_the_accuracy_bound(dtype, m, k, n):
    a, b, bias = bell(m, k, dtype=dtype), bell(k, n, dtype=dtype, seed=1), bell(n, dtype=dtype, seed=2)
    bound = accuracy_bound(dtype, k + 1)
    assert error(matmul(a, b), reference.matmul(a, b)) <= bound
    assert error(mm(a, b, bias), reference.linear(a, b.T, bias)) <= bound
    assert error(linear(a, b.T.contiguous(), bias), reference.linear(a, b.T, bias)) <= bound
    stacked = bell(2, k, n, dtype=dtype, seed=3)
    both = torch.stack((a, a.flip(0)))
    assert error(choice.bmm(both, stacked), reference.matmul(both, stacked)) <= bound


def test_layouts_do_not_change_bits(chained_dot):
    tall, wide = bell(90, 20), bell(60, 140, seed=1)
    pairs = [
        (tall[:40].T, wide.T[:40]),
        (tall[::3, :10], wide[:20:2, ::5]),
        (tall[:1, :20].expand(9, 20), wide[:20, :1].expand(20, 3)),
        (tall[:, 1:18], wide[3:20]),
    ]
    for a, b in pairs:
        assert compare.identical(matmul(a, b), matmul(a.contiguous(), b.contiguous()))
    x = bell(2, 6, 20)
    weight = bell(7, 20, seed=1)
    turned = linear(x.transpose(0, 1), weight)
    assert turned.shape == (6, 2, 7)
    assert compare.identical(turned.transpose(0, 1).contiguous(), linear(x, weight))
    assert not compare.identical(linear(x.flip(0), weight), linear(x, weight))
    gapped = bell(14, seed=2)[::2]
    assert compare.identical(linear(x, weight, gapped), linear(x, weight, gapped.contiguous()))


def test_empty_and_refused():
    assert matmul(bell(0, 8), bell(8, 4)).shape == (0, 4)
    assert matmul(bell(4, 8), bell(8, 0)).shape == (4, 0)
    assert not matmul(bell(4, 0), bell(0, 3)).any()
    bias = bell(3)
    assert compare.identical(linear(bell(2, 0), bell(3, 0), bias), bias.expand(2, 3).contiguous())
    assert linear(bell(2, 0, 8), bell(4, 8)).shape == (2, 0, 4)
    assert linear(bell(8), bell(4, 8)).shape == (4,)
    for operator, given, words in (
        (matmul, (bell(2, 2).int(), bell(2, 2).int()), "int32"),
        (matmul, (bell(2, 2), bell(2, 2).half()), "float16"),
        (matmul, (bell(2, 3), bell(2, 3)), "takes"),
        (linear, (bell(2, 3), bell(4, 3), bell(3)), "bias"),
        (member, ("16 by 16", Operands(bell(1, 2, 2), bell(1, 2, 2))), "tile"),
    ):
        with pytest.raises(NotImplementedError if words == "int32" else ValueError, match=words):
            operator(*given)


@pytest.mark.parametrize("dtype", [torch.float32, *at_length(torch.float16)])
def test_bits_do_not_depend_on_the_batch(chained_dot, dtype):
    x, weight = bell(70, 50, dtype=dtype), bell(30, 50, dtype=dtype, seed=1)
    whole = linear(x, weight)
    for m in (1, 16, 17, 40):
        assert compare.identical(linear(x[:m], weight), whole[:m])
        assert compare.identical(linear(x[-m:], weight), whole[-m:])
    assert not compare.identical(linear(x.flip(1), weight.flip(1)), whole)


@steering
def test_a_member_is_proven_at_its_first_use_and_taken_if_it_holds(steered, book):
    """Once; one element that differs keeps a member out for good, and the next one is taken. While a graph is captured
    nothing unproven runs: then the anchor, for this capture alone, as for an expanded row, which no proof can have."""
    with listen() as notes:
        linear(bell(1, 24).expand(5, 24), bell(8, 24, seed=1))
    steered["names"], steered["capturing"] = ["absent", "wrong", "right"], True
    assert noted() == [*notes] == [BY_ANCHOR]
    assert (steered["launched"], book.all()) == ([], [])
    steered["capturing"] = False
    assert noted() == ["right"]
    assert [(c.key, c.holds) for c in book.all()] == [("key of right", True), ("key of wrong", False)]
    assert "1 of 40 elements differ" in book.excluded()[0].evidence
    for steered["capturing"] in (False, True):
        choice.forget()
        for _ in range(2):
            steered["launched"] = []
            assert noted() == steered["launched"] == ["right"]


def test_proof_inputs_keep_shape_and_strides():
    """A library chooses by layout, so a proof must run on the very layout; and its sums must cancel exactly."""
    like = bell(40, 64, dtype=torch.float16).T[None]
    left = choice.hard_operand(like, "order", negate=True)
    assert (left.shape, left.stride()) == (like.shape, like.stride())
    right = choice.hard_operand(bell(1, 30, 40, dtype=torch.float16), "order", negate=False).mT
    assert not (left.double() @ right.double()).any()
    assert (left.float() @ right.float()).any()
    for alignment in (16, 256):  # and no more, where that is what the operands have
        made = choice.hard_operand(bell(1, 4, 16), "order", negate=True, alignment=alignment)
        assert made.data_ptr() % 64 == alignment % 64


@pytest.mark.skipif(DEVICE == "cuda", reason="a small proof, for the interpreter")
def test_a_tile_is_proven_at_the_very_problem(chained_dot, book, monkeypatch):
    """Shape, strides and bias of the proof are those of the product, and its key says them."""
    given = Operands(bell(1, 70, 5).mT, bell(1, 70, 9, seed=1), bell(9, seed=2))
    a, b, _ = given[:3]
    assert a.stride(2) != 1
    seen, right = [], choice.bind_chain

    def watched(*given, **also):
        launch = right(*given, **also)

        def noted(a, b, bias, out):
            seen.append((a.shape, a.stride(), b.shape, b.stride(), bias is not None))
            launch(a, b, bias, out)

        return noted

    monkeypatch.setattr(choice, "bind_chain", watched)
    assert choice.stands(member("16x64x32w4s3", given), given) is True
    assert set(seen) == {(a.shape, a.stride(), b.shape, b.stride(), True)}
    (proof,) = book.all()
    assert (proof.member, proof.holds) == ("triton 16x64x32w4s3", True)
    assert "float32[1,5,70]/0,1,5@16" in proof.key


def test_tf32_is_a_class_that_is_asked_for():
    """float32 products are IEEE unless torch is told otherwise; half precision has no such class."""
    before, found = torch.backends.cuda.matmul.fp32_precision, []
    for torch.backends.cuda.matmul.fp32_precision in ("ieee", "tf32", before):
        found += [choice.class_of(dtype) for dtype in (torch.float32, torch.bfloat16)]
    assert found[:4] == ["chain", "chain", "chain-tf32", "chain"]


@pytest.mark.parametrize("backend", ["aot_eager", *at_length("eager")])
def test_compiles_without_a_graph_break(backend):
    """Under torch.compile the products are operators of their own, with the eager bits."""

    def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        given = linear(x, weight, bias).relu()
        return matmul(given, given.mT) + matmul(given[0], weight).sum()

    x, weight, bias = bell(2, 6, 16), bell(8, 16, seed=1), bell(8, seed=2)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    assert compare.identical(compiled(x, weight, bias), layer(x, weight, bias))


def test_tables_that_come_along_name_members_that_exist():
    """A committed table that names no member, or has a gap, would be found by users."""
    folder = Path(choice.__file__).parent / "tables"
    paths = list(folder.glob("*.json"))
    assert paths
    for path in paths:
        table = choice.read(path)
        assert table.rows
        assert path.stem == choice.slug(table.gpu)
        for row in table.rows:
            for name in (row.choice, row.triton):
                kind, _, rest = name.rpartition(":")
                assert kind in ("", "tma", "hopper", "cublaslt")
                assert rest.isdigit() if kind == "cublaslt" else triton_matmul.tile_named(rest)
            assert not row.triton.startswith("cublaslt")
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for m in (1, 16, 17, 100, 257, 5000):
            assert tile_named(rule(m, 4096, 4096, dtype)[-1])


def test_a_table_is_read_as_it_was_written_and_a_broken_one_is_told_and_ignored(tmp_path, monkeypatch):
    """A rank means something at its own M alone; with a table that names no member inference goes on by the rule."""
    monkeypatch.setattr(choice, "user_folder", lambda: tmp_path)
    monkeypatch.setattr(choice.cublaslt, "version", lambda: 130100)
    row = Row("bfloat16", 64, 32, 16, "cublaslt:2", 5.0, "16x32x128w4s4", 6.0, 6.0)
    usual, path = rule(16, 32, 64, torch.bfloat16)[0], tmp_path / f"{choice.slug('A GPU 9000')}.json"
    broken = [({"choice": "fast"}, None), ({"triton": "tma:"}, None), ({"choice": None}, None), ({"m": "16"}, None)]
    for change, chosen in ({}, "cublaslt:2"), ({"m": 32}, "cublaslt:0"), *broken:
        table = Table("A GPU 9000", "2.11", "3.6", 130100, [row._replace(**change)])
        write(path, table)
        choice.forget()
        with nullcontext() if chosen else pytest.warns(UserWarning, match="ignored"):
            assert choices(1, 16, 32, 64, torch.bfloat16, table.gpu)[0] == (chosen or usual)
        assert chosen is None or choice.read(path) == table


def half(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.float16)


def problem(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> Problem:
    return problem_of(a, b, bias, False)


def test_a_problem_says_its_layout_or_is_none():
    """The library chooses by layout, so a proof for one is none for another; what it can't take is left to Triton."""
    x, weight, stacked = half(1, 8, 64), half(32, 64).T[None], half(3, 8, 64)
    for a, b, layout in (
        (x, weight, "nt"),
        (x, half(1, 64, 32), "nn"),
        (half(1, 64, 8).mT, half(1, 64, 32), "tn"),
        (half(1, 8, 96)[:, :, :64], weight, "nt a=96"),
        (stacked, half(3, 64, 32), "nn"),
        (stacked[::2], half(2, 64, 32), "nn a=64,1024"),
    ):
        assert problem(a, b).layout() == layout
    assert (problem(half(1, 8, 96)[:, :, :64], weight).lda, problem(x, weight).lda) == (96, 64)
    row = half(5, 64)[2:3, :][None]
    column = half(64, 5)[:, 2:3][None]
    for a, b in ((row, column), (row.expand(1, 1, 64), half(1, 64, 3)), (half(1, 3, 1), half(1, 1, 7))):
        found = problem(a, b)
        assert found.lda >= (found.k if found.a_rows else found.m)
        assert found.ldb >= (found.n if found.b_rows else found.k)
    x, weight = half(1, 8, 64), half(64, 32)[None]
    for a, b, bias in (
        (half(1, 8, 128)[:, :, ::2], weight, None),
        (half(1, 1, 64).expand(1, 8, 64), weight, None),
        (half(1, 0, 64), weight, None),
        (x.double(), weight.double(), None),
        (half(2, 8, 64), half(2, 64, 32), half(32)),
        (x, weight, half(64)[::2]),
    ):
        assert problem_of(a, b, bias, False) is None
    assert problem(x, weight, half(32)).bias


SHAPES = [(4096, 4096), (12288, 4096), (1024, 3072), (4096, 1024), (1000, 520)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_one_class_over_m_on_hard_inputs(dtype, k, n):
    rng = inputs.generator(5, DEVICE)
    x = inputs.make("wide", (300, k), dtype, DEVICE, rng)
    weight = inputs.make("outlier", (n, k), dtype, DEVICE, rng)
    bias = bell(n, dtype=dtype, seed=6)
    tile = anchor(dtype)
    whole = triton_matmul.matmul_chain(x[None], weight.T[None], tile=tile)[0]
    biased = triton_matmul.matmul_chain(x[None], weight.T[None], bias, tile=tile)[0]
    with listen() as notes:
        for m in (1, 2, 8, 16, 17, 64, 100, 128, 300):
            assert compare.identical(linear(x[:m], weight), whole[:m])
            assert compare.identical(linear(x[-m:], weight), whole[-m:])
            assert compare.identical(linear(x[:m], weight, bias), biased[:m])
            assert compare.identical(matmul(x[:m], weight.T.contiguous()), whole[:m])
    if dtype != torch.float32:
        assert any(note.startswith("cublaslt") for note in notes), "the library serves nothing"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_zero_that_underflow_leaves_has_one_sign_in_every_batch(dtype):
    """Triton's float32 chain left -0 where cuBLASLt leaves +0: which of them serves an M must not show."""
    for k, n in ((1024, 1024), (96, 128), (7, 64)):
        x, weight = inputs.product_operands("underflow", (300, k), (n, k), dtype, DEVICE, 3)
        whole = linear(x, weight)
        for m in (1, 5, 16, 17, 64, 200):
            assert compare.identical(linear(x[:m], weight), whole[:m])


@pytest.mark.gpu
def test_captured_and_compiled_the_same_member_runs():
    """A CUDA graph holds the certified member, also for a shape that was never seen outside of a capture."""
    x, weight = bell(40, 4096, dtype=torch.bfloat16), bell(4096, 4096, dtype=torch.bfloat16, seed=1)
    for rows in (x, x[:23]):
        for warm in (False, True):
            if warm:
                linear(rows, weight)
            else:
                triton_matmul.matmul_chain(rows[None], weight.T[None], tile=anchor(rows.dtype))
            graph, out = captured(linear, rows, weight)
            out.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert compare.identical(out, linear(rows, weight))
    x, weight = bell(24, 1024, dtype=torch.bfloat16), bell(512, 1024, dtype=torch.bfloat16, seed=1)
    compiled = torch.compile(lambda x, weight: linear(x, weight) * 2, fullgraph=True)
    assert compare.identical(compiled(x, weight), linear(x, weight) * 2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_odd_sizes_batches_offsets_and_every_tile(dtype):
    tile = anchor(dtype)
    for m, k, n in ((3, 1001, 77), (33, 1024, 515), (257, 130, 9)):
        a, b = bell(m, k, dtype=dtype), bell(k, n, dtype=dtype, seed=1)
        assert compare.identical(matmul(a, b), triton_matmul.matmul_chain(a[None], b[None], tile=tile)[0])
    wide = bell(8, 1025, dtype=dtype)
    weight = bell(64, 1024, dtype=dtype, seed=1)
    assert compare.identical(linear(wide[:, 1:], weight), linear(wide[:, 1:].contiguous(), weight))
    a, b = bell(4, 24, 256, dtype=dtype), bell(4, 64, 256, dtype=dtype, seed=1)
    assert compare.identical(choice.bmm(a, b.mT), triton_matmul.matmul_chain(a, b.mT, tile=tile))
    a, weight = bell(1, 300, 1032, dtype=dtype), bell(520, 1032, seed=1, dtype=dtype)
    for b in (weight.T[None], weight.T.contiguous()[None]):
        wanted = matmul_chain(a, b, tile=anchor(dtype))
        assert TMA_TILES
        for tile in TMA_TILES:
            assert identical(run(bind_tma, a, b, None, tile), wanted)


def by_chain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return matmul_chain(x[None], weight.T[None], bias)[0]


def test_bias_is_added_before_the_one_rounding():
    """2048 + 1 + 1 is 2050 in float16; rounding before the bias would give 2048, as two operators do."""
    x = torch.tensor([[2048.0, 1.0]], device=DEVICE, dtype=torch.float16)
    ones = torch.ones(1, 2, device=DEVICE, dtype=torch.float16)
    bias = torch.ones(1, device=DEVICE, dtype=torch.float16)
    assert by_chain(x, ones, bias).item() == 2050.0
    assert (by_chain(x, ones) + bias).item() == 2048.0
    a, b = bell(3, 5, 40), bell(3, 40, 9, seed=1)
    together = matmul_chain(a, b.mT.contiguous().mT)
    for i in range(3):
        assert identical(together[i], matmul_chain(a[i : i + 1], b[i : i + 1])[0])
    assert not identical(together[:1], matmul_chain(a[:1], b[1:2]))
    shared = matmul_chain(a, b[:1].expand(3, 40, 9))
    assert identical(shared[2:], matmul_chain(a[2:], b[:1]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", inputs.KINDS)
def test_bits_do_not_depend_on_tile_or_batch(dtype, kind):
    """All tiles, all M and every place give one row the same bits; another chunk of K would not."""
    rng = inputs.generator(3, DEVICE)
    x, weight = inputs.make(kind, (300, 4096), dtype, DEVICE, rng), inputs.make(kind, (520, 4096), dtype, DEVICE, rng)
    whole = by_chain(x, weight)
    for tile in tiles(dtype):
        assert identical(matmul_chain(x[None], weight.T[None], tile=tile)[0], whole)
    for m in (1, 2, 16, 17, 33, 64, 65, 129, 299):
        assert identical(by_chain(x[:m], weight), whole[:m])
        assert identical(by_chain(x[-m:], weight), whole[-m:])
    halves = by_chain(x[:, :2048], weight[:, :2048]).float() + by_chain(x[:, 2048:], weight[:, 2048:]).float()
    if (whole.isfinite() & (whole != 0)).any():  # else NaN, infinities, and zeros whose signs are the order's
        # integers are exact in float32 in every order: there the control must not differ
        assert identical(halves.to(dtype), whole) == (kind in (*inputs.EXACT, "underflow") and dtype == torch.float32)


@pytest.mark.gpu
def test_float32_is_one_chain_in_order():
    """2^24 absorbs each 1 added to it: a chain gives 2^24 forwards and 2^24 + 4095 backwards, a tree gives neither."""
    x = torch.ones(1, 4096, device=DEVICE)
    x[0, 0] = 2.0**24
    ones = torch.ones(1, 4096, device=DEVICE)
    assert by_chain(x, ones).item() == 2.0**24
    assert by_chain(x.flip(1), ones).item() == 2.0**24 + 4096


def test_steps_beyond_32_bits(chained_dot):
    """A tile's step along K, times a stride, may pass 2^31 elements: the second step has to land where it should."""
    far, depth = 2**27, 17
    room = untouched((depth - 1) * far + 8)
    a, b = bell(3, depth, dtype=torch.float16), bell(depth, 5, dtype=torch.float16, seed=1)
    tile = Tile(16, 16, 16, 4, 1)
    near = matmul_chain(a[None], b[None], tile=tile)
    wide = room.as_strided((3, depth), (1, far)).copy_(a)
    assert identical(matmul_chain(wide[None], b[None], tile=tile), near)
    tall = room.as_strided((depth, 5), (far, 1)).copy_(b)
    assert identical(matmul_chain(a[None], tall[None], tile=tile), near)


half_bell = functools.partial(bell, dtype=torch.float16)
brain = functools.partial(bell, dtype=torch.bfloat16)


def run(bind: Any, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, tile: Tile) -> torch.Tensor:
    out = torch.full((1, a.shape[1], b.shape[2]), torch.nan, dtype=a.dtype, device=a.device)
    bind(a, b, bias, tile)(a, b, bias, out)
    return out


@pytest.mark.parametrize("by_rows", [True, *at_length(False)])
def test_tails_layouts_and_bias(chained_dot, by_rows):
    """Sizes that fill no tile, either layout of b, a bias: within the bound, and the bits of the pointer kernel."""
    a, weight, bias = half_bell(1, 37, 72), half_bell(56, 72, seed=1), half_bell(56, seed=2)
    b = weight.T.contiguous()[None] if by_rows else weight.T[None]
    tile = Tile(64, 64, 32, 4, 2)
    for extra in (None, bias):
        out = run(bind_tma, a, b, extra, tile)
        exact = reference.linear(a[0], weight, extra)
        assert error(out[0], exact) <= accuracy_bound(torch.float16, 73)
        assert identical(out, matmul_chain(a, b, extra))
    assert not identical(run(bind_tma, a, b, bias, tile), run(bind_tma, a, b, None, tile))


def test_what_the_accelerator_and_a_multiprocessor_can_take():
    a, b = half_bell(1, 8, 64), half_bell(1, 64, 32)
    assert tma_takes(a, b)
    assert tma_takes(a, half_bell(32, 64).T[None])
    assert not tma_takes(a.float(), b.float())
    assert not tma_takes(half_bell(2, 8, 64), half_bell(2, 64, 32))
    assert not tma_takes(half_bell(1, 8, 65)[:, :, :64], b)
    assert not tma_takes(half_bell(1, 8, 72)[:, :, 1:65], b)
    assert not tma_takes(a[:, :0], b)
    assert all(hopper.tile_fits(tile) for tile in HOPPER_TILES)
    for tile in (
        Tile(64, 64, 256, 4, 8), Tile(128, 32, 256, 4, 2), Tile(16, 24, 256, 4, 4), Tile(16, 32, 96, 4, 4),
        Tile(16, 32, 256, 4, 4), Tile(4, 8, 256, 4, 4),
    ):  # fmt: skip
        assert not hopper.tile_fits(tile)
    if DEVICE == "cpu":
        assert not hopper_takes(torch.zeros(1, 8, 64).half(), torch.zeros(1, 64, 32).half(), HOPPER_TILES[0])


@on_hopper
@pytest.mark.parametrize(
    ("m", "k", "n", "dtype"),
    [
        (1, 4096, 1024, torch.bfloat16),
        (130, 14336, 1024, torch.bfloat16),
        (37, 1000, 777, torch.bfloat16),
        (37, 1000, 777, torch.float16),
    ],
)
def test_every_tile_for_few_rows_has_the_bits_of_the_class(m, k, n, dtype):
    """On inputs that show any other order, at sizes that fill no tile, there with a bias as well."""
    a, weight, bias = brain(1, m, k, dtype=dtype), brain(n, k, dtype=dtype), brain(n, dtype=dtype)
    cases = list(proof_inputs(Operands(a, weight.T[None], bias if n == 777 else None, alignment=256)))
    assert cases
    assert HOPPER_TILES
    for _, (left, right, added) in cases:
        wanted = matmul_chain(left, right, added, anchor(dtype))
        for tile in HOPPER_TILES:
            assert hopper_takes(left, right, tile)
            for _ in range(3):  # what lies behind the rows in shared memory differs from call to call
                assert identical(run(bind_hopper, left, right, added, tile), wanted)


@on_hopper
@pytest.mark.parametrize("captured", [False, True])
def test_an_early_start_reads_nothing_too_early(captured):
    """Products that start before the kernel ahead has ended: each reads what that one wrote, as x and as the weight, in
    a chain of 24 against the same chain with a wait after every kernel, 40 times."""
    m, width, depth = 8, 1024, 24
    tile = next(t for t in HOPPER_TILES if t.block_n < 32)
    pool = brain(depth, width, width) / 32
    x, weight = torch.empty_like(brain(1, m, width)), torch.empty_like(pool[0])
    between, out = torch.empty_like(x), torch.empty_like(x)
    launch = bind_hopper(x, weight.T[None], None, tile)

    def chain(wait: bool) -> None:
        """x through every weight twice, the second product right behind the first."""
        left = x
        for number in range(depth):
            weight.copy_(pool[number])
            for right, result in ((left, between), (between, out)):
                if wait:
                    torch.cuda.synchronize()
                launch(right, weight.T[None], None, result)
            left = out

    x.copy_(brain(1, m, width))
    chain(True)  # compiled here, not in a capture
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            chain(False)
    for turn in range(40):
        x.copy_(brain(1, m, width, seed=turn))
        chain(True)
        wanted = out.clone()
        out.fill_(torch.nan)
        if captured:
            graph.replay()
        else:
            chain(False)
        torch.cuda.synchronize()
        assert bool(wanted.isfinite().all())
        assert identical(out, wanted), turn


@on_hopper
def test_rows_that_are_not_there_do_not_reach_the_result():
    """The rows that wgmma computes beyond those brought in are never written, whatever they hold."""
    a, weight = brain(1, 17, 4096), brain(64, 4096)
    room = torch.full((40, 64), 7.0, dtype=a.dtype, device=DEVICE)
    bind_hopper(a, weight.T[None], None, HOPPER_TILES[0])(a, weight.T[None], None, room[:17])
    assert bool((room[17:] == 7.0).all())
    assert identical(room[None, :17], matmul_chain(a, weight.T[None]))
    tile = HOPPER_TILES[0]
    a, b = brain(1, 8, 64), brain(32, 64).T[None]
    assert hopper_takes(a, b, tile)
    assert not hopper_takes(a, b.contiguous(), tile)
    assert not hopper_takes(a.float(), b.float(), tile)
    assert not hopper_takes(brain(2, 8, 64), brain(2, 32, 64).mT, tile)
    assert not hopper_takes(brain(1, 8, 72)[:, :, 1:65], b, tile)
    bound = member(f"hopper:{tile.name}", Operands(a, b))
    assert not bound.is_anchor
    assert member(f"hopper:{tile.name}", Operands(a, b, tf32=True)) is None


def test_barriers_are_found_or_refused():
    """A kernel whose barriers can't be told from its text is never launched: it would wait for ever."""
    init = "add.s32 \t%r7, %r1, 1024;\n@%p1 mbarrier.init.shared::cta.b64 [%r7], 1;\n"
    second = "add.s32 \t%r8, %r1, 1040;\n@%p1 mbarrier.init.shared::cta.b64 [%r8], 4;\n"
    assert barriers_of(init + second, 4) == (1024, 1040)
    for text in ("", init, second + init, init + second.replace("1040", "%r2"), init + second.replace(", 4;", ", 1;")):
        with pytest.raises(RuntimeError, match="not recognised"):
            barriers_of(text, 4)
