"""Loading a causal LM and its tokenizer, or making random weights, with every error reported in one line."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from logging import getLogger
from pathlib import Path
from typing import Any

import torch

from nondet.core.processes import free_memory
from nondet.core.runfile import read_whole, regular
from nondet.errors import UserError, one_line, reason_of, suggestion

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# Weights below this size are identified by their contents; larger ones, to save the time, by name and size.
_HASHED_BYTES = 256 * 2**20
_INDEX, _INDEX_MOST = "model.safetensors.index.json", 64 * 2**20
_COPY = "Copy or download it again; weights must be safetensors."
_TOKENIZER = "Put its tokenizer.json beside config.json."


def check_dtype(dtype: str, device: str) -> torch.dtype:
    """The dtype; a `UserError` where models do not run in it here."""
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype!r} is not one that models run in here", suggestion(dtype, DTYPES))
    if device == "cuda" and dtype == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name()
        raise UserError(f"--dtype bfloat16: {name} has no bfloat16 arithmetic", "Use --dtype float16 or float32.")
    return DTYPES[dtype]


def local_folder(where: str) -> Path | None:
    """The folder, or None for a hub name; a `UserError` where it is neither."""
    path = Path(where).expanduser()
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        raise UserError(f"{where} has no config.json, so it is no model folder", "Give one made by save_pretrained.")
    if path.exists():
        raise UserError(f"{where} is a file, not a model folder", "Give the folder that holds it and config.json.")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", where) or where.startswith((".", "-")):
        hint = "Check the path, or give a hub name such as Qwen/Qwen3-0.6B."
        raise UserError(f"there is no model folder {where}", hint)
    return None


def offline(name: str) -> bool:
    """Whether the hub is unreachable, so that only a cached copy can be used; a `UserError` where there is none."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

    what = f"{name} is no folder here, HF_HUB_OFFLINE is set, and no copy is cached"
    hint = "Check the path, or unset it."
    cause: Exception | None = None
    if not constants.HF_HUB_OFFLINE:
        try:
            get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=10)
            return False
        except GatedRepoError as error:
            hint = "Accept its terms there and log in with `hf auth login`."
            raise UserError(f"{name} is gated on the hub", hint) from error
        except HfHubHTTPError as error:
            status = getattr(getattr(error, "response", None), "status_code", "?")
            what = f"{name} is neither a folder here nor a model on the hub (HTTP {status})"
            hint, cause = "Check the name; log in if it is private.", error
        except Exception as error:  # noqa: BLE001 - the HTTP client's own ones differ between versions of the hub
            what = f"{name} is no folder here, the hub can't be reached ({type(error).__name__}), and no copy is cached"
            hint, cause = "Check the path or the connection, or leave --model out to use the embedded model.", error
    if not isinstance(try_to_load_from_cache(name, "config.json"), str):
        raise UserError(what, hint) from cause
    return True


def read_config(where: str, local: Path | None, options: dict[str, Any]) -> Any:
    """The model's config; a `UserError` where it can't be used."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(local or where, **options)
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise UserError(f"{where} brings code of its own", "Read it; then add --trust-remote-code.") from error
        what = f"{where}: its config.json can't be used: {reason_of(error)}"
        raise UserError(what, "Is it a complete transformers model?") from error


def read_tokenizer(where: str, local: Path | None, options: dict[str, Any]) -> Any:
    """The model's tokenizer; a `UserError` where it can't be loaded."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        plain = None if local is None else local / "tokenizer.json"
        if plain is not None and plain.is_file() and not plain.with_name("tokenizer_config.json").is_file():
            # taken as it is: AutoTokenizer would guess a class from the model's type, and cut text differently
            return PreTrainedTokenizerFast(tokenizer_file=str(plain))
        return AutoTokenizer.from_pretrained(local or where, **options)
    except Exception as error:
        raise UserError(f"{where}: its tokenizer can't be loaded: {reason_of(error)}", _TOKENIZER) from error


