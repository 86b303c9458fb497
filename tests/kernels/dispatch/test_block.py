"""`batch_invariant()`: what it reaches, what it leaves, how it comes and goes, and a whole model under it."""

import ast
import functools
import gc
import importlib
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import nondet
from nondet.core.certificates import Certificates
from nondet.core.compare import identical
from nondet.core.inputs import generator, order_revealing
from nondet.core.launch import listen
from nondet.errors import UnknownNameError, UserError
from nondet.kernels.dispatch import block, functions, state
from nondet.kernels.dispatch import block as blocks
from nondet.kernels.dispatch.again import BINDERS, Binder
from nondet.kernels.dispatch.block import Registration, batch_invariant
from nondet.kernels.dispatch.functions import call_key, replacing
from nondet.kernels.dispatch.operators import CERTIFIABLE, COMPUTES, FAMILIES, OPERATORS, variants
from nondet.kernels.dispatch.state import kernels_for
from nondet.kernels.matmul import cpu as cpu_matmul
from nondet.kernels.rows import cpu as cpu_rows
from tests.build import rand
from tests.kernels.tiers import at_length, in_full


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


def test_blocks_nest_and_each_is_entered_once_at_a_time() -> None:
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


@pytest.mark.usefixtures("entered")
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
    monkeypatch.undo()
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
    """In the next block, though there are as many modules; what looks for them goes with the block."""
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


X = torch.rand((8, 64), generator=torch.Generator().manual_seed(1)) * 2 - 1
W = torch.rand((24, 64), generator=torch.Generator().manual_seed(2)) * 2 - 1


def together(works: list[Callable[[], None]], meanwhile: Callable[[], None]) -> list[int]:
    """Run `works` on a thread each while `meanwhile` runs here; how often each ran. What one raised is raised."""
    stop, counts = threading.Event(), [0] * len(works)

    @torch.inference_mode()
    def run(place: int) -> None:
        while not stop.is_set():
            works[place]()
            counts[place] += 1

    with ThreadPoolExecutor(len(works)) as threads:
        running = [threads.submit(run, place) for place in range(len(works))]
        try:
            meanwhile()
            limit = time.monotonic() + 20
            while min(counts) < 3 and not any(one.done() for one in running) and time.monotonic() < limit:
                time.sleep(0.01)
        finally:
            stop.set()
    for one in running:
        one.result()
    return counts


def test_blocks_come_and_go_while_threads_compute() -> None:
    """60 nested enters of other families against 4 computing threads: no crash, right bits, every call counted once."""
    softmax, rows = cpu_rows.softmax(X), cpu_rows.sum(X)

    def work() -> None:
        assert identical(torch.softmax(X, -1), softmax)
        assert identical(X.sum(-1), rows)

    def nest() -> None:
        for i in range(60):
            with batch_invariant(["matmul", "norm"] if i % 2 else ["pointwise"]) as inner:
                product = F.linear(X, W)
            assert inner.families <= {"matmul", "norm", "pointwise"}
            if i % 2:
                assert identical(product, cpu_matmul.linear(X, W))

    with torch.no_grad(), batch_invariant(["softmax", "reduction"]) as outer:
        counts = together([work] * 4, nest)
    assert outer.coverage().replaced["_softmax"] == outer.coverage().replaced["sum.dim_IntList"] == sum(counts) > 0
    assert outer.coverage().replaced["linear"] == 30  # the nested blocks' calls are the outer one's, too
    with torch.no_grad():
        right = [torch.softmax(X, -1), cpu_rows.softmax(X)]

    def work() -> None:
        got = torch.softmax(X, -1)
        assert any(identical(got, bits) for bits in right)

    def come_and_go() -> None:
        for _ in range(6):
            with batch_invariant(["softmax"]):
                pass

    together([work] * 2, come_and_go)


STOCK = ("mm", "_softmax", "sum.dim_IntList", "linear", "cumsum", "silu")


def kernels() -> list[str]:
    return [torch._C._dispatch_dump_table(f"aten::{name}") for name in STOCK]


def stock() -> list[torch.Tensor]:
    with torch.no_grad():
        return [X @ X.T, torch.softmax(X, -1), X.sum(-1), F.linear(X, W), X.cumsum(0), F.silu(X)]


