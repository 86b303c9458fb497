"""Rounding or a bug: planted faults of every look are named, and sound functions that look the same are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.functional import cross_entropy, pad

from nondet.core.records import Run
from nondet.probes.functions import check
from nondet.probes.gradients import check_gradient
from nondet.verdict.gate import judge
from tests.build import tiers

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


@pytest.mark.parametrize("seed", tiers(range(2), range(2, 12)))
def test_planted_faults_are_named_and_sound_functions_are_not(seed: int) -> None:
    """The first sentence has the look of each fault; its sound twin agrees bit for bit."""
    for case in drawn(seed):
        said = text_of(check(case.faulty, case.inputs, case.sizes, axis=0))
        assert said.startswith(case.says), (seed, said)
        assert case.looks in said, (seed, said)
        sound = text_of(check(case.sound, case.inputs, case.sizes, axis=0))
        assert sound.startswith("no divergence observed"), (seed, case.looks, sound)
