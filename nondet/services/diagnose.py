"""`nondet diagnose`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from nondet.errors import UserError
from nondet.sampling.plan import Load, parse_load
from nondet.services import options as o
from nondet.services.run import Output, Request, Sink
from nondet.services.sample import open_model, prompt_text

# Many short rounds, because completions of one round are not independent, and differences show within few tokens.
_LOAD, _N, _MAX_TOKENS = "default,targets=12,others=12,spread=12", 60, 64
_MOST = 10_000
# For compiling ahead: least number of cores; most bytes of the model; characters of about 640 tokens of most text.
_CORES_LEAST, _WEIGHTS_MOST, _FAR_CHARACTERS = 8, 4 * 2**30, 2600


@dataclass(frozen=True, kw_only=True)
class DiagnoseRequest(o.ModelOptions, Request):
    """The options of `nondet diagnose`."""

    model: o.MODEL = None
    prompt: o.PROMPT = None
    prompt_file: o.PROMPT_FILE = None
    load: str = o.own(
        'Concurrent requests: light, default, heavy, or "others=60,budget=256,...".', default=_LOAD, complete=o.LOADS
    )
    n: int | None = o.own(
        "Completions of the prompt under load.",
        shown=str(_N),
        check=o.Range(2, _MOST, f"Give the number of completions, from 2 to {_MOST:,}."),
    )
    within: float | None = o.own(
        "Time limit in seconds: steps not begun by then are skipped, and the report lists them. 0: no limit.",
        shown="no step is skipped, but fewer rounds run, for about 180 on a CPU, 120 on a GPU; 0 with --n",
        check=o.Range(0, sys.float_info.max, "Give seconds, or 0 for no limit."),
    )
    max_tokens: int = o.own("Tokens in each completion.", default=_MAX_TOKENS)

    def _check(self) -> None:
        load = self.engine_load
        if load.graphs:
            raise UserError("--load graphs=on can't be diagnosed: a replayed graph runs no Python", "Leave it out.")
        if load.requests < 2 or load.others + load.targets < 2:
            what = f"--load {self.load}: every request would run solo"
            raise UserError(what, "Give a load with concurrent requests, such as default.")

    @cached_property
    def engine_load(self) -> Load:
        """The other requests."""
        return parse_load(self.load)


def diagnose(request: DiagnoseRequest, sink: Sink) -> Path:
    """Find out whether a model's output depends on its batch, where, why, what cures it, and what that costs."""
    output = Output(request, "diagnose", sink)
    output.check_side_file()
    text = prompt_text(request.prompt, request.prompt_file)
    with _compiling_ahead(request, text) if _can_compile_ahead(request) else nullcontext():
        from nondet.diagnose.steps import WITHIN_S, Diagnoser  # torch is loaded while the others start
        from nondet.sampling.collect import plan_prompts

        loaded = open_model(request, sink)
        n, seed, within_s, bound = request.n, request.seed, request.within, bool(request.within)
        counts = (_N if n is None else n, request.max_tokens, seed)
        plan, described = plan_prompts(loaded, request.engine_load, [text], *counts, ["stock", "invariant"])
        if within_s is None:
            within_s = WITHIN_S[loaded.device] if n is None else 0.0
        described |= {"within_s": within_s} | ({"bound": True} if bound else {})
        with output.recording("diagnose", described, seed) as writer, sink.steps() as say:
            Diagnoser(loaded, plan, writer, seed, request.threads, say, within_s, bound).run()
    return output.present()


def _can_compile_ahead(request: DiagnoseRequest) -> bool:
    """Whether there is a GPU, enough cores for more processes and a model small enough for each to hold a copy."""
    if request.device == "cpu" or not Path("/dev/nvidia0").exists() or (os.cpu_count() or 1) < _CORES_LEAST:
        return False
    if request.model is None:
        return True
    weights = list(Path(request.model).glob("*.safetensors")) if Path(request.model).is_dir() else []
    return 0 < sum(path.stat().st_size for path in weights) <= _WEIGHTS_MOST


@contextmanager
def _compiling_ahead(request: DiagnoseRequest, text: str) -> Iterator[None]:
    """While the block runs, three other processes complete requests under the invariant kernels. Their results are
    discarded, and failures do not matter: what they compile and prove is kept on disk, where the diagnosis finds it
    when it reaches the fix."""
    with tempfile.TemporaryDirectory(prefix="nondet-ahead-") as folder:
        prompt, far = Path(folder, "prompt.txt"), Path(folder, "far.txt")
        prompt.write_text(text, encoding="utf-8")
        far.write_text(text * (1 + _FAR_CHARACTERS // len(text)), encoding="utf-8")
        off, children = subprocess.DEVNULL, []
        for i, words in enumerate(ahead_argv(request, prompt, far)):
            command = [sys.executable, "-m", "nondet", *words, "--out", str(Path(folder, f"{i}.jsonl"))]
            children.append(subprocess.Popen(command, stdin=off, stdout=off, stderr=off))  # noqa: S603 - this program
        try:
            yield
        finally:
            for child in children:
                child.kill()
                child.wait()


def ahead_argv(request: DiagnoseRequest, prompt: Path, far: Path) -> list[list[str]]:
    """What the processes that compile ahead are started with. Two run this load: one with only attention invariant,
    which is the first replacement that most traces try, and which launches the kernels in other forms. The third runs a
    long prompt; a load with a budget of its own refuses that."""
    words = ["sample", "--no-cuda-graphs"]
    for name in ("model", "seed", "dtype", "device", "max_tokens"):
        if (value := getattr(request, name)) is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    words += ["--trust-remote-code"] if request.trust_remote_code else []
    short = ["--prompt-file", str(prompt), "--load", request.load, "--n", str(request.n or _N)]
    long = ["--prompt-file", str(far), "--load", f"{request.load},budget=1100", "--n", "1"]
    runs = ((short, "invariant:attention"), (short, "invariant"), (long, "invariant"))
    return [[*words, *load, "--impl", impl] for load, impl in runs]
