"""The key of an endpoint: from the environment, to one origin, and nowhere else."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator, Mapping
from urllib.parse import quote

from ..errors import UserError
from ..text import one_line

__all__ = ["KEY_VARIABLES", "Key", "key_from_environment"]

KEY_VARIABLES = ("NONDET_API_KEY", "OPENAI_API_KEY")
_LOGGERS = ("httpx", "httpcore.connection", "httpcore.http11", "httpcore.proxy")
_MASKED = re.compile(r"\S{0,200}\*{3}\S{0,200}")
_SHORTEST_SECRET = 8  # "EMPTY", "none" and "x" are what people write where a server wants any key at all


class Key:
    """A key that shows itself only in the header of a request.

    Its repr and str are "[key]"; it can't be pickled or copied into a record by accident.
    """

    __slots__ = ("_value",)

    def __init__(self, value: str = "") -> None:
        self._value = value

    def __bool__(self) -> bool:
        return bool(self._value)

    def __repr__(self) -> str:
        return "[key]" if self._value else "[no key]"

    def __reduce__(self) -> str:
        raise TypeError("a key is not written anywhere")

    def headers(self) -> dict[str, str]:
        """What authorizes one request; empty without a key."""
        return {"Authorization": f"Bearer {self._value}"} if self._value else {}

    def redact(self, text: str) -> str:
        """The text with the key, as it is or percent-encoded, replaced by "[key]". Before any cutting of the text."""
        for form in self._forms():
            text = text.replace(form, "[key]")
        return text

    def reason(self, text: str, limit: int = 300) -> str:
        """What a server said, for one line of a report: printable, cut, without the key or a recognizable part of it.

        A part is eight characters in a row, or a word that a server has masked itself ("sk-abc***xyz"). A server that
        has the key can of course hide it in what it sends; this is against carelessness, its and ours.
        """
        line = _MASKED.sub("[masked]", one_line(self.redact(text), limit))
        for start in range(len(self._value) - _SHORTEST_SECRET + 1):
            line = line.replace(self._value[start : start + _SHORTEST_SECRET], "[key]")
        return line

    @contextlib.contextmanager
    def kept_out_of_logs(self) -> Iterator[None]:
        """Redact what httpx and httpcore log, where somebody turned that on: it has the headers that a server sends."""
        loggers = [logging.getLogger(name) for name in _LOGGERS]
        filtering = _Redacting(self)
        for logger in loggers:
            logger.addFilter(filtering)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeFilter(filtering)

    def leaked(self, text: str | bytes) -> bool:
        """Whether a text holds the key; never for one too short to be a secret."""
        if len(self._value) < _SHORTEST_SECRET:
            return False
        whole = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        return any(form.encode() in whole for form in self._forms())

    def _forms(self) -> set[str]:
        forms = (self._value, quote(self._value, safe=""), self._value.replace("/", "\\/"))
        return set(forms) if self._value else set()


class _Redacting(logging.Filter):
    """Takes a key out of every record that passes."""

    def __init__(self, key: Key) -> None:
        super().__init__()
        self._key = key

    def filter(self, record: logging.LogRecord) -> bool:
        """Redact; nothing is held back."""
        message = record.getMessage()
        if self._key.redact(message) != message:
            record.msg, record.args = self._key.redact(message), ()
        return True


def key_from_environment(variable: str | None = None, environment: Mapping[str, str] | None = None) -> Key:
    """The key that a variable of the environment holds, or the first of `KEY_VARIABLES` that is set.

    Args:
        variable: The name of the variable; None takes the usual ones, and no key if none is set.
        environment: Instead of the process's.

    Raises:
        UserError: The named variable is not set, or holds what can't go into a header.
    """
    environment = os.environ if environment is None else environment
    for name in (variable,) if variable else KEY_VARIABLES:
        value = environment.get(name, "").strip()
        if value:
            if not (value.isascii() and value.isprintable() and " " not in value):
                raise UserError(f"the key in {name} has characters that no HTTP header takes", "Set it again.")
            return Key(value)
    if variable:
        hint = "Name the variable that holds the key, not the key itself."
        shown = variable if variable.isidentifier() and variable.isupper() else "[not a variable's name]"
        raise UserError(f"no key in the environment variable {shown}", hint)
    return Key()
