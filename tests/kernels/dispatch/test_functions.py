"""What torch computes or refuses, the block computes or refuses, too: empty tensors, misfits, gradients, layouts."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from nondet.core.certificates import Certificates
from nondet.core.compare import error_against, identical
from nondet.core.inputs import generator, make
from nondet.kernels import reference
from nondet.kernels.dispatch import functions
from nondet.kernels.dispatch.block import batch_invariant
from nondet.kernels.dispatch.state import guarded, kernels_for
from nondet.kernels.experts import cpu as ordered_scatter
from tests.build import DEVICE, accuracy_bound, rand
from tests.kernels.tiers import at_length, exposed, tiny

pytestmark = pytest.mark.usefixtures("held")
EMPTY: dict[str, Callable[[], Any]] = {
    "mm without rows": lambda: torch.mm(rand(0, 4), rand(4, 3)),
    "mm without a depth": lambda: torch.mm(rand(2, 0), rand(0, 3)),
    "bmm without batches": lambda: torch.bmm(rand(0, 2, 4), rand(0, 4, 3)),
    "bmm without a depth": lambda: torch.bmm(rand(2, 2, 0), rand(2, 0, 3)),
    "linear without rows": lambda: F.linear(rand(0, 4), rand(3, 4), rand(3)),
    "linear without outputs": lambda: F.linear(rand(2, 4), rand(0, 4)),
    "addmm without a depth": lambda: torch.addmm(rand(3), rand(2, 0), rand(0, 3)),
    "mv without rows": lambda: torch.mv(rand(0, 4), rand(4)),
    "dot of nothing": lambda: torch.dot(rand(0), rand(0)),
    "sum of nothing": lambda: rand(3, 0).sum(-1),
    "mean of nothing": lambda: rand(3, 0).mean(-1),
    "sum without rows": lambda: rand(0, 3).sum(-1),
    "sum over no rows": lambda: rand(0, 3).sum(0),
    "softmax without rows": lambda: torch.softmax(rand(0, 3), -1),
    "softmax of nothing": lambda: torch.softmax(rand(3, 0), -1),
    "log_softmax of nothing": lambda: torch.log_softmax(rand(3, 0), -1),
    "logsumexp of nothing": lambda: torch.logsumexp(rand(3, 0), -1),
    "rms_norm without rows": lambda: F.rms_norm(rand(0, 4), (4,), rand(4), 1e-6),
    "layer_norm without rows": lambda: F.layer_norm(rand(0, 4), (4,)),
    "attention without queries": lambda: F.scaled_dot_product_attention(rand(1, 2, 0, 8), *[rand(1, 2, 3, 8)] * 2),
    "attention without requests": lambda: F.scaled_dot_product_attention(*[rand(0, 2, 3, 8)] * 3),
    "silu of nothing": lambda: F.silu(rand(0, 3)),
    "topk of no rows": lambda: torch.topk(rand(0, 5), 2),
    "index_add of nothing": lambda: rand(3, 2).index_add(0, torch.zeros(0, dtype=torch.int64), rand(0, 2)),
    "cumsum of nothing": lambda: rand(3, 0).cumsum(-1),
}


def test_empty_tensors_are_torchs() -> None:
    with torch.no_grad():
        stock = {case: call() for case, call in EMPTY.items()}
        with batch_invariant():
            got = {case: call() for case, call in EMPTY.items()}
    for case in EMPTY:
        for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (stock[case], got[case])), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), case
            assert identical(a, b), case


WRONG: dict[str, Callable[[], Any]] = {
    "mm of columns": lambda: torch.mm(rand(2, 1), rand(2, 1)),
    "mm of a vector": lambda: torch.mm(rand(4), rand(4, 3)),
    "bmm of other batches": lambda: torch.bmm(rand(2, 3, 1), rand(3, 1, 3)),
    "bmm of columns": lambda: torch.bmm(rand(2, 3, 1), rand(2, 2, 1)),
    "addmm with a bias that fits nowhere": lambda: torch.addmm(rand(5, 2, 3), rand(2, 4), rand(4, 3)),
    "mv of a misfit": lambda: torch.mv(rand(2, 1), rand(3)),
    "linear of a misfit": lambda: F.linear(rand(2, 1), rand(3, 4)),
    "linear with a bias of one": lambda: F.linear(rand(2, 4), rand(3, 4), rand(2)),
    "attention of other heads": lambda: F.scaled_dot_product_attention(rand(1, 4, 3, 8), *[rand(1, 2, 3, 8)] * 2),
    "softmax of no axis": lambda: torch.softmax(rand(2, 3), 2),
    "sum of no axis": lambda: rand(2, 3).sum(5),
    "sum of an axis twice": lambda: rand(2, 3).sum((1, 1)),
    "rms_norm of another width": lambda: F.rms_norm(rand(2, 4), (3,), rand(3), 1e-6),
    "softplus of integers": lambda: F.softplus(torch.arange(4)),
    "layer_norm of another width": lambda: F.layer_norm(rand(2, 4), (3,)),
    "layer_norm with a weight of one": lambda: F.layer_norm(rand(2, 4), (4,), rand(1)),
    "index_add_ beyond the end": lambda: torch.zeros(3, 2).index_add_(0, torch.tensor([7]), torch.ones(1, 2)),
}


def test_torchs_own_errors_are_kept() -> None:
    """What torch refuses is refused inside, with torch's type and words; nobody is warned of a fault of ours."""

    def errors() -> dict[str, tuple[type[BaseException], str]]:
        raised = {}
        for case, call in WRONG.items():
            with pytest.raises((RuntimeError, IndexError)) as error:
                call()
            raised[case] = error.type, str(error.value)
        return raised

    stock = errors()
    with batch_invariant(), warnings.catch_warnings(action="error", category=RuntimeWarning):
        assert errors() == stock
    x, weight = rand(5, 77), rand(77)
    with torch.no_grad(), batch_invariant():
        for dtype in (torch.float64, torch.bfloat16, torch.complex64):
            for given in ((weight.to(dtype), weight), (weight, weight.to(dtype)), (weight.to(dtype), None)):
                with pytest.raises(RuntimeError, match="scalar type"):
                    F.layer_norm(x, (77,), *given)
            F.layer_norm(x, (77,), weight, weight)
        half = x.bfloat16()
        assert identical(F.layer_norm(half, (77,), weight, weight), F.layer_norm(half, (77,), weight, weight))


