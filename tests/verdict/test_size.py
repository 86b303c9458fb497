"""Rounding or a bug, by how far logprobs differ."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from nondet.core.runfile import read_run
from nondet.reports.content import RunSection
from nondet.verdict.size import Size
from tests.build import Command, sampled
from tests.faults.models import FUNCTIONS, wrapped


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (Size(0.1, [0.12], "bfloat16"), "as small as rounding makes it: logprobs differ by up to 0.1 nats, the two"),
        (Size(0.1, []), "as small as rounding makes it: logprobs differ by up to 0.1 nats"),
        (Size(0.1, [], "float32"), "not rounding: logprobs differ by up to 0.1 nats"),
        (Size(1e-5, [0.1], "float32"), "not rounding"),
        (Size(0.001, [0.01], "float32"), "rounding or a bug is not decided"),
        (Size(0.1, [None, 0.1]), "rounding or a bug is not decided"),
        (Size(0.1, [3.0, None]), "not rounding"),
    ],
)
def test_what_rounding_does(size: Size, said: str) -> None:
    assert size.text.startswith(said)
    assert size.beside("it differs").startswith("not rounding" if size.is_bug else "it differs; ")


@pytest.mark.parametrize(
    ("plan", "environment", "bug"),
    [
        ({}, {}, True),
        ({}, {"float32_matmul_precision": "high"}, False),
        ({}, {"allow_tf32_matmul": True}, False),
        ({"model": {"name": "m", "quantization": "torchao"}}, {}, False),
    ],
)
def test_float32_that_is_rounded_more_is_not_judged_as_float32(
    tmp_path: Path, plan: dict[str, object], environment: dict[str, object], bug: bool
) -> None:
    run = sampled(tmp_path)  # logprobs up to 0.25 nats apart
    header = run.header
    plan = {**header.plan, "dtype": "float32", **plan}
    run.header = replace(header, plan=plan, environment={**header.environment, **environment})
    assert RunSection(run).answer.startswith("not rounding: ") == bug


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["", "splits_by_rows", "wrong_tail", "shared_scale", "reads_neighbour", "batch_mean"])
def test_a_planted_bug_is_no_rounding_in_float32(run: Command, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And another order of the same sums is."""
    import nondet.sampling.model as models

    load, plants = models.load_model, ExitStack()

    def planted(*args: object, **how: object) -> models.LoadedModel:
        made = load(*args, **how)
        if fault:
            plants.enter_context(wrapped(made.model, "model.layers.1.mlp.down_proj", FUNCTIONS[fault]))
        return made

    monkeypatch.setattr(models, "load_model", planted)
    few = ("--load", "others=6,targets=4,prompt=4-40,tokens=4-8", "--max-tokens", 8, "--dtype", "float32")
    assert run("sample", "--n", 12, "--impl", "stock", *few, "--out", "a.jsonl")[0] == 0
    found = RunSection(read_run(Path("a.jsonl")))
    bug = fault not in ("", "splits_by_rows")
    assert found.verdicts[0].is_fault
    assert found.answer.startswith("not rounding: ") == bug
    assert ("as small as rounding makes it" in found.answer) != bug
