"""Loading a model: what is wrong with it is one clear line, and nothing is made up in its place."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers

import nondet.embedded
from nondet.embedded import DEFAULT_PROMPT
from nondet.errors import UserError
from nondet.sampling.model import LoadedModel, check_lengths, embedded_folder, load_model, random_config


def write(name: str, made: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """A file of the folder, of what it held."""

    def change(folder: Path) -> None:
        path = folder / name
        path.write_bytes(made(path.read_bytes() if path.exists() else b""))

    return change


def text(name: str, content: str) -> Callable[[Path], None]:
    return write(name, lambda _: content.encode())


def cut(name: str, to: int) -> Callable[[Path], None]:
    return write(name, lambda held: held[:to])


def change_config(**changes: object) -> Callable[[Path], None]:
    return write("config.json", lambda held: json.dumps(json.loads(held) | changes).encode())


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def refused(good: Path, folder: Path, spoil: Callable[[Path], None], said: str) -> None:
    """A spoiled copy of a model is, in one line that names it."""
    shutil.copytree(good, folder)
    spoil(folder)
    with pytest.raises(UserError) as caught:
        load_model(str(folder), "bfloat16", "cpu")
    assert said in str(caught.value)
    assert str(folder) in str(caught.value)
    assert caught.value.hint
    assert "\n" not in str(caught.value)


def sharded(*names: str) -> Callable[[Path], None]:
    """The weights under the first name, in an index that names them all."""

    def change(folder: Path) -> None:
        place = folder / "shard.safetensors"
        (folder / "model.safetensors").rename(place)
        keys = load_file(place)
        index = {"metadata": {}, "weight_map": {key: names[i % len(names)] for i, key in enumerate(keys)}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


def fifo(folder: Path) -> None:
    sharded("shard.safetensors", "b.safetensors")(folder)
    os.mkfifo(folder / "b.safetensors")


def test_a_broken_folder_is_one_clear_line(tiny_folder, tmp_path_factory, monkeypatch) -> None:
    """Half-written, truncated, mismatched and foreign models are refused: none runs with random numbers in it. Weights
    are safetensors within their folder: what names a pickle or a file elsewhere is refused before anything is opened.
    """
    monkeypatch.setattr(torch, "load", None)  # called, it would raise
    for spoil, said in [
        (without("config.json"), "no config.json"),
        (without("model.safetensors"), "no file named model.safetensors"),
        *((cut("model.safetensors", size), "weights can't be loaded") for size in (60_000, 20, 0)),
        (without("tokenizer.json"), "no tokenizer"),
        (cut("tokenizer.json", 200), "tokenizer can't be loaded"),
        (cut("config.json", 40), "config.json can't be used"),
        (change_config(model_type="nosuch"), "config.json can't be used"),
        (change_config(num_hidden_layers=3, layer_types=["full_attention"] * 3), "tensors are missing"),
        (change_config(hidden_size=32), "shapes of its weights"),
        (change_config(vocab_size=100), "shapes of its weights"),
        (change_config(model_type="bert", architectures=["BertModel"]), "not a causal language model"),
        (change_config(architectures=["Qwen3ForSequenceClassification"]), "not a causal language model"),
        (change_config(model_type="t5", architectures=["T5ForConditionalGeneration"]), "not a causal language model"),
        (sharded("shard.safetensors", "x.bin"), "'x.bin'"),
        (sharded("x.safetensors.bin"), "'x.safetensors.bin'"),
        *((sharded(f"{out}shard.safetensors"), "out of its folder") for out in ("../", "a/../../", "/etc/", "..\\")),
        (fifo, "not a regular file"),
        (text("model.safetensors.index.json", '{"weight_map": {"a": "x.bin"}}'), "'x.bin'"),
        (text("model.safetensors.index.json", '{"weight_map": {"a": 1}}'), "names 1 as its weights"),
        (text("model.safetensors.index.json", '{"weight_map": []}'), "is no index"),
        (text("model.safetensors.index.json", "[" * 100_000), "is no index"),
        (text("adapter_config.json", '{"base_model_name_or_path": "other"}'), "holds an adapter"),
        (change_config(transformers_weights="adapter_model.bin"), "'adapter_model.bin'"),
        (change_config(transformers_weights="../model.safetensors"), "out of its folder"),
    ]:
        refused(tiny_folder, tmp_path_factory.mktemp("case") / "model", spoil, said)


def test_a_hub_cache_of_links_loads_and_what_is_loaded_is_digested(tiny_folder: Path, tmp_path: Path) -> None:
    """Links to ../../blobs are followed; the digest is of the shards that the index names, and of nothing else."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    shutil.copytree(tiny_folder, blobs)
    sharded("shard.safetensors")(blobs)
    snapshot.mkdir(parents=True)
    for path in list(blobs.iterdir()):
        blob = path.rename(blobs / f"sha-{path.name.replace('.', '-')}")  # a blob has no suffix
        (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
    whole = load_model(str(tiny_folder), "bfloat16", "cpu")
    loaded = load_model(str(snapshot), "bfloat16", "cpu")
    assert loaded.identity["weights"] == whole.identity["weights"]
    (snapshot / "repro.inputs.safetensors").write_bytes(b"not a weight")
    assert load_model(str(snapshot), "bfloat16", "cpu").identity == loaded.identity
    nothing = f"sha256:{hashlib.sha256().hexdigest()[:16]}"
    assert loaded.identity["weights"] != nothing
    blob = blobs / "sha-shard-safetensors"
    blob.write_bytes(blob.read_bytes()[:-1] + b"\x01")
    assert load_model(str(snapshot), "bfloat16", "cpu").identity["weights"] != loaded.identity["weights"]


def test_a_cached_model_of_the_hub_is_looked_at_too(tiny_folder, tmp_path, monkeypatch) -> None:
    """What a name of the hub stands for is no more to be trusted than a folder: its shards load, a pickle does not."""
    from huggingface_hub import constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    model = tmp_path / "models--some--model"
    shutil.copytree(tiny_folder, model / "snapshots" / commit)
    text("tokenizer_config.json", '{"tokenizer_class": "PreTrainedTokenizerFast"}')(model / "snapshots" / commit)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("nondet.sampling.model.offline", lambda _: True)
    sharded("shard.safetensors")(model / "snapshots" / commit)
    assert load_model("some/model", "bfloat16", "cpu").identity["commit"] == commit
    (model / "snapshots" / commit / "shard.safetensors").rename(model / "snapshots" / commit / "model.safetensors")
    sharded("x.bin")(model / "snapshots" / commit)
    with pytest.raises(UserError, match=r"'x\.bin'"):
        load_model("some/model", "bfloat16", "cpu")


def test_offline_hub_names_fail_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network a hub name is one line, and no minute of retries."""
    from huggingface_hub import constants

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", Mock(side_effect=ConnectionError("no route")))
    for offline, said in [(True, "no copy is cached"), (False, "can't be reached")]:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        with pytest.raises(UserError, match=said):
            load_model("nobody/no-such-model", "bfloat16", "cpu")


def test_code_from_a_repository_is_not_run_unasked(tiny_folder: Path, tmp_path: Path) -> None:
    """A folder that brings code is refused by default, and its code has not run."""
    flag = tmp_path / "ran"

    def bring(folder: Path) -> None:
        text("modeling_x.py", f"open({str(flag)!r}, 'w').close()\n")(folder)
        classes = {"AutoConfig": "modeling_x.X", "AutoModelForCausalLM": "modeling_x.Y"}
        change_config(model_type="x", auto_map=classes)(folder)

    refused(tiny_folder, tmp_path / "model", bring, "code of its own")
    assert not flag.exists()


def test_prompts_must_fit_the_context(tiny: LoadedModel) -> None:
    """Prompt and completion together stay within the model's positions."""
    check_lengths(tiny, [1] * 200, 56)
    beyond = r"exceed the model's context of 256\. Use --max-tokens 56"
    for given, new, said in [(200, 57, beyond), (256, 1, "Shorten the"), (0, 1, "no tokens"), (1, 0, "tokens 0")]:
        with pytest.raises(UserError, match=said):
            check_lengths(tiny, [1] * given, new)


def test_a_loaded_model_is_what_was_saved(tiny: LoadedModel, tiny_folder: Path) -> None:
    """Weights, tokenizer and limits are the folder's own: text survives a round trip, no tokenizer is guessed."""
    loaded = tiny.model.state_dict()
    for name, value in load_file(tiny_folder / "model.safetensors").items():
        assert torch.equal(loaded[name], value)
    said = "Héllo  wörld\n\tTwo."
    assert tiny.decode(tiny.encode(said)) == said
    assert tiny.encode(said) == Tokenizer.from_file(str(tiny_folder / "tokenizer.json")).encode(said).ids
    assert (tiny.context, tiny.eos, tiny.identity["parameters"]) == (256, (0,), tiny.model.num_parameters())


# Random models by name: what is made, always the same, and what is refused.


def test_a_random_model_is_the_same_every_time() -> None:
    """Its name decides its weights, whatever was drawn before, and its tokenizer is the embedded one."""
    torch.manual_seed(1)
    once = load_model("random:qwen3-1x128", "float32", "cpu")
    torch.manual_seed(2)
    again = load_model("random:qwen3-1x128", "float32", "cpu")
    assert once.name == "random:qwen3-1x128"
    assert (once.identity["class"], once.identity["layers"], once.identity["hidden"]) == ("Qwen3ForCausalLM", 1, 128)
    for (name, a), (_, b) in zip(once.model.named_parameters(), again.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.dim() == 1 or a.std() > 0, name
    assert once.encode_plain("one word") == load_model(None, "float32", "cpu").encode_plain("one word")
    for architecture in ["qwen3", "llama", "mistral", "gemma3_text"]:  # each that is offered computes
        loaded = load_model(f"random:{architecture}-2x128", "bfloat16", "cpu")
        with torch.no_grad():
            logits = loaded.model(torch.tensor([loaded.encode("one word")])).logits
        assert torch.isfinite(logits).all()
        assert logits.float().std() > 0
    # Qwen3-0.6B's proportions at its width; published ones have the parameters that their names say
    config = random_config("random:qwen3-12x1024", 4096)
    sizes = (config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.num_key_value_heads)
    assert (*sizes, config.intermediate_size, config.head_dim) == (12, 1024, 16, 8, 3072, 128)
    for name, billions in (("qwen3-0.6b", 0.596), ("qwen3-8b", 8.19)):
        c = random_config(f"random:{name}", 4096)
        heads = (c.num_attention_heads + c.num_key_value_heads) * c.head_dim
        layer = 2 * c.hidden_size * heads + 3 * c.hidden_size * c.intermediate_size
        count = c.num_hidden_layers * layer + c.vocab_size * c.hidden_size * (1 if c.tie_word_embeddings else 2)
        assert abs(count / 1e9 - billions) < 0.01, name


def test_other_names_and_dtypes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, with what was meant; a path that isn't there is not looked up on the hub, a file is no folder."""
    (tmp_path / "file").write_text("x")
    for name, dtype, words in [
        ("random:qwen3", "float32", "makes no sense"),
        ("random:qwen-12x1024", "float32", "qwen3"),
        ("random:qwen3-0x1024", "float32", "0 layers"),
        ("random:qwen3-12x1000", "float32", "multiple of 128"),
        (str(tmp_path / "nothing"), "bfloat16", "no model folder"),
        (str(tmp_path / "file"), "bfloat16", "is a file"),
        *(("/nowhere", dtype, dtype) for dtype in ("bf16", "int8", "float8_e4m3fn", "float64")),
    ]:
        with pytest.raises(UserError, match=words):
            load_model(name, dtype, "cpu")
    # bfloat16 on a GPU that only emulates it would measure the emulation
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Old GPU")
    with pytest.raises(UserError, match="Old GPU"):
        load_model("/nowhere", "bfloat16", "cuda")


# The model that ships with nondet: loads offline, is what its card says, and its parts belong together.

FOLDER = Path(nondet.embedded.__file__).parent
TEXTS = [
    "Return the sum of the values.\n\n    indented\tand tabbed  \r\n",
    "Grüße, 你好, żółć, \N{GRINNING FACE}\u200d\N{SNOWMAN}, e\u0301 is not \u00e9",
    "\x00\x07\x7f \ufffd\ufeff",
]


def test_the_embedded_model_is_what_its_card_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default needs no network and no argument. A clone stays small, the dtype on disk is the one that the
    measurements are about, and the card's figures are those of the shipped files, not of an earlier training.

    Text comes back byte for byte: a tokenizer that normalizes would hide where completions differ. Documentation is
    likely under the model and its tokens in another order are not: weights and tokenizer fit together."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    loaded = load_model(None, "bfloat16", "cpu")
    assert (loaded.name, loaded.context, embedded_folder()) == ("embedded", 1024, FOLDER)
    path = FOLDER / "model.safetensors"
    assert path.stat().st_size <= 9_000_000
    with safe_open(path, "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118  # not a dict
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert f"{loaded.model.num_parameters():,}" in card
    assert f'"{DEFAULT_PROMPT}"' in card
    assert set(pre_tokenizers.ByteLevel.alphabet()) <= set(loaded.tokenizer.get_vocab()), "each byte is a token"
    for text in [*TEXTS, "".join(map(chr, range(0x800))) + "\U0001f600\U0010ffff\u3042"]:
        assert loaded.decode(loaded.encode(text)) == text
    text = "Return the sum of the values in the sequence. If the sequence is empty, return the default value."
    ids = torch.tensor([loaded.encode(text)])
    shuffled = ids[:, torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(0))]
    with torch.no_grad():
        assert loaded.model(input_ids=ids, labels=ids).loss < 3.5
        assert loaded.model(input_ids=shuffled, labels=shuffled).loss > 6.0
