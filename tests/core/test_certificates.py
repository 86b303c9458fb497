"""Certificates: kept for one machine, never trusted when broken or foreign, never in the way of inference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nondet.core import certificates as store
from nondet.core import environment
from nondet.core.certificates import Certificates, cache_folder

HERE: dict[str, Any] = {"device": "cuda", "gpu": "NVIDIA H200", "driver": "580.1", "torch": "2.11", "sources": "aa"}
KEY = "chain bfloat16 M=16 N=4096 K=12288 nt"


def quiet(described: dict[str, Any], folder: Path | None) -> Certificates:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return Certificates(described, folder)


def test_a_proof_stands_in_the_next_process_and_unknown_is_neither(tmp_path: Path) -> None:
    """True, False and None are told apart, also after reading the file again; a key is one shape and no other."""
    first = quiet(HERE, tmp_path)
    assert first.standing("cublaslt", KEY) is None
    first.record("cublaslt", KEY, True, "65536 elements equal")
    first.record("cublaslt", KEY.replace("M=16", "M=1"), False, "order: 9 of 4096 elements differ")
    for one in (first, quiet(HERE, tmp_path)):
        assert one.standing("cublaslt", KEY) is True
        assert one.standing("cublaslt", KEY.replace("M=16", "M=1")) is False
        assert one.standing("triton", KEY) is None
        assert [(c.member, c.holds, c.evidence) for c in one.excluded()] == [
            ("cublaslt", False, "order: 9 of 4096 elements differ")
        ]


def test_nothing_stands_on_another_machine_or_toolchain(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A certificate of another GPU, driver, torch or version of our kernels is not looked at, and stays where it is;
    renamed to ours it is foreign."""
    for changed in ["gpu", "driver", "torch", "sources"]:
        tmp_path = tmp_path_factory.mktemp("case")
        ours = quiet(HERE, tmp_path)
        ours.record("cublaslt", KEY, True, "equal")
        other = quiet(HERE | {changed: "other"}, tmp_path)
        assert other.standing("cublaslt", KEY) is None
        other.record("cublaslt", KEY, False, "differs")
        assert quiet(HERE, tmp_path).standing("cublaslt", KEY) is True
        assert len(list(tmp_path.iterdir())) == 2
        assert other.path is not None
        assert ours.path is not None
        other.path.rename(ours.path)
        with pytest.warns(RuntimeWarning, match="foreign"):
            assert Certificates(HERE, tmp_path).standing("cublaslt", KEY) is None


def planted(tmp_path: Path) -> Path:
    """A file of one exclusion, which a reader that trusts it believes."""
    kept = quiet(HERE, tmp_path / "cache")
    kept.record("cublaslt", KEY, False, "differs")
    assert kept.path is not None
    return kept.path


def standings_of(kept: Certificates, member: str) -> list[bool | None]:
    """Of a key before any proof, after one, and after another one."""
    standings = [kept.standing(member, KEY)]
    for key in (KEY, "another"):
        kept.record(member, key, True, "equal")
        standings.append(kept.standing(member, KEY))
    return standings


