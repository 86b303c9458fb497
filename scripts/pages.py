"""Writes the pages that are made from the program and its evidence: docs/commands.md and docs/gpus.md. A test compares.

python scripts/pages.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EVIDENCE = ROOT / "docs" / "evidence"
COMMANDS = """# Commands

Every option of every command, as `nondet COMMAND --help-all` shows them; `--help` shows the common ones. Made by
`python scripts/pages.py`; a test compares it with the program. Shell completion: `nondet --install-completion`."""
MACHINES = """# What was run on what

From the headers of the run files under `docs/evidence/`, by `python scripts/pages.py`. A machine that is not here was
not tried: bits, kernels and verdicts are of the machine and the versions that a run file names, and of no others."""
VERSIONS = ("torch", "triton", "transformers", "driver")
NOT_RUN = """No other machine has a run file here: no other NVIDIA GPU, no AMD or Intel GPU, no Apple silicon, and no
more than four GPUs at a time. Whether the invariant kernels run elsewhere, and hold, is not known: `nondet certify`
asks. A run file from a machine that is not listed is welcome."""


def commands_page() -> str:
    """What each command does, examples, and a table of its options."""
    import typer.main

    from nondet.cli import application

    root: Any = typer.main.get_command(application())
    groups: dict[str, list[str]] = {}
    blocks = []
    for name, command in root.commands.items():
        groups.setdefault(command.rich_help_panel, []).append(f"[{name}](#nondet-{name})")
        usage, options = command.described(command.make_context(f"nondet {name}", [], resilient_parsing=True))
        examples = "\n".join([usage, *map(str.strip, (command.epilog or "").splitlines()[1:])])
        lines = ["| option | what it does | default |", "|---|---|---|"]
        for one in options:
            lines.append(f"| `{one.names}` | {one.text} | {one.default} |".replace("  ", " "))
        blocks += [f"## nondet {name}", command.help, f"```text\n{examples}\n```", "\n".join(lines)]
    listed = "\n".join(f"- {group}: {', '.join(names)}" for group, names in groups.items())
    return "\n\n".join([COMMANDS, listed, f"```text\n{root.epilog}\n```", *blocks]) + "\n"


def machines_page() -> str:
    """Machines and versions, with what was run there."""
    from nondet.core.runfile import read_run
    from nondet.errors import UserError

    runs: dict[tuple[str, ...], dict[str, set[str]]] = {}
    packed = (path for path in EVIDENCE.rglob("*.jsonl.[gx]z") if ".traces." not in path.name)
    for path in sorted([*EVIDENCE.rglob("*.jsonl"), *packed]):
        try:
            header = read_run(path, allow_truncated=True).header
        except UserError:  # side files, and data of scripts
            continue
        known = header.environment
        gpu = None if header.plan.get("device") == "cpu" else known.get("gpu")  # asked for its host's cores alone
        machine = str(gpu or known.get("cpu") or "unknown")
        versions = [
            f"{name} {known[name]}" for name in ("torch", "triton", "transformers", "driver") if known.get(name)
        ]
        python = [f"Python {known['python']}"] if known.get("python") else []
        folder = path.relative_to(EVIDENCE).parts[0]
        count = f"{folder.partition('-x')[2] or 1} x " if gpu else ""
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
