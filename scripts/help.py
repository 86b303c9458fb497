"""Writes docs/commands.md: the help of every command, as a terminal of 80 columns shows it. A test compares.

python scripts/help.py [FILE]
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEAD = """# Commands

What `nondet COMMAND --help` prints at 80 columns. Made by `python scripts/help.py`; a test compares it with the
program. Completion in the shell: `nondet --install-completion`.
"""


def commands() -> list[str]:
    """Their names, in the order of `nondet --help`."""
    from nondet.cli import app

    names = [info.name or str(getattr(info.callback, "__name__", "")) for info in app.registered_commands]
    return [name.replace("_", "-") for name in names]


def help_of(*words: str) -> str:
    """The help, without trailing blanks."""
    from nondet.cli import main

    os.environ.update(COLUMNS="80", TERM="dumb", NO_COLOR="1")
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        main([*words, "--help"])
    return "\n".join(line.rstrip() for line in shown.getvalue().splitlines()).strip()


def page() -> str:
    """The page."""
    blocks = [HEAD, "## nondet", f"```text\n{help_of()}\n```"]
    for name in commands():
        blocks += [f"## nondet {name}", f"```text\n{help_of(name)}\n```"]
    return "\n\n".join(block.strip() for block in blocks) + "\n"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "commands.md"
    out.write_text(page(), encoding="utf-8")
