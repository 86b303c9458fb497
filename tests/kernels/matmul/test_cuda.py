"""The dispatcher of class "chain": right for every layout, and never a member without standing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nondet.core import compare
from nondet.core.certificates import Certificates
from nondet.core.launch import listen
from nondet.kernels import reference
from nondet.kernels.matmul import cublaslt
from nondet.kernels.matmul import cuda as matmul_choice
from nondet.kernels.matmul import triton_kernels as triton_matmul
from nondet.kernels.matmul.cuda import Member, bmm, forget, linear, matmul, member, mm, prove
from tests.build import DEVICE, accuracy_bound, bell, error

DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    forget()
    yield
    forget()


@pytest.fixture
def book(monkeypatch: pytest.MonkeyPatch) -> Certificates:
    """Certificates in memory, empty."""
    found = Certificates({"device": "test"}, None)
    monkeypatch.setattr(matmul_choice, "certificates", lambda: found)
    return found


@pytest.fixture
def steered(monkeypatch: pytest.MonkeyPatch, book: Certificates) -> dict[str, object]:
    """The dispatcher as it is on a GPU, with two members made up: "right" and "wrong", asked for in the order given."""
    state: dict[str, object] = {"names": ["right"], "capturing": False, "launched": []}

    def chosen(*unused: object) -> list[str]:
        names = state["names"]
        assert isinstance(names, list)
        return names

    def made_up(choice: str, a: torch.Tensor, b: torch.Tensor, bias: object = None, **options: object) -> Member | None:
        if choice == triton_matmul.anchor(a.dtype).name:
            return member(choice, a, b, bias)  # type: ignore[arg-type] # a tensor or None
        if choice == "absent":
            return None
        (batch, m, _), n = a.shape, b.shape[2]

        def launch(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
            assert isinstance(state["launched"], list)
            state["launched"].append(choice)
            flat = out.view(batch, m, n)
            weight = b.view(-1, b.shape[-1])
            left = a.reshape(batch, m, -1)
            right = weight.T[None] if weight.shape[0] == n else b.reshape(batch, -1, n)
            tile = triton_matmul.anchor(a.dtype)
            triton_matmul.bind_chain(left, right, bias, tile)(left, right, bias, flat)
            if choice == "wrong":
                flat[0, 0, 0] += 1.0

        return Member("cublaslt", f"key of {choice}", choice, launch, False)

    monkeypatch.setattr(matmul_choice, "INTERPRETED", False)
    monkeypatch.setattr(matmul_choice, "choices", chosen)
    monkeypatch.setattr(matmul_choice, "member", made_up)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    return state


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k", "n"), [(1, 64, 32), (5, 130, 33), (17, 63, 65), (70, 1, 1), (130, 65, 40)])
def test_products_are_within_the_accuracy_bound(dtype, m, k, n):
    """Tails of M, N and K are neither lost nor read twice, with and without a bias, in one product and in several."""
    a, b, bias = bell(m, k, dtype=dtype), bell(k, n, dtype=dtype, seed=1), bell(n, dtype=dtype, seed=2)
    bound = accuracy_bound(dtype, k + 1)
    assert error(matmul(a, b), reference.matmul(a, b)) <= bound
    assert error(mm(a, b, bias), reference.linear(a, b.T, bias)) <= bound
    assert error(linear(a, b.T.contiguous(), bias), reference.linear(a, b.T, bias)) <= bound
    stacked = bell(2, k, n, dtype=dtype, seed=3)
    both = torch.stack((a, a.flip(0)))
    assert error(bmm(both, stacked), reference.matmul(both, stacked)) <= bound


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
    """No rows, no columns or nothing to sum are answers: the bias, or zeros."""
    assert matmul(bell(0, 8), bell(8, 4)).shape == (0, 4)
    assert matmul(bell(4, 8), bell(8, 0)).shape == (4, 0)
    assert not matmul(bell(4, 0), bell(0, 3)).any()
    bias = bell(3)
    assert compare.identical(linear(bell(2, 0), bell(3, 0), bias), bias.expand(2, 3).contiguous())
    assert linear(bell(2, 0, 8), bell(4, 8)).shape == (2, 0, 4)
    assert linear(bell(8), bell(4, 8)).shape == (4,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bits_do_not_depend_on_the_batch(chained_dot, dtype):
    """Every M and every place give a row the same bits; a row's own numbers do change them."""
    x, weight = bell(70, 50, dtype=dtype), bell(30, 50, dtype=dtype, seed=1)
    whole = linear(x, weight)
    for m in (1, 16, 17, 40):
        assert compare.identical(linear(x[:m], weight), whole[:m])
        assert compare.identical(linear(x[-m:], weight), whole[-m:])
    assert not compare.identical(linear(x.flip(1), weight.flip(1)), whole)


