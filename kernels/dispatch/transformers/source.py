"""Whether a function is the one that its source shows: nobody's wrapper around it, and nobody's in its place.

`inspect.getsource` follows `__wrapped__`, so the text of a wrapper made with functools.wraps is that of what it wraps.
A stand-in that trusted it would skip what the wrapper does. Decorators of transformers' own are what stock calls too.
"""

from __future__ import annotations

import inspect
import os
import textwrap
import types
from typing import Any

import torch
from torch.nn.modules import linear as torch_linear
from torch.nn.modules import module as torch_module

__all__ = ["is_of_file", "linear_untouched", "own_source"]


def own_source(function: Any) -> str:
    """The dedented source of a function.

    Raises:
        OSError: there is none, or somebody's wrapper stands around it.
        TypeError: it is no function.
    """
    layer = function
    while (inner := getattr(layer, "__wrapped__", None)) is not None:
        if not _is_of_transformers(layer):
            raise OSError("a wrapper stands around it")
        layer = inner
    if not isinstance(layer, types.FunctionType):
        raise TypeError("no function")
    return textwrap.dedent(inspect.getsource(layer))


def _is_of_transformers(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and f"{os.sep}transformers{os.sep}" in code.co_filename


def is_of_file(function: Any, file: str | None) -> bool:
    """Whether a function's own code stands in that file: functools.wraps copies names, and no code."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == file


_FORWARD = torch.nn.Linear.forward if is_of_file(torch.nn.Linear.forward, torch_linear.__file__) else None
_CALL = torch.nn.Module.__call__ if is_of_file(torch.nn.Module.__call__, torch_module.__file__) else None


def linear_untouched() -> bool:
    """Whether a call of torch's linear layer still is torch's own product: nobody has put another in its place."""
    return (
        torch.nn.Linear.forward is _FORWARD
        and torch.nn.Module.__call__ is _CALL
        and torch.nn.functional.linear is torch._C._nn.linear
    )