def weight_names(where: str, local: Path | None, config: Any, options: dict[str, Any]) -> list[str]:
    """Names, relative to the model, of the files from which transformers takes the weights: all are safetensors.

    An index of safetensors may name anything: transformers would unpickle a .bin, and leave the folder by "..". A
    symbolic link is followed, because a hub's cache consists of them: the suffix of the name decides how the file is
    read, so no link makes it a pickle, and the digest reads the same name. Raises UserError: another suffix, a path out
    of the folder, not a regular file, a broken index, or an adapter.
    """
    from transformers.utils import cached_file

    there = {"local_files_only": options.get("local_files_only", False), "_raise_exceptions_for_missing_entries": False}

    def find(name: str) -> Path | None:
        try:
            found = cached_file(str(local or where), name, **there)
        except (OSError, ValueError) as error:
            raise UserError(f"{where}: its {name} can't be fetched: {reason_of(error)}", _COPY) from error
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
    """The name, checked to stay in its folder and to have this suffix."""
    wrong = ""
    if not (isinstance(name, str) and name.endswith(suffix)):
        wrong = f"no {suffix}"
    elif Path(name).is_absolute() or {"..", ""} & set(re.split(r"[/\\]", name)) or ":" in name:
        wrong = "out of its folder"
    if wrong:
        raise UserError(f"{where} names {one_line(repr(name), 200)} as its weights, {wrong}", _COPY)
    return str(name)


def weights_digest(folder: Path, names: Iterable[str]) -> str:
    """A digest of the contents of these files of the folder, of large ones of names and sizes."""
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
    """Keep transformers' bars, tables and its engine's log lines off the terminal: errors become one line."""
    from transformers.utils import logging

    engine = getLogger("ContinuousBatchingLogger")
    level, bars, engines = logging.get_verbosity(), logging.is_progress_bar_enabled(), engine.level
    logging.set_verbosity(logging.CRITICAL)
    engine.setLevel(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        engine.setLevel(engines)
        if bars:
            logging.enable_progress_bar()


# Models with random weights from a fixed seed, for sizes without trained weights. "random:qwen3-12x1024" is a Qwen3 of
# 12 layers, 1024 wide, with the embedded model's tokenizer; "random:qwen3-8b" has exactly the shapes of Qwen3-8B, its
# vocabulary too. The text is gibberish, but operators, shapes and launches are those of a trained model of the size.

PREFIX = "random:"
_HINT = "Write random:qwen3-12x1024: an architecture, layers, width; or random:qwen3-0.6b, random:qwen3-8b."
_CONTEXT = 4096
_WIDTH_STEP = 128
_LAYERS, _WIDTH = 200, 16384  # a larger number is more likely a typing error
_SPREAD = 0.05  # so wide that greedy completions are not near-ties at every step

# architecture -> what its config needs in addition to the common sizes
_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "mistral": {"sliding_window": None},
    "gemma3_text": {"query_pre_attn_scalar": 128, "layer_types": ["full_attention"]},
}

# The shapes of published models. Their weights are drawn on the model's device, which is quick even for the largest, so
# they differ between GPU and CPU. Layers, width, heads, tied tables:
_PUBLISHED: dict[str, tuple[int, int, int, bool]] = {
    "qwen3-0.6b": (28, 1024, 16, True),
    "qwen3-8b": (36, 4096, 32, False),
}
_QWEN3_VOCABULARY, _QWEN3_CONTEXT = 151_936, 40_960


def is_random(source: str | None) -> bool:
    """Whether `--model` means random weights."""
    return source is not None and source.startswith(PREFIX)


