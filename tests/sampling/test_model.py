"""Loading a model: what is wrong with it is one clear line, and nothing is made up in its place."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nondet.errors import UserError
from nondet.sampling.model import LoadedModel, check_lengths, embedded_folder, load_model


def change_config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def cut(name: str, to: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:to])

    return change


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (without("config.json"), "no config.json"),
        (without("model.safetensors"), "no file named model.safetensors"),
        (cut("model.safetensors", 60_000), "weights can't be loaded"),
        (cut("model.safetensors", 20), "weights can't be loaded"),
        (cut("model.safetensors", 0), "weights can't be loaded"),
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
    ],
)
def test_a_broken_folder_is_one_clear_line(
    tiny_folder: Path, tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    """Half-written, truncated, mismatched and foreign models are refused: none runs with random numbers in it."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    spoil(folder)
    with pytest.raises(UserError) as caught:
        load_model(str(folder), "bfloat16", "cpu")
    assert said in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.hint


def sharded(*names: str) -> Callable[[Path], None]:
    """The weights under the first name, in an index that names them all."""

    def change(folder: Path) -> None:
        place = folder / "shard.safetensors"
        (folder / "model.safetensors").rename(place)
        keys = load_file(place)
        index = {"metadata": {}, "weight_map": {key: names[i % len(names)] for i, key in enumerate(keys)}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


def write(name: str, text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(text)

    return change


def fifo(folder: Path) -> None:
    sharded("shard.safetensors", "b.safetensors")(folder)
    os.mkfifo(folder / "b.safetensors")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (sharded("shard.safetensors", "x.bin"), "'x.bin'"),
        (sharded("x.safetensors.bin"), "'x.safetensors.bin'"),
        (sharded("../shard.safetensors"), "out of its folder"),
        (sharded("a/../../shard.safetensors"), "out of its folder"),
        (sharded("/etc/shard.safetensors"), "out of its folder"),
        (sharded("..\\shard.safetensors"), "out of its folder"),
        (fifo, "not a regular file"),
        (write("model.safetensors.index.json", '{"weight_map": {"a": "x.bin"}}'), "'x.bin'"),
        (write("model.safetensors.index.json", '{"weight_map": {"a": 1}}'), "names 1 as its weights"),
        (write("model.safetensors.index.json", '{"weight_map": []}'), "is no index"),
        (write("model.safetensors.index.json", "[" * 100_000), "is no index"),
        (write("adapter_config.json", '{"base_model_name_or_path": "other"}'), "holds an adapter"),
        (change_config(transformers_weights="adapter_model.bin"), "'adapter_model.bin'"),
        (change_config(transformers_weights="../model.safetensors"), "out of its folder"),
    ],
)
def test_weights_are_safetensors_within_their_folder(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None], said: str
) -> None:
    """An index or a config that names a pickle or a file elsewhere is refused before anything is opened."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    spoil(folder)
    monkeypatch.setattr(torch, "load", None)  # called, it would raise
    with pytest.raises(UserError) as caught:
        load_model(str(folder), "bfloat16", "cpu")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


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


def test_a_cached_model_of_the_hub_is_looked_at_too(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a name of the hub stands for is no more to be trusted than a folder: its shards load, a pickle does not."""
    from huggingface_hub import constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    model = tmp_path / "models--some--model"
    shutil.copytree(tiny_folder, model / "snapshots" / commit)
    write("tokenizer_config.json", '{"tokenizer_class": "PreTrainedTokenizerFast"}')(model / "snapshots" / commit)
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


def test_missing_folders_and_files_are_named(tmp_path: Path) -> None:
    """A path that isn't there is not looked up on the hub; a file is not a folder."""
    with pytest.raises(UserError, match="no model folder"):
        load_model(str(tmp_path / "nothing"), "bfloat16", "cpu")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file"):
        load_model(str(tmp_path / "file"), "bfloat16", "cpu")


def test_offline_hub_names_fail_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network a hub name is one line, and no minute of retries."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="no copy is cached"):
        load_model("nobody/no-such-model", "bfloat16", "cpu")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", unreachable)
    with pytest.raises(UserError, match="can't be reached"):
        load_model("nobody/no-such-model", "bfloat16", "cpu")


def test_code_from_a_repository_is_not_run_unasked(tiny_folder: Path, tmp_path: Path) -> None:
    """A folder that brings code is refused by default, and its code has not run."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    flag = tmp_path / "ran"
    (folder / "modeling_x.py").write_text(f"open({str(flag)!r}, 'w').close()\n")
    change_config(model_type="x", auto_map={"AutoConfig": "modeling_x.X", "AutoModelForCausalLM": "modeling_x.Y"})(
        folder
    )
    with pytest.raises(UserError, match="code of its own"):
        load_model(str(folder), "bfloat16", "cpu")
    assert not flag.exists()


@pytest.mark.parametrize("dtype", ["bf16", "int8", "float8_e4m3fn", "float64"])
def test_unknown_dtypes_are_refused(dtype: str) -> None:
    """A dtype that models don't run in here is refused before anything is loaded."""
    with pytest.raises(UserError, match=dtype):
        load_model("/nowhere", dtype, "cpu")


def test_a_dtype_the_gpu_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 on a GPU that only emulates it would measure the emulation."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Old GPU")
    with pytest.raises(UserError, match="Old GPU"):
        load_model("/nowhere", "bfloat16", "cuda")


def test_prompts_must_fit_the_context(tiny: LoadedModel) -> None:
    """Prompt and completion together stay within the model's positions."""
    check_lengths(tiny, [1] * 200, 56)
    with pytest.raises(UserError, match=r"exceed the model's context of 256\. Use --max-tokens 56"):
        check_lengths(tiny, [1] * 200, 57)
    with pytest.raises(UserError, match="Shorten the prompt"):
        check_lengths(tiny, [1] * 256, 1)
    with pytest.raises(UserError, match="no tokens"):
        check_lengths(tiny, [], 1)
    with pytest.raises(UserError, match="--max-tokens 0"):
        check_lengths(tiny, [1], 0)


def test_a_loaded_model_is_what_was_saved(tiny: LoadedModel, tiny_folder: Path) -> None:
    """Weights, tokenizer and limits are the folder's own: text survives a round trip, no tokenizer is guessed."""
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    saved = load_file(tiny_folder / "model.safetensors")
    for name, value in tiny.model.state_dict().items():
        if name in saved:
            assert torch.equal(value, saved[name])
    text = "Héllo  wörld\n\tTwo."
    assert tiny.decode(tiny.encode(text)) == text
    assert tiny.encode(text) == Tokenizer.from_file(str(tiny_folder / "tokenizer.json")).encode(text).ids
    assert (tiny.context, tiny.eos, tiny.identity["parameters"]) == (256, (0,), tiny.model.num_parameters())


def test_identity_follows_the_weights(tiny: LoadedModel, tiny_folder: Path, tmp_path: Path) -> None:
    """Two models of one shape are told apart, so that a run is not resumed with other weights."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert load_model(str(folder), "bfloat16", "cpu").identity != tiny.identity


def test_the_embedded_model_loads() -> None:
    """The default needs no network and no argument."""
    loaded = load_model(None, "bfloat16", "cpu")
    assert loaded.name == "embedded"
    assert embedded_folder().name == "embedded"
    assert loaded.context == 1024
