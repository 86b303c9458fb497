"""The kernels behind the sums over ranks, in Triton's interpreter, against their orders in plain torch."""

from types import SimpleNamespace

import pytest
import torch

from nondet.core.certificates import Certificates
from nondet.core.compare import identical
from nondet.core.inputs import generator, make
from nondet.kernels.all_reduce import symmetric, tree_cuda
from nondet.kernels.all_reduce.chain import PROOF_SIZES
from nondet.kernels.all_reduce.orders import ByGroup, chain, tree
from nondet.kernels.all_reduce.tree import row_parallel
from nondet.kernels.all_reduce.tree_cuda import ChunkTile, chunk_products
from tests.build import DEVICE
from tests.kernels.tiers import at_length


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
    """One with the anchor's bits is taken, and looked up the next time; one of another tree is excluded."""
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
