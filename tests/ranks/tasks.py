"""What the tests of `nondet.ranks` ask ranks to do."""

import contextlib
import itertools
import os
import random
import signal
import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from nondet.core.compare import identical
from nondet.core.inputs import generator, make
from nondet.kernels.all_reduce import chain as sums
from nondet.kernels.all_reduce import symmetric
from nondet.kernels.all_reduce.orders import chain, tree
from nondet.kernels.all_reduce.tree import linear, row_parallel
from nondet.kernels.dispatch.block import batch_invariant


def rank_and_sum() -> tuple[int, float]:
    """The rank, and the sum of 1, 2, ... over all ranks."""
    x = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(x)
    return dist.get_rank(), float(x)


def break_a_step() -> None:
    """Rank 1's model fails in its second step of the next session; the other ranks' go on."""
    from nondet.sampling import ranks as ranks_session

    model, steps = ranks_session._model, [0]
    forward = model.forward

    def broken(*args: object, **kwargs: object) -> object:
        steps[0] += 1
        if dist.get_rank() == 1 and steps[0] == 2:
            raise ValueError("broken in a test")
        return forward(*args, **kwargs)

    model.forward = broken


def end(how: str) -> None:
    """A rank is killed, hangs or fails, while the others wait for it; or none of them has what is asked."""
    if how == "has none":
        raise NotImplementedError("not here")
    if how == "fails" and dist.get_rank() == 0:
        raise ValueError("no such thing")
    if dist.get_rank() == 1 and how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 1 and how == "hangs":
        time.sleep(60)
    if how != "hangs":
        dist.all_reduce(torch.ones(4))


