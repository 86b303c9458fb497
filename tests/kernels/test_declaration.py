"""One declaration an operator: everybody who computes it computes the same thing, and every target leads somewhere."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nondet.core import registry
from nondet.core.compare import error_against, identical
from nondet.core.operator import INVARIANT, ONE_ROW
from nondet.core.registry import classes, declared, implementation_names, load_implementation, load_object, operators
from nondet.kernels import reference, stock, triton_common
from nondet.kernels.dispatch.operators import FAMILIES, OPERATORS
from nondet.kernels.dispatch.state import Leave, kernels_for
from nondet.kernels.triton_common import launch
from tests.build import DEVICE, bell


@pytest.mark.slow
def test_declarations_are_read_without_torch() -> None:
    """The help and the reports read them and must start at once."""
    code = "import sys, nondet.core.registry as c; c.classes(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_invariant_of_an_operator_is_one_function() -> None:
    """What the registry calls invariant is what replacements get; without one torch's runs, but not after a slip."""
    for name in (name for name, operator in operators().items() if operator.implementation(INVARIANT)):
        for device in ("cpu", "cuda"):
            assert getattr(kernels_for(device), name) is load_implementation(name, "invariant", device).call, device
    with pytest.raises(Leave, match="no sum_middle on cpu"):
        kernels_for("cpu").sum_middle  # noqa: B018 - reading it is the test
    with pytest.raises(AttributeError, match="sum_midle"):
        kernels_for("cuda").sum_midle  # noqa: B018 - reading it is the test


def test_every_target_leads_somewhere_and_names_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators, entries, aten names and orders are unique: one of two would silently be the other."""
    assert len(declared()) > 10
    for operator in declared().values():
        targets = [aten.replacement for aten in operator.aten]
        targets += [t for t in (operator.reference, operator.accuracy and operator.accuracy.bound) if t]
        targets += [o.made_by for o in operator.operands if o.made_by]
        targets += [t for i in operator.implementations for entry in i.entries.values() for t in entry.values()]
        for claim in operator.claims:
            targets += [t for t in (claim.anchor, *claim.members.values()) if t not in (INVARIANT, ONE_ROW)]
        assert targets, operator.name
        for target in targets:
            assert load_object(target) is not None, target
        beyond = operator.name == "all_reduce"  # stands under c10d's operators: nondet.kernels.dispatch.replacements
        assert bool(operator.aten) == (operator.family is not None and not beyond), operator.name
    entries = [entry for o in declared().values() for i in o.implementations for entry in i.entries]
    names = [*declared(), *entries]
    assert len(names) == len(set(names))
    aten = [a.name for o in declared().values() for a in o.aten]
    assert len(aten) == len(set(aten))
    assert sorted(aten) == sorted(name for family in OPERATORS.values() for name in family)
    assert list(OPERATORS) == list(FAMILIES)
    orders: dict[str, object] = {}
    for operator in declared().values():
        for claim in operator.claims:
            assert orders.setdefault(claim.order.name, claim.order) is claim.order
    assert orders.keys() == classes().keys()
    first = next(iter(declared()))
    monkeypatch.setattr(registry, "DECLARATIONS", (*registry.DECLARATIONS, registry.DECLARATIONS[0]))
    with pytest.raises(ValueError, match=f"declared twice: {first}"):
        declared()


def test_the_hf_spelling_is_the_models_own() -> None:
    """Bit for bit what transformers' Qwen3 computes, in bfloat16, where the two roundings show."""
    from transformers.models.qwen3 import modeling_qwen3 as modeling

    x, weight = bell(7, 96).bfloat16(), bell(96).bfloat16()
    norm = modeling.Qwen3RMSNorm(96, eps=1e-6).to(DEVICE, torch.bfloat16)
    norm.weight.data.copy_(weight)
    with torch.no_grad():
        assert identical(stock.rms_norm_hf(x, weight), norm(x))


@pytest.mark.parametrize(
    ("q_len", "causal", "heads"), [(1, True, (4, 2)), (7, True, (4, 2)), (7, False, (4, 4)), (20, True, (4, 4))]
)
def test_attention(q_len: int, causal: bool, heads: tuple[int, int]) -> None:
    q, k, v = bell(2, heads[0], q_len, 32), bell(2, heads[1], 20, 32), bell(2, heads[1], 20, 32)
    right = reference.attention(q, k, v, causal=causal, scale=0.3)
    ran = []
    for name in implementation_names("attention", DEVICE):
        if name.startswith("stock"):
            try:
                got = load_implementation("attention", name, DEVICE).call(q, k, v, causal=causal, scale=0.3)
            except RuntimeError as error:
                assert "No available kernel" in str(error)  # noqa: PT017 - any other error fails the test
                continue
            ran.append(name)
            # TF32 or half-precision products inside would be ten times further off
            assert error_against(got, right).relative_norm <= 1e-5
    assert {"stock", "stock-math"} <= set(ran)


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
    x = torch.zeros(8)
    launch(kernel, (3,), (x,), (33, 0.5), CONSTANTS, num_warps=4)
    other = torch.ones(8)
    launch(kernel, (5,), (other,), (33, 0.5), CONSTANTS, num_warps=4)
    assert kernel.compiled == 1
    grid, first, *rest = kernel.launched[1]
    assert (grid, rest) == ((5, 1, 1), [33, 0.5, *CONSTANTS.values()])
    assert first is other


@pytest.mark.usefixtures("kernel")
def test_another_kind_is_compiled(monkeypatch) -> None:
    """And on another device; constants out of their order Triton binds by name, each time: by place they would land in
    each other's."""
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
        kernel = Kernel()
        for x, numbers, constants, warps in (usual, (*usual[:at], other, *usual[at + 1 :])):
            launch(kernel, (3,), (x,), numbers, constants, num_warps=warps)
        assert kernel.compiled == 2, other
    kernel = Kernel()
    for device in (0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        launch(kernel, (3,), (torch.zeros(8),), (33, 0.5), CONSTANTS)
    assert kernel.compiled == 2
    for _ in range(3):
        launch(kernel, (3,), (torch.zeros(8),), (33, 0.5), {"LOG": False, "SPAN": 16})
    assert kernel.compiled == 5
