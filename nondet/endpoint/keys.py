"""The key of an endpoint: from the environment, to one origin, and nowhere else."""

from __future__ import annotations

import base64
import contextlib
import html
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import quote, unquote

from nondet.errors import one_line

from ..errors import UserError

__all__ = ["KEY_VARIABLES", "Key", "kept_out_of_logs", "key_from_environment"]

KEY_VARIABLES = ("NONDET_API_KEY", "OPENAI_API_KEY")
_LOGGERS = ("httpx", "httpcore.connection", "httpcore.http11", "httpcore.proxy")
_MASKED = re.compile(r"\S{0,200}\*{3}\S{0,200}")
_ESCAPE = re.compile(r"\\(?:x|u00)([0-9a-fA-F]{2})")
_SHORTEST_SECRET = 8  # "EMPTY", "none" and "x" are what people write where a server wants any key at all


class Key:
    """A key that shows itself only in the header of a request.

    Its repr and str are "[key]"; it can't be pickled or copied into a record by accident.

    Args:
        name: What it is called where it was: "key", or "path" for one in an address.
    """

    __slots__ = ("_parts", "_shown", "_value")

    def __init__(self, value: str = "", name: str = "key") -> None:
        self._value, self._shown = value, f"[{name}]"
        plain, size = _squeezed(unquote(value)), _SHORTEST_SECRET
        self._parts = {text[i : i + size] for text in (plain, plain[::-1]) for i in range(len(text) - size + 1)}

    def __bool__(self) -> bool:
        return bool(self._value)

    def __repr__(self) -> str:
        return self._shown if self._value else "[no key]"

    def __reduce__(self) -> str:
        raise TypeError("a key is not written anywhere")

    def headers(self) -> dict[str, str]:
        """What authorizes one request; empty without a key."""
        return {"Authorization": f"Bearer {self._value}"} if self._value else {}

    def redact(self, text: str) -> str:
        """The text with the key, as it is or percent-encoded, replaced by "[key]". Before any cutting of the text."""
        for form in self._forms():
            text = text.replace(form, self._shown)
        return text

    def reason(self, text: str, limit: int = 300) -> str:
        """What a server said, for one line of a report: printable, cut, without the key or a recognizable part of it.

        A part is eight characters in a row, or a word that a server has masked itself ("sk-abc***xyz"). A line that
        still has such a part in one of the forms of `_views` is withheld. A server that has the key can of course hide
        it in what it sends; this is against carelessness, its and ours.
        """
        line = _MASKED.sub("[masked]", one_line(self.redact(text), limit))
        for start in range(len(self._value) - _SHORTEST_SECRET + 1):
            line = line.replace(self._value[start : start + _SHORTEST_SECRET], self._shown)
        if any(part in view for view in map(_squeezed, _views(line)) for part in self._parts):
            return f"{self._shown} (what else it says is withheld)"[:limit]
        return line

    def leaked(self, text: str | bytes) -> bool:
        """Whether a text holds the key; never for one too short to be a secret."""
        if len(self._value) < _SHORTEST_SECRET:
            return False
        whole = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        return any(form.encode() in whole for form in self._forms())

    def _forms(self) -> set[str]:
        value = self._value
        return {value, unquote(value), quote(value, safe=""), value.replace("/", "\\/")} if value else set()


def _squeezed(text: str) -> str:
    """Letters and digits alone, in lower case: however a text was wrapped, spaced or capitalized."""
    return "".join(filter(str.isalnum, text.casefold()))


def _views(line: str) -> Iterator[str]:
    """What a line may say in other forms: escapes and entities undone (twice), base64, hex, and codes of characters."""
    yield line
    for _ in range(2):
        line = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), html.unescape(unquote(line)))
        yield line
    for run in re.findall(r"[\w+/-]{11,}", line, re.ASCII):
        for start in range(4):  # where the encoding begins within the run is not known
            text = run[start:].translate({ord("-"): "+", ord("_"): "/"})
            yield base64.b64decode(text[: len(text) // 4 * 4]).decode("latin-1")
    digits = re.sub(r"0x|[^0-9a-fA-F]", "", line)
    for run in [digits, digits[1:], *re.findall(r"[0-9a-fA-F]{16,}", line)]:
        yield bytes.fromhex(run[: len(run) // 2 * 2]).decode("latin-1")
    yield "".join(chr(int(code)) for code in re.findall(r"\d+", line) if len(code) < 4)


@contextlib.contextmanager
def kept_out_of_logs(secrets: Sequence[Key]) -> Iterator[None]:
    """Redact what httpx and httpcore log, where somebody turned that on: it has addresses and the server's headers."""

    def redacted(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        for secret in secrets:
            message = secret.redact(message)
        if message != record.getMessage():
            record.msg, record.args = message, ()
        return True

    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addFilter(redacted)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(redacted)


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
        named = variable.isidentifier() and variable.isupper()
        named &= "_" in variable or len(variable) < 12  # an access key of AWS is in capitals, too
        shown = variable if named else "[not a variable's name]"
        raise UserError(f"no key in the environment variable {shown}", hint)
    return Key()
