"""A Triton kernel found again by what it was compiled for: the same launch, and no other's."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from nondet.kernels import triton_common
from nondet.kernels.triton_common import launch


class Kernel:
    """In place of Triton's: counts what it compiles, and keeps what is launched."""

    arg_names = ("x", "n", "scale", "SPAN", "LOG")

    def __init__(self) -> None:
        self.fn = object()
        self.compiled = 0
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def run(*arguments: Any, **others: Any) -> Any:
            self.compiled += 1
            self.launched.append((grid, arguments, {k: v for k, v in others.items() if k.isupper()}))
            return _Compiled(self)

        return run


class _Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            names = Kernel.arg_names[3:]
            self._kernel.launched.append((grid, arguments[:3], dict(zip(names, arguments[3:], strict=True))))

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
    grid, arguments, constants = kernel.launched[1]
    assert grid[:3] == (5, 1, 1)
    assert arguments[0] is other
    assert arguments[1:] == (33, 0.5)
    assert constants == CONSTANTS


@pytest.mark.usefixtures("kernel")
def test_another_kind_is_compiled() -> None:
    """A dtype, a place, none at all, another number or type of it, another constant or option."""
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


def test_another_device_is_compiled(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is loaded on a device."""
    for device in (0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        launch(kernel, (3,), (torch.zeros(8),), (33, 0.5), CONSTANTS)
    assert kernel.compiled == 2


def test_constants_out_of_their_order_are_not_launched_by_place(kernel: Kernel) -> None:
    """They would land in each other's places: Triton binds them by name, each time."""
    for _ in range(3):
        launch(kernel, (3,), (torch.zeros(8),), (33, 0.5), {"LOG": False, "SPAN": 16})
    assert kernel.compiled == 3


class _Driver:
    """As Triton 3.6 has its driver's launcher: room for what a kernel spills or profiles, and the launch beneath."""

    global_scratch_size, profile_scratch_size = 0, 0
    launch_cooperative_grid, launch_pdl = False, True

    def __init__(self, called: list[tuple[Any, ...]]) -> None:
        self.launch = lambda *arguments: called.append(arguments)

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *arguments: Any) -> None:
        rooms = ("room" if size else None for size in (self.global_scratch_size, self.profile_scratch_size))
        self.launch(x, y, z, stream, function, self.launch_cooperative_grid, self.launch_pdl, *rooms, *arguments)


class _Loaded(_Compiled):
    """As Triton's compiled kernel, with the launcher of its driver beneath."""

    function, packed_metadata = 77, (4, 1, 0)

    def __init__(self, kernel: Kernel, run: Any) -> None:
        super().__init__(kernel)
        self.run = run


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 1000 + device, raising=False)
    return []


def test_a_launch_again_is_the_drivers_alone(called: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Grid, stream, function, what nobody listens to, and arguments: in the places that Triton's driver has them."""
    monkeypatch.setattr(triton, "__version__", "3.7.0")
    loaded = _Loaded(Kernel(), lambda *arguments: called.append(arguments))
    triton_common.Launched(loaded, (3, 2), (33, 0.5, 16))(1, (4096, None))
    assert called == [(3, 2, 1, 1001, 77, (4, 1, 0), None, None, None, 4096, None, 33, 0.5, 16)]


@pytest.mark.parametrize("spills", [False, True])
def test_a_launch_of_triton_3_6_goes_without_its_launcher(
    called: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, spills: bool
) -> None:
    """As its launcher would launch it, and by that launcher where a kernel needs room."""
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    driver = _Driver(called)
    driver.global_scratch_size = int(spills)
    straight = triton_common.Launched(_Loaded(Kernel(), driver), (3, 2), (33, 0.5, 16))
    if not spills:
        monkeypatch.setattr(_Driver, "__call__", None)
    straight(1, (4096, None))
    room = "room" if spills else None
    assert called == [
        (3, 2, 1, 1001, 77, False, True, room, None, (4, 1, 0), None, None, None, 4096, None, 33, 0.5, 16)
    ]


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_who_listens_to_launches_is_told(
    called: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    """A profiler's hook, and its end: Triton's own way while it listens."""
    kernel = Kernel()
    loaded = _Loaded(kernel, _Driver(called))
    launched = triton_common.Launched(loaded, (3,), (0.5, 16, False))
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, hook, lambda metadata: None)
        launched(0, (4096, 33))
    assert not called
    assert kernel.launched == [((3, 1, 1), (4096, 33, 0.5), {"SPAN": 16, "LOG": False})]
    launched(0, (4096, 33))
    assert len(called) == len(kernel.launched) == 1


@pytest.mark.parametrize(("interpreted", "device", "place"), [(True, "cuda", "cpu"), (False, "cpu", "cuda")])
def test_no_tensors_where_rooms_are_not(
    monkeypatch: pytest.MonkeyPatch, interpreted: bool, device: str, place: str
) -> None:
    """Rooms are of the CPU in the interpreter, of the current GPU else: tensors of elsewhere are refused."""
    monkeypatch.setattr(triton_common, "INTERPRETED", interpreted)
    x: Any = SimpleNamespace(device=torch.device(device), dtype=torch.float32)
    with pytest.raises(NotImplementedError, match=f"device {device}; it runs on {place}"):
        triton_common.require("softmax", (torch.float32,), x)
