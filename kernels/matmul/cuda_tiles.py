"""The tiles of class "chain": their names, the anchor that defines the bits, and a sane choice for any shape."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

__all__ = ["Tile", "anchor", "tile_for", "tile_named", "tiles"]


class Tile(NamedTuple):
    """What a launch may choose, and the bits stay."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}x{self.block_k}"

    @property
    def name(self) -> str:
        """All of it, as "16x32x128w4s5": w for warps, s for stages."""
        return f"{self}w{self.warps}s{self.stages}"


def tile_named(name: str) -> Tile:
    """The tile that `Tile.name` calls so.

    Raises:
        ValueError: no name of a tile.
    """
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)w(\d+)s(\d+)", name)
    if match is None:
        raise ValueError(f"{name!r} names no tile; one is called like 16x32x128w4s5")
    return Tile(*map(int, match.groups()))


_HALF_TILES = (
    Tile(16, 32, 64, 4, 6),
    Tile(16, 64, 64, 4, 5),
    Tile(32, 32, 64, 4, 5),
    Tile(32, 64, 64, 4, 5),
    Tile(64, 32, 64, 4, 5),
    Tile(64, 64, 64, 4, 4),
    Tile(64, 128, 64, 4, 4),
    Tile(128, 128, 64, 8, 4),
    Tile(128, 256, 64, 8, 3),
)
_FLOAT_TILES = (Tile(16, 64, 32, 4, 3), Tile(64, 64, 32, 4, 3))
_DOUBLE_TILES = (Tile(16, 32, 32, 4, 2),)


def tiles(dtype: torch.dtype) -> tuple[Tile, ...]:
    """Tiles that serve any shape of the dtype, a few of the class's many members: for measuring and proving."""
    if dtype == torch.float64:
        return _DOUBLE_TILES
    return _FLOAT_TILES if dtype == torch.float32 else _HALF_TILES


def anchor(dtype: torch.dtype) -> Tile:
    """The tile whose bits are the class by definition: what every other member is proven against."""
    if dtype == torch.float64:
        return _DOUBLE_TILES[0]
    return _FLOAT_TILES[1] if dtype == torch.float32 else _HALF_TILES[5]


def tile_for(m: int, n: int, dtype: torch.dtype) -> Tile:
    """A sane tile for an [m, K] x [K, n] product: few wasted rows, and programs enough to fill a large GPU."""
    if dtype == torch.float64:
        return _DOUBLE_TILES[0]
    if dtype == torch.float32:
        return _FLOAT_TILES[0 if m <= 16 else 1]
    wide = n > 8192
    if m <= 16:
        return _HALF_TILES[1 if wide else 0]
    if m <= 32:
        return _HALF_TILES[3 if wide else 2]
    if m <= 64:
        return _HALF_TILES[6 if wide else 4]
    for tile in (_HALF_TILES[8], _HALF_TILES[7]):
        if -(-m // tile.block_m) * -(-n // tile.block_n) >= 128:
            return tile
    return _HALF_TILES[5]
