"""The command line: what a person types wrong gets one clear line and exit code 2, and nothing is written."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer.main

from nondet import cli
from nondet.commands import help as command_help
from nondet.core import registry
from nondet.core.certificates import digest_of
from nondet.core.inputs import KINDS
from nondet.core.runfile import read_run
from nondet.errors import UserError, no_commands, one_line, printable
from nondet.probes.base import COMPUTE_DTYPES
from nondet.sampling.axes import ALL, AXES
from nondet.services import options
from nondet.services.diagnose import DiagnoseRequest, ahead_argv
from nondet.services.probe import ProbeRequest
from nondet.services.run import Output, Sink
from nondet.services.sample import SampleRequest
from tests.build import Command

COMMANDS = typer.main.get_command(cli.application()).commands  # type: ignore[attr-defined] # a group, as there are several commands


ROOT = Path(__file__).resolve().parents[1]
ROLLOUTS = str(ROOT / "README.md")  # a file that is no run

WRONG = [
    (["probe", "matmull"], ["'matmull'", "matmul"]),
    *([] if torch.cuda.is_available() else [(["sample", "--device", "cuda"], ["--device cuda"])]),  # no silent fallback
    (["probe", "matmul", "--dtype", "float8_e4m3fn"], ["float8_e4m3fn"]),
    (["probe", "matmul", "--m", "0"], ["--m 0"]),
    (["probe", "matmul", "--k", "16000000", "--n", "16000000"], ["memory"]),
    (["probe", "matmul", "--inputs", "wild"], ["'wild'", "wide"]),
    (["probe", "matmul", "--map", "nk"], ["--map 'nk'", "mn", "mk"]),
    (["probe", "softmax", "--map", "mn"], ["--map is of products", "matmul"]),
    (["probe", "matmul", "--map", "mn", "--m", "5000"], ["--m 5000", "4,096"]),
    (["probe", "matmul", "--threads", "0"], ["--threads 0"]),
    (["probe", "matmul", "--preset", "qwen3-8c"], ["'qwen3-8c'", "qwen3-8b"]),
    (["probe", "matmul", "--model", "nowhere"], ["nowhere", "config.json"]),
    (["probe", "matmul", "--out", "x.txt"], ["x.txt", ".jsonl"]),
    (["probe", "matmul", "--resume"], ["--resume", "--out"]),
    (["probe", "matmul", "--report", "x.pdf"], [".pdf", ".html"]),
    (["sample", "--n", "0"], ["--n 0"]),
    (["sample", "--vary", "sharin"], ["'sharin'", "sharing"]),
    (["sample", "--vary", "chunk="], ["chunk=", "lacks a value"]),
    (["sample", "--impl", "fast"], ["'fast'", "stock"]),
    (["sample", "--impl", "invariant:atention"], ["'atention'", "attention"]),
    (["sample", "--prompt", "  "], ["prompt is empty"]),
    (["sample", "--prompt", "a", "--prompt-file", "b"], ["exclude"]),
    (["sample", "--prompt-file", "missing.txt"], ["missing.txt"]),
    (["sample", "--prompts", "missing.doc"], [".doc", ".jsonl"]),
    (["sample", "--prompts", "a.txt", "--prompt", "b"], ["--prompts excludes"]),
    (["sample", "--column", "text"], ["--column belongs to --prompts"]),
    (["sample", "--top-k", "5"], ["--temperature"]),
    (["sample", "--temperature", "-1"], ["--temperature -1"]),
    (["sample", "--impl", "stock-seeded"], ["stock-seeded", "--temperature"]),
    (["sample", "--draft-model", "embedded"], ["--draft-model without --vary"]),
    (["sample", "--max-tokens", "0"], ["--max-tokens 0"]),
    (["sample", "--max-tokens", "100000"], ["context"]),
    (["sample", "--prompt", "word " * 5000], ["context"]),
    (["sample", "--load", "hevy"], ["'hevy'", "heavy"]),
    (["sample", "--load", "others=-3"], ["others"]),
    (["report", "missing.jsonl"], ["missing.jsonl"]),
    (["report", "."], ["no run file in the folder ."]),
    (["diff", "a.jsonl"], ["'AFTER'", "`nondet diff --help`"]),
    (["prob"], ["prob", "`nondet --help`"]),
    (["probe", "matmul", "--no-such-option"], ["--no-such-option"]),
    (["probe", "\x1b[31mmat\nmul"], ["mat"]),  # what would act on the terminal shows as text
    (["diff"], ["Missing argument", "Usage: nondet diff BEFORE AFTER. See `nondet diff --help`.\n"]),
    (["list", "--json"], ["nondet probe --help-all"]),  # old commands name the new ones
    (["export", "r.jsonl", "--out", "x.csv"], ["nondet report RUN --out FILE"]),
    (["replay", "r.jsonl", "--request", "t1"], ["nondet trace --replay --run RUN --request ID"]),
    # slips are answered with what was meant
    (["gate", "--run", "r"], ["--run. It is an argument here: nondet gate [RUN]. See"]),
    (["sample", "./m", "--model", "./n"], ["./m and --model ./n name two models. Give one of them."]),
    (["sample", "--temp", "0.5"], ["No such option: --temp. Did you mean --temperature? See"]),
    (["sample", "--n", "ten"], ["--n must be a whole number. See"]),
    (["diagnose", "--within", "soon"], ["--within must be a number. See"]),
    (["mismatch", ROLLOUTS], [f"{ROLLOUTS} is no run file. Rollouts of another trainer: --rollouts {ROLLOUTS}."]),
    (["probe", "linear", "--impl", "./my/x.py:f"], ["Write my.x:f, a module's name and no file's."]),
    (["tune", "--preset", "qwen3-8b"], ["lab/tune.py"]),
    (["sample", "--cuda-graphs", "--load", "graphs=off", "--device", "cpu"], ["contradict"]),
    (["probe", "float-sum", "--out", "x" * 300 + ".jsonl"], ["name too long"]),
    (["report", "x" * 300 + ".jsonl"], ["name too long"]),
    (["report", "\udcff.jsonl"], ["not UTF-8"]),
    (["sample", "--prompt", "\udcff"], ["not UTF-8"]),
    # as typed, and what is said
    *(
        (typed.split(), [said])
        for typed, said in {
            "probe float-sum --runs 1000000000000": "--runs",
            "probe softmax --n -3": "--n -3",
            "probe float-sum --threads 4096": "--threads 4096",
            "sample --n 1000000 --load targets=1": "1,000,000 rounds",
            "sample --load graphs=on --device cpu": "CUDA graphs",
            "sample --cuda-graphs --device cpu": "CUDA graphs",
            "sample --model random:qwen3-200x16384": "GiB of memory",
            "gate missing.jsonl": "missing.jsonl",
            "gate x --rate 2": "--rate must be between 0 and 1; got '2'",
            "gate x --rate 0%": "'0%'",
            "gate x --confidence sure": "'sure'",
            "gate x --by token": "'token'",
            "bench matmul --m 9-3": "--m 9-3",
            "bench mean --n 8": "--n 8 is for products, and does not apply to mean. Give --k",
            "bench mean --seed 99999999999999999999999": "'--seed'",
            "bench matmul --clock sun": "sun",
            "bench matmul --slower 4": "--check",
            "bench matmul --slower nan --check x.jsonl": "--slower nan",
            "bench attention --impl invariant:x": "invariant",
            "bench linear --ranks 2": "--ranks 2 is for all-reduce and row-parallel",
            "bench all-reduce --device cpu --ranks 1": "not a group of ranks",
            "certify linear --vllm": "--vllm asks vLLM's layers",
            "trace --run r --request a --request b --request c": "--run goes with one --request",
            "trace --impl both": "more than one implementation",
            "trace --load graphs=on": "can't be traced",
            "trace --max-tokens 100000": "exceed the model's context",
            "trace --repro script.sh": "not a .py file",
            "trace --run missing.jsonl --request t000000": "no run file",
            "trace --replay --run missing.jsonl --request t000000": "no run file",
            "trace --replay --run r.jsonl": "--replay needs --request",
            "trace --solo": "--solo without --replay",
            "trace --replay --run r.jsonl --request t1 --dtype float32": "--replay and --dtype",
            "trace --engine vllm --run x.jsonl --request t0": "--engine vllm and --run exclude each other",
            "trace --engine vllm --repro x.py": "--engine vllm and --repro exclude each other",
            "trace --engine vllm --impl invariant:attention": "unknown implementation under vllm 'invariant:attention'",
            "sample --engine vlm": "unknown engine 'vlm'. Did you mean vllm?",
            "sample --engine vllm --ranks 2": "--engine vllm and --ranks exclude each other",
            "sample --engine vllm --impl stock-flash": "unknown implementation under vllm 'stock-flash'",
            "sample --engine vllm --endpoint http://127.0.0.1:1": "--endpoint and --engine exclude each other",
            **dict.fromkeys(
                ("sample --engine vllm --out run.jsonl", "trace --engine vllm --device cpu --out t.jsonl"),
                "vLLM is not installed in this environment. pip install vllm==0.25.1",
            ),
            # named twice: the last of two was taken, or both were one
            **dict.fromkeys(
                (
                    "rl --arms stock,invariant,stock",
                    "mismatch --arms stock,stock",
                    "mismatch --arms invariant:norm,invariant:norm",
                    "mismatch --trainer padding=left,padding=right",
                    "mismatch --prompt a --prompt a",
                    "probe all-reduce --ranks 2,2",
                    "sample --load others=2,others=3",
                    "sample --endpoint http://127.0.0.1:9 --arms solo,solo=3",
                    "sample --vary chunk=8,chunk=16",
                ),
                "twice. Name it once.",
            ),
        }.items()
    ),
]


def test_bad_input_is_one_clear_line(run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else find(name, *rest))
    for argv, said in WRONG:
        code, out, err = run(*argv)
        assert code == 2
        assert out == ""
        assert err.removeprefix("loading random:qwen3-200x16384 ...\n").startswith("nondet: ")
        assert len([line for line in err.splitlines() if not line.startswith("loading ")]) == 1
        assert "\x1b" not in err
        assert [word for word in said if word.lower() not in err.lower()] == []
        assert len(err) < 1200
        assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_word_of_a_closed_set_is_refused_before_torch_is_loaded() -> None:
    """Which takes many times as long as the check."""
    wrong = [
        *("probe softmax --device tpu", "sample --device tpu", "sample --dtype int8", "sample --load hevy"),
        *("sample --impl invariant:atention", "trace --load hevy", "diagnose --dtype int8", "bench linear --clock sun"),
        *("bench linear --dtype int8", "embed --model m --texts t.txt --impl fast", "certify --threads 0"),
        *("gate run.jsonl --by day", "probe softmax --fail-on sunshine", "sample --vary chunks"),
        *("sample --vary dtyp=a", "probe linear --dtype bf17", "probe linear --inputs bel"),
        *("certify linear --dtype floaty16", "certify linear --inputs mixed"),
    ]
    code = (
        "import sys\nfrom nondet.cli import main\n"
        f"print([main(argv.split()) for argv in {wrong}], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{[2] * len(wrong)} False\n"
    assert len(done.stderr.splitlines()) == len(wrong)


def test_words_that_options_know_without_torch_are_those_of_their_tables() -> None:
    assert set(options.FLOATS.names) == set(COMPUTE_DTYPES)
    assert set(options.KINDS.names) == set(KINDS)
    assert set(options.AXES.names) == {*AXES, ALL}
    assert SampleRequest(dtype="bf16") == SampleRequest(dtype="bfloat16")
    assert ProbeRequest(names=["softmax"], dtype=["fp16", "fp32", "float64"]).dtype == ["float16", "float32", "float64"]
    with pytest.raises(UserError, match="--dtype 'bf8' is not one that models run in here"):
        SampleRequest(dtype="bf8")


def test_bad_input_that_shows_late_leaves_no_file(tmp_path: Path) -> None:
    path, theirs = tmp_path / "r.jsonl", tmp_path / "r.traces.jsonl"
    theirs.write_text("kept")
    for resume, stays in ((False, False), (True, True)):
        request = ProbeRequest(names=["softmax"], out=path, resume=resume)
        if resume:
            with Output(request, "probe", Sink()).recording("probe", {}, 0):
                pass
            path.write_text(path.read_text().splitlines()[0] + "\n")
        with pytest.raises(UserError, match="late"), Output(request, "probe", Sink()).recording("probe", {}, 0):
            raise UserError("late")
        assert path.exists() is stays
    assert theirs.read_text() == "kept"


def test_ranks_are_not_started_for_all_probes_on_a_cpu(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: registry.PROBES[name] for name in ("float-sum", "all-reduce")}
    monkeypatch.setattr("nondet.services.probe.PROBES", few)
    code, _, err = run("probe", "all", "--device", "cpu", "--out", "r.jsonl")
    assert code == 0
    assert "all-reduce is left out of all on a CPU" in err
    start, *rows = [json.loads(line) for line in Path("r.jsonl").read_text().splitlines()]
    assert start["plan"]["left_out"] == ["all-reduce"]
    assert {row.get("probe") for row in rows} - {None} == {"float-sum"}
    started: list[str] = []
    monkeypatch.setattr("nondet.probes.runner.plan_jobs", lambda probes, *_: started.extend(probes) or [])
    for asked in (["all", "all-reduce"], ["all", "--ranks", "2"]):
        run("probe", *asked, "--device", "cpu", "--out", "s.jsonl", "--force")
    assert started == ["float-sum", "all-reduce"] * 2


def test_a_probe_runs_from_the_command_line_and_resumes(run: Command) -> None:
    code, out, err = run("probe", "float-sum", "--out", "r.jsonl", "--report", "r.html", "--report", "r.md")
    assert code == 0, err
    assert "102 distinct results" in " ".join(out.split())
    assert "run file: r.jsonl" in err
    assert Path("r.html").read_text().lower().startswith("<!doctype html>")
    assert Path("r.md").read_text()
    rows = read_run(Path("r.jsonl")).rows
    code, _, err = run("probe", "float-sum", "--out", "r.jsonl")
    assert (code, "exists" in err) == (2, True)
    code, out, err = run("probe", "float-sum", "--out", "r.jsonl", "--resume", "--json")
    assert code == 0, err
    assert out.splitlines() == Path("r.jsonl").read_text().splitlines()  # nothing else on stdout
    assert read_run(Path("r.jsonl")).rows == rows != []
    Path("r.html").write_text("mine")
    code, _, err = run("report", "r.jsonl", "--out", "r.html")
    assert (code, "exists" in err, Path("r.html").read_text()) == (2, True, "mine")
    assert run("report", "r.jsonl", "--out", "r.html", "--force")[0] == 0
    assert Path("r.html").read_text() != "mine"


def test_fail_on_divergent_gives_three_and_does_not_pass_on_nothing(run: Command) -> None:
    Path("mine.py").write_text(
        "def softmax(x):\n"
        "    # the number of partial sums depends on the number of rows: must be found out\n"
        "    e = (x.float() - x.float().amax(-1, keepdim=True)).exp()\n"
        "    total = sum(part.sum(-1, keepdim=True) for part in e.chunk(1 + x.shape[0] % 7, -1))\n"
        "    return (e / total).to(x.dtype)\n"
    )
    small = ("probe", "softmax", "--impl", "mine:softmax", "--dtype", "float32", "--k", "64", "--out", "rows.jsonl")
    assert run(*small, "--fail-on", "divergent")[0] == 3
    assert {r.impl for r in read_run(Path("rows.jsonl")).rows} == {"mine:softmax"}
    assert run("probe", "float-sum", "--fail-on", "divergent")[0] == 0
    Path("broken.py").write_text("def softmax(x):\n    raise ValueError('broken')\n")
    command = ("probe", "softmax", "--impl", "broken:softmax", "--dtype", "float32")
    code, _, err = run(*command)
    assert (code, "cases failed" in err.partition("nothing was measured: ")[2]) == (1, True)
    code, _, err = run(*command, "--fail-on", "divergent")
    assert (code, "can't be decided" in err) == (1, True)


_ON_A_CPU = ["--device", "cpu", "--dtype", "float32", "--k", "64", "--out", "r.jsonl", "--force"]


def test_every_documented_form_of_a_users_function_is_asked(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nondet.bench.cells.COPY_BYTES", {"cpu": 2**20})
    monkeypatch.setattr("nondet.bench.cells.PRODUCT_SIZES", {"cpu": 64})
    Path("forms_mine.py").write_text(
        "def mean(x):\n    return x.mean(-1)\n\ndef linear(x, weight, bias=None):\n"
        "    return x @ weight.T if bias is None else x @ weight.T + bias\n"
    )
    for argv, kept in [
        (["probe", "mean", "--impl", "forms_mine:mean", "--m", "4"], "mean=forms_mine:mean"),
        (["probe", "reduction", "--impl", "mean=forms_mine:mean", "--m", "4"], "mean=forms_mine:mean"),
        (["probe", "matmul", "--impl", "linear=forms_mine:linear", "--n", "32", "--m", "4"], "=forms_mine:linear"),
        (["bench", "linear", "--impl", "forms_mine:linear", "--n", "32", "--m", "4"], "forms_mine:linear"),
        (["bench", "linear", "mean", "--impl", "linear=forms_mine:linear", "--n", "32", "--m", "4"], "=forms_mine:"),
        (["certify", "linear", "--impl", "forms_mine:linear", "--n", "32"], "forms_mine:linear"),
        (["certify", "linear", "--impl", "linear=forms_mine:linear", "--n", "32"], "linear=forms_mine:linear"),
    ]:
        code, _, err = run(*argv, *_ON_A_CPU)
        assert code == 0, err
        run_of = read_run(Path("r.jsonl"))
        asked = {row.impl for row in run_of.rows} | {timed.impl for cell in run_of.cells for timed in cell.timed}
        assert any(kept in name for name in asked)
        assert list(run_of.header.plan["sources"].values()) == [digest_of(Path("forms_mine.py").read_bytes())]


def test_a_function_that_nothing_asked_for_takes_is_refused(run: Command) -> None:
    Path("taken_mine.py").write_text(
        "def mean(x, weight=None, bias=None):\n    return x.mean(-1)\n\ndef softmax(x, dim, temperature):\n"
        "    return x\n\ndef other_names(values, *, fast=True):\n    return values\n"
    )
    for argv, said in [
        (["probe", "matmul", "--impl", "mean=taken_mine:mean"], "no probe asked for has an operator 'mean'"),
        (["probe", "float-sum", "--impl", "taken_mine:mean"], "no case asked for takes a function of yours"),
        (["bench", "linear", "--impl", "stock", "--impl", "mean=taken_mine:mean"], "no operator asked for takes it"),
        (["bench", "all-reduce", "--ranks", "2", "--impl", "taken_mine:mean"], "no operator asked for takes it"),
        (["certify", "linear", "--impl", "mean=taken_mine:mean"], "is no linear"),
        (
            ["probe", "softmax", "--impl", "taken_mine:softmax"],
            "takes (x, dim, temperature), but softmax is called with (x). Write it as softmax(x): Over the last axis",
        ),
    ]:
        code, out, err = run(*argv, *_ON_A_CPU)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert said in err
        assert not Path("r.jsonl").exists()
    assert registry.load_implementation("softmax", "taken_mine:other_names", "cpu").call(3) == 3


def test_help_is_short_and_help_all_is_whole(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The common options in at most 60 lines of 80 columns, then the examples, then how to see the rest."""
    for name in COMMANDS.keys() - {"env"}:  # which has one option, and shows it
        monkeypatch.setenv("COLUMNS", "80")
        options = {max(p.opts, key=len)[2:] for p in COMMANDS[name].params if p.param_type_name == "option"}
        (code, short, _), (code_all, whole, _) = run(name, "--help"), run(name, "--help-all")
        assert (code, code_all) == (0, 0)
        assert max(map(len, [*short.splitlines(), *whole.splitlines()])) <= 80
        assert len(short.splitlines()) <= 60
        row = re.compile(r"^│ (?:-\w, )?--(?:\[no-\])?([\w-]+)", re.MULTILINE)
        shown, every = set(row.findall(short)), set(row.findall(whole))
        assert shown < every == options
        last = " ".join(short.split()).rpartition("`nondet ")[2]
        assert last.startswith(f"{name} --help-all` shows all {len(options)} options")
        assert f"  nondet {name} " in short.partition("Examples:")[2]
        parameters = {param.name for param in COMMANDS[name].params}
        assert set(command_help.COMMON[name].split()) <= parameters
        assert len(shown) == len(parameters & {*command_help.COMMON[name].split(), *command_help.EVERYWHERE.split()})


