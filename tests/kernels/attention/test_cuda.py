"""Attention over fixed segments: right against float64, and one set of bits however the work is cut.

Segments are shortened, so that small inputs have several; on a CPU everything runs in Triton's interpreter.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nondet.core import compare, inputs
from nondet.core.certificates import Certificates
from nondet.core.compare import identical, same
from nondet.core.launch import listen
from nondet.kernels import reference
from nondet.kernels.attention import cuda, hopper, masks, triton_kernels
from nondet.kernels.attention.cuda import Call, attention, attention_by_one_plan, attention_varlen, launch, quickest
from nondet.kernels.attention.hopper import prefill, supports
from nondet.kernels.attention.masks import starts
from nondet.kernels.attention.triton_kernels import Form, Plan, Way, one_plan
from tests.build import DEVICE, accuracy_bound, error
from tests.kernels.tiers import at_length, captured, on_hopper, untouched

HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
SHORT = 128 if DEVICE == "cuda" else 64  # keys of a segment in float32
# NumPy, which the interpreter computes with, warns of the NaN that some tests ask for.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:invalid value encountered:RuntimeWarning", "ignore:All-NaN slice:RuntimeWarning"
    ),
]


@pytest.fixture
def segment(monkeypatch, request) -> int:
    """Keys of a segment; a half-precision tile has 128."""
    dtype = request.node.callspec.params.get("dtype") if hasattr(request.node, "callspec") else None
    keys = 128 if dtype == HALF else SHORT
    monkeypatch.setattr(triton_kernels, "SEGMENT", keys)
    monkeypatch.setattr(cuda, "MERGE_UNROLL", 2)  # the interpreter computes what is beyond the last segment, too
    return keys


def qkv(b, hq, hkv, tq, tk, d, dtype=torch.float32):
    rng = inputs.generator(0, DEVICE)
    return tuple(inputs.make("bell", (b, h, t, d), dtype, DEVICE, rng) for h, t in ((hq, tq), (hkv, tk), (hkv, tk)))


def sizes(*lengths: tuple[int, int], **more: Any) -> dict[str, Any]:
    queries, keys = ([*counts] for counts in zip(*lengths, strict=True))
    cu_q, cu_k = (masks.starts(counts, torch.device(DEVICE)) for counts in (queries, keys))
    longest = {"max_seqlen_q": max(queries), "max_seqlen_k": max(keys)}
    return {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k} | longest | more


def bound(dtype: torch.dtype, keys: int, head_dim: int) -> float:
    """`accuracy_bound` over the keys and over the head dim, and a second rounding: that of the probabilities."""
    two_sums = accuracy_bound(dtype, keys) + accuracy_bound(torch.float32, head_dim)
    return two_sums + torch.finfo(dtype).eps / 2


@pytest.mark.usefixtures("segment")
@pytest.mark.parametrize("dtype", [torch.float32, *at_length(HALF)])
@pytest.mark.parametrize(
    ("hq", "hkv", "tq", "tk", "d"),
    [
        (2, 1, 16, SHORT, 16),
        (4, 2, 3, SHORT + 6, 24),
        *at_length((6, 2, 7, 130, 24), (3, 1, 1, 150, 64), (2, 2, 25, 25, 96)),
    ],
)
def test_within_the_accuracy_bound(dtype, hq, hkv, tq, tk, d):
    q, k, v = qkv(1, hq, hkv, tq, tk, d, dtype)
    for how in ({"causal": True}, {"causal": False}, {"scale": 0.5}):
        out = attention(q, k, v, split=False, **how)
        assert error(out, reference.attention(q, k, v, **how)) <= bound(dtype, tk, d), how


def test_one_pass_and_split_are_the_same_bits(segment, monkeypatch):
    """Whether segments run in one program or in several is a matter of speed; another segment length is not."""
    q, k, v = qkv(1, 1, 1, 2, 2 * segment + 14, 16)
    one_pass = attention(q, k, v, split=False)
    assert identical(attention(q, k, v, split=True), one_pass)
    for span in (2, 3):
        monkeypatch.setattr(triton_kernels, "span_for", lambda *_, span=span: span)
        assert identical(attention(q, k, v), one_pass), span
    monkeypatch.setattr(triton_kernels, "SEGMENT", segment // 2)
    assert not identical(attention(q, k, v, split=True), one_pass)


@pytest.mark.parametrize("dtype", [torch.float32, *at_length(HALF)])
def test_prefill_chunks_and_decode_are_the_same_bits(segment, chained_dot, dtype):
    """A position has its bits however many queries ran with it. A decode whose cache starts elsewhere has others."""
    end = segment + 4
    q, k, v = qkv(1, 1, 1, end, end, 16, dtype)
    whole = attention(q, k, v, split=False)  # a merge has a program for each row, which takes the interpreter long
    for lo, hi in ((0, 1), (segment, segment + 1), (segment - 2, end)):
        for split in (True, False):
            part = attention(q[:, :, lo:hi], k[:, :, :hi], v[:, :, :hi], split=split)
            assert identical(part, whole[:, :, lo:hi]), (lo, hi, split)
    moved = attention(q[:, :, -1:], k.roll(-20, 2), v.roll(-20, 2))  # the same keys in another order
    assert not identical(moved, whole[:, :, -1:])


@pytest.mark.usefixtures("segment")
def test_batch_neighbours_do_not_matter():
    q, k, v = qkv(2, 2, 1, 2, SHORT + 6, 16)
    together = attention(q, k, v, split=True)
    for i in range(2):
        assert identical(attention(q[i : i + 1], k[i : i + 1], v[i : i + 1], split=False), together[i : i + 1])
    by_token = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]  # [B, T, H, D] in memory
    by_column = [x.mT.contiguous().mT for x in (q, k, v)]  # the last stride is not 1
    for views in (by_token, by_column):
        assert identical(attention(*views, split=False), together)
    assert not identical(attention(q, k.roll(1, 0), v, split=False), together)
    q, k, v = qkv(1, 2, 1, 5, 3, 16)
    assert identical(attention(q, k, v).isnan(), reference.attention(q, k, v).isnan())
    q, k, v = qkv(1, 2, 1, 3, SHORT + 11, 16)
    k[:, :, -1] = math.nan
    for split in (True, False):
        out = attention(q, k, v, split=split)
        assert out[:, :, 2].isnan().all()
        assert not out[:, :, :2].isnan().any()


@pytest.mark.usefixtures("segment")
def test_heads_beyond_32_bits():
    """A query head's offset may pass 2^31 elements, as with many heads over a long prompt."""
    room, (q, k, v) = untouched(2**31 + 2**12), qkv(1, 3, 1, 2, 5, 16, torch.float16)
    far = room.as_strided(q.shape, (1, 2**30, 16, 1)).copy_(q)
    for split in (True, False):
        assert identical(attention(far, k, v, split=split), attention(q, k, v, split=split))


