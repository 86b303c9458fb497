"""The functions of an engine that its plugin replaces: whether each is there, takes what it should, and is its own."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from nondet.engines import ENABLED, Engine
from nondet.errors import UserError, one_line
from nondet.version import VERSION

_HOOK = "_of_nondet"


def enabled() -> bool:
    """Whether the environment enables the plugin. Raises UserError: an invalid value."""
    value = os.environ.get(ENABLED, "")
    if value not in ("", "0") and not hasattr(sys.excepthook, _HOOK):
        say_in_one_line(sys.excepthook)
    if value not in ("", "0", "1"):
        raise UserError(f"{ENABLED}={one_line(value, 40)} makes no sense", "Set it to 1, or unset it.")
    return value == "1"


def say_in_one_line(before: Callable[..., Any]) -> None:
    """From now on print an uncaught `UserError`, in `vllm serve` as well, as one line without a traceback."""

    def hook(kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, UserError):
            sys.stderr.write(f"nondet: {error}\n")
        else:
            before(kind, error, trace)

    setattr(hook, _HOOK, True)
    sys.excepthook = hook


def object_at(path: str) -> Any:
    """The object at "module:attribute.attribute". Raises ImportError or AttributeError."""
    module, _, names = path.partition(":")
    found = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def parameters(found: Any) -> str:
    """The names of its parameters."""
    found = getattr(found, "__func__", found)  # of a class's method the class as well, as the sources have it
    return " ".join(inspect.signature(found).parameters)


def owner_of(found: Any, package: str) -> str:
    """The module of a hook's object; of a wrapper that is neither the engine's nor torch's, which has the name of what
    it wraps, that of its own code."""
    found = getattr(found, "__func__", found)
    while inspect.isfunction(found) and hasattr(found, "__wrapped__"):
        written = found.__globals__["__name__"]
        if written.partition(".")[0] not in (package, "torch", "contextlib"):
            return str(written)
        found = found.__wrapped__
    return str(found.__module__ if inspect.isfunction(found) else type(found).__module__)


def misfit(engine: Engine, what: str) -> UserError:
    """The refusal of a version."""
    tried = ", ".join(engine.tried)
    said = f"{engine.name} {engine.version} does not fit nondet {VERSION}: {what}"
    return UserError(said, f"Use {engine.name} {tried}. {engine.stock}")


def checked(
    engine: Engine, patched: Mapping[str, str], moved: Mapping[str, tuple[str, str]] = MappingProxyType({})
) -> dict[str, Any]:
    """The objects at the paths of `patched`, by path. Raises UserError: one is missing, takes other parameters, or was
    replaced.

    Args:
        patched: "module:attribute" -> its parameters' names.
        moved: Where a missing one is in later versions, and its parameters.
    """
    found = {}
    for path, takes in patched.items():
        try:
            try:
                found[path] = object_at(path)
            except AttributeError:
                if path not in moved:
                    raise
                later, takes = moved[path]
                found[path] = object_at(later)
            taken = parameters(found[path])
        except (ImportError, AttributeError, ValueError, TypeError) as error:
            raise misfit(engine, f"{path} is not there ({type(error).__name__})") from error
        if taken != takes:
            raise misfit(engine, f"{path} takes ({taken}), not ({takes})")
        owner = owner_of(found[path], engine.package)
        if owner.partition(".")[0] != engine.package:
            raise UserError(f"{path} was replaced by {owner} before nondet could", "Run one of the two plugins.")
    return found