@pytest.mark.parametrize("training", [False, True])
def test_forward_gradients_run_on_stock(training: bool) -> None:
    """jvp of an operator that is replaced as a whole: the whole has none, so its parts run, and the call is counted."""
    x, tangent = rand(3, 8), rand(8, 3).t().contiguous()

    def norm(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (8,), torch.ones(8), 1e-6)

    stock = torch.func.jvp(norm, (x,), (tangent,))
    with batch_invariant(training=training) as block:
        got = torch.func.jvp(norm, (x,), (tangent,))
    torch.testing.assert_close(got, stock)
    assert not block.coverage().replaced["rms_norm"]
    assert any("a forward gradient" in what for what in block.coverage().left)


def test_a_fault_of_ours_is_said_and_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernel fails where torch's does not: left, with the error's words, and one warning, not one for each call."""
    kernels = kernels_for("cpu")

    class SlipError(ValueError):
        """A type that nobody was warned of before."""

    def broken(*args: Any) -> torch.Tensor:
        raise SlipError("a slip of ours")

    for name in ("softmax", "linear"):
        getattr(kernels, name)  # set, so that it can be put back
        monkeypatch.setitem(vars(kernels), name, broken)
    x = rand(3, 83)  # as wide as nothing before: a call like an earlier one asks no kernel of ours again
    with torch.no_grad(), batch_invariant() as block:
        with pytest.warns(RuntimeWarning, match="_softmax was left to torch.*a slip of ours"):
            assert torch.equal(torch.softmax(x, -1).sum(-1).round(), torch.ones(3))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.softmax(x, -1)
        with pytest.warns(RuntimeWarning, match="linear"):
            F.linear(x, x)
    assert block.coverage().left == {
        "_softmax float32: SlipError in our kernel: a slip of ours": 2,
        "linear float32: SlipError in our kernel: a slip of ours": 1,
    }


def test_a_number_in_the_place_of_a_tensor_is_torchs() -> None:
    """Of a watched operator: stock's bits and dtypes, and the call is at risk as it is with tensors."""
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        x = (rand(7, 5).abs() * 8 + 1).to(dtype)

        def computed(x: torch.Tensor = x) -> list[torch.Tensor]:
            return [x % 0.3, x % 300, x // 2.5, 2.5**x, torch.xlogy(x, 0.7)]

        stock = computed()
        with torch.no_grad(), batch_invariant() as block:
            got = computed()
        for mine, right in zip(got, stock, strict=True):
            assert mine.dtype == right.dtype
            assert identical(mine, right), dtype
        assert len(block.coverage().at_risk) >= 3, dtype


def test_what_is_trained_can_be_added_in_place() -> None:
    x, weight = rand(1, 2, 5, 16), rand(16, 16)
    added = rand(16).requires_grad_()
    with batch_invariant():
        for call in (lambda: F.linear(x, weight), lambda: F.scaled_dot_product_attention(x, x, x)):
            out = call()
            out += added
            (gradient,) = torch.autograd.grad(out.sum(), added)
            assert gradient.tolist() == [10.0] * 16


def test_numbers_that_are_to_be_read_negated() -> None:
    """As the imaginary part of a conjugate is: composed operators are met before torch negates them."""
    calls: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
        "linear": (F.linear, (rand(2, 3, 77), rand(48, 77), rand(48))),
        "rms_norm": (lambda x, w: F.rms_norm(x, (77,), w, 1e-6), (rand(2, 77), rand(77))),
        "attention": (lambda q, k: F.scaled_dot_product_attention(q, k, k), (rand(2, 4, 1, 32), rand(2, 4, 70, 32))),
    }
    for name, (call, operands) in calls.items():
        for place, given in enumerate(operands):
            negated, plain = list(operands), list(operands)
            plain[place] = -given
            for negated[place] in (torch._neg_view(given), torch.complex(given, given).conj().imag):
                assert negated[place].is_neg()
                with (torch.inference_mode if place else torch.no_grad)(), batch_invariant() as block:
                    right = call(*plain)
                    assert identical(call(*negated), right), name
                    assert not identical(call(*operands), right), name
                assert not block.coverage().left, name


