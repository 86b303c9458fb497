"""Pieces of the decode kernels: arithmetic on TILES tiles at once, one step of the class's order each.

Shapes are [rows, ...] with 16 rows, everything is float32; TILES is 2 or 4, and of 2 tiles the last two names of four
stand for the first two again.
"""

# Triton reads a kernel's annotations itself: only gl.constexpr may stand there.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin

__all__ = [
    "fold_groups",
    "join_tiles",
    "launch_dependents",
    "merge_segment",
    "probabilities",
    "rescaling",
    "side_by_side",
    "split_tiles",
    "spread_scales",
    "tree_sums",
    "wait_for_kernel_before",
]


@builtin
def launch_dependents(_semantic=None):
    """The kernel that follows may start."""
    instruction = "griddepcontrol.launch_dependents; // $0"
    gl.inline_asm_elementwise(instruction, "=r", [], dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic)


@builtin
def wait_for_kernel_before(_semantic=None):
    """Everything the kernel before has written is visible after this."""
    instruction = "griddepcontrol.wait; // $0"
    gl.inline_asm_elementwise(instruction, "=r", [], dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic)


@gluon.jit
def join_tiles(x0, x1, x2, x3, TILES: gl.constexpr):
    """TILES tensors of one shape -> one with axes [..., 2] (of 2) or [..., 2, 2] (of 4)."""
    return gl.join(gl.join(x0, x1), gl.join(x2, x3)) if TILES == 4 else gl.join(x0, x1)


@gluon.jit
def side_by_side(x0, x1, x2, x3, TILES: gl.constexpr):
    """TILES tensors [M, N] -> [M, TILES * N]."""
    x = join_tiles(x0, x1, x2, x3, TILES)
    x = gl.permute(x, [0, 3, 2, 1]) if TILES == 4 else gl.permute(x, [0, 2, 1])
    return gl.reshape(x, [x0.shape[0], TILES * x0.shape[1]])


@gluon.jit
def split_tiles(x, TILES: gl.constexpr):
    """The inverse of `join_tiles`; of 2, the last two are the first two again."""
    if TILES == 4:
        x01, x23 = gl.split(x)
        x0, x1 = gl.split(x01)
        x2, x3 = gl.split(x23)
    else:
        x0, x1 = gl.split(x)
        x2 = x0
        x3 = x1
    return x0, x1, x2, x3


@gluon.jit
def fold_groups(x):
    """[M, G, 8, ...] -> [M, 8, ...], a tree of halves over G; as `fold`, but for the axes behind."""
    n: gl.constexpr = x.shape[1]
    if n > 1:
        rest: gl.constexpr = x.shape[2:]
        return fold_groups(gl.sum(gl.reshape(x, [x.shape[0], 2, n // 2] + rest), axis=1))  # noqa: RUF005 - the compiler knows no unpacking
    else:  # noqa: RET505 - as above
        return gl.reshape(x, [x.shape[0]] + x.shape[2:])  # noqa: RUF005 - the compiler knows no unpacking


@gluon.jit
def tree_sums(f0, f1, f2, f3, WARPS: gl.constexpr, TILES: gl.constexpr, TREE: gl.constexpr):
    """Of TILES tiles whose columns are folded to 8 * WARPS: the eight sums a row of each, [ROWS, 8]."""
    joined = join_tiles(f0, f1, f2, f3, TILES)
    tree = gl.convert_layout(gl.reshape(joined, [f0.shape[0], WARPS, 8] + joined.shape[2:]), TREE)  # noqa: RUF005 - the compiler knows no unpacking
    return split_tiles(gl.convert_layout(fold_groups(tree), gl.SliceLayout(1, TREE)), TILES)


@gluon.jit
def spread_scales(a0, a1, a2, a3, TILES: gl.constexpr, TREE: gl.constexpr):
    """A factor a row of TILES tiles -> each as [ROWS, 8], laid out as the results of `tree_sums`."""
    joined = gl.convert_layout(join_tiles(a0, a1, a2, a3, TILES), gl.SliceLayout(1, gl.SliceLayout(1, TREE)))
    zero = gl.full([a0.shape[0], 8] + joined.shape[1:], 0.0, gl.float32, gl.SliceLayout(1, TREE))  # noqa: RUF005 - the compiler knows no unpacking
    return split_tiles(zero + gl.expand_dims(joined, 1), TILES)


@gluon.jit
def probabilities(s, m, qk_scale):
    """exp2(fma(score, scale, -maximum * scale)) of a tile, the maximum being that up to this tile."""
    m_safe = gl.where(m == float("-inf"), 0.0, m)  # -inf - -inf is NaN
    shift = -(m_safe * qk_scale)
    return gl.exp2(gl.fma(s, gl.full_like(s, 0.0) + qk_scale, gl.full_like(s, 0.0) + gl.expand_dims(shift, 1)))


@gluon.jit
def rescaling(m_before, m, qk_scale):
    """What the sums before a tile are multiplied by."""
    m_safe = gl.where(m == float("-inf"), 0.0, m)
    return gl.exp2((m_before - m_safe) * qk_scale)


@gluon.jit
def merge_segment(m_all, l_all, acc_all, m, l, acc, qk_scale, ROW: gl.constexpr):  # noqa: E741 - the literature's name
    """`cuda_parts.merge`: (m, l, acc) of a segment into the segments' before it."""
    m_new = gl.maximum(m_all, m)
    m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    before = gl.exp2((m_all - m_safe) * qk_scale)
    now = gl.exp2((m - m_safe) * qk_scale)
    empty = (m == float("-inf")) & (l == 0.0)
    l_all = gl.where(empty, l_all, gl.fma(l_all, before, l * now))
    zero = gl.full_like(acc, 0.0)
    merged = gl.fma(acc_all, zero + gl.expand_dims(before, 1), acc * gl.expand_dims(now, 1))
    return m_new, l_all, gl.where(gl.expand_dims(empty, 1), acc_all, merged)
