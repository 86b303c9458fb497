"""Members put to questions: each way to leave a class is caught, named, and excluded where it leaves."""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nondet.certify.check import ask, estimate, where_it_differs
from nondet.certify.plan import Assignment, AttentionQuestion, Call, GroupedQuestion, Question, Wish, plan
from nondet.core import certificates as store
from nondet.core.certificates import Certificates
from nondet.core.launch import listen
from nondet.core.operator import INVARIANT, ONE_ROW
from nondet.core.proof import PRODUCT_INPUTS
from nondet.core.records import Row, Status
from nondet.core.registry import classes, classes_for, load_object
from nondet.core.runfile import read_run
from nondet.kernels.attention.cpu import segments_varlen
from nondet.kernels.attention.cuda import attention_by_one_plan, attention_split
from nondet.kernels.experts.cpu import grouped_anchor, grouped_tiles
from nondet.kernels.matmul import cuda as members
from nondet.kernels.matmul import triton_kernels
from scripts.classes import markdown
from tests.build import Command, absent, linear, tiers
from tests.build import split_k as halves_of_k

K, N = 48, 24
BATCHES = (1, 2, 7, 16, 33)


def chain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, lo: int = 0, hi: int = K) -> Any:
    """k after k in float32: elementwise, so that no library has an order to choose."""
    acc = torch.zeros(x.shape[0], weight.shape[0])
    for k in range(lo, hi):
        acc += x[:, k : k + 1].float() * weight[:, k].float()
    return (acc if bias is None else acc + bias.float()).to(x.dtype)


