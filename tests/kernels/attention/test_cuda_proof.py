"""Attention's gate: a way to launch is proven at its first use, and what is not proven gives way to the one plan.

On a CPU in Triton's interpreter, with segments of 64 keys and tiles of 32 (float32), steered as if on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nondet.core import compare
from nondet.core.certificates import Certificates
from nondet.core.launch import listen
from nondet.kernels.attention import cuda, triton_kernels
from nondet.kernels.attention.cuda import attention, attention_varlen
from nondet.kernels.attention.triton_kernels import Form, Plan, Way, one_plan
from tests.build import DEVICE

ALIKE = ((True, True, True),) * 4
NARROW = Plan(16, 32, 16, 4, 1, False)


def form(**changed: Any) -> Form:
    plain = Form(torch.float32, 16, 2, True, False, False, False, None, None, ALIKE, (True,) * 3)
    return plain._replace(**changed)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Certificates]:
    """Certificates in memory, empty; short segments."""
    book = Certificates({"device": "test"}, None)
    monkeypatch.setattr(cuda, "certificates", lambda: book)
    if DEVICE == "cpu":
        monkeypatch.setattr(triton_kernels, "SEGMENT", 64)
        monkeypatch.setattr(cuda, "_HEADS_KV", 1)
        monkeypatch.setattr(cuda, "_BLOCKS", 0.3)  # the interpreter is slow
    cuda.forget()
    yield book
    cuda.forget()


FORMS = {
    "dense": (form(), Way(NARROW, 2, False)),
    "not causal, odd layout": (
        form(causal=False, steps=((True, True, False),) * 4, aligned=(True, False, True)),
        Way(NARROW, 1, False),
    ),
    "window, dropped keys": (
        form(packed=True, window=True, positions=torch.int64, group=1),
        Way(NARROW._replace(peel=False), 0, False),
    ),
    "paged, soft cap": (form(packed=True, softcap=True, paged=torch.int32), Way(NARROW, 1, False)),
}


@pytest.mark.usefixtures("chained_dot")
@pytest.mark.skipif(DEVICE == "cuda", reason="segments of 64 keys, for the interpreter")
@pytest.mark.parametrize("name", FORMS)
def test_ways_of_the_class_are_proven(kept: Certificates, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense, packed, windowed with dropped keys, paged, capped: each way has the bits of the one plan, densely."""
    what, way = FORMS[name]
    if name != "dense":
        monkeypatch.setattr(cuda, "_KINDS", ("values", "scores"))
    assert cuda.prove_way(what, way, torch.device(DEVICE)) is True
    (proof,) = kept.all()
    assert proof.member == way.name
    assert "values from query 1" in proof.evidence
    assert "scores" in proof.evidence


