"""Writes the pages that are made from the program and its evidence: docs/commands.md and docs/gpus.md. A test compares.

python scripts/pages.py [FOLDER]
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EVIDENCE = ROOT / "docs" / "evidence"
COMMANDS = """# Commands

What `nondet COMMAND --help` prints at 80 columns. Made by `python scripts/pages.py`; a test compares it with the
program. Completion in the shell: `nondet --install-completion`."""
MACHINES = """# What was run on what

From the headers of the run files under `docs/evidence/`, by `python scripts/pages.py`. A machine that is not here was
not tried: bits, kernels and verdicts are of the machine and the versions that a run file names, and of no others."""
VERSIONS = ("torch", "triton", "transformers", "driver")
NOT_RUN = """No other machine has a run file here: no other NVIDIA GPU, no AMD or Intel GPU, no Apple silicon, and no
more than two GPUs at a time. Whether the invariant kernels run elsewhere, and hold, is not known: `nondet certify`
asks. A run file from a machine that is not listed is welcome."""


def commands() -> list[str]:
    """Their names, in the order of `nondet --help`."""
    from nondet.cli import application

    names = [info.name or str(getattr(info.callback, "__name__", "")) for info in application().registered_commands]
    return [name.replace("_", "-") for name in names]


def help_of(*words: str) -> str:
    """The help, without trailing blanks."""
    from nondet.cli import main

    os.environ.update(COLUMNS="80", TERM="dumb", NO_COLOR="1")
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        main([*words, "--help"])
    return "\n".join(line.rstrip() for line in shown.getvalue().splitlines()).strip()


def commands_page() -> str:
    """The help of every command."""
    blocks = [COMMANDS, "## nondet", f"```text\n{help_of()}\n```"]
    for name in commands():
        blocks += [f"## nondet {name}", f"```text\n{help_of(name)}\n```"]
    return "\n\n".join(blocks) + "\n"


def machines_page() -> str:
    """Machines and versions, with what was run there."""
    from nondet.core.runfile import read_run
    from nondet.errors import UserError

    runs: dict[tuple[str, ...], dict[str, set[str]]] = {}
    packed = (path for path in EVIDENCE.rglob("*.jsonl.gz") if ".traces." not in path.name)
    for path in sorted([*EVIDENCE.rglob("*.jsonl"), *packed]):
        try:
            header = read_run(path, allow_truncated=True).header
        except UserError:  # side files, and data of scripts
            continue
        known = header.environment
        machine = str(known.get("gpu") or known.get("cpu") or "unknown")
        versions = [
            f"{name} {known[name]}" for name in ("torch", "triton", "transformers", "driver") if known.get(name)
        ]
        python = [f"Python {known['python']}"] if known.get("python") else []
        folder = path.relative_to(EVIDENCE).parts[0]
        count = f"{2 if folder.endswith('-x2') else 1} x " if known.get("gpu") else ""
        runs.setdefault((f"{count}{machine}", ", ".join(versions + python)), {}).setdefault(folder, set()).add(
            header.command
        )
    lines = ["| machine | versions | commands | evidence |", "|---|---|---|---|"]
    for (machine, versions), folders in runs.items():
        names = ", ".join(sorted(set.union(*folders.values())))
        links = ", ".join(
            f"[{folder}](evidence/{folder}/README.md)" if (EVIDENCE / folder / "README.md").exists() else folder
            for folder in folders
        )
        lines.append(f"| {machine} | {versions} | {names} | {links} |")
    return "\n\n".join([MACHINES, "\n".join(lines), NOT_RUN]) + "\n"


PAGES = {"commands.md": commands_page, "gpus.md": machines_page}

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs"
    for name, page in PAGES.items():
        (folder / name).write_text(page(), encoding="utf-8")
