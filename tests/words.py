"""Words that are out: the project's own idioms, each with what the field says; one list for texts, one for names.

What a program quotes is for the caller to leave out: `prose` does it for markdown, `strings` and `remarks` for code.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator

__all__ = ["MOST_NAMES_OUT", "OUT", "OUT_OF_NAMES", "names_out", "prose", "remarks", "strings", "words_out"]

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
    r"likeliest": "most likely",
    r"closer race": "a smaller margin",
    r"(?:came|come|comes) (?:again|out) (?:bit|equal|as|the same|otherwise|alone)": "is bit-identical, differs",
    r"otherwise than": "unlike, differs from",
    r"played again|gone on with": "replayed, continued",
    r"keeps? to (?:a|its|no|the) seeds?": "respects a seed",
    r"can(?:not|'t) be (?:had|said|answered)": "is not known, not available, not decided",
    r"(?:says?|tells?) (?:nothing|of|about)|(?:is|are|not) told|would tell|no \w+ tells": "shows",
    r"batch or run may": "may be batch or run-to-run effects",
    r"takes? no (?:share|part) in": "is not counted in",
}
# a word of a name -> what to say instead; fields of run files are not renamed
OUT_OF_NAMES: dict[str, str] = {
    "parted": "differ, differing",
    "told": "shown, reported, or what it is: a report, a verdict",
    "asked": "requested, wanted, tested",
    "guilty": "responsible, at fault",
    "seam": "hook, patched function",
    "tape": "record",
    "room": "buffer, space, lines",
    "company": "concurrent, others",
}
# package -> most definitions with such a name; the numbers only fall (in core: fields of run files)
MOST_NAMES_OUT = {"core": 7}
_PLAIN, _CAMEL = "|".join(OUT_OF_NAMES), "|".join(map(str.title, OUT_OF_NAMES))
_IN_NAMES = re.compile(rf"(?<![a-zA-Z])(?i:{_PLAIN})s?(?![a-zA-Z])|(?:{_CAMEL})s?(?![a-z])")
_REMARK = re.compile(r'^ *r?"""(.*?)"""|((?:(?:^ *|  )#[^\n]*\n)+)', re.MULTILINE | re.DOTALL)
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


def strings(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each string of a module that has a space in it, but for docstrings; fields left out."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    left = {id(n.value) for n in nodes if isinstance(n, ast.Expr)}
    left |= {id(part) for n in nodes if isinstance(n, ast.JoinedStr) for part in n.values}
    for node in nodes:
        if id(node) in left:
            continue
        text = ""
        if isinstance(node, ast.JoinedStr):
            text = "".join(v.value if isinstance(v, ast.Constant) else "{}" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = re.sub(r"\{[^{}\s]*\}", "{}", node.value)
        if " " in text:
            yield node.lineno, text


def words_out(text: str) -> list[str]:
    """Each use of a word that is out, with the words around it and what to say instead."""
    text = " ".join(text.split())
    found = []
    for pattern, instead in _OUT:
        for match in pattern.finditer(text):
            around = text[max(0, match.start() - 30) : match.end() + 30]
            found.append(f"{match.group()!r} in {around!r}: say {instead}")
    return found


def names_out(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of each function, class, argument and variable that a module calls by a word that is out."""
    for node in ast.walk(ast.parse(source)) if _IN_NAMES.search(source) else ():
        name = ""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr
        if _IN_NAMES.search(name):
            yield node.lineno, name


def remarks(source: str) -> str:
    """The docstrings and comments of a module, private ones as well, without what they quote."""
    found = _REMARK.findall(source)
    texts = (docstring or re.sub(r"^ *#", "", comment, flags=re.MULTILINE) for docstring, comment in found)
    return re.sub(r'"[^"]*"', " ", prose("\n\n".join(map(inspect.cleandoc, texts))))
