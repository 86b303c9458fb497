"""Anchors, members and the plan: wired as on a GPU, and whole without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nondet.certify.check import ask
from nondet.certify.plan import AttentionQuestion, GroupedQuestion, Question, Wish, plan
from nondet.core.certificates import Certificates
from nondet.core.launch import listen
from nondet.core.operator import INVARIANT, ONE_ROW
from nondet.core.records import Row, Status
from nondet.core.registry import classes, classes_for, load_object
from nondet.kernels.attention.cpu import segments_varlen
from nondet.kernels.attention.cuda import attention_by_one_plan, attention_split
from nondet.kernels.experts.cpu import grouped_anchor, grouped_tiles
from nondet.kernels.matmul import cuda as members
from nondet.kernels.matmul import triton_kernels
from scripts.classes import markdown
from tests.build import linear, split_k

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
    grouped = GroupedQuestion(
        operator="grouped_matmul", cls="grouped", shape={"E": 3, "K": 64, "N": 32}, layout="", **common
    )
    tiles = grouped_tiles("float16")
    rows += ask(grouped, {name: tiles[name] for name in (min(tiles), max(tiles))}, grouped_anchor, kept)
    for operator in ("rms_norm", "rms_norm_residual", "softmax", "logsumexp", "cross_entropy"):
        call = load_object(f"nondet.kernels.rows.cuda:{operator}")
        common |= {"kinds": ("bell", "wide"), "values": (1, 5)}
        rows += ask(
            Question(operator=operator, cls="lanes", shape={"W": 300}, layout="strided", one_row=True, **common),
            {operator: call}, call, kept,
        )  # fmt: skip
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
            return split_k(x, weight, bias)

    list(ask(one, {"mine": split_k}, linear, kept))
    assert kept.standing(asked.name, asked.key) is None
    list(ask(one, {f"triton/{tile}": Wrong()}, linear, kept))
    assert kept.standing(asked.name, asked.key) is False


def test_the_classes_are_whole_and_the_page_says_what_the_table_says() -> None:
    """Every operator of a class has an anchor, an order in words, and targets that can be imported; the generated part
    of docs/classes.md is the output of `python scripts/classes.py`."""
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


def test_the_plan_for_a_gpu_asks_every_class_and_member() -> None:
    """Without a GPU the plan can still be made: what it asks, of whom, and that no case is asked twice."""
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
