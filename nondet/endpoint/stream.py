"""Server-sent events out of bytes as they arrive, bounded."""

from __future__ import annotations

from .failures import AttemptError

__all__ = ["Events"]


class Events:
    """Collects pieces of a body and gives the data of each event that is whole.

    Lines end with CR LF, LF or CR; `data:` lines of one event are joined by newlines; comments and other fields are
    skipped. What an unfinished event holds when the body ends is dropped, as the standard says.

    Args:
        most_bytes: Of one event.
        most_events: Of the stream.
    """

    def __init__(self, most_bytes: int, most_events: int) -> None:
        self._most = most_bytes
        self._left, self._most_events = most_events, most_events
        self._rest: list[bytes] = []  # pieces of one line, joined once it ends: a drip of single bytes stays cheap
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that this piece finished.

        Raises:
            AttemptError: "too-large": a line or an event without end, or too many events.
        """
        self._grow(len(piece))
        if b"\n" not in piece and b"\r" not in piece and not (self._rest and self._rest[-1].endswith(b"\r")):
            self._rest.append(piece)
            return []
        # bytes.splitlines splits at LF, CR and CR LF only. A CR at the end may be half of a CR LF: it waits.
        lines = b"".join([*self._rest, piece]).splitlines(keepends=True)
        self._rest = [lines.pop()] if lines and not lines[-1].endswith(b"\n") else []
        return [event for line in lines if (event := self._line(line.rstrip(b"\r\n"))) is not None]

    def close(self) -> list[bytes]:
        """The event that only the end of the body finishes: one whose last line end is a bare CR."""
        return self.feed(b"\n") if self._rest and self._rest[-1].endswith(b"\r") else []

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size > self._most:
            raise AttemptError("too-large", f"an event of more than {self._most:,} bytes")

    def _line(self, line: bytes) -> bytes | None:
        if not line:
            data, self._data, self._size = self._data, [], 0
            self._left -= bool(data)
            if self._left < 0:
                raise AttemptError("too-large", f"more than {self._most_events:,} events")
            return b"\n".join(data) if data else None
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        return None
