"""Further fields of a request's body, as a user gives them, and those that no user may set."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import UserError

__all__ = ["check_extra"]

# Field -> why it is not the user's.
_OURS = {
    **dict.fromkeys(("n", "best_of", "n_cmpl", "use_beam_search"), "one request gives one completion"),
    **dict.fromkeys(("prompt", "messages", "text", "input_ids", "inputs"), "prompts come from --prompts"),
    **dict.fromkeys(("stream", "echo", "stream_options", "response_fields"), "it changes what an answer looks like"),
    "model": "say --model",
}
_NESTED = ("sampling_params", "parameters")  # SGLang's and TGI's, which are merged with ours


def check_extra(extra: Mapping[str, Any]) -> None:
    """Refuse fields that would make a run mean something else.

    Args:
        extra: Field -> value, for every request's body; `sampling_params` (SGLang) and `parameters` (TGI) are merged
            with the ones that are sent anyway.

    Raises:
        UserError: A field that is not the user's, an object that is none, or what JSON can't hold.
    """
    for name, value in extra.items():
        if name in _NESTED:
            if not isinstance(value, Mapping):
                raise UserError(f"the field {name!r} is no object", 'Give it as {"name": value}.')
            check_extra(value)
        elif name in _OURS:
            raise UserError(f"the field {name!r} can't be set", f"Leave it out: {_OURS[name]}.")
    try:
        json.dumps(dict(extra), allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        raise UserError(
            "a field of the request that JSON can't hold", "Give numbers, texts, lists and objects."
        ) from None