@pytest.mark.filterwarnings("ignore::UserWarning")  # such layouts are in beta
def test_a_layout_without_plain_memory_is_left_to_torch() -> None:
    """Also where a plain call of these shapes was before; nobody is warned of a fault of ours."""
    operands, layouts = [rand(5, 77), rand(48, 77)], (torch.Tensor.to_sparse, torch.Tensor.to_mkldnn)
    for layout, place in ((layouts[0], 0), (layouts[0], 1), (layouts[1], 0), (torch.Tensor.to_sparse_csr, 1)):
        unusual = [layout(x) if i == place else x for i, x in enumerate(operands)]

        def made(unusual: list[torch.Tensor] = unusual) -> torch.Tensor | None:
            try:
                return F.linear(*unusual)
            except RuntimeError:  # torch has none
                return None

        with torch.no_grad(), warnings.catch_warnings(action="error", category=RuntimeWarning):
            right = made()
            with batch_invariant() as block:
                F.linear(*operands)
                for got in (made(), made()):
                    assert getattr(got, "layout", None) == getattr(right, "layout", None)
                    if right is not None:
                        assert torch.allclose(got.to_dense(), right.to_dense(), atol=1e-4)  # stock's, in parts
        assert block.coverage().replaced["linear"] == 1


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: rand(4, 6, 33).transpose(0, 1),
    "permuted": lambda: rand(4, 6, 33).permute(2, 0, 1),
    "every second": lambda: rand(4, 6, 33)[:, ::2],
    "expanded": lambda: rand(1, 6, 33).expand(3, 6, 33),
    "every second column": lambda: rand(4, 6, 33)[..., ::2],
    "channels last": lambda: rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
}


def test_strides_are_torchs() -> None:
    """What a caller may view or hand to C: a root's, a norm's with and without a gradient, a softmax's."""
    for layout, made in LAYOUTS.items():
        x, given, width = made(), made().requires_grad_(), made().shape[-1]

        def computed(x: torch.Tensor = x, given: torch.Tensor = given, width: int = width) -> list[torch.Tensor]:
            norms = [F.layer_norm(one, (width,), torch.ones(width)) for one in (x, given)]
            return [x.rsqrt(), *norms, torch.softmax(x, -1), F.silu(x)]

        stock = computed()
        with batch_invariant() as block:
            ours = computed()
        assert [(y.shape, y.stride()) for y in ours] == [(y.shape, y.stride()) for y in stock], layout
        torch.testing.assert_close(ours[-1], stock[-1])
        assert block.coverage().replaced.total() == len(ours)


