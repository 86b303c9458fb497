"""What every model is loaded with: its folder or hub name, config, tokenizer, dtype; what goes wrong is one line."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nondet.core.runfile import read_whole, regular
from nondet.errors import UserError, one_line, reason_of, suggestion

__all__ = [
    "DTYPES",
    "check_dtype",
    "commit_of",
    "local_folder",
    "offline",
    "quiet",
    "read_config",
    "read_tokenizer",
    "weight_names",
    "weights_digest",
]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# Weights below this size are identified by their contents; larger ones by name and size alone, since reading a
# hundred gigabytes twice tells a reader little.
_HASHED_BYTES = 256 * 2**20
_INDEX, _INDEX_MOST = "model.safetensors.index.json", 64 * 2**20
_COPY = "Copy or download it again; weights must be safetensors."


def check_dtype(dtype: str, device: str) -> torch.dtype:
    """The dtype, where models run in it here.

    Raises:
        UserError: they don't.
    """
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype!r} is not one that models run in here", suggestion(dtype, DTYPES))
    if device == "cuda" and dtype == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name()
        raise UserError(f"--dtype bfloat16: {name} has no bfloat16 arithmetic", "Use --dtype float16 or float32.")
    return DTYPES[dtype]


def local_folder(where: str) -> Path | None:
    """The folder, or None for a hub name.

    Raises:
        UserError: it is neither.
    """
    path = Path(where).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(
                f"{where} has no config.json, so it is no model folder", "Give a folder made by save_pretrained."
            )
        return path
    if path.exists():
        raise UserError(
            f"{where} is a file, not a model folder", "Give the folder that holds config.json and the weights."
        )
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", where) or where.startswith((".", "-")):
        raise UserError(
            f"there is no model folder {where}", "Check the path, or give a hub name such as Qwen/Qwen3-0.6B."
        )
    return None


def offline(name: str) -> bool:
    """Whether the hub can't be reached, so that only a cached copy will do.

    Raises:
        UserError: there is no such model, or it can't be had now.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

    cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    if not constants.HF_HUB_OFFLINE:
        try:
            get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=10)
            return False
        except GatedRepoError as error:
            raise UserError(
                f"{name} is gated on the hub", "Accept its terms there and log in with `hf auth login`."
            ) from error
        except HfHubHTTPError as error:
            if not cached:
                status = getattr(getattr(error, "response", None), "status_code", "?")
                raise UserError(
                    f"{name} is neither a folder here nor a model on the hub (HTTP {status})",
                    "Check the name; log in if it is private.",
                ) from error
        except Exception as error:  # the HTTP client's own errors differ between huggingface_hub versions
            if not cached:
                kind = type(error).__name__
                raise UserError(
                    f"{name} is no folder here, the hub can't be reached ({kind}), and no copy is cached",
                    "Check the path or the connection, or leave --model out to use the embedded model.",
                ) from error
    elif not cached:
        raise UserError(
            f"{name} is no folder here, HF_HUB_OFFLINE is set, and no copy is cached", "Check the path, or unset it."
        )
    return True


def read_config(where: str, local: Path | None, options: dict[str, Any]) -> Any:
    """The model's config.

    Raises:
        UserError: it can't be used.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(local or where, **options)
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise UserError(f"{where} brings code of its own", "Read it; then add --trust-remote-code.") from error
        raise UserError(
            f"{where}: its config.json can't be used: {reason_of(error)}", "Is it a complete transformers model?"
        ) from error


def read_tokenizer(where: str, local: Path | None, options: dict[str, Any]) -> Any:
    """The model's tokenizer.

    Raises:
        UserError: it can't be loaded.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        plain = None if local is None else local / "tokenizer.json"
        if plain is not None and plain.is_file() and not plain.with_name("tokenizer_config.json").is_file():
            # taken as it is: AutoTokenizer would guess a class from the model's type, and cut text in another way
            return PreTrainedTokenizerFast(tokenizer_file=str(plain))
        return AutoTokenizer.from_pretrained(local or where, **options)
    except Exception as error:
        raise UserError(
            f"{where}: its tokenizer can't be loaded: {reason_of(error)}", "Put its tokenizer.json beside config.json."
        ) from error


def weight_names(where: str, local: Path | None, config: Any, options: dict[str, Any]) -> list[str]:
    """Names, relative to the model, of the files that transformers will take the weights from: all are safetensors.

    An index of safetensors may name anything: transformers would unpickle a .bin, and leave the folder by "..". A
    symbolic link is followed, as a hub's cache consists of them: the suffix of the name decides what the file is read
    as, so no link makes it a pickle, and the digest reads the same name.

    Raises:
        UserError: another suffix, a path out of the folder, no regular file, a broken index, or an adapter.
    """
    from transformers.utils import cached_file

    there = {"local_files_only": options.get("local_files_only", False), "_raise_exceptions_for_missing_entries": False}

    def find(name: str) -> Path | None:
        try:
            found = cached_file(str(local or where), name, **there)
        except (OSError, ValueError) as error:
            raise UserError(f"{where}: its {name} can't be had: {reason_of(error)}", _COPY) from error
        return None if found is None else Path(found)

    if find("adapter_config.json") is not None:
        raise UserError(f"{where} holds an adapter (adapter_config.json)", "Merge it into its model, and give that.")
    named = getattr(config, "transformers_weights", None)
    index = str(named or _INDEX)
    names = [str(named or "model.safetensors")]
    if index.endswith(".index.json") and (listed := find(_inside(where, index, ".safetensors.index.json"))) is not None:
        try:
            shards = sorted(set(json.loads(read_whole(listed, _INDEX_MOST))["weight_map"].values()))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{where}: its {index} is no index of weights", _COPY) from error
        shards = [_inside(where, name, ".safetensors") for name in shards]
        if named or local is None or not (local / names[0]).is_file():  # which transformers takes before an index
            names = shards
    for name in names:
        _inside(where, name, ".safetensors")
        if local is not None and (local / name).exists():
            regular(local / name)
    return names


def _inside(where: str, name: Any, suffix: str) -> str:
    """The name, which stays in its folder and ends so.

    Raises:
        UserError: it doesn't.
    """
    if not (isinstance(name, str) and name.endswith(suffix)):
        raise UserError(f"{where} names {one_line(repr(name), 200)} as its weights, no {suffix}", _COPY)
    if Path(name).is_absolute() or {"..", ""} & set(re.split(r"[/\\]", name)) or ":" in name:
        raise UserError(f"{where} names {one_line(repr(name), 200)} as its weights, out of its folder", _COPY)
    return name


def commit_of(where: str, local: Path | None) -> str | None:
    """The hub's commit that a model was taken from, once it is loaded; None of a folder."""
    from transformers.utils import cached_file

    kept = {"local_files_only": True, "_raise_exceptions_for_missing_entries": False}
    found = None if local is not None else cached_file(where, "config.json", **kept)
    return None if found is None else Path(found).parent.name  # .../snapshots/COMMIT/config.json


def weights_digest(folder: Path, names: Iterable[str]) -> str:
    """What tells weights apart: the contents of these files of the folder, of large ones names and sizes."""
    files = [folder / name for name in sorted(names)]
    sha = hashlib.sha256()
    if sum(f.stat().st_size for f in files) > _HASHED_BYTES:
        for file in files:
            sha.update(f"{file.relative_to(folder).as_posix()}:{file.stat().st_size};".encode())
        return f"sizes:{sha.hexdigest()[:16]}"
    for file in files:
        sha.update(file.read_bytes())
    return f"sha256:{sha.hexdigest()[:16]}"


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' bars and tables off the terminal: what goes wrong becomes one line."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
