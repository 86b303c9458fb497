"""The shapes that a sampled run had, and its operators compared at exactly these.

Where nothing diverged, this shows what was compared. `shapes_met` reads the batch of every step from the run;
`explain_no_divergence` compares the model's own linear layers, norms and attention at these sizes, one row for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from nondet.core.inputs import generator, make
from nondet.core.measure import Trial, measure
from nondet.core.records import Row, Run
from nondet.sampling.analysis import schedules_of
from nondet.sampling.engine import query_step
from nondet.sampling.model import LoadedModel

# Keys that the query in question attends to; packed among the other keys of the step, as the engine packs them.
_OWN_KEYS = 48
_PACKINGS = 64  # of attention: all of them would repeat themselves, and the largest take long on a CPU


@dataclass(frozen=True)
class Shapes:
    """Sizes of the steps that the completions took part in."""

    tokens: tuple[int, ...]  # query tokens of a step: M of every layer but the last, rows of every norm
    requests: tuple[int, ...]  # requests of a step: M of the output projection, which has one row for each
    # (query tokens, keys) of a step: attention packs the keys of all requests into one row. Only keys in the schedule
    # count, not those of a shared prefix. Empty where steps ran as CUDA graphs, which pad the keys.
    keys: tuple[tuple[int, int], ...]


def shapes_met(run: Run, impl: str) -> Shapes:
    """Read the shapes off the schedules of all requests, targets and background; as padded, under CUDA graphs."""
    met: set[tuple[int, int, int]] = set()  # (query tokens, requests, keys) of a step with a target
    for members in schedules_of(run, impl).values():
        steps: dict[int, list[int]] = {}  # step -> [query tokens, requests, keys, targets]
        for target, schedule in members:
            past = 0
            for first, count, query in schedule:
                for step in range(first, first + count):
                    past += query
                    before = steps.get(step, (0, 0, 0, 0))
                    steps[step] = [a + b for a, b in zip(before, (query, 1, past, int(target)), strict=True)]
        met |= {(query, members_now, past) for query, members_now, past, targets in steps.values() if targets}
    tokens, requests, keys = {q for q, _, _ in met}, {r for _, r, _ in met}, {(q, past) for q, _, past in met}
    load = run.header.plan.get("load")
    if isinstance(load, dict) and load.get("graphs"):
        step, budget = query_step(load["requests"], load["budget"]), load["budget"]
        tokens = {min(budget, -(-query // step) * step) for query in tokens}
        requests, keys = {min(query, load["requests"]) for query in tokens}, set()
    return Shapes(tuple(sorted(tokens)), tuple(sorted(requests)), tuple(sorted(keys)))


def explain_no_divergence(loaded: LoadedModel, shapes: Shapes, seed: int = 0) -> list[Row]:
    """Compare the model's operators at the shapes of the run, under stock: one row for each operator and size.

    Linear layers and norms are the model's own modules, weights included, and get row 0 among M rows. Attention is
    scaled_dot_product_attention as the engine calls it under stock: one query among those of other requests, its keys
    among theirs, hidden from one another by an additive mask.
    """
    rows = []
    same: dict[str, Any] = {"probe": "sample", "inputs": "bell", "impl": "stock", "status": ""}
    same |= {"dtype": loaded.dtype, "device": loaded.device}
    # only bits are compared: a model's kernels are named by its own run
    with torch.no_grad():
        for name, module, width, sizes in _modules(loaded.model, shapes):
            data = make("bell", (max(sizes), width), loaded.model.dtype, loaded.device, generator(seed, loaded.device))
            linear = isinstance(module, torch.nn.Linear)
            named: dict[str, Any] = {"operator": "linear" if linear else "rms_norm", "case": f"{name} at the sizes met"}
            shape = {"M": max(sizes), "K": width} | ({"N": module.out_features} if linear else {})
            trials = [Trial(m, partial(_row_zero, module, data[:m])) for m in sizes]
            head = Row(**same, **named, shape=shape, varied="batch_size")
            rows.append(measure(head, trials, profile=False))
        if shapes.keys:
            named = {"operator": "attention", "case": "packed attention at the sizes met"}
            shape, trials = _attention(loaded, shapes, seed)
            rows.append(measure(Row(**same, **named, shape=shape, varied="load"), trials, profile=False))
    return rows


def _modules(model: Any, shapes: Shapes) -> Iterator[tuple[str, Any, int, Sequence[int]]]:
    """One module of each kind and size, by the name of the first."""
    seen: set[tuple[Any, ...]] = set()
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) and not type(module).__name__.endswith("RMSNorm"):
            continue
        sizes = shapes.requests if module is head else shapes.tokens
        kind = (*module.weight.shape, module is head)
        if kind not in seen and sizes:
            seen.add(kind)
            yield name, module, module.weight.shape[-1], sizes


def _row_zero(module: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return module(rows.unsqueeze(0))[0, 0]


def _attention(loaded: LoadedModel, shapes: Shapes, seed: int) -> tuple[dict[str, int], list[Trial]]:
    config = loaded.model.config.get_text_config()
    heads = config.num_attention_heads
    depth = getattr(config, "head_dim", None) or config.hidden_size // heads
    usable = [(q, k) for q, k in shapes.keys if k >= _OWN_KEYS + q]
    stride = max(1, len(usable) // _PACKINGS)
    packings = usable[::stride][:_PACKINGS] or [(1, _OWN_KEYS)]
    most_q, most_k = max(q for q, _ in packings), max(k for _, k in packings)
    rng = generator(seed, loaded.device)
    dtype: torch.dtype = loaded.model.dtype
    sizes = ((1, heads, length, depth) for length in (most_q, most_k, most_k))
    query, key, value = (make("bell", size, dtype, loaded.device, rng) for size in sizes)

    def packed(queries: int, keys: int) -> Callable[[], torch.Tensor]:
        def compute() -> torch.Tensor:
            # the query in question comes last, and so do its keys, after those of the other requests
            mask = torch.full((1, 1, queries, keys), torch.finfo(dtype).min, dtype=dtype, device=loaded.device)
            mask[..., -1, -_OWN_KEYS:] = 0.0
            mask[..., :-1, : keys - _OWN_KEYS] = 0.0
            q = torch.cat([query[:, :, 1:queries], query[:, :, :1]], dim=2)
            k = torch.cat([key[:, :, _OWN_KEYS:keys], key[:, :, :_OWN_KEYS]], dim=2)
            v = torch.cat([value[:, :, _OWN_KEYS:keys], value[:, :, :_OWN_KEYS]], dim=2)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0, :, -1]

        return compute

    shape = {"Hq": heads, "D": depth, "Tk": _OWN_KEYS, "Tq": most_q, "Tk_packed": most_k}
    return shape, [Trial(f"{q}x{k}", packed(q, k)) for q, k in packings]