def test_strides_are_those_of_the_proof(kept: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row with gaps is proven with gaps, under a key that says so, with the settings; a dense one is another key."""
    monkeypatch.setattr(functions, "certificates", lambda device: kept)
    strides: list[tuple[int, ...]] = []
    honest = torch.Tensor.copy_

    def copied(self: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        strides.append(self.stride())
        return honest(self, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    x = torch.rand(6, 512)[:, ::2]
    for operand in (x, x.contiguous()):
        assert guarded(functions.proven)("cumsum", (operand, -1), {})[0]
    assert strides == [(512, 2), (256, 1)]
    assert ["/512,2@" in c.key for c in kept.all()] == [False, True]
    assert all("float32=" in c.key for c in kept.all())
    # expanded rows share their places in memory and are at risk; no rows at all need no proof
    assert not functions.proven("cumsum", (torch.rand(1, 8).expand(4, 8), -1), {})[0]
    assert functions.proven("cumsum", (torch.rand(0, 8), -1), {})[0]


def case(dtype: torch.dtype, kind: str = "bell") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = generator(10, DEVICE)
    target = make("bell", (40, 6), dtype, DEVICE, rng)
    index = torch.randint(0, 40, (999,), generator=rng, device=DEVICE)
    return target, index, make(kind, (999, 6), dtype, DEVICE, rng)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_values(dtype: torch.dtype) -> None:
    target, index, source = case(dtype)
    bound = accuracy_bound(dtype, 60)
    for where in (index, index.clamp_max(3), torch.full_like(index, 7)):
        got = ordered_scatter.index_add(target, where, source)
        assert got.dtype == dtype
        assert error_against(got, reference.index_add(target, where, source)).relative_norm <= bound
        flat = ordered_scatter.scatter_add(target[:, 0], where, source[:, 0])
        assert error_against(flat, reference.scatter_add(target[:, 0], where, source[:, 0])).relative_norm <= bound


def test_the_written_order() -> None:
    """scatter_add: neighbours first, pairs of pairs, the row last. index_add: onto the row, one after the other."""
    a, b, c, d, e = (torch.tensor([x]) for x in (1.0, 2.0**-24, 2.0**-24, 2.0**-24, -1.0))
    source, zeros = torch.cat([a, b, c, d, e]), torch.zeros(5, dtype=torch.int64)
    got = ordered_scatter.scatter_add(torch.full((1,), 0.5), zeros, source)
    assert got.item() == ((((a + b) + (c + d)) + e) + 0.5).item() == 0.5 + 2.0**-23
    got = ordered_scatter.index_add(torch.full((1, 1), 0.5), zeros, source[:, None])
    assert got.item() == (((((0.5 + a) + b) + c) + d) + e).item() == 0.5
    target, index, source = case(torch.float32)
    assert identical(ordered_scatter.index_add(target, index[:0], source[:0]), target)
    with pytest.raises(IndexError, match="target has 40 rows"):
        ordered_scatter.index_add(target, index + 1, source)
    with batch_invariant() as block:
        counts = torch.zeros(40, dtype=torch.int64).scatter_add(0, index, torch.ones_like(index))
        for wrong in (torch.full((4, 2), 3), torch.zeros(5, 2, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)):
            with pytest.raises((RuntimeError, IndexError)):
                torch.zeros(3, 2).scatter_add(0, wrong, torch.ones(4, 2))
    assert torch.equal(counts, torch.bincount(index, minlength=40))
    assert not block.coverage().left


@pytest.mark.parametrize(
    ("axis", "dtype"), [(0, torch.float32), (1, torch.bfloat16), *at_length((-1, torch.float32), (-1, torch.float64))]
)
def test_scatter_add_under_the_block(axis: int, dtype: torch.dtype) -> None:
    """Any axis, in place and with out=: each slice has the registry's bits, alone and beside others, nothing left."""
    rng = generator(11, DEVICE)
    target = make("bell", (5, 6, 7), dtype, DEVICE, rng)
    source = make("wide", (5, 6, 700), dtype, DEVICE, rng).movedim(2, axis)
    target = target.movedim(2, axis)
    index = torch.randint(0, 7, (5, 6, 600), generator=rng, device=DEVICE).movedim(2, axis)
    kept = source.narrow(axis, 0, 600)
    with torch.no_grad(), batch_invariant() as block:
        whole = torch.scatter_add(target, axis, index, source)
        assert identical(target.clone().scatter_add_(axis, index, source).contiguous(), whole.contiguous())
        assert identical(torch.scatter_add(target, axis, index, source, out=torch.empty_like(whole)), whole)
        few = [x[:2] if axis else x[:, :2] for x in (target, index, source, whole)]
        some = torch.scatter_add(few[0], axis, *few[1:3])
    assert identical(some.contiguous(), few[3].contiguous())
    rows = [x.movedim(axis, 2).flatten(0, 1) for x in (target, index, kept, whole)]
    for start, where, added, got in zip(*rows, strict=True):
        assert identical(ordered_scatter.scatter_add(start, where, added), got.contiguous())
    assert set(block.coverage().replaced) >= {"scatter_add", "scatter_add_", "scatter_add.out"}
    assert not exposed(block)


def at_risk(call: Callable[[], Any]) -> list[str]:
    with torch.no_grad(), batch_invariant() as block:
        call()
    return list(block.coverage().at_risk)


X = rand(3, 5, 8)
WHOLE, FIRST = "over the whole tensor, the batch's axis included", "over the first axis, which may be the batch's"
MIXES: dict[str, tuple[Callable[[], Any], str]] = {
    "one scale for the batch": (lambda: X.abs().amax(), f"amax float32: {WHOLE}"),
    "its axes by name": (lambda: X.abs().amax((0, 1, 2), keepdim=True), f"amax float32: {WHOLE}"),
    "max": (lambda: X.max(), f"max float32: {WHOLE}"),
    "min": (lambda: torch.min(X), f"min float32: {WHOLE}"),
    "aminmax": (lambda: torch.aminmax(X), f"aminmax float32: {WHOLE}"),
    "of a packed row": (lambda: X[:1].amax(), f"amax float32: {WHOLE}"),
    "of a packed row, as torchao asks": (lambda: X[:1].amax([1, 2], keepdim=True), f"amax float32: {WHOLE}"),
    "into out": (lambda: torch.amax(X, (0,), out=rand(5, 8)), f"amax.out float32: {FIRST}"),
    "a scale for each column": (lambda: X.amin(0), f"amin float32: {FIRST}"),
    "max.dim": (lambda: X.max(-3), f"max.dim float32: {FIRST}"),
    "mean": (lambda: X.mean((0, 1, 2)), f"mean float32: {WHOLE}"),
    "sum": (lambda: X.sum((0, 1)), f"sum float32: {FIRST}"),
    "an axis from behind": (lambda: X.sum(-3), f"sum float32: {FIRST}"),
    "sort": (lambda: X.sort(dim=0, stable=True), f"sort.stable float32: {FIRST}"),
    "softmax": (lambda: torch.softmax(X, 0), f"softmax float32: {FIRST}"),
    "logsumexp": (lambda: torch.logsumexp(X, 0), f"logsumexp float32: {FIRST}"),
    "var": (lambda: X.var(0), f"var.correction float32: {FIRST}"),
}


HARMLESS: dict[str, Callable[[], Any]] = {
    "a mask": lambda: ((X > 0).all(), (X > 0).any(0)),
    "positions": lambda: torch.arange(12).view(3, 4).max(),
    "each row's own": lambda: (X.amax(-1), X.abs().amax((1, 2)), X.max(1), X.sum(1), X.mean(-1), X.softmax(-1)),
    "each token's of a packed row": lambda: X[:1].amax([2]),
    "one row": lambda: (rand(1, 8).max(), rand(1, 1, 8).amax(), rand(8).max(), rand(1, 8).sum(0)),
    "counts": lambda: (torch.histc(X, 4, -1.0, 1.0), torch.bincount(torch.arange(4))),
    "a complex sum": lambda: torch.complex(X, X) + torch.complex(X, X),
    "a weight's scale": lambda: torch.nn.Parameter(X).amax(),
}


def test_a_reduction_over_the_batch_padding_in_front_and_hidden_scores_are_at_risk() -> None:
    """Exact or not, replaced or not: it hands each request the others' numbers, and the coverage says so in words. Not
    so truths, integers, rows by themselves and parameters."""
    for case, (call, words) in MIXES.items():
        assert at_risk(call) == [words], case
    for case, harmless in HARMLESS.items():
        assert at_risk(harmless) == [], case
    for case, (call, said) in SCANS.items():
        assert at_risk(call) == said, case
    scores = torch.randn(2, 4, 9, 9, generator=torch.Generator().manual_seed(1))
    for hides in (0.0, -1e4, -1e9, torch.finfo(torch.float32).min, -torch.inf):
        said = at_risk(lambda mask=hides: torch.softmax(scores + torch.where(torch.arange(9) > 6, mask, 0.0), -1))
        assert said == ["softmax float32: over scores of which some are hidden"] * bool(hides), hides


MOVED = "over places that padding in front moves"


def padded(rows: torch.Tensor, side: str, by: float = 0.0) -> torch.Tensor:
    """rows [T, H], the second of two requests, 3 places shorter than the first, in a batch [2, T, H]."""
    pad = torch.full((3, rows.shape[1]), by)
    short = torch.cat([pad, rows[3:]] if side == "left" else [rows[3:], pad])
    return torch.stack([rows, short])


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_sum_over_padded_places_is_named_where_its_bits_move(side: str) -> None:
    """Zeros in front move the chunks of a sum over a middle axis; zeros behind do not, and are not named."""
    rows = rand(70, 16)
    with torch.no_grad(), batch_invariant() as block:
        together = padded(rows, side).sum(1)[1]
        said = list(block.coverage().at_risk)
        alone = rows[None, 3:].sum(1)[0]
    assert identical(together, alone) == (side == "right")
    assert said == ([f"sum float32: {MOVED}"] if side == "left" else [])
    assert list(block.coverage().at_risk) == said, "alone nothing is padded"


def experts() -> torch.Tensor:
    chosen = torch.tensor([[0, 1], [0, 2], [1, 3], [2, 3], [1, 2], [0, 3]])[..., None]
    return rand(6, 4, 8) * torch.zeros(6, 4, 1).scatter(1, chosen, 1)


MOVES = [f"cumsum float32: {MOVED}"]
SCANS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "a chunked scan": (lambda: padded(rand(9, 4), "left", 0.3).mT.reshape(2, 4, 3, 3).cumsum(-1), MOVES),
    "padding of one chunk": (lambda: padded(rand(9, 4), "left").cumsum(-2), MOVES),
    "padding behind": (lambda: padded(rand(9, 4), "right", 0.3).cumsum(-2), []),
    "no padding": (lambda: rand(2, 9, 4).cumsum(1), []),
    "padding of both": (lambda: padded(rand(9, 4), "left")[1:].expand(2, 9, 4).clone().cumsum(1), []),
    "a request of zeros": (lambda: torch.stack([torch.zeros(9, 4), rand(9, 4)]).cumsum(1), []),
    "a causal mask": (lambda: (rand(2, 9, 9) * torch.ones(9, 9).tril(-1)).cumsum(-2), []),
    "experts": (lambda: experts().sum(1), []),
    "top-p": (lambda: torch.tensor([[0.5, 0.5, 0.0], [0.6, 0.3, 0.1]]).cumsum(-1), []),
}


