"""`nondet trace --record` and `--against`: planted differences are named, sound pairs are not; no file is trusted."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from nondet.cli import main
from nondet.core.records import Control, OperatorCompared, Record, TraceVerdict
from nondet.core.runfile import read_run
from nondet.errors import UserError
from nondet.trace.against import LONG, Against, played, read_recording, record, renamed, text_of
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
    *records, verdict = Against(model, read_recording(path), names).run()
    assert isinstance(verdict, TraceVerdict)
    return verdict, records


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
    """A drawn change of a result, and whether it is rounding: last bits here and there, or a hundredth."""
    every = rng.randint(2, 9)

    def moved(x: torch.Tensor, by: float) -> torch.Tensor:
        flat = x.detach().clone().reshape(-1)
        flat[::every] = flat[::every] * (1 + by)
        return flat.reshape(x.shape)

    by = {"rounding": torch.finfo(torch.float32).eps, "not rounding": rng.choice((-0.01, 0.01))}
    kind = rng.choice([*by])
    return kind, lambda x: moved(x, by[kind])


@pytest.mark.slow
@pytest.mark.parametrize("draws", tiers([(1, 2, 4)], [(range(20),)]))
def test_a_planted_difference_in_one_operator_is_named(draws: Sequence[int], tmp_path: Path) -> None:
    for seed in draws:
        rng = random.Random(seed)  # noqa: S311 - faults, not secrets
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
        assert f"taking `{differing[0].call}` of {differing[0].module} from the" in verdict.sentences[1], case


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of `model_of("qwen3")`."""
    path = tmp_path_factory.mktemp("recording") / "qwen3.safetensors"
    record(model_of("qwen3"), TOKENS, path, ABOUT)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kind", tiers(["gemma2", "qwen3_moe"], ["llama", "mistral"]))
def test_a_model_does_not_differ_from_itself(kind: str, tmp_path: Path) -> None:
    dtype = torch.float32 if kind in ("qwen3_moe", "llama") else torch.bfloat16
    model, path = model_of(kind, dtype), tmp_path / "own.safetensors"
    record(model, TOKENS, path, ABOUT)
    verdict, records = compared(model, path)
    assert verdict.finding == "no divergence observed", verdict.sentences
    assert not [op for op in operators(records) if op.differing]
    calls = sum(op.calls for op in operators(records))
    assert verdict.sentences[0].startswith(f"no operator differs: 0 of {calls} calls have other bits (")
    assert "at 95% fewer than" in verdict.sentences[0]
    assert {"model.embed_tokens", "model.layers.*.self_attn", "lm_head"} <= {op.module for op in operators(records)}


def test_another_order_of_one_sum_is_rounding_and_a_lost_term_is_not(recording: Path) -> None:
    def halves(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x[..., :48] @ w[:, :48].T + x[..., 48:] @ w[:, 48:].T

    for verdict, product in (("rounding", halves), ("not rounding", lambda x, w: x[..., 1:] @ w[:, 1:].T)):
        model = model_of("qwen3")
        for layer in model.model.layers:
            down = layer.mlp.down_proj
            down.forward = lambda x, down=down, product=product: product(x, down.weight)
        found, records = compared(model, recording)
        (op,) = [op for op in operators(records) if op.differing]
        assert (found.finding, op.verdict, op.module) == (verdict, verdict, "model.layers.*.mlp.down_proj")
        assert (op.times <= 1) == (verdict == "rounding")
        assert "what two orders of the same sum can be apart" in found.sentences[0]


def test_what_no_call_explains_is_not_called_clean(recording: Path) -> None:
    model = model_of("qwen3")
    plain = model.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        out.logits = out.logits * 1.01
        return out

    model.forward = scaled
    verdict, _ = compared(model, recording)
    assert verdict.finding == "not decided"
    assert "logits have other bits; code between the calls gives other logits than" in verdict.sentences[-1]

    draws = iter(range(1000))
    down = model_of("qwen3")
    layer = down.model.layers[0].mlp.down_proj
    layer.forward = lambda x: x @ layer.weight.T + next(draws)
    with pytest.raises(UserError, match="the logits change when the same tokens are computed again"):
        compared(down, recording)


def test_other_weights_are_said_and_not_taken_for_another_implementation(recording: Path) -> None:
    model = model_of("qwen3")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] *= 2
    verdict, records = compared(model, recording)
    assert verdict.finding == "other weights"
    assert "12 calls have other weights: model.layers.*.mlp.up_proj: linear (3), Linear (3); " in verdict.sentences[0]
    assert not [op for op in operators(records) if op.differing]
    assert "model.layers.*.mlp.up_proj: linear (3), Linear (3)" in notes(records)["not compared, other weights"]


