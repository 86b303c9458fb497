"""Certificates: kept for one machine, never trusted when broken or foreign, never in the way of inference."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

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


def test_an_exclusion_is_for_good(tmp_path: Path) -> None:
    """Whatever is proven before or after it. A driver's hiccup is none: the next process asks again."""
    path = planted(tmp_path)
    kept, before = quiet(HERE, path.parent), path.read_bytes()
    for _ in range(3):
        kept.record("cublaslt", KEY, True, "equal")
        kept.record("cublaslt", KEY, False, "differs")
    assert path.read_bytes() == before
    kept.set_aside("triton", KEY, "BlasError: status 7")
    assert kept.standing("triton", KEY) is False
    assert len(kept.excluded()) == 1
    assert quiet(HERE, path.parent).standing("triton", KEY) is None
    kept.record("triton", KEY, True, "equal")
    assert kept.standing("triton", KEY) is True
    kept.record("triton", KEY, False, "differs")
    kept.set_aside("triton", KEY, "status 7")
    kept.record("triton", KEY, True, "equal")
    for one in (kept, quiet(HERE, path.parent)):
        assert one.standing("cublaslt", KEY) is one.standing("triton", KEY) is False


def test_nothing_stands_on_another_machine_or_toolchain(tmp_path_factory: pytest.TempPathFactory) -> None:
    for changed in ["gpu", "driver", "torch", "sources"]:
        tmp_path = tmp_path_factory.mktemp("case")
        ours = quiet(HERE, tmp_path)
        ours.record("cublaslt", KEY, True, "equal")
        other = quiet(HERE | {changed: "other"}, tmp_path)
        assert other.standing("cublaslt", KEY) is None
        other.record("cublaslt", KEY, False, "differs")
        assert quiet(HERE, tmp_path).standing("cublaslt", KEY) is True
        assert len(list(tmp_path.iterdir())) == 2
        other.path.rename(ours.path)
        with pytest.warns(RuntimeWarning, match="foreign"):
            assert Certificates(HERE, tmp_path).standing("cublaslt", KEY) is None


def planted(tmp_path: Path) -> Path:
    kept = quiet(HERE, tmp_path / "cache")
    kept.record("cublaslt", KEY, False, "differs")
    return kept.path


def standings_of(kept: Certificates, member: str) -> list[bool | None]:
    standings = [kept.standing(member, KEY)]
    for key in (KEY, "another"):
        kept.record(member, key, True, "equal")
        standings.append(kept.standing(member, KEY))
    return standings


