"""Kernels compiled by copies of a process, for a Hopper that is not there: nothing can run, all can be compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import os, sys
from contextlib import nullcontext
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

target = GPUTarget("cuda", 90, 32)
driver.set_active(SimpleNamespace(
    get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0,
    launcher_cls=lambda made, metadata: open(os.environ["TRITON_CACHE_DIR"] + ".launchers", "a").write("x"),
))
torch.cuda.current_device, torch.cuda.device = lambda: 0, lambda device: nullcontext()
seen = []
triton.knobs.compilation.listener = lambda **event: seen.append(bool(event["cache_hit"]))

from nondet.vllm.ahead import Ahead

device = "cpu"
"""

REAL = """
import os

import torch
import triton

from nondet.vllm.ahead import Ahead

seen = []
triton.knobs.compilation.listener = lambda **event: seen.append(bool(event["cache_hit"]))
device = "cuda"
"""

SMALL = """
import triton.language as tl

@triton.jit
def one(x_ptr, N: tl.constexpr):
    tl.store(x_ptr, N)

@triton.jit
def wrong(x_ptr):
    tl.store(x_ptr, nothing)

x = torch.zeros(4, device=device)

def launch_all():
    wrong[(1,)](x)
    for n in (1, 2, 2, 3):
        assert one[(1,)](x, N=n) is None

os.sched_getaffinity = lambda process: range(6)
ahead = Ahead(launch_all, 2)
print("asked", ahead.kernels, "of", ahead.copies, seen)
os.environ["TRITON_CACHE_DIR"] += "-other"
ahead.join()
print("read", seen)
one.warmup(x, N=3, grid=(1,))
print("known", len(seen))
one.warmup(x, N=4, grid=(1,))
print("new", seen[-1])
try:
    wrong.warmup(x, grid=(1,))
except triton.CompilationError:
    print("raised where it is launched")
"""

ATTENTION = """
import itertools
from tests.vllm import toys

sys.modules.update(toys.modules())
from nondet.kernels.attention import cuda, hopper, triton_kernels

hopper.available = hopper._call_fault = lambda *asked: None
cuda.has_pdl = lambda device: True
from nondet.vllm import attention

attention.supports = hopper.supports = lambda *asked: None
impl = attention.SegmentsImpl(
    num_heads=4, head_size=64, scale=1.0, num_kv_heads=2, alibi_slopes=None, sliding_window=None, kv_cache_dtype="auto"
)
asked = [impl], torch.bfloat16, 8, 1024, torch.device("cpu"), 16
ahead = Ahead(lambda: attention.warm(*asked, dry=True))
ahead.join()
print("read", ahead.kernels, sum(seen))
whole = cuda._cases
for place in range(7):  # every input of a proof, not its first alone
    cuda._cases = lambda *how: itertools.islice(whole(*how), place, None)
    try:
        Ahead(lambda: attention.warm(*asked, dry=True))
    except StopIteration:
        break
print("places", place, "more", len(seen) - ahead.kernels)
"""


RUN = """
for n in (5, 1, 2, 3):
    one[(1,)](x, N=n)
    assert x.tolist() == [n, 0, 0, 0]
print("ran")
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a copy needs a core of its own"),
]


def ran(text: str, folder: Path, begin: str = BEGIN) -> str:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(folder / "kernels"), "PYTHONPATH": os.pathsep.join(sys.path)}
    script = folder / "script.py"  # Triton reads sources
    script.write_text(begin + text)
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=env, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def test_nothing_runs_and_copies_compile(tmp_path: Path) -> None:
    """Each kernel once, by the cores of one of two ranks; what can't be compiled is an error where it is launched."""
    said = ran(SMALL, tmp_path).splitlines()
    assert said == ["asked 4 of 2 []", "read [True, True, True]", "known 3", "new False", "raised where it is launched"]


@pytest.mark.gpu
def test_copies_of_a_process_that_uses_a_gpu(tmp_path: Path) -> None:
    """They never touch it; what they compiled runs."""
    said = ran(SMALL + RUN, tmp_path, REAL).splitlines()
    assert said[:2] == ["asked 4 of 2 []", "read [True, True, True]"]
    assert said[-1] == "ran"


@pytest.mark.nightly
def test_attention_asks_for_all_that_it_will_launch(tmp_path: Path) -> None:
    """What a dry start launches is what proofs launch on any of their inputs."""
    said = ran(ATTENTION, tmp_path)
    assert said == "read 6 6\nplaces 6 more 0\n"
