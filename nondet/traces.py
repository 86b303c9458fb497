"""The side file of a sampled run: token ids, logprobs and margins of each distinct trace, stored once.

RUN.jsonl holds the completions; RUN.traces.jsonl holds, under its digest, what each distinct trace consists of, so that
a report can be made elsewhere without the model or its tokenizer.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from nondet.errors import UserError
from nondet.files import disk_errors

__all__ = ["Pieces", "Trace", "TraceWriter", "read_traces", "tokens_digest", "trace_digest", "traces_path"]

_ENCODER = msgspec.json.Encoder()


class Trace(msgspec.Struct, frozen=True, tag="trace", kw_only=True):
    """One distinct trace.

    Attributes:
        digest: `trace_digest` of the token ids and logprob bits.
        logprobs: Little-endian float32 logprob of each chosen token (base64 in the file).
        margins: Little-endian float32, top-1 minus top-2 logit of each step, as the engine computed them in its batch;
            empty where they were not recorded. Not part of the digest.
        runner_up: The token that came second in each step; empty where margins are.
        text: The decoded completion.
    """

    digest: str
    token_ids: list[int]
    logprobs: bytes
    margins: bytes = b""
    runner_up: list[int] = []
    text: str = ""

    @property
    def logprob_array(self) -> npt.NDArray[np.float32]:
        """[T] float32."""
        return np.frombuffer(self.logprobs, dtype="<f4")

    @property
    def margin_array(self) -> npt.NDArray[np.float32]:
        """[T] float32, or [0]."""
        return np.frombuffer(self.margins, dtype="<f4")


class Pieces(msgspec.Struct, frozen=True, tag="pieces", kw_only=True):
    """Text of single tokens, for pointing at one token: id (as a string, for JSON) -> text."""

    pieces: dict[str, str]


def traces_path(run: Path) -> Path:
    """RUN.jsonl -> RUN.traces.jsonl."""
    return run.with_name(run.name.removesuffix(".jsonl") + ".traces.jsonl")


def tokens_digest(token_ids: list[int]) -> str:
    """First 16 hex digits of the SHA-256 over the ids as little-endian int64."""
    return hashlib.sha256(np.asarray(token_ids, dtype="<i8").tobytes()).hexdigest()[:16]


def trace_digest(token_ids: list[int], logprobs: bytes) -> str:
    """The same over ids and logprob bits."""
    return hashlib.sha256(np.asarray(token_ids, dtype="<i8").tobytes() + b"|" + logprobs).hexdigest()[:16]


def read_traces(run: Path) -> tuple[dict[str, Trace], dict[int, str]]:
    """All traces by digest, and the text of single tokens by id.

    A line that is cut off at the end belongs to a round that never finished, and is left out.

    Raises:
        UserError: the side file is missing or malformed.
    """
    path = traces_path(run)
    decoder = msgspec.json.Decoder(Trace | Pieces)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path} can't be read: {error.strerror}", "It belongs beside the run file: move the two together."
        ) from error
    traces: dict[str, Trace] = {}
    pieces: dict[int, str] = {}
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            record = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise UserError(f"{path} is malformed in line {number}: {error}", "Was it edited by hand?") from error
        if isinstance(record, Trace):
            traces[record.digest] = record
        else:
            pieces.update({int(k): v for k, v in record.pieces.items()})
    return traces, pieces


class TraceWriter:
    """Appends to the side file: each distinct trace and each token's text once, whichever implementation made it first.

    Args:
        run: Path of the run file.
        resume: Go on with the side file that is there; without it the file is begun anew.
        piece: Token id -> its text.

    Raises:
        UserError: the file can't be written, or can't be read back to resume.
    """

    def __init__(self, run: Path, *, resume: bool, piece: Callable[[int], str]) -> None:
        self.path = traces_path(run)
        self._piece = piece
        self._digests: set[str] = set()
        self._pieces: set[int] = set()
        if resume:
            traces, pieces = read_traces(run)
            self._digests, self._pieces = set(traces), set(pieces)
        with disk_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if resume:
                data = self.path.read_bytes()
                os.truncate(self.path, data.rfind(b"\n") + 1)  # a line that a killed run left unfinished
            self._stream = self.path.open("ab" if resume else "wb")

    def write(self, traces: Iterable[Trace]) -> None:
        """Write those that are not there yet, and flush: a completion may then name them."""
        lines: list[msgspec.Struct] = []
        fresh: set[int] = set()
        for trace in traces:
            if trace.digest not in self._digests:
                self._digests.add(trace.digest)
                fresh |= {*trace.token_ids, *trace.runner_up} - self._pieces
                lines.append(trace)
        if fresh:
            self._pieces |= fresh
            lines.insert(0, Pieces(pieces={str(i): self._piece(i) for i in sorted(fresh)}))
        with disk_errors(self.path):
            self._stream.writelines(_ENCODER.encode(line) + b"\n" for line in lines)
            self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        with disk_errors(self.path):
            self._stream.close()
