"""Rounding or a bug: planted faults of every look are named, and sound functions that look the same are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from msgspec import UNSET
from msgspec.structs import replace
from torch.nn.functional import cross_entropy, pad, silu

from nondet.core.records import Run
from nondet.errors import UserError
from nondet.probes.base import Options
from nondet.probes.functions import check, run_of
from nondet.probes.gradients import check_gradient
from nondet.probes.rounding import judged_classes, orders_apart
from nondet.probes.runner import plan_jobs, run_jobs
from nondet.reports.content import headline
from nondet.verdict.gate import judge
from tests.build import tiers
from tests.probes.toys import measure

pytestmark = pytest.mark.filterwarnings("ignore:.*elements of:UserWarning")
Tensor = torch.Tensor
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Drawn(NamedTuple):
    """A function as a fault (what its verdict begins with) and as it should be, over drawn inputs."""

    faulty: Callable[..., Any]
    says: str
    looks: str
    sound: Callable[..., Any]
    inputs: Callable[[int], Any]
    sizes: list[int]


def text_of(run: Run) -> str:
    return judge(run)[0].text


def drawn(seed: int) -> Iterator[Drawn]:
    """Each fault at sizes, in a dtype and at a place that the seed draws."""
    g = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=g))

    dtype, n, width = DTYPES[seed % 4], number(5, 12), 8 * number(3, 12)
    sizes, at = [1, number(2, n), n], number(1, n)
    x, y = (torch.randn(n, width, generator=g).to(dtype) for _ in range(2))
    x[at, number(0, width)] = 9.0
    weight = torch.randn(32, width, generator=g).to(dtype)
    angles = torch.rand(n, 1, generator=g).to(dtype) * 3
    texts = [torch.randint(1, 64, (3 + 2 * i + number(0, 2),), generator=g).tolist() for i in range(n)]
    vectors, places = (torch.randn(64, 16, generator=g).to(dtype) for _ in range(2))

    def padded(texts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Ids padded on the left, and which are no padding."""
        longest = max(map(len, texts))
        ids = torch.stack([pad(torch.tensor(t), (longest - len(t), 0)) for t in texts])
        return ids, ids > 0

    def mean(texts: list[list[int]], masked: bool) -> Tensor:
        ids, real = padded(texts)
        weights = (real if masked else torch.ones_like(real)).double()
        return ((vectors[ids].double() * weights[..., None]).sum(1) / weights.sum(1, True)).to(dtype)

    def placed(texts: list[list[int]], counted: bool) -> Tensor:
        ids, real = padded(texts)
        at = real.cumsum(1).clamp(min=1) - 1 if counted else torch.arange(ids.shape[1]).expand(ids.shape)
        return ((vectors[ids] + places[at]).double() * real[..., None]).sum(1).to(dtype)

    def quantized(x: Tensor, weight: Tensor, rows: bool) -> tuple[Tensor, Tensor]:
        size = x.double().abs()
        scale = size.amax(1, True) if rows else size.amax()
        q = torch.round(x.double() / scale * 127)
        return ((q @ weight.double().T) * scale / 127).to(x.dtype), scale.to(torch.float32)

    def add_norm(x: Tensor, y: Tensor, shift: int) -> tuple[Tensor, Tensor]:
        both = x.double() + y.double().roll(shift * (len(x) > at), 0)
        return (both / both.pow(2).mean(1, True).sqrt()).to(x.dtype), both.to(x.dtype)

    def split(x: Tensor, weight: Tensor, parts: int) -> Tensor:
        columns = range(0, width, width // parts if len(x) >= at + 1 else width)
        step = columns.step
        return torch.stack([sum(weight[:, c : c + step] @ r[c : c + step] for c in columns) for r in x])

    data, pads = "other requests' data in a request's row, not rounding", "not rounding"
    yield Drawn(lambda t: mean(t, False), pads, "padding", lambda t: mean(t, True), lambda s: (texts[:s],), sizes)
    yield Drawn(lambda t: placed(t, False), pads, "padding", lambda t: placed(t, True), lambda s: (texts[:s],), sizes)
    yield Drawn(
        lambda x: torch.softmax((x.double() * weight[0]).sum(1) / 8, 0).to(dtype), data, "normalisation",
        lambda x: torch.sigmoid((x.double() * weight[0]).sum(1) / 8).to(dtype), lambda s: x[:s], sizes,
    )  # fmt: skip
    yield Drawn(
        lambda x, w: quantized(x, w, False), data, "values", lambda x, w: quantized(x, w, True),
        lambda s: (x[:s], weight), sizes,
    )  # fmt: skip
    yield Drawn(
        lambda x, y: add_norm(x, y, 1), data, "values", lambda x, y: add_norm(x, y, 0), lambda s: (x[:s], y[:s]), sizes
    )
    yield Drawn(
        lambda x, a: (x * a[:1].cos(), y[: len(x)] * a.cos()), data, "values",
        lambda x, a: (x * a.cos(), x * a.sin()), lambda s: (x[:s], angles[:s]), sizes,
    )  # fmt: skip
    yield Drawn(
        lambda x: torch.eye(len(x), dtype=torch.float64) @ x.double(), data, "NaN", lambda x: x.double() * 1,
        lambda s: x[:s], sizes,
    )  # fmt: skip
    yield Drawn(
        lambda x: x.double() / (1 + 0.1 * len(x)), pads, "factor", lambda x: x.double() / 3, lambda s: x[:s], sizes
    )
    yield Drawn(
        lambda x: x.double() + torch.arange(len(x))[:, None] / 8, pads, "position", lambda x: x.double() + 1,
        lambda s: x[:s], sizes,
    )  # fmt: skip
    yield Drawn(
        lambda x: (x.double() > x.double().mean()).sum(1), data, "values",
        lambda x: (x.double() > x.double().mean(1, True)).sum(1), lambda s: x[:s], sizes,
    )  # fmt: skip
    yield Drawn(
        lambda x, w: split(x, w, 4), "rounding: ", "another order", lambda x, w: split(x, w, 1),
        lambda s: (x[:s], weight), sizes,
    )  # fmt: skip


@pytest.mark.parametrize("seed", tiers(range(3), range(3, 12)))
def test_planted_faults_are_named_and_sound_functions_are_not(seed: int) -> None:
    """The first sentence has the look of each fault; its sound twin agrees bit for bit."""
    for case in drawn(seed):
        said = text_of(check(case.faulty, case.inputs, case.sizes, axis=0))
        assert said.startswith(case.says), (seed, said)
        assert case.looks in said, (seed, said)
        sound = text_of(check(case.sound, case.inputs, case.sizes, axis=0))
        assert sound.startswith("no divergence observed"), (seed, case.looks, sound)


@pytest.mark.parametrize("seed", tiers(range(1), range(1, 4)))
def test_rounding_is_never_called_a_fault(seed: int) -> None:
    """Products by another library call for each size, deep layers, experts whose sums follow the values of others, and
    tokens: sound as torch computes them, in formats and sizes by the seed."""
    g = torch.Generator().manual_seed(seed)
    for dtype in (torch.float32, torch.float64):
        n, width, other = 7 + 9 * seed, 64 + 100 * seed, 48 + 30 * seed
        x = torch.randn(n, width, generator=g).to(dtype)
        up, down = (torch.randn(other, width, generator=g).to(dtype) / width**0.5 for _ in range(2))
        experts = torch.randn(4, width, width, generator=g).to(dtype) / width**0.5

        def deep(x: Tensor, up: Tensor = up, down: Tensor = down) -> Tensor:
            for _ in range(6):
                x = x + silu(torch.nn.functional.rms_norm(x, x.shape[1:]) @ up.T) @ down
            return x

        def routed(x: Tensor, up: Tensor = up, experts: Tensor = experts) -> Tensor:
            expert, out = (x @ up[:4].T).argmax(1), torch.zeros_like(x)
            for i in range(4):
                mine = expert == i
                out[mine] = x[mine] @ experts[i]
            return out

        functions: list[Callable[[Tensor], Tensor]] = [
            lambda x, w=up: x @ w.T, lambda x, w=up: x.abs() @ w.T.abs(), lambda x, w=up: (x @ w.T).softmax(1),
            lambda x, w=up: (x @ w.T).argmax(1), lambda x: torch.cat([x, -x], 1).sum(1), deep, routed,
        ]  # fmt: skip
        for number, function in enumerate(functions):
            said = text_of(check(function, lambda size, x=x: x[:size], [1, 3, n]))
            assert said.startswith(("rounding: ", "no divergence observed")), (seed, dtype, number, said)


def test_what_float64_and_the_caller_decide() -> None:
    """A shared scale in a short format changes less than its roundings, and as much in float64; a tolerance of the
    caller's own is the bound; where neither decides the verdict says so, and how to."""
    g = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(rows, 64, generator=g).bfloat16() for rows in (8, 96))

    def coarse(x: Tensor, weight: Tensor) -> Tensor:
        """Columns that are wide in any row are not quantized: sums whose length follows the values of others."""
        wide = x.abs().amax(0) > 2.5
        rest = x.float().masked_fill(wide, 0)
        scale = rest.abs().amax(1, True).clamp(min=1e-8) / 127
        rounded = (rest / scale).round() @ weight.float().T * scale
        return (rounded + x.float()[:, wide] @ weight.float()[:, wide].T).to(x.dtype)

    said = text_of(check(coarse, lambda size: (x[:size], weight), [1, 8]))
    assert said.startswith("other requests' data in a request's row, not rounding"), said
    assert "expected in float64" in said
    # a weight that stays in its format can't be widened
    held = text_of(check(lambda x: x.bfloat16() @ weight.T + coarse(x, weight), lambda size: x[:size], [1, 8]))
    assert held.startswith("rounding or not is not decided"), held
    split = lambda x: x @ weight.T if len(x) < 4 else x[:, :32] @ weight.T[:32] + x[:, 32:] @ weight.T[32:]  # noqa: E731
    assert "up to 0.5 in bfloat16" in text_of(check(split, lambda size: x[:size], [1, 8], error=0.5))