def test_nothing_stays_behind() -> None:
    """After the last leave every operator's kernel is torch's own again, whatever nested or raised."""
    before, bits = kernels(), stock()
    assert not any(block.__file__ in table for table in before)
    with batch_invariant(), batch_invariant(["matmul"]):
        assert all(block.__file__ in table for table in kernels())
    left = batch_invariant()
    with pytest.raises(ZeroDivisionError), left:
        state.guarded(lambda: 1 // 0)()  # a kernel that raises leaves its thread as it was
    assert not state.inside.active
    assert kernels() == before
    assert all(identical(got, was) for got, was in zip(stock(), bits, strict=True))
    assert state.current() == state.Active()
    assert not left.coverage().counts()


def test_a_thread_inside_of_a_kernel_when_the_block_ends_ends_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was taken away lives on for it, though another block has come and gone; its next call is stock's."""
    kernels = kernels_for("cpu")
    honest, began, go, got = kernels.softmax, threading.Event(), threading.Event(), []

    def waits(x: torch.Tensor) -> torch.Tensor:
        began.set()
        assert go.wait(30)
        return honest(x)

    def work() -> None:
        with torch.no_grad():
            got.extend([torch.softmax(X[:, :63], -1), torch.softmax(X[:, :63], -1)])

    monkeypatch.setitem(vars(kernels), "softmax", waits)
    thread = threading.Thread(target=work)
    with batch_invariant():
        thread.start()
        assert began.wait(30)
    with batch_invariant():
        pass
    gc.collect()
    go.set()
    thread.join(30)
    assert identical(got[0], honest(X[:, :63]))
    assert identical(got[1], torch.softmax(X[:, :63], -1))


@pytest.mark.parametrize("every", [3, *at_length(1)])
def test_an_interrupt_at_any_step_of_a_block_leaves_the_next_one_whole(every, monkeypatch) -> None:
    """Ctrl-C while functions are put there or taken away: the next block computes by its own."""
    mine = ("aten::mm", "aten::_softmax", "aten::linear")  # all of them are thousands of steps
    made = {place: function for place, function in block.decided().items() if place[0] in mine}
    monkeypatch.setattr(block, "_registration", Registration(lambda: made))
    codes = {f.__code__ for f in (block._enter_first, block._leave_last, Registration.put, Registration.take_away)}
    steps, at = 0, 0

    def trace(frame: types.FrameType, event: str, arg: object) -> Any:
        nonlocal steps
        steps += event == "line" and frame.f_code in codes
        if at and steps == at:
            raise KeyboardInterrupt
        return trace if frame.f_code in codes else None

    def interrupted() -> None:
        nonlocal steps
        steps, tracing = 0, sys.gettrace()
        sys.settrace(trace)
        try:
            with suppress(KeyboardInterrupt), batch_invariant():
                pass
        finally:
            sys.settrace(tracing)

    before = (torch._TorchCompileInductorWrapper.__call__, [*sys.meta_path])
    interrupted()
    most = steps
    assert most > 50  # a function is a few steps
    for at in range(1, most + 1, every):
        interrupted()
        with torch.no_grad(), batch_invariant() as entered:
            stock()
        assert entered.coverage().replaced == {"mm": 1, "_softmax": 1, "linear": 1}, at
        assert not any(block.__file__ in table for table in kernels()), at
        assert (torch._TorchCompileInductorWrapper.__call__, sys.meta_path) == before, at


def test_what_came_between_two_blocks_is_watched() -> None:
    """One operator went and one came between two blocks, of another name or the same: at risk, and counted once."""
    seen = []
    for name, factor in (("a", 2), ("b", 3), ("b", 5)):
        library = torch.library.Library("nondet_in_its_place", "DEF")
        try:
            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, lambda x, factor=factor: x * factor, "CPU")
            with torch.no_grad(), batch_invariant() as entered:
                assert identical(getattr(torch.ops.nondet_in_its_place, name)(X), X * factor)
                torch.softmax(X, -1)
            seen.append(entered.coverage().counts())
        finally:
            library._destroy()
    assert seen == [{f"at risk: nondet_in_its_place::{n} float32": 1, "replaced: _softmax": 1} for n in "abb"]