@pytest.mark.usefixtures("chained_dot")
@pytest.mark.skipif(DEVICE == "cuda", reason="segments of 64 keys, for the interpreter")
def test_another_order_is_excluded(kept: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of another length, as a number of splits would give: caught at the first inputs, in most elements."""
    right = cuda.launch
    apart: list[float] = []

    def other(call: Any, way: Way) -> None:
        right(call, way)
        if way == one_plan(16, torch.float32):
            return
        expected = call.out.clone()
        with monkeypatch.context() as patch:
            patch.setattr(triton_kernels, "SEGMENT", 32)
            right(call, way)
        apart.append(float((~compare.same(expected, call.out)).float().mean()))

    monkeypatch.setattr(cuda, "launch", other)
    assert cuda.prove_way(form(), Way(NARROW, 1, False), torch.device(DEVICE)) is False
    assert len(apart) == 1  # the first kind told
    assert apart[0] > 0.7  # where fewer than half of these few keys are added in another order
    assert "elements differ" in kept.excluded()[0].evidence


def chained(terms: torch.Tensor, cut: int) -> torch.Tensor:
    """terms [..., K] -> [...]: chains of `cut` terms from zero in float32, and those added in order."""
    total = torch.zeros(terms.shape[:-1])
    for start in range(0, terms.shape[-1], cut):
        part = torch.zeros_like(total)
        for j in range(start, min(start + cut, terms.shape[-1])):
            part += terms[..., j]
        total += part
    return total


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("window", [None, 1200])
def test_inputs_show_another_order_in_nearly_every_element(dtype: torch.dtype, window: int | None) -> None:
    """At real sizes, rounded to the result's dtype: segments of another length, and scores in another order."""
    what = form(dtype=dtype, head_dim=64, group=1, window=window is not None)
    cpu = torch.device("cpu")
    (_, _, v), _ = cuda._drawn("values", what, 20, 1499, window, 1, cpu)
    seen = v[0, :, 1499 - window if window else 0 : 1480].mT.float()  # what the first query sees
    assert not seen.double().sum(-1).any()
    assert float((chained(seen, 512).to(dtype) != chained(seen, 256).to(dtype)).float().mean()) > 0.9
    (q, k, v), scale = cuda._drawn("scores", what, 8, 300, window, 1, cpu)
    products = q[0, 0, :, None].float() * k[0, 0].float()
    assert not products.double().sum(-1).any()
    assert scale is not None
    weights = (torch.softmax(chained(products, cut).double() * scale, -1) for cut in (64, 16))
    first, second = ((p @ v[0, 0].double()).to(dtype) for p in weights)
    assert float((first != second).float().mean()) > 0.9


@pytest.fixture
def steered(monkeypatch: pytest.MonkeyPatch, kept: Certificates) -> dict[str, Any]:
    """The gate as on a GPU, with a prover that says what it is told to, and the names of what it was asked."""
    state: dict[str, Any] = {"asked": [], "verdict": True, "capturing": False}

    def prove_way(what: Form, way: Way, device: torch.device) -> bool | None:
        state["asked"].append(way.name)
        verdict = state["verdict"] if way != one_plan(16, torch.float32) else state.get("one", True)
        if verdict is not None:
            kept.record(way.name, cuda._key(what), verdict, "told")
        return verdict  # type: ignore[no-any-return] # what the test put there

    monkeypatch.setattr(cuda, "INTERPRETED", False)
    monkeypatch.setattr(cuda, "prove_way", prove_way)
    monkeypatch.setattr(triton_kernels, "span_for", lambda *_: 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    return state


def operands(tokens: int = 150) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, heads, n, 16, generator=rng) for heads, n in ((2, 1), (1, tokens), (1, tokens)))


steering = pytest.mark.skipif(DEVICE == "cuda", reason="steers the gate on the interpreter")


@steering
def test_the_first_use_proves_and_later_uses_do_not(steered: dict[str, Any], kept: Certificates) -> None:
    """Once for a way and form, at any length; another form is another proof, and a kept certificate is none."""
    with listen() as notes:
        attention(*operands())
        attention(*operands(140))
    assert len(steered["asked"]) == 1
    assert set(notes) == {"attention_split[16x32, 1 of 3 x 64]"}
    attention(*operands(), causal=False)
    assert len(steered["asked"]) == 2
    cuda.forget()  # as a new process, with the file of certificates
    attention(*operands())
    assert len(steered["asked"]) == 2
    assert len(kept.all()) == 2


@steering
def test_a_way_of_other_bits_gives_way_to_the_one_plan(steered: dict[str, Any]) -> None:
    """Excluded, or not to be told (memory): the one plan runs and the note says so; only the first is for good."""
    for verdict in (None, False):
        steered["verdict"] = verdict
        with listen() as notes:
            out = attention(*operands())
        assert list(notes) == ["attention_one_pass[16x32, the one plan]"]
        assert compare.identical(out, cuda.attention_by_one_plan(*operands()))
    asked = len(steered["asked"])
    attention(*operands())
    assert len(steered["asked"]) == asked


