"""The embedded model as GGUF is the embedded model: in float32, llama.cpp's tokens are those of transformers."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from .conftest import ROOT, SERVERS

PROMPTS = ("For example, the", "In this case, the", "Python's", "def f(x):\n    return x+1 # ½ é中", "  1234  a\tb\r\n")
TOKENS = 48
PYTHON = SERVERS / "llamacpp" / "bin" / "python"


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})  # noqa: S310 - loopback
    with urllib.request.urlopen(request, timeout=60) as reply:  # noqa: S310 - loopback
        return json.load(reply)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """llama.cpp's server with float32 weights, keys and values."""
    subprocess.run(["bash", "scripts/serve_llamacpp.sh", "--setup"], cwd=ROOT, check=True)
    model = tmp_path_factory.mktemp("gguf") / "f32.gguf"
    subprocess.run([PYTHON, "scripts/embedded_to_gguf.py", "--type", "f32", "--out", model], cwd=ROOT, check=True)
    command = [PYTHON, "scripts/servers/llamacpp.py", "--model", model, "--alias", "f32", "--port", "0"]
    with subprocess.Popen(
        [*command, "--slots", "1", "--float32-attention"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split("; ")[-1].strip()
        finally:
            process.terminate()


@pytest.mark.llamacpp
@pytest.mark.parametrize("prompt", PROMPTS)
def test_gguf_gives_the_tokens_of_transformers(exact: str, prompt: str) -> None:
    """The same tokens in, the same greedy tokens out, logprobs of the first one within 1e-5."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = ROOT / "nondet" / "embedded"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = tokenizer(prompt)["input_ids"]
    assert post(f"{exact}/tokenize", {"content": prompt, "add_special": True})["tokens"] == ids
    # ignore_eos forbids the end of text, as suppress_tokens does
    wanted = model.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False, suppress_tokens=[0])[
        0, len(ids) :
    ]
    body = {
        "prompt": prompt,
        "n_predict": TOKENS,
        "temperature": 0,
        "return_tokens": True,
        "ignore_eos": True,
        "n_probs": 1,
    }
    said = post(f"{exact}/completion", body)
    assert said["tokens"] == wanted.tolist()
    with torch.no_grad():
        first = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], -1)[said["tokens"][0]].item()
    assert abs(np.float32(said["completion_probabilities"][0]["logprob"]) - first) < 1e-5
