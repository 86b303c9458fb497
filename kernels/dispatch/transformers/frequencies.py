"""Rotary embeddings whose frequencies follow the longest request of a step: at risk under `batch_invariant()`.

With the rope types "dynamic" and "longrope" (Phi-3's long contexts) transformers takes the largest position of the
whole batch, and computes or chooses the frequencies of everybody by it. Beyond the model's original length a request's
bits therefore follow its company, and its own chunks, through an operator that rounds nothing: no kernel can cure it.
Up to that length everybody has the original ones, and nothing is counted.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from nondet.kernels.dispatch.state import count

__all__ = ["install", "uninstall"]

_installed: dict[type, Any] = {}  # class -> its forward


@functools.cache
def _classes(module: str) -> tuple[type, ...]:
    values = list(vars(sys.modules[module]).items())
    return tuple(
        v
        for n, v in values
        if isinstance(v, type) and n.endswith("RotaryEmbedding") and v.__module__ == module and "forward" in vars(v)
    )


def install() -> None:
    """Look on at the rotary embeddings of every model that is imported by now."""
    for name in [m for m in list(sys.modules) if m.startswith("transformers.models.") and ".modeling_" in m]:
        for cls in _classes(name):
            if cls not in _installed:
                _installed[cls] = vars(cls)["forward"]
                cls.forward = _counted(_installed[cls])  # type: ignore[attr-defined]  # a torch.nn.Module's


def uninstall() -> None:
    """Put back what was there; nothing if nothing was installed. A thread inside a stand-in ends in it undisturbed."""
    for cls, forward in _installed.items():
        cls.forward = forward  # type: ignore[attr-defined]
    _installed.clear()


def _counted(original: Any) -> Any:
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        kind = getattr(self, "rope_type", None)
        if kind not in ("default", "linear", "llama3", "yarn", None):  # the usual ones, without a further look
            given = {**dict(zip(("x", "position_ids", "layer_type"), args, strict=False)), **kwargs}
            layer_type = given.get("layer_type")
            if isinstance(kind, dict):  # by the layers' type
                kind = kind.get(layer_type, "")
            if "dynamic" in kind or kind == "longrope":
                _note(self, kind, layer_type, given.get("position_ids"))
        return original(self, *args, **kwargs)

    return forward


def _note(module: Any, kind: str, layer_type: str | None, positions: torch.Tensor | None) -> None:
    what = f"transformers rotary embedding {kind!r}: frequencies by the longest request of the step"
    if torch.compiler.is_compiling():
        _note_traced(what)
    elif _is_beyond(module, layer_type, positions):
        count("at_risk", what)


def _note_traced(what: str) -> None:
    """Count once for each trace; a compiler takes what this returns as a constant, and does not look inside."""
    count("at_risk", what)


_note_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result


def _is_beyond(module: Any, layer_type: str | None, positions: torch.Tensor | None) -> bool:
    """Has the step a position beyond the original length? Yes where that can't be read."""
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    parameters = parameters.get(layer_type, parameters)
    limit = parameters.get("original_max_position_embeddings") or getattr(module, "original_max_seq_len", None)
    capturing = positions is not None and positions.is_cuda and torch.cuda.is_current_stream_capturing()
    if limit is None or positions is None or capturing or positions.is_meta:
        return True
    return int(positions.max()) + 1 >= limit  # at the limit itself "dynamic" keeps what an earlier step has left
