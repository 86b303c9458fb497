"""What computes an engine's layers under its plugin, and their proofs at start.

Products: class "chain" (`nondet.kernels.matmul.cuda`). Members are certified only for the row counts of `row_counts`;
any other M is padded to the next one, with whatever memory holds, because no row depends on its neighbours. Norms:
class "lanes" (`nondet.kernels.rows.cuda`), rounded once.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from nondet.core.launch import first_uses

_FINE, _COARSE, _FINE_TO = 64, 256, 2048  # rows between certified counts, up to _FINE_TO rows and above
_ALIGNED = 256  # bytes to which every allocation is aligned

_counts: list[int] = []
_ran: set[int] | None = None  # addresses of the weights that operators ran with; None while not watching


def row_counts(graphs: Sequence[int], tokens: int) -> list[int]:
    """The numbers of rows that products are certified for, ascending, the last at least `tokens`, the most rows of a
    step. `graphs` are the sizes of CUDA graphs, if any."""
    sizes = [m for m in graphs or (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)) if m <= tokens]
    top = max(sizes, default=0)
    fine = range(-(-top // _FINE) * _FINE, min(tokens, _FINE_TO) + 1, _FINE)
    coarse = range(max(_FINE_TO, -(-top // _COARSE) * _COARSE), tokens + 1, _COARSE)
    return sorted({m for m in (*sizes, *fine, *coarse, tokens) if m})


def use_counts(counts: Iterable[int]) -> None:
    """Pad products to these numbers of rows from now on."""
    _counts[:] = sorted(counts)


def has_counts() -> bool:
    """Whether any are certified yet."""
    return bool(_counts)


def padded_rows(rows: int) -> int:
    """The next certified number of rows; above the last a multiple of `_COARSE`, which is proven at its first use."""
    index = bisect.bisect_left(_counts, rows)
    return _counts[index] if index < len(_counts) else -(-rows // _COARSE) * _COARSE


def watch() -> None:
    """From now on record the weights with which the operators below run, until `not_run`."""
    global _ran
    _ran = set()


def note(weight: torch.Tensor) -> None:
    """Record, while watching, that an operator ran with this weight."""
    if _ran is not None:
        _ran.add(weight.data_ptr())


def not_run(weights: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the weights that no operator ran with since `watch`, which ends here; none without `watch`."""
    global _ran
    ran, _ran = _ran, None
    return [] if ran is None else [name for name, weight in weights.items() if weight.data_ptr() not in ran]


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N] -> [..., N], by a certified member of class "chain"."""
    from nondet.kernels.matmul.cuda import linear

    note(weight)
    plain = weight.data  # without an engine's subclass
    return padded(lambda rows: linear(rows, plain, bias), x)


def padded(compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """compute(rows [m, K]) -> [m, N] of x [..., K], at a certified m -> [..., N]."""
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    wanted = padded_rows(count)
    if wanted != count:
        wide = rows.new_empty((wanted, rows.shape[1]))
        wide[:count].copy_(rows)
        rows = wide
    elif not rows.is_contiguous() or rows.data_ptr() % _ALIGNED:
        rows = rows.clone(memory_format=torch.contiguous_format)  # certified calls begin at an aligned address
    out = compute(rows)
    out = out[:count] if wanted != count else out
    return out if x.ndim == 2 else out.view(*x.shape[:-1], out.shape[-1])


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x [..., H] normalized and weighted, class "lanes": `nondet.kernels.rows.cuda.rms_norm`."""
    from nondet.kernels.rows.cuda import rms_norm as compute

    note(weight)
    return compute(x, weight, epsilon)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of x + residual, x + residual), the sum rounded first: `nondet.kernels.rows.cuda.rms_norm_residual`."""
    from nondet.kernels.rows.cuda import rms_norm_residual

    note(weight)
    return rms_norm_residual(x, residual, weight, epsilon)


class Certified(NamedTuple):
    """What was done for one shape of weights: new proofs (none at a machine's second start), and kernels that Triton
    did not have on disk."""

    seconds: float
    proofs: int
    compiled: int


@contextmanager
def float32_default() -> Iterator[None]:
    """Set float32, in which a proof draws its inputs; an engine loads weights under the model's own dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def certified(work: Callable[[], object]) -> Certified:
    """What was done in work(), which launches what needs a proof."""
    began = time.perf_counter()
    with float32_default(), torch.inference_mode(), first_uses() as uses:
        work()
    return Certified(time.perf_counter() - began, uses.proofs, uses.compiled)


def certify_product(weight: torch.Tensor, bias: torch.Tensor | None, counts: Sequence[int]) -> Certified:
    """Prove a member for each number of rows that this weight can get, as `product` looks it up."""
    return certified(lambda: [product(weight.data.new_zeros((m, weight.shape[1])), weight, bias) for m in counts])


def bias_of(layer: Any) -> Any:
    """The bias that a layer's product adds; None where its caller does, or where there is none."""
    return None if getattr(layer, "skip_bias_add", False) else getattr(layer, "bias", None)


def width_of(layer: Any) -> int:
    """K of a linear layer, or of a head."""
    return int(getattr(layer, "input_size_per_partition", None) or getattr(layer, "embedding_dim", None) or 0)


def summary(seen: Mapping[Any, Certified], counts: Sequence[int]) -> str:
    """What the certificates of all shapes took."""
    seconds, proofs, compiled = (sum(x) for x in zip((0.0, 0, 0), *(c[:3] for c in seen.values()), strict=True))
    what = f"{len(seen)} shapes of weights at {len(counts)} row counts: {proofs} proofs"
    return f"{what}, {compiled} kernel{'s' * (compiled != 1)} compiled, in {seconds:.1f} s."


def plan_of(seen: Mapping[Any, Certified], graphs: int, tokens: int, requests: int) -> dict[str, Any]:
    """What a coverage file has about the certificates."""
    proofs, seconds = sum(one.proofs for one in seen.values()), sum(one.seconds for one in seen.values())
    sizes = {"graphs": graphs, "tokens": tokens, "requests": requests}
    return sizes | {"shapes": len(seen), "proofs": proofs, "proofs_s": round(seconds, 2)}
