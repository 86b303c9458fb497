"""`batch_invariant()`: what it reaches, what it leaves, how it comes and goes, and a whole model under it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nondet.core.certificates import Certificates
from nondet.core.compare import identical
from nondet.errors import UnknownNameError, UserError
from nondet.kernels.dispatch import block as blocks
from nondet.kernels.dispatch import functions
from nondet.kernels.dispatch.block import batch_invariant
from nondet.kernels.dispatch.operators import CERTIFIABLE, COMPUTES, FAMILIES, OPERATORS, variants
from tests.build import rand


@pytest.fixture
def entered() -> Iterator[None]:
    """Blocks in another one are entered sooner."""
    with batch_invariant([]):
        yield


def attend(**how: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(*[rand(1, 2, 4, 8)] * 3, **how)


MODES = [torch.no_grad, torch.inference_mode, torch.enable_grad]
# what a model calls -> the operator that must have been replaced
CALLS: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "F.linear": (lambda: F.linear(rand(2, 3, 32), rand(16, 32)), "linear"),
    "F.linear with bias": (lambda: F.linear(rand(2, 3, 32), rand(16, 32), rand(16)), "linear"),
    "matmul": (lambda: rand(4, 5, 32) @ rand(32, 16), "mm"),
    "batched matmul": (lambda: rand(2, 4, 5, 32) @ rand(2, 4, 32, 6), "bmm"),
    "einsum": (lambda: torch.einsum("bij,bkj->bik", rand(2, 5, 32), rand(2, 7, 32)), "bmm"),
    "addmm": (lambda: torch.addmm(rand(5, 16), rand(5, 32), rand(32, 16), beta=0.5, alpha=2.0), "addmm"),
    "addmm in place": (lambda: rand(5, 16).addmm_(rand(5, 32), rand(32, 16)), "addmm_"),
    "baddbmm": (lambda: torch.baddbmm(rand(2, 1, 6), rand(2, 5, 32), rand(2, 32, 6)), "baddbmm"),
    "addmv": (lambda: torch.addmv(rand(5), rand(5, 32), rand(32)), "addmv"),
    "dot": (lambda: torch.dot(rand(32), rand(32)), "dot"),
    "mm into out": (lambda: torch.mm(rand(5, 32), rand(32, 16), out=rand(5, 16)), "mm.out"),
    "bmm into out": (lambda: torch.bmm(rand(2, 5, 32), rand(2, 32, 6), out=rand(2, 5, 6)), "bmm.out"),
    "sum into out": (lambda: torch.sum(rand(5, 32), -1, out=rand(5)), "sum.IntList_out"),
    "mean into out": (lambda: torch.mean(rand(5, 32), -1, out=rand(5)), "mean.out"),
    "logsumexp": (lambda: torch.logsumexp(rand(3, 5, 32), (0, 2)), "logsumexp"),
    "matrix times vector": (lambda: rand(5, 32) @ rand(32), "mv"),
    "attention": (lambda: attend(is_causal=True), "scaled_dot_product_attention"),
    "mean": (lambda: rand(3, 5, 32).pow(2).mean(-1, keepdim=True), "mean.dim"),
    "F.rms_norm": (lambda: F.rms_norm(rand(5, 32), (32,), rand(32), 1e-6), "rms_norm"),
    "F.layer_norm": (lambda: F.layer_norm(rand(5, 32), (32,), rand(32), rand(32)), "native_layer_norm"),
    "softmax": (lambda: torch.softmax(rand(5, 32), -1), "_softmax"),
    "softmax over the first axis": (lambda: torch.softmax(rand(5, 32), 0), "_softmax"),
    "log_softmax": (lambda: F.log_softmax(rand(5, 32), -1), "_log_softmax"),
    "sum": (lambda: rand(5, 32).sum(-1), "sum.dim_IntList"),
    "sum over two axes": (lambda: rand(3, 5, 32).sum((0, 2), keepdim=True), "sum.dim_IntList"),
    "silu": (lambda: F.silu(rand(5, 33)), "silu"),
}


@pytest.mark.usefixtures("entered")
@pytest.mark.parametrize(
    ("device", "mode"),
    [
        *(("cpu", mode) for mode in MODES),
        pytest.param("interpreter", torch.no_grad, marks=pytest.mark.slow),
        *(pytest.param("cuda", mode, marks=pytest.mark.gpu) for mode in MODES),
    ],
)
def test_what_a_model_calls_is_replaced(device: str, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whatever name it is called and in whatever grad mode: replaced, counted, and of the same value and layout. The
    Triton kernels in their interpreter, too: all arguments have to map onto them."""
    if device == "interpreter":
        if torch.cuda.is_available():
            pytest.skip("the GPU's kernels themselves are asked")
        triton_kernels = blocks.kernels_for("cuda")
        monkeypatch.setattr(blocks, "kernels_for", lambda device: triton_kernels)
    elif device == "cuda":
        monkeypatch.setitem(globals(), "rand", lambda *shape, plain=rand: plain(*shape).cuda())
    most = 1e-4 if device == "cuda" else 1e-5
    calls = {name: call for name, call in CALLS.items() if name != "silu" or device == "cpu"}  # torch's own on a GPU
    with mode():
        right = {name: function() for name, (function, _) in calls.items()}
    for name, (function, operator) in calls.items():
        with mode(), batch_invariant() as block:
            got = function()
        stock = right[name]
        assert block.coverage().replaced[operator] >= 1, name
        assert not block.coverage().left or device == "cuda", name
        assert (got.shape, got.dtype, got.device) == (stock.shape, stock.dtype, stock.device), name
        torch.testing.assert_close(got, stock, rtol=most, atol=most)


