"""Untrusted text (completions, prompts, model names, file names) made safe to show on a terminal or a page."""

from __future__ import annotations

import unicodedata

__all__ = ["one_line", "printable"]

# C0 controls have pictures of their own in Unicode; C1 and the format characters that reorder or hide text do not.
_PICTURES = {code: chr(0x2400 + code) for code in range(0x20)} | {0x7F: "\u2421"}
_KEPT = {"\n", "\t"}
_JOINERS = {"\u200c", "\u200d"}  # part of correct spelling in several scripts


def printable(text: str) -> str:
    """Replace whatever could move the cursor, recolour, reorder or hide text by something visible.

    Newlines and tabs stay. C0 controls (ESC among them, so that no escape sequence survives) become their Unicode
    pictures; C1 controls, bidirectional overrides, other format characters, line separators and lone surrogates become
    U+FFFD.
    """
    out = []
    for char in text:
        code = ord(char)
        if char in _KEPT or char in _JOINERS:
            out.append(char)
        elif code in _PICTURES:
            out.append(_PICTURES[code])
        elif unicodedata.category(char) in {"Cc", "Cf", "Cs", "Zl", "Zp"}:
            out.append("\ufffd")
        else:
            out.append(char)
    return "".join(out)


def one_line(text: str, limit: int = 1000) -> str:
    """`printable`, on one line, newlines shown as spaces, cut at `limit` characters."""
    flat = " ".join(printable(text).split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"
