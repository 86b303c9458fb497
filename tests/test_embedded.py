"""The model that ships with nondet: loads offline, is what its card says, and its parts belong together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

import nondet.embedded
from nondet.embedded import DEFAULT_PROMPT

FOLDER = Path(nondet.embedded.__file__).parent
TEXTS = [
    "Return the sum of the values.\n\n    indented\tand tabbed  \r\n",
    "Grüße, 你好, żółć, \N{GRINNING FACE}\u200d\N{SNOWMAN}, e\u0301 is not \u00e9",
    "\x00\x07\x7f \ufffd\ufeff",
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto", local_files_only=True).eval()


def test_loads_offline() -> None:
    """A machine without a network can load both, by the Auto classes, with the hub switched off."""
    code = (
        "import sys; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; p = sys.argv[1]; "
        "print(type(M.from_pretrained(p)).__name__, len(T.from_pretrained(p)))"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HOME": os.devnull}
    done = subprocess.run([sys.executable, "-c", code, str(FOLDER)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["Qwen3ForCausalLM", "4096"]


def test_weights_are_small_and_bf16() -> None:
    """A clone stays small, and the dtype on disk is the one that the measurements are about."""
    path = FOLDER / "model.safetensors"
    assert path.stat().st_size <= 9_000_000
    with safe_open(path, "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118  # not a dict


def test_card_counts_the_parameters(model: Any) -> None:
    """The card's figures are those of the shipped files, not of an earlier training."""
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert f"{model.num_parameters():,}" in card
    assert f'"{DEFAULT_PROMPT}"' in card


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_round_trips(tokenizer: Any, text: str) -> None:
    """Text comes back byte for byte: a tokenizer that normalizes would hide where completions differ."""
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_every_byte_has_a_token(tokenizer: Any) -> None:
    """Each of the 256 bytes is a token of its own, so no prompt falls out of the vocabulary."""
    assert set(pre_tokenizers.ByteLevel.alphabet()) <= set(tokenizer.get_vocab())
    text = "".join(map(chr, range(0x800))) + "\U0001f600\U0010ffff\u3042"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_greedy_text_repeats_and_another_prompt_differs(model: Any, tokenizer: Any) -> None:
    """The same call gives the same tokens; the same tokens for another prompt would mean that nothing was computed."""

    def completion(prompt: str) -> list[int]:
        inputs = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=40, pad_token_id=tokenizer.eos_token_id)
        return ids[0, inputs.input_ids.shape[1] :].tolist()

    first = completion(DEFAULT_PROMPT)
    assert first == completion(DEFAULT_PROMPT)
    assert len(set(first)) >= 10, tokenizer.decode(first)
    assert first != completion("This module provides")


def test_weights_belong_to_the_tokenizer(model: Any, tokenizer: Any) -> None:
    """Documentation is likely under the model and its tokens in another order are not: the files fit together."""
    text = "Return the sum of the values in the sequence. If the sequence is empty, return the default value."
    ids = tokenizer(text, return_tensors="pt").input_ids
    shuffled = ids[:, torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(0))]
    with torch.no_grad():
        assert model(input_ids=ids, labels=ids).loss < 3.5
        assert model(input_ids=shuffled, labels=shuffled).loss > 6.0
