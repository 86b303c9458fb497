"""transformers' eager attention under `batch_invariant()`: said to be at risk.

`eager_attention_forward` computes a softmax over all keys of the padded batch, hidden ones too. Every operator in it is
replaced, and each row of each is invariant; but where a request's keys lie among the padding, and how many there are,
decides in which order they are added. So its bits depend on the company after all. Models take it when they are asked
for attn_implementation="eager", and Gemma 2 by itself, for its soft cap. It is no entry of transformers' table of
attention functions: each model's module has its own copy.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

__all__ = ["install", "uninstall"]

_NAME = "eager_attention_forward"
_Note = Callable[[str, str], None]
_installed: dict[ModuleType, Any] = {}  # modeling module -> its function


def install(note: _Note) -> None:
    """Count its calls in every modeling module that is imported by now."""
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models.") and _NAME in vars(module):
            _installed[module] = vars(module)[_NAME]
            setattr(module, _NAME, _counted(_installed[module], note))


def uninstall() -> None:
    """Put back what was there; nothing if nothing was installed."""
    for module, original in _installed.items():
        setattr(module, _NAME, original)
    _installed.clear()


def _counted(original: Any, note: _Note) -> Any:
    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        note("at_risk", "transformers eager attention: sums over padded keys")
        return original(*args, **kwargs)

    return forward