def test_a_gradient_over_splits_of_one_batch() -> None:
    """Sums of tokens accumulate to the same gradient, within rounding; a mean of means, a loss that is divided twice
    and padding in the loss are named, in each format."""
    g = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, 50, (n + 1,), generator=g) for n in (3, 30, 7, 12, 25, 4, 18, 9)]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        vectors, head = (torch.randn(50, 16, generator=g).to(dtype) for _ in range(2))
        head.requires_grad_()

        def loss(part: list[Tensor], how: str, head: Tensor = head, vectors: Tensor = vectors) -> Tensor:
            x, y = torch.cat([t[:-1] for t in part]), torch.cat([t[1:] for t in part])
            if how == "padded":
                longest = max(map(len, part))
                ids = torch.stack([pad(t, (0, longest - len(t))) for t in part])
                x, y = ids[:, :-1].flatten(), ids[:, 1:].flatten()
            logits = vectors[x] @ head.T
            return cross_entropy(logits, y) if how == "mean" else cross_entropy(logits, y, reduction="sum") / 100

        for how, combine, begins, looks in (
            ("sum", "sum", "rounding: ", "another order"), ("mean", "mean", "not rounding: ", "mean of means"),
            ("sum", "mean", "not rounding: ", "combine='sum'"), ("padded", "sum", "not rounding: ", "padding"),
        ):  # fmt: skip
            said = text_of(check_gradient(lambda part, how=how: loss(part, how), texts, [1, 2, 4, 8], combine=combine))
            assert said.startswith(begins), (dtype, how, combine, said)
            assert looks in said, (dtype, how, combine, said)
    for over, options, refused in (
        ([1], {}, "compares nothing"),
        ([1, 9], {}, "of 8"),
        ([1, 2], {"combine": "x"}, "x"),
    ):
        with pytest.raises(UserError, match=refused):
            check_gradient(lambda part: loss(part, "sum"), texts, over, **options)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="with a gradient"):
        check_gradient(lambda part: torch.ones(()), texts)


