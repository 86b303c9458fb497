"""What `lab/evidence_vllm.sh` found: traces, speed, the same bits in fresh processes, and a start's stages.

    python lab/vllm_summary.py FOLDER

Exit code 1 where the plugin's traces differ from solo, or between fresh processes, or a planted fault was not found.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import defaultdict
from datetime import datetime
from pathlib import Path
from typing import Any

# What ends a stage, in the order in which a worker says it; a line that is not there has no stage.
STAGES = {
    "arguments": "Initializing a V1 LLM engine",
    "weights": "Model loading took",
    "proofs": r"nondet: \d+ shapes of weights",
    "torch.compile": "torch.compile (?:and initial profiling|took)",
    "memory": "GPU KV cache size",
    "attention": r"CuTeDSL warmup|nondet: attention in",
    "graphs": "Graph capturing finished",
    "sampler": "init engine",
}
_STAMP = re.compile(r"(?:INFO|WARNING) (\d\d-\d\d \d\d:\d\d:\d\d) ")


def stages(log: str) -> dict[str, int]:
    """Seconds of each stage of a start, as vLLM's log has its time: whole seconds."""
    found: dict[str, int] = {}
    before = None
    places = dict.fromkeys(STAGES)
    for line in log.splitlines():
        stamp = _STAMP.search(line)
        if stamp is None:
            continue
        now = datetime.strptime(f"2000-{stamp[1]}", "%Y-%m-%d %H:%M:%S")
        before = before or now
        for name, said in STAGES.items():
            if re.search(said, line):
                places[name] = now
    for name, at in places.items():
        if at is not None and before is not None:
            found[name] = int((at - before).total_seconds())
            before = at
    return found


def ratios(stock: dict[str, Any], ours: dict[str, Any]) -> dict[str, tuple[float, float, float]]:
    """Of each cell the speed over stock: of the medians, and the least and the most of any two repeats."""

    def over(a: list[float], b: list[float]) -> tuple[float, float, float]:
        return statistics.median(a) / statistics.median(b), min(a) / max(b), max(a) / min(b)

    found = {n: over(one["s"], ours["speed"][n]["s"]) for n, one in stock.get("speed", {}).items()}
    for a, b in zip(stock.get("long", ()), ours.get("long", ()), strict=False):
        cell, (left, right) = f"{a['requests']}x{a['keys']}", (one.get("s") for one in (a, b))
        if left and right:  # runs of 8 and of 136 tokens were timed in turns: each two neighbours give a step's time
            steps = ([y - x for x, y in zip(s["8"], s["136"], strict=True)] for s in (left, right))
            found |= {f"{cell} prefill": over(left["8"], right["8"]), f"{cell} step": over(*steps)}
        else:
            found[f"{cell} prefill"] = (a["prefill_s"] / b["prefill_s"],) * 3
            found[f"{cell} step"] = (a["ms_per_step"] / b["ms_per_step"],) * 3
    return found


def rates(seen: dict[str, Any]) -> dict[str, float]:
    """Of each cell tokens a second: new ones, or those of a prompt."""
    found = {n: float(one["tokens_per_s"]) for n, one in seen.get("speed", {}).items()}
    for one in (one for one in seen.get("long", ()) if one.get("s")):
        cell, count = f"{one['requests']}x{one['keys']}", one["requests"]
        found[f"{cell} prefill"] = count * one["keys"] / statistics.median(one["s"]["8"])
        steps = [b - a for a, b in zip(one["s"]["8"], one["s"]["136"], strict=True)]
        found[f"{cell} step"] = 128 * count / statistics.median(steps)
    return found


# What of a run's options can change the bits of a request alone: the rest is load and time.
_OF_ONE = ("--mode", "--model", "--tokens", "--ranks", "--plant", "--eager", "--prefix-cache")


