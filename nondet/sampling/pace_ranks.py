"""In a rank: standing engines over a model that is cut by its own tensor-parallel plan, for `nondet bench engine`.

The caller asks all ranks for one wave after the other, under an implementation that it names. Every rank serves the
same requests; the engine's first rank hands them on, and the steps of all go together, for each begins with an exchange
over the ranks. Between waves the engines' threads are held on every rank (see `nondet.sampling.standing`), so that no
collective is under way while an implementation comes or goes, or while another engine is busy.
"""

from __future__ import annotations

import gc
import hashlib
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from nondet.errors import UserError
from nondet.sampling.plan import Load, Request
from nondet.sampling.standing import StandingEngine, Wave

__all__ = ["Opened", "RankTurn", "leave", "let_go", "merged", "open_model", "stand", "wave"]

_model: Any = None
_stack: ExitStack | None = None
_engines: dict[str, StandingEngine] = {}


@dataclass(frozen=True)
class Opened:
    """What one rank has to say of its model.

    Attributes:
        share: Parameters that it holds.
        vocabulary: Of the whole model.
        weights: Digest of weights that were drawn here, before they were cut; "" where they came from a folder.
    """

    share: int
    vocabulary: int
    weights: str


@dataclass(frozen=True)
class RankTurn:
    """What one rank has to say of a wave.

    Attributes:
        wave: None where the engine refused.
        ran: Launches and replacements, with counts.
        refusal: What the engine refused, and what to try.
    """

    wave: Wave | None
    ran: Counter[str] = field(default_factory=Counter)
    attention: str = ""
    refusal: tuple[str, str] | None = None


def open_model(source: str, dtype: str, device: str, threads: int) -> Opened:
    """Have this rank's share of the model, in the place of an earlier one.

    Args:
        source: A folder, or random weights: each rank draws all of them on its own device, from one seed, and keeps
            its share.
        threads: Of this rank on a CPU, as in `nondet.sampling.ranks.open_model`.

    Raises:
        UserError: random weights that do not fit.
        ValueError: heads or widths that the ranks don't divide, as transformers says it.
    """
    global _model
    import torch
    import torch.distributed as dist

    from nondet.sampling.model import check_memory, is_published, is_random, random_config, random_model
    from nondet.sampling.ranks import cut, load

    let_go()
    torch.set_num_threads(threads)
    place = torch.device(device, dist.get_rank()) if device == "cuda" else torch.device("cpu")
    digest = ""
    if is_random(source):
        config = random_config(source, _embedded_vocabulary())
        made_on = str(place) if is_published(source) else "cpu"
        check_memory(source, config, getattr(torch, dtype), "cpu" if made_on == "cpu" else device)
        whole = random_model(config, getattr(torch, dtype), made_on)
        digest = _bits(whole)
        _model = cut(whole)
        del whole
        _give_back()
    else:
        _model = load(source, place, dtype=getattr(torch, dtype))
    if _model.device.type != device:
        raise ValueError(f"transformers left the model on {_model.device.type}")
    vocabulary = int(_model.config.get_text_config().vocab_size)
    return Opened(sum(_local(p).numel() for p in _model.parameters()), vocabulary, digest)


def _embedded_vocabulary() -> int:
    """Token ids of the embedded model's tokenizer, which random models of no published shape have."""
    from nondet.sampling.model import embedded_folder, read_tokenizer

    return int(max(read_tokenizer(str(embedded_folder()), embedded_folder(), {}).get_vocab().values()) + 1)


def _bits(model: Any) -> str:
    """A digest of all weights: the sum of each parameter's bits, as integers."""
    import torch

    sums = []
    for _, parameter in sorted(model.named_parameters()):
        view = parameter.detach().view(torch.int32 if parameter.element_size() == 4 else torch.int16)
        sums.append(int(view.sum(dtype=torch.int64)))
    return hashlib.sha256(repr(sums).encode()).hexdigest()[:16]


def _local(parameter: Any) -> Any:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def stand(requests: Sequence[Request], load: Load, impls: Sequence[str]) -> None:
    """Set an engine up for each implementation; those that stood before are ended."""
    global _stack
    from nondet.sampling.ranks import failures_told

    leave()
    _stack = ExitStack()
    _stack.enter_context(failures_told())
    for impl in impls:
        _engines[impl] = _stack.enter_context(StandingEngine(_model, requests, load))


def wave(impl: str) -> RankTurn:
    """One wave of the implementation's engine, the implementation in place."""
    import torch

    from nondet.core.launch import listen
    from nondet.sampling.implementations import implementation

    engine = _engines[impl]
    try:
        with torch.no_grad(), implementation(impl, _model) as coverage, listen() as launched:
            once = engine.wave()
            ran = coverage() + Counter(launched)
    except UserError as error:  # what all ranks refuse alike; of anything else the group's parent is told at once
        return RankTurn(None, refusal=(error.what, error.hint))
    return RankTurn(once, ran, engine.attention)


def leave() -> None:
    """End the engines."""
    global _stack
    stack, _stack = _stack, None
    _engines.clear()
    if stack is not None:
        stack.close()


def let_go() -> None:
    """End the engines and hold no model any more."""
    global _model
    leave()
    if _model is not None:
        _model = None
        _give_back()


def _give_back() -> None:
    """Memory that nothing needs, to the device: a model is held by cycles, and the next one may need its room."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def merged(turns: Sequence[RankTurn]) -> tuple[Wave, Counter[str], str]:
    """What all ranks say of one wave, as one wave: the slowest one's seconds, everything else the first one's.

    Raises:
        UserError: an engine refused, or the ranks met other batches or came to other answers.
    """
    refusal = next((turn.refusal for turn in turns if turn.refusal is not None), None)
    if refusal is not None:
        raise UserError(*refusal)
    waves = [turn.wave for turn in turns if turn.wave is not None]
    if len({w.packs for w in waves}) > 1:
        raise UserError(f"{len(waves)} ranks met different batches in one wave")
    answers = len({w.digests for w in waves})
    if answers > 1:
        raise UserError(f"{len(waves)} ranks came to {answers} different answers in one wave")
    slowest = replace(
        waves[0],
        seconds=max(w.seconds for w in waves),
        captured=max(w.captured for w in waves),
        first_use_seconds=max(w.first_use_seconds for w in waves),
    )
    return slowest, turns[0].ran, turns[0].attention