def members_agree(device: str, counts: tuple[int, ...]) -> dict[str, list[str]]:
    """Members of both collectives that apply, by name; each with the bits of the order in plain torch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    agreed: dict[str, set[str]] = {"all_reduce": set(), "reduce_scatter": set()}
    for dtype, count in itertools.product((torch.bfloat16, torch.float16, torch.float32), counts):
        parts = _parts(count * world, dtype, 11, place)
        want = chain(parts)
        for collective, members in (("all_reduce", sums.MEMBERS), ("reduce_scatter", sums.SCATTER_MEMBERS)):
            for name, member in members.items():
                given, right = [parts[rank].clone()], want
                if collective == "reduce_scatter":
                    right = want.chunk(world)[rank]
                    given.insert(0, torch.empty_like(right))
                with contextlib.suppress(NotImplementedError):
                    member(*given, _world())
                    if not identical(given[0], right):
                        raise AssertionError(f"{collective}: {name} has other bits for {count * world} of {dtype}")
                    agreed[collective].add(name)
    return {what: sorted(names) for what, names in agreed.items()}


def _parts(count: int, dtype: torch.dtype, seed: int, device: str | torch.device) -> list[torch.Tensor]:
    """What each rank contributes, the same on all of them."""
    return [make("wide", (count,), dtype, device, generator(seed + r, device)) for r in range(dist.get_world_size())]


def proofs() -> dict[str, tuple[bool, str]]:
    """What the prover says of a member that holds, and of one that adds the other way round on one rank alone."""

    def backwards(x: torch.Tensor, group: dist.ProcessGroup) -> None:
        sums.ordered_gather(x, group)
        if dist.get_rank() == 1:
            x.copy_(torch.nextafter(x, torch.full_like(x, float("inf"))))

    sums.MEMBERS["backwards"] = backwards
    place = torch.device("cpu")
    scattered = sums.prove_scatter("exchange", torch.bfloat16, place, _world())
    return {n: sums.prove(n, torch.float32, place, _world()) for n in ("exchange", "backwards")} | {"shares": scattered}


# of torch 2.13, and before
single = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


def sums_of_compilers(x: torch.Tensor, scattered: bool) -> dict[str, torch.Tensor]:
    """The sum of all ranks' x, or this rank's share of its rows, by DTensor and as torch.compile calls it."""
    import torch.distributed._functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    partial = DTensor.from_local(x, mesh, [Partial()], run_check=False)
    forms = {"dtensor": partial.redistribute(placements=[Shard(0) if scattered else Replicate()]).to_local()}
    if not scattered:
        return forms | {"functional": functional.wait_tensor(functional.all_reduce(x, "sum", _world()))}
    several = functional.reduce_scatter_tensor_coalesced([x, 2.0 * x], "sum", [0, 0], _world())
    forms |= {"coalesced": several[0] + 0.0, "doubled": several[1] / 2.0}
    return forms | {"functional": functional.wait_tensor(functional.reduce_scatter_tensor(x, "sum", 0, _world()))}


def sums_under_a_block(collective: str, compiled: bool) -> dict[str, object]:
    """Forms of a sum under batch_invariant(), those of compilers and DTensor too; and stock again after it."""
    rank, world, scattered = dist.get_rank(), dist.get_world_size(), collective == "reduce_scatter"
    x = drawn((world * 6, 101), torch.float32, rank)
    want = x.clone()
    sums.ordered_gather(want.view(-1), _world())
    mine, want = (y.chunk(world)[rank] if scattered else y for y in (x, want))

    def summed(given: torch.Tensor, out: Any = None, **how: Any) -> torch.Tensor:
        """The sum of `given`, or this rank's share of its rows."""
        out = (torch.empty_like(given.chunk(world)[0]) if scattered else given.clone()) if out is None else out
        work = single(out, given, **how) if scattered else dist.all_reduce(out, **how)
        if work is not None:
            work.wait()
        return out

    stock = summed(x)
    with batch_invariant() as block:
        forms = {"plain": summed(x), "async": summed(x, async_op=True)}
        if scattered:
            forms |= {"list": torch.empty(6, 101), "strided": torch.empty(101, 6).T}
            for name in ("list", "strided"):
                dist.reduce_scatter(forms[name], [part.contiguous() for part in x.clone().chunk(world)])
        else:
            forms["strided"] = summed(x, x.clone().T.contiguous().T)
            both = [x.clone(), 3.0 * x]
            dist.all_reduce_coalesced(both)
            forms["coalesced"] = both[0]
        forms |= sums_of_compilers(x, scattered) if compiled else {}
        largest = summed(x, op=dist.ReduceOp.MAX)
        counted = summed(torch.ones(world, dtype=torch.int64))
        summed(x, op=dist.ReduceOp.PRODUCT)
    after = summed(x)
    with batch_invariant(["matmul"]) as other:
        summed(x)
    return {
        "unlike the order": [name for name, y in forms.items() if not identical(y.contiguous(), want.contiguous())],
        "stock is unlike": not identical(stock, want),
        "afterwards": identical(after, stock),
        "exact ones": bool((counted == world).all()) and bool((largest >= mine).all()),
        "coverage": block.coverage().lines(),
        "another family": other.coverage().lines(),
    }


def row_parallel_operands() -> list[torch.Tensor]:
    """x, weight and bias."""
    return [drawn(shape, torch.float32, 90 + i) for i, shape in enumerate(((7, 512), (48, 512), (48,)))]