def standings(folder: Path, name: str) -> dict[str, int]:
    """Layers by standing and reason, as the coverage file of that run has them."""
    count: dict[str, int] = defaultdict(int)
    for path in folder.glob(f"coverage-{name}-[0-9]*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            one = json.loads(line)
            if one.get("type") == "layer-standing":
                count[f"{one['standing']}: {one['why'][:60]}"] += one["layers"]
    return dict(count)


def tell_speed(timed: dict[str, dict[str, Any]]) -> None:
    """Tokens a second of the modes of each model side by side, and every other mode over stock."""
    tables: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for name, seen in timed.items():
        base, _, mode = name.rpartition("-")
        if mode == seen["mode"] and seen.get("speed"):
            tables[base][mode] = rates(seen)
    for base, modes in tables.items():
        print(f"{base}, tokens a second: {', '.join(modes)}")
        for cell in dict.fromkeys(cell for rate in modes.values() for cell in rate):
            row = (f"{rate[cell]:9,.0f}" if cell in rate else " " * 9 for rate in modes.values())
            print(f"  {cell:>16} {' '.join(row)}")
    for name, seen in timed.items():
        base, _, mode = name.rpartition("-")
        stock = timed.get(f"{base}-stock")
        fit = stock is not None and mode == seen["mode"] != "stock" and seen.get("speed")
        cells = ratios(stock, seen) if stock is not None and fit else {}
        said = [f"{cell} {middle:.3f} ({low:.3f} to {high:.3f})" for cell, (middle, low, high) in cells.items()]
        loads = [middle for cell, (middle, *_) in cells.items() if "x" not in cell]
        if loads:
            mean, worst = statistics.geometric_mean(loads), min(middle for middle, *_ in cells.values())
            figures = f"geometric mean of {len(loads)} {mean:.3f}, worst cell {worst:.3f}"
            print(f"{name} over stock: {'; '.join([*said, figures])}")


def main(folder: Path) -> int:
    """Print it all."""
    timed: dict[str, dict[str, Any]] = {}
    digests: dict[str, dict[str, str]] = defaultdict(dict)
    wrong = []
    for path in sorted(folder.glob("*.json")):
        seen = json.loads(path.read_text(encoding="utf-8"))
        planted = seen["argv"][seen["argv"].index("--plant") + 1] if "--plant" in seen["argv"] else ""
        if "refused" in seen:
            print(path.stem, "refused, as it has to be:", seen["refused"][:200])
            continue
        load = seen["load"]
        timed[path.stem] = seen
        alike = all(x["traces_as_alone"] == x["copies"] for x in load.values())
        if planted and seen["mode"] == "stock" and alike:
            wrong.append(f"{path.stem}: the planted fault was not found")
        traces = {
            n: f"{x['traces_as_alone']} of {x['copies']}, {x['distinct_traces']} distinct" for n, x in load.items()
        }
        mine = {name: one["digest"] for name, one in seen["solo"].items()}
        speed = {n: one["tokens_per_s"] for n, one in seen.get("speed", {}).items()}
        print(path.stem, traces, mine, speed, seen.get("long", ""))
        for what, layers in standings(folder, path.stem).items():
            print(f"  {layers} {what}")
        if seen["mode"] == "nondet" and not alike:
            wrong.append(path.stem)
        log = path.with_suffix(".log")
        if log.exists():
            print(f"  start {seen['start_s']} s:", stages(log.read_text(encoding="utf-8", errors="replace")))
        argv = seen["argv"]
        words = [" ".join(argv[i : i + 2 - (word in _OF_ONE[-2:])]) for i, word in enumerate(argv) if word in _OF_ONE]
        asked = " ".join([*sorted(words), seen.get("disabled_kernels", "")])
        digests[asked][path.stem] = json.dumps(mine, sort_keys=True)
    tell_speed(timed)
    for same, names in digests.items():
        if len(names) > 1:
            alike = len(set(names.values())) == 1
            print(f"{len(names)} fresh processes, {'the same bits' if alike else 'other bits'}: {', '.join(names)}")
            if not alike and "--mode nondet" in same:
                wrong.append(", ".join(names))
    for what in wrong:
        print(f"DIFFERS: {what}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
