"""Words that are out: the project's own idioms, each with what the field says. One list, for all that users read.

`words_out` finds them in any text: a page, a command's help, a report, what a terminal showed. What a program quotes (a
path, an option's name, a model's completion) is for the caller to leave out; `prose` does it for markdown, `strings`
and `docstrings` for a module: fields of an f-string or a format string are no words.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

__all__ = ["OUT", "docstrings", "prose", "strings", "words_out"]

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


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of a module's docstring and those of its public functions, classes and methods."""
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        assert isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        yield getattr(node, "lineno", 1), prose(ast.get_docstring(node) or "")
        if not isinstance(node, ast.FunctionDef):
            kinds = ast.ClassDef | ast.FunctionDef
            pending += [n for n in node.body if isinstance(n, kinds) and not n.name.startswith("_")]


def words_out(text: str) -> list[str]:
    """Each use of a word that is out, with the words around it and what to say instead."""
    text = " ".join(text.split())
    found = []
    for pattern, instead in _OUT:
        for match in pattern.finditer(text):
            around = text[max(0, match.start() - 30) : match.end() + 30]
            found.append(f"{match.group()!r} in {around!r}: say {instead}")
    return found
