"""The side file of a sampled run, RUN.traces.jsonl: tokens, logprobs and margins of each distinct trace, by digest."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from nondet.core.records import ContradictionError, Run
from nondet.core.runfile import AnyRecord, RunWriter, decode, disk_errors, encoded, lines_of, no_link, traces_path
from nondet.errors import UnrecordableError, UserError, one_line, shortened

_TOKEN_MOST = 2**31 - 1
TokenId = Annotated[int, msgspec.Meta(ge=0, le=_TOKEN_MOST)]
_TEXT_MOST = 2**20  # characters kept of a completion's text; only its ids are compared
PIECE_MOST, _PIECES_AT_ONCE = 1000, 4096  # characters of a token's text; tokens in one line


class Trace(msgspec.Struct, frozen=True, tag="trace", kw_only=True):
    """One distinct trace."""

    digest: str  # `trace_digest` of the token ids and logprob bits
    token_ids: list[TokenId]
    logprobs: bytes  # little-endian float32 logprob of each chosen token (base64 in the file)
    # little-endian float32, top-1 minus top-2 logit of each step, as the engine computed them in its batch; empty where
    # they were not recorded. Not part of the digest.
    margins: bytes = b""
    runner_up: list[TokenId] = []  # the token that came second in each step; empty where margins are
    text: str = ""
    # of its draws; None of greedy ones. Part of the digest, because two seeds may draw the same tokens.
    seed: int | None = None
    # border, cut, nucleus: little-endian float32, how near each draw was to another token, see
    # `nondet.sampling.engine.Draw`; empty of greedy ones, and where the engine drew. Not part of the digest.
    border: bytes = b""
    cut: bytes = b""
    nucleus: bytes = b""

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


_LINE: msgspec.json.Decoder[Trace | Pieces] = msgspec.json.Decoder(Trace | Pieces)


def shared_length(one: Sequence[int], two: Sequence[int]) -> int:
    """How many tokens two texts have in common at their beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def tokens_digest(token_ids: list[int]) -> str:
    """First 16 hex digits of the SHA-256 over the ids as little-endian int64."""
    return hashlib.sha256(np.asarray(token_ids, dtype="<i8").tobytes()).hexdigest()[:16]


def trace_digest(token_ids: list[int], logprobs: bytes, seed: int | None = None) -> str:
    """The same over ids, logprob bits and, where tokens were drawn, the seed."""
    drawn = b"" if seed is None else f"|seed {seed}".encode()
    return hashlib.sha256(np.asarray(token_ids, dtype="<i8").tobytes() + b"|" + logprobs + drawn).hexdigest()[:16]


def nonfinite_logprobs(logprobs: bytes) -> int:
    """How many of the little-endian float32 logprobs are NaN or infinite: a working model computes none."""
    return int((~np.isfinite(np.frombuffer(logprobs, dtype="<f4"))).sum())


def facts_of(trace: Trace) -> dict[str, Any]:
    """What a completion's record repeats of its trace, by the record's names."""
    return {
        "tokens_digest": tokens_digest(trace.token_ids),
        "n_tokens": len(trace.token_ids),
        "nonfinite": nonfinite_logprobs(trace.logprobs),
    }


def read_traces(run: Path) -> tuple[dict[str, Trace], dict[int, str]]:
    """All traces by digest, and the text of single tokens by id; without a line that is cut off at the end. A
    `UserError` if the side file is missing or malformed, or a trace doesn't match its digest."""
    path = traces_path(run)
    traces: dict[str, Trace] = {}
    pieces: dict[int, str] = {}
    shared: dict[int, int] = {}  # each token id as one object: ten million of them are most of a large file
    number = 0
    try:
        for number, line, whole in lines_of(path):  # noqa: B007 - errors below name this line
            if not whole:
                break
            record = decode(_LINE, line)
            if isinstance(record, Trace):
                _check(record)
                for ids in (record.token_ids, record.runner_up):
                    ids[:] = map(shared.setdefault, ids, ids)
                traces[record.digest] = record
            elif isinstance(record, Pieces):
                pieces.update({_token_id(name): text for name, text in record.pieces.items()})
    except FileNotFoundError as error:
        hint = "It belongs beside the run file: move the two together."
        raise UserError(f"{path} can't be read: {error.strerror}", hint) from error
    except ValueError as error:
        what = f"{path} is malformed in line {number}: {one_line(str(error), 300)}"
        raise UserError(what, "Was it edited by hand?") from error
    return traces, pieces


