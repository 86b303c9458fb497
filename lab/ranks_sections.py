"""The sections of lab/ranks_gpu.py: each is run on ranks of its own and says its facts, a line each."""

# Closures over loop variables are called within their turn of the loop; what a section does, its docstring says.
# ruff: noqa: B023

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ranks_measuring import (
    SHAPES,
    SWEEP,
    WIDTH,
    alone_us,
    digest,
    graph_us,
    kernel_names,
    labels,
    members,
    message,
    say,
)

__all__ = ["SECTIONS"]


def classes(_: Any) -> None:
    """Class maps over M of every member and of NCCL, the place, the run, with kernel names; and who has whose bits."""
    table = members()
    dist.all_reduce(torch.zeros(4, device="cuda"))
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for name, call in table.items():
            facts: dict[str, Any] = {
                "section": "classes",
                "member": name,
                "dtype": str(dtype),
                "world": dist.get_world_size(),
            }
            try:
                for where, place in (("first", 0), ("last", -1)):
                    bits = []
                    for m in SWEEP:
                        x = message(m, dtype, place)
                        call(x)
                        bits.append(digest(x[place % m]))
                    facts[where] = labels(bits)
                    facts[f"{where}_distinct"] = len(set(bits))
                    facts[f"{where}_digest"] = bits[0]
                unlike = 0
                for m in (1, 3, 16, 257, 2048):
                    x = message(m, dtype, 0)
                    want = x.clone()
                    table["ordered_gather"](want)
                    call(x)
                    unlike += int((x.view(torch.uint8) != want.view(torch.uint8)).sum())
                facts["bytes_unlike_ordered_gather"] = unlike
                for m in (8, 1024):
                    source = message(m, dtype, 0, seed=5)
                    seen = set()
                    for _ in range(30):
                        x = source.clone()
                        call(x)
                        seen.add(digest(x[0]))
                    facts[f"runs_distinct_m{m}"] = len(seen)
                if dtype == torch.bfloat16:
                    x = message(1, dtype, 0)
                    sweep = SWEEP if name == "nccl" else (1, 64, 2048)
                    facts["kernels"] = {m: kernel_names(lambda: call(message(m, dtype, 0)))[-6:] for m in sweep}
            except Exception as error:  # noqa: BLE001
                facts["error"] = f"{type(error).__name__}: {str(error)[:300]}"
                torch.cuda.synchronize()
            say(sweep=SWEEP, **facts)


def times(_: Any) -> None:
    """Microseconds by message size, NCCL in the same run."""
    table = members()
    for m in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192):
        x = message(m, torch.bfloat16, 0)
        us: dict[str, Any] = {}
        for name, call in table.items():
            try:
                x.zero_()
                us[name] = round(graph_us(lambda: call(x), calls=20 if m < 1024 else 8), 2)
            except Exception as error:  # noqa: BLE001
                us[name] = str(error)[:200]
        say(section="times", world=dist.get_world_size(), m=m, bytes=m * WIDTH * 2, us=us)