def random_config(source: str, vocabulary: int) -> Any:
    """The config of "random:ARCHITECTURE-LAYERSxWIDTH": heads of 128, in total twice as wide as the model. Qwen3-0.6B's
    proportions: WIDTH 1024 has 16 heads on 8 key heads, and an MLP of 3072. Raises UserError: another form or sizes."""
    from transformers import AutoConfig

    name = source.removeprefix(PREFIX)
    match = re.fullmatch(r"([a-z0-9_]+)-(\d{1,4})x(\d{1,6})", name)
    more: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    if name in _PUBLISHED:
        (layers, width, heads, tied), kind, kv_heads = _PUBLISHED[name], "qwen3", 8
        vocabulary, context = _QWEN3_VOCABULARY, _QWEN3_CONTEXT
    elif match is None:
        raise UserError(f"--model {source!r} makes no sense", _HINT)
    else:
        kind, layers, width = match[1], int(match[2]), int(match[3])
        if kind not in _ARCHITECTURES:
            raise UserError(f"--model {source!r}: unknown architecture {kind!r}", suggestion(kind, _ARCHITECTURES))
        if not 1 <= layers <= _LAYERS or not _WIDTH_STEP <= width <= _WIDTH or width % _WIDTH_STEP:
            hint = f"Give 1 to {_LAYERS} layers and a multiple of {_WIDTH_STEP} up to {_WIDTH}."
            raise UserError(f"--model {source!r}: {layers} layers of width {width}", hint)
        heads = 2 * width // 128
        kv_heads = max(1, heads // 2)
        context, tied = _CONTEXT, True
        own = _ARCHITECTURES[kind]  # a list is for one layer
        more |= {key: value * layers if isinstance(value, list) else value for key, value in own.items()}
    more |= {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
    more |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 128}
    more |= {"vocab_size": vocabulary, "max_position_embeddings": context, "tie_word_embeddings": tied}
    return AutoConfig.for_model(kind, **more)


def check_memory(source: str, config: Any, dtype: torch.dtype, device: str = "cpu") -> None:
    """Refuse, as a `UserError`, a model that does not fit into memory, before its first tensor is made."""
    width, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layer = 2 * width * (heads + kv_heads) + 3 * width * inner
    tables = 1 if config.tie_word_embeddings else 2
    count = config.num_hidden_layers * layer + tables * config.vocab_size * width
    # in addition to the weights, the float32 numbers for the largest matrix
    needed = count * dtype.itemsize + 4 * max(config.vocab_size, inner, heads) * width
    free = free_memory() if device == "cpu" else torch.cuda.mem_get_info()[0]
    if needed > free:
        what = f"--model {source!r} takes {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} are free"
        raise UserError(what, "Give fewer layers or a smaller width.")


def random_model(config: Any, dtype: torch.dtype, device: str = "cpu") -> Any:
    """A causal LM of that config, its matrices uniform around 0, its norms as initialized. uniform_ and not normal_:
    the latter's values differ between CPUs for one seed."""
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                drawn = torch.empty(parameter.shape, device=device)
                parameter.copy_(drawn.uniform_(-_SPREAD, _SPREAD, generator=generator))
    return model


EMBEDDED = "embedded"


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device, and its description for a run's header: `name` is "embedded", or the folder or hub name as
    given; `context` the positions that it has, or None; `identity` what decides its bits (class, parameters, dtype,
    commit, weights), JSON-able: a run is resumed only under an equal one."""

    name: str
    model: Any = field(repr=False)
    tokenizer: Any = field(repr=False)
    device: str
    dtype: str
    context: int | None
    eos: tuple[int, ...]
    identity: dict[str, Any]

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with whatever special tokens the tokenizer adds by itself."""
        return self.tokenizer.encode(text)

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a piece of text, without special tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens shown."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def embedded_folder() -> Path:
    """The folder of the model that ships with nondet."""
    return Path(__file__).resolve().parent.parent / "embedded"


def load_model(
    source: str | None, dtype: str, device: str, *, trust_remote_code: bool = False, attention: str = "sdpa"
) -> LoadedModel:
    """Load a model and its tokenizer. Raises UserError: it is missing, incomplete, not a causal LM, or can't run here.

    `source` is None for the embedded model, a local folder, a hub name (weights must be safetensors), or random
    weights; `attention` is the form that transformers gives it, which another engine ignores.
    """
    from transformers import AutoModelForCausalLM

    torch_dtype = check_dtype(dtype, device)
    where = str(embedded_folder()) if source is None else source
    random = is_random(source)
    local = embedded_folder() if random else local_folder(where)
    with quiet():
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        if local is None:
            options["local_files_only"] = offline(where)
        # the config first: a tokenizer is looked up by it, and would be blamed for a broken one
        config: Any = None if random else read_config(where, local, options)
        given = getattr(config, "quantization_config", None)  # transformers removes it when it makes plain weights
        names = ["model.safetensors"] if random else weight_names(where, local, config, options)
        tokenizer = read_tokenizer(where, local, options)
        if random:
            config = random_config(where, max(tokenizer.get_vocab().values()) + 1)
            made_on = device if where.removeprefix(PREFIX) in _PUBLISHED else "cpu"
            check_memory(where, config, torch_dtype, made_on)
            model = random_model(config, torch_dtype, made_on)
        else:
            _check_causal(where, config, trust_remote_code)
            options |= {"dtype": torch_dtype, "attn_implementation": attention}
            model = read_weights(AutoModelForCausalLM, where, local, config, options)
    if not tokenizer.encode("one word", add_special_tokens=False):
        # transformers makes up an empty tokenizer where a folder has none
        raise UserError(f"{where} has no tokenizer, or an empty one", _TOKENIZER)
    rows = check_vocabulary(where, model, tokenizer)
    tokenizer.model_max_length = 10**9  # check_lengths reports in one line; transformers would warn in its own way
    try:
        model = model.to(device).eval()
    except torch.OutOfMemoryError as error:
        what = f"{where} does not fit into the GPU's memory in {dtype}"
        raise UserError(what, "Use a smaller model or --device cpu.") from error
    text_config = config.get_text_config()
    limit = getattr(text_config, "max_position_embeddings", None)
    eos = model.generation_config.eos_token_id
    eos = getattr(text_config, "eos_token_id", None) if eos is None else eos
    identity = identity_of(model, where, local, None if random else names, dtype) | {"vocabulary": rows}
    identity |= quantization_of(given, model, dtype)
    eos = (eos,) if isinstance(eos, int) else tuple(eos or ())
    context = limit if isinstance(limit, int) and limit > 0 else None
    name = EMBEDDED if source is None else source
    return LoadedModel(name, model, tokenizer, device, dtype, context, eos, identity)


def load_libraries() -> None:
    """Start the CUDA libraries of products and attention on another thread, while a model is being loaded. Their first
    call on a machine reads hundreds of megabytes, which takes seconds."""

    def first_calls() -> None:
        with suppress(RuntimeError):  # the code that needs a missing library raises
            x = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16, device="cuda")
            torch.nn.functional.scaled_dot_product_attention(x @ x, x, x, attn_mask=x)  # with a mask, as the engine

    threading.Thread(target=first_calls, name="nondet-libraries", daemon=True).start()


