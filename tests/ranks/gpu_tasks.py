"""What the tests on two GPUs ask ranks to do."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.ranks.tasks import _world


def _device() -> torch.device:
    return torch.device("cuda", dist.get_rank())


def _parts(count: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """What each rank contributes, on this rank's GPU."""
    from nondet.core.inputs import generator, make

    device = _device()
    return [make("wide", (count,), dtype, device, generator(seed + r, device)) for r in range(dist.get_world_size())]


def members_on_gpus() -> dict[str, list[str]]:
    """Members of both collectives that apply, by name; each with the bits of the order in plain torch."""
    from nondet.core.compare import identical
    from nondet.kernels.all_reduce import chain as members
    from nondet.kernels.all_reduce.orders import chain

    rank, world = dist.get_rank(), dist.get_world_size()
    agreed: dict[str, list[str]] = {"all_reduce": [], "reduce_scatter": []}
    for dtype in (torch.bfloat16, torch.float32):
        for count in (1, 7, 12289, 2**20):
            parts = _parts(count * world, dtype, 11)
            want = chain(parts)
            for name, member in members.MEMBERS.items():
                try:
                    x = parts[rank].clone()
                    member(x, _world())
                except NotImplementedError:
                    continue
                if not identical(x, want):
                    raise AssertionError(f"{name} has other bits for {count * world} of {dtype}")
                agreed["all_reduce"].append(name)
            for name, sharer in members.SCATTER_MEMBERS.items():
                out = torch.empty(count, dtype=dtype, device=_device())
                try:
                    sharer(out, parts[rank], _world())
                except NotImplementedError:
                    continue
                if not identical(out, want.chunk(world)[rank]):
                    raise AssertionError(f"{name} has other bits for shares of {count} of {dtype}")
                agreed["reduce_scatter"].append(name)
    return {what: sorted(set(names)) for what, names in agreed.items()}


def captured_under_a_block() -> dict[str, object]:
    """torch.distributed's own calls under batch_invariant(), eager and from a CUDA graph, new numbers each time."""
    from nondet.core.compare import identical
    from nondet.kernels.all_reduce.orders import chain
    from nondet.kernels.dispatch.block import batch_invariant

    rank, world = dist.get_rank(), dist.get_world_size()
    single = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
    x = torch.zeros(64 * 4096, dtype=torch.bfloat16, device=_device())
    share = torch.zeros(x.numel() // world, dtype=x.dtype, device=x.device)
    turns = [_parts(x.numel(), x.dtype, 100 * turn) for turn in range(4)]  # drawing is no part of the coverage
    unlike = []
    with batch_invariant() as block:

        def both() -> None:
            single(share, x)
            dist.all_reduce(x)

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            both()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            both()
        for turn, call in enumerate((both, graph.replay, both, graph.replay)):
            parts = turns[turn]
            x.copy_(parts[rank])
            call()
            want = chain(parts)
            if not identical(x, want) or not identical(share, want.chunk(world)[rank]):
                unlike.append(turn)
    return {"unlike the order": unlike, "coverage": block.coverage().lines()}


def products_on_gpus() -> list[str]:
    """Row-parallel products on this rank's part, eager and captured, against all of it on one GPU: what differs."""
    from nondet.core.compare import identical
    from nondet.core.inputs import generator, make
    from nondet.kernels.all_reduce.tree import linear, row_parallel

    rank, world, device = dist.get_rank(), dist.get_world_size(), _device()
    weight = make("bell", (512, 4096), torch.bfloat16, device, generator(3, device))
    bias = make("bell", (512,), torch.bfloat16, device, generator(5, device))
    mine = weight.chunk(world, 1)[rank].contiguous()
    unlike = []
    for m in (1, 17, 300, 1500):
        x = make("wide", (m, 4096), torch.bfloat16, device, generator(4, device))
        part = x.chunk(world, 1)[rank].contiguous()
        for added in (None, bias):
            want = linear(x, weight, added)
            got = row_parallel(part, mine, added, _world())
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                again = row_parallel(part, mine, added, _world())
            graph.replay()
            torch.cuda.synchronize()
            if not identical(got, want) or not identical(again, want):
                unlike.append(f"M={m}, bias={added is not None}")
    return unlike
