"""The parts that axes are made of: orders of service, routers, drafts, and what --vary takes and refuses."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from nondet.errors import UnknownNameError, UserError
from nondet.sampling.axes import AXES, Conditions, Proof, Subject, parse_vary, plan_axes
from nondet.sampling.model import LoadedModel
from nondet.sampling.plan import Request, earlier_text, long_prompt, parse_load
from nondet.sampling.schedule import ORDERS, client_of, route
from nondet.sampling.speculation import check_draft_model, edit, look_up
from nondet.services.sample import check_vary

LOAD = "others=3,targets=4,spread=4,prompt=6-20,tokens=2-8,budget=16,page=4,requests=16,sharing=off"


def test_orders_of_service() -> None:
    """Each policy arranges as its name says, and clients take turns under deficit round robin."""
    prompts = {"t0": range(40), "t1": range(5), "r0-b000": range(40), "r0-b001": range(100, 110), "t2": range(90, 130)}
    requests = {name: Request(name, name[0] == "t", tuple(p), 8, 0) for name, p in prompts.items()}
    waiting = list(requests)
    assert ORDERS["fifo"](requests).arrange(waiting) == waiting
    assert ORDERS["shortest"](requests).arrange(waiting)[:2] == ["t1", "r0-b001"]
    prefix = ORDERS["prefix"](requests)
    assert prefix.arrange(waiting) == waiting  # nothing is cached yet
    prefix.admitted("t0")
    assert prefix.arrange(["t2", "r0-b001", "t1", "r0-b000"]) == ["r0-b000", "t1", "t2", "r0-b001"]
    deficit = ORDERS["deficit"](requests)
    arranged = deficit.arrange(["t0", "t1", "t2", "r0-b000", "r0-b001"])
    assert sorted(arranged) == sorted(requests)
    assert {client_of(requests[name]) for name in arranged[:3]} == {"targets", "others 0", "others 1"}
    for name in ("t0", "t1", "t2"):
        deficit.admitted(name)
    assert client_of(requests[deficit.arrange(["t0", "r0-b000"])[0]]) != "targets"  # it had its turn


def test_routers() -> None:
    """In turn; a long prefix where it is and no overload; every client's credit spread over the replicas."""
    same = [Request(f"t{i}", True, tuple(range(60)), 4, 0) for i in range(12)]
    assert route("round-robin", same, 3) == [i % 3 for i in range(12)]
    stay = route("prefix-load", same[:4], 3)
    assert len(set(stay)) == 1  # the prefix is there, and the load is small
    assert len(set(route("prefix-load", same * 20, 3))) > 1  # until the replica has far more than the others
    other = [Request(f"t{i}", True, tuple(range(100 * i, 100 * i + 60)), 4, 0) for i in range(3)]
    assert sorted(route("prefix-load", other, 3)) == [0, 1, 2]  # nothing to exploit: the least loaded
    assert len(set(route("deficit-prefix", same * 5, 3))) == 3
    assert route("deficit-prefix", same[:2], 3)[0] == route("deficit-prefix", same[:2], 3)[1]


