"""Every name leads to something that has the right shape, and every wrong name to a useful line."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch

from nondet.core.registry import PROBES, implementation_names, load_implementation, load_object, load_probe, operators
from nondet.errors import UserError
from nondet.probes.base import Options


def test_probes_load_under_their_names():
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
    ways = [(name, way) for name, declaration in operators().items() for way in declaration.implementations]
    everywhere = [(name, target) for name, way in ways for target in way.targets.values()]
    targets = [(name, target) for name, target in everywhere if "triton" not in target or sys.platform == "linux"]
    assert len(targets) > 50
    for operator, target in targets:
        wanted = inspect.signature(load_object(operators()[operator].reference)).parameters
        taken = inspect.signature(load_object(target)).parameters
        # a mask is asked of stock alone (`nondet probe --from-trace`, attention as an engine packs it)
        needed = [name for name in wanted if name != "mask" or name in taken]
        if any(p.kind is p.VAR_KEYWORD for p in taken.values()):  # it passes the keywords on
            needed = [name for name in needed if wanted[name].kind is not inspect.Parameter.KEYWORD_ONLY]
        assert list(taken)[: len(needed)] == needed, f"{target} takes {list(taken)}"
    for operator in operators():
        assert operators()[operator].reference
        wanted = {"stock"} if operator == "cumsum" else {"stock", "invariant"}  # of that the block proves torch's own
        for device in ("cpu", "cuda"):
            assert wanted <= set(implementation_names(operator, device))
        assert "reference" not in implementation_names(operator, "cpu")


def test_what_is_no_implementation_is_said(tmp_path, monkeypatch):
    """Slips in names: tests/test_cli.py."""
    (tmp_path / "theirs.py").write_text("raise OSError('no library')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for operator, name, said in [
        ("attention", "stock-cudnn", r"stock-cudnn.*on cpu.*cuda"),
        ("linear", "theirs:mm", "no library"),
        ("linear", "math:nn", "nn"),
        ("linear", ":mm", "can't be imported"),
        ("linear", "theirs:", "can't be imported"),
    ]:
        with pytest.raises(UserError, match=said):
            load_implementation(operator, name, "cpu")
