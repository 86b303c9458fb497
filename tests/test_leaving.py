"""The command ends its process without taking torch apart: what others want done at the end is done all the same."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import atexit, os, sys, threading, time
from nondet.__main__ import leave
if "torch" in sys.argv:
    sys.modules["torch"] = sys
if "thread" in sys.argv:
    threading.Thread(target=lambda: (time.sleep(0.2), os.write(1, b"thread "))).start()
atexit.register(lambda: print("atexit", end=" "))
print("said", end=" ")
leave(7)
print("went on", end=" ")
sys.exit(8)
"""


@pytest.mark.parametrize(
    ("words", "code", "out"),
    [
        (["torch"], 7, "said atexit "),
        ([], 8, "said went on atexit "),
        (["torch", "thread"], 8, "thread said went on atexit "),
    ],
)
def test_what_is_done_at_the_end(words: list[str], code: int, out: str) -> None:
    """The code, what is still to be written and what was registered; threads that are no daemons are waited for."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, sorted(done.stdout.split()), done.stderr) == (code, sorted(out.split()), "")