@steering
def test_nothing_unproven_runs_while_a_graph_is_captured(steered: dict[str, Any]) -> None:
    """Nothing can be proven then: the one plan, for this capture only; what is proven is used there too."""
    steered["capturing"] = True
    with listen() as notes:
        attention(*operands())
    assert list(notes) == ["attention_one_pass[16x32, the one plan]"]
    assert steered["asked"] == []
    steered["capturing"] = False
    attention(*operands())
    steered["capturing"] = True
    with listen() as notes:
        attention(*operands())
    assert list(notes) == ["attention_split[16x32, 1 of 3 x 64]"]


@steering
def test_without_a_sound_plan_there_is_no_attention(steered: dict[str, Any]) -> None:
    """Where even the one plan's rows depend on their place, the call is refused, not computed somehow."""
    steered |= {"verdict": False, "one": False}
    with pytest.raises(NotImplementedError, match="one plan"):
        attention(*operands())


@steering
def test_a_known_way_is_one_look_up_away(steered: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """No key is written, no certificate is looked for and nothing is proven for a call that was seen before."""
    q, k, v = operands()
    attention(q, k, v)
    for name in ("form_of", "certificates", "operands_key", "_settled"):
        monkeypatch.setattr(cuda, name, None)  # called, they would raise
    attention(q, k, v)


@steering
def test_forms_that_change_the_code_have_keys_of_their_own(steered: dict[str, Any], kept: Certificates) -> None:
    """Masks, windows, caps, packing, positions, an index, and layouts that the compiler tells apart."""
    q, k, v = operands()
    attention(q, k, v)
    attention(q, k, v, window=70)
    attention(q, k, v, softcap=3.0)
    attention(q, *(torch.nn.functional.pad(x, (0, 1))[..., :16] for x in (k, v)))
    cu = torch.tensor([0, 1], dtype=torch.int32)
    packed = {"cu_seqlens_q": cu, "cu_seqlens_k": cu * 150, "max_seqlen_q": 1, "max_seqlen_k": 150}
    tokens = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    attention_varlen(*tokens, **packed)
    attention_varlen(*tokens, **packed, key_index=torch.arange(150))
    attention_varlen(*tokens, **packed, window=200, positions=torch.tensor([149]))
    assert len({c.key for c in kept.all()}) == 7


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("group", "head_dim"), [(4, 128), (1, 64), (2, 256)])
def test_every_plan_is_proven_on_a_gpu(dtype: torch.dtype, group: int, head_dim: int) -> None:
    """Blocks of all heights, spans, masks and forms: what the gate lets through on this machine, with real segments."""
    rng = torch.Generator("cuda").manual_seed(0)
    notes: dict[str, int] = {}
    for tokens, queries in ((3000, 1), (3000, 2000), (700, 20), (1200, 60), (3000, 9)):
        q, k, v = (
            torch.randn(2, heads, n, head_dim, device="cuda", generator=rng).to(dtype)
            for heads, n in ((2 * group, queries), (2, tokens), (2, tokens))
        )
        for more in ({}, {"window": 600}, {"softcap": 30.0}, {"causal": False}):
            attention(q, k, v, **more)
            with listen() as counted:
                attention(q, k, v, **more)
            notes |= counted
    assert not [name for name in notes if "the one plan" in name], notes
    # the store is the process's: other tests' products may have been excluded in it
    assert not [c for c in cuda.certificates().excluded() if c.key.startswith("segments")]


@pytest.mark.gpu
@pytest.mark.usefixtures("kept")
def test_a_proof_is_cheap_on_a_gpu() -> None:
    """Once compiled, a proof of a decode plan takes less than a tenth of a second."""
    what = form(dtype=torch.bfloat16, head_dim=128, group=4)
    way = Way(triton_kernels.plan_for(4, 128, torch.bfloat16), 2, True)
    device = torch.device("cuda")
    assert cuda.prove_way(what, way, device) is True
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    cuda.prove_way(what, way, device)
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) < 100
