"""The same decode attention again and again under cuDNN: does one call on equal inputs keep its bits? Needs a GPU.

Prints one JSON object a case: how many of the repeats gave other bits than the first, and how many bit patterns there
were. torch alone, so that nothing of nondet's can be the cause.
"""

from __future__ import annotations

import hashlib
import json
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

CASES = [(64, 2048, 128), (8, 2048, 128), (5, 532, 128), (1, 2048, 128), (64, 256, 128), (64, 2048, 64)]


def repeated(requests: int, keys: int, dim: int, repeats: int, backend: SDPBackend) -> dict[str, object]:
    """One case: q [B, 32, 1, D], k and v [B, 8, Tk, D], bfloat16."""
    rng = torch.Generator("cuda").manual_seed(0)
    draw = {"device": "cuda", "dtype": torch.bfloat16, "generator": rng}
    q = torch.randn(requests, 32, 1, dim, **draw)
    k, v = (torch.randn(requests, 8, keys, dim, **draw) for _ in range(2))
    first, parted, digests = None, 0, set()
    for _ in range(repeats):
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).view(torch.int16)
        first = out if first is None else first
        if not torch.equal(out, first):
            parted += 1
        digests.add(hashlib.sha256(out.cpu().numpy().tobytes()).hexdigest()[:12])
    return {
        "backend": backend.name,
        "B": requests,
        "Tk": keys,
        "D": dim,
        "repeats": repeats,
        "other_bits_than_the_first": parted,
        "distinct": len(digests),
    }


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    environment = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }
    print(json.dumps(environment))
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        for case in CASES:
            print(json.dumps(repeated(*case, count, backend)), flush=True)
