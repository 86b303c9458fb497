"""scripts/vllm_summary.py: where a start's seconds go, and whether fresh processes had the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts import vllm_summary

LOG = """INFO 11-23 23:59:58 [api_utils.py:273] non-default args: {}
(EngineCore pid=1) INFO 11-24 00:00:10 [core.py:114] Initializing a V1 LLM engine (v0.25.1) with config
(EngineCore pid=1) INFO 11-24 00:00:12 [model_runner.py:302] Model loading took 15.27 GiB and 1.3 seconds
(EngineCore pid=1) INFO 11-24 00:00:16 [plugin.py:128] nondet: 5 shapes of weights at 63 row counts: 287 proofs
(EngineCore pid=1) no time here
(EngineCore pid=1) INFO 11-24 00:00:27 [monitor.py:53] torch.compile took 10.5 s in total
(EngineCore pid=1) INFO 11-24 00:00:50 [core.py:337] init engine (profile, create kv cache) took 38 s
"""


def seen(folder: Path, name: str, digest: str, alike: int = 3, mode: str = "nondet", **more: Any) -> None:
    load = {"short": {"copies": 3, "traces_as_alone": alike, "distinct_traces": 1}}
    argv = ["vllm_load.py", "--mode", mode, "--out", f"{name}.part", *more]
    made = {"mode": mode, "argv": argv, "start_s": 52.0, "load": load, "solo": {"short": {"digest": digest}}}
    (folder / f"{name}.json").write_text(json.dumps(made))


def test_a_start_is_cut_into_stages() -> None:
    taken = {"arguments": 12, "weights": 2, "proofs": 4, "torch.compile": 11, "sampler": 23}
    assert vllm_summary.stages(LOG) == taken
    assert vllm_summary.stages("nothing") == {}


@pytest.mark.parametrize(
    ("digests", "alike", "mode", "said", "code"),
    [
        (("a", "a", "a"), 3, "nondet", "3 fresh processes, the same bits: x0, x1, x2", 0),
        (("a", "a", "b"), 3, "nondet", "3 fresh processes, other bits: x0, x1, x2\nDIFFERS: x0, x1, x2", 1),
        (("a",), 2, "nondet", "DIFFERS: x0", 1),
        (("a", "b"), 0, "stock", "2 fresh processes, other bits: x0, x1", 0),
    ],
)
def test_the_plugin_alone_has_to_be_alike(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    digests: tuple[str, ...],
    alike: int,
    mode: str,
    said: str,
    code: int,
) -> None:
    for i, digest in enumerate(digests):
        seen(tmp_path, f"x{i}", digest, alike, mode)
    (tmp_path / "x0.log").write_text(LOG)
    assert vllm_summary.main(tmp_path) == code
    out = capsys.readouterr().out
    assert said in out
    assert ("fresh processes" in out) == (len(digests) > 1)
    assert "start 52.0 s: {'arguments': 12" in out