def quantization_of(given: Any, model: Any, dtype: str) -> dict[str, str]:
    """How the weights were quantized in their files, and whether the model computes with dequantized ones."""
    if given is None:
        return {}
    method = given.get("quant_method") if isinstance(given, dict) else getattr(given, "quant_method", None)
    kept = getattr(model.config, "quantization_config", None) is not None
    return {"quantization": str(method) if kept else f"{method}, of which loading made {dtype}"}


def check_lengths(loaded: LoadedModel, prompt: Sequence[int], max_new_tokens: int, which: str = "") -> None:
    """Refuse, as a `UserError`, an empty prompt, and one that with its completion goes beyond the context."""
    if not prompt:
        raise UserError(f"{which}the prompt has no tokens", "Give some text.")
    if max_new_tokens < 1:
        raise UserError(f"--max-tokens {max_new_tokens} makes no sense", "Give 1 or more.")
    total, context = len(prompt) + max_new_tokens, loaded.context
    if context is not None and total > context:
        left = context - len(prompt)
        hint = f"Use --max-tokens {left} or less." if left > 0 else "Shorten the prompt."
        needed = f"{which}{len(prompt)} prompt tokens + {max_new_tokens} new ones = {total}"
        raise UserError(f"{needed} exceed the model's context of {context}", hint)


