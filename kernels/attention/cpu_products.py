"""The two products of attention on a CPU, in batches of tiles, at sizes certified to give one and the same bits.

scores: [n, R, D] times [n, 64, D] transposed -> [n, R, 64]. values: [n, R, 64] times [n, 64, D] -> [n, R, D]. Both in
float32, n tiles of R rows. The order along the summed axis is the library's; `nondet.kernels.matmul.cpu_tiles`
certifies that a row has the same bits at every place in its tile, in tiles of every height in `heights_of`, and in
batches of every size that is used. Where a library's batched product is not invariant, the batches shrink to single
tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from nondet.core.inputs import order_revealing
from nondet.kernels import originals
from nondet.kernels.attention.cpu_plan import BLOCK, STEP
from nondet.kernels.matmul.cpu_plan import Tiles
from nondet.kernels.matmul.cpu_tiles import NotInvariantError, environment_key, prove, proven, shortcut

__all__ = ["heights_of", "products_of", "scores", "values"]

_HEIGHTS = (4, 8, 16, 32, 64)
_BATCHES = (*range(1, STEP), *range(STEP, 129, STEP), 160, 192, 224, 256)
_SEEDS = (21, 22)
_heights: dict[tuple[object, ...], tuple[int, ...]] = shortcut()
_products: dict[tuple[object, ...], tuple[Tiles, Tiles]] = shortcut()


def scores(q: torch.Tensor, keys: torch.Tensor, out: torch.Tensor) -> None:
    """[n, R, D] times [n, 64, D] transposed, into out [n, R, 64]."""
    originals.bmm(q, keys.mT, out)


def values(weights: torch.Tensor, block: torch.Tensor, out: torch.Tensor) -> None:
    """[n, R, 64] times [n, 64, D], into out [n, R, D]."""
    originals.bmm(weights, block, out)


def heights_of(dim: int) -> tuple[int, ...]:
    """Tile heights R of one numerics class, ascending.

    Raises:
        NotInvariantError: there is none.
    """
    key = (dim, *environment_key())
    found = _heights.get(key)
    if found is None:
        by_scores, by_values = _prove_heights(scores, dim, BLOCK), _prove_heights(values, BLOCK, dim)
        found = tuple(sorted(set(by_scores.sizes) & set(by_values.sizes)))
        if not found:
            raise NotInvariantError(
                f"cpu_attention with head dim {dim}: no tile height suits both of its products here"
            )
        _heights[key] = found
    return found


def products_of(height: int, dim: int) -> tuple[Tiles, Tiles]:
    """Certified batch sizes of `scores` and `values`."""
    key = (height, dim, *environment_key())
    found = _products.get(key)
    if found is None:
        found = _products[key] = (_batches(scores, height, dim, BLOCK), _batches(values, height, BLOCK, dim))
    return found


def _prove_heights(product: Callable[..., None], depth: int, width: int) -> Tiles:
    def case(seed: int) -> tuple[Callable[..., object], tuple[torch.Tensor]]:
        right = _right(product, 1, depth, width, seed)
        rows = order_revealing(max(_HEIGHTS), depth, torch.float32, seed, negate=True)
        return (lambda x, out: product(x[None], right, out[None])), (rows,)

    what = f"cpu_attention {product.__name__} [{depth} x {width}]"
    return proven(
        what,
        ("attention heights", product.__name__, depth, width, *environment_key()),
        lambda: prove(
            what,
            [case(seed) for seed in _SEEDS],
            lambda rows: torch.empty(rows, width),
            _HEIGHTS,
        ),
    )


def _batches(product: Callable[..., None], height: int, depth: int, width: int) -> Tiles:
    what = f"cpu_attention {product.__name__} {height} x {depth} x {width}"

    def make() -> Tiles:
        most = max(_BATCHES)
        cases: list[tuple[Callable[..., object], Sequence[torch.Tensor]]] = []
        for seed in _SEEDS:
            left = order_revealing(most * height, depth, torch.float32, seed, negate=True).view(most, height, depth)
            cases.append((product, (left, _right(product, most, depth, width, seed))))
        return prove(
            what,
            cases,
            lambda tiles: torch.empty(tiles, height, width),
            _BATCHES,
            bases=(1,),
        )

    return proven(what, ("attention batches", product.__name__, height, depth, width, *environment_key()), make)


def _right(product: Callable[..., None], batch: int, depth: int, width: int, seed: int) -> torch.Tensor:
    """The right operand as the product takes it: keys [batch, 64, D] or values [batch, 64, D]."""
    x = order_revealing(batch * width, depth, torch.float32, seed, negate=False).view(batch, width, depth)
    return x if product is scores else x.mT.contiguous()