@pytest.mark.usefixtures("segment", "chained_dot")
@pytest.mark.parametrize("what", ["window", "softcap"])
def test_a_window_is_the_last_keys_and_a_softcap_bends_the_scores(what):
    """A window hides all but the last keys, one's own included; scores s become c * tanh(s / c), as Gemma 2 has it."""
    length = SHORT + 16
    q, k, v = qkv(1, 2, 1, 3, length, 24)
    scores = (q.double() @ k.double().repeat_interleave(2, 1).mT) / math.sqrt(24)
    position, keys = torch.arange(length, device=DEVICE)[-3:, None], torch.arange(length, device=DEVICE)
    hidden, seen = keys > position, length
    how, other = {"softcap": 1.5}, {}
    if what == "window":
        how, other, seen = {"window": 37}, {"window": 38}, 37
        hidden |= keys <= position - 37
    else:
        scores = 1.5 * torch.tanh(scores / 1.5)
    expected = torch.softmax(scores.masked_fill(hidden, -math.inf), -1) @ v.double().repeat_interleave(2, 1)
    out = attention(q, k, v, split=False, **how)
    assert error(out, expected) <= bound(torch.float32, seen, 24)
    assert identical(attention(q, k, v, split=True, **how), out)
    assert identical(attention(q[:, :, -1:], k, v, **how), out[:, :, -1:])
    assert not identical(attention(q, k, v, split=False, **other), out)
    if what == "window":
        assert identical(attention(q, k, v, window=length, split=False), attention(q, k, v, split=False))