def row_parallel(_: Any) -> None:
    """Row-parallel products: digests (compared over worlds by the reader) and what each class costs."""
    from nondet.core.inputs import generator, make
    from nondet.kernels.all_reduce import tree as rp
    from nondet.kernels.all_reduce.symmetric import reduce_peers
    from nondet.kernels.matmul import cuda as chain

    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if world > 1 else 0
    group = dist.group.WORLD if world > 1 else None
    table = members() if world > 1 else {}
    for name, (k, n) in SHAPES.items():
        w = make("bell", (n, k), torch.bfloat16, "cuda", generator(3, "cuda")) * 0.02
        mine = w[:, rank * k // world : (rank + 1) * k // world].contiguous()
        for m in map(int, os.environ.get("RANKS_ROWS", "1,8,64,256,1024,4096").split(",")):
            x = make("bell", (4096, k), torch.bfloat16, "cuda", generator(4, "cuda"))[:m]
            part = x[:, rank * k // world : (rank + 1) * k // world].contiguous()
            facts: dict[str, Any] = {"section": "row_parallel", "world": world, "layer": name, "m": m}
            try:
                got = rp.row_parallel(part, mine, None, group)
                facts["row0"], facts["whole"] = digest(got[0]), digest(got)
                for shards in (2, 4, 8) if world == 1 else ():  # what each of that many ranks would add up, on one GPU
                    sums = [
                        rp.local_sum(a.contiguous(), b.contiguous(), 8 // shards).view(-1)
                        for a, b in zip(x.chunk(shards, 1), w.chunk(shards, 1), strict=True)
                    ]
                    emulated = torch.empty_like(got)
                    reduce_peers(sums, emulated.view(-1), "tree")
                    facts[f"unlike_{shards}_shards"] = int((emulated != got).sum())
                full = chain.linear(x, w)
                exact = x[:8].double() @ w.double().T
                facts["error_tree"] = float((got[:8].double() - exact).norm() / exact.norm())
                facts["error_chain"] = float((full[:8].double() - exact).norm() / exact.norm())
                stock = torch.nn.functional.linear(part, mine)
                if world > 1:
                    dist.all_reduce(stock)
                facts["error_stock"] = float((stock[:8].double() - exact).norm() / exact.norm())
                del exact, stock, full

                def one(reduce: Callable[[torch.Tensor], None] | None, linear: Any) -> Callable[[], object]:
                    def call() -> None:
                        y = linear(part, mine)
                        if reduce is not None:
                            reduce(y)

                    return call

                us: dict[str, Any] = {}
                us["stock+nccl"] = graph_us(one(table.get("nccl"), torch.nn.functional.linear))
                us["chain"] = graph_us(one(None, chain.linear))
                for member in ("one_shot", "two_shot") if world > 1 else ():
                    us[f"chain+{member}"] = graph_us(one(table[member], chain.linear))
                us["chunks"] = graph_us(lambda: rp.local_sum(part, mine, 8 // world))
                for limit in (0, 2**40) if world > 2 else (0,):  # of two ranks and of one there is one way
                    rp._ONE_SHOT_BYTES = limit
                    us[f"tree {'one' if limit else 'two'}-shot" if world > 2 else "tree"] = graph_us(
                        lambda: rp.row_parallel(part, mine, None, group)
                    )
                facts["us"] = {k: round(v, 2) for k, v in us.items()}
            except Exception as error:  # noqa: BLE001
                facts["error"] = f"{type(error).__name__}: {str(error)[:300]}"
            say(**facts)


def tiles(_: Any) -> None:
    """Microseconds of a rank's chunk products by tile, each rank a share of the work, beside the stock product."""
    from nondet.kernels.all_reduce.tree_cuda import ChunkTile, chunk_parts
    from nondet.kernels.all_reduce.tree_cuda import _launch as launch_chunks

    rank, world = dist.get_rank(), dist.get_world_size()
    shapes = {
        8: [(16, 64, 128, 4, 4), (16, 32, 256, 4, 3)],
        64: [(64, 64, 128, 4, 3), (64, 64, 64, 4, 4), (64, 128, 64, 4, 4)],
        1024: [
            (128, 256, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 8, 3), (64, 128, 64, 4, 3), (64, 128, 64, 4, 4),
            (64, 256, 64, 8, 3), (128, 128, 64, 4, 3), (128, 128, 128, 8, 2), (64, 128, 128, 4, 2),
        ],
    }  # fmt: skip
    work = [(m, chunks, layer) for m in shapes for chunks in {4, 8 // world} for layer in SHAPES.values()]
    lines = []
    for m, chunks, (k, n) in work[rank::world]:
        part = k * chunks // 8
        x, w = torch.randn(m, part, device="cuda").bfloat16(), torch.randn(n, part, device="cuda").bfloat16()
        us: dict[str, Any] = {
            "stock": alone_us(lambda x=x, w=w: torch.nn.functional.linear(x, w)),
            "chosen": alone_us(lambda x=x, w=w, chunks=chunks: chunk_parts(x, w, chunks)),
        }
        for shape in shapes[m]:
            for splits in (1, 2, 4):
                if splits > chunks:
                    continue
                tile = ChunkTile(*shape, splits, m > 64)
                name = f"{'x'.join(map(str, shape[:3]))}/{shape[3]}.{shape[4]}/{splits}"
                parts = torch.empty(splits, m, n, dtype=torch.float32, device="cuda")
                try:
                    us[name] = alone_us(
                        lambda x=x, w=w, chunks=chunks, parts=parts, tile=tile: launch_chunks(x, w, chunks, parts, tile)
                    )
                except Exception as error:  # noqa: BLE001
                    us[name] = str(error)[:80]
        lines.append({"section": "tiles", "m": m, "k": k, "n": n, "chunks": chunks, "us": us})
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, lines)
    for several in gathered:
        for line in several:
            say(**line)


def plans(_: Any) -> None:
    """Microseconds of `push` by its plan: of bf16 sums in the order of ranks, and of float32 ones that are narrowed."""
    from nondet.core.compare import identical
    from nondet.kernels.all_reduce import chain, symmetric, tree_cuda

    group, world, device = dist.group.WORLD, dist.get_world_size(), torch.device("cuda", torch.cuda.current_device())
    whole = [(False, kib, warps, 512) for kib, warps in ((2, 4), (4, 4), (8, 8), (16, 8))]
    parts = [(True, kib, warps, 512) for kib, warps in ((1, 4), (2, 4), (4, 4), (8, 4), (8, 8), (16, 8))]
    parts += [(True, 8, 8, 264), (True, 4, 8, 512), (True, 16, 16, 264)]
    for in_parts, kib, warps, programs in whole + parts:

        def plan(count: int, itemsize: int, world: int, _: bool, form: Any = (in_parts, kib, warps, programs)) -> Any:
            block = form[1] * 1024 // itemsize
            step = block * (world if form[0] else 1)
            return symmetric.Plan(block, -(-count // form[3] // step) * step, form[2], form[0])

        symmetric.plan_push = plan
        facts: dict[str, Any] = {"in_parts": in_parts, "kib": kib, "warps": warps, "programs": programs}
        us: dict[str, Any] = {}
        narrow: dict[str, Any] = {}
        try:
            box = symmetric.mailbox(group, device, 2**25, 2)
            for m in (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192):
                x = message(m, torch.bfloat16, 0).view(-1)
                if m <= 1024:
                    want, got = x.clone(), x.clone()
                    chain.ordered_gather(want, group)
                    symmetric.push(got, got, "chain", box)
                    if not identical(got, want):
                        facts.setdefault("unlike", []).append(m)
                x.zero_()
                us[str(m)] = round(graph_us(lambda: symmetric.push(x, x, "chain", box), calls=20 if m < 1024 else 8), 2)
                if m in (1, 16, 64, 256, 1024):
                    splits = max(1, 8 // world)
                    wide = torch.randn(splits, m * WIDTH, device=device)
                    if m == 64:
                        tree_cuda.gathered_tree(tree_cuda.tree(wide.unbind(0)), want := torch.empty_like(x), group)
                        symmetric.push(wide, x, "tree", box)
                        if not identical(x, want):
                            facts.setdefault("unlike", []).append("narrowed")
                    narrow[str(m)] = round(graph_us(lambda: symmetric.push(wide, x, "tree", box), calls=8), 2)
        except Exception as error:  # noqa: BLE001
            facts["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        say(section="plans", world=world, us=us, narrowed_us=narrow, **facts)


def algorithms(environment: dict[str, str]) -> None:
    """NCCL held to one algorithm and protocol."""
    for dtype in (torch.bfloat16, torch.float32):
        bits: dict[str, list[str]] = {"first": [], "last": []}
        for where, place in (("first", 0), ("last", -1)):
            for m in SWEEP:
                x = message(m, dtype, place)
                dist.all_reduce(x)
                bits[where].append(digest(x[place % m]))
        x = message(64, dtype, 0)
        say(
            section="algorithms",
            world=dist.get_world_size(),
            environment=environment,
            dtype=str(dtype),
            sweep=SWEEP,
            **{k: labels(v) for k, v in bits.items()},
            digest=bits["first"][0],
            kernels=kernel_names(lambda: dist.all_reduce(x)),
        )


def overlapping(_: Any) -> None:
    """More ranks than GPUs, for bits alone: the symmetric-memory kernels against the orders in plain torch."""
    from nondet.kernels.all_reduce import orders, symmetric

    group, world = dist.group.WORLD, dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device())
    space = symmetric.Workspace(group, device, 64 * 2**20)
    box = symmetric.Mailbox(group, device, 64 * 2**20)
    names = "one_shot two_shot peers_one_shot peers_two_shot tree_one_shot tree_two_shot push tree_push"
    for dtype in (torch.bfloat16, torch.float32):
        for name in names.split():
            facts: dict[str, Any] = {"section": "overlapping", "member": name, "dtype": str(dtype), "world": world}
            try:
                unlike, bits = {}, []
                for m in (1, 2, 5, 8, 64, 96, 257, 1024):
                    x = message(m, dtype, 0)
                    here = x.cpu()
                    gathered = [torch.empty_like(here) for _ in range(world)]
                    dist.all_gather(gathered, here)
                    want = orders.tree(gathered) if name.startswith("tree") else orders.chain(gathered)
                    if name in ("one_shot", "two_shot"):
                        getattr(symmetric, name)(x.view(-1), group, space)
                    elif name == "push":
                        symmetric.push(x.view(-1), x.view(-1), "chain", box)
                    elif name == "tree_push":
                        want = orders.tree([g.float() for g in gathered]).to(dtype)
                        symmetric.push(x.float().view(-1), x.view(-1), "tree", box)
                    else:
                        space.flat(x.numel(), dtype).copy_(x.view(-1))
                        if name.startswith("tree") and dtype == torch.bfloat16:
                            want = orders.tree([g.float() for g in gathered]).bfloat16()
                        reduce = symmetric.peers_one_shot if name.endswith("one_shot") else symmetric.peers_two_shot
                        reduce(x.numel(), dtype, x.view(-1), "tree" if name.startswith("tree") else "chain", space)
                    torch.cuda.synchronize()
                    got = x.cpu()
                    unlike[m] = int((got.view(torch.uint8) != want.view(torch.uint8)).sum())
                    bits.append(digest(got[0]))
                facts |= {"bytes_unlike_the_order": unlike, "distinct_first_row": len(set(bits))}
            except Exception as error:  # noqa: BLE001
                facts["error"] = f"{type(error).__name__}: {str(error)[:300]}"
            say(**facts)


SECTIONS = {f.__name__: f for f in (classes, times, row_parallel, tiles, plans, algorithms, overlapping)}
