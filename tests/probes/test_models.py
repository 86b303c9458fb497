"""Sizes of real models are right, whether they come from the table or from a config."""

from __future__ import annotations

import json

import pytest

from nondet.errors import UnknownNameError, UserError
from nondet.probes.models import PRESETS, from_config, preset, read_config

TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 500}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def test_layers_of_the_presets():
    """The shapes that the default GPU list is made of, fused and apart, each once; in all, grouped heads divide, and
    every layer begins or ends at the hidden size. A slip of the pen gets the name that was meant."""
    sizes = preset("Qwen3-8B")
    shapes = {(k, n): name for name, k, n in sizes.layers}
    assert shapes[12288, 4096] == "down_proj"
    assert shapes[4096, 6144] == "qkv_proj"
    assert shapes[4096, 4096] == "q_proj o_proj"
    assert shapes[4096, 24576] == "gate_up_proj"
    assert shapes[4096, 151936] == "lm_head"
    assert len(shapes) == len(sizes.layers)
    assert sizes.config["head_dim"] == 128
    for name in PRESETS:
        config = preset(name).config
        assert config["heads"] % config["kv_heads"] == 0, name
        assert all(config["hidden"] in (k, n) for _, k, n in preset(name).layers), name
    with pytest.raises(UnknownNameError, match=r"qwen3-8b"):
        preset("qwen3-8")


def test_config_of_a_folder(tmp_path):
    """A model folder's config.json gives its layers; heads that it leaves out follow from the others. One expert's
    layers stand in for a dense MLP that is not there; a text model may be inside of a larger one."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    sizes = read_config(tmp_path)
    assert {("down_proj", 96, 64), ("qkv_proj", 64, 64 + 2 * 32)} <= set(sizes.layers)
    assert sizes.config["head_dim"] == 16
    assert read_config(tmp_path / "config.json").layers == sizes.layers
    experts = from_config(TINY | {"moe_intermediate_size": 24}, "moe")
    assert ("expert down_proj", 24, 64) in experts.layers
    assert not any(name == "down_proj" for name, _, _ in experts.layers)
    assert from_config({"text_config": TINY}, "vision").layers == from_config(TINY, "text").layers


def test_bad_configs_are_refused(tmp_path):
    """Missing, cut off, no text, no config, no causal language model's, or of an architecture that is not read."""
    for content, said in (
        (None, "no config"),
        (b"", "can't read"),
        (b'{"hidden_size": 64', "can't read"),
        (b"\xff\xfe\x00\x80", "can't read"),
        (b"[1, 2]", "list"),
        (b"{}", "hidden_size is missing"),
        (json.dumps(TINY | {"vocab_size": -1}).encode(), "vocab_size is -1"),
        (json.dumps(TINY | {"num_attention_heads": "four"}).encode(), "num_attention_heads is 'four'"),
        (json.dumps(TINY | {"kv_lora_rank": 512}).encode(), "latent attention"),
    ):
        if content is not None:
            (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(UserError, match=said) as caught:
            read_config(tmp_path)
        assert caught.value.hint
