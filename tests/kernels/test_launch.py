"""A Triton kernel found again by what it was compiled for: the same launch, and no other's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nondet.kernels import triton_common
from nondet.kernels.triton_common import launch


class Kernel:
    """In place of Triton's: counts what it compiles, where constants come by name, and keeps what is launched."""

    arg_names = ("x", "n", "scale", "SPAN", "LOG")

    def __init__(self) -> None:
        self.fn = object()
        self.compiled = 0
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def run(*arguments: Any, **by_name: Any) -> Any:
            self.compiled += bool(by_name)
            self.launched.append((grid, *arguments))
            return self

        return run


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(triton_common, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return Kernel()


CONSTANTS = {"SPAN": 16, "LOG": False}


def test_the_like_of_it_is_not_compiled_again(kernel: Kernel) -> None:
    """Another tensor of the same kind, and another grid: their own, to the kernel that is there."""
    x = torch.zeros(8)
    launch(kernel, (3,), (x,), (33, 0.5), CONSTANTS, num_warps=4)
    other = torch.ones(8)
    launch(kernel, (5,), (other,), (33, 0.5), CONSTANTS, num_warps=4)
    assert kernel.compiled == 1
    grid, first, *rest = kernel.launched[1]
    assert (grid, rest) == ((5, 1, 1), [33, 0.5, *CONSTANTS.values()])
    assert first is other


@pytest.mark.usefixtures("kernel")
def test_another_kind_is_compiled() -> None:
    usual = (torch.zeros(8), (33, 0.5), CONSTANTS, 4)
    for at, other in (
        (0, torch.zeros(8, dtype=torch.float16)),
        (0, torch.zeros(9)[1:]),
        (0, None),
        *((1, numbers) for numbers in ((1, 0.5), (32, 0.5), (2**31 + 1, 0.5), (True, 0.5), (33, 3))),
        (2, {"SPAN": 32, "LOG": False}),
        (2, {"SPAN": 16, "LOG": True}),
        (3, 8),
    ):
        kernel: Any = Kernel()
        for x, numbers, constants, warps in (usual, (*usual[:at], other, *usual[at + 1 :])):
            launch(kernel, (3,), (x,), numbers, constants, num_warps=warps)
        assert kernel.compiled == 2, other


def test_another_device_and_constants_out_of_their_order_are_compiled(kernel, monkeypatch) -> None:
    """A kernel is loaded on a device; and Triton binds those constants by name, each time: by place they would land in
    each other's."""
    for device in (0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        launch(kernel, (3,), (torch.zeros(8),), (33, 0.5), CONSTANTS)
    assert kernel.compiled == 2
    for _ in range(3):
        launch(kernel, (3,), (torch.zeros(8),), (33, 0.5), {"LOG": False, "SPAN": 16})
    assert kernel.compiled == 5
