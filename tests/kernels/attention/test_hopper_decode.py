"""Decode attention in Gluon, without a GPU: what it takes, when it is chosen, and what the compiler makes of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from nondet.kernels.attention import cuda, hopper, triton_kernels
from nondet.kernels.attention.cuda import Call, quickest

CPU = torch.device("cpu")
needs_gluon = pytest.mark.skipif(hopper._NO_KERNEL_DECODE is not None, reason="this Triton has no Gluon for it")


def half(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def call_of(q: torch.Tensor, k: torch.Tensor, **more: Any) -> Call:
    how = {"scale": None, "causal": True, "window": None, "softcap": None} | more
    return Call(q, k, k, torch.empty_like(q), q.shape[0], q.shape[2], k.shape[2], **how)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors are taken for those of a Hopper GPU of 132 multiprocessors."""
    monkeypatch.setattr(hopper, "available", lambda device: None)
    monkeypatch.setattr(cuda, "has_pdl", lambda device: True)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("q", "k", "more", "taken"),
    [
        (half(1, 8, 1, 128), half(1, 2, 1024, 128), {}, True),
        (half(2, 8, 4, 64, dtype=torch.float16), half(2, 2, 900, 64, dtype=torch.float16), {"causal": False}, True),
        (half(1, 8, 1, 128), half(1, 1024, 2, 128).transpose(1, 2), {}, True),
        (half(1, 8, 1, 96), half(1, 2, 1024, 96), {}, False),
        (half(1, 8, 1, 128, dtype=torch.float32), half(1, 2, 1024, 128, dtype=torch.float32), {}, False),
        (half(1, 8, 1, 128), half(1, 2, 1024, 128), {"window": 100}, False),
        (half(1, 8, 1, 128), half(1, 2, 1024, 128), {"softcap": 30.0}, False),
        (half(1, 8, 5, 128), half(1, 2, 1024, 128), {}, False),  # 20 rows
        (half(1, 8, 1, 128), half(1, 2, 1024, 132)[..., :128], {}, False),  # 8 bytes
        (half(1, 8, 1, 128), half(1, 2, 1024, 136)[..., 1:129], {}, False),
    ],
)
def test_few_rows_that_it_can_take_go_to_it(q: torch.Tensor, k: torch.Tensor, more: Any, taken: bool) -> None:
    """By dtype, head dim, mask, rows and layout; and where a user asks for split or not, the Triton kernels run."""
    call = call_of(q, k, **more)
    assert (quickest(call).tiles > 0) is taken
    assert quickest(call, True).tiles == quickest(call, False).tiles == 0


@pytest.mark.parametrize(
    ("requests", "tokens", "span", "tiles"),
    [
        (1, 1024, 1, 4),
        (1, 8192, 1, 4),
        (1, 32768, 4, 4),
        (8, 4096, 4, 4),
        (32, 2048, 0, 2),
        (64, 8192, 0, 2),
        (1, 300, 0, 4),
    ],
)
def test_programs_fill_the_machine(requests: int, tokens: int, span: int, tiles: int) -> None:
    """On 132 multiprocessors, 8 KV heads: one program each as long as that is enough, else two that share one."""
    way = triton_kernels.few_rows(requests * 8, -(-tokens // 512), 128, CPU)
    assert (way.span, way.tiles) == (span, tiles)
    assert way.pdl is way.lanes is (span > 0)


@pytest.mark.usefixtures("on_hopper")
def test_a_compiler_is_sent_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """While torch.compile traces, nothing is asked that a traced tensor cannot say."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    call = call_of(*(torch.empty(1, heads, n, 128, device="meta") for heads, n in ((8, 1), (2, 700))))
    assert not cuda._has_few_row_kernels(call)


def test_a_cpu_is_refused() -> None:
    """No CPU tensor reaches it."""
    assert hopper.available(CPU) is not None
    assert quickest(call_of(half(1, 8, 1, 128), half(1, 2, 1024, 128))).tiles == 0


def test_every_way_has_a_name_of_its_own() -> None:
    """A certificate of one way is none of another: whatever can differ is in the name."""
    way = triton_kernels.few_rows(8, 2, 128, CPU)
    others = [
        way._replace(plan=way.plan._replace(warps=8)),
        way._replace(plan=way.plan._replace(stages=3)),
        way._replace(span=way.span + 1),
        *(way._replace(**{name: not getattr(way, name)}) for name in ("pdl", "lanes", "early")),
        way._replace(tiles=2),
    ]
    assert len({way.name, *(other.name for other in others)}) == 8


COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from nondet.kernels.attention import hopper, hopper as hopper_decode
from nondet.kernels.attention.gluon_kernels import decode_kernel
from nondet.kernels.attention.gluon_kernels import merge_all_kernel

def build(kernel, types, constants, warps, **options):
    names = kernel.arg_names
    types |= {"part_ptr": "*fp32", "qk_scale": "fp32"}
    types = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    source = GluonASTSource(kernel, types, {(names.index(name),): value for name, value in constants.items()}, {})
    built = compile(source, target=GPUTarget("cuda", 90, 32),
                    options={"num_warps": warps, "enable_fp_fusion": False, **options})
    ptx = built.asm["ptx"]
    loads = [at for at in range(len(ptx)) if ptx.startswith("ld.global", at)]
    print("built", built.metadata.shared, ptx.count("mma.sync"), ptx.count("cp.async.bulk.tensor"),
          len(loads), int(max(loads) < ptx.index("fma.rn")))

plain = {"CAUSAL": True, "HEAD_DIM": 128, "SEGMENT": 512}
box = f"tensordesc<bf16[1, 1, 128, 128],{hopper._box_layout()!r}>"
registers = hopper_decode._LAUNCH_REGISTERS
for split, tiles, slots, warps in ((True, 4, 6, 4), (False, 2, 3, 4)):
    build(decode_kernel, {"q_ptr": "*bf16", "out_ptr": "*bf16", "k_desc": box, "v_desc": box},
          plain | {"SPLIT": split, "TILES": tiles, "SLOTS": slots, "EARLY": True, "GROUP": 4, "BLOCK_N": 128,
                   "WARPS": warps, **({} if split else {"part_ptr": None})}, warps, maxnreg=registers)
build(merge_all_kernel, {"out_ptr": "*bf16"},
      plain | {"VARLEN": False, "cu_q_ptr": None, "cu_k_ptr": None, "CHUNK": 16}, 1)
"""


@needs_gluon
def test_it_compiles_for_hopper_and_its_merge_waits_once(tmp_path: Any) -> None:
    """No GPU needed: products and loads stand once, memory suffices; a merge has all its loads under way at once."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DUMP_PTXAS_LOG": "1"}
    run = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=env, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    built = [tuple(map(int, figures)) for figures in re.findall(r"built (\d+) (\d+) (\d+) (\d+) (-?\d+)", run.stdout)]
    split, whole, merge = built
    assert split[0] <= 227 * 1024
    assert 2 * (whole[0] + 1024) <= 228 * 1024  # two programs to a multiprocessor
    assert split[1] == 2 * 4 * 4 * 8  # scores and values of 4 tiles: 4 columns of 8 a warp, 8 deep
    assert whole[1] == 2 * 2 * 4 * 8
    assert (split[2], whole[2]) == (2 * 2 * 4, 2 * 2 * 2)  # K and V of each tile, in halves of the head dim
    assert merge[3] == 16 + 3  # a segment's values a load; a lane's maximum, the one before it, and its sum
    assert merge[4] == 1
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", run.stdout)]
    assert len(spills) == 3
    assert max(spills) == 0
