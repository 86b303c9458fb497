"""A fake server that breaks every rule, by name; beside it the same server answers honestly.

    async with Hostile() as server:          # a prompt "hostile:drip-body" meets that behaviour, any other is answered

Each behaviour is a function of the request and the connection, written straight to the socket. What it returns says
whether the connection stays open. They are in behaviours.py (wrong bodies), breaking.py and refusals.py.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from tests.endpoint import breaking, refusals
from tests.endpoint.behaviours import BEHAVIOURS, BODIES, ODD_COUNTS
from tests.endpoint.honest import Honest
from tests.endpoint.wire import Request

__all__ = ["BEHAVIOURS", "BODIES", "ODD_COUNTS", "PREFIX", "Hostile", "breaking", "refusals"]

PREFIX = "hostile:"


class Hostile(Honest):
    """See the module.

    Args:
        elsewhere: Where "redirect-elsewhere" points.

    Attributes:
        seen: How often each behaviour was met.
    """

    def __init__(self, elsewhere: str = "http://127.0.0.1:9", **options: Any) -> None:
        super().__init__(**options)
        self.elsewhere = elsewhere
        self.seen: Counter[str] = Counter()

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        body = request.json()
        prompt = body.get("prompt", "") if isinstance(body, dict) else ""
        if isinstance(prompt, str) and prompt.startswith(PREFIX):
            name = prompt.removeprefix(PREFIX)
            self.seen[name] += 1
            if "redirected" not in request.path:
                return await BEHAVIOURS[name](self, request, writer)
            request = Request("POST", "/v1/completions", request.headers, request.body)
        return await super()._answer(request, writer)
