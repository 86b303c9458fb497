"""What our processes do to themselves."""

from __future__ import annotations

import subprocess
import sys

import pytest

_CODE = """
import resource, sys, torch
from nondet.processes import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def three():
    [torch.zeros(6 * 2**20) for _ in range(3)]
for _ in range(3):
    three()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    three()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_freed_memory_is_kept_for_the_next_tensor() -> None:
    """Three tensors of 24 MiB at a time, again and again: their pages are there, and by default many are not."""
    faults = {}
    for how in ("kept", "default"):
        done = subprocess.run([sys.executable, "-c", _CODE, how], capture_output=True, text=True, check=True)
        faults[how] = int(done.stdout)
    assert faults["kept"] < 1000 < 5000 < faults["default"]
