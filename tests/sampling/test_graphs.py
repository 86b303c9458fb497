"""CUDA graphs under the engine: when they are the default, what they keep, and the mask that is written for a step."""

from __future__ import annotations

import random

import pytest
import torch

from nondet.embedded import DEFAULT_PROMPT
from nondet.sampling.engine import batching_config, run_session, sizes_of, why_no_graphs, write_mask
from nondet.sampling.implementations import implementation
from nondet.sampling.model import LoadedModel, load_model, random_config
from nondet.sampling.plan import Load, Session, build_plan, parse_load
from nondet.sampling.schedule import TopRing
from nondet.services.sample import load_with_graphs


def session_of(loaded: LoadedModel, spec: str) -> Session:
    load = parse_load(spec)
    plan = build_plan(
        load, n=load.targets, seed=0, prompt=loaded.encode(DEFAULT_PROMPT), max_new_tokens=24, context=256,
        encode=loaded.encode_plain,
    )  # fmt: skip
    return run_session(loaded.model, plan.rounds[0], load)


def test_the_mask_is_transformers_own() -> None:
    """Written for a whole step at once, it holds the numbers that transformers writes request by request."""
    from transformers.generation.continuous_batching.input_outputs import build_attention_mask

    rng = random.Random(0)  # noqa: S311 - sizes of a test
    least = torch.finfo(torch.bfloat16).min
    for _ in range(60):
        window, queries, keys = rng.choice([1, 1, 3, 5]), [0], [0]
        for _ in range(rng.randint(1, 5)):
            past = rng.choice([0, rng.randint(1, 9)])
            queries.append(queries[-1] + rng.randint(1, 6))
            keys.append(keys[-1] + queries[-1] - queries[-2] + (past if window == 1 else min(past, window - 1)))
        theirs, ours = (torch.full((1, 1, 40, 90), least, dtype=torch.bfloat16) for _ in range(2))
        build_attention_mask(theirs, queries, keys, window)
        write_mask(ours, queries, keys, window)
        assert torch.equal(theirs, ours), (queries, keys, window)


def test_a_ring_of_tops_forgets_no_step() -> None:
    """What graphs keep on the device is what a hook would have kept, also once the ring has gone round."""
    ring = TopRing(rows=3, device=torch.device("cpu"), places=4)
    steps = [
        torch.randn(rows, 7, generator=torch.Generator().manual_seed(rows + i))
        for i, rows in enumerate((2, 3, 1, 3, 2, 1))
    ]
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for i, logits in enumerate(steps):
        if ring.full(i):
            kept += ring.read([len(x) for x in steps[:i]])
        ring.write(logits)
    kept += ring.read([len(x) for x in steps] + [3])  # a seventh step crashed
    assert len(kept) == len(steps)
    for (values, tokens), logits in zip(kept, steps, strict=True):
        best = torch.topk(logits, 2)
        assert torch.equal(values, best.values)
        assert torch.equal(tokens, best.indices)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["stock-flash", "invariant"])
def test_graphs_change_no_bit_of_the_invariant(impl: str) -> None:
    """Tokens, logprobs and margins with graphs are those without; stock runs, and its margins are kept as well."""
    loaded = load_model(None, "bfloat16", "cuda")
    spec = "others=12,targets=12,spread=24,prompt=8-64,tokens=8-32"
    with implementation(impl):
        apart, graphed = session_of(loaded, spec), session_of(loaded, f"{spec},graphs=on")
    for session in (apart, graphed):
        assert not session.fatal
        assert all(len(o.margins) == 4 * len(o.token_ids) for o in session.outcomes)
    assert not any(p.captured for p in apart.pace)
    assert 0 < sum(p.captured for p in graphed.pace) < graphed.steps / 2
    if impl == "invariant":
        assert apart.outcomes == graphed.outcomes
        assert len({(tuple(o.token_ids), o.logprobs) for o in graphed.outcomes if o.request.target}) == 1


def test_graphs_are_the_default_where_they_can_be(tiny: LoadedModel, capsys: pytest.CaptureFixture[str]) -> None:
    """For a dense model on CUDA, unless the load or the option says otherwise; not for experts or windows."""
    from transformers import AutoConfig

    load, model = parse_load("default"), tiny.model

    def graphs(given: bool | None = None, spec: str = "default", device: str = "cuda", plain: bool = True) -> bool:
        return load_with_graphs(given, spec, parse_load(spec), device, model, plain=plain, say=print).graphs

    assert not load.graphs
    assert graphs(spec="heavy")
    assert "steps run as CUDA graphs" in capsys.readouterr().out
    for small in ("default", "light"):  # padded to their budget alone, no product would meet another M
        assert not graphs(spec=small)
        assert "padded to one size" in capsys.readouterr().out
    assert graphs(True)
    assert graphs(spec="light,graphs=on")
    rest = {"spec": "heavy"}
    assert not any((graphs(False, **rest), graphs(spec="heavy,graphs=off"), graphs(device="cpu", **rest)))
    assert not graphs(plain=False, **rest)
    assert not why_no_graphs(model.config)
    assert not why_no_graphs(random_config("random:mistral-2x128", 512))
    for name in ("gemma3_text", "mistral"):  # as they come: layers with a sliding window
        assert "full attention" in why_no_graphs(AutoConfig.for_model(name))
    assert "has been seen" in why_no_graphs(AutoConfig.for_model("gpt2"))
    stretched = AutoConfig.for_model("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    assert "has been seen" in why_no_graphs(stretched), "it reads the longest position back"
    model_with_experts = type("Config", (), {"num_experts": 8, "get_text_config": lambda self: self})()
    assert "experts" in why_no_graphs(model_with_experts)


def test_a_warm_up_meets_the_sizes_that_graphs_have() -> None:
    """Steps are padded, so other sizes are not asked of the layers, which would take the time of all of them."""
    small = Load(others=0, targets=8, spread=1, prompt=(1, 1), tokens=(1, 1), budget=20, requests=5)
    assert sizes_of(small) == ([*range(1, 21), 20], [1, 2, 3, 4, 5])
    graphed = Load(**{**small.__dict__, "graphs": True})
    config = batching_config([], graphed, pages=4)
    assert config.q_padding_interval_size == 8
    assert sizes_of(graphed) == ([8, 16, 20], [5])
