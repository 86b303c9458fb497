"""The command under hostile conditions: one line and a code, whatever is typed, closed, full, or lying about."""

from __future__ import annotations

import io
import json
import os
import runpy
import signal
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import nondet
from nondet.cli import main
from nondet.commands import output
from nondet.core.records import End
from tests.build import Command, header, line, row, tiers

HERE = str(Path(nondet.__file__).parents[1])


SMALL = ("--dtype", "float32", "--m", "4", "--n", "64", "--out", "r.jsonl")


def test_an_edited_kernel_is_not_gone_on_with(run: Command, tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text("import sys\ndef softmax(x):\n    sys.exit(0)\n")
    code, _, err = run("probe", "softmax", "--impl", "leaves:softmax", "--fail-on", "divergent", *SMALL, "--force")
    assert code == 1, err
    (tmp_path / "r.jsonl").unlink()
    (tmp_path / "edited.py").write_text("def softmax(x):\n    return x.softmax(-1)\n")
    argv = ("probe", "softmax", "--impl", "edited:softmax", *SMALL)
    assert run(*argv)[0] == 0
    assert run(*argv, "--resume")[0] == 0
    (tmp_path / "edited.py").write_text("def softmax(x):\n    return x.double().softmax(-1).to(x.dtype)\n")
    code, _, err = run(*argv, "--resume")
    assert code == 2
    assert "other options (sources)" in err


def test_out_of_memory_is_one_line(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in [
        MemoryError(),
        MemoryError("Unable to allocate 9.1 TiB"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried"),
    ]:
        monkeypatch.setattr("nondet.core.environment.collect", Mock(side_effect=error))
        code, out, err = run("probe", "float-sum", "--device", "cpu", "--out", "r.jsonl")
        assert (code, out) == (1, "")
        assert err.startswith("nondet: out of memory: ")
        assert err.count("\n") == 1


@pytest.mark.slow
def test_nothing_of_the_folder_is_executed(tmp_path: Path) -> None:
    """The user's own module is, asked for by name. A variable that is no UTF-8 breaks nothing either."""
    for name in ("json", "torch", "rich", "msgspec", "typing", "signal", "numpy", "triton"):
        (tmp_path / f"{name}.py").write_text("import sys\nsys.exit('a file of the folder was executed')\n")
    (tmp_path / "mine.py").write_text("def softmax(x):\n    return x.softmax(-1)\n")
    odd = {"MKL_CBWR": "a\udcff", "PYTHONIOENCODING": "ascii", "PYTHONPATH": HERE}
    command = ["probe", "softmax", "--impl", "mine:softmax", *SMALL, "--report", "r.html", "--json"]
    argv = [sys.executable, "-m", "nondet", *command]
    done = subprocess.run(argv, cwd=tmp_path, env={**os.environ, **odd}, capture_output=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0])["environment"]["variables"]["MKL_CBWR"] == "a\\udcff"
    assert "mine:softmax" in (tmp_path / "r.jsonl").read_text(encoding="utf-8")
    assert (tmp_path / "r.html").read_text(encoding="utf-8")


PROBE = "probe float-sum --device cpu --out r.jsonl --report r.md"
QUIET = {"--help": [], PROBE: ["loading torch ...", "run file: r.jsonl", "report: r.md"]}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
@pytest.mark.parametrize(
    ("typed", "target"),
    tiers(
        [("report kept.jsonl", "> /dev/full"), ("--help", "| head -n 1"), (PROBE, "| true")],
        [(PROBE, "> /dev/full"), (PROBE, ">&-")],
    ),
)
def test_reports_are_written_though_stdout_can_not_be(tmp_path: Path, typed: str, target: str) -> None:
    (tmp_path / "kept.jsonl").write_bytes(line(header()) + line(row()) + line(End(records=1, seconds=1.0)))
    command = f"'{sys.executable}' -m nondet {typed} {target}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (tmp_path / "r.md").exists() == (typed == PROBE)
    said = done.stderr.splitlines()
    if "full" in target:
        assert (done.returncode, "can't write to stdout" in said[-1], "Traceback" in done.stderr) == (2, True, False)
    else:
        assert (done.returncode, said) == (0, QUIET[typed])


def test_any_encoding_of_the_terminal_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    probe = ["probe", "softmax", "--force", *SMALL]
    for encoding, argv in [("ascii", probe), ("ascii", [*probe, "--json"]), ("latin-1", ["report", "r.jsonl"])]:
        written = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding))
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding))
        assert main(argv) == 0
        out = written.getvalue().decode(encoding)
        assert out
        assert all(json.loads(line) for line in out.splitlines() if "--json" in argv)
    with redirect_stderr(io.StringIO()) as seen:  # names and notes are one line, their escapes made visible
        output.say("run file: \x1b[31m\u202ea\nb\x9b2J")
    assert not {"\x1b", "\u202e", "\x9b"} & set(seen.getvalue())
    assert seen.getvalue().count("\n") == 1


def test_workers_of_a_clone_that_is_not_installed_find_nondet(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the path's end: a torch.py of its folder would be taken for torch."""
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(sys, "path", [HERE, *(p for p in sys.path if p not in ("", HERE))])
    monkeypatch.setattr("nondet.cli.main", sys.exit)
    with pytest.raises(SystemExit):
        runpy.run_module("nondet", run_name="__main__")
    signal.signal(signal.SIGINT, before)
    assert (sys.path.count(HERE), sys.path[-1]) == (1, HERE)


# Ctrl-C at a moment that no machine's speed decides: as the import of a module begins.
START = """
import signal, sys
class Pressed:
    def find_spec(self, name, path=None, target=None):
        if name == MODULE:
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)
import nondet.__main__ as m
sys.meta_path.insert(0, Pressed())
sys.exit(m.main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("module", tiers(["typer", "torch.nn"], ["nondet.services.probe", "torch"]))
def test_an_early_interrupt_is_quiet(tmp_path: Path, module: str) -> None:
    code = START.replace("MODULE", repr(module))
    command = [sys.executable, "-c", code, "probe", "matmul", "--out", "r.jsonl"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert (done.stderr.removeprefix("loading torch ...\n"), done.stdout) == ("nondet: stopped\n", "")
    assert done.returncode == 130
    assert list(tmp_path.iterdir()) == []
