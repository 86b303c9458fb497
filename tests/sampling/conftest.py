"""A tiny Qwen3 with random weights, and a tokenizer of its own: everything the engine needs, in a second."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from msgspec.structs import replace as replaced

from nondet.core.records import Run
from nondet.core.runfile import open_run, read_run
from nondet.sampling import engine
from nondet.sampling.axes import Conditions, Varied
from nondet.sampling.collect import Here, Survey, collect, describe
from nondet.sampling.engine import run_session
from nondet.sampling.model import LoadedModel, load_model
from nondet.sampling.plan import Notes, Plan, Session, build_plan, parse_load


def write_tiny_model(folder: Path) -> Path:
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    config = Qwen3Config(**sizes, tie_word_embeddings=True, initializer_range=0.2, bos_token_id=None, eos_token_id=0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    every_byte = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, initial_alphabet=every_byte, show_progress=False)
    tokenizer.train_from_iterator([topics[name] for name in sorted(topics)[:8]], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def planned(
    loaded: LoadedModel, load: str, prompt: str, *, new: int, n: int | None = None, seed: int = 0, samplings: Any = ()
) -> Plan:
    """What is to be run of one prompt; as many completions as a round holds, unless told otherwise."""
    parsed = parse_load(load)
    return build_plan(
        parsed, n=n or parsed.targets, seed=seed, prompts=[loaded.encode(prompt)], samplings=samplings,
        max_new_tokens=new, context=256, encode=loaded.encode_plain,
    )  # fmt: skip


Heard = partial(Mock, spec=Notes)  # calls what is given under the names of the notes


def sampled_into(
    path: Path, loaded: LoadedModel, plan: Plan, impls: Sequence[str] = ("stock",), notes: Notes | None = None,
    threads: int | None = None, base: Conditions | None = None, axes: Sequence[Varied] = (), *,
    prompts: Sequence[dict[str, Any]] = (), resume: bool = False, header: dict[str, Any] | None = None, **options: Any,
) -> Run:  # fmt: skip
    """Sample the plan by itself, or along axes, into a run file, and read it. `header`: more of its plan."""
    target = next(r for r in plan.rounds[0] if r.target)
    prompts = prompts or [{"text": "p", "tokens": len(target.prompt)}]
    described = describe(loaded, plan, prompts, target.max_new_tokens, options.get("seed", 0), impls) | (header or {})
    if axes:
        described["vary"] = {v.axis.name: [v.base, *(value for value, _ in v.values)] for v in axes}
    survey = Survey(loaded, plan, base or Conditions(plan.load, loaded.dtype, threads=threads), impls, axes, **options)
    writer = open_run(path, command="sample", plan=described, environment={"torch": "2"}, resume=resume)
    with closing(writer), closing(Here(loaded)) as host:
        collect(survey, host, writer, notes)
        writer.finish()
    return read_run(path)


def untimed(run: Run) -> list[Any]:
    """Everything that must come out the same whenever and in however many pieces it is run. How many requests were run
    again is left out: background is on disk only as schedules."""
    rounds = [replaced(r, seconds=0.0, first_use_seconds=0.0) for r in run.rounds]
    rows = [replaced(r, seconds=0.0, extra={k: v for k, v in r.extra.items() if k != "requests"}) for r in run.rows]
    return [run.header.plan, run.completions, rounds, rows]


def change_bits(patch: pytest.MonkeyPatch, byte: Callable[[int], int], most: int = 1000) -> None:
    """Sessions number 1, 2, ... have this byte in the first logprob of their first outcomes; 0: their own one."""
    calls = itertools.count(1)

    def changed(*args: Any, **named: Any) -> Session:
        session, other = run_session(*args, **named), byte(next(calls))
        outcomes = list(session.outcomes)
        for i, o in enumerate(outcomes[:most] if other else ()):
            outcomes[i] = replace(o, logprobs=bytes([other]) * 4 + o.logprobs[4:])
        return replace(session, outcomes=outcomes)

    patch.setattr(engine, "run_session", changed)


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> LoadedModel:
    return load_model(str(tiny_folder), "bfloat16", "cpu")


@pytest.fixture(scope="session")
def tiny_float32(tiny_folder: Path) -> LoadedModel:
    return load_model(str(tiny_folder), "float32", "cpu")