def narrow(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    cut = range(0, weight.shape[0], 5)
    return torch.cat([chain(x, weight[i : i + 5], None if bias is None else bias[i : i + 5]) for i in cut], 1)


def split_k(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    acc = chain(x.float(), weight.float(), hi=K // 2) + chain(x.float(), weight.float(), lo=K // 2)
    return (acc if bias is None else acc + bias.float()).to(x.dtype)


def changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    """Right, but for what is done to the result."""
    return lambda x, weight, bias=None: change(chain(x, weight, bias))


def wrong_at(bad: Callable[[int], bool]) -> Call:
    return lambda x, weight, bias=None: (split_k if bad(x.shape[0]) else chain)(x, weight, bias)


def question(dtype: str = "bfloat16", layout: str = "nt", values: tuple[int, ...] = BATCHES) -> Question:
    return Question(
        operator="linear", cls="cpu-tiles", dtype=dtype, device="cpu", shape={"K": K, "N": N}, layout=layout,
        values=values, kinds=PRODUCT_INPUTS,
    )  # fmt: skip


def rows_of(key: str) -> int:
    """M of the first operand: "... bfloat16[7,48]/48,1@64 ..."."""
    return int(key.partition("[")[2].partition(",")[0])


def put(member: Call, kept: Certificates, **how: Any) -> Row:
    (row,) = ask(question(**how), {"member": member}, chain, kept)
    return row


@pytest.mark.parametrize("dtype", tiers(["bfloat16"], ["float32", "float16"]))
@pytest.mark.parametrize("layout", ["nt", "nt, bias", "nt, strided"])
def test_another_tile_holds_and_another_order_does_not(kept: Certificates, dtype: str, layout: str) -> None:
    """In every dtype and layout, also where a bias follows: split-K is caught at M = 1, where few elements tell."""
    good = put(narrow, kept, dtype=dtype, layout=layout)
    assert good.key == question(dtype, layout).head("member").key, "so that a run resumes"
    assert (good.status, good.extra["left_at"]) == (Status.IDENTICAL, []), good.reason
    assert [c.holds for c in kept.all()] == [True] * len(BATCHES)
    bad = put(split_k, kept, dtype=dtype, layout=layout)
    assert (bad.status, bad.extra["left_at"]) == (Status.DIVERGENT, list(BATCHES))
    assert bad.values == ["anchor", *BATCHES]
    assert [label == 0 for label in bad.labels] == [True] + [False] * len(BATCHES)
    assert "differs at every M tried" in bad.reason
    assert "with one result at all of them: another order" in bad.reason


def test_a_member_is_excluded_where_it_leaves_and_stands_elsewhere() -> None:
    """The exclusion names the batches that parted, and no others; the verdict says what such a pattern suggests."""
    ways: list[tuple[Callable[[int], bool], list[int], str]] = [
        (lambda m: m == 1, [1], "at M = 1, not at 2, 7, 16, 33"),
        (lambda m: m >= 16, [16, 33], "at M = 16, 33, not at 1, 2, 7"),
        (lambda m: m % 2 > 0, [1, 7, 33], "at M = 1, 7, 33, not at 2, 16"),
    ]
    for bad, left, said in ways:
        kept = Certificates({"device": "cpu"}, None)
        row = put(wrong_at(bad), kept)
        assert row.extra["left_at"] == left
        assert said in row.reason
        assert row.difference.mismatched > 0
        assert {rows_of(c.key): c.holds for c in kept.all()} == {m: m not in left for m in BATCHES}
        assert f"; first: M = {left[0]}, element [" in row.reason
    forms = ["prefill", "decode"]
    assert where_it_differs("form", forms, ["decode"], alike=False) == "differs at form = decode, not at prefill"
    assert "depends on the batch" in where_it_differs("form", forms, forms, alike=False)
    assert "depends on the batch" not in where_it_differs("form", forms, forms, alike=True)


def test_nan_on_one_side_and_a_bias_after_the_rounding_leave_the_class(kept: Certificates) -> None:
    """A member that gives NaN where the anchor has a number leaves the class, though most of its inputs agree."""
    row = put(changed(lambda out: out.masked_fill(out.abs() > 1e6, torch.nan)), kept, dtype="float32")
    assert row.status == Status.DIVERGENT
    assert "NaN or infinity" in row.reason
    assert row.difference.nonfinite > 0
    afterwards: Call = lambda x, weight, bias=None: chain(x, weight) + (-0.0 if bias is None else bias)  # noqa: E731
    assert put(afterwards, kept).status == Status.IDENTICAL
    assert put(afterwards, kept, layout="nt, bias").status == Status.DIVERGENT


def test_a_nondeterministic_member_has_no_class(kept: Certificates) -> None:
    """Where the same call gives other bits, nothing stands, not even at batches that agreed by chance."""
    calls = itertools.count()
    row = put(wrong_at(lambda _: next(calls) % 2 > 0), kept)
    assert row.replays_parted > 0
    assert row.status == Status.DIVERGENT
    assert not any(c.holds for c in kept.all())
    assert row.reason.startswith("the same call again gives other bits")


def test_what_does_not_run_is_not_proven_and_not_excluded(kept: Certificates) -> None:
    refused, mistyped = put(absent, kept), put(changed(torch.Tensor.double), kept)
    assert (refused.status, refused.reason) == (Status.SKIPPED, "not on this machine")
    assert mistyped.status == Status.ERROR
    assert "float64" in mistyped.reason
    assert kept.all() == []
    rows = list(ask(question(), {"a": chain, "b": split_k}, absent, kept))
    assert [r.status for r in rows] == [Status.ERROR] * 2
    assert all("anchor failed" in r.reason for r in rows)
    assert kept.all() == []

    def crashes(out: torch.Tensor) -> torch.Tensor:
        if len(out) == 7:
            raise RuntimeError("too many resources requested")
        return out

    row = put(changed(crashes), kept)
    assert row.status == Status.ERROR
    assert "M = 7: RuntimeError: too many" in row.reason
    assert {rows_of(c.key) for c in kept.all()} == {1, 2, 16, 33}


def test_certificates_say_what_was_proven(kept: Certificates) -> None:
    """Shape, strides, bias and settings of the very calls: another layout is another certificate."""
    put(narrow, kept, layout="nt, strided", values=(2,))
    (strided,) = kept.all()
    parts = (f"bfloat16[2,{K}]/{2 * K},1@", f"bfloat16[{N},{K}]/{K},1@", "float32=")
    assert all(part in strided.key for part in parts), strided.key
    put(narrow, kept, layout="nt", values=(2,))
    assert [f"bfloat16[2,{K}]/{K},1@" in c.key for c in kept.all() if c != strided] == [True]

    class Sized:
        def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
            whole = chain(x[:1], weight, bias) if x.shape[0] == 1 else None
            return whole if whole is not None else torch.cat([self(x[:1], weight, bias), split_k(x[1:], weight, bias)])

        def claim(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[str, str]:
            return "sized", f"M={x.shape[0]}"

    put(Sized(), kept, values=(1, 2))
    assert kept.standing("sized", "M=1") is True
    assert kept.standing("sized", "M=2") is False


def test_rows_that_share_a_sum_are_caught(kept: Certificates) -> None:
    """A softmax whose sum runs over pairs of rows for an even batch is right at odd ones only."""

    def paired(x: torch.Tensor) -> torch.Tensor:
        e = torch.exp(x - x.amax(-1, keepdim=True))
        return e / (e.sum(-1, keepdim=True) if x.shape[0] % 2 else e.flip(-1).cumsum(-1)[:, -1:])

    one = Question(
        operator="softmax", cls="cpu-rows", dtype="float32", device="cpu", shape={"W": 1000}, layout="contiguous",
        values=(1, 2, 3, 4, 15), kinds=("bell", "outlier"), one_row=True,
    )  # fmt: skip
    (row,) = ask(one, {"paired": paired}, paired, kept)
    assert row.extra["left_at"] == [2, 4]


def test_a_member_that_writes_or_fails_when_repeated_fails_alone(kept: Certificates) -> None:
    """Neither is said of the anchor, nor of the members after it, which get the operands that they should."""

    def scales(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = chain(x, weight, bias)
        x.mul_(0.5)
        return out

    def once(out: torch.Tensor) -> torch.Tensor:
        if next(calls) == 1:
            raise RuntimeError("no second time")
        return out

    calls = itertools.count()
    members = {"scales": scales, "once": changed(once), "narrow": narrow}
    first, second, third = ask(question(layout="nt, strided"), members, chain, kept)
    assert [row.status for row in (first, second, third)] == [Status.ERROR, Status.ERROR, Status.IDENTICAL]
    assert "writes to its operands" in first.reason
    assert "M = 1: RuntimeError: no second time" in second.reason
    certified = {c.member for c in kept.all()}
    assert ("narrow" in certified, "scales" in certified) == (True, False)


def test_how_long_it_takes_is_said_within_a_factor_of_two(kept: Certificates) -> None:
    """Before anything is asked, from a few questions: members that cost by the row, and a first call that loads."""
    spent, calls = [0.0], itertools.count()

    def costs(seconds: float) -> Call:
        def member(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            spent[0] += seconds * (1 + len(x) * weight.shape[0] / 100) + 3.0 * (next(calls) == 0)
            return x @ weight.mT

        return member

    sizes = [(width, values) for width in (8, 24, 64, 96) for values in ((1, 2), BATCHES, (1, 64))]
    asked = [replace(question(values=values), shape={"K": K, "N": width}) for width, values in sizes]
    planned = [Assignment(q, costs(0.01), {"one": costs(0.01), "other": costs(0.012)}) for q in asked]
    said = sum(estimate(planned, lambda: spent[0]))
    sampled, spent[0] = spent[0], 0.0
    assert sampled < 10.0
    for item in planned:
        list(ask(item.question, item.members, item.anchor, kept))
    assert spent[0] / 2 < said < spent[0] * 2
    assert estimate([]) == []


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _linear(shape: dict[str, int], layout: str, values: tuple[int, ...]) -> Question:
    about: dict[str, Any] = {"dtype": "float16", "device": DEVICE, "kinds": ("order",)}
    return Question(operator="linear", cls="chain", shape=shape, layout=layout, values=values, **about)


@pytest.fixture
def one_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    """All operands count as 16-byte aligned: where a CPU's allocator happens to put them would choose the key."""
    monkeypatch.setattr(members, "alignment_of", lambda *_: 16)


@pytest.mark.nightly
@pytest.mark.usefixtures("chained_dot")
def test_triton_members_are_wired_to_their_anchors(kept: Certificates) -> None:
    """Tiles, grouped tiles, and every way to compute attention, put to questions as on a GPU; float16 on a CPU here."""
    common: dict[str, Any] = {"dtype": "float16", "device": DEVICE, "kinds": ("order", "bell")}
    rows: list[Row] = []
    for operator, layout in (("linear", "nt, bias"), ("matmul", "nn"), ("matmul", "tn")):
        shape = {"K": 70, "N": 33}
        one = Question(operator=operator, cls="chain", shape=shape, layout=layout, values=(1, 17), **common)
        tiles = getattr(members, f"triton_tiles_{operator}")("float16")
        rows += ask(one, dict(list(tiles.items())[:2]), getattr(members, f"chain_anchor_{operator}"), kept)
    common |= {"values": (1, 20)}
    experts = {"operator": "grouped_matmul", "cls": "grouped", "shape": {"E": 3, "K": 64, "N": 32}, "layout": ""}
    grouped = GroupedQuestion(**experts, **common)
    tiles = grouped_tiles("float16")
    rows += ask(grouped, {name: tiles[name] for name in (min(tiles), max(tiles))}, grouped_anchor, kept)
    for operator in ("rms_norm", "rms_norm_residual", "softmax", "logsumexp", "cross_entropy"):
        call = load_object(f"nondet.kernels.rows.cuda:{operator}")
        common |= {"kinds": ("bell", "wide"), "values": (1, 5)}
        one = Question(operator=operator, cls="lanes", shape={"W": 300}, layout="strided", one_row=True, **common)
        rows += ask(one, {operator: call}, call, kept)
    assert [r.reason for r in rows if r.status != Status.IDENTICAL] == []
    assert len(rows) == 13


@pytest.mark.nightly
@pytest.mark.usefixtures("chained_dot")
def test_every_form_of_attention_is_compared_with_the_same_prefill(kept: Certificates) -> None:
    """Chunks, decode, ragged and split forms hold; an attention that cuts keys by their number does not."""
    forms = ("prefill", "decode alone", "chunks of 17", "ragged")
    shape = {"B": 2, "Hq": 2, "Hkv": 1, "T": 36 if DEVICE == "cuda" else 20, "D": 16}  # the interpreter is slow
    one = AttentionQuestion(
        operator="attention", cls="segments", dtype="float32", device=DEVICE, shape=shape, layout="GQA",
        values=forms, kinds=("bell",),
    )  # fmt: skip

    def halves(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Keys in two parts, whose border follows from how many there are."""
        visible = torch.ones(q.shape[2], k.shape[2], device=q.device).tril(k.shape[2] - q.shape[2]).bool()
        s = (q @ k.repeat_interleave(2, 1).mT / 4).masked_fill(~visible, -torch.inf)
        p = torch.exp(s - s.amax(-1, keepdim=True))
        h, w = k.shape[2] // 2, v.repeat_interleave(2, 1)
        out = p[..., :h] @ w[..., :h, :] + p[..., h:] @ w[..., h:, :]
        return out / (p[..., :h].sum(-1, keepdim=True) + p[..., h:].sum(-1, keepdim=True))

    found = {"split": attention_split, "varlen": segments_varlen, "halves": halves}
    rows = {r.impl: r for r in ask(one, found, attention_by_one_plan, kept)}
    assert rows["split"].status == rows["varlen"].status == Status.IDENTICAL
    assert rows["halves"].status == Status.DIVERGENT
    assert rows["halves"].error is None


@pytest.mark.usefixtures("chained_dot", "one_alignment")
def test_the_dispatcher_finds_what_certify_proved(kept: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    """One key, one store: at a shape and layout that was certified no proof is run, and at another one it is."""
    shape = {"K": 70, "N": 33 if DEVICE == "cpu" else 40}
    tile, other = [t.name for t in triton_kernels.tiles(torch.float16) if t != triton_kernels.anchor(torch.float16)][:2]
    one = _linear(shape, "nt, bias", (1, 17))
    tiles = members.triton_tiles_linear("float16")
    rows = list(ask(one, {f"triton/{tile}": tiles[tile]}, members.chain_anchor_linear, kept))
    assert [r.status for r in rows] == [Status.IDENTICAL]

    monkeypatch.setattr(members, "certificates", lambda: kept)
    monkeypatch.setattr(members, "INTERPRETED", False)
    monkeypatch.setattr(members, "choices", lambda *_: [tile])
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    proofs: list[str] = []
    right = members.prove_by_bits
    monkeypatch.setattr(
        members, "prove_by_bits", lambda claims, *rest: proofs.append(claims[0].member) or right(claims, *rest)
    )
    x, weight, bias = (torch.rand(size, device=DEVICE).half() for size in ((17, 70), (shape["N"], 70), (shape["N"],)))
    members.forget()
    try:
        with listen() as notes:
            members.linear(x, weight, bias)
            members.linear(x[:1], weight, bias)
        assert proofs == []
        assert list(notes) == [f"matmul_chain[{triton_kernels.tile_named(tile)}]"]
        members.linear(x[:16], weight, bias)  # another M
        members.linear(x, weight)  # no bias
        monkeypatch.setattr(members, "choices", lambda *_: [other])
        members.linear(x[:5], weight, bias)  # another member
        assert proofs == [f"triton {tile}", f"triton {tile}", f"triton {other}"]
    finally:
        members.forget()


@pytest.mark.usefixtures("chained_dot", "one_alignment")
def test_a_tile_that_leaves_its_class_is_barred_from_the_dispatcher(kept: Certificates) -> None:
    """An exclusion is written where the dispatcher looks: at the tile, the shape and the layout."""
    x, weight = (torch.ones(size, dtype=torch.float16, device=DEVICE) for size in ((16, 64), (24, 64)))
    one = _linear({"K": 64, "N": 24}, "nt", (1, 16))
    tiles = members.triton_tiles_linear("float16")
    tile = next(iter(tiles))
    asked = members.member(tile, members.Operands(x[None], weight.T[None]))

    class Wrong:
        claim = staticmethod(tiles[tile].claim)  # type: ignore[attr-defined] # of the dispatcher's own members

        def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return halves_of_k(x, weight, bias)

    list(ask(one, {"mine": halves_of_k}, linear, kept))
    assert kept.standing(asked.name, asked.key) is None
    list(ask(one, {f"triton/{tile}": Wrong()}, linear, kept))
    assert kept.standing(asked.name, asked.key) is False


def test_the_classes_are_whole_and_planned_and_the_page_says_what_the_table_says() -> None:
    """Anchors, orders in words, targets that can be imported; docs/classes.md has the output of scripts/classes.py."""
    assert set(classes()) >= {"chain", "segments"}
    for name, cls in classes().items():
        assert (cls.name, bool(cls.members)) == (name, True)
        assert len(cls.order) > 50
        for operator, found in cls.members.items():
            targets = {cls.anchors[operator], *found.values()} - {INVARIANT, ONE_ROW}
            assert all(callable(load_object(target)) for target in targets)
            assert INVARIANT in found
    page = Path(__file__).parent.parent.parent / "docs" / "classes.md"
    assert markdown().strip() in page.read_text(encoding="utf-8")
    asked = plan(Wish(device="cuda"))
    keys = [one.question.head(name).key for one in asked for name in one.members]
    assert len(keys) == len(set(keys))
    assert {one.question.cls for one in asked} == {c.name for c in classes().values() if c.device == "cuda"}
    main_shape = next(one for one in asked if one.question.dtype == "bfloat16" and one.question.operator == "linear")
    assert {"invariant", "cublaslt"} < main_shape.members.keys()
    assert any(name.startswith("tma/") for name in main_shape.members)
    assert {1, 17, 4096} <= set(main_shape.question.values)
    assert [c.name for c in classes_for("linear", "cuda")] == ["chain", "chain-tf32"]
    few = plan(Wish(device="cuda", operators=("linear",), members=("cublaslt",), m=(40,), k=256, n=100))
    assert {name for one in few for name in one.members} == {"cublaslt", "cublaslt/1", "cublaslt/2", "cublaslt/3"}
    assert {one.question.values[-1] for one in few} == {40}


@pytest.fixture
def run(run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("NONDET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(store, "_instances", {})
    return run


SMALL = ("certify", "linear", "--device", "cpu", "--k", "64", "--n", "32", "--m", "17", "--dtype", "bfloat16")

WRONG = [
    ("liner", ["'liner'", "linear"]),
    ("linear --class chian --device cpu", ["'chian'", "chain"]),
    ("linear --class chain --device cpu", ["belongs to cuda", "cpu-tiles"]),
    ("softmax --class cpu-tiles --device cpu", ["no softmax"]),
    ("linear --member cublas-lt --device cpu", ["'cublas-lt'", "invariant"]),
    ("linear --dtype floaty16", ["'floaty16'", "float16"]),
    ("linear --dtype float8_e4m3fn --device cpu", ["linear", "--dtype float8_e4m3fn"]),
    ("linear --device tpu", ["'tpu'", "cpu"]),
    ("linear --inputs nope", ["'nope'", "Known: bell, cancel, order, order-wide, outlier, underflow, wide"]),
    ("--show --forget", ["--forget", "by itself"]),
    ("linear --forget", ["--forget", "by itself"]),
    ("linear --seed 99999999999999999999999", ["'--seed'"]),
    ("linear --m 0", ["--m 0"]),
    ("linear --k -3", ["--k -3"]),
    ("linear --impl no.such.module:f", ["no.such.module"]),
    ("--impl math:sqrt", ["--impl", "certify linear"]),
    ("linear --impl math:pi", ["float", "function"]),
    ("linear --preset qwen3-8c", ["'qwen3-8c'", "qwen3-8b"]),
    ("linear --preset qwen3-8b --k 5", ["--k and --n", "one of the two"]),
    ("linear --out x.txt", ["x.txt", ".jsonl"]),
    ("linear --fail-on sunshine", ["'sunshine'", "divergent"]),
    # no silent fallback to the classes of a CPU
    *[("linear --device cuda", ["--device cuda"])] * (not torch.cuda.is_available()),
]


def test_bad_input_is_one_clear_line(run: Any, tmp_path: Path) -> None:
    for argv, said in WRONG:
        code, out, err = run("certify", *argv.split())
        assert (code, out, err[:8], err.count("\n")) == (2, "", "nondet: ", 1), argv
        assert [word for word in said if word not in err] == [], argv
        assert list(tmp_path.iterdir()) == [], argv


def test_the_command_proves_keeps_shows_and_forgets(run: Any, tmp_path: Path) -> None:
    """Rows in a run file that reports read, certificates in the cache, a resumed run free, --forget empties it."""
    code, out, err = run(*SMALL, "--out", "r.jsonl", "--report", "r.md", "--report", "r.html")
    assert code == 0, err
    assert "invariant: no divergence observed in " in " ".join(out.split())
    rows = read_run(Path("r.jsonl")).rows
    assert {(r.probe, r.status) for r in rows} == {("certify", Status.IDENTICAL)}
    assert "no divergence observed" in Path("r.md").read_text()
    assert run(*SMALL, "--out", "r.jsonl")[0] == 2
    assert run(*SMALL, "--out", "r.jsonl", "--resume")[0] == 0
    assert read_run(Path("r.jsonl")).rows == rows
    assert list((tmp_path / "cache" / "certificates").iterdir())
    code, out, _ = run("certify", "--show", "--device", "cpu", "--json")
    certificates = json.loads(out)["certificates"]
    assert (code, {c["holds"] for c in certificates}) == (0, {True})
    asked = [c for c in certificates if c["member"] == "invariant"]
    assert len(asked) == sum(len(r.values) - 1 for r in rows) - 1  # one row has no stride: the same twice
    _, out, _ = run("certify", "--show", "--device", "cpu")
    assert [words in out for words in (f"standing: {len(certificates)}", "excluded: none")] == [True, True]
    assert run("certify", "--forget", "--device", "cpu")[0] == 0
    assert not list((tmp_path / "cache" / "certificates").iterdir())


def test_a_users_kernel_gets_a_verdict_in_plain_words(run: Any, tmp_path: Path) -> None:
    """Right except at M = 1: said so, excluded there alone, a finding and no failure unless asked to be one."""
    (tmp_path / "users_kernel_1.py").write_text(
        "from nondet.kernels.matmul.cpu import linear as right\n"
        "def linear(x, weight, bias=None):\n"
        "    out = right(x, weight, bias)\n"
        "    if x.shape[0] == 1:\n"
        "        half = x.shape[1] // 2\n"
        "        parts = [x[:, s].float() @ weight[:, s].float().T for s in (slice(half), slice(half, None))]\n"
        "        out = (sum(parts) + (0 if bias is None else bias.float())).to(x.dtype)\n"
        "    return out\n"
    )
    user = (*SMALL, "--class", "cpu-tiles", "--impl", "users_kernel_1:linear")
    code, out, _ = run(*user, "--out", "u.jsonl", "--report", "u.md")
    assert code == 0
    assert "left its numerics class in 3 of 3 cases" in Path("u.md").read_text()
    assert "M anchor: A | 1: B | 2-17: A" in Path("u.md").read_text()
    assert "differs at M = 1, not at 2, 3, 5, 8, 13, 16, 17; first: M = 1" in " ".join(out.split())
    assert {tuple(r.extra["left_at"]) for r in read_run(Path("u.jsonl")).rows} == {(1,)}
    assert run(*user, "--out", "v.jsonl", "--fail-on", "divergent")[0] == 3
    assert run(*SMALL, "--out", "w.jsonl", "--fail-on", "divergent")[0] == 0
    shown = json.loads(run("certify", "--show", "--device", "cpu", "--json")[1])["certificates"]
    mine = [c for c in shown if c["member"].startswith("users_kernel_1:linear @")]
    assert {c["holds"] for c in mine} == {True, False}


ALWAYS = "attention softmax grouped-matmul matmul scaled-matmul"
NIGHTLY = "attention-gradient rms-norm rms-norm-residual cross-entropy sum softmax-gradient silu-gradient"


@pytest.mark.parametrize("operator", tiers(ALWAYS.split(), [*NIGHTLY.split(), "rms-norm-gradient"]))
def test_the_cpus_classes_hold_on_this_machine(run: Any, operator: str) -> None:
    """Every operator with a class on a CPU can be asked, answers, and stays in its class."""
    how = ("--k", "48", "--n", "32") if operator not in ("attention",) else ()
    dtype = "float8_e5m2" if operator == "scaled-matmul" else "float32"
    code, _, err = run("certify", operator, "--device", "cpu", "--dtype", dtype, "--m", "9", *how, "--out", "c.jsonl")
    assert code == 0, err
    rows = read_run(Path("c.jsonl")).rows
    assert rows
    assert [r.reason for r in rows if r.status != Status.IDENTICAL] == []


@pytest.mark.gpu
def test_the_chain_holds_on_this_gpu_and_splits_do_not(run: Any, tmp_path: Path) -> None:
    """Tiles and the dispatcher stay in class chain; cutting K in two, through the same kernel, does not."""
    (tmp_path / "users_kernel_2.py").write_text(
        "from nondet.kernels.matmul.cuda import chain_anchor_linear as chain\n"
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