def test_drafts() -> None:
    """Lookup takes the latest place, editing goes on where the text stands in the earlier one; else nothing."""
    assert look_up([1, 2, 3, 9, 1, 2, 3, 7, 1, 2, 3], 2) == [7, 1]
    assert look_up([1, 2, 3], 2) == []
    assert edit([50, 4, 5, 6], 3, earlier=(3, 4, 5, 6, 7, 8, 9)) == [7, 8, 9]
    assert edit([50, 51], 3, earlier=(3, 4, 5)) == []
    assert long_prompt([1] * 60, [2] * 9, 256) == (1,) * 60
    assert len(long_prompt([1, 2], range(90), 256)) == 44
    assert sum(a != b for a, b in zip(earlier_text(range(16)), range(16), strict=True)) == 2


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nonsense", "nonsense"),
        ("sharing,,chunk", "empty part"),
        ("sharing,sharing", "twice"),
        ("all,chunk", "stands alone"),
        ("chunk=", "lacks a value"),
        ("chunk=0", "makes no sense"),
        ("chunk=many", "makes no sense"),
        ("page=1", "makes no sense"),
        ("sharing=maybe", "makes no sense"),
        ("scheduler=fastest", "unknown"),
        ("speculative=guess", "unknown"),
        ("speculative=model", "--draft-model FOLDER"),
        ("routing=random", "unknown"),
        ("attention=flex", "takes sdpa and eager"),
        ("threads=100000", "makes no sense"),
        ("dtype=float8", "not one that models run in"),
        ("graphs", "CUDA"),
        ("budget=16", "no other value"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(spec: str, message: str) -> None:
    """Unknown axes, values that are none, axes that the device lacks: before a model is asked anything."""
    subject = Subject(Conditions(parse_load(LOAD), "float32"), "cpu", (), 2)
    with pytest.raises((UserError, UnknownNameError), match=message) as error:
        plan_axes(parse_vary(spec), subject)
    assert "\n" not in str(error.value)


def test_all_leaves_out_what_the_device_lacks() -> None:
    """A named axis that can't be had is an error; of "all" it is left out with its reason, and never counted."""
    subject = Subject(Conditions(parse_load(LOAD), "float32"), "cuda", (), 2)
    notes = {v.axis.name: v.note for v in plan_axes(parse_vary("all"), subject)}
    assert "CUDA device" in notes["threads"]
    assert not notes["graphs"]


@pytest.mark.parametrize("name", sorted(AXES))
def test_no_proof_without_figures(name: str) -> None:
    """Where the engine tells nothing, no value is taken for proven but "none", which is told by zeros."""
    axis = AXES[name]
    subject = Subject(Conditions(parse_load(LOAD), "float32"), "cuda", (), 2)
    nothing: Counter[str] = Counter()
    proofs = {value: axis.proof(value, nothing, nothing) for value in axis.values(subject)}
    assert all(isinstance(proof, Proof) for proof in proofs.values())
    assert not [value for value, proof in proofs.items() if proof.holds and value != "none"]


@pytest.mark.parametrize(("name", "figure"), [("sharing", "cached"), ("graphs", "graphs")])
def test_off_is_proven_by_a_base_that_was_on(name: str, figure: str) -> None:
    """What the base never did can't be switched off: "off" takes effect only where the base did it."""
    proof = AXES[name].proof
    for now, before, holds in ((0, 3, True), (0, 0, False), (1, 3, False)):
        assert proof("off", Counter({figure: now}), Counter({figure: before})).holds == holds


def test_a_draft_model_drafts_where_it_is_asked_to(tiny_float32: LoadedModel, tiny_folder: Path) -> None:
    """It joins the axis's own values; without the axis, or with other tokens than the model's, it is refused."""
    subject = Subject(Conditions(parse_load(LOAD), "float32"), "cpu", (), 2, draft_model=str(tiny_folder))
    assert "model" in AXES["speculative"].values(subject)
    (varied,) = plan_axes(check_vary("speculative=model", ["x"], str(tiny_folder)) or {}, subject)
    assert [c.setting.draft_model for _, c in varied.values] == [str(tiny_folder)]
    for spec in (None, "chunk", "speculative=lookup:draft"):
        with pytest.raises(UserError, match="--draft-model"):
            check_vary(spec, ["x"], str(tiny_folder))
    assert check_vary(None, ["x"]) is None
    assert check_draft_model(str(tiny_folder), tiny_float32)["parameters"] > 0
    other = replace(tiny_float32, tokenizer=SimpleNamespace(get_vocab=lambda: {"a": 0}))
    with pytest.raises(UserError, match="other tokens"):
        check_draft_model(str(tiny_folder), other)
