"""`vllm serve` as users start it, at all of its defaults: bfloat16 and FP8, stock and with nondet's plugin, each asked
by `nondet gate` at its defaults. The stock server has to be shut out, the plugin's to pass.

    python lab/vllm_first.py OUT [bf16-stock|bf16-nondet|fp8-stock|fp8-nondet ...] [--model FOLDER] [--ranks N]

One server at a time, since each takes nine tenths of a GPU. Answers in OUT are kept, so that a call that was cut off is
made again as it was. Prints what each start and gate took, what plugin and vLLM said, and whether it is as it has to
be; exit code 1 where one is not. FP8 is a copy of the model with a scale a row.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RUNS = ("bf16-stock", "bf16-nondet", "fp8-stock", "fp8-nondet")
SHUT = 3  # the exit code of a gate that saw a divergence
_SAID = re.compile(
    r"nondet: .*|Graph capturing finished.*|GPU KV cache size.*|chunked prefill.*max_num_batched_tokens.*"
)
_START_S, _GATE_S = 400.0, 300.0


def server_command(model: Path, port: int, ranks: int) -> list[str]:
    """`vllm serve` with no option that changes what it computes by."""
    more = ["--tensor-parallel-size", str(ranks)] if ranks > 1 else []
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--port", str(port), *more]


def gate_command(url: str, out: Path) -> list[str]:
    """`nondet gate` of a server, at its defaults."""
    return [sys.executable, "-m", "nondet", "gate", "--endpoint", url, "--out", str(out), "--force"]


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    """Until it answers. Raises RuntimeError: it ended before, or took too long."""
    limit = time.monotonic() + _START_S
    while time.monotonic() < limit:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):  # noqa: S310 - this machine's own
                return
        except OSError:
            if server.poll() is not None:
                raise RuntimeError(f"the server ended with exit code {server.returncode}") from None
            time.sleep(0.5)
    raise RuntimeError(f"the server did not answer within {_START_S:g} s")


def run(name: str, model: Path, out: Path, ranks: int) -> dict[str, Any]:
    """One server and its gate: what they took, and said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, plugin = f"http://127.0.0.1:{port}", name.endswith("nondet")
    own = {"NONDET_BATCH_INVARIANT": str(int(plugin)), "NONDET_COVERAGE": str(out / f"coverage-{name}.jsonl")}
    own |= {} if find_spec("flashinfer") else {"VLLM_USE_FLASHINFER_SAMPLER": "0"}  # else vLLM does not start
    log, began = out / f"{name}.log", time.monotonic()
    found: dict[str, Any] = {"run": name, "model": model.name, "ranks": ranks}
    with log.open("wb") as said:
        to: dict[str, Any] = {"stdout": said, "stderr": subprocess.STDOUT, "start_new_session": True}
        server = subprocess.Popen(server_command(model, port, ranks), env=os.environ | own, **to)
        try:
            wait_for(url, server)
            found["start_s"], began = round(time.monotonic() - began, 1), time.monotonic()
            asked = gate_command(url, out / f"{name}.jsonl")
            done = subprocess.run(asked, capture_output=True, text=True, timeout=_GATE_S, check=False)
            found |= {"gate_s": round(time.monotonic() - began, 1), "gate": done.returncode}
            found["verdict"] = (done.stdout + done.stderr).strip().splitlines()[-12:]
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            found["failed"] = str(error)
        finally:
            for how, patience in ((signal.SIGTERM, 60), (signal.SIGKILL, 10)):  # its engine's processes as well
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(server.pid, how)
                    server.wait(patience)
    found["said"] = list(dict.fromkeys(_SAID.findall(log.read_text(encoding="utf-8", errors="replace"))))
    found["as it has to be"] = found.get("gate") == (0 if plugin else SHUT)
    return found


def main(words: list[str]) -> int:
    """Run what is not there yet, and print all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", nargs="*", default=RUNS, metavar="RUN")
    parser.add_argument("--model", type=Path, default=ROOT / "nondet" / "embedded")
    parser.add_argument("--ranks", type=int, default=1)
    asked = parser.parse_args(words)
    asked.out.mkdir(parents=True, exist_ok=True)
    wrong = False
    for name in asked.runs:
        kept = asked.out / f"{name}.json"
        found = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
        if "gate" not in found:
            model = asked.model if name.startswith("bf16") else asked.out / "model-fp8"
            if not model.exists():
                how = ["row", str(model), "--vllm", "--model", str(asked.model)]
                subprocess.run([sys.executable, str(ROOT / "lab" / "fp8_model.py"), *how], check=True)
            found = run(name, model, asked.out, asked.ranks)
            kept.write_text(json.dumps(found, indent=1), encoding="utf-8")
        print(*(f"{key}: {value}" for key, value in found.items()), "", sep="\n", flush=True)
        wrong = wrong or not found["as it has to be"]
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
