"""Ranks are started, asked and ended, and their sums have the bits of an order; what ends them is one line."""

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from lab.ranks_model import WAYS, traces, write_model
from nondet.cli import main
from nondet.core.certificates import Certificates
from nondet.core.compare import identical
from nondet.core.inputs import generator, make
from nondet.errors import UserError
from nondet.kernels.all_reduce import symmetric, tree_cuda
from nondet.kernels.all_reduce.chain import PROOF_SIZES
from nondet.kernels.all_reduce.orders import ByGroup, chain, tree
from nondet.kernels.all_reduce.tree import linear, row_parallel
from nondet.kernels.all_reduce.tree_cuda import ChunkTile, chunk_products
from nondet.kernels.dispatch.block import batch_invariant
from nondet.ranks.group import RankError, RankGroup, check_ranks, join_group, limit_or, parse_ranks, shared_gpus
from nondet.ranks.rank_free import rank_free, row_parallel_layers
from tests.build import DEVICE, needs_accelerate, tiers
from tests.kernels.tiers import at_length
from tests.ranks.tasks import Wide, drawn, row_parallel_operands

TASKS = "tests.ranks.tasks"


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat") as stat:  # a zombie is waited for by init, and computes nothing
        return stat.read().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells what became of a process")
def test_no_rank_outlives_a_killed_parent():
    code = (
        "from nondet.ranks.group import RankGroup\nimport time\n"
        "if __name__ == '__main__':\n    print(*RankGroup(1, 'cpu').pids, flush=True)\n    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until = time.monotonic() + 10
    while not _gone(pid) and time.monotonic() < until:
        time.sleep(0.1)
    assert _gone(pid)


def test_ranks_that_cannot_be_had_are_one_line(monkeypatch):
    with pytest.raises(UserError, match="--ranks 1 is not a group"):
        check_ranks([1], "cuda", 2)
    check_ranks([2, 4], "cpu", 0)
    assert (parse_ranks("2, 4"), parse_ranks(None)) == ((2, 4), None)
    for text in ("2,4,02", "two", "2,", "", "-2", "2;4"):
        with pytest.raises(UserError, match="--ranks names 2 twice" if "02" in text else "not a list of numbers"):
            parse_ranks(text)
    assert limit_or(7.0) == 7.0
    monkeypatch.setenv("NONDET_RANKS_LIMIT_S", "2.5")
    assert limit_or(7.0) == 2.5
    for text in ("soon", "-1", "0", "nan", "inf"):
        monkeypatch.setenv("NONDET_RANKS_LIMIT_S", text)
        with pytest.raises(UserError, match="not a number of seconds"):
            limit_or(7.0)


@pytest.mark.parametrize(("gpus", "place"), [(2, 1), (4, 3)])
def test_ranks_that_outnumber_gpus_pose_as_hosts_and_others_do_not(gpus, place, monkeypatch):
    """NCCL would refuse two ranks of one host on one GPU; where each has its own it hears nothing of this."""
    import torch.distributed as dist

    joined, placed = {}, []
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", placed.append)
    monkeypatch.setattr(dist, "TCPStore", lambda *_: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **given: joined.update(given))
    join_group(3, 4, "cuda", 0, 1.0)
    assert placed == [joined["device_id"]] == [torch.device("cuda", place)]
    posing = {name for name in os.environ if name in ("NCCL_HOSTID", "NCCL_NET", "NCCL_P2P_DISABLE")}
    assert (len(posing), os.environ.get("NCCL_HOSTID")) == ((0, None) if gpus == 4 else (3, "nondet-3"))
    assert bool(shared_gpus(4)) == (gpus < 4)


@pytest.mark.parametrize(
    "command",
    ["probe all-reduce", "bench all-reduce", "bench row-parallel", pytest.param("sample", marks=needs_accelerate)],
)
def test_ranks_that_cannot_be_had_are_refused_before_anything_starts(command, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for gpus, ranks, line in (
        (2, "3", "--ranks 3 needs 3 GPUs, and 2 GPUs are here"),
        (0, "2", "--ranks 2 needs 2 GPUs, and no GPU is here"),
        (1, "2", "--ranks 2 needs 2 GPUs, and 1 GPU is here"),
        (2, "two", "--ranks two is not a list of numbers"),
        (2, "65", "--ranks 65 is not a group of ranks"),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert main([*command.split(), "--device", "cuda", "--ranks", ranks]) == 2
        assert line in " ".join(capsys.readouterr().err.split())
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NONDET_RANKS_LIMIT_S", "soon")
    assert main([*command.split(), "--device", "cpu", "--ranks", "2"]) == 2
    assert "NONDET_RANKS_LIMIT_S=soon is not a number of seconds" in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def four() -> Iterator[RankGroup]:
    """Four ranks on the CPU, started while MASTER_PORT is somebody else's; the last test ends them. They are forks of
    one process that has loaded what they need: four that load it take four times as long."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["tests.ranks.tasks"])
    with socket.socket() as taken, pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda _: forks)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        patch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with contextlib.closing(RankGroup(4, "cpu", limit_s=120)) as group:
            yield group


def line_of(lines: Sequence[str], start: str) -> bool:
    return any(line.startswith(start) for line in lines)


@pytest.mark.slow
def test_members_have_the_bits_of_the_order_and_the_prover_sees_one_on_one_rank(four):
    agreed = {"all_reduce": ["exchange", "ordered_gather"], "reduce_scatter": ["exchange"]}
    assert four.call(f"{TASKS}:members_agree", "cpu", (1, 3, 251)) == [agreed] * 4
    for proofs in four.call(f"{TASKS}:proofs"):
        assert {name: holds for name, (holds, _) in proofs.items()} == {"exchange": 1, "shares": 1, "backwards": 0}
        assert "rank 1" in proofs["backwards"][1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="in Triton's interpreter: ranks of CPUs share a file")
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.nightly
def test_pushed_sums_have_the_bits_of_their_order(four, world, tmp_path):
    assert four.call(f"{TASKS}:pushes", str(tmp_path), world, limit_s=100) == [[]] * 4


@pytest.mark.slow
@pytest.mark.parametrize(  # forms of compilers take each rank two seconds to load
    ("collective", "compiled", "calls"),
    tiers(
        [("all_reduce", False, 4), ("reduce_scatter", False, 4)], [("all_reduce", True, 6), ("reduce_scatter", True, 7)]
    ),
)
def test_batch_invariant_reaches_every_form_of_a_sum(four, collective, compiled, calls):
    """In place, by list, asynchronous, functional, coalesced, DTensor's: all have the order's bits, unlike gloo's own.
    Maxima and integers run as they are, a product is left, and without the family a sum is at risk."""
    for answer in four.call(f"{TASKS}:sums_under_a_block", collective, compiled):
        assert answer["unlike the order"] == []
        assert answer["stock is unlike"], "the test would prove nothing"
        assert all((answer["afterwards"], answer["exact ones"]))
        assert f"replaced: {collective} ({calls} calls)" in answer["coverage"], answer["coverage"]
        assert line_of(answer["coverage"], f"left stock: {collective} float32: a reduction by PRODUCT")
        assert line_of(answer["another family"], f"at risk: {collective} float32")


@pytest.mark.slow
def test_other_ways_to_a_collective_are_counted(four):
    for lines in four.call(f"{TASKS}:other_ways_in"):
        assert "replaced: all_reduce (1 calls)" in lines
        assert line_of(lines, "at risk: reduce_ float32"), lines
        assert not [line for line in lines if "gather" in line or "broadcast" in line]


@pytest.mark.slow
def test_the_number_of_ranks_does_not_change_a_row_parallel_product(four):
    x, weight, bias = row_parallel_operands()
    whole = linear(x, weight, bias)
    for ranks in (2, 4):
        for part in four.call(f"{TASKS}:row_parallel_parts", ranks)[:ranks]:
            assert identical(part, whole)
    halves = [x[:, half] @ weight[:, half].T for half in (slice(0, 256), slice(256, 512))]
    stock = x @ weight.T + bias
    assert not identical(halves[0] + halves[1] + bias, stock), "the test would prove nothing"
    exact = x.double() @ weight.double().T + bias.double()
    assert (whole.double() - exact).norm() <= (stock - exact).norm() * 1.5


def test_columns_are_computed_in_parts_of_one_width():
    """MKL gives a column other bits by the number of its neighbours, at this shape among others, on some machines."""
    model, widths = Wide(64), []

    class Widths(TorchFunctionMode):
        """Keeps how many columns each product has."""

        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.nn.functional.linear:
                widths.append(len(args[1]))
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), batch_invariant(), Widths(), rank_free(model):
        model(drawn((3, 64), torch.float32, 61))
    assert widths == [48] * 8
    with rank_free(model), pytest.raises(UserError, match="forward only"):
        model.down(model.up(torch.ones(1, 64))[:, :8])
    with pytest.raises(UserError, match="Linear has no tensor-parallel plan"):
        row_parallel_layers(torch.nn.Linear(8, 8))


@pytest.mark.slow
def test_agreements_end_with_their_group(four, tmp_path):
    """torch gives names again: ranks that were in the old group vote with those that were not, and none waits."""
    ran = four.call("tests.ranks.tasks:agreements_of_another_group", str(tmp_path / "store"), limit_s=30)
    assert ran == [["library"] * 2] * 4


@pytest.mark.nightly
def test_many_small_sums_under_a_block_end(four):
    """A sum that is enqueued while the library's thread frees the last one's message does not wait for it for ever.
    With the interpreter's lock held while enqueueing, 4,000 sums never came to their end on two ranks."""
    assert four.call(f"{TASKS}:many_sums", 4000, limit_s=60) == [4.0 * 3999] * 4


def end_of(group: RankGroup, task: str, line: str, **how: float) -> None:
    """Ask for what ends the ranks: one line, in time, and no process of theirs is left."""
    pids, started = group.pids, time.monotonic()
    with pytest.raises(RankError, match=line):
        group.call(f"{TASKS}:end", task, **how)
    assert time.monotonic() - started < 30
    assert all(map(_gone, pids))


@pytest.mark.slow
def test_ranks_answer_and_a_killed_one_is_one_line(four):  # the last one with these ranks
    assert four.call(f"{TASKS}:rank_and_sum") == [(rank, 10.0) for rank in range(4)]
    with pytest.raises(NotImplementedError, match="not here"):
        four.call(f"{TASKS}:end", "has none")
    assert four.alive, "a question that does not apply ends nobody"
    end_of(four, "is killed", "rank 1 of 4 was killed by SIGKILL")


@pytest.mark.nightly
def test_a_rank_that_hangs_or_fails_is_one_line():
    for task, line, how in (
        ("hangs", "rank 1 of 2 gave no answer within 2 s", {"limit_s": 2}),
        ("fails", "rank 0 of 2: ValueError: no such thing", {}),
    ):
        with contextlib.closing(RankGroup(2, "cpu", limit_s=60)) as group:
            end_of(group, task, line, **how)


def two_gpus(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.gpu(pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")(test))


@pytest.fixture(scope="module")
def pair() -> Iterator[RankGroup]:
    with contextlib.closing(RankGroup(2, "cuda", limit_s=120)) as group:
        yield group


@two_gpus
def test_members_have_the_bits_of_the_order_on_gpus(pair):
    members = {"library", "ordered_gather", "one_shot", "two_shot", "peers_one_shot", "push"}
    for agreed in pair.call(f"{TASKS}:members_agree", "cuda", (1, 7, 12289, 2**20)):
        assert members <= set(agreed["all_reduce"])
        assert {"exchange", "library", "peers"} == set(agreed["reduce_scatter"])


@two_gpus
@pytest.mark.parametrize("world", [2, min(8, torch.cuda.device_count())])
def test_pushed_sums_on_gpus(world):
    with contextlib.closing(RankGroup(world, "cuda", limit_s=300)) as group:
        assert not any(group.call(f"{TASKS}:pushes_on_gpus"))


@two_gpus
def test_collectives_and_products_in_eager_and_in_graphs(pair):
    for answer in pair.call(f"{TASKS}:captured_under_a_block"):
        assert answer["unlike the order"] == []
        assert not [line for line in answer["coverage"] if not line.startswith(("replaced", "nothing"))]
    assert pair.call(f"{TASKS}:products_on_gpus") == [[], []]


@two_gpus
def test_a_model_over_two_gpus(pair, tmp_path):
    folder = write_model(str(tmp_path / "model"), layers=2, hidden=1024)
    question = (folder, "cuda", WAYS[1:], (1, 3, 17), 4)
    whole, _ = traces(*question)
    for found, coverage in pair.call("lab.ranks_model:traces", *question, limit_s=120):
        bits = {way: {t.logits for t in found if t.way == way} for way in WAYS}
        assert len(bits["invariant"]) == len(bits["rank-free"]) == 1
        assert bits["rank-free"] == {t.logits for t in whole if t.way == "rank-free"}
        assert line_of(coverage["invariant"], "replaced: all_reduce")


def _parts(count, size, dtype):
    return [make("wide", (size,), dtype, DEVICE, generator(i + 1, DEVICE)) for i in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, *at_length(torch.float32)])
@pytest.mark.parametrize("ranks", [3, 8, *at_length(1, 2, 4)])
def test_peers_are_added_in_their_order(ranks, dtype):
    """Whole messages and shares of them, chain and tree, have the bits of the order; chain and tree differ."""
    parts = _parts(ranks, 3001, dtype)
    out = torch.zeros(3001, dtype=dtype, device=DEVICE)
    symmetric.reduce_peers(parts, out, "chain", 100, 2900)
    assert identical(out[100:2900], chain(parts)[100:2900])
    assert not out[:100].any()
    assert not out[2900:].any()
    if ranks in (1, 2, 4, 8):
        wide = [p.float() for p in parts]
        rounded = torch.empty(3001, dtype=dtype, device=DEVICE)
        symmetric.reduce_peers(wide, rounded, "tree")
        assert identical(rounded, tree(wide).to(dtype))
        if ranks > 2:
            assert not identical(tree(wide), chain(wide))
    share = -(-3001 // ranks)
    symmetric.gather_slices(parts, out, share)
    assert identical(out, torch.cat([p[i * share : (i + 1) * share] for i, p in enumerate(parts)]))


@pytest.mark.slow
@pytest.mark.parametrize(("chunks", "size"), [(4, 32), (2, 24), *at_length((1, 32), (8, 32), (1, 24), (8, 24))])
def test_a_walk_over_several_chunks_is_chunk_by_chunk(chunks, size, chained_dot):
    """In one program and in several, where a step is cut at a chunk's end, by descriptors, and spread over ranks."""
    x = make("wide", (21, size * chunks), torch.float16, DEVICE, generator(1, DEVICE))
    weight = make("bell", (40, size * chunks), torch.float16, DEVICE, generator(2, DEVICE))
    want = tree_cuda.chunk_by_chunk(x, weight, chunks, torch.empty(21, 40, device=DEVICE))
    for splits in {1, chunks}:
        for tma in (False, True)[: 1 + (size == 32)]:
            tile = ChunkTile(64, 32, 16, 4, 2, splits, tma)
            assert identical(chunk_products(x, weight, chunks, torch.empty(21, 40, device=DEVICE), tile), want)
    tile, sums = ChunkTile(16, 16, 16, 4, 2, 1), []
    for left, right in zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True) if chunks > 1 else ():
        sums.append(chunk_products(left, right, chunks // 2, torch.empty(21, 40, device=DEVICE), tile))
    assert chunks == 1 or identical(tree(sums), want)


@pytest.mark.slow
@pytest.mark.parametrize("sound", [False, *at_length(True)])
def test_a_tile_is_proven_before_it_is_taken(sound, chained_dot, monkeypatch, tmp_path):
    store, real = Certificates({"device": "test"}, tmp_path), tree_cuda.chunk_products
    monkeypatch.setattr(tree_cuda, "certificates", lambda device: store)
    monkeypatch.setattr(tree_cuda, "tile_for", lambda *_: ChunkTile(16, 32, 16, 4, 2, 2 if sound else 1))
    monkeypatch.setattr(tree_cuda, "ANCHOR_TILE", ChunkTile(16, 16, 16, 4, 2, 1))
    x = make("wide", (5, 256), torch.float32, DEVICE, generator(1, DEVICE))
    weight = make("bell", (24, 256), torch.float32, DEVICE, generator(2, DEVICE))

    def halves(x, weight, chunks, out, tile=None):  # two chunks of four for eight: another tree
        return real(x, weight, 2 if chunks == 8 else chunks, out, tile)

    want = tree_cuda.chunk_by_chunk(x, weight, 8, torch.empty(5, 24, device=DEVICE))
    if not sound:
        monkeypatch.setattr(tree_cuda, "chunk_products", halves)
    assert identical(tree_cuda.chunk_sum(x, weight, 8, torch.empty(5, 24, device=DEVICE)), want)
    assert [(c.member, c.holds) for c in store.all()] == [(f"chunks/16x32x16/4.2/{2 if sound else 1}", sound)]
    monkeypatch.setattr(tree_cuda, "prove", None)  # called again, it would raise
    tree_cuda.chunk_sum(x, weight, 8, torch.empty(5, 24, device=DEVICE))


def test_what_no_rank_free_product_is_made_of_is_refused():
    x, weight = torch.ones(3, 20), torch.ones(4, 20)
    with pytest.raises(NotImplementedError, match="K = 20 is no multiple of 8"):
        row_parallel(x, weight, None, None)
    with pytest.raises(NotImplementedError, match="float64"):
        row_parallel(x.double(), weight.double(), None, None)
    with pytest.raises(ValueError, match="of one dtype"):
        row_parallel(x, torch.ones(4, 24), None, None)


@pytest.mark.parametrize("world", [3, *at_length(2, *range(4, 9))])
def test_a_proof_has_every_way_to_push(world):
    """Whole and in parts, in one piece and in several, of even sizes and odd ones: what some message would run."""
    for itemsize, narrowed in ((2, False), (4, False), (4, True)):

        def ways(counts, itemsize=itemsize, narrowed=narrowed):
            plans = [(symmetric.plan_push(count, itemsize, world, narrowed), count % 16 == 0) for count in counts]
            loops = {(p.in_parts, p.share > p.block * (world if p.in_parts else 1)) for p, _ in plans}
            return loops, {(p.in_parts, even) for p, even in plans}

        more = symmetric.counts_in_pieces(itemsize, world, narrowed=narrowed)
        assert ways((*PROOF_SIZES["cuda"], *more)) == ways(range(1, 2**28, 49999))
        room = [symmetric.mail_bytes(count, itemsize, world) for count in more]
        assert max(room) <= 2**28


class _Group:
    """What the tables look at."""

    group_name = "0"


@pytest.mark.nightly
def test_a_later_group_of_a_name_has_no_symmetric_memory(monkeypatch):
    """torch would meet the old group's ranks: with a workspace under the name on any rank, all ranks go without."""
    monkeypatch.setattr(symmetric, "SPACES", ByGroup(symmetric.Spaces))
    monkeypatch.setattr(symmetric, "Workspace", lambda group, device, size: SimpleNamespace(bytes=size))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    elsewhere = [0]  # the vote of another rank
    monkeypatch.setattr(symmetric.dist, "all_reduce", lambda vote, **_: vote.clamp_(min=elsewhere[0]))
    device, first = torch.device("cpu"), _Group()
    space = symmetric.workspace(first, device, 1)
    assert space is not None
    assert symmetric.workspace(first, device, 1) is space
    second = _Group()
    assert symmetric.workspace(second, device, 1) is None
    assert symmetric.SPACES.of(second).before == [space]  # a graph may have captured it
    third = _Group()
    assert symmetric.workspace(third, device, 1) is None
    symmetric.SPACES.clear()
    elsewhere[0] = 1
    assert symmetric.workspace(_Group(), device, 1) is None
