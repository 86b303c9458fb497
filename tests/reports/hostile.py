"""Text that attacks every format: markup, terminals, tables, fences, mentions, reading order."""

from __future__ import annotations

from collections.abc import Sequence

PIECES = [
    " plain",
    "<script>alert(1)</script>",
    "</script><!--",
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    " | a | b |",
    "`tick` ```fence",
    "\u202egnp.exe",
    "\x00nul",
    "\x9b31mC1",
    "[link](http://evil.example/)",
    "![i](http://evil.example/i)",
    "@everyone #1",
    "\n# heading\n- item\n",
    "\n```\nout of the fence\n````\n",
    "[bold red]rich[/bold red]",
    "$x^2$ ~~gone~~ **bold**",
    "&amp;&lt;",
    "\"'>",
    "\u2028",
    "https://evil.example www.evil.example",
    "{{ 7 * 7 }}{% raw %}",
    "</details></td>",
    "<img src=x onerror=alert(1)>",
    " end",
]
NAME = "mine.mod:<b>|`f`\x1b[1m\u202e@user"


def parts(impl: str, number: int) -> tuple[Sequence[tuple[int, int]], int]:
    """A few completions that part in the middle of all this."""
    return (((3 + number % 4, 1),), 1) if number % 5 == 0 else ((), 0)
