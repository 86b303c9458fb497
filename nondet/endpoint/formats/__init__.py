"""The forms in which servers take requests and give answers: one file each, one line each in `FORMATS`."""

from __future__ import annotations

from . import llama_cpp, openai, openai_chat, sglang, tgi, transformers, vllm
from .base import Format

__all__ = ["FORMATS", "Format"]

FORMATS: dict[str, Format] = {
    "openai": openai.Completions(),
    "openai-chat": openai_chat.Chat(),
    "vllm": vllm.VllmCompletions(),
    "vllm-chat": vllm.VllmChat(),
    "sglang": sglang.Generate(),
    "llama.cpp": llama_cpp.Completion(),
    "tgi": tgi.Generate(),
    "transformers": transformers.TransformersCompletions(),
    "transformers-chat": transformers.TransformersChat(),
}