NORM = torch.rand((64, 1000), generator=torch.Generator().manual_seed(3)) * 2 - 1
PARTS = ["norm", "reduction", "pointwise"]  # the families of rms_norm and of what it is made of


def norm() -> torch.Tensor:
    with torch.no_grad():
        return F.rms_norm(NORM, (1000,), torch.ones(1000), 1e-6)


def test_a_norm_under_way_is_not_finished_by_a_nested_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm whose mean is torch's ends in torch's root, though another thread has put the block's there meanwhile."""
    stock, got = norm(), []
    half, entered = threading.Event(), threading.Event()

    def stop_at_the_mean(kind: str, what: str) -> None:
        if what.startswith("mean.dim") and not half.is_set():
            half.set()
            assert entered.wait(30)

    monkeypatch.setattr(functions, "count", stop_at_the_mean)
    with batch_invariant(["matmul"]):
        thread = threading.Thread(target=lambda: got.append(norm()))
        thread.start()
        assert half.wait(30)
        with batch_invariant(PARTS) as inner:
            entered.set()
            thread.join(30)
            assert not identical(norm(), stock)  # or this test could not tell
    assert identical(got[0], stock)
    assert inner.coverage().replaced == {"rms_norm": 1}


def fails(*args: Any, **kwargs: Any) -> None:
    raise MemoryError("here")


def stand_ins(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(block, "_STAND_INS", (block._STAND_INS[0], (fails, block._STAND_INS[1][1])))


def half_the_operators(patch: pytest.MonkeyPatch) -> None:
    left, key_of = iter(range(300, -1, -1)), block._parsed  # called for each operator that is put
    patch.setattr(block, "_parsed", lambda name: key_of(name) if next(left) else fails())


# the steps of an entry, each with whether a nested one takes it
STEPS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], bool]] = {
    "operators": (half_the_operators, False),
    "compiler": (lambda patch: patch.setattr(functions, "_forget_graphs", fails), False),
    "snapshot": (
        lambda patch: patch.setattr(block, "replace_now", lambda now: fails() if now.families else None),
        True,
    ),
    "stand-ins": (stand_ins, True),
}


