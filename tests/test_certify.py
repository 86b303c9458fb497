"""`nondet certify`: members of a class hold, and each way to leave it is caught, named, excluded where it leaves."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nondet import certificates as store
from nondet.certificates import Certificates
from nondet.certify import members
from nondet.certify.check import ask, row_key
from nondet.certify.describe import markdown
from nondet.certify.findings import exclusions, findings, suspicion, unanswered
from nondet.certify.plan import Wish, plan
from nondet.certify.proof import PRODUCT_INPUTS, product_inputs, prove
from nondet.certify.questions import AttentionQuestion, Call, GroupedQuestion, ProductQuestion, RowsQuestion
from nondet.cli import main
from nondet.errors import UnknownNameError, UserError
from nondet.kernels.numerics import CLASSES, INVARIANT, ONE_ROW, classes_for
from nondet.registry import load_object
from nondet.result import Row, Status
from nondet.runfile import read_run

K, N = 48, 24
BATCHES = (1, 2, 7, 16, 33)


def chain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, lo: int = 0, hi: int = K) -> Any:
    """k after k in float32: elementwise, so that no library has an order to choose."""
    acc = torch.zeros(x.shape[0], weight.shape[0])
    for k in range(lo, hi):
        acc += x[:, k : k + 1].float() * weight[:, k].float()
    return (acc if bias is None else acc + bias.float()).to(x.dtype)


def narrow(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Other tiles of the same order: 5 columns at a time."""
    cut = range(0, weight.shape[0], 5)
    return torch.cat([chain(x, weight[i : i + 5], None if bias is None else bias[i : i + 5]) for i in cut], 1)


