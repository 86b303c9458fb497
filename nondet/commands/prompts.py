"""The prompts of a command: one, from the command line or a file, or a set; how often each, and whether they fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nondet.core.runfile import read_whole
from nondet.errors import UserError

if TYPE_CHECKING:
    from nondet.sampling.model import LoadedModel

__all__ = ["COMPLETIONS_MOST", "completions_each", "encode_all", "prompt_text", "prompt_texts"]

COMPLETIONS_MOST = 1_000_000
_FILE_MOST = 4 * 2**20  # bytes of --prompt-file, as of one row of --prompts: beyond the context of any model here
# Where --n is not given: of one prompt, and of each of several at least.
_COMPLETIONS, _EACH_LEAST = 1000, 20


def completions_each(n: int | None, subjects: int) -> int:
    """Completions of each subject, from --n or its default.

    Raises:
        UserError: more of them in all than a run file holds.
    """
    each = n if n is not None else _COMPLETIONS if subjects == 1 else max(_EACH_LEAST, _COMPLETIONS // subjects)
    if each * subjects > COMPLETIONS_MOST:
        raise UserError(
            f"--n {each} of {subjects:,} prompts and seeds makes {each * subjects:,} completions",
            f"Stay within {COMPLETIONS_MOST:,}: a smaller --n, or fewer prompts.",
        )
    return each


def encode_all(loaded: LoadedModel, texts: Sequence[str], length: int) -> list[list[int]]:
    """Token ids of the prompts.

    Raises:
        UserError: one has no tokens, or does not fit the context with its completion; of a file, its place is named.
    """
    from nondet.sampling.model import check_lengths

    ids = []
    for text in texts:
        tokens = loaded.encode(text)
        try:
            check_lengths(loaded, tokens, length)
        except UserError as error:
            place = getattr(text, "place", "")
            raise (UserError(f"{place}: {error.what}", error.hint) if place else error) from None
        ids.append(tokens)
    return ids


def prompt_texts(prompt: str | None, file: Path | None, prompts: Path | None, column: str | None) -> Sequence[str]:
    """The prompts: those of a set, or the one.

    Raises:
        UserError: as `prompt_text` and `nondet.sampling.plan.load_prompts`, or prompts named twice.
    """
    if prompts is None:
        if column is not None:
            raise UserError("--column belongs to --prompts", "Give a file of prompts, or leave it out.")
        return [prompt_text(prompt, file)]
    if prompt is not None or file is not None:
        raise UserError("--prompts excludes --prompt and --prompt-file", "Put that prompt into the file.")
    from nondet.sampling.plan import load_prompts

    return load_prompts(prompts, column)


def prompt_text(prompt: str | None, file: Path | None) -> str:
    """The text of the prompt.

    Raises:
        UserError: two prompts, an empty one, or a file that is none, too large, or can't be read as UTF-8.
    """
    if prompt is not None and file is not None:
        raise UserError("--prompt and --prompt-file exclude each other", "Give one prompt.")
    if file is not None:
        try:
            text = read_whole(file, _FILE_MOST).decode("utf-8")
        except FileNotFoundError:
            raise UserError(f"no prompt file at {file}", "Check the path.") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{file} is not UTF-8 text (byte {error.start})", "Save it as UTF-8.") from error
        except OSError as error:
            raise UserError(f"can't read {file}: {error.strerror}", "Give a readable text file.") from error
    elif prompt is not None:
        text = prompt
    else:
        from nondet.embedded import DEFAULT_PROMPT

        text = DEFAULT_PROMPT
    if not text.strip():
        raise UserError("the prompt is empty", "Give some text.")
    return text
