"""The Hopper prefill kernel: its bits are those of the order written plainly, and its plan reaches every key once.

Gluon has no interpreter. Without a GPU, its list of work and its mask run as Python on NumPy, and the kernel is
compiled for Hopper, which shows what would cost its speed without changing a result.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton

from nondet.kernels.attention import cuda as triton_attention
from nondet.kernels.attention import gluon_kernels as hopper_attention_parts
from nondet.kernels.attention import hopper as hopper_attention
from nondet.kernels.attention.hopper import prefill, supports


@pytest.fixture
def as_python(monkeypatch):
    """The parts of the kernel as Python functions on NumPy; what is given says how many programs and which."""
    launch = SimpleNamespace(programs=1, program=0)
    stub = SimpleNamespace(
        num_programs=lambda axis: launch.programs,
        program_id=lambda axis: launch.program,
        arange=lambda start, end, layout: np.arange(start, end),
        where=np.where,
        minimum=np.minimum,
    )
    monkeypatch.setattr(hopper_attention_parts, "gl", stub)
    monkeypatch.setattr(hopper_attention_parts, "pin", lambda x: x)
    return launch


@pytest.mark.parametrize(("items", "programs"), [(1, 1), (7, 7), (1024, 132), (131, 132), (265, 132)])
def test_every_item_has_one_program(as_python, items, programs):
    """Turn by turn, programs cover the items exactly once, and none has two more than another."""
    as_python.programs = programs
    mine = []
    for program in range(programs):
        as_python.program = program
        turns = range(math.ceil(items / programs))
        mine.append([i for i in (int(hopper_attention_parts.item_of.fn(t)) for t in turns) if i < items])
        assert len(mine[-1]) >= len(turns) - 1  # only the last turn may be short: barriers count turns
    assert sorted(i for items_of_one in mine for i in items_of_one) == list(range(items))


def test_programs_share_the_work_evenly(as_python):
    """Causal, 4,096 tokens, 32 heads on 132 multiprocessors: no program has 3 % more tiles than the average."""
    as_python.programs = 132
    tiles = []
    for program in range(132):
        as_python.program = program
        items = [int(hopper_attention_parts.item_of.fn(turn)) for turn in range(8)]
        tiles.append(
            sum(hopper_attention_parts.work_of.fn(i, 32, 32, 4096, 4096, True, 128, 128)[2] for i in items if i < 1024)
        )
    assert max(tiles) <= 1.03 * sum(tiles) / len(tiles)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("tq", "tk"), [(1, 1), (1, 130), (128, 128), (300, 300), (129, 640), (2, 128), (257, 1000)])
def test_tiles_and_mask_show_every_visible_key_and_no_other(as_python, causal, tq, tk):
    """Per row: the visible keys of all tiles are keys 0 ... its position; tiles called full need no mask."""
    blocks = math.ceil(tq / 128)
    heads_all, seen_rows = 3, 0
    for item in range(blocks * heads_all):
        head, first, tiles, full = hopper_attention_parts.work_of.fn(item, blocks, heads_all, tq, tk, causal, 128, 128)
        assert (head, first) == (item % heads_all, (blocks - 1 - item // heads_all) * 128)
        for half in (0, 64):
            rows = range(first + half, min(first + half + 64, tq))
            seen = np.zeros((64, tk), dtype=bool)
            for j in range(tiles):
                scores = hopper_attention_parts.mask_scores.fn(
                    np.ones((64, 128)), j * 128, first + half + tk - tq, tk, causal, None, None
                )
                if j < full:
                    assert (scores[: len(rows)] == 1).all()
                keys = min(128, tk - j * 128)
                assert (scores[:, keys:] == -np.inf).all()
                seen[:, j * 128 : j * 128 + keys] = scores[:, :keys] == 1
            for i, row in enumerate(rows):
                limit = row + tk - tq + 1 if causal else tk
                assert seen[i, :limit].all()
                assert not seen[i, limit:].any()
            seen_rows += len(rows)
    assert seen_rows == heads_all * tq


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_total_has_a_place_for_every_element(head_dim):
    """The layout of a consumer's total maps addresses to elements one to one."""
    layout = hopper_attention_parts.total_layout(head_dim)
    places = {(0, 0)}
    for row, col in layout.offset_bases:
        places |= {(r ^ row, c ^ col) for r, c in places}
    assert places == {(r, c) for r in range(64) for c in range(head_dim)}


