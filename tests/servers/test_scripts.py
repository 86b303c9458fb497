"""What can be said of the scripts that start servers without starting one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def script(name: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", f"scripts/serve_{name}.sh", *options],
        cwd=ROOT,
        env={**os.environ, "NONDET_SERVERS": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("name", ["vllm", "llamacpp", "transformers"])
def test_asking_and_ending_start_nothing(name: str, tmp_path: Path) -> None:
    """Without a server, --url fails and --stop has nothing to do; neither sets an environment up."""
    assert script(name, tmp_path, "--url").returncode == 1
    assert script(name, tmp_path, "--stop").returncode == 0
    assert script(name, tmp_path, "--sotp").returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_took_an_old_number_is_not_ended(tmp_path: Path) -> None:
    """The number in the file is of a process that lives and is not ours: it began at another time."""
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            (tmp_path / "vllm.pid").write_text(f"{other.pid} 1\n", encoding="ascii")
            assert script("vllm", tmp_path, "--url").returncode == 1
            assert script("vllm", tmp_path, "--stop").returncode == 0
            assert other.poll() is None
        finally:
            other.kill()
    assert not (tmp_path / "vllm.pid").exists()
