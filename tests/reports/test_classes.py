"""Class maps: text and pictures say exactly which values fell into which class."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from nondet.reports.classes import WIDTH, axis_name, classes, kind_of, map_figures, map_text, product_map, short_kernel
from tests.build import REDUCE, row


def test_text_names_values_classes_and_causes() -> None:
    kernels = [["gemv"]] * 3 + [["nvjet_splitK", REDUCE]] * 61
    chunks = {"varied": "query_chunk"}
    for of, text in [
        (row([0] * 3 + [1] * 61, kernels=kernels), "M 1-3: A (gemv) | 4-64: B (nvjet_splitK + splitKreduce_kernel)"),
        (row([0] * 64, kernels=[["k"]] * 64), "M 1-64: A"),  # nothing differs: no cause to name
        (row([0, 0, 1], values=["prefill", "chunk", "decode"], **chunks), "query chunk prefill … chunk: A | decode: B"),
        (row([0, 0, 1], values=[256, 100, 33], **chunks), "query chunk 256 … 100: A | 33: B"),
        (row([0, 1, 0], varied="run"), "2 classes, the largest 2 of 3"),
        (row([], class_sizes=[7, 3], trials=10, distinct=2), "2 classes, the largest 7 of 10"),
        (row([], class_sizes=[10], trials=10, distinct=1), "all 10: A"),
        (row([], class_sizes=[], trials=0, distinct=0), ""),
    ]:
        assert map_text(of) == text
    assert "more" not in map_text(row([i % 2 for i in range(9)]))  # one is shown, not counted
    for n, more in ((10, 2), (100, 92)):
        assert map_text(row([i % 2 for i in range(n)])).endswith(f" | … {more} more")


def test_classes_list_every_value_once() -> None:
    first, second = classes(row([0, 0, 1, 0], kernels=[["a"], ["b"], ["b"], ["a"]]))
    assert (first.ranges, first.count, first.kernels) == ("1-2, 4", 3, [["a"], ["b"]])
    assert (second.ranges, second.count, second.kernels) == ("3", 1, [["b"]])
    # the rows of a product are M; whatever else varied has its own name
    assert axis_name(row()) == "M"
    assert axis_name(row(operator="attention")) == "batch size"
    assert axis_name(row(varied="query_chunk")) == "query chunk"


def test_kernel_names_lose_what_hides_them() -> None:
    silu = "void vectorized_elementwise_kernel<4, silu(at::T&)::{lambda(float)#1}, Array<char*, 2ul> >(int)"
    for name, short in [
        (REDUCE, "splitKreduce_kernel"),
        ("nvjet_tst_64x8_coopB_splitK_TNT", "nvjet_tst_64x8_coopB_splitK_TNT"),
        ("void at::native::(anonymous namespace)::f<4, float>(int)", "f"),
        (silu, "vectorized_elementwise_kernel"),
        ("_matmul_chain_kernel", "_matmul_chain_kernel"),
        ("<>", "<>"),
        ("a<b<c>>::d<e>", "d"),
        ("k" * 60 + "tile_a" + "k" * 10, "k" * 40 + "…" + "tile_a"[1:] + "k" * 10),
        ("\x1b[31mred", "␛[31mred"),
    ]:
        assert short_kernel(name) == short


def cells(lane: dict[str, Any]) -> list[tuple[float, float]]:
    return [span for cell in lane["cells"] for span in cell["spans"]]


def test_every_value_is_painted_in_its_own_lane() -> None:
    labels = [0, 0, 1, 2, 1, 0, 0, 2]
    for values in (list(range(1, 9)), [f"order {i}" for i in range(8)]):
        (figure,) = map_figures([row(labels, values=values)])
        painted = sorted(span for lane in figure["panels"][0]["lanes"] for span in cells(lane))
        assert painted[0][0] >= 0.0
        assert painted[-1][1] <= WIDTH
        assert all(left[1] < right[0] for left, right in itertools.pairwise(painted))
        assert [len(cells(lane)) for lane in figure["panels"][0]["lanes"]] == [4, 2, 2]


def test_cells_are_what_kernels_are() -> None:
    names = [["nvjet_sm90_tst_64x8_splitK_TNT", REDUCE], ["gemvNSP_kernel"], ["nvjet_sm90_tst_64x8_TNT"]]
    (figure,) = map_figures([row([0, 1, 2], kernels=names)])
    words = [cell["words"] for lane in figure["panels"][0]["lanes"] for cell in lane["cells"]]
    assert [text.split(", ")[1] for text in words] == ["split", "GEMV", "tile"]
    assert words[0] == "M 1: class A, split, nvjet_sm90_tst_64x8_splitK_TNT + splitKreduce_kernel"
    # flash's splitkv kernel serves unsplit calls as well: only the kernel that adds the parts shows a split
    for one, added in [
        ("flash_fwd_splitkv_kernel", "flash_fwd_splitkv_combine_kernel"),
        ("decode_kernel", "merge_all_kernel"), ("attend_kernel", "merge_kernel"),  # nondet's own, in one pass
    ]:  # fmt: skip
        assert (kind_of([one]), kind_of([one, added])) == ("tile", "split")


def _line(n: int, labels: list[int], impl: str = "stock", **extra: Any) -> Any:
    said = {"map": {"axis": "N", "unequal": []} | extra}
    shape = {"M": len(labels), "N": n, "K": 8}
    return row(labels, case=f"map of M x N, K=8 N={n}", impl=impl, shape=shape, extra=said)


def test_a_map_s_lines_are_told_together_and_drawn_with_their_borders() -> None:
    lines = [_line(2, [0, 0, 1]), _line(1, [0, 0, 1]), _line(3, [0, 1, 1], unequal=[1, 7, "x"]), _line(4, [0, 0, 1])]
    found = product_map([*lines, *(_line(n, [0, 0, 0], "invariant") for n in (1, 2))])
    assert found.texts == [
        ("stock", "N 1-2, 4: M 1-2: A | 3: B"),
        ("stock", "N 3: M 1: A | 2-3: B; equal rows of one call got unequal bits in B"),
        ("invariant", "N 1-2: M 1-3: A"),
    ]
    stock, invariant = found.drawn["panels"]
    assert [lane["name"] for lane in stock["lanes"]] == ["1", "2", "3", "4"]
    assert [lane["name"] for lane in invariant["lanes"]] == ["all"]
    first, second = stock["lanes"][0]["cells"]
    assert (first["label"], second["label"]) == (0, 1)
    assert first["spans"][-1][1] == second["spans"][0][0] == pytest.approx(792.5, abs=0.05)
    assert second["words"].startswith("N 1, ")
    assert "3: class B" in second["words"]


def test_what_is_no_map_is_drawn_as_none() -> None:
    for said in [{}, {"map": 3}, {"map": {"axis": "M x"}}, {"map": {"axis": ["N"]}}]:
        assert product_map([row([0, 1], extra=said)]) is None
        assert product_map([row([0, 1], values=[1, 3], shape={"N": 2}, extra={"map": {"axis": "N"}})]) is None