def row_parallel_parts(ranks: int) -> torch.Tensor:
    """A row-parallel product with a bias, its K cut over the first `ranks` ranks."""
    x, weight, bias = row_parallel_operands()
    group = dist.new_group(list(range(ranks)))
    if dist.get_rank() >= ranks:
        return torch.empty(0)
    part = slice(dist.get_rank() * 512 // ranks, (dist.get_rank() + 1) * 512 // ranks)
    return row_parallel(x[:, part], weight[:, part].contiguous(), bias, group)


class Wide(torch.nn.Module):
    """One layer that is cut along its columns, of a shape whose columns MKL shares out by their number."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(base_model_tp_plan={"up": "colwise", "down": "rowwise"})
        self.up = torch.nn.Linear(depth, 384, bias=False)
        self.up.weight = torch.nn.Parameter(drawn((384, depth), torch.float32, 60), requires_grad=False)
        self.down = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers of many sizes, on the CPU, by this seed."""
    return make("wide", shape, dtype, "cpu", generator(seed + 1, "cpu"))


def many_sums(times: int) -> float:
    """The last of many small sums under a block; each message is let go of as soon as its sum is there."""

    def summed(i: int) -> float:
        x = torch.full((4,), float(i))
        dist.all_reduce(x)
        return float(x[0])

    with batch_invariant(["all-reduce"]):
        return [summed(i) for i in range(times)][-1]


def other_ways_in() -> list[str]:
    """Coverage of collectives that go by another way than a sum under no_grad: inference mode, other reductions."""
    world = dist.get_world_size()
    with batch_invariant() as block:
        with torch.inference_mode():
            x = torch.ones(8)
            dist.all_reduce(x)
        dist.reduce(torch.ones(8), 0)
        parts = [torch.ones(4) for _ in range(world)]
        dist.all_gather(parts, torch.ones(4))
        dist.broadcast(torch.ones(4), 0)
    assert float(x[0]) == world
    return block.coverage().lines()


def agreements_of_another_group(path: str) -> list[str]:
    """Groups of two among the ranks, destroyed and made anew under the old names: the member that sums in each. The
    second group of a name has a rank that was in the first and one that was not, and its sums are of two parts."""
    rank, world, names, ran = dist.get_rank(), dist.get_world_size(), set(), []
    for number, pairs in enumerate((((0, 1), (2, 3)), ((1, 2), (3, 0)))):
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.FileStore(f"{path}-{number}", world), rank=rank, world_size=world)
        for pair in pairs:
            group = dist.new_group(list(pair))
            if rank in pair:
                names.add(group.group_name)
                x = torch.tensor([2.0**rank])
                ran.append(sums.all_reduce(x, group))
                if float(x) != sum(2.0**r for r in pair):
                    raise AssertionError(f"{float(x)} over {pair}")
    if names - {"1", "2"}:
        raise AssertionError(f"the names were not given again: {names}")
    return ran


def _odd_parts(count: int, dtype: torch.dtype, seed: int, world: int, device: str | torch.device) -> list[torch.Tensor]:
    """What each rank contributes, the same on all of them; some of it -0.0, infinite or no number."""
    parts = _parts(count, dtype, seed, device)[:world]
    for i, odd in enumerate((-0.0, float("inf"), float("nan"), 0.0)):
        parts[(seed + i) % world][i::7] = odd
    for part in parts:
        part[5::7] = -0.0
    return parts


