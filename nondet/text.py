"""Untrusted text (completions, prompts, model names, file names) made safe to show on a terminal or a page."""

from __future__ import annotations

import re
import unicodedata

__all__ = ["no_commands", "one_line", "printable"]

# C0 controls have pictures of their own in Unicode; C1 and the format characters that reorder or hide text do not.
_PICTURES = {code: chr(0x2400 + code) for code in range(0x20)} | {0x7F: "\u2421"}
_KEPT = {"\n", "\t"}
# What a CI's runner takes for a command in a log: ::error at a line's beginning, ##[ and ##vso[ anywhere.
_COMMANDS = re.compile(r"(?m)^[^\S\n]*:(?=:)|##(?=\[|vso\[)")
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