def rewritten(path: Path, to: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> Path:
    """The recording with another header or other tensors."""
    with safe_open(str(path), framework="pt") as file:
        header, tensors = json.loads(file.metadata()["nondet"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(header, tensors)
    save_file(tensors, str(to), metadata={"nondet": json.dumps(header)})
    return to


def test_modules_of_other_names_are_listed_and_a_file_maps_them(recording: Path, tmp_path: Path) -> None:
    def other_names(header: dict[str, Any], _: Any) -> None:
        for calls in header["calls"]:
            for call in calls:
                call[0] = call[0].replace("model.layers.", "decoder.h.").replace("mlp", "ffn")

    path = rewritten(recording, tmp_path / "other.safetensors", other_names)
    verdict, records = compared(model_of("qwen3"), path)
    assert verdict.finding == "no divergence observed"
    assert "calls could not be compared, and are listed" in verdict.sentences[0]
    listed = notes(records)
    assert "decoder.h.*.ffn.down_proj: linear (6)" in listed["not compared, only in the recording"]
    assert "model.layers.*.mlp.down_proj: linear (6)" in listed["not compared, only in this model"]
    names = {"decoder.h.*": "model.layers.*", "decoder.h.*.ffn": "model.layers.*.mlp"}
    verdict, records = compared(model_of("qwen3"), path, **names)
    assert "could not be compared" not in verdict.sentences[0]
    assert [name for name in notes(records) if name != "recording"] == []
    assert renamed("decoder.h.10.ffn.up_proj", names) == "model.layers.10.mlp.up_proj"
    assert renamed("decoder.h.x", names) == "decoder.h.x"


def test_what_a_bounded_recording_leaves_out_is_counted(tmp_path: Path) -> None:
    model, path = model_of("qwen3"), tmp_path / "small.safetensors"
    recorded = record(model, TOKENS, path, ABOUT, partial(played, model, most=150_000))
    assert 0 < recorded.left_out < sum(map(len, recorded.calls))
    assert path.stat().st_size < 150_000 + 250_000
    verdict, records = compared(model, path)
    assert "could not be compared" in verdict.sentences[0]
    assert f"{recorded.left_out:,} calls left out of it" in notes(records)["recording"]


def test_a_recording_reaches_attention_beyond_one_tile_of_keys(tmp_path: Path) -> None:
    """A completion of 64 tokens does not: what differs from 129 keys on is named where the text is repeated."""
    model, path = model_of("qwen3", max_position_embeddings=512), tmp_path / "long.safetensors"
    loaded: Any = SimpleNamespace(model=model, device="cpu", context=512)

    def beyond(out: torch.Tensor) -> torch.Tensor:
        return torch.cat([out[:, :128], out[:, 128:] * 1.01], 1)

    for least, finding in ((0, "no divergence observed"), (LONG, "not rounding")):
        record(model, text_of(loaded, TOKENS[:4], 64, least), path, ABOUT)
        with planted(model, "attention", beyond):
            verdict, records = compared(model, path)
        assert verdict.finding == finding, verdict.sentences
    (op,) = [op for op in operators(records) if op.differing]
    assert (op.call, op.module, op.differing) == ("attention", "model.layers.*.self_attn", 1)
    loaded.context = 200
    text = text_of(loaded, TOKENS[:4], 64, LONG)
    made = record(model, text, path, ABOUT)
    assert (len(text), list(map(len, made.texts))) == (199, [1, 64, 199])
    assert text[:60] in (text[60 + i :][:60] for i in range(10))


def test_no_recording_is_trusted(recording: Path, tmp_path: Path) -> None:
    model, bad = model_of("qwen3"), tmp_path / "bad.safetensors"
    whole = recording.read_bytes()
    with pytest.raises(UserError, match="there is no recording"):
        read_recording(bad)
    torch.save({"nondet": torch.zeros(2)}, bad)  # a pickle
    with pytest.raises(UserError, match="is no recording"):
        read_recording(bad)
    for data in (whole[:3000], b"", (2**40).to_bytes(8, "little") + whole[8:], whole[:-9]):
        bad.write_bytes(data)
        with pytest.raises(UserError, match="is no recording"):
            read_recording(bad)

    def deep(header: dict[str, Any], _: Any) -> None:
        header["calls"] = eval("[" * 90 + "]" * 90)  # noqa: S307 - a literal

    def swapped(header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        header["logits"].reverse()
        tensors[header["logits"][0]].view(-1)[3] += 1

    def without(header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        del tensors[header["logits"][0]]

    table: list[tuple[Callable[[Any, Any], Any], str]] = [
        (deep, "is no recording"),
        (lambda header, _: header.update(format="another"), "this version of nondet"),
        (lambda header, _: header["calls"].pop(), "this version of nondet"),
        (lambda header, _: header.update(tokens=[]), "is no recording"),
        (lambda header, _: header.update(threads=-1), "is no recording"),
        (lambda header, _: header.update(tokens=[4096] * 24), "has token 4096"),
        (swapped, "is damaged"),
        (without, "is damaged"),
    ]
    for change, wanted in table:
        with pytest.raises(UserError, match=wanted):
            compared(model, rewritten(recording, bad, change))


@pytest.mark.slow
def test_as_typed(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stock against `batch_invariant()`, and names from a stranger's file, which reach no terminal as they are."""
    path, out, page = tmp_path / "stock.safetensors", tmp_path / "run.jsonl", tmp_path / "r.html"
    model = ["--model", str(tiny_folder), "--device", "cpu"]
    prompt = ["--prompt", "The following exceptions", "--max-tokens", "20", "--dtype", "float32", "--threads", "1"]
    assert main(["trace", *model, *prompt, "--record", str(path)]) == 0
    said = capsys.readouterr().err
    assert "recorded: " in said
    assert f"--against {path}" in said
    assert main(["trace", *model, *prompt, "--record", str(path)]) == 2  # it exists

    against = ["trace", *model, "--against", str(path), "--out", str(out), "--force"]
    assert main([*against, "--fail-on", "divergent"]) == 0
    assert "no operator differs: 0 of " in " ".join(capsys.readouterr().out.split())
    report = ["--report", str(page), "--report", str(page.with_suffix(".md"))]
    assert main([*against, "--impl", "invariant", "--fail-on", "divergent", *report]) == 3
    run = read_run(out)
    differing = [op for op in run.operators_compared if op.differing]
    assert {op.verdict for op in differing} == {"rounding"}
    verdict = run.trace_verdicts[0]
    assert verdict.finding == "rounding"
    assert verdict.sentences[0].startswith(f"the first operator to differ is `{differing[0].call}` of ")
    assert "from the recording gives its logits, bit for bit" in verdict.sentences[-1]
    assert "the first operator to differ is" in " ".join(capsys.readouterr().out.split())
    for text in (page.read_text(encoding="utf-8"), page.with_suffix(".md").read_text(encoding="utf-8")):
        assert "Operator by operator: " in text
        assert differing[0].bound in text

    def strange(header: dict[str, Any], _: Any) -> None:
        header["made_by"] = "<script>alert(1)</script>\x1b[31m"
        for calls in header["calls"]:
            calls[0][0] = "model.\x1b[31m<b>x</b>"

    path = rewritten(path, tmp_path / "strange.safetensors", strange)
    against[against.index("--against") + 1] = str(path)
    assert main([*against, "-v", *report]) == 0
    assert "\x1b[31m" not in "".join(capsys.readouterr())
    assert not re.search("<script>alert|<b>x", page.read_text(encoding="utf-8"))

    names = tmp_path / "names.json"
    for content in ("[1]", '{"a": 1}', "[" * 100_000, ""):
        names.write_text(content, encoding="utf-8")
        assert main([*against, "--match", str(names)]) == 2
        assert "maps no names" in capsys.readouterr().err
    both = ["--record", "x.safetensors", "--against", str(path)]
    refused = (["--match", str(names)], [*both[2:], "--prompt", "x"], [*both[2:], "--run", "x"], ["--record", "x.pt"])
    for options in (*refused, both):
        assert main(["trace", *model, *options]) == 2
