"""A small random model of a form that vLLM treats its own way, with the embedded model's tokenizer, in a folder.

    python lab/vllm_forms.py moe|window|gemma2|gemma3|wide FOLDER

moe: 16 experts, 4 a token. window: Mistral, of whose keys 64 are seen. gemma2: soft caps on scores and logits, every
second layer with a window. gemma3: five layers with a window to one without, an MLP and norms of its own.
wide: two layers, whose second product of an MLP has so long a K that cuBLASLt splits it in FP8 at few rows.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

EMBEDDED = Path(__file__).resolve().parent.parent / "nondet" / "embedded"
COMMON: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 4096, "bos_token_id": None, "eos_token_id": 0,
    "pad_token_id": 0,
}  # fmt: skip
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "moe": (
        "qwen3_moe",
        {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True},
    ),
    "window": ("mistral", {"sliding_window": 64}),
    "gemma2": ("gemma2", {"sliding_window": 64, "query_pre_attn_scalar": 64, "final_logit_softcapping": 30.0}),
    "wide": ("qwen3", {"hidden_size": 1024, "intermediate_size": 12288, "num_hidden_layers": 2}),
    "gemma3": ("gemma3_text", {"sliding_window": 64, "query_pre_attn_scalar": 64}),
}


def main(form: str, folder: Path) -> None:
    """Draw the weights uniformly by a seed, and write config, weights and tokenizer."""
    name, more = FORMS[form]
    vocabulary = AutoConfig.from_pretrained(EMBEDDED).vocab_size
    config = AutoConfig.for_model(name, **(COMMON | more), vocab_size=vocabulary)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            if weight.dim() > 1:
                weight.copy_(torch.empty(weight.shape).uniform_(-0.08, 0.08, generator=generator))
    model.save_pretrained(folder)
    for path in EMBEDDED.glob("tokenizer*"):
        shutil.copy(path, folder)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in FORMS:
        raise SystemExit(__doc__)
    main(sys.argv[1], Path(sys.argv[2]))
