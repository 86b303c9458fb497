"""Untrusted text (completions, prompts, model names, file names) made safe to show on a terminal or a page."""

from __future__ import annotations

import hashlib
import re
import unicodedata

__all__ = ["no_commands", "one_line", "printable", "shortened", "without_path"]

# C0 controls have pictures of their own in Unicode; C1 and the format characters that reorder or hide text do not.
_PICTURES = {code: chr(0x2400 + code) for code in range(0x20)} | {0x7F: "\u2421"}
_KEPT = {"\n", "\t"}
# What a CI's runner takes for a command in a log: ::error at a line's beginning, ##[ and ##vso[ anywhere.
_COMMANDS = re.compile(r"(?m)^[^\S\n]*:(?=:)|##(?=\[|vso\[)")
_ADDRESS = re.compile(r"(\w+://[^/?#]*)[/?#]+(.*)", re.DOTALL)
# What stands at the end of many an address, and is no secret; and what `without_path` leaves.
_KNOWN_PATH = re.compile(r"(v\d+/?)?(chat/)?(completions?|generate)?/?|\(path [0-9a-f]{4}\)")
_JOINERS = {"\u200c", "\u200d"}  # part of correct spelling in several scripts


def printable(text: str) -> str:
    """Replace whatever could move the cursor, recolour, reorder or hide text by something visible.

    Newlines and tabs stay. C0 controls (ESC among them, so that no escape sequence survives) become their Unicode
    pictures; C1 controls, bidirectional overrides, other format characters, line separators, lone surrogates and
    noncharacters (no XML parser takes U+FFFE) become U+FFFD.
    """
    out = []
    for char in text:
        code = ord(char)
        if char in _KEPT or char in _JOINERS:
            out.append(char)
        elif code in _PICTURES:
            out.append(_PICTURES[code])
        elif unicodedata.category(char) in {"Cc", "Cf", "Cs", "Zl", "Zp"} or code & 0xFFFE == 0xFFFE:
            out.append("\ufffd")
        else:
            out.append(char)
    return "".join(out)


def no_commands(text: str) -> str:
    """Text for a log, whose lines may begin anywhere in somebody's words: no runner (GitHub's, Azure's) obeys them."""
    return _COMMANDS.sub(r"\g<0> ", text)


def one_line(text: str, limit: int = 1000) -> str:
    """`printable`, on one line, newlines shown as spaces, cut at `limit` characters."""
    flat = " ".join(printable(text).split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def shortened(text: str, most: int) -> str:
    """The text, or of a longer one its first `most` characters, how many it has, and its digest: two stay two."""
    if len(text) <= most:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{text[:most]}… [{len(text):,} characters, SHA-256 {digest}]"


def without_path(url: str) -> str:
    """An address without its path, where gateways have tokens; 16 bits of a digest tell one path from another."""
    address = _ADDRESS.fullmatch(url)
    if address is None or _KNOWN_PATH.fullmatch(address[2]):
        return url
    return f"{address[1]}/(path {hashlib.sha256(address[2].encode('utf-8', 'surrogatepass')).hexdigest()[:4]})"
