"""What a device kernel is, by its name: split-K, matrix-vector, tile, row reduction, atomics.

The kind is what the name shows and no more: a tile whose name shows no split may still take another order than another
tile. `docs/classes.md` tells what each pattern usually means.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["KINDS", "Kind", "kind_of"]


@dataclass(frozen=True)
class Kind:
    """A kind of kernel.

    Attributes:
        key: For style sheets and data.
        name: In a table or beside a mark.
        words: In a legend.
    """

    key: str
    name: str
    words: str


KINDS: dict[str, Kind] = {
    kind.key: kind
    for kind in (
        Kind("split", "split", "K, or the keys, cut into parts that are added afterwards (split-K)"),
        Kind("gemv", "GEMV", "a matrix-vector kernel, for one row or a few"),
        Kind("tile", "tile", "tiles of the result; the name shows no split"),
        Kind("row", "row reduction", "one row is summed by a block of threads"),
        Kind("atomic", "atomics", "added in the order in which threads arrive"),
        Kind("other", "other", "the name tells nothing of an order"),
        Kind("unseen", "not seen", "no profiler saw kernels here, as on a CPU"),
    )
}

_SPLIT = re.compile(r"split_?k(?!v)|stream_?k", re.IGNORECASE)
_SPLIT_KEYS = re.compile(r"splitkv.*combine|merge_(?:all_)?kernel|combine_kernel", re.IGNORECASE)
_TABLE: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("gemv", re.compile(r"gemv|gemmSN", re.IGNORECASE)),
    ("tile", re.compile(r"gemm|nvjet|xmma|cutlass|matmul|flash|fmha|sdpa|attend|prefill|decode_kernel|grouped", re.I)),
    ("atomic", re.compile(r"indexFunc|scatter_gather|atomic|index_put", re.IGNORECASE)),
    ("row", re.compile(r"softmax|layer_?norm|rms_norm|reduce_kernel|reduction|logsumexp|cross_entropy|sum|mean", re.I)),
)


def kind_of(names: Sequence[str]) -> Kind:
    """The kind of a set of kernels, by the one that decides its order: a split where any of them shows one."""
    if not names:
        return KINDS["unseen"]
    if any(_SPLIT.search(name) or _SPLIT_KEYS.search(name) for name in names):
        return KINDS["split"]
    for key, pattern in _TABLE:
        if any(pattern.search(name) for name in names):
            return KINDS[key]
    return KINDS["other"]