@pytest.mark.skipif(DEVICE == "cuda", reason="steers the dispatcher on the interpreter")
def test_first_use_proves_and_later_uses_do_not(steered, book):
    """A member runs once its bits are proven, which happens once; then it is one look-up away."""
    x, weight = bell(5, 24), bell(8, 24, seed=1)
    with listen() as notes:
        out = linear(x, weight)
    assert error(out, reference.linear(x, weight)) < 1e-6
    assert notes == {"right": 1}
    assert book.standing("cublaslt", "key of right") is True
    proofs = len(steered["launched"]) - 1
    assert proofs == len(matmul_choice._PROOFS)
    linear(x, weight)
    assert len(steered["launched"]) == proofs + 2


@pytest.mark.skipif(DEVICE == "cuda", reason="steers the dispatcher on the interpreter")
def test_a_member_with_other_bits_is_excluded(steered, book):
    """One element that differs in a proof keeps a member out for good, and the next one is taken."""
    steered["names"] = ["absent", "wrong", "right"]
    x, weight = bell(5, 24), bell(8, 24, seed=1)
    with listen() as notes:
        linear(x, weight)
    assert notes == {"right": 1}
    assert [(c.key, c.holds) for c in book.all()] == [("key of right", True), ("key of wrong", False)]
    assert "1 of 40 elements differ" in book.excluded()[0].evidence
    forget()
    steered["launched"] = []
    linear(x, weight)
    assert steered["launched"] == ["right"]


@pytest.mark.skipif(DEVICE == "cuda", reason="steers the dispatcher on the interpreter")
def test_nothing_unproven_runs_while_a_graph_is_captured(steered, book):
    """Unknown under capture means the anchor, for this capture only; what is proven is used there too."""
    x, weight = bell(5, 24), bell(8, 24, seed=1)
    steered["capturing"] = True
    with listen() as notes:
        linear(x, weight)
    assert list(notes) == [f"matmul_chain[{triton_matmul.anchor(x.dtype)}]"]
    assert steered["launched"] == []
    assert book.all() == []
    steered["capturing"] = False
    with listen() as notes:
        linear(x, weight)
    assert list(notes) == ["right"]
    forget()
    steered["capturing"] = True
    with listen() as notes:
        linear(x, weight)
    assert list(notes) == ["right"]


@pytest.mark.skipif(DEVICE == "cuda", reason="steers the dispatcher on the interpreter")
def test_without_memory_for_a_proof_nothing_is_concluded(steered, book, monkeypatch):
    """A proof that does not fit neither holds nor excludes: the anchor runs, and the next call asks again."""
    x, weight = bell(5, 24), bell(8, 24, seed=1)

    def full(*unused: object, **also: object) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(matmul_choice, "_hard", full)
        with listen() as notes:
            linear(x, weight)
        assert list(notes) == [f"matmul_chain[{triton_matmul.anchor(x.dtype)}]"]
        assert book.all() == []
    with listen() as notes:
        linear(x, weight)
    assert list(notes) == ["right"]


@pytest.mark.skipif(DEVICE == "cuda", reason="steers the dispatcher on the interpreter")
def test_operands_that_overlap_go_to_the_anchor(steered, book):
    """An expanded row has no place for a proof's inputs: nothing is proven, and the anchor computes it."""
    x, weight = bell(1, 24).expand(5, 24), bell(8, 24, seed=1)
    with listen() as notes:
        linear(x, weight)
    assert list(notes) == [f"matmul_chain[{triton_matmul.anchor(x.dtype)}]"]
    assert steered["launched"] == []


def test_proof_inputs_keep_shape_and_strides():
    """A library chooses by layout, so a proof must run on the very layout; and its sums must cancel exactly."""
    like = bell(40, 64, dtype=torch.float16).T[None]
    left = matmul_choice._hard(like, "order", negate=True)
    assert (left.shape, left.stride()) == (like.shape, like.stride())
    right = matmul_choice._hard(bell(1, 30, 40, dtype=torch.float16), "order", negate=False).mT
    assert not (left.double() @ right.double()).any()
    assert (left.float() @ right.float()).any()