@pytest.mark.usefixtures("segment", "chained_dot")
@pytest.mark.parametrize("split", [False, *at_length(True)])
def test_packed_requests_have_the_bits_they_have_alone(split):
    """Decode, prefill, chunk and empty requests: keys side by side, scattered in a cache, and where a window's cache
    has dropped the first ones, whose anchor positions tell."""
    lengths, window = [(1, SHORT + 6), (3, 3), (0, 0), (2, 35), (1, 1)], 20
    rng, shapes = inputs.generator(0, DEVICE), [((nq, 2, 16), (nk, 1, 16), (nk, 1, 16)) for nq, nk in lengths]
    own = [[inputs.make("bell", shape, torch.float32, DEVICE, rng) for shape in three] for three in shapes]
    q, k, v = (torch.cat(parts) for parts in zip(*own, strict=True))
    index = torch.randperm(len(k), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    cache = [torch.empty_like(x).index_copy_(0, index, x) for x in (k, v)]
    for how in ({"window": None}, {"window": window}):
        alone = [
            attention(*(x.transpose(0, 1)[None] for x in one), split=False, **how)[0] for one in own if len(one[0])
        ]
        right, more = torch.cat([x.transpose(0, 1) for x in alone]), sizes(*lengths, split=split, **how)
        assert identical(attention_varlen(q, k, v, **more), right), how
        for places in (index, index.to(torch.int32)):
            assert identical(attention_varlen(q, *cache, key_index=places, **more), right), how
    kept = [min(nk, nq + window - 1) for nq, nk in lengths]
    short = [torch.cat([one[i][len(one[i]) - n :] for one, n in zip(own, kept, strict=True)]) for i in (1, 2)]
    positions = torch.cat([torch.arange(nk - nq, nk, device=DEVICE) for nq, nk in lengths])
    more |= sizes(*((nq, n) for (nq, _), n in zip(lengths, kept, strict=True))) | {"max_seqlen_k": SHORT + 6}
    assert identical(attention_varlen(q, *short, positions=positions, **more), right)
    assert not identical(attention_varlen(q, *short, **more), right)


def test_empty_and_refused():
    q, k, v = qkv(1, 4, 2, 3, 8, 16)
    assert attention(q[:, :, :0], k, v).shape == (1, 4, 0, 16)
    wide = torch.zeros(1, 1, 2, 300, device=DEVICE)
    for given, how, words in (
        ((q, k[:, :, :0], v[:, :, :0]), {}, "no keys"),
        ((q[:, :3], k, v), {}, "no multiple"),
        ((q, k, v), {"causal": False, "window": 4}, "window"),
        ((q, k, v), {"scale": -1.0}, "scale"),
        ((q, k, v), {"softcap": 0.0}, "softcap"),
        ((wide, wide, wide), {}, "head dims"),
    ):
        with pytest.raises(ValueError, match=words):
            attention(*given, **how)
    with pytest.raises(NotImplementedError, match="float64"):
        attention(q.double(), k.double(), v.double())
    wrong = sizes((3, 3))["cu_seqlens_q"].long()
    with pytest.raises(ValueError, match="int32"):
        attention_varlen(*(x[0].transpose(0, 1) for x in (q, k, v)), **sizes((3, 3)) | {"cu_seqlens_q": wrong})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("hq", "hkv", "d"), [(8, 2, 64), (8, 1, 128), (4, 4, 96), (4, 2, 256)])
