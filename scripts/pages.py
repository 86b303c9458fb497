"""Writes what is made from the program and its evidence: docs/commands.md, docs/gpus.md, the end of docs/engines.md. A
test compares.

python scripts/pages.py [FOLDER]
"""

from __future__ import annotations

import itertools
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
RUN_HEADING = "## What was run on what\n"
RUN = """From the coverage files under `docs/evidence/` and the plugins' own tables, by `python scripts/pages.py`. A
version that was not run starts if its functions fit, and its log says that it was not run."""
# (engine, versions that were not run, whose sources have every function that its plugin replaces)
FIT = (("vLLM", "0.27.0 to 0.33.0 (`scripts/vllm_seams.py`)"),)
ON_CPUS = {("vLLM", "0.25.1"): "vLLM's build for CPUs, without the plugin"}
# what the plugins' own tables do not have
REFUSED = """attention sinks, ALiBi, encoders, MLA, an FP8 KV cache, context parallelism, two batches at a time (DBO),
speculative decoding, LoRA, sleep mode, transfers of weights or KV caches, offloading, windows that end at the prompt
(R-SWA), other worker classes, float32"""
AT_RISK = """experts (MoE) that are shared, quantized, split over ranks or not chosen by a softmax; attention in local
chunks or with static sinks; state spaces; pipeline stages; quantized layers whose kernel can't be certified; layers
that nondet does not know"""
REFUSED_BY_SGLANG = """pages of more than one token, windows, cross attention, other caches than of K and V by token, a
KV cache in FP8, float32, disaggregation, offloading, CUDA graphs of a whole prefill, of decode in parts or by
torch.compile"""
AT_RISK_UNDER_SGLANG = "experts (MoE), quantized layers, state spaces, layers that nondet does not know"


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


def engines_page() -> str:
    """The guide as it is, and below it which engine's version ran where, and what its plugin refuses."""
    from nondet.core.runfile import read_run
    from nondet.sglang import plugin as sglang
    from nondet.vllm import plugin as vllm

    by_hand = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8").partition(RUN_HEADING)[0]
    ran: dict[tuple[str, str], dict[str, set[int]]] = {}
    for path in sorted(EVIDENCE.rglob("coverage-*.jsonl")):
        header = read_run(path).header
        name = {"vllm": "vLLM", "sglang": "SGLang"}[header.command]
        argv = header.environment["argv"]
        ranks = [int(b) for a, b in itertools.pairwise(argv) if a in ("--tensor-parallel-size", "--ranks")]
        counts = ran.setdefault((name, header.plan[header.command]), {}).setdefault(header.environment["gpu"], set())
        counts.add(max(ranks, default=1))
    lines = ["| engine | version | on GPUs | on CPUs | its sources fit |", "|---|---|---|---|---|"]
    for name, versions in (("vLLM", vllm.TRIED), ("SGLang", sglang.TRIED)):
        for version in versions:
            gpus = [f"{', '.join(map(str, sorted(n)))} x {gpu}" for gpu, n in ran.get((name, version), {}).items()]
            cpus = ON_CPUS.get((name, version), "not run")
            lines.append(f"| {name} | {version} | {'; '.join(gpus) or 'not run'} | {cpus} | yes |")
        lines += [f"| {name} | {which} | not run | not run | yes |" for of, which in FIT if of == name]
    too = f"{', '.join(sglang._PARALLEL)} parallelism, {', '.join(sglang._NOT_COVERED)}"
    refused = [
        "| engine | refused at the start, by name | at risk, which refuses the start too |",
        "|---|---|---|",
        f"| vLLM | {' '.join(REFUSED.split())} | {' '.join(AT_RISK.split())} |",
        f"| SGLang | {' '.join(REFUSED_BY_SGLANG.split())}, {too} | {AT_RISK_UNDER_SGLANG} |",
    ]
    return "\n\n".join([f"{by_hand}{RUN_HEADING}".rstrip(), RUN, "\n".join(lines), "\n".join(refused)]) + "\n"


PAGES = {"commands.md": commands_page, "gpus.md": machines_page, "engines.md": engines_page}

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs"
    for name, page in PAGES.items():
        (folder / name).write_text(page(), encoding="utf-8")