@pytest.mark.slow
def test_a_compiled_function_says_what_the_compiler_s_switch_is_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its bits differ it is compiled again with `batch_invariant`, as an arm; the switch does not cover this."""
    config = pytest.importorskip("torch._inductor.config")
    if not hasattr(config, "batch_invariant"):
        pytest.skip("before torch 2.13 Inductor has no such switch")
    seen = []

    @torch.compile(backend="eager")
    def block(x: Tensor) -> Tensor:
        return x.double().sum(1).float() * (1.0 if len(x) < 4 else 1.0000002)

    def noted(x: Tensor) -> Tensor:
        seen.append(config.batch_invariant)
        return block(x)

    run = check(noted, lambda size: torch.ones(8, 32)[:size], [1, 8], name="block")
    assert {row.impl for row in run.rows} == {"block", "stock-inductor-invariant"}
    assert "batch_invariant is off: it covers reductions in Triton code" in run.rows[0].reason
    assert (set(seen), config.batch_invariant) == ({False, True}, False)
    assert run.header.environment["inductor_batch_invariant"] is False
    assert all("rounding: " in verdict.text for verdict in judge(run))


_SMALL = {"m": 33, "k": 96, "n": 8, "dtypes": ("float32",), "runs": 3}
_FP8 = {"m": 33, "k": 256, "n": 8, "dtypes": ("float8_e4m3fn", "float32"), "runs": 2}
_OTHERS = frozenset({"neighbour_values"})


@pytest.mark.parametrize(
    ("probe", "toy", "asked", "said"),
    [
        ("matmul", "linear__order__any__from_8", {"batch_size"}, "all by rounding (at most 0.0"),
        ("reduction", "sum__order__any__every_3", {"batch_size"}, "all by rounding (at most 0.0"),
        ("matmul", "linear_shared_scale", _OTHERS, "); not rounding in 2 cases: linear over neighbour values"),
        ("rms-norm", "rms_norm__drop_0__any__always", {"history"}, "); not rounding in 1 case: rms_norm over history"),
        ("scaled-matmul", "quantize=quantize_by_batch", _OTHERS, "); not rounding in 1 case: quantize over neighbour"),
        # the order follows others' values, so that they could as well be what changes the result
        ("matmul", "linear__order__signed__always", _OTHERS, "); 0 cases by rounding, 1 case not decided"),
        # of inputs whose right result is zero, where one that is lost looks the same
        ("grouped-matmul", "grouped_matmul__order__any__place_3", {"position"}, "); 0 cases by rounding, 1 case not"),
        ("matmul", "linear_shared_scale", {"batch_size"}, "); not rounding in 9 cases: linear over batch size"),
    ],
)
def test_the_first_sentence_of_a_probe_says_what_differs(probe: str, toy: str, asked: set[str], said: str) -> None:
    options = _FP8 if probe == "scaled-matmul" else _SMALL | ({"inputs": ("bell",)} if asked == {"batch_size"} else {})
    rows = [*measure(probe, toy, asked=asked, **options).values()]
    run = run_of(rows, {}, None)
    assert said in headline(run, judge(run))
    # a file from before has no figure of it
    old = run_of([replace(row, judged=UNSET) for row in rows], {}, None)
    assert "rounding" not in headline(old, judge(old))
    assert judge(old)[0].findings == judge(run)[0].findings


def test_stock_s_differences_are_rounding() -> None:
    """At least one product differs on any CPU; numbers that are sorted make partial sums much larger than results."""
    options = Options(m=64, k=1000, n=64, inputs=("bell", "cancel", "wide"), dtypes=("float32", "bfloat16"))
    jobs = [j for j in plan_jobs(["matmul"], ["stock"], options) if j.case.varied == "batch_size"]
    jobs += [j for j in plan_jobs(["matmul"], ["stock"], Options()) if j.case.inputs == "linspace"]
    rows = [*run_jobs(jobs, 0)]
    run = run_of(rows, {}, None)
    assert any(row.differs for row in rows)
    assert "batch-dependent" in (said := headline(run, judge(run)))
    assert "all by rounding (at most 0." in said


@pytest.mark.parametrize(
    ("gap", "kind"), [(0.0, "rounding"), (1e-9, "rounding"), (1e-8, "open"), (1e-4, "bug"), (torch.inf, "bug")]
)
def test_how_far_decides(gap: float, kind: str) -> None:
    """At each element by its own size: a small one that is off by as much as a large one may be is no rounding."""
    first, usual = torch.tensor([1e6, 1e-3], dtype=torch.float64), torch.tensor([1e2, 2e-9], dtype=torch.float64)
    other = first + torch.tensor([50.0, gap], dtype=torch.float64)
    assert judged_classes([first, other], usual, "").kind == kind
    unknown = judged_classes([first, first + 1.0], torch.full((2,), torch.nan, dtype=torch.float64), "")
    assert (unknown.kind, unknown.bound) == ("open", None)


def test_where_no_noise_shows_nothing_is_said() -> None:
    """Whole numbers get none, and of another process's sums none is seen: no bound, and so no verdict of a fault."""
    seen = orders_apart(lambda x: x.double().sum(-1), torch.ones(2, 8), torch.float32, torch.float32)
    assert (seen.isfinite() & (seen > 0)).all()
    for inputs in (torch.ones(2), [None]):
        unseen = orders_apart(lambda _: torch.zeros(2, dtype=torch.float64), inputs, torch.float32, torch.float32)
        assert unseen.isnan().all()
        assert judged_classes([torch.zeros(2), torch.ones(2)], unseen, "").kind == "open"
