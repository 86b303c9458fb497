"""`nondet sample`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nondet.commands.common import (
    check_fail_on,
    check_reports,
    gate,
    pick_device,
    pick_out,
    progress_bar,
    say,
    set_threads,
    show,
    write_reports,
)
from nondet.errors import UnknownNameError, UserError

if TYPE_CHECKING:
    from nondet.runfile import RunWriter
    from nondet.sampling.model import LoadedModel
    from nondet.sampling.plan import Plan

__all__ = ["SampleRequest", "run"]

# Long enough for most prompts of the embedded model to part, short enough for 1,000 completions in a minute or two.
_MAX_TOKENS = 64


@dataclass(frozen=True)
class SampleRequest:
    """The command line of `nondet sample`, as typed."""

    n: int = 1000
    prompt: str | None = None
    prompt_file: Path | None = None
    max_tokens: int | None = None
    model: str | None = None
    impls: list[str] | None = None
    load: str = "default"
    seed: int = 0
    dtype: str = "bfloat16"
    device: str = "auto"
    threads: int | None = None
    trust_remote_code: bool = False
    out: Path | None = None
    force: bool = False
    resume: bool = False
    reports: list[Path] = field(default_factory=list)
    as_json: bool = False
    fail_on: str | None = None


def run(request: SampleRequest) -> None:
    """Complete the prompt under each implementation, streaming completions to the run file, then show what they are.

    Raises:
        UserError: bad input, found before anything is sampled or written.
        typer.Exit: as `gate` says.
    """
    if not 1 <= request.n <= 1_000_000:
        raise UserError(f"--n {request.n} makes no sense", "Give the number of completions, from 1 to 1,000,000.")
    from nondet.traces import traces_path

    impls = _implementations(request.impls)
    check_fail_on(request.fail_on)
    check_reports(request.reports, force=request.force)
    out = pick_out(request.out, "sample", force=request.force, resume=request.resume)
    side = traces_path(out)
    if side.exists() and not (request.force or out.exists()):  # where the run itself exists, `open_run` asks
        raise UserError(f"{side} exists", "Use --force to overwrite it, or another --out.")
    text = _prompt(request)

    from nondet.environment import collect as collect_environment
    from nondet.runfile import open_run, read_run
    from nondet.sampling.collect import describe
    from nondet.sampling.coverage import coverage_lines, speed_lines
    from nondet.sampling.model import check_lengths, load_model
    from nondet.sampling.plan import build_plan, parse_load

    load = parse_load(request.load)
    device = pick_device(request.device)
    set_threads(request.threads)
    loaded = load_model(request.model, request.dtype, device, trust_remote_code=request.trust_remote_code)
    prompt = loaded.encode(text)
    max_tokens = _MAX_TOKENS if request.max_tokens is None else request.max_tokens
    check_lengths(loaded, prompt, max_tokens)
    plan = build_plan(
        load,
        n=request.n,
        seed=request.seed,
        prompt=prompt,
        max_new_tokens=max_tokens,
        context=loaded.context or 2**31,
        encode=loaded.encode_plain,
    )
    described = describe(
        loaded,
        plan,
        prompt=text,
        prompt_tokens=len(prompt),
        max_new_tokens=max_tokens,
        seed=request.seed,
        impls=impls,
    )
    writer = open_run(
        out,
        command="sample",
        plan=described,
        environment=collect_environment(request.seed),
        force=request.force,
        resume=request.resume,
    )
    try:
        _collect(loaded, plan, impls, writer, request)
        writer.finish()
    except KeyboardInterrupt:
        writer.close()
        say(f"nondet: stopped; finished rounds are in {out}. Repeat the command with --out {out} --resume.")
        raise
    finished = read_run(out)
    show(finished, out, as_json=request.as_json)
    if not request.as_json:  # there, every round says it
        for line in [*coverage_lines(finished), *speed_lines(finished)]:
            say(line)
    say(f"run file: {out}")
    for path in write_reports(request.reports, [finished]):
        say(f"report: {path}")
    gate(finished, request.fail_on)


def _collect(loaded: LoadedModel, plan: Plan, impls: list[str], writer: RunWriter, request: SampleRequest) -> None:
    """Sample with a progress bar; where stock parted nowhere, compare its operators at the sizes met and say so."""
    from nondet.runfile import read_run
    from nondet.sampling.collect import collect
    from nondet.sampling.shapes import explain_no_divergence, shapes_met

    with progress_bar() as progress:
        tasks = {impl: progress.add_task(impl, total=plan.targets, start=False) for impl in impls}

        def advance(impl: str, done: int, total: int, tokens: int) -> None:
            progress.start_task(tasks[impl])
            progress.update(tasks[impl], completed=done, description=f"{impl}, {tokens} tokens")

        collect(loaded, plan, impls, writer, seed=request.seed, threads=request.threads, progress=advance)
    so_far = read_run(writer.path)
    for impl in impls:
        traces = {c.trace for c in so_far.completions if c.impl == impl and c.status == "ok"}
        if impl == "stock" and len(traces) == 1:
            for row in explain_no_divergence(loaded, shapes_met(so_far, impl), impl, request.seed):
                if row.key not in writer.done:
                    writer.write(row)


def _implementations(asked: list[str] | None) -> list[str]:
    """The implementations, each once; "both" is stock and invariant.

    Raises:
        UserError: an unknown one, or an unknown family after the colon.
    """
    names: list[str] = []
    for name in asked or ["both"]:
        names += ["stock", "invariant"] if name == "both" else [name]
    for name in names:
        base, colon, families = name.partition(":")
        if name in ("stock", "stock-no-cudnn"):
            continue
        if base != "invariant":
            known = ["stock", "stock-no-cudnn", "invariant", "both", "invariant:FAMILY"]
            raise UnknownNameError("implementation", name, known)
        if colon:
            from nondet.kernels.dispatch.block import FAMILIES

            for family in families.split("+"):
                if family not in FAMILIES:
                    raise UnknownNameError("operator family", family, FAMILIES)
    return list(dict.fromkeys(names))


def _prompt(request: SampleRequest) -> str:
    """The text of the prompt.

    Raises:
        UserError: two prompts, an empty one, or a file that can't be read as UTF-8.
    """
    if request.prompt is not None and request.prompt_file is not None:
        raise UserError("--prompt and --prompt-file exclude each other", "Give one prompt.")
    if request.prompt_file is not None:
        try:
            text = request.prompt_file.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise UserError(f"no prompt file at {request.prompt_file}", "Check the path.") from None
        except UnicodeDecodeError as error:
            raise UserError(
                f"{request.prompt_file} is not UTF-8 text (byte {error.start})", "Save it as UTF-8."
            ) from error
        except OSError as error:
            raise UserError(
                f"can't read {request.prompt_file}: {error.strerror}", "Give a readable text file."
            ) from error
    elif request.prompt is not None:
        text = request.prompt
    else:
        from nondet.embedded import DEFAULT_PROMPT

        text = DEFAULT_PROMPT
    if not text.strip():
        raise UserError("the prompt is empty", "Give some text.")
    return text