def pushes(folder: str, world: int) -> list[str]:
    """Many sums by `push` over the first `world` ranks, in Triton's interpreter, by files that they share instead of
    GPUs' memory; sizes up and down, ranks out of step: what differs."""
    rank = dist.get_rank()
    if rank >= world:
        return []

    def plan(count: int, _: int, world: int, narrowed: bool) -> symmetric.Plan:
        in_parts = count > 30 and (narrowed or world > 2)
        step = 8 * (world if in_parts else 1)
        return symmetric.Plan(8, -(-count // (3 * step)) * step, 4, in_parts)

    small = {"CHANNELS": 3, "plan_push": plan}
    before = {name: getattr(symmetric, name) for name in small}
    vars(symmetric).update(small)
    try:
        size = symmetric.mail_bytes(200, 4, world)
        size = -(-size // (2 * (world - 1) * 3 * 256)) * 2 * (world - 1) * 3 * 256
        memory = [
            torch.from_file(f"{folder}/{world}-{r}", shared=True, size=size + 8 * 3 * world, dtype=torch.uint8)
            for r in range(world)
        ]
        box: Any = SimpleNamespace(world=world, rank=rank, bytes=size, uses=torch.zeros(3, dtype=torch.int64))
        box.slots, box.flags = [m[:size] for m in memory], [m[size:].view(torch.int64) for m in memory]
        drawn, late, unlike = random.Random(world), random.Random(rank), []  # noqa: S311
        for turn in range(40):
            count, order = drawn.choice((1, 7, 8, 9, 24, 25, 64, 130, 200)), drawn.choice(("chain", "tree"))
            order = "chain" if world == 3 else order  # a tree has no three
            dtype = torch.float32 if order == "tree" else drawn.choice((torch.float32, torch.float16))
            splits = drawn.choice((1, 2)) if order == "tree" else 1
            parts = [_odd_parts(splits * count, dtype, 10 * turn, world, "cpu")[r] for r in range(world)]
            want = {"chain": chain, "tree": tree}[order]([tree(part.view(splits, count).unbind(0)) for part in parts])
            want = want.to(drawn.choice((dtype, torch.float16)) if order == "tree" else dtype)
            out = parts[rank] if order == "chain" and drawn.random() < 0.7 else torch.empty_like(want)
            time.sleep(late.choice((0.0, 0.0, 0.01)))
            symmetric.push(parts[rank], out, order, box)
            if not identical(out, want):
                unlike.append(f"call {turn}: {count} of {dtype}, {order}, {splits} splits")
        return unlike
    finally:
        vars(symmetric).update(before)


def _device() -> torch.device:
    return torch.device("cuda", dist.get_rank())


def pushes_on_gpus() -> list[str]:
    """Many sums by `push`, sizes up and down, eager and by two graphs in turn, other members between: what differs."""
    rank, world, device = dist.get_rank(), dist.get_world_size(), _device()
    drawn, unlike, graphs = random.Random(1), [], []  # noqa: S311

    def check(name: str, count: int, dtype: torch.dtype, turn: int) -> None:
        parts = _odd_parts(count, dtype, 10 * turn, world, device)
        x = parts[rank].clone()
        sums.MEMBERS[name](x, _world())
        if not identical(x, chain(parts)):
            unlike.append(f"{name}, call {turn}: {count} of {dtype}")

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for turn in range(40):
            count = drawn.choice((1, 7, 4096, 16384, 262152, 2**20, 2**21 + 16, 3 * 2**22))
            other = "library" if world == 2 else "peers_two_shot"
            check(drawn.choice(("push", "push", "push", "peers_one_shot", other)), count, dtype, turn)
    for count in (64 * 4096, 1024 * 4096):
        check("push", count, torch.bfloat16, 0)
        x, graph = torch.zeros(count, dtype=torch.bfloat16, device=device), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):  # of integers, and the second and third of sums
                sums.MEMBERS["push"](x, _world())
        graphs.append((x, graph))
    check("push", 2**26, torch.bfloat16, 1)  # another mailbox; the graphs keep theirs
    for turn in range(60):
        x, graph = graphs[drawn.randrange(2)]
        seeds = [torch.Generator(device).manual_seed(100 * turn + r) for r in range(world)]
        parts = [torch.randint(-4, 5, x.shape, generator=seed, device=device) for seed in seeds]
        x.copy_(parts[rank])
        graph.replay()
        if not identical(x, (sum(parts) * world**2).to(x.dtype)):
            unlike.append(f"graph, call {turn}: {x.numel()}")
        check("push", 7 * 4096, torch.float16, turn)
    return unlike


def captured_under_a_block() -> dict[str, object]:
    """torch.distributed's own calls under batch_invariant(), eager and from a CUDA graph, new numbers each time."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.zeros(64 * 4096, dtype=torch.bfloat16, device=_device())
    share = torch.zeros(x.numel() // world, dtype=x.dtype, device=x.device)
    turns = [_parts(x.numel(), x.dtype, 100 * turn, x.device) for turn in range(4)]  # drawn outside of the coverage
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
        for turn, (call, parts) in enumerate(zip((both, graph.replay) * 2, turns, strict=True)):
            x.copy_(parts[rank])
            call()
            want = chain(parts)
            if not identical(x, want) or not identical(share, want.chunk(world)[rank]):
                unlike.append(turn)
    return {"unlike the order": unlike, "coverage": block.coverage().lines()}


def products_on_gpus() -> list[str]:
    """Row-parallel products on this rank's part, eager and captured, against all of it on one GPU: what differs."""
    rank, world, device = dist.get_rank(), dist.get_world_size(), _device()
    weight = make("bell", (512, 4096), torch.bfloat16, device, generator(3, device))
    bias = make("bell", (512,), torch.bfloat16, device, generator(5, device))
    mine = weight.chunk(world, 1)[rank].contiguous()
    unlike = []
    for m in (1, 17, 300, 1500, 4500):
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
