"""JSON from a stranger, read strictly, its numbers kept as the decimals that were sent."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NoReturn, TypeVar

import numpy as np

from nondet.core.records import TOKENS_MOST

from .failures import AttemptError, malformed

__all__ = ["count", "float32_bytes", "item", "list_of_ints", "optional", "parse"]

_MOST_CONTAINERS = 500_000  # `[],` is three bytes on the wire and sixty in memory
_MOST_COMMAS = 4_000_000
_MOST_ID = 2**31 - 1
_MOST_INTEGER = 2**53
_LOW_BITS = np.uint64((1 << 29) - 1)  # of a float64's 52-bit fraction, those that float32's 23 bits leave out
_HALF = np.uint64(1 << 28)
_SMALLEST_NORMAL = 2.0**-126

T = TypeVar("T")


def parse(raw: bytes) -> Any:
    """A JSON document with floats as strings, the decimals that were sent.

    NaN, Infinity, a key that occurs twice in one object, invalid UTF-8, nesting deeper than the interpreter's stack and
    more than some hundred thousand lists or objects are refused.

    Raises:
        AttemptError: "malformed" or "too-large", with the reason on one line.
    """
    if raw.count(b"[") + raw.count(b"{") > _MOST_CONTAINERS or raw.count(b",") > _MOST_COMMAS:
        raise AttemptError("too-large", f"JSON of {len(raw):,} bytes with too many parts")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise malformed(f"invalid UTF-8 at byte {error.start}") from None
    try:
        return json.loads(
            text, parse_float=str, parse_int=_integer, parse_constant=_no_constant, object_pairs_hook=_object
        )
    except json.JSONDecodeError as error:
        what = "an empty body" if not text.strip() else f"not JSON: {error.msg} at character {error.pos}"
        raise malformed(what) from None
    except RecursionError:
        raise malformed("JSON nested too deeply") from None
    except ValueError:  # of int(): more digits than Python reads
        raise malformed("a number of thousands of digits") from None


def _integer(digits: str) -> int | str:
    return digits if digits == "-0" else int(digits)  # an int would lose the sign of a logprob


def _no_constant(name: str) -> NoReturn:
    raise malformed(f"{name}, which is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise malformed("a key that occurs twice in one object")
    return document


def item(document: Any, key: str, kind: type[T]) -> T:
    """The value under a key that must be there, of one type. A bool is no int.

    Raises:
        AttemptError: "malformed": not an object, no such key, or another type.
    """
    value = optional(document, key, kind)
    if value is None:
        raise malformed(f"no {key!r} in the answer")
    return value


def optional(document: Any, key: str, kind: type[T]) -> T | None:
    """The value under a key, of one type; None where the key is missing or null.

    Raises:
        AttemptError: "malformed": not an object, or another type.
    """
    if not isinstance(document, dict):
        raise malformed(f"{_named(document)} where an object with {key!r} should be")
    value = document.get(key)
    if value is None:
        return None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise malformed(f"{key!r} is {_named(value)}, not {_NAMES.get(kind, kind.__name__)}")
    if isinstance(value, int) and abs(value) > _MOST_INTEGER:
        raise malformed(f"{key!r} is an integer beyond every count")
    return value


def count(document: Any, key: str, note: Callable[[str], None]) -> int | None:
    """A number of tokens under a key; None where it is missing, null, or with a note an integer that counts nothing.

    Raises:
        AttemptError: "malformed": not an object, or another type.
    """
    value = document.get(key) if isinstance(document, dict) else None
    if type(value) is int and not 0 <= value <= TOKENS_MOST:
        note(f"{key} of {str(value)[:40]} (not taken)")
        return None
    return optional(document, key, int)


def list_of_ints(values: list[Any], key: str) -> tuple[int, ...]:
    """Token ids.

    Raises:
        AttemptError: "malformed": something that is no int, or out of range.
    """
    for value in values:
        if type(value) is not int or not 0 <= value <= _MOST_ID:
            raise malformed(f"{key!r} has {_named(value)} where a token id should be")
    return tuple(values)


def float32_bytes(decimals: list[Any], key: str = "logprobs") -> bytes:
    """Little-endian float32, each the one nearest to its decimal (ties to even), never rounded twice.

    A float64 in between is harmless except where it lies exactly half way between two float32: there the decimal
    itself decides. (Rounding keeps order, and every such midpoint is a float64, so a decimal above a midpoint can't
    become a float64 below it.)

    Raises:
        AttemptError: "malformed": null, not a number, or too large for float32.
    """
    for value in decimals:
        if type(value) not in (int, str):
            raise malformed(f"{key!r} has {_named(value)} where a number should be")
    try:
        doubles = np.array([float(value) for value in decimals], dtype="<f8")
    except (ValueError, OverflowError):
        raise malformed(f"{key!r} has something that is no number") from None
    with np.errstate(over="ignore"):
        rounded = doubles.astype("<f4")
    if not np.isfinite(rounded).all():
        raise malformed(f"{key!r} has a number that float32 can't hold")
    halfway = (doubles.view("<u8") & _LOW_BITS) == _HALF
    for index in np.flatnonzero(halfway | ((np.abs(doubles) < _SMALLEST_NORMAL) & (doubles != 0))):
        rounded[index] = _nearest(Decimal(decimals[index]), float(doubles[index]), rounded[index])
    return rounded.tobytes()


def _nearest(decimal: Decimal, double: float, rounded: np.float32) -> np.float32:
    """The float32 nearest to a decimal whose float64 may lie half way between two: then the decimal's side counts.

    Comparisons of Decimal and sums of float64 this close together are exact.
    """
    side = np.float32(math.inf if float(rounded) < double else -math.inf)
    other = np.nextafter(rounded, side, dtype=np.float32)
    if decimal == Decimal(double) or abs(float(other) - double) != abs(float(rounded) - double):
        return rounded
    return np.float32(max(rounded, other) if decimal > Decimal(double) else min(rounded, other))


_NAMES = {dict: "an object", list: "a list", str: "a string", int: "an integer", bool: "a boolean"}


def _named(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    return _NAMES.get(type(value), type(value).__name__)
