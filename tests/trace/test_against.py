"""`nondet trace --record` and `--against`: planted differences are named, sound pairs are not, and no file is trusted."""

from __future__ import annotations

import copy
import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from nondet.cli import main
from nondet.core.records import Control, OperatorCompared, Record, TraceVerdict
from nondet.core.runfile import read_run
from nondet.errors import UserError
from nondet.reports.text import environment_line
from nondet.sampling.implementations import implementation
from nondet.trace.against import MOST_BYTES, Against, Recording, record, renamed
from tests.build import tiers
from tests.trace.conftest import model_of

ABOUT = {"dtype": "float32", "threads": 1, "made_by": "a test"}
TOKENS = [(7 * i + 3) % 159 + 1 for i in range(24)]
# what is planted -> (a module of the second layer, or of the model; the call that is to be named there)
PLACES = {
    "linear": ("mlp.down_proj", "Linear"),
    "norm": ("post_attention_layernorm", "RMSNorm"),
    "attention": ("self_attn", "attention"),
    "activation": ("mlp.act_fn", "Activation"),
    "rotary": ("self_attn", "apply_rotary_pos_emb"),
    "embedding": ("embed_tokens", "Embedding"),
}


def compared(model: Any, path: Path, **names: str) -> tuple[TraceVerdict, list[Record]]:
    records: list[Record] = []
    return Against(model, Recording(path), names, write=records.append).run(), records


def operators(records: list[Record]) -> list[OperatorCompared]:
    return [r for r in records if isinstance(r, OperatorCompared)]


def notes(records: list[Record]) -> dict[str, str]:
    return {r.name: r.sentence for r in records if isinstance(r, Control)}


@contextmanager
def planted(model: Any, what: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """One operator of the model computes, and then changes its result."""
    with pytest.MonkeyPatch.context() as patch:
        layer = model.model.layers[1]
        if what == "rotary":
            file = sys.modules[type(layer).__module__]
            rotary = file.apply_rotary_pos_emb
            patch.setattr(
                file,
                "apply_rotary_pos_emb",
                lambda q, k, *more: (change(rotary(q, k, *more)[0]), rotary(q, k, *more)[1]),
            )
        elif what == "attention":
            from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

            attention = ALL_ATTENTION_FUNCTIONS["sdpa"]

            def changed(module: Any, *args: Any, **kwargs: Any) -> Any:
                out, weights = attention(module, *args, **kwargs)
                return (change(out) if module is layer.self_attn else out), weights

            patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", changed)
        else:
            path = PLACES[what][0]
            module = (model.model if what == "embedding" else layer).get_submodule(path)
            original = module.forward
            patch.setattr(module, "forward", lambda *args: change(original(*args)))
        yield


def changes(rng: random.Random) -> tuple[str, Callable[[torch.Tensor], torch.Tensor]]:
    """A drawn change of a result, and whether it is rounding: a last bit here and there, or a hundredth of the scale."""
    every = rng.randint(2, 9)

    def moved(x: torch.Tensor, by: float) -> torch.Tensor:
        flat = x.detach().clone().reshape(-1)
        flat[::every] = flat[::every] * (1 + by)
        return flat.reshape(x.shape)

    by = {"rounding": torch.finfo(torch.float32).eps, "not rounding": rng.choice((-0.01, 0.01))}
    kind = rng.choice([*by])
    return kind, lambda x: moved(x, by[kind])


@pytest.mark.slow
@pytest.mark.parametrize("draws", tiers([range(6)], [range(6, 20)]))
def test_a_planted_difference_in_one_operator_is_named(draws: range, tmp_path: Path) -> None:
    for seed in draws:
        rng = random.Random(seed)
        what = [*PLACES][seed % len(PLACES)]
        kind, change = changes(rng)
        model = model_of(rng.choice(("qwen3", "llama")), seed=seed)
        path = tmp_path / f"{seed}.safetensors"
        record(model, TOKENS[: rng.randint(9, 24)], path, ABOUT)
        with planted(model, what, change):
            verdict, records = compared(model, path)
        differing = [op for op in operators(records) if op.differing]
        place, call = PLACES[what]
        case = f"seed {seed}: {what}, {kind}: {verdict.sentences}"
        assert len(differing) == 1, case
        assert differing[0].module.endswith(place), case
        assert differing[0].call.endswith(call), case
        if what != "embedding":  # which only copies: even a last bit is no rounding
            assert verdict.finding == differing[0].verdict == kind, case
        assert (
            f"the first operator to differ is `{differing[0].call}` of {differing[0].module}: " in verdict.sentences[0]
        )
        assert any(f"taking `{differing[0].call}` of {differing[0].module} from the" in s for s in verdict.sentences), (
            case
        )