@pytest.mark.parametrize("outer", [[], ["matmul"]])
def test_an_entry_that_fails_half_way_leaves_nothing(outer: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever step of entering raises, kernels and snapshot are what they were, and a later block is whole."""
    own = norm()
    for where, (put, nests) in STEPS.items():
        if outer and not nests:
            continue
        with batch_invariant(outer) if outer else nullcontext():
            before, active = kernels(), state.current()
            with monkeypatch.context() as patch:
                patch.setattr(block, "_modules", {})  # stand-ins are looked after; undone before the outer block leaves
                put(patch)
                with pytest.raises(MemoryError, match="here"):
                    batch_invariant().__enter__()
            assert kernels() == before, where
            assert state.current() == active, where
        with batch_invariant() as again:
            norm()
        assert again.coverage().replaced == {"rms_norm": 1}, where
        assert identical(norm(), own), where


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed, "cpu")).to(dtype)


def calls(dtype: torch.dtype) -> dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]]:
    """Operator -> (call, operands); widths that no other test has."""
    x, wide, cube = drawn(5, 77, dtype=dtype), drawn(5, 320, dtype=dtype), drawn(2, 3, 77, dtype=dtype)
    weight, bias = drawn(77, dtype=dtype, seed=2), drawn(77, dtype=dtype, seed=3)
    layer, large = drawn(48, 77, dtype=dtype, seed=4), drawn(320, 320, dtype=dtype, seed=5)
    q, k = drawn(2, 4, 1, 16, dtype=dtype), drawn(2, 4, 70, 16, dtype=dtype, seed=6)
    return {
        "linear": (F.linear, (x, layer)),
        "linear, 3 axes and a bias": (F.linear, (cube, layer, bias[:48])),
        "linear, large": (F.linear, (wide, large)),
        "mm": (torch.mm, (x, layer.t().contiguous())),
        "mm, transposed": (torch.mm, (wide, large.t())),
        "addmm": (torch.addmm, (bias[:48], x, layer.t())),
        "softmax": (lambda x: torch.softmax(x, -1), (x,)),
        "softmax, 3 axes": (lambda x: torch.softmax(x, -1), (cube,)),
        "softmax, the other axis": (lambda x: torch.softmax(x, 0), (x,)),
        "softmax, hidden": (lambda x: torch.softmax(x * 1e4, -1), (cube,)),
        "log_softmax": (lambda x: torch.log_softmax(x, -1), (x,)),
        "mean": (lambda x: x.mean(-1), (x,)),
        "mean, kept": (lambda x: x.mean(-1, keepdim=True), (cube,)),
        "mean over the batch": (lambda x: x.mean(0), (x,)),
        "sum": (lambda x: x.sum(1), (x,)),
        "rms_norm": (lambda x, w: F.rms_norm(x, (77,), w, 1e-6), (cube, weight)),
        "layer_norm": (lambda x, w, b: F.layer_norm(x, (77,), w, b), (cube, weight, bias)),
        "layer_norm, bare": (lambda x: F.layer_norm(x, (77,)), (x,)),
        "attention": (lambda q, k: F.scaled_dot_product_attention(q, k, k), (q, k)),
        "attention, causal": (lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), (k,)),
        "attention, GQA": (
            lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True, scale=0.3),
            (q, k[:, :2].contiguous()),
        ),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *at_length(torch.float16)])
def test_a_second_call_is_the_first_one_again(dtype: torch.dtype) -> None:
    """In full the replacement runs; else only at the first call, also while torch would record a gradient that nobody
    asks for."""
    for name, (call, given) in calls(dtype).items():
        operands = tuple(x.cuda() for x in given)
        for recorded in (False, True):
            seen, noted, counted = [], [], []
            with torch.set_grad_enabled(recorded), strictly():
                for full in (True, True, False, False, False):  # the first proves, and notes that too
                    way = in_full() if full else nullcontext()
                    with batch_invariant() as block, listen() as notes, way:
                        seen.append(call(*operands))
                    noted.append(dict(notes))
                    counted.append(block.coverage().counts())
            assert all(identical(out, seen[0]) for out in seen), name
            assert all(out.stride() == seen[0].stride() for out in seen), name
            assert noted[1:] == noted[1:2] * 4, name
            assert counted == counted[:1] * 5, name


def strictly() -> Any:
    """Our warnings are errors; Triton's compiler has others."""
    return warnings.catch_warnings(action="error", category=RuntimeWarning)


@pytest.mark.gpu
def test_what_a_plan_was_not_made_for_is_no_second_call() -> None:
    """Strided rows, another place in memory, other numbers there, NaN and infinities: as the replacement has them."""

    def moved(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.numel() + 1, device="cuda")[1:].view(x.shape).copy_(x)

    def strided(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(*x.shape[:-1], 2 * x.shape[-1], device="cuda")[..., : x.shape[-1]].copy_(x)

    def odd(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[(0,) * (y.dim() - 1)][:4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
        return y

    with torch.no_grad(), batch_invariant(), strictly():
        for name, (call, given) in calls(torch.float32).items():
            operands = tuple(x.cuda() for x in given)
            for change in (torch.clone, moved, strided, odd, torch.neg):
                for first in (True, False):
                    others = [change(x) if (i == 0) is first else x for i, x in enumerate(operands)]
                    with in_full():
                        right = call(*others)
                    for _ in range(2):
                        call(*operands)
                        assert identical(call(*others), right), (name, change)


def test_a_decision_is_for_calls_that_agree_in_all_that_decides() -> None:
    """Shapes, strides, dtypes, alignment, numbers, options, settings and the block: each change is decided anew."""
    settings, decided = ["one"], list[Any]()

    def bind(*args: Any, **kwargs: Any) -> Any:
        decided.append((args, kwargs))
        return lambda *args, **kwargs: args[0]

    stock = SimpleNamespace(call_boxed=lambda *args, **kwargs: pytest.fail("stock ran"))
    binder = Binder(bind, lambda: settings[0])
    call = functools.partial(
        replacing("mm", "matmul", lambda: kernels_for("cpu"), stock, lambda kernels, *args, **kwargs: args[0], binder),
        torch._C.DispatchKeySet(torch._C.DispatchKey.CPU),
    )
    room = torch.zeros(256)
    room = room[-room.data_ptr() // 4 % 64 :]  # at a multiple of 256 bytes
    x = room[:64].view(8, 8)
    same = [x, room[64:128].view(8, 8), torch.nn.Parameter(x, requires_grad=False)]
    different: list[tuple[Any, ...]] = [
        (x.t(),), (x.view(4, 16),), (x.view(torch.int32),), (room[1:65].view(8, 8),),
        (x, 1), (x, 2), (x, None), (x, x), (x, [1]), (x, [1, 2]), (x, {"beta": 2}), (x, {"alpha": 2}),
    ]  # fmt: skip
    with torch.no_grad(), batch_invariant(["matmul"]):
        for alike in same:
            call(alike)
        assert len(decided) == 1
        for count, given in enumerate(different, 2):
            kwargs = given[-1] if isinstance(given[-1], dict) else {}
            for _ in range(2):
                call(*given[: len(given) - bool(kwargs)], **kwargs)
            assert len(decided) == count, given
        for settings[0] in ("two", "one"):
            call(x)
        with batch_invariant(["softmax"]):
            call(x)
        call(x)
    assert len(decided) == len(different) + 4, "other settings, once, and after each change of what is on"
    products, launches = BINDERS["mm"], BINDERS["_softmax"]
    seen = {products.settings()}
    before = torch.backends.cuda.matmul.fp32_precision
    for torch.backends.cuda.matmul.fp32_precision in ("tf32", "ieee"):
        seen.add(products.settings())
    torch.backends.cuda.matmul.fp32_precision = before
    assert {"tf32", "ieee"} <= seen
    if torch.cuda.is_available():
        assert launches.settings() == torch.cuda.current_device()
    by_products = {name for name, binder in BINDERS.items() if binder.settings is products.settings}
    assert by_products == {"linear", "mm", "addmm"}
    x, weight = drawn(2, 8), torch.nn.Parameter(drawn(8))

    def key(*args: Any) -> tuple[object, ...]:
        return call_key("mm", args, {}, 64, ())

    with torch.no_grad():
        assert key(x, weight, 0.1)
    with torch.enable_grad():
        assert key(x, weight.detach(), [8], None)
        assert not key(x, weight)
        assert not key(x.clone().requires_grad_())


# Of these torch asks the default dtype where none is named.
FACTORIES = frozenset({"empty", "eye", "linspace", "normal", "ones", "rand", "randn", "zeros"})
KERNELS = sorted((Path(nondet.__file__).parent / "kernels").glob("**/*.py"))


@pytest.fixture(params=[torch.bfloat16, *at_length(torch.float64)], ids=str)
def default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Entered by the test itself, for what is drawn before is float32."""
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, *at_length(torch.bfloat16)], ids=str)
def test_a_call_and_its_second_are_those_of_float32(dtype: torch.dtype, default: torch.dtype, device: str) -> None:
    """A CPU made a mean of float64 then, or ended in NumPy's TypeError, as attention did."""
    for name, (call, given) in calls(dtype).items():
        operands = tuple(x.to(device) for x in given)
        with torch.no_grad(), batch_invariant():
            right = call(*operands)
            torch.set_default_dtype(default)
            made = [call(*operands) for _ in range(2)]
            torch.set_default_dtype(torch.float32)
        assert [out.dtype for out in made] == [right.dtype] * 2, name
        assert all(identical(out, right) for out in made), name


def test_proofs_draw_their_inputs_in_float32(default: torch.dtype) -> None:
    right = order_revealing(8, 96, torch.float32, 3, negate=True)
    torch.set_default_dtype(default)
    assert identical(order_revealing(8, 96, torch.float32, 3, negate=True), right)


def test_every_room_of_a_kernel_names_its_dtype() -> None:
    """Kernels of a GPU, too: sums of float32 in a room of bfloat16 would be rounded on their way."""
    assert len(KERNELS) > 50
    unnamed = [
        f"{path}:{node.lineno}"
        for path in KERNELS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in FACTORIES
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and not any(keyword.arg in ("dtype", "out") for keyword in node.keywords)
    ]
    assert not unnamed
