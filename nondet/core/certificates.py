"""Certificates: what was proven by bits, kept from one process to the next, for one machine and our own sources.

A certificate states that a member of a numerics class gave the class's bits at a key (a shape, dtype and layout), or
that it did not and is excluded there. It is valid for one machine key (`machine`: GPU, driver, torch, Triton, cuBLAS
and cuDNN versions, the digest of the code that computes and proves).

The file is JSON lines in the user's cache folder, one file per machine key. Each line carries a checksum; what is not a
whole line of this machine is ignored, with one warning. Each proof is one appended write that begins a line, so
concurrent processes lose nothing. An exclusion overrides every proof to the contrary on the same machine key.

A checksum is not a signature: anyone who can write the file can forge a proof. So it is used only if file and folder
belong to this user (or root), are not links, and no other user may write them; otherwise everything is proven again,
after one warning, and kept in memory.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import stat
import threading
import warnings
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

from nondet.core.runfile import no_link

# By these libraries pick kernels and compilers lay out sums. Settings that a process may change while it runs (the
# preferred BLAS, float32 matmul precision, reduced-precision reductions) are not part of the machine: a member either
# sets them itself, or its key names them.

_CUDA = ("gpu", "gpu_capability", "gpu_sms", "driver", "cuda", "cublas", "cudnn", "triton")
_CPU = ("cpu", "cpu_isa", "aten_cpu_capability", "mkl", "onednn", "num_threads", "numpy")

# Recorded by `nondet.core.environment`, but no numeric library or compiler picks an order by them.
_HARMLESS = {"CUDA_VISIBLE_DEVICES", "OMP_WAIT_POLICY", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NCCL_ALGO", "NCCL_PROTO"}
_COMPILER = ("DISABLE_PTXAS_OPT", "TRITON_DEFAULT_FP_FUSION", "TRITON_PTXAS_BLACKWELL_PATH", "TRITON_PTXAS_PATH")
# A change of these makes every earlier result invalid.
_SOURCES = ("kernels", "certify", "core/certificates.py", "core/proof.py", "core/inputs.py", "core/compare.py")


def machine(device: str) -> dict[str, Any]:
    """What proofs on this device ("cuda": the current one) hold for, as JSON-able data; unknown things are None."""
    from nondet.core.environment import cublaslt_version, numerics, sources_digest, variables

    environment, on_gpu = numerics(), device == "cuda"
    found: dict[str, Any] = {"device": device}
    found |= {k: environment[k] for k in ("torch", *(_CUDA if on_gpu else _CPU))}
    if on_gpu:
        found["cublaslt"] = cublaslt_version() or None  # of the library that computes the products
    steering = {k: v for k, v in environment["variables"].items() if k not in _HARMLESS}
    steering |= variables(_COMPILER if on_gpu else ())
    return found | {"variables": steering, "sources": sources_digest(*_SOURCES)}


def machine_digest(described: dict[str, Any]) -> str:
    """First 16 hex digits of the SHA-256 over `machine`'s answer: the machine key of a proof."""
    return digest_of(msgspec.json.encode(described, order="deterministic"))


def digest_of(data: bytes) -> str:
    """First 16 hex digits of the SHA-256."""
    return hashlib.sha256(data).hexdigest()[:16]


FORMAT = "nondet-certificate"
SCHEMA = 4  # 3 had each proof's own kernels, and a line for the machine


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """One proof."""

    member: str  # what was proven: "cublaslt", "triton/128x128x64", ..
    key: str  # as `nondet.core.proof.operands_key` writes it: whatever may change a library's choice is in it
    holds: bool  # True: it gave the class's bits. False: it did not, and is excluded at this key.
    evidence: str  # what was compared, or where it differed, in words
    proven: str  # UTC, ISO 8601
    # further findings, where a member is not a yes or no: the row counts of a CPU's tiles
    numbers: dict[str, list[int]] = {}


