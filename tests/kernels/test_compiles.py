"""Triton kernels compiled for Hopper without a GPU: what the interpreter takes, the compiler has to take as well."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton.language as tl
from nondet.kernels.attention import triton_kernels as cuda_kernels, triton_kernels as cuda_plan
from nondet.kernels.matmul import triton_kernels as cuda_triton
from nondet.kernels.rows import cuda_softmax as cuda_softmax_parts
from nondet.kernels.rows.cuda_softmax import plan

def build(kernel, types, constants, warps, stages=1):
    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    source = ASTSource(kernel, types, {(names.index(name),): value for name, value in constants.items()}, {})
    built = compile(source, target=GPUTarget("cuda", 90, 32),
                    options={"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False})
    print("built", kernel.fn.__name__, "st.local" in built.asm["ptx"])

half = "*bf16"
for tile in ("16x32x128w4s5", "128x128x64w8s4"):
    t = cuda_triton.tile_named(tile)
    blocks = {"BLOCK_M": t.block_m, "BLOCK_N": t.block_n, "BLOCK_K": t.block_k, "GROUP_M": 8, "EVEN_K": True}
    build(cuda_triton._matmul_chain_kernel, {"a_ptr": half, "b_ptr": half, "out_ptr": half, "stride_bn": "i64"},
          blocks | {"bias_ptr": None, "HAS_BIAS": False, "ACC": tl.float32, "PRECISION": "ieee", "stride_ak": 1},
          t.warps, t.stages)
pointers = {name: half for name in ("q_ptr", "k_ptr", "v_ptr", "out_ptr")} | {"part_ptr": "*fp32"}
pointers |= {name: "fp32" for name in ("qk_scale", "cap_in", "cap_out")}
for span in (0, 2):
    import torch
    p = cuda_plan.plan_for(1 if span else 128, 128, torch.bfloat16)
    form = {"VARLEN": False, "CAUSAL": True, "WINDOW": False, "cu_q_ptr": None, "cu_k_ptr": None, "positions_ptr": None}
    dims = {"HEAD_DIM": 128, "SEGMENT": 512, "BLOCK_D": p.block_d}
    build(cuda_kernels.attend_kernel, pointers,
          form | dims | {"SPAN": span, "PEEL": p.peel, "PDL": span > 0, "SOFTCAP": False, "GROUP": 4, "index_ptr": None,
                         "BLOCK_M": p.block_m, "BLOCK_N": p.block_n, **({} if span else {"part_ptr": None})},
          p.warps, p.stages)
build(cuda_kernels.merge_kernel, pointers, form | dims | {"UNROLL": 8, "PDL": True}, 1)
how = plan(151936, 2)
build(cuda_softmax_parts.turns_kernel,
      {"x_ptr": half, "out_ptr": half, "tops_ptr": "*fp32", "sums_ptr": "*fp32", "made_ptr": "*i32"},
      how.tree() | how.merging() | {"LOG": False, "EACH": 2, "ACC": tl.float32, "stride_col": 1}, how.few[1])
"""


def test_kernels_compile_for_hopper(tmp_path):
    """Products, attention in one pass and split, its merge, and the softmax whose programs wait for each other."""
    pytest.importorskip("triton.backends.nvidia")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=env, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count("built") == 6
    assert "True" not in run.stdout, run.stdout  # nothing lies in local memory
