"""Encoders: vectors alone and in batches, what that does to neighbours, and whatever is no encoder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from nondet import embed
from nondet.cli import main
from nondet.core.records import Run, Status
from nondet.core.runfile import open_run, read_run
from nondet.embed import ALONE, build_arms, collect, describe, encode, load_encoder, nearest, rank_changes, vectors
from nondet.reports.content import headline
from nondet.sampling.model import LoadedModel, embedded_folder
from nondet.verdict.gate import judge
from tests.build import tiers

WORDS = "the cat sat on a mat while other cats ran over hills and far away from every dog in town".split()  # noqa: SIM905
TEXTS = [" ".join(WORDS[i % 7 : i % 7 + 2 + (5 * i) % 11]) for i in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with random weights and a tokenizer of words, as somebody would have saved them."""
    where = tmp_path_factory.mktemp("encoder")
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[CLS]", "[SEP]", "[UNK]", *dict.fromkeys(WORDS)])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))  # noqa: S106 - a token of a vocabulary
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = [("[CLS]", 1), ("[SEP]", 2)]
    words.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=marks)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", model_max_length=32)  # noqa: S106 - the same
    tokenizer.save_pretrained(where)
    torch.manual_seed(3)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    BertModel(BertConfig(vocab_size=len(vocabulary), max_position_embeddings=32, **sizes)).save_pretrained(where)
    return where


@pytest.fixture(scope="module")
def encoder(folder: Path) -> LoadedModel:
    return load_encoder(str(folder), "float32", "cpu")


def measured(loaded: LoadedModel, path: Path, *impls: str) -> Run:
    ids, cut = encode(loaded, TEXTS)
    plan = describe(loaded, TEXTS, ids, cut, impls=list(impls), batch=4, seed=0)
    writer = open_run(path, command="embed", plan=plan, environment={"torch": "2"}, force=True)
    collect(loaded, ids, impls, writer, batch=4, seed=0)
    writer.finish()
    return read_run(path)


def test_every_arm_computes_the_same_vectors_but_for_roundings(encoder: LoadedModel) -> None:
    ids, cut = encode(encoder, ["cat " * 100, "dog"])  # 32 positions, and the special tokens are among them
    assert (len(ids[0]), ids[0][-1], cut) == (32, 2, 1)
    ids, cut = encode(encoder, TEXTS)
    assert cut == 0
    arms = build_arms([len(row) for row in ids], 4, seed=0)
    assert arms[0].name == ALONE
    assert all(sorted(i for batch in arm.batches for i in batch) == list(range(8)) for arm in arms)
    with torch.no_grad():
        hidden = [encoder.model(input_ids=torch.tensor([row])).last_hidden_state[0] for row in ids]
    expected = torch.stack([torch.stack([h.mean(0), h[0]]) for h in hidden])
    for arm in arms:
        torch.testing.assert_close(vectors(encoder, ids, arm), expected, rtol=1e-4, atol=1e-5)


def test_ranks_are_by_cosine_and_ties_by_index() -> None:
    x = torch.tensor([[1.0, 0.0], [0.9, 0.1], [5.0, 1.1], [0.0, 1.0]])
    assert nearest(x, 2).tolist() == [[1, 2], [2, 0], [1, 0], [2, 1]]
    assert nearest(torch.ones(3, 2), 2).tolist() == [[1, 2], [0, 2], [0, 1]]
    ranks = torch.tensor([[1, 2], [0, 2], [0, 1]])
    other = torch.tensor([[2, 1], [0, 1], [0, 1]])
    assert rank_changes(ranks, other) == {"top1_changed": 1, "topk_changed": 1, "topk_reordered": 1}
    assert embed.cosine_distances(x, x).tolist() == [0.0] * 4
    assert embed.cosine_distances(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]])).tolist() == [1.0]