def _check_causal(where: str, config: Any, trust_remote_code: bool) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return
    names = getattr(config, "architectures", None) or []
    known = {n for v in CAUSAL.values() for n in ([v] if isinstance(v, str) else v)}
    named_otherwise = bool(names) and not known & set(names)
    if getattr(config, "is_encoder_decoder", False) or config.model_type not in CAUSAL or named_otherwise:
        what = f"{where} is a {', '.join(names) or config.model_type}, not a causal language model"
        raise UserError(what, "Give a model that generates text, such as Qwen3.")


def read_weights(
    auto: Any, where: str, local: Path | None, config: Any, options: dict[str, Any], extra: str = ""
) -> Any:
    """The model, by a class such as AutoModelForCausalLM. Raises UserError: its weights can't be loaded, or some are
    missing, except those of tensors with `extra` in their names."""
    named: dict[str, Any] = {"config": config, "use_safetensors": True, "output_loading_info": True}
    try:
        model, info = auto.from_pretrained(local or where, **named, **options)
    except Exception as error:
        if "scaled_dot_product_attention" in str(error) or "sdpa" in str(error):
            what = f"{where} can't use scaled_dot_product_attention, which the engine needs"
            raise UserError(what, "Choose another model.") from error
        if "ignore_mismatched_sizes" in str(error):
            raise UserError(f"{where}: the shapes of its weights are not those of its config.json", _COPY) from error
        raise UserError(f"{where}: its weights can't be loaded: {reason_of(error)}", _COPY) from error
    absent = sorted(name for name in info["missing_keys"] if not extra or extra not in name)
    if absent:
        # transformers would use random numbers instead
        raise UserError(f"{where} is half-written: {len(absent)} tensors are missing, {absent[0]} first", _COPY)
    return model


def check_vocabulary(where: str, model: Any, tokenizer: Any) -> int:
    """Rows of the model's table of tokens; raises `UserError` where the tokenizer has ids beyond them."""
    highest = max(tokenizer.get_vocab().values())
    rows = int(model.get_input_embeddings().weight.shape[0])
    if highest >= rows:
        what = f"{where}: the tokenizer has ids up to {highest}, the model only {rows}"
        raise UserError(what, "Are they of one model?")
    return rows


def identity_of(model: Any, where: str, local: Path | None, names: Iterable[str] | None, dtype: str) -> dict[str, Any]:
    """What decides a model's bits, JSON-able; `names` are those of the files of its weights, None of random ones."""
    from transformers.utils import cached_file

    config = model.config.get_text_config()
    kept = {"local_files_only": True, "_raise_exceptions_for_missing_entries": False}
    found = None if local is not None else cached_file(where, "config.json", **kept)
    return {
        "class": type(model).__name__,
        "parameters": model.num_parameters(),
        "dtype": dtype,
        "commit": None if found is None else Path(found).parent.name,  # .../snapshots/COMMIT/config.json
        "weights": "random" if names is None else None if local is None else weights_digest(local, names),
        "layers": getattr(config, "num_hidden_layers", None),
        "hidden": getattr(config, "hidden_size", None),
    }


def piece_of(loaded: LoadedModel) -> Callable[[int], str]:
    """The text that a token adds after another one: decoded by itself, some tokenizers drop its leading space."""
    before = loaded.encode_plain("a")
    head = loaded.decode(before)

    def piece(token: int) -> str:
        text = loaded.decode([*before, token])
        return text[len(head) :] if text.startswith(head) else loaded.decode([token])

    return piece