def half(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("q", "k", "options", "reason"),
    [
        (half(1, 4, 8, 128), half(1, 2, 8, 128), {}, None),
        (half(2, 4, 8, 64, dtype=torch.float16), half(2, 2, 20, 64, dtype=torch.float16), {"causal": False}, None),
        (half(1, 8, 4, 128).transpose(1, 2), half(1, 8, 2, 128).transpose(1, 2), {}, None),
        (half(1, 4, 8, 128, dtype=torch.float32), half(1, 2, 8, 128, dtype=torch.float32), {}, "float32"),
        (half(1, 4, 8, 96), half(1, 2, 8, 96), {}, "96"),
        (half(1, 4, 8, 128), half(1, 2, 8, 128), {"window": 4}, "window"),
        (half(1, 4, 8, 128), half(1, 2, 8, 128), {"softcap": 30.0}, "soft cap"),
        (half(1, 4, 9, 128), half(1, 2, 8, 128), {}, "8 and 9"),
        (half(1, 4, 128, 8).mT, half(1, 2, 8, 128), {}, "q's last stride"),
        (half(1, 4, 8, 128), half(1, 2, 8, 129)[..., 1:], {}, "k"),
        (half(1, 4, 8, 132)[..., :128], half(1, 2, 8, 128), {}, "16 bytes"),
        (half(1, 4, 8, 128), half(1, 1, 8, 128).expand(1, 2, 8, 128), {}, "k has strides"),
    ],
)
def test_what_it_does_not_take_has_a_reason(q, k, options, reason):
    """Dtype, head dim, window, soft cap, shapes and layouts are refused by name, and nothing else is."""
    call = {"causal": True, "window": None, "softcap": None} | options
    fault = hopper_attention._call_fault(q, k, k, **call)
    assert fault is None if reason is None else reason in fault


def test_a_cpu_is_refused():
    """No CPU tensor reaches the kernel: neither the question nor the call lets it through."""
    q = half(1, 4, 8, 128)
    missing = hopper_attention._NO_KERNEL or "compute capability 9.0"
    assert missing in supports(q, q, q, True, None, None)
    with pytest.raises(NotImplementedError, match=re.escape(missing)):
        prefill(q, q, q, causal=True, scale=None)


def test_a_compiler_is_sent_elsewhere(monkeypatch):
    """While torch.compile traces, the answer is no, before anything is asked that a traced tensor cannot say."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    reason = supports(*(torch.empty(1, 4, 8, 128, device="meta"),) * 3, True, None, None)
    assert (hopper_attention._NO_KERNEL or "torch.compile") in reason


def test_its_constants_are_the_classes():
    """Segments are as long as those of the Triton kernels."""
    assert hopper_attention.SEGMENT == triton_attention.SEGMENT


COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from nondet.kernels.attention import hopper as h
from nondet.kernels.attention.gluon_kernels import prefill_kernel as kernel

for head_dim, dtype, causal in ((128, "bf16", True), (64, "fp16", False)):
    box = lambda rows: f"tensordesc<{dtype}[1, 1, {rows}, {head_dim}],{h._box_layout()!r}>"
    constants = {"GROUP": 4, "CAUSAL": causal, "BLOCK_M": h._BLOCK_M, "BLOCK_N": h.BLOCK_N, "HEAD_DIM": head_dim,
                 "SEGMENT": h.SEGMENT, "STAGES": h._STAGES[head_dim], "REGISTERS": h._CONSUMER_REGISTERS}
    types = {name: "constexpr" for name in constants} | {"qk_scale": "fp32", "q_desc": box(64), "out_desc": box(64),
                                                         "k_desc": box(h.BLOCK_N), "v_desc": box(h.BLOCK_N)}
    names = kernel.arg_names
    source = GluonASTSource(kernel, {name: types.get(name, "i32") for name in names},
                            {(names.index(name),): value for name, value in constants.items()}, {})
    built = compile(source, target=GPUTarget("cuda", 90, 32),
                    options={"num_warps": 4, "maxnreg": h._LAUNCH_REGISTERS, "enable_fp_fusion": False})
    print("built", built.metadata.shared, built.asm["ptx"].count("wgmma.mma_async.sync"))
"""


@pytest.mark.skipif(hopper_attention._NO_KERNEL is not None, reason="this Triton has no Gluon for it")
def test_it_compiles_for_hopper_without_spills_or_serial_products(tmp_path):
    """No GPU needed: each product stands once, the assembler keeps them asynchronous, registers and memory suffice."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DUMP_PTXAS_LOG": "1"}
    run = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=env, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    built = [tuple(map(int, found)) for found in re.findall(r"built (\d+) (\d+)", run.stdout)]
    # Per consumer: tile 0's scores, then scores and values in the loop, then the last values; 16 deep each.
    assert [count for _, count in built] == [2 * (8 + 8 + 8 + 8), 2 * (4 + 4 + 8 + 8)]
    assert all(shared <= 227 * 1024 for shared, _ in built)
    assert "serialized" not in run.stdout
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", run.stdout)]
    # The assembler of Triton 3.7 and later spills a few of the mask's constants, outside the loop's usual path.
    most = 0 if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) else 1024
    assert len(spills) >= 2
    assert max(spills) <= most
