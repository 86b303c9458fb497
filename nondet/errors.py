"""Errors of the user's input or of an engine, in one line each; and untrusted text made safe to show."""

from __future__ import annotations

import difflib
import hashlib
import re
import unicodedata
from collections.abc import Iterable


class UserError(Exception):
    """Bad input. The command prints it on one line of stderr and exits with 2, without a traceback.

    Args:
        what: What is wrong, the offending value included.
        hint: What to try instead; left out only where nothing can be suggested.
    """

    def __init__(self, what: str, hint: str = "") -> None:
        self.what = what
        self.hint = hint
        super().__init__(f"{what}. {hint}" if hint else what)


class UnknownNameError(UserError, KeyError):
    """A name that no registry holds."""

    __str__ = Exception.__str__  # KeyError's own __str__ would quote the message

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        super().__init__(f"unknown {kind} {name!r}", suggestion(name, known))


class UnrecordableError(UserError):
    """A record that a reader would reject; nothing of it was written."""


class MisfitError(UserError):
    """A user's function does not take what its operator does, as its first call shows; nothing of it is kept."""


class WrongResultError(Exception):
    """A result that no order of additions explains: another shape or dtype than the operator's, inputs written to. A
    measurement makes it a row of status "wrong" with this message as the reason."""


class WrongShapeError(WrongResultError):
    """A result of another shape than the operator's, or not a tensor at all."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """The closest known names, or all of them where none is close."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return "Did you mean " + " or ".join(close) + "?"
    return "Known: " + ", ".join(names)


def each_once(option: str, names: Iterable[str]) -> tuple[str, ...]:
    """The names of a list, in their order; a `UserError` where one is there twice."""
    named = tuple(names)
    for name in named:
        if named.count(name) > 1:
            raise UserError(f"{option} names {one_line(name, 40)} twice", "Name it once.")
    return named


# C0 controls have pictures of their own in Unicode; C1 and the format characters that reorder or hide text do not.
_PICTURES = {code: chr(0x2400 + code) for code in range(0x20)} | {0x7F: "\u2421"}
_KEPT = {"\n", "\t"}
# What a CI's runner takes for a command in a log: ::error at a line's beginning, ##[ and ##vso[ anywhere.
_COMMANDS = re.compile(r"(?m)^[^\S\n]*:(?=:)|##(?=\[|vso\[)")
_ADDRESS = re.compile(r"(\w+://[^/?#]*)[/?#]+(.*)", re.DOTALL)
# Common ends of addresses that are not secret; and what `without_path` leaves.
_KNOWN_PATH = re.compile(r"(v\d+/?)?(chat/)?(completions?|generate)?/?|\(path [0-9a-f]{4}\)")
_JOINERS = {"\u200c", "\u200d"}  # part of correct spelling in several scripts


def printable(text: str) -> str:
    """Replace whatever could move the cursor, recolour, reorder or hide text by something visible.

    Newlines and tabs stay. C0 controls (ESC among them, so that no escape sequence survives) become their Unicode
    pictures; C1 controls, bidirectional overrides, other format characters, line separators, lone surrogates and
    noncharacters (no XML parser takes U+FFFE) become U+FFFD.
    """
    if text.isprintable():  # true of nearly all text
        return text
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
    """Text for a log, with untrusted parts: no runner (GitHub's, Azure's) finds a command in it."""
    return _COMMANDS.sub(r"\g<0> ", text)


def one_line(text: str, limit: int = 1000) -> str:
    """`printable`, on one line, newlines shown as spaces, cut at `limit` characters, between words if near."""
    flat = " ".join(printable(text).split())
    cut = flat.rfind(" ", max(1, limit - 30), limit)
    return flat if len(flat) <= limit else flat[: limit - 1 if cut < 0 else cut] + "…"


def shortened(text: str, most: int) -> str:
    """The text, or of a longer one its first `most` characters, its length, and its digest."""
    if len(text) <= most:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{text[:most]}… [{len(text):,} characters, SHA-256 {digest}]"


def without_path(url: str) -> str:
    """An address without its path, where gateways put tokens; 16 bits of a digest distinguish paths."""
    address = _ADDRESS.fullmatch(url)
    if address is None or _KNOWN_PATH.fullmatch(address[2]):
        return url
    return f"{address[1]}/(path {hashlib.sha256(address[2].encode('utf-8', 'surrogatepass')).hexdigest()[:4]})"


class EngineStoppedError(RuntimeError):
    """The engine died in a round. What was finished is on disk, with the reason in each request that it ended. `hint`
    is what to try, beginning with a verb in lower case."""

    hint = "run again with --force, or a smaller --load"


class ServerStoppedError(EngineStoppedError):
    """A server stopped answering. What was finished is on disk; a resumed run repeats the rest."""

    hint = "go on with --resume when it answers again"


def reason_of(error: BaseException | str) -> str:
    """The first line of an error's message, with its type: libraries' messages can be pages long."""
    lines = str(error).strip().splitlines()
    first = lines[0].rstrip(". ") if lines else ""
    if isinstance(error, str):
        return one_line(first, 300)
    return one_line(f"{type(error).__name__}: {first}" if first else type(error).__name__, 300)
