"""Every name leads to something that has the right shape, and every wrong name to a useful line."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch

from nondet.core.registry import PROBES, implementation_names, load_implementation, load_object, load_probe, operators
from nondet.errors import UnknownNameError, UserError
from nondet.probes.base import Options

TARGETS = [
    (operator, target)
    for operator, declaration in operators().items()
    for i in declaration.implementations
    for target in i.targets.values()
]


def test_probes_load_under_their_names():
    """A probe calls itself what the registry calls it, and has cases on a CPU whose names are unique."""
    for name in PROBES:
        probe = load_probe(name)
        assert probe.name == name
        cases = list(probe.cases(Options()))
        assert cases
        assert len({(case.name, case.dtype) for case in cases}) == len(cases)
        for case in cases:
            assert isinstance(case.torch_dtype, torch.dtype)
            assert case.operator in operators() or case.impls is not None


def test_implementations_take_the_operator_s_arguments():
    """Every registered launcher can be imported, wherever it runs, and takes what the oracle takes."""
    targets = [(operator, target) for operator, target in TARGETS if "triton" not in target or sys.platform == "linux"]
    assert len(targets) > 50
    for operator, target in targets:
        wanted = inspect.signature(load_object(operators()[operator].reference)).parameters
        taken = inspect.signature(load_object(target)).parameters
        # a mask is asked of stock alone (`nondet probe --from-trace`, attention as an engine packs it)
        needed = [name for name in wanted if name != "mask" or name in taken]
        assert list(taken)[: len(needed)] == needed, f"{target} takes {list(taken)}"


def test_every_operator_can_be_compared_everywhere():
    """Each operator has an oracle and a stock form on both device types; all but a scan an invariant one."""
    for operator in operators():
        assert operators()[operator].reference
        wanted = {"stock"} if operator == "cumsum" else {"stock", "invariant"}  # of that the block proves torch's own
        for device in ("cpu", "cuda"):
            assert wanted <= set(implementation_names(operator, device))
        assert "reference" not in implementation_names(operator, "cpu")


def test_wrong_names_get_the_right_ones():
    """A slip in a probe's or an implementation's name is answered with what was meant, or where it exists."""
    with pytest.raises(UnknownNameError, match="matmul"):
        load_probe("matmull")
    with pytest.raises(UnknownNameError, match="invariant"):
        load_implementation("linear", "invarient", "cpu")
    with pytest.raises(UserError, match=r"stock-cudnn.*on cpu.*cuda"):
        load_implementation("attention", "stock-cudnn", "cpu")


def test_a_user_s_function(tmp_path, monkeypatch):
    """module:function from the current path is taken as it is."""
    (tmp_path / "their_kernels.py").write_text("def mm(x, weight):\n    return x @ weight.T\n\nnumber = 3\n")
    (tmp_path / "their_broken.py").write_text("raise OSError('no library')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_implementation("linear", "their_kernels:mm", "cpu").call(torch.eye(2), torch.eye(2)).shape == (2, 2)
    for target, said in {
        "their_kernels:nn": "nn",
        "their_kernels:number": "int",
        "their_broken:mm": "no library",
        "not_there:mm": "not_there",
        ":mm": "can't be imported",
        "their_kernels:": "can't be imported",
    }.items():
        with pytest.raises(UserError, match=said):
            load_implementation("linear", target, "cpu")
