"""The dispatcher of class "chain": right for every layout, and never a member without standing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.tune import write
from nondet.core import compare, inputs
from nondet.core.certificates import Certificates
from nondet.core.launch import listen
from nondet.kernels import reference
from nondet.kernels.matmul import cuda as choice
from nondet.kernels.matmul import triton_kernels as triton_matmul
from nondet.kernels.matmul.cublaslt import Problem, problem_of
from nondet.kernels.matmul.cuda import Member, Operands, Row, Table, choices, linear, matmul, member, mm, rule
from nondet.kernels.matmul.triton_kernels import anchor, tile_named
from tests.build import DEVICE, accuracy_bound, bell, error
from tests.kernels.tiers import at_length, captured

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
    """Tails of M, N and K are neither lost nor read twice, with and without a bias, in one product and in several."""
    a, b, bias = bell(m, k, dtype=dtype), bell(k, n, dtype=dtype, seed=1), bell(n, dtype=dtype, seed=2)
    bound = accuracy_bound(dtype, k + 1)
    assert error(matmul(a, b), reference.matmul(a, b)) <= bound
    assert error(mm(a, b, bias), reference.linear(a, b.T, bias)) <= bound
    assert error(linear(a, b.T.contiguous(), bias), reference.linear(a, b.T, bias)) <= bound
    stacked = bell(2, k, n, dtype=dtype, seed=3)
    both = torch.stack((a, a.flip(0)))
    assert error(choice.bmm(both, stacked), reference.matmul(both, stacked)) <= bound


def test_layouts_do_not_change_bits(chained_dot):
    """Transposed, sliced, expanded and misaligned operands give the bits of their contiguous copies."""
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


def test_empty_sizes():
    assert matmul(bell(0, 8), bell(8, 4)).shape == (0, 4)
    assert matmul(bell(4, 8), bell(8, 0)).shape == (4, 0)
    assert not matmul(bell(4, 0), bell(0, 3)).any()
    bias = bell(3)
    assert compare.identical(linear(bell(2, 0), bell(3, 0), bias), bias.expand(2, 3).contiguous())
    assert linear(bell(2, 0, 8), bell(4, 8)).shape == (2, 0, 4)
    assert linear(bell(8), bell(4, 8)).shape == (4,)


@pytest.mark.parametrize("dtype", [torch.float32, *at_length(torch.float16)])
def test_bits_do_not_depend_on_the_batch(chained_dot, dtype):
    """Every M and every place give a row the same bits; a row's own numbers do change them."""
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


def test_refuses_what_it_has_no_kernel_for():
    for operator, given, words in (
        (matmul, (bell(2, 2).int(), bell(2, 2).int()), "int32"),
        (matmul, (bell(2, 2), bell(2, 2).half()), "float16"),
        (matmul, (bell(2, 3), bell(2, 3)), "takes"),
        (linear, (bell(2, 3), bell(4, 3), bell(3)), "bias"),
        (member, ("16 by 16", Operands(bell(1, 2, 2), bell(1, 2, 2))), "tile"),
    ):
        with pytest.raises(NotImplementedError if words == "int32" else ValueError, match=words):
            operator(*given)


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


def test_the_rule_ends_with_a_tile():
    """The last resort needs no library, no TMA and no certificate of a shape."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for m in (1, 16, 17, 100, 257, 5000):
            assert tile_named(rule(m, 4096, 4096, dtype)[-1])


def half(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.float16)


def problem(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> Problem:
    return problem_of(a, b, bias, False)


def test_layouts_are_told_apart():
    """The library chooses by layout, so a proof for one must not be taken for another's."""
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


def test_sizes_of_one_have_a_valid_distance():
    """A stride over an axis of size 1 means nothing, and the library refuses a distance below the row's length."""
    row = half(5, 64)[2:3, :][None]
    column = half(64, 5)[:, 2:3][None]
    for a, b in ((row, column), (row.expand(1, 1, 64), half(1, 64, 3)), (half(1, 3, 1), half(1, 1, 7))):
        found = problem(a, b)
        assert found.lda >= (found.k if found.a_rows else found.m)
        assert found.ldb >= (found.n if found.b_rows else found.k)


def test_what_the_library_cannot_take_is_no_problem():
    """Strided both ways, overlapping, empty, or another dtype: left to Triton, not copied and not miscomputed."""
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
def test_a_captured_graph_replays_the_same_bits():
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


@pytest.mark.gpu
def test_inductor_runs_the_same_member():
    """The default compiler keeps the operator whole, and its bits."""
    x, weight = bell(24, 1024, dtype=torch.bfloat16), bell(512, 1024, dtype=torch.bfloat16, seed=1)
    compiled = torch.compile(lambda x, weight: linear(x, weight) * 2, fullgraph=True)
    assert compare.identical(compiled(x, weight), linear(x, weight) * 2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_odd_sizes_batches_and_offsets(dtype):
    tile = anchor(dtype)
    for m, k, n in ((3, 1001, 77), (33, 1024, 515), (257, 130, 9)):
        a, b = bell(m, k, dtype=dtype), bell(k, n, dtype=dtype, seed=1)
        assert compare.identical(matmul(a, b), triton_matmul.matmul_chain(a[None], b[None], tile=tile)[0])
    wide = bell(8, 1025, dtype=dtype)
    weight = bell(64, 1024, dtype=dtype, seed=1)
    assert compare.identical(linear(wide[:, 1:], weight), linear(wide[:, 1:].contiguous(), weight))
    a, b = bell(4, 24, 256, dtype=dtype), bell(4, 64, 256, dtype=dtype, seed=1)
    assert compare.identical(choice.bmm(a, b.mT), triton_matmul.matmul_chain(a, b.mT, tile=tile))