_ORIGINAL = 16  # positions that the model was made for
_LONG = {"original_max_position_embeddings": _ORIGINAL, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
# rope type -> model type, its configuration, its rope's parameters
MODELS: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "longrope": ("phi3", {"max_position_embeddings": 64, "original_max_position_embeddings": _ORIGINAL}, _LONG),
    "dynamic": ("llama", {"max_position_embeddings": _ORIGINAL}, {"factor": 4.0}),
}


def logits_of_row_zero(kind: str, longest: int) -> tuple[bool, list[str]]:
    """A prompt of 7 tokens alone and beside one of `longest`: are its logits equal, and what the coverage says."""
    name, more, rope = MODELS[kind]
    rope = {"rope_type": kind, "rope_theta": 1e4} | rope
    model = tiny(name, num_hidden_layers=1, **more, rope_parameters=rope)
    ids, mask = torch.zeros(2, 2, longest, dtype=torch.long)
    ids[0, :7], mask[0, :7] = torch.arange(1, 8), 1
    ids[1], mask[1] = torch.arange(1, longest + 1), 1
    with torch.no_grad(), batch_invariant() as block:
        alone = model(input_ids=ids[:1, :7]).logits[0]
        beside = model(input_ids=ids, attention_mask=mask).logits[0, :7]
    coverage = block.coverage()
    return identical(alone, beside), [what for what in coverage.at_risk if kind in what]