def test_prefill_chunks_and_decode_are_the_same_bits_on_a_gpu(dtype, hq, hkv, d):
    """With the real plans, whose blocks run on other matrix instructions, a position still has one set of bits."""
    q, k, v = qkv(1, hq, hkv, 1300, 1300, d, dtype)
    whole = attention(q, k, v)
    spans = [(p, p + 1) for p in (0, 63, 64, 511, 512, 1023, 1024, 1299)] + [(1, 8), (500, 533), (7, 1100), (511, 1300)]
    for lo, hi in spans:
        for split in (True, False):
            part = attention(q[:, :, lo:hi], k[:, :, :hi], v[:, :, :hi], split=split)
            assert identical(part, whole[:, :, lo:hi]), (lo, hi, split)


@pytest.mark.gpu
@pytest.mark.parametrize("split", [True, False])
def test_varlen_replays_from_a_graph_with_other_lengths(split):
    """A captured launch reads the lengths on the device: replayed after they change, it computes the new requests."""
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in qkv(1, 8, 2, 40, 2000, 64, HALF))
    more = sizes((10, 700), (30, 1300), split=split) | {"max_seqlen_q": 40, "max_seqlen_k": 2000}
    before = attention_varlen(q, k, v, **more)
    torch.cuda.synchronize()
    graph, out = captured(attention_varlen, q, k, v, **more)
    graph.replay()
    assert identical(out, before)
    for name, counts in (("cu_seqlens_q", [0, 39, 40]), ("cu_seqlens_k", [0, 40, 2000])):
        more[name].copy_(torch.tensor(counts, dtype=torch.int32))
    graph.replay()
    assert identical(out, attention_varlen(q, k, v, **more))
    assert not identical(out, before)


# Attention's gate, in Triton's interpreter, with segments of 64 keys and tiles of 32 (float32), steered as if on a GPU.
ALIKE = ((True, True, True),) * 4
NARROW = Plan(16, 32, 16, 4, 1, False)


def form(**changed: Any) -> Form:
    plain = Form(torch.float32, 16, 2, True, False, False, False, None, None, ALIKE, (True,) * 3)
    return plain._replace(**changed)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Certificates]:
    book = Certificates({"device": "test"}, None)
    monkeypatch.setattr(cuda, "certificates", lambda: book)
    if DEVICE == "cpu":
        monkeypatch.setattr(triton_kernels, "SEGMENT", 64)
        monkeypatch.setattr(cuda, "MERGE_UNROLL", 2)
        monkeypatch.setattr(cuda, "PROOF_HEADS", 1)
        monkeypatch.setattr(cuda, "PROOF_BLOCKS", 0.3)  # the interpreter is slow
    cuda.forget()
    yield book
    cuda.forget()


ODD = {"steps": ((True, True, False),) * 4, "aligned": (True, False, True)}
FORMS = {  # and how many segments a program has
    "dense": (form(), 2),
    "not causal, odd layout": (form(causal=False, **ODD), 1),
    "window, dropped keys": (form(packed=True, window=True, positions=torch.int64, group=1), 0),
    "paged, soft cap": (form(packed=True, softcap=True, paged=torch.int32), 1),
}


