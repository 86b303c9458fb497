"""What a script makes of runs under vLLM: a start's stages, equal bits in fresh processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab import vllm_summary


def seen(folder: Path, name: str, digest: str, alike: int = 3, mode: str = "nondet", **more: Any) -> None:
    load = {"short": {"copies": 3, "traces_as_alone": alike, "distinct_traces": 1}}
    options = [word for option, value in more.items() for word in (f"--{option}", value)]
    argv = ["vllm_load.py", "--mode", mode, "--out", f"{name}.part", *options]
    made = {"mode": mode, "argv": argv, "start_s": 52.0, "load": load, "solo": {"short": {"digest": digest}}}
    (folder / f"{name}.json").write_text(json.dumps(made))


def test_the_plugin_has_one_answer(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    for digests, alike, mode, line, code in [
        ("aaa", 3, "nondet", "3 fresh processes, the same bits: x0, x1, x2", 0),
        ("aab", 3, "nondet", "3 fresh processes, other bits: x0, x1, x2\nDIFFERS: x0, x1, x2", 1),
        ("a", 2, "nondet", "DIFFERS: x0", 1),
        ("ab", 0, "stock", "2 fresh processes, other bits: x0, x1", 0),
    ]:
        folder = tmp_path_factory.mktemp("runs")
        for i, digest in enumerate(digests):
            seen(folder, f"x{i}", digest, alike, mode, copies=str(i))
        seen(folder, "other", "c", model="0.6b")  # is not compared with them
        assert vllm_summary.main(folder) == code
        out = capsys.readouterr().out
        assert line in out
        assert ("fresh processes" in out) == (len(digests) > 1)
    folder = tmp_path_factory.mktemp("planted")  # a planted fault has to be found
    for alike, code in ((0, 0), (3, 1)):
        seen(folder, "stock", "a", alike, "stock", plant="split")
        assert vllm_summary.main(folder) == code
        assert capsys.readouterr().out.count(": the planted fault was not found") == code