@pytest.mark.parametrize("kind", MODELS)
def test_frequencies_of_the_longest_request_are_said(kind: str) -> None:
    """Beside a request beyond the original length bits differ, and the coverage names the embedding; else not."""
    said = f"transformers rotary embedding '{kind}': frequencies by the longest request of the step"
    assert logits_of_row_zero(kind, 40) == (False, [said])
    assert logits_of_row_zero(kind, _ORIGINAL - 2) == (True, [])


LENGTHS, WIDTH = (5, 23, 11), 37
PLACES = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT = {"n_embd": 64, "n_head": 4, "n_layer": 1, "n_positions": 64}
NEO = {"hidden_size": 64, "num_heads": 4, "num_layers": 2, "max_position_embeddings": 64, "window_size": 8}
NEO |= {"attention_types": [[["global", "local"], 1]]}
# model type -> (its class, its configuration)
WRITTEN_OUT: dict[str, tuple[str, dict[str, Any]]] = {
    "mpt": ("MptForCausalLM", {"d_model": 64, "n_heads": 4, "n_layers": 1, "max_seq_len": 64}),
    "gptj": ("GPTJForCausalLM", {**GPT, "rotary_dim": 8}),
    "gpt_neo": ("GPTNeoForCausalLM", NEO),
}


def run(name: str, model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits, each request's positions counted from its own first token."""
    places = {} if name == "mpt" else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}  # it has alibi
    logits: torch.Tensor = model(input_ids=ids, attention_mask=mask, **places).logits
    return logits


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((n, torch.float32) for n in WRITTEN_OUT), *at_length(*((n, torch.bfloat16) for n in WRITTEN_OUT))],
)
def test_padding_changes_no_bit_or_is_said_to(name: str, dtype: torch.dtype) -> None:
    """Prompts alone against a batch padded on either side: what is not equal is named by the batch's own coverage."""
    class_name, sizes = WRITTEN_OUT[name]
    cls = getattr(transformers, class_name)
    torch.manual_seed(0)
    model = cls(cls.config_class(**PLACES, **sizes)).to(dtype).eval()
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(5, 128, (length,), generator=generator) for length in LENGTHS]
    with torch.no_grad(), batch_invariant():
        alone = [run(name, model, p[None], torch.ones(1, len(p), dtype=torch.long))[0] for p in prompts]
        for side in ("right", "left"):
            ids, mask = torch.zeros(2, len(prompts), WIDTH, dtype=torch.long)
            for row, prompt in enumerate(prompts):
                place = slice(WIDTH - len(prompt), WIDTH) if side == "left" else slice(len(prompt))
                ids[row, place], mask[row, place] = prompt, 1
            with batch_invariant() as block:
                logits = run(name, model, ids, mask)
            coverage = block.coverage()
            assert coverage.replaced
            differ = [not identical(a, logits[i][mask[i].bool()]) for i, a in enumerate(alone)]
            said = [what for what in (*coverage.left, *coverage.at_risk) if "softmax" in what]
            assert said or not any(differ), f"{side}: requests {differ} have other bits, and nothing says so"
        together = run(name, model, torch.stack([prompts[0]] * 3), torch.ones(3, LENGTHS[0], dtype=torch.long))
        assert all(identical(row, alone[0]) for row in together), "without padding too, so this shows nothing of it"


def test_what_a_gradient_sums_over_the_batch_is_said() -> None:
    """ "replaced" promises a row's bits, and of a weight's gradient no more than that it repeats."""
    said = "; what gradients sum over the batch repeats, and follows micro-batches)"
    w, bias = rand(6, 8).requires_grad_(), rand(6).requires_grad_()
    with batch_invariant(training=True) as block:
        out = F.silu(F.rms_norm(F.linear(X, w, bias), (6,), rand(6).requires_grad_(), 1e-6))
        assert not any(line.endswith(said) for line in block.coverage().lines())
        out.backward(out.detach())
    lines = {line.split(" ")[1]: line for line in block.coverage().lines()}
    assert all(lines[name].endswith(said) for name in ("mm", "rms_norm_backward"))
    assert not any(lines[name].endswith(said) for name in ("silu", "silu_backward", "rms_norm"))
    assert {"mm", "rms_norm_backward"} <= block.coverage().summed.keys()
    assert "replaced: mm" in block.coverage().counts(), "a run file has the names alone"
    assert not block.coverage().at_risk, "sums over rows are what a gradient is"