def test_a_batch_that_changes_bits_is_seen_and_counted(encoder: LoadedModel, tmp_path: Path) -> None:

    def faulty(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * (1 + 2.0**-20) if len(output) > 1 else output

    handle = encoder.model.embeddings.register_forward_hook(faulty)
    run = measured(encoder, tmp_path / "faulty.jsonl", "stock")
    handle.remove()
    [row] = run.rows
    assert row.status == Status.DIVERGENT
    assert row.replays_parted == 0
    by_arm = {(n.arm, n.pooling): n for n in run.neighbours}
    assert {arm for arm, _ in by_arm} == set(row.values) - {ALONE}
    shuffled = [n for (arm, _), n in by_arm.items() if "shuffled" in arm]
    assert all(n.parted == 8 and n.max_ulp > 0 and 0 < n.cosine_distance < 1e-6 for n in shuffled)
    clean = measured(encoder, tmp_path / "clean.jsonl", "invariant")
    assert [r.status for r in clean.rows] == [Status.IDENTICAL]
    assert {n.parted for n in clean.neighbours} == {0}
    ran = {name for p in clean.embed_passes for name in p.ran}
    assert any(name.startswith("replaced: linear") for name in ran)
    assert [name for name in ran if name.startswith(("at risk", "left stock"))] == []

    def noisy(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        """So far from what it was that other texts become the nearest."""
        row = torch.arange(len(output)).view(-1, 1, 1) % 3
        return output + row * torch.randn(output.shape[-1], generator=torch.Generator().manual_seed(1)) * 3

    handle = encoder.model.embeddings.register_forward_hook(noisy)
    run = measured(encoder, tmp_path / "noisy.jsonl", "stock")
    handle.remove()
    assert max(n.top1_changed for n in run.neighbours) > 0
    assert max(n.topk_reordered for n in run.neighbours) > 0  # of 8 texts the 7 nearest are always the same set


def test_what_cannot_pack_says_so(encoder: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = encoder.model.forward

    def without_positions(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return forward(input_ids=input_ids, attention_mask=attention_mask)

    def without_masks(input_ids: torch.Tensor, attention_mask: torch.Tensor, **others: Any) -> Any:
        mask = attention_mask if attention_mask.dim() == 2 else None
        return forward(input_ids=input_ids, attention_mask=mask, **others)

    for broken, reason in ((without_positions, "can't pack"), (without_masks, "does not keep packed texts apart")):
        monkeypatch.setattr(encoder.model, "forward", broken)
        run = measured(encoder, tmp_path / "run.jsonl", "stock")
        [left_out] = [p for p in run.embed_passes if p.reason]
        assert left_out.arm.startswith("packed")
        assert reason in left_out.reason
        assert len(run.rows[0].values) == 5


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts, out = tmp_path / "texts.txt", tmp_path / "run.jsonl"
    texts.write_text("\n".join([*TEXTS, "<script>\x1b[31m"]) + "\n")
    command = ["embed", "--model", str(folder), "--texts", str(texts), "--batch", "4", "--device", "cpu"]
    command += ["--impl", "invariant", "--out", str(out), "--fail-on", "divergent"]
    assert main([*command, "--report", str(tmp_path / "r.html"), "--report", str(tmp_path / "r.md")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "invariant: no divergence observed: 9 vectors bit-identical one at a time and in 5 other arms" in shown
    for suffix in ("html", "md"):
        page = (tmp_path / f"r.{suffix}").read_text()
        assert "packed, 4 in a row" in page
        assert "layer_norm" in page
        assert "\x1b" not in page
    before = out.read_bytes().splitlines()[:-1]
    assert main([*command, "--resume"]) == 0
    assert out.read_bytes().splitlines()[:-1] == before
    assert main(["gate", str(out)]) == 0


def test_bad_input_is_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts, single, out = tmp_path / "texts.txt", tmp_path / "single.txt", tmp_path / "run.jsonl"
    texts.write_text("a cat\na dog\n")
    single.write_text("a cat\n")
    places = {"folder": folder, "texts": texts, "single": single, "embedded": embedded_folder()}
    for argv, word in [
        (["--texts", "{texts}"], "--model"),
        (["--model", "{folder}"], "--texts"),
        (["--model", "{embedded}", "--texts", "{texts}"], "no encoder"),
        (["--model", "./nowhere", "--texts", "{texts}"], "nowhere"),
        (["--model", "{folder}", "--texts", "missing.txt"], "missing.txt"),
        (["--model", "{folder}", "--texts", "{single}"], "two or more"),
        (["--model", "{folder}", "--texts", "{texts}", "--batch", "1"], "--batch 1"),
        (["--model", "{folder}", "--texts", "{texts}", "--dtype", "int8"], "'int8'"),
        (["--model", "{folder}", "--texts", "{texts}", "--impl", "fast"], "'fast'"),
    ]:
        assert main(["embed", *(part.format(**places) for part in argv), "--device", "cpu", "--out", str(out)]) == 2
        seen = capsys.readouterr()
        assert word in seen.err
        assert (seen.err.count("\n"), seen.out, out.exists()) == (1, "", False)

    # one with a decoder, one whose weights are missing, and one whose index names a pickle
    config = json.loads((folder / "config.json").read_text())
    for other, index, word in [
        ({"model_type": "t5", "architectures": ["T5Model"]}, "", "an encoder with a decoder"),
        (config, "", "weights"),
        (config, '{"weight_map": {"a": "x.bin"}}', "'x.bin'"),
    ]:
        where = shutil.copytree(folder, tmp_path / "encoder", ignore=shutil.ignore_patterns("*.safetensors"))
        if index:
            (where / "model.safetensors.index.json").write_text(index)
        (where / "config.json").write_text(json.dumps(other))
        assert main(["embed", "--model", str(where), "--texts", str(texts), "--device", "cpu"]) == 2
        assert word in capsys.readouterr().err
        shutil.rmtree(where)


def rolled(x: torch.Tensor) -> torch.Tensor:
    return x.roll(1, 0) if len(x) > 3 else x


def shared_scale(x: torch.Tensor) -> torch.Tensor:
    size = x.abs().amax()
    return (x / size * 127).round() * size / 127


FAULTS: list[tuple[Any, str, str]] = [
    (rolled, "other requests' data in a request's row, not rounding", ""),
    (shared_scale, "other requests' data in a request's row, not rounding", ""),
    (lambda x: x + 0.01 * x.mean(0, keepdim=True), "other requests' data in a request's row, not rounding", ""),
    (lambda x: x * (1 + 2.0**-9 * (torch.arange(x.shape[-1]) > 9)) if len(x) > 1 else x, "not rounding: ", "beside it"),
    (None, "not rounding: ", "padding"),  # its mask is lost
]


@pytest.mark.parametrize("dtype", tiers(["float32", "bfloat16"], ["float16"]))
def test_the_first_sentence_says_whether_vectors_differ_by_rounding(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """A sound encoder's differences are, in each format; planted faults are named, however small they are."""
    loaded = load_encoder(str(folder), dtype, "cpu")
    forward, said = loaded.model.forward, []
    weights = [x.clone() for x in loaded.model.state_dict().values()]

    def unmasked(input_ids: torch.Tensor, attention_mask: torch.Tensor, **others: Any) -> Any:
        mask = attention_mask if attention_mask.dim() == 4 else torch.ones_like(attention_mask)
        return forward(input_ids=input_ids, attention_mask=mask, **others)

    for fault, *_ in [(lambda x: x, "rounding: ", ""), *FAULTS]:

        def planted(_: Any, __: Any, out: torch.Tensor, fault: Any = fault) -> torch.Tensor:
            return fault(out).to(out.dtype)

        with monkeypatch.context() as patched:
            handle = loaded.model.embeddings.register_forward_hook(planted) if fault else None
            if handle is None:
                patched.setattr(loaded.model, "forward", unmasked)
            run = measured(loaded, tmp_path / "run.jsonl", "stock")
            if handle is not None:
                handle.remove()
        said.append(headline(run, judge(run)).removeprefix("stock: "))
    assert said[0].startswith(("rounding: ", "no divergence observed")), said[0]
    for (_, begins, looks), text in zip(FAULTS, said[1:], strict=True):
        assert text.startswith(begins), text
        assert looks in text, text
    assert all(torch.equal(x, y) for x, y in zip(weights, loaded.model.state_dict().values(), strict=True))