def test_blocks_nest() -> None:
    """The inner block adds its families, leaving it takes only those away, and each counts what ran inside it."""

    def both() -> None:
        F.linear(rand(3, 4), rand(5, 4))
        rand(3, 4).sum(-1)

    with torch.no_grad(), batch_invariant(["reduction"]) as outer:
        with batch_invariant() as middle:
            with batch_invariant(["matmul"]) as inner:
                both()
            both()
        both()
    counts = [block.coverage().replaced for block in (outer, middle, inner)]
    assert [(found["sum.dim_IntList"], found["linear"]) for found in counts] == [(3, 2), (2, 2), (1, 1)]
    assert outer.coverage().at_risk["mm float32"] == 1


def test_a_block_is_entered_once_at_a_time() -> None:
    """And again later; an unknown family is refused with the name that was meant."""
    with pytest.raises(UnknownNameError, match=r"'matmull'.*matmul"):
        batch_invariant(["matmull"])
    block = batch_invariant(["matmul"])
    for _ in range(2):
        with block:
            with pytest.raises(UserError, match="entered already"):
                block.__enter__()
            F.linear(rand(3, 4), rand(5, 4))
    F.linear(rand(3, 4), rand(5, 4))
    assert block.coverage().replaced["linear"] == 2


@pytest.mark.usefixtures("entered")
def test_one_family_leaves_the_others_stock() -> None:
    """A subset replaces its own operators and no other, and the others are counted as at risk: an ablation."""
    called = {name for _, name in CALLS.values()}
    for family in FAMILIES:
        with torch.no_grad(), batch_invariant([family]) as block:
            for function, _ in CALLS.values():
                function()
        own = {form for name, replacement in OPERATORS[family].items() for form in variants(name, replacement)}
        assert called & own <= set(block.coverage().replaced) <= own, family
        # what linear is made of is counted in its place
        assert called - own - {"linear"} <= {name.split()[0] for name in block.coverage().at_risk}, family


MASKED = "scaled_dot_product_attention float32: a mask of holes, a window or a bias"
BARE = "rms_norm float32: not over one axis with a weight and an eps"
LEFT: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "float64": (lambda: rand(3, 4).double() @ rand(4, 5).double(), "mm float64"),
    "all elements": (lambda: rand(3, 4).mean(), "mean.dim float32: over all elements"),
    "dropout": (lambda: attend(dropout_p=1.0), "scaled_dot_product_attention float32: dropout"),
    "a bias as mask": (lambda: attend(attn_mask=rand(1, 1, 4, 4)), MASKED),
    "a mask's one column for all keys": (lambda: attend(attn_mask=rand(1, 1, 4, 1) < 9), MASKED),
    "rms_norm without a weight": (lambda: F.rms_norm(rand(3, 4), (4,)), BARE),
    "rms_norm without an eps": (lambda: F.rms_norm(rand(3, 4), (4,), rand(4)), BARE),
    "a scalar's places": (
        lambda: torch.zeros(()).index_add(0, torch.tensor([0]), torch.tensor(1.0)),
        "index_add float32: a scalar",
    ),
}


@pytest.mark.usefixtures("entered")
def test_what_a_kernel_cannot_take_is_left_and_said() -> None:
    """It goes to the original kernel, bit for bit, and the coverage names operator, dtype and reason."""
    for case, (function, words) in LEFT.items():
        # the original of a composed operator is composed of others: leave those stock, to compare
        family = next(f for f, operators in OPERATORS.items() if words.split()[0] in operators)
        with torch.no_grad():
            stock = function()
            with batch_invariant([family]) as block:
                got = function()
        assert block.coverage().left[words] == 1, case
        if not case.startswith("rms_norm"):  # its mean is of the same family
            assert identical(got, stock), case


