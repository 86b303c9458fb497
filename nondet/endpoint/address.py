"""The URL of an endpoint: read strictly, never with a password in it."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from nondet.errors import one_line, without_path

from ..errors import UserError
from .keys import Key

__all__ = ["Address", "read_address"]

_PATHS = {
    "/v1/chat/completions": "openai-chat",
    "/v1/completions": "openai",
    "/completion": "llama.cpp",
    "/generate": "",
}
_PORTS = {"http": 80, "https": 443}
_PREFIX_LEAST, _PART_LEAST = 4, 8  # characters of what is taken out of lines: "/v2" and "api" are in many
# What of an address that can't be used is repeated: no more than its scheme, host and port.
_SHOWN = re.compile(r"([a-z][a-z0-9+.-]{0,20}://([\w.-]+|\[[0-9a-f:.]+\])(:\d{1,5})?|[\w.-]+:\d{1,5})(?=[/?#]|$)", re.I)


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a server is.

    Attributes:
        scheme: "http" or "https".
        host, port: As one connects to them.
        prefix: The path in front of /v1/..., without a slash at its end; usually "".
        protocol: What the URL's path names, as "openai-chat" for .../v1/chat/completions; "" where it names none.
    """

    scheme: str
    host: str
    port: int
    prefix: str = ""
    protocol: str = ""

    @property
    def origin(self) -> str:
        """Scheme, host and port; what a key belongs to."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}"

    @property
    def url(self) -> str:
        """Origin, and what tells its prefix from others, as records show it."""
        return without_path(self.origin + self.prefix)

    @property
    def secrets(self) -> tuple[Key, ...]:
        """The prefix and its longer parts, any of which may be a token that a gateway takes."""
        parts = [self.prefix, *(part for part in self.prefix.split("/") if len(part) >= _PART_LEAST)]
        return tuple(Key(part, "path") for part in parts if len(part) >= _PREFIX_LEAST)

    @property
    def local(self) -> bool:
        """Whether the name is this machine's own: what goes there passes no network."""
        if self.host == "localhost" or self.host.endswith(".localhost"):
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def read_address(url: str) -> Address:
    """What a user gave as --endpoint.

    `http://host:port`, with or without `/v1` or the full path of a completions endpoint at its end.

    Raises:
        UserError: No http or https URL; with a user, a password, a query or a fragment.
    """
    hint = "Give it as http://HOST:PORT or https://HOST/v1."
    match = _SHOWN.match(url.strip()) if "@" not in url else None
    shown = repr(one_line(match[0], 80)) if match else "(not repeated: it may hold a secret)"
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError:
        raise UserError(f"not the URL of a server: {shown}", hint) from None
    if parts.username is not None or parts.password is not None or "@" in parts.netloc:
        where = one_line(parts.netloc.rpartition("@")[2], 80)
        raise UserError(
            f"the URL of {where} has a user or a password in it",
            "Leave them out; a key comes from the environment (NONDET_API_KEY, or --key-env NAME).",
        )
    if parts.scheme not in _PORTS or not parts.hostname or not parts.netloc.isprintable() or " " in parts.netloc:
        raise UserError(f"not the URL of a server: {shown}", hint)
    if parts.query or parts.fragment:
        raise UserError(f"the URL {shown} goes on with a query or a fragment, which may hold a secret", hint)
    path, protocol = parts.path.rstrip("/"), ""
    for ending, name in _PATHS.items():
        if path.endswith(ending):
            path, protocol = path.removesuffix(ending), name
            break
    return Address(
        scheme=parts.scheme,
        host=parts.hostname,
        port=port if port is not None else _PORTS[parts.scheme],
        prefix=path.removesuffix("/v1"),
        protocol=protocol,
    )