def test_a_broken_file_is_ignored_with_one_warning(tmp_path_factory: pytest.TempPathFactory) -> None:
    changes: list[Callable[[bytes], bytes]] = [
        lambda data: data[:-20],
        lambda data: data.replace(b'"holds":false', b'"holds":true'),
        lambda data: b"\x00\xff" * 50,
        lambda data: b'{"a": 1}\n',
        lambda data: data.replace(b"M=16", b"M=17"),
        lambda data: data.replace(b'"schema":4', b'"schema":9'),
        lambda data: data.replace(b'"schema":4', b'"schema":1'),
        lambda data: b"[" * 100_000,
        lambda data: b'{"format":"nondet-certificate","schema":1,"x":' + b"[" * 100_000,
        lambda data: b'{"format":"nondet-certificate","machine":"\\ud800","certificate":' + b"9" * 40 + b"}",
        lambda data: b"1" * (2**20 + 1),
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
        path.write_bytes(path.read_bytes() + whole)
        with pytest.warns(RuntimeWarning, match="ignored"):
            last = Certificates(HERE, path.parent)
        assert (last.standing("triton", KEY), last.standing("cublaslt", KEY)) == (True, False)


def test_an_unwritable_folder_means_memory_only_and_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    kept = quiet(HERE, tmp_path / "file" / "folder")
    with pytest.warns(RuntimeWarning, match="this process only") as said:
        standings = standings_of(kept, "cublaslt")
    assert (standings, len(said)) == ([None, True, True], 1)
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
    code = (
        "import sys, json; from pathlib import Path; from nondet.core.certificates import Certificates;"
        "kept = Certificates(json.loads(sys.argv[1]), Path(sys.argv[2]));"
        "[kept.record('m' + sys.argv[3], f'lanes {i}', bool(i % 2), 'e' * 3000) for i in range(50)]"
    )
    command = [sys.executable, "-c", code, json.dumps(HERE), str(tmp_path)]
    running = [subprocess.Popen([*command, str(i)], env=os.environ) for i in range(2)]
    assert [one.wait() for one in running] == [0] * 2
    kept = quiet(HERE, tmp_path)
    assert (len(kept.all()), len(kept.excluded()), len(list(tmp_path.iterdir()))) == (100, 50, 1)


def test_where_certificates_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever the umask, folder and file are this user's alone to write: a group's right would void them."""
    monkeypatch.setenv("NONDET_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert cache_folder() == tmp_path / "a" / "certificates"
    monkeypatch.delenv("NONDET_CACHE")
    assert cache_folder() == tmp_path / "b" / "nondet" / "certificates"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "nondet" / "certificates"
    before = os.umask(0)
    path = planted(tmp_path)
    os.umask(before)
    assert [oct(p.stat().st_mode & 0o777) for p in (path.parent, path)] == ["0o700", "0o600"]
    assert quiet(HERE, path.parent).standing("cublaslt", KEY) is False


def test_a_machines_key_knows_what_its_bits_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    here = store.machine("cpu")
    assert {"cpu", "cpu_isa", "torch", "num_threads", "sources", "variables"} <= here.keys()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert store.machine_digest(store.machine("cpu")) == store.machine_digest(here)
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    assert store.machine_digest(store.machine("cpu")) != store.machine_digest(here)
    # an update of the cuBLAS in use, which is torch's, has to void what was proven with it
    load = Mock(side_effect=OSError)
    monkeypatch.setattr(environment.ctypes, "CDLL", load)
    for cuda, loaded in [("12.8", ["libcublas.so.12"]), ("13.0", ["libcublas.so.13"]), (None, [])]:
        monkeypatch.setattr("torch.version.cuda", cuda)
        assert environment._cublas() is None
        assert [call.args[0] for call in load.call_args_list] == loaded
        load.reset_mock()
    keys = []
    for version in (120_803, 120_900, 0):
        monkeypatch.setattr("nondet.core.environment.cublaslt_version", lambda version=version: version)
        keys.append(store.machine("cuda"))
    assert [key["cublaslt"] for key in keys] == [120_803, 120_900, None]
    assert len({*map(store.machine_digest, keys)}) == 3


def test_a_changed_kernel_or_prover_is_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its path, behind the link of a checkout as well; a changed report is so for a run alone."""
    root, links = tmp_path / "real" / "nondet", tmp_path / "links" / "nondet"
    files = [name if name.endswith(".py") else f"{name}/rows/cpu.py" for name in store._SOURCES]
    for name in (*files, "core/environment.py", "reports/html.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"NAME = {name!r}\n")
    shutil.copytree(root, links)
    for name in ("kernels", "reports"):
        (links / name).rename(links.parent / name)
        (links / name).symlink_to(f"../{name}")

    def digests(package: Path = root) -> tuple[str, str]:
        """Of what proofs depend on, and of a run's sources."""
        monkeypatch.setattr(environment, "__file__", str(package / "core" / "environment.py"))
        environment.sources_digest.cache_clear()
        return store.machine_digest(store.machine("cpu")), environment.sources_digest()

    try:
        proofs, sources = before = digests()
        assert digests(links) == before
        for path in sorted(root.rglob("*.py")):
            text = path.read_text()
            path.write_text("BLOCK = 2\n")
            changed = digests()
            assert (changed[0] != proofs) == (path.name not in ("environment.py", "html.py")), path
            assert changed[1] != sources
            path.write_text(text)
        (root / "kernels" / "rows" / "cpu.py").rename(root / "kernels" / "rows" / "other.py")
        assert not {*digests()} & {*before}
    finally:
        environment.sources_digest.cache_clear()


def linked(path: Path, to: str = "") -> None:
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


def test_no_other_s_file_is_trusted(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
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
    for change in (linked, fifo):  # after the first look
        path = planted(tmp_path_factory.mktemp("case"))
        kept = quiet(HERE, path.parent)
        change(path)
        with pytest.warns(RuntimeWarning, match="this process only") as said:
            standings = standings_of(kept, "triton")
        assert len(said) == 1
        assert standings == [None, True, True]