class _Line(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A line of the file."""

    format: str
    schema: int
    machine: str
    certificate: Certificate
    check: str = ""


_FILE_MOST = 2**26  # bytes that are read; a file is written up to half of it, because others append, too
_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(_Line)
# raised on a hostile line, when it is read or written again: endless nesting, odd letters, endless numbers
_ODD = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)


class Certificates:
    """The proofs of one machine, `described` as by `machine`, in memory and in a file in `folder` (None: only in
    memory)."""

    def __init__(self, described: dict[str, Any], folder: Path | None) -> None:
        self.described = described
        self.machine = machine_digest(described)
        name = str(described.get("gpu") or described.get("cpu") or described.get("device") or "machine")
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:48] or "machine"
        self.path = None if folder is None else folder / f"{slug}-{self.machine}.jsonl"
        self._lock = threading.Lock()
        self._proofs: dict[tuple[str, str], Certificate] = {}
        self._aside: dict[tuple[str, str], str] = {}
        if self.path is not None:
            self._load(self.path)

    def standing(self, member: str, key: str) -> bool | None:
        """True: proven equal on this machine. False: excluded, or set aside. None: unknown."""
        proof = self._proofs.get((member, key))
        if proof is not None:
            return proof.holds
        return False if (member, key) in self._aside else None

    def proof(self, member: str, key: str) -> Certificate | None:
        """The whole certificate; None where nothing is proven, either way."""
        return self._proofs.get((member, key))

    def set_aside(self, member: str, key: str, reason: str) -> None:
        """Stop using a member that failed to run, in this process only; nothing is written to the file. The cause may
        have been memory, a driver or another process: not a reason to exclude it for good."""
        with self._lock:
            if (member, key) not in self._proofs:
                self._aside.setdefault((member, key), reason)

    def aside(self) -> dict[tuple[str, str], str]:
        """What was set aside: (member, key) -> why."""
        with self._lock:
            return dict(self._aside)

    def record(
        self, member: str, key: str, holds: bool, evidence: str, numbers: dict[str, list[int]] | None = None
    ) -> None:
        """Remember a proof and append it to the file. If the folder can't be written, warn once and use memory only."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        proof = Certificate(member=member, key=key, holds=holds, evidence=evidence, proven=now, numbers=numbers or {})
        with self._lock:
            if self._remember(proof) and self.path is not None:
                self._append(self.path, proof)

    def excluded(self) -> list[Certificate]:
        """The members that left their class on this machine, and where."""
        return [c for c in self.all() if not c.holds]

    def all(self) -> list[Certificate]:
        """Every proof on this machine, by member and key."""
        with self._lock:
            return [self._proofs[at] for at in sorted(self._proofs)]

    def _remember(self, proof: Certificate) -> bool:
        """Whether the verdict is new. An exclusion stays, whatever a later proof shows."""
        at = (proof.member, proof.key)
        known = self._proofs.get(at)
        if known is not None and not known.holds:
            return False
        self._aside.pop(at, None)
        self._proofs[at] = proof
        return known is None or not proof.holds

    def _load(self, path: Path) -> None:
        try:
            with _open(path, "rb") as stream:
                data = stream.read(_FILE_MOST + 1)
            if len(data) > _FILE_MOST:
                raise OSError(f"more than {_FILE_MOST} bytes")
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            self.path = None
            _warn(
                f"certificates in {path} are not used ({error.strerror or error}): everything is proven afresh, and "
                "kept for this process only (mend or delete it, or set NONDET_CACHE to a folder of your own)"
            )
            return
        ignored = 0
        for line in filter(None, data.split(b"\n")):
            proof = _opened(line, self.machine)
            ignored += proof is None
            if proof is not None:
                self._remember(proof)
        if ignored:
            _warn(
                f"{ignored} lines of {path} are cut off, corrupt, older or foreign and were ignored; what they "
                "said is unknown until it is proven again (delete the file to be rid of this warning)"
            )

    def _append(self, path: Path, proof: Certificate) -> None:
        line = _Line(format=FORMAT, schema=SCHEMA, machine=self.machine, certificate=proof)
        data = b"\n" + _sealed(line)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _open(path, "ab") as stream:
                end = stream.tell()
                if end + len(data) > _FILE_MOST // 2:
                    raise OSError(f"{len(data)} bytes more than the {end} that it has are not read again")
                stream.write(data)  # one write at the current end of the file
        except OSError as error:
            self.path = None
            _warn(f"certificates can't be kept in {path} ({error.strerror or error}): they last for this process only")


def cache_folder() -> Path | None:
    """Where certificates are kept: NONDET_CACHE, XDG_CACHE_HOME/nondet or ~/.cache/nondet; None if there is no home."""
    if chosen := os.environ.get("NONDET_CACHE"):
        return Path(chosen) / "certificates"
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:  # the XDG specification: a relative one is to be ignored
        return (shared if shared.is_absolute() else Path.home() / ".cache") / "nondet" / "certificates"
    except RuntimeError:
        return None


_instances: dict[tuple[object, ...], Certificates] = {}
_lock = threading.RLock()


def certificates(device: str | None = None) -> Certificates:
    """The certificates of this process's device: "cuda" (the current one), "cpu", or None: CUDA where there is one. The
    first call reads the file; later ones are a dict look-up. Different GPUs of one process have separate certificates,
    and so has each thread count of a CPU."""
    import torch

    if device is None:
        device = "cuda" if _has_cuda() else "cpu"
    place = (device, torch.get_num_threads() if device == "cpu" else torch.cuda.current_device() if _mixed() else 0)
    if place not in _instances:
        with _lock:
            if place not in _instances:
                _instances[place] = Certificates(machine(device), cache_folder())
    return _instances[place]


@functools.cache
def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@functools.cache
def _mixed() -> bool:
    import torch

    cards = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return len({(c.name, c.major, c.minor, c.multi_processor_count) for c in cards}) > 1


def _open(path: Path, mode: str) -> FileIO:
    """The file, opened without a wait and through no link, if no other user may write it or its folder."""
    if path.is_symlink() or path.parent.is_symlink():
        raise OSError("it or its folder is a link")
    _check_owner(path.parent.stat(), "its folder")
    stream = FileIO(path, mode, opener=functools.partial(no_link, mode=0o600))
    try:
        found = os.fstat(stream.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError("it is no plain file")
        _check_owner(found, "it")
    except OSError:
        stream.close()
        raise
    return stream


def _check_owner(found: os.stat_result, what: str) -> None:
    if not hasattr(os, "geteuid"):  # Windows has neither numeric owners nor these rights
        return
    if found.st_uid not in (0, os.geteuid()):
        raise OSError(f"{what} belongs to user {found.st_uid}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(f"{what} may be written by others, mode {stat.S_IMODE(found.st_mode):o}; `chmod go-w` mends it")


def _sealed(line: _Line) -> bytes:
    line.check = ""
    line.check = digest_of(_ENCODER.encode(line))
    return _ENCODER.encode(line)


def _opened(raw: bytes, machine: str) -> Certificate | None:
    """The proof of a line, if it is whole, ours, of this machine and schema, and its checksum fits."""
    try:
        line = _DECODER.decode(raw)
        known = (line.format, line.schema, line.machine) == (FORMAT, SCHEMA, machine) and _sealed(line) == raw
    except _ODD:
        return None
    return line.certificate if known else None


def _warn(text: str) -> None:
    warnings.warn(f"nondet: {text}", RuntimeWarning, stacklevel=3)
