"""The products of class "fold" by each tile, beside torch.mm: what of a weight's gradient the choice of a tile decides.

python scripts/fold_tiles.py [TOKENS K N]     (Qwen3-0.6B's layers, 32,768 tokens; without a GPU: the interpreter)
A line a layer and tile: us (median), times torch.mm's, its bits beside the anchor's; "by index": as of padding.
The interpreter's products are no chains, so that tiles have other bits there.
"""

from __future__ import annotations

import os
import sys

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from nondet.bench.cells import interleave, stopwatch_for  # noqa: E402 - after what the interpreter needs
from nondet.core.inputs import generator, make  # noqa: E402
from nondet.kernels.fold import cuda  # noqa: E402
from nondet.kernels.matmul.triton_kernels import Tile  # noqa: E402

TILES = (
    *cuda.WIDE,
    Tile(256, 128, 64, 8, 3),
    Tile(128, 128, 64, 8, 4),
    Tile(128, 128, 64, 4, 3),
    Tile(64, 64, 64, 4, 4),
)
LAYERS = ((1024, 2048), (1024, 1024), (2048, 1024), (1024, 3072), (3072, 1024), (1024, 151936))


def main(tokens: int, layers: tuple[tuple[int, int], ...], dtype: torch.dtype) -> None:
    """Every tile of every layer (K, N), in turn."""
    watch = stopwatch_for(DEVICE)
    for k, n in layers:
        x, grad = (make("bell", (tokens, w), dtype, DEVICE, generator(i, DEVICE)) for i, w in enumerate((k, n)))
        at = torch.arange(tokens, dtype=torch.int32, device=DEVICE)
        calls = {"torch.mm": lambda acc: torch.mm(grad.t(), x)}  # noqa: B023 - used within the turn
        for tile in (cuda.ANCHOR, *TILES):
            calls[tile.name] = lambda acc, tile=tile: cuda.launch(acc, grad, x, tile)  # noqa: B023
        calls["by index"] = lambda acc: cuda.launch(acc, grad, x, next(iter(cuda.WIDE)), at)  # noqa: B023
        bits = {}
        for name, call in calls.items():
            acc = torch.zeros(n, k, device=DEVICE)
            call(acc)
            bits[name] = acc
        scratch = [(torch.zeros(n, k, device=DEVICE),)]
        taken = interleave({name: watch.record(call, scratch, 2) for name, call in calls.items()}, watch, least=3)
        middle = {name: sorted(us)[len(us) // 2] / 2 for name, us in taken.items()}
        for name, us in middle.items():
            same = torch.equal(bits[name], bits[cuda.ANCHOR.name])
            print(f"K={k} N={n} {name:20} {us:10.1f} us {us / middle['torch.mm']:6.2f}", "" if same else "other bits")
        sys.stdout.flush()


if __name__ == "__main__":
    given = [int(size) for size in sys.argv[1:]]
    half = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    main(given[0] if given else 32768, ((given[1], given[2]),) if given else LAYERS, half)
