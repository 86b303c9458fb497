"""Write nondet's embedded model as GGUF, the file format of llama.cpp.

    python lab/embedded_to_gguf.py --out nondet-embedded.gguf            # bf16, bit for bit the weights that ship
    python lab/embedded_to_gguf.py --out nondet-embedded.gguf --type f32 # the same values, widened

Needs the packages `gguf` and `numpy`, not torch: bf16 is carried as its bits. Norm weights are float32 in either file,
because llama.cpp multiplies them in float32 and reads no other type there; every bf16 value is a float32 value.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

MODEL = Path(__file__).resolve().parent.parent / "nondet" / "embedded"
# A chat is its messages one after the other: the model was never trained on chats.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Each tensor of a bf16 safetensors file: its name and its bits, uint16, in the shape that the file says.

    Raises:
        ValueError: A tensor is not bf16.
    """
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:start]).items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{path.name}: {name} is {entry['dtype']}; only BF16 is written")
        first, end = entry["data_offsets"]
        yield name, np.frombuffer(data[start + first : start + end], dtype="<u2").reshape(entry["shape"])


def widened(bits: np.ndarray) -> np.ndarray:
    """The float32 values of bf16 bits, exactly: a bf16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def add_architecture(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """What llama.cpp asks to know of a Qwen3."""
    writer.add_name("nondet embedded")
    writer.add_license("mit")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], eos: int) -> None:
    """Byte-level BPE; its split into words is GPT-2's, which `ByteLevel` with `use_regex` is."""
    model = tokenizer["model"]
    special = {token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    ids = model["vocab"] | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    names = sorted(ids, key=ids.__getitem__)
    if [ids[name] for name in names] != list(range(len(names))):
        raise ValueError("tokenizer.json: the ids have holes")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(len(names))]
    )
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_eos_token_id(eos)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def convert(out: Path, kind: str) -> None:
    """Write the file.

    Args:
        out: Where; replaced if it is there.
        kind: "bf16" or "f32".
    """
    config = json.loads((MODEL / "config.json").read_text())
    tokenizer = json.loads((MODEL / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(out, "qwen3")
    add_architecture(writer, config)
    add_tokenizer(writer, tokenizer, config["eos_token_id"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if kind == "f32" else gguf.LlamaFileType.MOSTLY_BF16)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for name, bits in tensors(MODEL / "model.safetensors"):
        stem, suffix = name.rsplit(".", 1)
        renamed = f"{names.get_name(stem)}.{suffix}"
        if kind == "f32" or bits.ndim == 1:
            writer.add_tensor(renamed, widened(bits))
        else:
            writer.add_tensor(renamed, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Read the arguments and convert."""
    parser = argparse.ArgumentParser(description="nondet's embedded model as GGUF")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--type", choices=["bf16", "f32"], default="bf16")
    options = parser.parse_args()
    convert(options.out, options.type)


if __name__ == "__main__":
    main()