@pytest.mark.skipif(DEVICE == "cuda", reason="a small proof, for the interpreter")
def test_a_tile_is_proven_at_the_very_problem(chained_dot, book, monkeypatch):
    """Shape, strides and bias of the proof are those of the product; another tile order is excluded there."""
    a, b, bias = bell(1, 70, 5).mT, bell(1, 70, 9, seed=1), bell(9, seed=2)
    assert a.stride(2) != 1
    seen: list[tuple[object, ...]] = []
    right = matmul_choice.bind_chain

    def watched(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, tile: object, **also: object) -> object:
        launch = right(a, b, bias, tile, **also)  # type: ignore[arg-type] # handed on

        def noted(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
            seen.append((a.shape, a.stride(), b.shape, b.stride(), bias is not None))
            if tile == triton_matmul.anchor(a.dtype) or str(tile) == "16x64x32":
                launch(a, b, bias, out)
                return
            first, second = matmul(a[:, :, :35], b[:, :35]), matmul(a[:, :, 35:], b[:, 35:])
            out.copy_(first + second + bias)

        return noted

    monkeypatch.setattr(matmul_choice, "bind_chain", watched)
    good, split = (member(name, a, b, bias) for name in ("16x64x32w4s3", "32x64x32w4s3"))
    assert good is not None
    assert split is not None
    assert matmul_choice.stands(good, a, b, bias) is True
    assert set(seen) == {(a.shape, a.stride(), b.shape, b.stride(), True)}
    assert matmul_choice.stands(split, a, b, bias) is False
    assert [(c.member, c.holds) for c in book.all()] == [("triton 16x64x32w4s3", True), ("triton 32x64x32w4s3", False)]
    assert {c.key for c in book.all()} == {good.key}
    assert "float32[1,5,70]/0,1,5@16" in good.key


def test_proof_inputs_have_the_alignment_asked_for():
    """16 bytes and no more, where that is what the operands have."""
    like = bell(1, 4, 16)
    assert matmul_choice._hard(like, "order", negate=True, alignment=16).data_ptr() % 64 == 16
    assert matmul_choice._hard(like, "order", negate=True, alignment=256).data_ptr() % 64 == 0


def test_a_wrong_library_call_is_no_proof_and_no_exclusion(book):
    """A member that fails to run is out for this process, with its words, and does not stop the work."""

    def fail(*unused: object) -> None:
        raise cublaslt.BlasError("status 7")

    a, b = bell(1, 4, 16), bell(1, 16, 8, seed=1)
    assert prove([Member("bad", "k", "bad", fail, False)], a, b) == [None]
    assert book.all() == []
    assert "status 7" in book.aside()["bad", "k"]
    assert matmul_choice.stands(Member("bad", "k", "bad", fail, False), a, b) is False


def test_tf32_is_a_class_that_is_asked_for():
    """float32 products are IEEE unless torch is told otherwise; half precision has no such class."""
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        assert matmul_choice.class_of(torch.float32) == "chain"
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert matmul_choice.class_of(torch.float32) == "chain-tf32"
        assert matmul_choice.class_of(torch.bfloat16) == "chain"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_without_a_graph_break(backend):
    """Under torch.compile the products are operators of their own, with the eager bits."""

    def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return matmul(linear(x, weight, bias).relu(), weight)

    x, weight, bias = bell(6, 16), bell(8, 16, seed=1), bell(8, seed=2)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    assert compare.identical(compiled(x, weight, bias), layer(x, weight, bias))


def test_fake_tensors_get_the_right_shapes():
    """Tracing needs shapes and dtypes and must not run a kernel."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, weight = torch.empty(2, 3, 8, dtype=torch.float16), torch.empty(5, 8, dtype=torch.float16)
        out = torch.ops.nondet.linear(x, weight)
        assert (out.shape, out.dtype) == ((2, 3, 5), torch.float16)
        assert torch.ops.nondet.matmul(x, x.mT).shape == (2, 3, 3)


def test_refuses_what_it_has_no_kernel_for():
    """An unsupported dtype or shape is an error with its name, never another implementation."""
    with pytest.raises(NotImplementedError, match="int32"):
        matmul(bell(2, 2).int(), bell(2, 2).int())
    with pytest.raises(ValueError, match="takes"):
        matmul(bell(2, 3), bell(2, 3))
    with pytest.raises(ValueError, match="bias"):
        linear(bell(2, 3), bell(4, 3), bell(3))
    with pytest.raises(ValueError, match="tile"):
        member("16 by 16", bell(1, 2, 2), bell(1, 2, 2))


def test_tables_that_come_along_name_members_that_exist():
    """A committed table that names no member, or has a gap, would be found by users."""
    folder = Path(matmul_choice.__file__).parent / "tables"
    paths = list(folder.glob("*.json"))
    assert paths
    for path in paths:
        table = matmul_choice.read(path)
        assert table.rows
        assert path.stem == matmul_choice.slug(table.gpu)
        for row in table.rows:
            for name in (row.choice, row.triton):
                kind, _, rest = name.rpartition(":")
                assert kind in ("", "tma", "hopper", "cublaslt")
                assert rest.isdigit() if kind == "cublaslt" else triton_matmul.tile_named(rest)
            assert not row.triton.startswith("cublaslt")
