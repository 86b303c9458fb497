"""What several ranks need and is not there is one line and exit code 2, before anything is started or written."""

from __future__ import annotations

import pytest
import torch

from nondet.cli import main

COMMANDS = [("probe", "all-reduce"), ("bench", "all-reduce"), ("bench", "row-parallel"), ("sample",)]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(("gpus", "ranks", "line"), [
    (2, "3", "--ranks 3 needs 3 GPUs, and 2 GPUs are here"),
    (1, "2", "--ranks 2 needs 2 GPUs, and 1 GPU is here"),
    (2, "two", "--ranks two is no list of numbers"),
    (2, "65", "--ranks 65 is no group of ranks"),
])  # fmt: skip
def test_ranks_that_cannot_be_had(command, gpus, ranks, line, monkeypatch, capsys, tmp_path):
    """Each command refuses them in the same words; no run file is begun."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert main([*command, "--device", "cuda", "--ranks", ranks]) == 2
    assert line in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_time_limit_that_is_none(command, monkeypatch, capsys, tmp_path):
    """The variable is looked at before any rank is started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NONDET_RANKS_LIMIT_S", "soon")
    assert main([*command, "--device", "cpu", "--ranks", "2"]) == 2
    assert "NONDET_RANKS_LIMIT_S=soon is no number of seconds" in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())
