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


def test_a_planted_fault_has_to_be_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for alike, code in ((0, 0), (3, 1)):
        seen(tmp_path, "stock", "a", alike, "stock", plant="split")
        assert vllm_summary.main(tmp_path) == code
        assert capsys.readouterr().out.count(": the planted fault was not found") == code


def test_speed_is_of_medians_with_the_least_and_the_most(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for mode, times in (("stock", [1.0, 1.2, 1.1]), ("nondet", [1.0, 1.1, 1.0])):
        seen(tmp_path, f"pair-8b-{mode}", mode, 0 if mode == "stock" else 3, mode)
        path = tmp_path / f"pair-8b-{mode}.json"
        steps = [a + b for a, b in zip(times, (0.5, 0.5, 0.4 if mode == "stock" else 0.8), strict=True)]
        prefills = {"requests": 16, "keys": 4000, "prefill_s": 1.0, "ms_per_step": 2.0, "s": {"8": times, "136": steps}}
        speed = {"256": {"s": times, "tokens_per_s": 1}}
        path.write_text(json.dumps(json.loads(path.read_text()) | {"speed": speed, "long": [prefills]}))
    assert vllm_summary.main(tmp_path) == 0
    said = capsys.readouterr().out
    assert "256 1.100 (0.909 to 1.200); 16x4000 prefill 1.100 (0.909 to 1.200)" in said
    assert "16x4000 step 1.000 (0.500 to 1.000)" in said
    assert ["16x4000", "prefill", "64,000", "58,182"] in [row.split() for row in said.splitlines()]