@pytest.mark.slow
def test_a_shell_completes_every_option() -> None:
    words = {"COMP_WORDS": "nondet sample --", "COMP_CWORD": "2", "_NONDET_COMPLETE": "complete_bash"}
    command = [sys.executable, "-m", "nondet"]
    done = subprocess.run(command, env=os.environ | words, capture_output=True, text=True, check=False)
    options = {option for p in COMMANDS["sample"].params for option in (*p.opts, *p.secondary_opts) if option[0] == "-"}
    assert {*(options - {"-o", "-v", "-q"}), "--help", "--help-all"} <= set(done.stdout.split())


def test_the_whole_help_lists_what_can_be_given(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for command, listed in {
        "probe": ["float-sum", "attention  ", "stock-cudnn (cuda)", "qwen3-8b"],
        "bench": ["rms_norm  ", "invariant (cpu and cuda)"],
        "certify": ["cpu-tiles", "on cpu, of linear, matmul"],
        "sample": ["heavy  ", "60 requests a round", "moe  ", "mixtures of experts"],
    }.items():
        text = run(command, "--help-all")[1]
        assert [words for words in listed if words not in text] == []
        assert text.count("─╮") > run(command, "--help")[1].count("─╮")
    assert run("--version")[1].startswith("nondet ")
    assert "another package" not in run("--version")[2]
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9")  # pip installs both under one command
    assert "another package, nondet 9.9, is installed beside nondet-llm" in run("--version")[2]
    # eager: beside what is lacking or wrong, too; as the value of another option it is a value
    assert run("trace", "--help-all")[1] == run("trace", "--load", "none", "--help-all", "--help")[1]
    assert run("--help-all")[0] == 0
    code, _, err = run("probe", "--preset", "--help-all")
    assert (code, "Usage" in err) == (2, False)


def test_what_compiles_ahead_is_a_sample_of_the_diagnosis(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[SampleRequest] = []

    def sample(request: SampleRequest, sink: Sink) -> None:
        seen.append(request)

    monkeypatch.setattr("nondet.services.sample.sample", sample)
    request = DiagnoseRequest(model="random:qwen3-1x128", seed=7, max_tokens=8, n=24, trust_remote_code=True)
    for words in ahead_argv(request, Path("prompt.txt"), Path("far.txt")):
        assert cli.main(words) == 0
    assert [one.impl for one in seen] == [["invariant:attention"], ["invariant"], ["invariant"]]
    assert [(str(one.prompt_file), one.n) for one in seen] == [("prompt.txt", 24), ("prompt.txt", 24), ("far.txt", 1)]
    for one in seen:
        assert (one.model, one.seed, one.max_tokens, one.dtype, one.device) == (request.model, 7, 8, "bfloat16", "auto")
        assert (one.trust_remote_code, one.cuda_graphs) == (True, False)
        assert replace(one.engine_load, budget=0) == replace(request.engine_load, budget=0)


def test_a_folder_stands_for_its_run_files(run: Command) -> None:
    assert run("probe", "float-sum", "--out", "runs/a.jsonl")[0] == 0
    Path("runs/b.jsonl.gz").write_bytes(gzip.compress(Path("runs/a.jsonl").read_bytes()))
    Path("runs/prompts.jsonl").write_text('{"prompt": "Hello"}\n')
    Path("runs/empty.jsonl").touch()
    Path("runs/a.traces.jsonl").write_text('{"trace": "0"}\n')
    (Path("runs") / "more.jsonl").mkdir()
    code, out, err = run("report", "runs")
    assert (code, err) == (0, "")
    named = ["runs/a.jsonl", "runs/b.jsonl.gz", "runs/a.traces.jsonl"]  # as a shell's * names them
    assert out == run("report", *named)[1]
    assert len(run("report", *named, "--quiet")[1].splitlines()) < len(out.splitlines())
    assert run("report", *named, "-q", "-v")[0] == 2
    assert run("report", "runs", "--out", "rows.csv")[0] == 0
    names = {line.split(",")[0] for line in Path("rows.csv").read_text().splitlines()}
    assert names == {"run", "runs/a.jsonl", "runs/b.jsonl.gz"}
    code, _, err = run("report", "runs/prompts.jsonl")
    assert (code, "is not a nondet run file" in err) == (2, True)


def test_the_table_of_a_sample_run_is_its_completions(run: Command) -> None:
    kept = ROOT / "docs" / "evidence" / "h200" / "sample.jsonl.gz"
    code, _, err = run("report", kept, "--out", "x.csv")
    assert (code, err) == (0, "2000 completions: x.csv\n")
    for more in (["--case", "M=1"], ["--records", "rows", "--out", "y.md"], ["--figure", "tree", "--out", "y.csv"]):
        code, _, err = run("report", kept, *more)
        assert (code, "belongs to a" in err) == (2, True)


SCRIPT = """
import atexit, os, sys, threading, time
from nondet.__main__ import leave
if "torch" in sys.argv:
    sys.modules["torch"] = sys
if "thread" in sys.argv:
    threading.Thread(target=lambda: (time.sleep(0.2), os.write(1, b"thread "))).start()
atexit.register(lambda: print("atexit", end=" "))
print("said", end=" ")
leave(7)
print("went on", end=" ")
sys.exit(8)
"""


@pytest.mark.slow
def test_what_is_done_at_the_end() -> None:
    for words, code, out in [
        (["torch"], 7, "said atexit "),
        ([], 8, "said went on atexit "),
        (["torch", "thread"], 8, "thread said went on atexit "),
    ]:
        done = subprocess.run([sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, check=False)
        assert (done.returncode, sorted(done.stdout.split()), done.stderr) == (code, sorted(out.split()), "")


def test_a_model_is_named_with_and_without_its_option(run: Command) -> None:
    Path("t.txt").write_text("a\nb\n", encoding="utf-8")
    for command in (["diagnose"], ["sample"], ["embed", "--texts", "t.txt"], ["trace"], ["rl"]):
        first, second = (run(*command, *named) for named in (["./gone"], ["--model", "./gone"]))
        assert first == second
        assert (first[0], "gone" in first[2]) == (2, True)


def test_the_latest_run_is_taken_and_named(run: Command) -> None:
    for words in (["report"], ["gate"], ["trace", "--request", "t000000"]):
        code, _, err = run(*words)
        assert (code, "in the folder runs. Name a run file." in err) == (2, True)
    for number, name in enumerate(("old", "new")):
        assert run("probe", "float-sum", "--out", f"runs/{name}.jsonl", "-q")[0] == 0
        os.utime(f"runs/{name}.jsonl", ns=(number, number))
    for words in (["report", "-q"], ["gate", "-q"]):
        assert run(*words)[2].splitlines()[0] == "latest run: runs/new.jsonl"
    assert "no run file of sample or diagnose in the folder runs" in run("trace", "--request", "t000000")[2]


def test_open_shows_the_page(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or len(opened) > 1)
    made = ["--out", "runs/r.jsonl"]
    assert "no browser was found: open p.html" in run("probe", "float-sum", *made, "--report", "p.html", "--open")[2]
    assert run("report", "--open")[:2] == (0, "")
    assert run("diff", "runs/r.jsonl", "runs/r.jsonl", "--open")[0] == 0
    names = [Path(url.removeprefix("file://")) for url in opened]
    assert [path.name for path in names] == ["p.html", "report.html", "diff.html"]
    assert all("<!doctype html>" in path.read_text(encoding="utf-8").lower() for path in names)


def test_env_prints_what_a_bug_report_needs(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    _, out, _ = run("env")
    known = json.loads(run("env", "--json")[1])
    assert [line.partition(":")[0] for line in out.splitlines()] == list(known)
    assert {"nondet", "python", "torch", "triton", "transformers", "aten_cpu_capability", "gpu", "driver"} <= {*known}
    assert known["variables"]["MKL_CBWR"] == "AVX2"
    assert "MKL_CBWR=AVX2" in out
    assert "hf_secret" not in out + str(known)


def test_what_acts_becomes_visible() -> None:
    for hostile, shown in [
        ("\x1b[31mred\x1b[0m", "␛[31mred␛[0m"),
        ("\x1b]0;title\x07", "␛]0;title␇"),
        ("a\x00b\x7fc", "a␀b␡c"),
        ("\x9b31m", "\ufffd31m"),
        ("safe\u202egnp.exe", "safe\ufffdgnp.exe"),
        ("zero\u200bwidth\ufeff", "zero\ufffdwidth\ufffd"),
        ("\ud800", "\ufffd"),
        ("line\u2028break", "line\ufffdbreak"),
        ("no\ufffecharacter\uffff \U0001fffe", "no\ufffdcharacter\ufffd \ufffd"),
        *[("Grüße,\n\tनमस्ते, 你好, العربية, 👩‍💻",) * 2],  # text, not control
    ]:
        assert printable(hostile) == shown
    assert one_line("a\nb\r\nc") == "a b␍ c"  # a message stays on one line whatever it quotes, and short
    assert len(one_line("x" * 5000, limit=100)) == 100
    # GitHub reads `::error` at a line's beginning and `##[` anywhere; Azure `##vso[`; nothing else changes
    for hostile, shown in [
        ("::error::x", ": :error::x"),
        ("a\n \t\u3000::set-output name=a::b", "a\n \t\u3000: :set-output name=a::b"),
        ("a ##[error]b ##vso[task.x]c", "a ## [error]b ## vso[task.x]c"),
        ("at::native::mm a:: b\nc ::d # [ ##", "at::native::mm a:: b\nc ::d # [ ##"),
    ]:
        assert no_commands(hostile) == shown