def split_k(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    acc = chain(x.float(), weight.float(), hi=K // 2) + chain(x.float(), weight.float(), lo=K // 2)
    return (acc if bias is None else acc + bias.float()).to(x.dtype)


def wrong_at(bad: Callable[[int], bool]) -> Call:
    def member(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return split_k(x, weight, bias) if bad(x.shape[0]) else chain(x, weight, bias)

    return member


def half_sums(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    acc = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float16)
    for k in range(K):
        acc += (x[:, k : k + 1].float() * weight[:, k].float()).half()
    return (acc if bias is None else acc + bias).to(x.dtype)


def nan_at_wide(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = chain(x, weight, bias)
    return out.masked_fill(out.abs() > 1e6, torch.nan)


def bias_afterwards(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = chain(x, weight)
    return out if bias is None else out + bias


def unsteady() -> Call:
    """Another order at every other call."""
    calls = itertools.count()

    def member(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return (split_k if next(calls) % 2 else chain)(x, weight, bias)

    return member


def absent(*_: Any) -> torch.Tensor:
    raise NotImplementedError("not on this machine")


def wrong_dtype(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return chain(x, weight, bias).double()


def question(dtype: str = "bfloat16", layout: str = "nt", values: tuple[int, ...] = BATCHES) -> ProductQuestion:
    return ProductQuestion(
        operator="linear",
        cls="cpu-tiles",
        dtype=dtype,
        device="cpu",
        shape={"K": K, "N": N},
        layout=layout,
        values=values,
        kinds=PRODUCT_INPUTS,
    )


@pytest.fixture
def kept() -> Certificates:
    return Certificates({"device": "cpu"}, None)


def put(member: Call, kept: Certificates, **how: Any) -> Row:
    (row,) = ask(question(**how), {"member": member}, chain, kept)
    return row


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("layout", ["nt", "nt, bias", "nt, strided"])
def test_another_tile_holds_and_another_order_does_not(kept: Certificates, dtype: str, layout: str) -> None:
    """In every dtype and layout, also where a bias follows: split-K is caught at M = 1, where few elements tell."""
    good = put(narrow, kept, dtype=dtype, layout=layout)
    assert good.status == Status.IDENTICAL, good.reason
    assert good.extra["left_at"] == []
    assert [c.holds for c in kept.all()] == [True]
    bad = put(split_k, kept, dtype=dtype, layout=layout)
    assert bad.status == Status.DIVERGENT
    assert bad.extra["left_at"] == list(BATCHES)
    assert bad.values == ["anchor", *BATCHES]
    assert bad.labels[0] == 0
    assert 0 not in bad.labels[1:]
    assert "differs at every M tried" in bad.reason
    assert "one result at all of them" in bad.reason


WRONG_WAYS: list[tuple[str, Call, list[int], str]] = [
    ("only M = 1", wrong_at(lambda m: m == 1), [1], "only at M = 1"),
    ("small batches", wrong_at(lambda m: m <= 7), [1, 2, 7], "M <= 7, not from 16 on"),
    ("large batches", wrong_at(lambda m: m >= 16), [16, 33], "from M = 16 on"),
    ("tails", wrong_at(lambda m: m % 2 > 0), [1, 7, 33], "no multiple of 2"),
    ("one in between", wrong_at(lambda m: m == 7), [7], "M = 7 of those tried"),
]


@pytest.mark.parametrize(("member", "left", "said"), [w[1:] for w in WRONG_WAYS], ids=[w[0] for w in WRONG_WAYS])
def test_a_member_is_excluded_where_it_leaves_and_stands_elsewhere(
    kept: Certificates, member: Call, left: list[int], said: str
) -> None:
    """The exclusion names the batches that parted, and no others; the verdict says what such a pattern suggests."""
    row = put(member, kept)
    assert row.extra["left_at"] == left
    assert said in row.reason
    assert row.extra["first"]["at"] == left[0]
    assert row.difference is not None
    assert row.difference.mismatched > 0
    held = ",".join(str(m) for m in BATCHES if m not in left)
    name = f"{question().name} bfloat16 M="
    assert kept.standing("member", name + held) is True
    assert kept.standing("member", name + ",".join(map(str, left))) is False
    (finding,) = findings([row])
    assert f"{len(left)} of {len(BATCHES)}" in finding.verdict
    assert any(f"M = {', '.join(map(str, left))}" in text for text in exclusions([finding]))


def test_a_narrower_accumulator_is_told_from_another_order(kept: Certificates) -> None:
    """float16 sums are less accurate, which another order in float32 is not; only the first is called so."""
    assert "accumulator of less" in put(half_sums, kept, dtype="float32").reason
    assert "accumulator of less" not in put(split_k, kept, dtype="float32").reason


def test_nan_on_one_side_is_no_equality(kept: Certificates) -> None:
    """A member that gives NaN where the anchor has a number leaves the class, though most of its inputs agree."""
    row = put(nan_at_wide, kept, dtype="float32")
    assert row.status == Status.DIVERGENT
    assert "NaN or infinity" in row.reason
    assert row.difference is not None
    assert row.difference.nonfinite > 0


def test_a_bias_added_after_the_rounding_is_another_class(kept: Certificates) -> None:
    """Two roundings instead of one: caught with a bias, and equal without."""
    assert put(bias_afterwards, kept).status == Status.IDENTICAL
    assert put(bias_afterwards, kept, layout="nt, bias").status == Status.DIVERGENT


def test_a_nondeterministic_member_has_no_class(kept: Certificates) -> None:
    """Where the same call gives other bits, nothing stands, not even at batches that agreed by chance."""
    row = put(unsteady(), kept)
    assert row.replays_parted > 0
    assert row.status == Status.DIVERGENT
    assert not any(c.holds for c in kept.all())
    assert "run to run" in findings([row])[0].verdict


def test_what_does_not_run_is_not_proven_and_not_excluded(kept: Certificates) -> None:
    """A refusal is skipped, a wrong result type an error with its reason; neither leaves a certificate."""
    refused, mistyped = put(absent, kept), put(wrong_dtype, kept)
    assert (refused.status, refused.reason) == (Status.SKIPPED, "not on this machine")
    assert mistyped.status == Status.ERROR
    assert "float64" in mistyped.reason
    assert kept.all() == []


def test_a_crash_at_one_batch_does_not_pass_for_a_proof(kept: Certificates) -> None:
    """Equal wherever it ran, and yet no clean row: what crashed is named, and only what ran is certified."""

    def crashes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if x.shape[0] == 7:
            raise RuntimeError("too many resources requested")
        return chain(x, weight, bias)

    row = put(crashes, kept)
    assert row.status == Status.ERROR
    assert "M = 7: RuntimeError: too many" in row.reason
    assert [c.key.rpartition("=")[2] for c in kept.all()] == ["1,2,16,33"]
    assert any("M = 7" in text for text in unanswered(findings([row])))


def test_a_failing_anchor_proves_nothing(kept: Certificates) -> None:
    """Every member's row says so, and nothing is recorded."""
    rows = list(ask(question(), {"a": chain, "b": split_k}, absent, kept))
    assert [r.status for r in rows] == [Status.ERROR] * 2
    assert all("anchor failed" in r.reason for r in rows)
    assert kept.all() == []


def test_rows_are_keyed_so_that_a_run_resumes(kept: Certificates) -> None:
    """What `ask` yields is what `row_key` foretold."""
    assert put(chain, kept).key == row_key(question(), "member")


def test_prove_compares_and_says_what(kept: Certificates) -> None:
    """The dispatchers' helper: equal, different, failing, mistyped, and nothing to compare are five answers."""
    inputs = list(product_inputs(3, N, K, torch.bfloat16, "cpu"))
    holds, said = prove(narrow, chain, inputs)
    assert holds
    assert "elements equal on order" in said
    assert prove(split_k, chain, inputs)[0] is False
    assert prove(absent, chain, inputs) == (False, "order: NotImplementedError: not on this machine")
    assert prove(wrong_dtype, chain, inputs)[0] is False
    assert prove(narrow, chain, []) == (False, "nothing finite was compared (no inputs)")
    infinite = [("inf", (torch.full((2, K), torch.inf), torch.ones(N, K)))]
    assert prove(narrow, chain, infinite)[0] is False


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_order_inputs_have_an_exact_sum_of_zero(dtype: torch.dtype) -> None:
    """So that a result is nothing but the rounding errors of its order; and a bias is not large enough to hide them."""
    for kind, (x, weight, bias) in product_inputs(4, N, K, dtype, "cpu", bias=True, kinds=("order", "order-wide")):
        products = x.double()[:, None] * weight.double()  # exact, and so is fsum
        assert {math.fsum(terms) for terms in products.reshape(-1, K).tolist()} == {0.0}, kind
        errors = x.float() @ weight.float().T
        assert float(errors.abs().max()) > 0
        assert bias is not None
        assert float(bias.abs().max()) < (2.0**-12 if kind == "order" else 1.0)


@pytest.mark.parametrize("width", [1, 5, 300, 1000, 4096, 17000])
def test_the_order_of_class_lanes_is_the_one_written_down(width: int) -> None:
    """The words, as elementwise additions, give the kernel's bits; PyTorch's own sum, another order, does not."""
    from nondet.kernels import triton_rows

    x = torch.rand(3, width) - 0.5
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert torch.equal(members.lanes_sum(x), triton_rows.sum(x.to(device)).cpu())
    if width >= 1000:
        assert not torch.equal(members.lanes_sum(x), x.cumsum(-1)[:, -1])


@pytest.mark.usefixtures("chained_dot")
def test_triton_members_are_wired_to_their_anchors(kept: Certificates) -> None:
    """Tiles, grouped tiles, and every way to compute attention, put to questions as on a GPU; float16 on a CPU here."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    common: dict[str, Any] = {"dtype": "float16", "device": device, "kinds": ("order", "bell")}
    rows: list[Row] = []
    for operator, layout in (("linear", "nt, bias"), ("matmul", "nn"), ("matmul", "tn")):
        shape = {"K": 70, "N": 33}
        one = ProductQuestion(operator=operator, cls="chain", shape=shape, layout=layout, values=(1, 17), **common)
        tiles = getattr(members, f"triton_tiles_{operator}")("float16")
        rows += ask(one, dict(list(tiles.items())[:2]), getattr(members, f"chain_anchor_{operator}"), kept)
    grouped = GroupedQuestion(
        operator="grouped_matmul", cls="grouped", shape={"E": 3, "K": 64, "N": 32}, layout="", values=(1, 20), **common
    )
    tiles = members.grouped_tiles("float16")
    rows += ask(grouped, {name: tiles[name] for name in (min(tiles), max(tiles))}, members.grouped_anchor, kept)
    assert [r.reason for r in rows if r.status != Status.IDENTICAL] == []
    assert len(rows) == 8


@pytest.mark.usefixtures("chained_dot")
def test_every_form_of_attention_is_compared_with_the_same_prefill(kept: Certificates) -> None:
    """Chunks, decode, ragged and split forms hold; an attention that cuts keys by their number does not."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    forms = ("prefill", "alone", "decode", "decode alone", "chunks of 33", "ragged")
    one = AttentionQuestion(
        operator="attention",
        cls="segments",
        dtype="float32",
        device=device,
        shape={"B": 3, "Hq": 2, "Hkv": 1, "T": 70, "D": 16},
        layout="GQA",
        values=forms,
        kinds=("bell",),
    )

    def halves(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Keys in two parts, whose border follows from how many there are."""
        visible = torch.ones(q.shape[2], k.shape[2], device=q.device).tril(k.shape[2] - q.shape[2]).bool()
        s = (q @ k.repeat_interleave(2, 1).mT / 4).masked_fill(~visible, -torch.inf)
        p = torch.exp(s - s.amax(-1, keepdim=True))
        h, w = k.shape[2] // 2, v.repeat_interleave(2, 1)
        out = p[..., :h] @ w[..., :h, :] + p[..., h:] @ w[..., h:, :]
        return out / (p[..., :h].sum(-1, keepdim=True) + p[..., h:].sum(-1, keepdim=True))

    found = {"split": members.segments_split, "varlen": members.segments_varlen, "halves": halves}
    rows = {r.impl: r for r in ask(one, found, members.segments_anchor, kept)}
    assert rows["split"].status == rows["varlen"].status == Status.IDENTICAL
    assert rows["halves"].status == Status.DIVERGENT
    assert rows["halves"].error is None


def test_a_tile_that_leaves_its_class_is_barred_from_the_dispatcher(kept: Certificates) -> None:
    """An exclusion at one shape reaches the key that the dispatcher asks for, which is one for all shapes."""
    from nondet.kernels.matmul_choice import member

    a, b = torch.ones(1, 16, 64, dtype=torch.bfloat16), torch.ones(1, 64, 64, dtype=torch.bfloat16)
    one = replace(question(), cls="chain")
    tile = next(iter(members.triton_tiles_linear("bfloat16")))
    asked = member(tile, a, b)
    assert asked is not None
    list(ask(one, {f"triton/{tile}": narrow, "mine": split_k}, chain, kept))
    assert kept.standing(asked.name, asked.key) is None
    list(ask(one, {f"triton/{tile}": split_k}, chain, kept))
    assert kept.standing(asked.name, asked.key) is False


def test_suspicions_of_forms() -> None:
    """Named variants are told apart by name, and a pattern that is all of them is not called a choice."""
    said = suspicion("form", ["prefill", "decode"], ["decode"], alike=False)
    assert said == "differs for decode; not for prefill"
    assert "depends on the batch" in suspicion("form", ["prefill", "decode"], ["prefill", "decode"], alike=False)


def test_the_classes_are_whole() -> None:
    """Every operator of a class has an anchor, an order in words, and targets that can be imported."""
    for name, cls in CLASSES.items():
        assert cls.name == name
        assert len(cls.order) > 50
        for operator, found in cls.members.items():
            anchor = cls.anchors[operator]
            for target in (anchor, *found.values()):
                if target not in (INVARIANT, ONE_ROW):
                    assert callable(load_object(target)), target
            assert INVARIANT in found


def test_the_page_on_classes_says_what_the_table_says() -> None:
    """The generated part of docs/classes.md is the output of `python -m nondet.certify.describe`."""
    page = Path(__file__).parent.parent / "docs" / "classes.md"
    assert markdown().strip() in page.read_text(encoding="utf-8")


def test_unknown_classes_and_foreign_ones_are_refused() -> None:
    """A class of another device or operator is not quietly replaced by one that fits."""
    assert [c.name for c in classes_for("linear", "cuda")] == ["chain", "chain-tf32"]
    with pytest.raises(UnknownNameError):
        classes_for("linear", "cpu", "chian")
    with pytest.raises(UserError, match="belongs to cuda"):
        classes_for("linear", "cpu", "chain")
    with pytest.raises(UserError, match="has no softmax"):
        classes_for("softmax", "cpu", "cpu-tiles")


def test_the_plan_for_a_gpu_asks_every_class_and_member() -> None:
    """Without a GPU the plan can still be made: what it asks, of whom, and that no case is asked twice."""
    asked = plan(Wish(device="cuda"))
    keys = [row_key(one.question, name) for one in asked for name in one.members]
    assert len(keys) == len(set(keys))
    assert {one.question.cls for one in asked} == {c.name for c in CLASSES.values() if c.device == "cuda"}
    main_shape = next(one for one in asked if one.question.dtype == "bfloat16" and one.question.operator == "linear")
    assert {"invariant", "cublaslt"} < main_shape.members.keys()
    assert any(name.startswith("tma/") for name in main_shape.members)
    assert {1, 17, 4096} <= set(main_shape.question.values)
    few = plan(Wish(device="cuda", operators=("linear",), members=("cublaslt",), m=40, k=256, n=100))
    assert {name for one in few for name in one.members} == {"cublaslt", "cublaslt/1", "cublaslt/2", "cublaslt/3"}
    assert {one.question.values[-1] for one in few} == {40}


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Run the command in an empty folder with an empty cache: its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NONDET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(store, "_instances", {})
    monkeypatch.setattr(store, "_default", None)

    def call(*argv: object) -> tuple[int, str, str]:
        code = main([str(a) for a in argv])
        seen = capsys.readouterr()
        return code, seen.out, seen.err

    return call


SMALL = ("certify", "linear", "--device", "cpu", "--k", "64", "--n", "32", "--m", "17", "--dtype", "bfloat16")

WRONG = [
    (["certify", "liner"], ["'liner'", "linear"]),
    (["certify", "linear", "--class", "chian", "--device", "cpu"], ["'chian'", "chain"]),
    (["certify", "linear", "--class", "chain", "--device", "cpu"], ["belongs to cuda", "cpu-tiles"]),
    (["certify", "softmax", "--class", "cpu-tiles", "--device", "cpu"], ["no softmax"]),
    (["certify", "linear", "--member", "cublas-lt", "--device", "cpu"], ["'cublas-lt'", "invariant"]),
    (["certify", "linear", "--dtype", "floaty16"], ["'floaty16'", "float16"]),
    (["certify", "linear", "--dtype", "float8_e4m3fn", "--device", "cpu"], ["nothing to certify"]),
    (["certify", "linear", "--inputs", "wild"], ["'wild'", "wide"]),
    (["certify", "linear", "--device", "tpu"], ["'tpu'", "cpu"]),
    (["certify", "linear", "--m", "0"], ["--m 0"]),
    (["certify", "linear", "--k", "-3"], ["--k -3"]),
    (["certify", "linear", "--impl", "no.such.module:f"], ["no.such.module"]),
    (["certify", "linear", "--impl", "math:pi"], ["float", "function"]),
    (["certify", "linear", "--preset", "qwen3-8c"], ["'qwen3-8c'", "qwen3-8b"]),
    (["certify", "linear", "--preset", "qwen3-8b", "--k", "5"], ["--k and --n", "one of the two"]),
    (["certify", "linear", "--out", "x.txt"], ["x.txt", ".jsonl"]),
    (["certify", "linear", "--fail-on", "sunshine"], ["'sunshine'", "divergent"]),
]


@pytest.mark.parametrize(("argv", "said"), WRONG, ids=[" ".join(a[1:]) for a, _ in WRONG])
def test_bad_input_is_one_clear_line(run: Any, tmp_path: Path, argv: list[str], said: list[str]) -> None:
    """Exit code 2, one line on stderr that quotes the value, nothing measured, nothing left behind."""
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert err.startswith("nondet: ")
    assert err.count("\n") == 1
    for word in said:
        assert word in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_no_gpu_is_said_plainly(run: Any) -> None:
    """No silent fallback to the CPU's classes."""
    code, _, err = run("certify", "linear", "--device", "cuda")
    assert code == 2
    assert "--device cuda" in err


def test_the_command_proves_keeps_shows_and_forgets(run: Any, tmp_path: Path) -> None:
    """Rows in a run file that reports read, certificates in the cache, a resumed run free, --forget empties it."""
    code, out, err = run(*SMALL, "--out", "r.jsonl", "--report", "r.md", "--report", "r.html")
    assert code == 0, err
    assert "in the class" in out
    assert "fewer than" in out
    rows = read_run(Path("r.jsonl")).rows
    assert {r.probe for r in rows} == {"certify"}
    assert {r.status for r in rows} == {Status.IDENTICAL}
    assert "no divergence observed" in Path("r.md").read_text()
    assert run(*SMALL, "--out", "r.jsonl")[0] == 2
    assert run(*SMALL, "--out", "r.jsonl", "--resume")[0] == 0
    assert read_run(Path("r.jsonl")).rows == rows
    assert list((tmp_path / "cache" / "certificates").iterdir())
    code, out, _ = run("certify", "--show", "--device", "cpu", "--json")
    listing = json.loads(out)
    assert code == 0
    assert all(c["holds"] and c["member"] == "invariant" for c in listing["certificates"])
    assert len(listing["certificates"]) == len(rows)
    _, out, _ = run("certify", "--show", "--device", "cpu")
    assert f"standing: {len(rows)}" in out
    assert "excluded: none" in out
    assert run("certify", "--forget", "--device", "cpu")[0] == 0
    assert not list((tmp_path / "cache" / "certificates").iterdir())


def test_a_users_kernel_gets_a_verdict_in_plain_words(run: Any, tmp_path: Path) -> None:
    """Right except at M = 1: said so, excluded there alone, a finding and no failure unless asked to be one."""
    (tmp_path / "users_kernel_1.py").write_text(
        "from nondet.kernels.cpu_matmul import linear as right\n"
        "def linear(x, weight, bias=None):\n"
        "    out = right(x, weight, bias)\n"
        "    if x.shape[0] == 1:\n"
        "        half = x.shape[1] // 2\n"
        "        parts = [x[:, s].float() @ weight[:, s].float().T for s in (slice(half), slice(half, None))]\n"
        "        out = (sum(parts) + (0 if bias is None else bias.float())).to(x.dtype)\n"
        "    return out\n"
    )
    user = (*SMALL, "--class", "cpu-tiles", "--impl", "users_kernel_1:linear")
    code, out, _ = run(*user, "--out", "u.jsonl")
    assert code == 0
    assert "differs only at M = 1" in out
    assert "excluded at M = 1;" in out
    assert {tuple(r.extra["left_at"]) for r in read_run(Path("u.jsonl")).rows} == {(1,)}
    assert run(*user, "--out", "v.jsonl", "--fail-on", "divergent")[0] == 3
    assert run(*SMALL, "--out", "w.jsonl", "--fail-on", "divergent")[0] == 0
    shown = json.loads(run("certify", "--show", "--device", "cpu", "--json")[1])["certificates"]
    mine = [c for c in shown if c["member"].startswith("users_kernel_1:linear @")]
    assert {c["holds"] for c in mine} == {True, False}


@pytest.mark.parametrize("operator", ["attention", "softmax", "rms-norm", "sum", "grouped-matmul", "matmul"])
def test_the_cpus_classes_hold_on_this_machine(run: Any, operator: str) -> None:
    """Every operator with a class on a CPU can be asked, answers, and stays in its class."""
    how = ("--k", "48", "--n", "32") if operator not in ("attention",) else ()
    code, _, err = run(
        "certify", operator, "--device", "cpu", "--dtype", "float32", "--m", "9", *how, "--out", "c.jsonl"
    )
    assert code == 0, err
    rows = read_run(Path("c.jsonl")).rows
    assert rows
    assert [r.reason for r in rows if r.status != Status.IDENTICAL] == []


def test_rows_that_share_a_sum_are_caught(kept: Certificates) -> None:
    """A softmax whose sum runs over pairs of rows for an even batch is right at odd ones only."""

    def paired(x: torch.Tensor) -> torch.Tensor:
        e = torch.exp(x - x.amax(-1, keepdim=True))
        return e / (e.sum(-1, keepdim=True) if x.shape[0] % 2 else e.flip(-1).cumsum(-1)[:, -1:])

    one = RowsQuestion(
        operator="softmax",
        cls="cpu-rows",
        dtype="float32",
        device="cpu",
        shape={"W": 1000},
        layout="contiguous",
        values=(1, 2, 3, 4, 15),
        kinds=("bell", "outlier"),
        one_row=True,
    )
    (row,) = ask(one, {"paired": paired}, paired, kept)
    assert row.extra["left_at"] == [2, 4]


@pytest.mark.gpu
def test_the_chain_holds_on_this_gpu_and_splits_do_not(run: Any, tmp_path: Path) -> None:
    """Tiles and the dispatcher stay in class chain; cutting K in two, through the same kernel, does not."""
    (tmp_path / "users_kernel_2.py").write_text(
        "from nondet.kernels.triton_matmul import linear as chain\n"
        "def split(x, weight, bias=None):\n"
        "    h = x.shape[1] // 2\n"
        "    a, b = (chain(x[:, s].contiguous().float(), weight[:, s].contiguous().float())"
        " for s in (slice(h), slice(h, None)))\n"
        "    return (a + b + (0 if bias is None else bias.float())).to(x.dtype)\n"
    )
    shape = ("--k", "512", "--n", "256", "--m", "130", "--dtype", "bfloat16")
    code, _, err = run("certify", "linear", "--class", "chain", *shape, "--out", "g.jsonl")
    assert code == 0, err
    rows = read_run(Path("g.jsonl")).rows
    assert [r.reason for r in rows if r.impl == "invariant" and r.status != Status.IDENTICAL] == []
    assert [r.reason for r in rows if r.impl.startswith("triton/") and r.status != Status.IDENTICAL] == []
    user = ("--impl", "users_kernel_2:split", "--class", "chain")
    assert run("certify", "linear", *user, *shape, "--out", "h.jsonl", "--fail-on", "divergent")[0] == 3
