"""What tests of kernels share: what runs by default, the full way of a call, a compiler for a GPU that is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def at_length(*values: Any) -> list[Any]:
    """These only in a run at length (`nightly`); a tuple stands for several arguments."""
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.nightly) for v in values]


@contextmanager
def in_full() -> Iterator[None]:
    """Each call goes through its replacement: no short way is taken."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nondet.kernels.dispatch.functions._plainly", lambda args: False)
        yield


def compiled(code: str, folder: Path) -> str:
    """What a program that compiles kernels prints, and the assembler's log of them; no kernel is kept."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(folder), "TRITON_DUMP_PTXAS_LOG": "1"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout
