"""How long a large run takes to analyse: `nondet report` of 10,000 completions of 1,000 tokens, all traces distinct.

    python lab/analysis_scale.py [--texts 1000] [--completions 10000] [--tokens 1000] [--profile]

Makes a run file in a temporary folder (every text parts from an earlier one at a drawn place, every completion has
logprobs of its own), reads it with `nondet report` in a process of its own, and prints that process's CPU seconds and
its largest resident memory. What is drawn is made up; what is timed is what any run file goes through.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from nondet.core.records import Completion, Round
from nondet.core.runfile import open_run
from nondet.core.traces import Trace, TraceWriter, tokens_digest, trace_digest

_VOCABULARY = 4096
_PER_ROUND = 40


def texts_of(count: int, tokens: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Token ids: the first text, and others that part at a drawn place from the first or, every other one, from any."""
    texts = [rng.integers(0, _VOCABULARY, tokens)]
    for number in range(count - 1):
        text = texts[rng.integers(len(texts)) if number % 2 else 0].copy()
        at = int(rng.integers(tokens))
        text[at:] = rng.integers(0, _VOCABULARY, tokens - at)
        text[at] = (texts[0][at] + 1 + rng.integers(_VOCABULARY - 1)) % _VOCABULARY
        texts.append(text)
    return texts


def make(path: Path, completions: int, tokens: int, texts: int) -> None:
    """The run file and its side file."""
    rng = np.random.default_rng(0)
    known = texts_of(texts, tokens, rng)
    # each text once, then the commoner the earlier it is
    weights = 1.0 / np.arange(1, texts + 1)
    rest = rng.choice(texts, completions - texts, p=weights / weights.sum())
    chosen = rng.permutation(np.concatenate([np.arange(texts), rest]))
    plan = {"prompts": [{"text": "Once upon a time", "tokens": 4}], "impls": ["stock"]}
    writer = open_run(path, command="sample", plan=plan, environment={})
    side = TraceWriter(path, resume=False, piece=lambda token: f" w{token}")
    for number, index in enumerate(chosen.tolist()):
        ids = known[index].tolist()
        logprobs = (-rng.exponential(1.0, tokens)).astype("<f4").tobytes()
        digest = trace_digest(ids, logprobs)
        margins = rng.exponential(2.0, tokens).astype("<f4").tobytes()
        runner_up = rng.integers(0, _VOCABULARY, tokens).tolist()
        text = "".join(f" w{token}" for token in ids)
        side.write(
            [Trace(digest=digest, token_ids=ids, logprobs=logprobs, margins=margins, runner_up=runner_up, text=text)]
        )
        writer.write(
            Completion(
                impl="stock", request=f"t{number:06d}", round=number // _PER_ROUND, prompt=0,
                tokens_digest=tokens_digest(ids), trace=digest, n_tokens=tokens, finish="length", arrival_step=0,
                schedule=[[0, 1, 4], [1, tokens - 1, 1]], batch_min=1, batch_max=4,
            )
        )  # fmt: skip
    for number in range(-(-completions // _PER_ROUND)):
        writer.write(
            Round(
                impl="stock", round=number, targets=_PER_ROUND, others=0, steps=tokens, tokens=tokens * _PER_ROUND,
                seconds=1.0,
            )
        )  # fmt: skip
    side.close()
    writer.finish()


def machine() -> str:
    """The processor's name, as the kernel has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    fields = dict(map(str.strip, line.split(":", 1)) for line in lines if ":" in line)
    return f"{fields.get('model name', 'processor')}, {os.cpu_count()} cores"


def main() -> None:
    """Make it, read it, say what that took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=1_000)
    parser.add_argument("--texts", type=int, default=1_000)
    parser.add_argument("--profile", action="store_true", help="print where the time goes (slower)")
    parser.add_argument("--keep", type=Path, help="make the run file here, and leave it; read what is there already")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.keep or Path(folder) / "run.jsonl"
        if not path.exists():
            make(path, options.completions, options.tokens, options.texts)
        size = sum(f.stat().st_size for f in path.parent.glob(f"{path.stem}*.jsonl")) / 1e6
        print(
            f"{options.completions:,} completions of {options.tokens:,} tokens, {options.texts:,} distinct texts, "
            f"{options.completions:,} distinct traces; {size:.0f} MB of run files"
        )
        print(f"{machine()}; Python {platform.python_version()}")
        profile = ["-m", "cProfile", "-s", "cumulative"] if options.profile else []
        command = [sys.executable, *profile, "-m", "nondet.cli", "report", str(path)]
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    print("\n".join(done.stdout.splitlines()[: 60 if options.profile else 12]))
    print(
        f"nondet report RUN: {after.ru_utime - before.ru_utime:.1f} s of user CPU, "
        f"{after.ru_stime - before.ru_stime:.1f} s of system CPU, {wall:.1f} s by the clock, "
        f"{after.ru_maxrss / 1e3:.0f} MB at most"
    )


if __name__ == "__main__":
    main()
