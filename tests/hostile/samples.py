"""A run file of every command, cut down to a few records of each kind, for tests that change one of its fields."""

from __future__ import annotations

import json
from pathlib import Path

from nondet.core.runfile import lines_of
from nondet.core.traces import traces_path

EVIDENCE = Path(__file__).resolve().parents[2] / "docs" / "evidence"
# The smallest kept runs that have each kind of record of their command.
KEPT = {
    "diagnose": "cpu/diagnose-fp8.jsonl.xz",
    "trace": "cpu-xeon/trace.jsonl",
    "trace of vLLM": "vllm/trace-cpu.jsonl.gz",
    "mismatch": "h200/mismatch.jsonl.gz",
    "rl": "cpu/trl-invariant.jsonl.gz",
    "certify": "cpu/certify-gradients.jsonl.gz",
    "embed": "cpu-xeon/embed.jsonl",
    "gate": "servers/transformers-serve/gate.jsonl",
    "seeds": "servers/transformers-serve/seeds.jsonl.gz",
    "axes": "cpu-xeon/ranks.jsonl.gz",
    "replay": "h200/shrink.jsonl",
    "coverage": "vllm/coverage-gemma2.jsonl",
}
_EACH = 3  # records of a kind that are left


def cut(name: str, folder: Path) -> Path:
    """The run of that name with few records: a report says what is missing of rounds and arms.

    What its plan counts on is left out of the plan, and the end line counts what is left.
    """
    lines = [json.loads(line) for _, line, _ in lines_of(EVIDENCE / KEPT[name])]
    header, records, left = lines[0], [], dict[str, int]()
    for record in lines[1:-1]:
        kind = record["type"]
        if kind == "mismatch-rollout":
            kind += record["impl"]
        limit = 40 if kind in ("step", "axis") else _EACH
        left[kind] = left.get(kind, 0) + 1
        if left[kind] <= limit and kind != "round":
            records.append(record)
    for counted in ("texts", "steps", "scored"):
        header["plan"].pop(counted, None)
    whole = [header, *records, {"type": "end", "records": len(records), "seconds": 1.0}]
    path = folder / f"{name.replace(' ', '-')}.jsonl"
    if (side := traces_path(EVIDENCE / KEPT[name])).exists():
        traces_path(path).write_bytes(b"".join(line + b"\n" for _, line, _ in lines_of(side)))
    path.write_text("".join(json.dumps(record) + "\n" for record in whole), encoding="utf-8")
    return path
