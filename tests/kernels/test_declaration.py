"""One declaration an operator: everybody who computes it computes the same thing, and every target leads somewhere."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nondet.core import registry
from nondet.core.operator import INVARIANT, ONE_ROW
from nondet.core.registry import classes, declared, load_implementation, load_object, operators
from nondet.kernels.dispatch.operators import FAMILIES, OPERATORS
from nondet.kernels.dispatch.state import Leave, kernels_for

DEVICES = ("cpu", "cuda")


def test_declarations_are_read_without_torch() -> None:
    """`nondet list` and the reports read them and must start at once."""
    code = "import sys, nondet.core.registry as c; c.classes(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [name for name, operator in operators().items() if operator.implementation(INVARIANT)])
def test_the_invariant_of_an_operator_is_one_function(name: str, device: str) -> None:
    """What the registry calls invariant is what replacements get as `kernels.NAME`, and what certify and bench load.

    That a replacement really calls it is for the bits to show: see tests/kernels/dispatch.
    """
    from nondet.bench.collect import _loaded as load_for_bench
    from nondet.certify.plan import _load as load_for_certify

    call = load_implementation(name, "invariant", device).call
    assert getattr(kernels_for(device), name) is call
    assert load_for_bench(name, "invariant", device) is call
    assert load_for_certify(name, INVARIANT, device) is call


def test_a_kernel_that_is_not_there_is_left_and_an_unknown_name_is_a_mistake() -> None:
    """On a device without the kernel the call goes to torch's own; a slip in a name does not."""
    with pytest.raises(Leave, match="no sum_middle on cpu"):
        kernels_for("cpu").sum_middle  # noqa: B018 - reading it is the test
    with pytest.raises(AttributeError, match="sum_midle"):
        kernels_for("cuda").sum_midle  # noqa: B018 - reading it is the test


def test_every_target_leads_somewhere() -> None:
    """Replacements, entries, anchors and members can be imported without a GPU."""
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


def test_names_are_told_apart() -> None:
    """Operators, entries and aten names are unique: one of two would silently be the other."""
    entries = [entry for o in declared().values() for i in o.implementations for entry in i.entries]
    names = [*declared(), *entries]
    assert len(names) == len(set(names))
    aten = [a.name for o in declared().values() for a in o.aten]
    assert len(aten) == len(set(aten))
    assert sorted(aten) == sorted(name for family in OPERATORS.values() for name in family)
    assert list(OPERATORS) == list(FAMILIES)


def test_an_operator_declared_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lines for one name are a mistake, not a choice of the later one."""
    monkeypatch.setattr(registry, "DECLARATIONS", (*registry.DECLARATIONS, registry.DECLARATIONS[0]))
    with pytest.raises(ValueError, match="declared twice: linear"):
        declared()


def test_orders_of_one_name_are_one_order() -> None:
    """Classes are told apart by name alone, so two orders must not share one."""
    orders: dict[str, object] = {}
    for operator in declared().values():
        for claim in operator.claims:
            assert orders.setdefault(claim.order.name, claim.order) is claim.order
    assert orders.keys() == classes().keys()
