"""How attention kernels are launched: nothing here but the keys of a tile enters the bits, the rest is speed."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton

from nondet.kernels.triton_common import capability, multiprocessors

__all__ = ["FEW_ROWS", "SEGMENT", "Form", "Plan", "Way", "has_pdl", "one_plan", "plan_for", "span_for", "tile_keys"]

SEGMENT = 512  # keys; part of the class

FEW_ROWS = 16  # of a block of `hopper_decode`, the smallest there is

_START_TILES, _MERGE_TILES = 1, 1  # what starting and merging cost, in the time of a tile of 128 keys


class Plan(NamedTuple):
    """How to launch: block_n is part of the class (fixed by dtype and head dim), the rest is speed.

    Attributes:
        peel: Tiles that every row sees whole run in a loop of their own, without masks.
    """

    block_m: int
    block_n: int
    block_d: int
    warps: int
    stages: int
    peel: bool


class Way(NamedTuple):
    """How a call is computed, out of all ways that have the class's bits where that is proven.

    Attributes:
        span: Segments of one program: 0 for all of them, merged there; else that many, and a second launch merges.
        pdl: The second launch starts before the first has ended.
        tiles: That `hopper_decode` takes at a time, the plan's stages being the slots of its ring; 0: `cuda_kernels`.
        lanes: The second launch is that of `hopper_decode`, whose lanes compute the factors of all segments.
        early: The first launch starts before what runs before it has ended, and waits there; `hopper_decode` alone.
    """

    plan: Plan
    span: int
    pdl: bool
    tiles: int = 0
    lanes: bool = False
    early: bool = False

    @property
    def name(self) -> str:
        """All of it, for certificates: "triton 16x128w4s3 span=2 pdl", "gluon 16x128w4s3 tiles=2 span=0 early"."""
        plan = self.plan
        name = f"{plan.block_m}x{plan.block_n}w{plan.warps}s{plan.stages}"
        name = f"gluon {name} tiles={self.tiles}" if self.tiles else f"triton {name}"
        name += f" span={self.span}"
        flags = {"peel": plan.peel, "pdl": self.pdl, "lanes": self.lanes, "early": self.early}
        return " ".join([name, *(flag for flag, is_set in flags.items() if is_set)])


class Form(NamedTuple):
    """What of a call, besides its way, the kernels are compiled for. Lengths, batch and scale are not among it.

    Attributes:
        group: Query heads that share a KV head.
        packed: Requests are ranges of tokens.
        positions: The dtype of positions, where a cache has dropped keys.
        paged: The dtype of a paged cache's index.
        steps: For q, k, v and the result: which of the steps to the next request (packed: token), head and token are
            multiples of 16 elements.
        aligned: Which of q, k and v start at a multiple of 16 bytes.
    """

    dtype: torch.dtype
    head_dim: int
    group: int
    causal: bool
    window: bool
    softcap: bool
    packed: bool
    positions: torch.dtype | None
    paged: torch.dtype | None
    steps: tuple[tuple[bool, ...], ...]
    aligned: tuple[bool, ...]

    def words(self) -> tuple[str, ...]:
        """For the key of a certificate."""

        def name(dtype: torch.dtype | None) -> str:
            return str(dtype).removeprefix("torch.")

        flags = ("causal", "window", "softcap", "packed")
        return (
            f"{name(self.dtype)} D={self.head_dim} group={self.group}",
            *(flag for flag in flags if getattr(self, flag)),
            *(f"positions={name(x)}" for x in (self.positions,) if x is not None),
            *(f"paged={name(x)}" for x in (self.paged,) if x is not None),
            "16|" + ",".join("".join("y" if step else "n" for step in steps) for steps in self.steps),
            "@" + ",".join("16" if x else "1" for x in self.aligned),
        )


def one_plan(head_dim: int, dtype: torch.dtype) -> Way:
    """The way that can serve every call, and whose bits are the class: the smallest block, one program a query's keys.

    What is not proven gives way to it, so that no quantity of the batch can choose bits.
    """
    return Way(plan_for(1, head_dim, dtype), 0, False)


def tile_keys(head_dim: int, dtype: torch.dtype) -> int:
    """Keys of a tile, part of the class: the maximum is looked at, and the sums are rescaled, once a tile."""
    if dtype == torch.float32:
        return 32
    return 128 if head_dim <= 128 else 64


@functools.cache
def plan_for(rows: int, head_dim: int, dtype: torch.dtype) -> Plan:
    """For `rows` packed query rows of a KV head, 128 for any number above it: the smallest block that holds them."""
    block_d = max(16, triton.next_power_of_2(head_dim))
    block_n = tile_keys(head_dim, dtype)
    if dtype == torch.float32:
        return Plan(16 if rows <= 16 or block_d > 128 else 32, block_n, block_d, 4, 1, False)
    if rows <= 16:
        return Plan(16, block_n, block_d, 4, 3, False)
    if rows <= 32:
        return Plan(32, block_n, block_d, 4, 2, False)
    if block_d > 128:
        return Plan(64, block_n, block_d, 8, 2, True)
    if rows <= 64:
        return Plan(64, block_n, block_d, 8, 2, True)
    return Plan(128, block_n, block_d, 8, 2, True)


@functools.cache
def span_for(programs: int, segments: int, tiles: int, device: torch.device) -> int:
    """Segments of one program: 0 for all of them, merged there; else that many, and a second launch merges.

    Equal bits either way, so this may depend on anything. A multiprocessor runs about one program at full speed; time
    is counted in tiles of keys: what a program walks, a start for each wave of programs, and the second launch.

    Args:
        tiles: Of a segment.
    """
    sms = multiprocessors(device)
    best, best_cost = 0, float(-(-programs // sms) * (segments * tiles + _START_TILES))
    for splits in range(2, segments + 1):
        span = -(-segments // splits)
        cost = -(-programs * -(-segments // span) // sms) * (span * tiles + _START_TILES) + _MERGE_TILES + segments / 16
        if cost < best_cost:
            best, best_cost = span, cost
        if programs * splits > 4 * sms:
            break
    return best


_ALONE, _PAIR = Plan(FEW_ROWS, 128, 128, 4, 6, False), Plan(FEW_ROWS, 128, 128, 4, 3, False)


@functools.cache
def few_rows(programs: int, segments: int, head_dim: int, device: torch.device) -> Way:
    """For blocks of FEW_ROWS rows on Hopper, by the kernels of `hopper_decode`.

    Where multiprocessors have a program each, it takes a segment at a time and all of the memory; where there are more
    programs, two share a multiprocessor, and one loads while the other computes.
    """
    span = span_for(programs, segments, SEGMENT // 128, device)
    alone = programs * (-(-segments // span) if span else 1) <= multiprocessors(device)
    plan, tiles = (_ALONE, 4) if alone else (_PAIR, 2)
    return Way(plan._replace(block_d=head_dim), span, span > 0, tiles=tiles, lanes=span > 0, early=True)


@functools.cache
def has_pdl(device: torch.device) -> bool:
    """Can a kernel start before the one it waits for has ended (Hopper's programmatic dependent launch)?"""
    return device.type == "cuda" and capability(device)[0] >= 9