@pytest.mark.usefixtures("chained_dot")
@pytest.mark.skipif(DEVICE == "cuda", reason="segments of 64 keys, for the interpreter")
@pytest.mark.parametrize("name", ["paged, soft cap", *at_length(*(name for name in FORMS if "paged" not in name))])
def test_ways_of_the_class_are_proven(kept: Certificates, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense, packed, windowed with dropped keys, paged, capped: each way has the bits of the one plan, densely."""
    what, span = FORMS[name]
    way = Way(NARROW, span, False)
    monkeypatch.setattr(cuda, "PROOF_KINDS", ("values", "scores"))
    assert cuda.prove_way(what, way, torch.device(DEVICE)) is True
    (proof,) = kept.all()
    assert proof.member == way.name
    assert all(words in proof.evidence for words in ("values from query 1", "scores"))


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
        apart.append(float((~same(expected, call.out)).float().mean()))

    monkeypatch.setattr(cuda, "launch", other)
    assert cuda.prove_way(form(), Way(NARROW, 1, False), torch.device(DEVICE)) is False
    assert apart[0] > 0.7  # where fewer than half of these few keys are added in another order
    assert min(apart) > 0.25  # every kind of inputs tells; with another NumPy's exponentials 0.33 was seen
    assert "elements differ" in kept.excluded()[0].evidence


@pytest.fixture
def steered(monkeypatch: pytest.MonkeyPatch, kept: Certificates) -> dict[str, Any]:
    """The gate as on a GPU, with a prover that says what it is told to, and the names of what it was asked."""
    state: dict[str, Any] = {"asked": [], "verdict": True, "capturing": False}

    def prove_way(what: Form, way: Way, device: torch.device) -> bool | None:
        state["asked"].append(way.name)
        verdict = state["verdict"] if way != one_plan(16, torch.float32) else state.get("one", True)
        if verdict is not None:
            kept.record(way.name, cuda.form_key(what), verdict, "told")
        return verdict  # type: ignore[no-any-return] # what the test put there

    monkeypatch.setattr(cuda, "INTERPRETED", False)
    monkeypatch.setattr(cuda, "prove_way", prove_way)
    monkeypatch.setattr(triton_kernels, "span_for", lambda *_: 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    return state


def operands(tokens: int = 150) -> tuple[torch.Tensor, ...]:
    return qkv(1, 2, 1, 1, tokens, 16)


steering = pytest.mark.skipif(DEVICE == "cuda", reason="steers the gate on the interpreter")
SPLIT, BY_ONE_PLAN = "attention_split[16x32, 1 of 3 x 64]", "attention_one_pass[16x32, the one plan]"


def noted(tokens: int = 150) -> list[str]:
    with listen() as notes:
        attention(*operands(tokens))
    return list(notes)


@steering
def test_a_way_is_proven_at_its_first_use_and_taken_if_it_holds(steered: dict[str, Any], kept: Certificates) -> None:
    """Once for a way and form, at any length. Nothing unproven runs while a graph is captured, and what is excluded or
    can't be told (memory) never: the one plan does, and the note says so. Where even its rows depend on their place,
    the call is refused, not computed somehow."""
    steered["capturing"] = True
    assert (noted(), steered["asked"]) == ([BY_ONE_PLAN], [])
    steered["capturing"], steered["verdict"] = False, None
    assert noted() == [BY_ONE_PLAN]
    steered["asked"], steered["verdict"] = [], True
    assert noted() == noted(140) == [SPLIT]
    assert len(steered["asked"]) == 1
    steered["capturing"] = True
    assert noted() == [SPLIT]
    steered["capturing"], steered["verdict"] = False, False
    for _ in range(2):
        assert identical(attention(*operands(), causal=False), cuda.attention_by_one_plan(*operands(), causal=False))
        assert len(steered["asked"]) == 3  # and the one plan
        cuda.forget()  # as a new process, with the file of certificates
    assert len(kept.excluded()) == 1
    steered["one"] = False
    with pytest.raises(NotImplementedError, match="one plan"):
        attention(*operands(), softcap=2.0)


@steering
def test_forms_that_change_the_code_have_keys_of_their_own(steered: dict[str, Any], kept: Certificates) -> None:
    """Masks, windows, caps, packing, positions, an index, and layouts that the compiler tells apart."""
    q, k, v = operands()
    attention(q, k, v)
    attention(q, k, v, window=70)
    attention(q, k, v, softcap=3.0)
    attention(q, *(torch.nn.functional.pad(x, (0, 1))[..., :16] for x in (k, v)))
    packed = sizes((1, 150))
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


def half(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


def model_qkv(b, hq, hkv, tq, tk, d, dtype=torch.bfloat16, kind="bell"):
    """As a model lays them out, [B, T, H, D] seen as [B, H, T, D]."""
    rng = inputs.generator(0, "cuda")
    shapes = ((tq, hq), (tk, hkv), (tk, hkv))
    return tuple(inputs.make(kind, (b, t, h, d), dtype, "cuda", rng).transpose(1, 2) for t, h in shapes)


def of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return prefill(q, k, v, causal=True, scale=None)


@on_hopper
@pytest.mark.parametrize("kind", ["bell", "wide", "outlier"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
def test_a_prefill_s_bits_are_those_of_the_one_plan(kind, dtype, causal):
    """Tails of queries, keys and segments, one query, GQA and MQA, more items than programs, both head dims."""
    for shape in (
        (1, 4, 2, 128, 128, 128),
        (2, 4, 1, 300, 1700, 128),
        (1, 2, 1, 1, 130, 128),
        (1, 32, 8, 2048, 2048, 128),
        (1, 3, 3, 65, 513, 128),
        (2, 4, 2, 641, 2001, 64),
    ):
        q, k, v = model_qkv(*shape, dtype, kind)
        with listen() as ran:
            out = prefill(q, k, v, causal=causal, scale=None)
        assert list(ran) == ["attention_hopper[128x128]"]
        assert compare.identical(out, attention_by_one_plan(q, k, v, causal=causal)), shape
    scaled = prefill(q, k, v, causal=causal, scale=0.5)
    assert compare.identical(scaled, attention_by_one_plan(q, k, v, causal=causal, scale=0.5))
    with pytest.raises(ValueError, match="above 0"):
        prefill(q, k, v, causal=causal, scale=0.0)


@on_hopper
def test_neighbours_layout_and_a_graph_change_no_bit():
    """A request alone or in a batch, contiguous by head, beside a cache's NaN, replayed from a CUDA graph."""
    q, k, v = model_qkv(3, 8, 2, 700, 900, 128)
    batch = of(q, k, v)
    for _ in range(3):  # a call again, whose operands lie elsewhere
        assert compare.identical(attention(*(x.clone() for x in (q, k, v))), batch)
    for i in range(3):
        alone = [x[i : i + 1].contiguous() for x in (q, k, v)]
        assert compare.identical(of(*alone), batch[i : i + 1])
    cache = [torch.nn.functional.pad(x, (0, 0, 0, 100), value=math.nan)[:, :, :900] for x in (k, v)]
    assert compare.identical(of(q, *cache), batch)
    graph, out = captured(of, q, k, v)
    q.copy_(q.flip(0))
    graph.replay()
    assert compare.identical(out, of(q, k, v))
    assert not compare.identical(out, batch)


CPU = torch.device("cpu")


def call_of(q: torch.Tensor, k: torch.Tensor, **more: Any) -> Call:
    how = {"scale": None, "causal": True, "window": None, "softcap": None} | more
    return Call(q, k, k, torch.empty_like(q), q.shape[0], q.shape[2], k.shape[2], **how)


def test_what_it_takes_and_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """By dtype, head dim, mask, rows and layout; and where a user asks for split or not, the Triton kernels run. CPU
    tensors are taken for those of a Hopper GPU of 132 multiprocessors."""
    monkeypatch.setattr(hopper, "available", lambda device: None)
    monkeypatch.setattr(cuda, "has_pdl", lambda device: True)
    step, keys = half(1, 8, 1, 128), half(1, 2, 1024, 128)
    for q, k, more, taken in (
        (step, keys, {}, True),
        (half(2, 8, 4, 64).half(), half(2, 2, 900, 64).half(), {"causal": False}, True),
        (step, half(1, 1024, 2, 128).transpose(1, 2), {}, True),
        (half(1, 8, 1, 96), half(1, 2, 1024, 96), {}, False),
        (step, keys, {"window": 100}, False),
        (step, keys, {"softcap": 30.0}, False),
        (half(1, 8, 5, 128), keys, {}, False),  # 20 rows
        (step, half(1, 2, 1024, 132)[..., :128], {}, False),  # 8 bytes
    ):
        call = call_of(q, k, **more)
        assert (quickest(call).tiles > 0) is taken
        assert quickest(call, True).tiles == quickest(call, False).tiles == 0

    way = triton_kernels.few_rows(8, 2, 128, CPU)
    others = [way._replace(plan=way.plan._replace(**change)) for change in ({"warps": 8}, {"stages": 3})]
    others += [way._replace(**{name: getattr(way, name) + 1}) for name in ("span", "tiles")]
    others += [way._replace(**{name: not getattr(way, name)}) for name in ("pdl", "lanes", "early")]
    assert len({way.name, *(other.name for other in others)}) == 8
    q8, k8 = half(1, 4, 8, 128), half(1, 2, 8, 128)
    assert hopper.SEGMENT == cuda.SEGMENT
    for q, k, options, reason in (
        (q8, k8, {}, None),
        (half(2, 4, 8, 64).half(), half(2, 2, 20, 64).half(), {"causal": False}, None),
        (half(1, 8, 4, 128).transpose(1, 2), half(1, 8, 2, 128).transpose(1, 2), {}, None),
        (q8.float(), k8.float(), {}, "float32"),
        (half(1, 4, 8, 96), half(1, 2, 8, 96), {}, "96"),
        (q8, k8, {"window": 4}, "window"),
        (q8, k8, {"softcap": 30.0}, "soft cap"),
        (half(1, 4, 9, 128), k8, {}, "8 and 9"),
        (half(1, 4, 128, 8).mT, k8, {}, "q's last stride"),
        (q8, half(1, 2, 8, 129)[..., 1:], {}, "k"),
        (half(1, 4, 8, 132)[..., :128], k8, {}, "16 bytes"),
        (q8, half(1, 1, 8, 128).expand(1, 2, 8, 128), {}, "k has strides"),
    ):
        call = {"causal": True, "window": None, "softcap": None} | options
        fault = supports(q, k, k, **call)
        assert fault is None if reason is None else reason in fault
    # while torch.compile traces, the answer is no, before anything is asked that a traced tensor cannot say
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    q, k = (torch.empty(1, heads, n, 128, device="meta") for heads, n in ((8, 1), (2, 700)))
    assert "torch.compile" in supports(q, k, k, True, None, None)
    assert not cuda.has_few_row_kernels(call_of(q, k))


WAYS = {"a segment at a time": (4, 6, 4), "two programs to a multiprocessor": (4, 3, 2)}  # warps, slots, tiles


def gluon_way(name: str, d: int, span: int) -> Way:
    warps, slots, tiles = WAYS[name]
    return Way(Plan(16, 128, d, warps, slots, False), span, span > 0, tiles, span > 0, True)


def decode_qkv(b, hq, hkv, tq, tk, d, dtype=torch.bfloat16, kind="bell") -> list[torch.Tensor]:
    rng = inputs.generator(3 * tk + tq, torch.device("cuda"))
    shapes = ((b, hq, tq, d), (b, hkv, tk, d), (b, hkv, tk, d))
    return [inputs.make("bell" if i < 1 else kind, shape, dtype, "cuda", rng) for i, shape in enumerate(shapes)]


def by(way: Way, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = True) -> torch.Tensor:
    out = torch.full_like(q, torch.nan)
    launch(Call(q, k, v, out, q.shape[0], q.shape[2], k.shape[2], None, causal, None, None), way)
    return out


@on_hopper
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("span", [0, 1, 3])
def test_its_bits_are_those_of_the_one_plan(name: str, span: int) -> None:
    for b, hq, hkv, tq, tk, d, kind, causal in (
        (2, 8, 2, 1, 1024, 128, "bell", True),
        (1, 8, 2, 1, 1, 128, "bell", True),
        (2, 8, 2, 1, 129, 128, "wide", True),
        (1, 8, 2, 2, 513, 128, "outlier", True),
        (3, 8, 2, 3, 2100, 128, "wide", False),
        (2, 8, 2, 9, 1300, 128, "bell", True),
        (1, 8, 2, 4, 3, 128, "bell", True),  # a query that sees no key
        (1, 8, 2, 9, 2, 128, "bell", True),  # a whole block of them
        (1, 32, 8, 1, 35000, 128, "wide", True),
        (2, 14, 2, 2, 1700, 64, "wide", True),
    ):
        dtype = torch.bfloat16 if d == 128 else torch.float16
        given = (*decode_qkv(b, hq, hkv, tq, tk, d, dtype, kind), causal)
        assert compare.identical(by(gluon_way(name, d, span), *given), by(one_plan(d, dtype), *given)), (tk, d)
    if span:  # the merge alone, behind the Triton kernel
        way = Way(triton_kernels.plan_for(1, 128, torch.bfloat16), span, True, lanes=True)
        q, k, v = decode_qkv(2, 8, 2, 2, 3000, 128, kind="outlier")
        assert compare.identical(by(way, q, k, v), by(one_plan(128, torch.bfloat16), q, k, v))


@on_hopper
@pytest.mark.parametrize("page", hopper.PAGES)
@pytest.mark.parametrize("name", WAYS)
def test_over_pages_its_bits_are_those_of_the_one_plan(name: str, page: int) -> None:
    """Pages anywhere in a cache that holds NaN wherever none of these requests wrote, last pages' ends among it."""
    for lengths, queries, hq, hkv, d, kind in (
        ([1, 129, 1024, 513, 2100, 64, 16, 17], 1, 32, 8, 128, "wide"),
        ([700, 1], 1, 16, 8, 128, "bell"),
        ([9000], 1, 32, 8, 128, "outlier"),
        ([40, 1300], 3, 8, 2, 128, "wide"),
        ([1700, 600], 2, 14, 2, 64, "bell"),
    ):
        dtype = torch.bfloat16 if d == 128 else torch.float16
        counts = [-(-n // page) for n in lengths]
        pages = torch.randperm(sum(counts) + 5, device="cuda").to(torch.int32)
        cache = torch.full((2, hkv, len(pages) * page, d), torch.nan, device="cuda", dtype=dtype)
        alone, index = [], []
        for i, n in enumerate(lengths):
            q, k, v = decode_qkv(1, hq, hkv, queries, n, d, dtype, kind)
            mine = pages[sum(counts[:i]) :][: counts[i], None] * page + torch.arange(page, device="cuda")
            places = mine.flatten()[:n]
            cache[0][:, places], cache[1][:, places] = k[0], v[0]
            index.append(places.to(torch.int32))
            alone.append((q, by(one_plan(d, dtype), q, k, v)))
        q, expected = (torch.cat([pair[i] for pair in alone], 2) for i in (0, 1))
        k, v = (x.transpose(0, 1).contiguous().transpose(0, 1)[None] for x in cache)
        cu_q, cu_k = (starts(each, torch.device("cuda")) for each in ([queries] * len(lengths), lengths))
        for span in (0, 1, 2):
            out = torch.full_like(q, torch.nan)
            sizes = (len(lengths), queries, max(lengths), None, True, None, None)
            call = Call(q, k, v, out, *sizes, cu_q, cu_k, key_index=torch.cat(index), page=page)
            launch(call, gluon_way(name, d, span))
            assert compare.identical(out, expected), (lengths, span)


@on_hopper
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tokens", [700, 9000, 40000])
def test_a_step_that_starts_early_waits_for_what_it_reads(tokens: int, packed: bool) -> None:
    """In a graph, each step's query, and a key and a value that it sees, are the step before's: none may be stale."""
    q, k, v = decode_qkv(2, 32, 8, 1, tokens, 128, kind="wide")
    first = q.clone()
    keys, values = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))  # [B, T, H, D] in memory
    cu_q, cu_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32, device="cuda") for n in (1, tokens))
    lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 1, "max_seqlen_k": tokens}

    def step(out: torch.Tensor) -> torch.Tensor:
        if packed:
            cache = (x.transpose(1, 2).flatten(0, 1) for x in (keys, values))
            return attention_varlen(out[:, :, 0], *cache, **lengths)[:, :, None]
        return attention(out, keys, values)

    def steps(one: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        keys.copy_(k)
        values.copy_(v)
        out = first
        for number in range(4):
            keys[:, :, tokens // 2 + number] = out[:, ::4, 0]
            values[:, :, tokens - 1 - number] = out[:, 1::4, 0]
            out = one(out)
        return out

    steps(step)
    graph, result = captured(steps, step)
    for _ in range(4):
        first.copy_(torch.randn_like(first))
        graph.replay()
        ran = result.clone()
        assert compare.identical(ran, steps(lambda out: attention_by_one_plan(out, keys, values)))
