"""Words that are out: the project's own idioms, each with what the field says. One list, for all that users read.

`words_out` finds them in any text: a page, a command's help, a report, what a terminal showed. What a program quotes (a
path, an option's name, a model's completion) is for the caller to leave out; `prose` does it for markdown.
"""

from __future__ import annotations

import re

__all__ = ["OUT", "prose", "words_out"]

# pattern, between borders of words, without regard to case -> what to say instead
OUT: dict[str, str] = {
    r"parted|parting|parts from|part from (?:its|the|that|each)": "differ, diverge",
    r"parts (?:in|at|on) (?:\d+|no|all|tokens|traces|logprobs|texts)": "differ, diverge",
    r"(?:tokens|traces|logprobs|answers|arms|completions|texts|bits) part": "differ, diverge",
    r"company|who else": "concurrent requests, the other requests",
    r"everybody|somebody|anybody|nobody": "name who is meant",
    r"asked (?:about|alone|of|live|for real|otherwise)|asks (?:about|of)": "tested",
    r"(?:is|was|were|be|been|not) asked(?! for)": "tested",
    r"(?:held|hold|holds|holding) (?:[\w-]+,? ){0,6}against": "compared with",
    r"alone": "solo, of a request; only, by itself, of anything else",
    r"(?:its|their|a row's|the row's|same|other|every|at several) places?": "position",
    r"places? in (?:it|the batch|a batch)": "position",
    r"moved": "changed",
    r"minds? (?:its|the|their)": "depends on",
    r"laid to|lay to": "attributed to",
    r"never had|were to be had|could be had": "not tested, not available",
    r"commonest": "most common",
    r"how surely": "confidence",
    r"guilty": "the first operator to differ, responsible",
}
_OUT = [(re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE), instead) for pattern, instead in OUT.items()]
_NOT_PROSE = re.compile(
    r"^```.*?^```$"  # fenced code
    r"|^(?: {4,}|\t)(?!\s*[*\d-])[^\n]*$"  # indented code, but not a list's second line
    r"|`[^`\n]+`"  # code in a line
    r"|\]\([^)\s]+\)"  # where a link leads
    r"|<[a-z/!][^>]*>",  # tags
    re.MULTILINE | re.DOTALL,
)


def prose(markdown: str) -> str:
    """The text of a page without code, tags and addresses."""
    return _NOT_PROSE.sub(" ", markdown)


def words_out(text: str) -> list[str]:
    """Each use of a word that is out, with the words around it and what to say instead."""
    text = " ".join(text.split())
    found = []
    for pattern, instead in _OUT:
        for match in pattern.finditer(text):
            around = text[max(0, match.start() - 30) : match.end() + 30]
            found.append(f"{match.group()!r} in {around!r}: say {instead}")
    return found