def check_traces(run: Run, traces: Mapping[str, Trace]) -> None:
    """Check that every completion has the trace that it names; a `UserError` where the two files are not of one run."""
    known: dict[str, dict[str, Any]] = {}
    hint = "The two files are not of one run, or one was edited: move or copy them together."
    for completion in run.completions:
        if completion.status != "ok":
            continue
        trace = traces.get(completion.trace)
        if trace is None:
            raise UserError(f"{traces_path(Path(run.source))} lacks traces that {run.source} names", hint)
        if completion.trace not in known:
            known[completion.trace] = facts_of(trace)
        for name, there in known[completion.trace].items():
            here = getattr(completion, name)
            if here != there:
                which = f"{completion.impl} {completion.request}"
                raise UserError(f"{run.source}: {name} of {which} is {here}, and {there} in its trace", hint)


def _check(trace: Trace) -> None:
    """A trace that fits itself. Raises ContradictionError."""
    count = len(trace.token_ids)
    for name in ("logprobs", "margins", "border", "cut", "nucleus"):
        length = len(getattr(trace, name))
        if length not in (0, 4 * count):
            raise ContradictionError(f"{name}: {length} bytes for {count} tokens")
    if len(trace.runner_up) not in (0, count):
        raise ContradictionError(f"runner_up: {len(trace.runner_up)} of {count} tokens")
    if trace_digest(trace.token_ids, trace.logprobs, trace.seed) != trace.digest:
        raise ContradictionError("digest: it is not that of its token ids and logprobs")


def _token_id(name: str) -> int:
    if not (name.isascii() and name.isdigit() and len(name) <= 10 and int(name) <= _TOKEN_MOST):
        raise ContradictionError(f"pieces: {name[:40]!r} is no token id")
    return int(name)


class TraceWriter:
    """Appends to the side file: each distinct trace and each token's text once. With `resume` an existing file is
    continued, without it the file is emptied. Raises UserError: it can't be written, or read back."""

    def __init__(self, run: Path, *, resume: bool, piece: Callable[[int], str]) -> None:
        self.path = traces_path(run)
        self._piece = piece
        traces, self.pieces = read_traces(run) if resume else ({}, {})
        self._digests, self._pieces = set(traces), set(self.pieces)
        with disk_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if resume:
                data = self.path.read_bytes()
                os.truncate(self.path, data.rfind(b"\n") + 1)  # a line that a killed run left unfinished
            # a resumed run's side file may be a link, as its run file may; a new one follows no link
            self._stream = open(self.path, "ab" if resume else "wb", opener=None if resume else no_link)  # noqa: SIM115 - until close()

    def write(self, traces: Iterable[Trace]) -> None:
        """Write the new ones, and flush, so that a completion can name them. Raises UserError: the disk is full or the
        file can't be written; UnrecordableError: a reader would reject one of them; none is written."""
        lines: dict[str, bytes] = {}
        fresh: set[int] = set()
        try:
            for trace in traces:
                if trace.digest not in self._digests:
                    kept = msgspec.structs.replace(trace, text=shortened(trace.text, _TEXT_MOST))
                    lines[trace.digest], read = encoded(kept, _LINE)
                    _check(read)
                    fresh |= {*trace.token_ids, *trace.runner_up} - self._pieces
            texts = [(str(i), shortened(self._piece(i), PIECE_MOST)) for i in sorted(fresh)]
            parts = [texts[i : i + _PIECES_AT_ONCE] for i in range(0, len(texts), _PIECES_AT_ONCE)]
            pieces = [encoded(Pieces(pieces=dict(part)), _LINE)[0] for part in parts]
        except ValueError as error:
            raise UnrecordableError(f"its trace can't be recorded: {one_line(str(error), 200)}") from error
        with disk_errors(self.path):
            self._stream.writelines([*pieces, *lines.values()])
            self._stream.flush()
        self._digests |= lines.keys()
        self._pieces |= fresh

    def close(self) -> None:
        """Close the file."""
        with disk_errors(self.path):
            self._stream.close()


def open_traces(writer: RunWriter, piece: Callable[[int], str]) -> TraceWriter:
    """The run's side file, resumed if the run is. A run that was stopped before its first traces has none yet; other
    kinds of record need none."""
    begun = any(key[0] in ("completion", "round") for key in writer.done)
    resume = begun or (writer.resumed and traces_path(writer.path).exists())
    return TraceWriter(writer.path, resume=resume, piece=piece)


@dataclass
class RoundCollector:
    """Writes the rounds of one implementation, or of one server, into the run file and its side file: a trace before
    the completion that names it, and a round's own record last."""

    writer: RunWriter
    traces: TraceWriter
    impl: str

    def missing(self, numbers: Iterable[int]) -> list[int]:
        """Those of these rounds that are not on disk yet."""
        return [number for number in numbers if ("round", self.impl, str(number)) not in self.writer.done]

    def write(self, *records: AnyRecord) -> list[AnyRecord]:
        """Write those that are not on disk yet; returns what was written, as `RunWriter.write` does."""
        return [self.writer.write(record) for record in records if record.key not in self.writer.done]