def test_operators_without_a_kernel_are_counted() -> None:
    """What adds and has no invariant kernel is not passed over in silence; what is exact is."""
    with torch.no_grad(), batch_invariant() as block:
        rand(5, 4).scatter_add(0, torch.zeros(3, 4, dtype=torch.int64), rand(3, 4))
        torch.zeros(5, dtype=torch.int64).scatter_add(0, torch.zeros(3, dtype=torch.int64), torch.ones(3).long())
        rand(5, 4).put_(torch.tensor([0, 0]), rand(2), accumulate=True)
        rand(5, 4).put_(torch.tensor([0, 1]), rand(2))
        rand(5, 4).index_put_((torch.tensor([0, 1]),), rand(2, 4))
        torch.arange(5).cumsum(0)
        torch.ones(3, 4, dtype=torch.int64).sum(-1)
        torch.ones(3, 4, dtype=torch.bool).sum(-1)
        rand(5, 4).argmax(-1)
    assert block.coverage().at_risk == {"put_ float32": 1}
    assert "at risk: put_ float32 (1 calls)" in block.coverage().lines()
    assert block.coverage().replaced == {"scatter_add": 1}
    assert not block.coverage().left


def test_stock_is_left_where_it_is_proven(kept: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running sum gives each row its own bits and is left as certified; one that depends on the batch is at risk."""
    monkeypatch.setattr(functions, "certificates", lambda device: kept)
    with torch.no_grad(), batch_invariant() as block:
        got = rand(6, 40).cumsum(-1)
        monkeypatch.setattr(functions, "_tuple", lambda out: (out + out.shape[0],))  # "depends on the batch"
        rand(7, 40).cumsum(-1)
        rand(6, 40).cumsum(-1)  # proven before: not computed again
    assert identical(got, rand(6, 40).cumsum(-1))
    assert {c.evidence for c in kept.all()} == {
        "6 rows in the batch and alone: equal bits", "7 rows in the batch and alone: row 0 differs"
    }  # fmt: skip
    assert block.coverage().certified == {"cumsum float32: each row as alone": 2}
    assert block.coverage().at_risk == {"cumsum float32: a row's bits are not those that it has alone": 1}


@pytest.mark.usefixtures("entered")
def test_certificates_take_every_operator(kept: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the last axis and another, each of these finds its axis, and its proof runs."""
    monkeypatch.setattr(functions, "certificates", lambda device: kept)
    calls: dict[str, Callable[[torch.Tensor, int], Any]] = {
        "linalg_vector_norm": lambda x, d: torch.linalg.vector_norm(x, dim=d),
        "_logcumsumexp": torch.logcumsumexp,
        "sort.stable": lambda x, d: torch.sort(x, dim=d, stable=True),
    }
    for name in CERTIFIABLE:
        call = calls.get(name, lambda x, d, name=name: getattr(torch, name.partition(".")[0])(x, d))
        for dim in (-1, 1):
            with torch.no_grad(), batch_invariant() as block:
                call(rand(3, 5, 9), dim)
            said = [*block.coverage().certified, *block.coverage().at_risk]
            assert [what.partition(":")[0] for what in said] == [f"{name} float32"]
            assert "several axes" not in said[0]


def test_every_operator_and_key_exists_in_this_torch() -> None:
    """A name that torch does not know would be passed over, and the operator would stay stock unseen."""
    known = set(torch._C._dispatch_get_all_op_names())
    replaced = [v for operators in OPERATORS.values() for n, r in operators.items() for v in variants(n, r)]
    assert all((COMPUTES, CERTIFIABLE, replaced))
    newer = {"_foreach_mm"} if torch.__version__.startswith("2.11") else set()  # 2.11 does not have it yet
    for name in {*COMPUTES, *CERTIFIABLE, *replaced} - newer:
        assert f"aten::{name}" in known, name
    # torch refuses unknown dispatch keys with an error: on a GPU that was every first enter of a block
    for key in (*blocks._FORMS["CPU"], *blocks._FORMS["CUDA"]):
        torch._C._dispatch_key_parse(key)
    with pytest.raises(RuntimeError, match="could not parse"):
        torch._C._dispatch_key_parse("MkldnnCUDA")


def test_a_model_imported_inside_of_a_block_has_its_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the next block, nothing of it at risk, though as many modules are there as before; what looks for such modules
    is gone with the block."""
    name = "transformers.models.qwen2.modeling_qwen2"
    importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "goes", sys)
    with torch.no_grad(), batch_invariant():
        before = len(sys.modules)
        monkeypatch.delitem(sys.modules, "goes")
        module = importlib.import_module(name)
        assert len(sys.modules) == before
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
        config = module.Qwen2Config(**sizes, num_key_value_heads=2, vocab_size=99, attn_implementation="eager")
        model = module.Qwen2ForCausalLM(config).eval()
        with batch_invariant() as block:
            model(torch.arange(1, 20)[None])
    lines = block.coverage().lines()
    assert any("transformers eager attention" in line for line in lines), lines
    assert not any("at risk:" in line for line in lines), lines
    assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("nondet.")]
