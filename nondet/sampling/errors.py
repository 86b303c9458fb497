"""What can go wrong in an engine, and how errors of libraries are put into one line."""

from __future__ import annotations

from nondet.text import one_line

__all__ = ["EngineStoppedError", "ServerStoppedError", "reason_of"]


class EngineStoppedError(RuntimeError):
    """The engine died in a round. What was finished is on disk, the reason in each request that it took along.

    Attributes:
        hint: What to try, beginning with a verb in lower case.
    """

    hint = "run again with --force, or a smaller --load"


class ServerStoppedError(EngineStoppedError):
    """A server stopped answering. What was finished is on disk; what was not is asked again by a resumed run."""

    hint = "go on with --resume when it answers again"


def reason_of(error: BaseException | str) -> str:
    """The first line of an error's message, with its type: libraries go on for pages."""
    lines = str(error).strip().splitlines()
    first = lines[0].rstrip(". ") if lines else ""
    if isinstance(error, str):
        return one_line(first, 300)
    return one_line(f"{type(error).__name__}: {first}" if first else type(error).__name__, 300)
