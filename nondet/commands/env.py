"""`nondet env`: what belongs in a bug report."""

from __future__ import annotations

import json
from typing import Any

from nondet.commands.output import put
from nondet.services import options as o


def env(as_json: o.JSON = False) -> None:
    """Print what belongs in a bug report: versions, CPU, GPU and driver, and the switches that steer numerics."""
    from nondet.core.environment import collect

    known = {name: value for name, value in collect().items() if name not in ("argv", "seed")}
    put(
        [json.dumps(known)] if as_json else [f"{name}: {_text(value)}" for name, value in known.items()],
        as_json=as_json,
    )


def _text(value: Any) -> str:
    if isinstance(value, dict):
        value = [f"{name}={one}" for name, one in value.items()]
    return (" ".join(value) or "none set") if isinstance(value, list) else "none" if value is None else str(value)
