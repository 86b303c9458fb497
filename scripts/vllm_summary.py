"""What `scripts/evidence_vllm.sh` found: traces, speed, the same bits in fresh processes, and a start's stages.

    python scripts/vllm_summary.py FOLDER

Exit code 1 where the plugin's traces differ from solo, or between fresh processes.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from datetime import datetime
from pathlib import Path

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


def main(folder: Path) -> int:
    """Print it all."""
    digests: dict[str, dict[str, str]] = defaultdict(dict)
    wrong = []
    for path in sorted(folder.glob("*.json")):
        seen = json.loads(path.read_text(encoding="utf-8"))
        load = seen["load"]
        traces = {
            n: f"{x['traces_as_alone']} of {x['copies']}, {x['distinct_traces']} distinct" for n, x in load.items()
        }
        mine = {name: one["digest"] for name, one in seen["solo"].items()}
        speed = {n: one["tokens_per_s"] for n, one in seen.get("speed", {}).items()}
        print(path.stem, traces, mine, speed, seen.get("long", ""))
        if seen["mode"] == "nondet" and any(x["traces_as_alone"] < x["copies"] for x in load.values()):
            wrong.append(path.stem)
        log = path.with_suffix(".log")
        if log.exists():
            print(f"  start {seen['start_s']} s:", stages(log.read_text(encoding="utf-8", errors="replace")))
        argv = seen["argv"]
        asked = " ".join(word for i, word in enumerate(argv) if "--out" not in argv[max(0, i - 1) : i + 1])
        digests[asked][path.stem] = json.dumps(mine, sort_keys=True)
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
