"""What our processes do to themselves."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import pytest

from nondet.core.processes import keep_freed_memory


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_glibc_takes_the_limits_that_keep_freed_memory() -> None:
    """Each of them: one beyond what it allows is refused in silence, and costs a sixth of a run's CPU time."""
    code = "import sys; from nondet.core.processes import keep_freed_memory; sys.exit(0 if keep_freed_memory() else 1)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("trouble", [OSError("none"), TypeError("Windows"), AttributeError("mallopt")], ids=repr)
def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch, trouble: Exception) -> None:
    """Without mallopt nothing is changed, and nothing fails."""

    def load(_: object) -> object:
        raise trouble

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert keep_freed_memory() is False