def test_a_broken_file_is_ignored_with_one_warning(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A truncated, corrupt, edited or foreign file proves nothing, is said once; the next proof is kept after it."""
    changes: list[Callable[[bytes], bytes]] = [
        lambda data: data[:-20],
        lambda data: data.replace(b'"holds":false', b'"holds":true'),
        lambda data: b"\x00\xff" * 50,
        lambda data: b'{"a": 1}\n',
        lambda data: data.replace(b"M=16", b"M=17"),
        lambda data: data.replace(b'"schema":4', b'"schema":9'),
        lambda data: data.replace(b'"schema":4', b'"schema":1'),
    ]
    for change in changes:
        path = planted(tmp_path_factory.mktemp("case"))
        whole = path.read_bytes()
        assert change(whole) != whole
        path.write_bytes(change(whole))
        with pytest.warns(RuntimeWarning, match="ignored") as said:
            again = Certificates(HERE, path.parent)
        assert len(said) == 1
        assert again.standing("cublaslt", KEY) is None
        assert again.standing("cublaslt", KEY.replace("M=16", "M=17")) is None
        again.record("triton", KEY, True, "equal")
        with pytest.warns(RuntimeWarning, match="ignored"):
            assert Certificates(HERE, path.parent).standing("triton", KEY) is True


def test_an_unwritable_folder_means_memory_only_and_one_warning(tmp_path: Path) -> None:
    """Inference goes on where nothing can be kept, or no more than is read again: proofs last for the process, and it
    is said once."""
    (tmp_path / "file").write_text("in the way")
    kept = quiet(HERE, tmp_path / "file" / "folder")
    with pytest.warns(RuntimeWarning, match="this process only"):
        kept.record("cublaslt", KEY, True, "equal")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept.record("triton", KEY, True, "equal")
    assert kept.standing("cublaslt", KEY) is kept.standing("triton", KEY) is True
    assert quiet(HERE, None).standing("cublaslt", KEY) is None  # no home at all
    path = planted(tmp_path)
    os.truncate(path, 2**25)
    with pytest.warns(RuntimeWarning, match="ignored"):
        kept = Certificates(HERE, path.parent)
    with pytest.warns(RuntimeWarning, match="this process only"):
        kept.record("triton", KEY, True, "equal")
    assert path.stat().st_size == 2**25


@pytest.mark.slow
def test_processes_that_prove_at_once_lose_nothing(tmp_path: Path) -> None:
    """Appends of two processes, with long evidence, all arrive whole."""
    code = (
        "import sys, json; from pathlib import Path; from nondet.core.certificates import Certificates;"
        "kept = Certificates(json.loads(sys.argv[1]), Path(sys.argv[2]));"
        "[kept.record('m' + sys.argv[3], f'lanes {i}', bool(i % 2), 'e' * 3000) for i in range(50)]"
    )
    command = [sys.executable, "-c", code, json.dumps(HERE), str(tmp_path)]
    running = [subprocess.Popen([*command, str(i)], env=os.environ) for i in range(2)]
    assert [one.wait() for one in running] == [0] * 2
    kept = quiet(HERE, tmp_path)
    assert len(kept.all()) == 100
    assert len(kept.excluded()) == 50
    assert len(list(tmp_path.iterdir())) == 1


def test_a_writer_that_was_killed_costs_its_own_line_alone(tmp_path: Path) -> None:
    """A proof appended after half a line is not lost with it."""
    kept = quiet(HERE, tmp_path)
    kept.record("a", KEY, True, "equal")
    assert kept.path is not None
    with kept.path.open("ab") as stream:
        stream.write(b'\n{"format":"nondet-cert')  # each write begins a line
    kept.record("b", KEY, True, "equal")
    with pytest.warns(RuntimeWarning, match="1 lines"):
        again = Certificates(HERE, tmp_path)
    assert again.standing("a", KEY) is True
    assert again.standing("b", KEY) is True


def test_what_failed_to_run_is_out_for_this_process_only(tmp_path: Path) -> None:
    """A driver's hiccup is no exclusion: the next process asks again, and so may this one, if it proves it anew."""
    kept = quiet(HERE, tmp_path)
    kept.set_aside("cublaslt", KEY, "BlasError: status 7")
    assert kept.standing("cublaslt", KEY) is False
    assert kept.excluded() == []
    assert quiet(HERE, tmp_path).standing("cublaslt", KEY) is None
    kept.record("cublaslt", KEY, True, "equal")
    assert kept.standing("cublaslt", KEY) is True
    kept.record("triton", KEY, False, "differs")
    kept.set_aside("triton", KEY, "status 7")
    kept.record("triton", KEY, True, "equal")
    assert kept.standing("triton", KEY) is False  # proven different, whatever failed later


def test_where_certificates_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NONDET_CACHE wins, then an absolute XDG_CACHE_HOME; a relative one is ignored, as the specification says.
    Whatever the umask, folder and file are this user's alone to write: a group's right would void them."""
    monkeypatch.setenv("NONDET_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert cache_folder() == tmp_path / "a" / "certificates"
    monkeypatch.delenv("NONDET_CACHE")
    assert cache_folder() == tmp_path / "b" / "nondet" / "certificates"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "nondet" / "certificates"
    before = os.umask(0)
    try:
        path = planted(tmp_path)
    finally:
        os.umask(before)
    assert [oct(p.stat().st_mode & 0o777) for p in (path.parent, path)] == ["0o700", "0o600"]
    assert quiet(HERE, path.parent).standing("cublaslt", KEY) is False


def test_the_cpus_key_knows_what_its_bits_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU, instruction sets, torch and threads are in it, a changed kernel source changes it, GPU ordinals do not."""
    here = store.machine("cpu")
    assert {"cpu", "cpu_isa", "torch", "num_threads", "sources", "variables"} <= here.keys()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert store.machine_digest(store.machine("cpu")) == store.machine_digest(here)
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    assert store.machine_digest(store.machine("cpu")) != store.machine_digest(here)


@pytest.mark.parametrize(("cuda", "loaded"), [("12.8", "libcublas.so.12"), ("13.0", "libcublas.so.13"), (None, None)])
def test_the_recorded_cublas_is_torchs(monkeypatch: pytest.MonkeyPatch, cuda: str | None, loaded: str | None) -> None:
    """Where the system has another major version, too, that is left alone; an update of the one in use has to void what
    was proven with it."""
    asked: list[str] = []

    def load(name: str) -> Any:
        asked.append(name)
        raise OSError

    monkeypatch.setattr("torch.version.cuda", cuda)
    with monkeypatch.context() as patch:
        patch.setattr(environment.ctypes, "CDLL", load)
        assert environment._cublas() is None
    assert asked == ([] if loaded is None else [loaded])
    keys = []
    for version in (120_803, 120_900, 0):
        monkeypatch.setattr("nondet.core.environment.cublaslt_version", lambda version=version: version)
        keys.append(store.machine("cuda"))
    assert [key["cublaslt"] for key in keys] == [120_803, 120_900, None]
    assert len({*map(store.machine_digest, keys)}) == 3


def test_a_changed_kernel_or_prover_is_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file that computes or proves counts, behind the link of a checkout as well; a report does not."""
    root = tmp_path / "nondet"
    for name in (*store._SOURCES, "core/environment.py", "reports/html.py"):
        file = root / name if name.endswith(".py") else root / name / "rows" / "cpu.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("BLOCK = 1\n")
    (root / "kernels").rename(tmp_path / "kernels")
    (root / "kernels").symlink_to("../kernels")
    monkeypatch.setattr(environment, "__file__", str(root / "core" / "environment.py"))

    def key() -> str:
        environment.sources_digest.cache_clear()
        return store.machine_digest(store.machine("cpu"))

    before = key()
    for file in sorted(path for path in [*root.rglob("*.py"), tmp_path / "kernels" / "rows" / "cpu.py"]):
        file.write_text("BLOCK = 2\n")
        assert (key() != before) == (file.name not in ("environment.py", "html.py")), file
        file.write_text("BLOCK = 1\n")
    assert key() == before
    environment.sources_digest.cache_clear()


def linked(path: Path, to: str = "") -> None:
    """A link in its place, to itself elsewhere or to that."""
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(to or path.with_suffix(".elsewhere"))


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


NOT_OURS: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: path.chmod(0o666), "it may be written by others, mode 666"),
    (lambda path: path.parent.chmod(0o770), "its folder may be written by others"),
    (linked, "is a link"),
    (lambda path: linked(path.parent), "is a link"),
    (fifo, "no plain file"),
    (lambda path: linked(path, "/dev/zero"), "is a link"),
    (lambda path: (path.unlink(), path.mkdir()), ""),
    (lambda path: os.truncate(path, 2**26 + 1), "more than 67108864 bytes"),
    (lambda path: os.chown(path, 4321, -1), "belongs to user"),
    (lambda path: os.chown(path.parent, 4321, -1), "belongs to user"),
]


def test_what_others_could_have_written_is_not_trusted(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning; nothing is believed, nothing is written there, proofs go on in memory, and nothing hangs."""
    for change, words in NOT_OURS:
        path = planted(tmp_path_factory.mktemp("case"))
        if words == "belongs to user" and os.geteuid() != 0:  # who may give nothing away: somebody else looks at it
            monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        else:
            change(path)
        with pytest.warns(RuntimeWarning, match=f"not used .*{words}") as said:
            standings = standings_of(Certificates(HERE, path.parent), "cublaslt")
        assert len(said) == 1
        assert standings == [None, True, True]


def test_a_file_that_became_somebody_elses_is_not_written(tmp_path: Path) -> None:
    """What was a file at the first look and is a link or a FIFO at the first proof: memory only, after one warning."""
    for change in (linked, fifo):
        path = planted(tmp_path / change.__name__)
        kept = quiet(HERE, path.parent)
        change(path)
        with pytest.warns(RuntimeWarning, match="this process only") as said:
            standings = standings_of(kept, "triton")
        assert len(said) == 1
        assert standings == [None, True, True]


def test_a_hostile_line_is_one_line_ignored(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever a line makes a decoder raise, it is one line that proves nothing; what stands beside it holds."""
    for line in [
        b"[" * 100_000,
        b'{"format":"nondet-certificate","schema":1,"x":' + b"[" * 100_000,
        b'{"format":"nondet-certificate","schema":4,"machine":"\\ud800","certificate":' + b"9" * 40 + b"}",
        b"1" * (2**20 + 1),
    ]:
        tmp_path = tmp_path_factory.mktemp("case")
        path = planted(tmp_path)
        path.write_bytes(line + b"\n" + path.read_bytes())
        with pytest.warns(RuntimeWarning, match="1 lines"):
            assert Certificates(HERE, path.parent).standing("cublaslt", KEY) is False


def test_a_proof_against_an_exclusion_is_not_written_again_and_again(tmp_path: Path) -> None:
    """Proven different once is excluded for good, in memory and in the file, whatever is proven before or after it: so
    there is nothing to say, and the file does not grow."""
    path = planted(tmp_path)
    kept, before = quiet(HERE, path.parent), path.read_bytes()
    for _ in range(3):
        kept.record("cublaslt", KEY, True, "equal")
        kept.record("cublaslt", KEY, False, "differs")
    assert path.read_bytes() == before
    for holds in (True, False, True):
        kept.record("triton", KEY, holds, "seen")
    for one in (kept, quiet(HERE, path.parent)):
        assert one.standing("cublaslt", KEY) is one.standing("triton", KEY) is False


def test_a_file_is_called_by_its_machine(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The GPU's name, else the CPU's, else the kind of device: a person finds it, and the digest tells it apart."""
    for described, name in [
        ({"device": "cuda", "gpu": "NVIDIA H200", "cpu": "Xeon"}, "nvidia-h200"),
        ({"device": "cpu", "gpu": None, "cpu": "Intel(R) Xeon(R) @ 2.0"}, "intel-r-xeon-r-2-0"),
        ({"device": "\u00b5"}, "machine"),
        ({"gpu": "x" * 60}, "x" * 48),
    ]:
        tmp_path = tmp_path_factory.mktemp("case")
        kept = quiet(described, tmp_path)
        assert kept.path == tmp_path / f"{name}-{kept.machine}.jsonl"
