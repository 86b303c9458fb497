"""What can go wrong by the user's hand, said in one line: what, the value got, what to try."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["UnknownNameError", "UnrecordableError", "UserError", "WrongResultError", "suggestion"]


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
    """What no reader would take; nothing of it was written."""


class WrongResultError(Exception):
    """A result that no order of additions explains: another shape or dtype than the operator's, inputs written to.

    Whatever measures an implementation makes it a row of status "wrong" with this message as the reason.
    """


def suggestion(name: str, known: Iterable[str]) -> str:
    """The closest known names, or all of them where none is close."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return "Did you mean " + " or ".join(close) + "?"
    return "Known: " + ", ".join(names)
