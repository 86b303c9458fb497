"""The continuous-batching engine over several ranks: outside as an engine of `nondet sample`, and in each rank."""

from __future__ import annotations

import hashlib
import importlib.util
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nondet.core.launch import note
from nondet.errors import UnknownNameError, UserError
from nondet.ranks.group import RankError, RankGroup, check_ranks, fail_now, limit_or
from nondet.sampling.engine import TransformersEngine
from nondet.sampling.plan import PLAIN, Load, Outcome, Request, Session, Setting, Watcher

if TYPE_CHECKING:
    from nondet.sampling.model import LoadedModel


# A transformers model on several ranks: loaded by its own tensor-parallel plan, decoded greedily beside others.
#
# What comes out is the trace of the request under study: its tokens and the bits of its logits at every step. A trace
# that changes with the number of other requests depends on the batch; one that changes with the ranks, on their
# number.

WAYS = ("stock", "invariant", "rank-free")


class Trace(NamedTuple):
    """One completion.

    Attributes:
        batch: Requests in the batch, this one among them.
        tokens: Digest of its tokens.
        logits: Digest of its logits' bits over all steps.
        seconds: Of the whole batch.
    """

    way: str
    batch: int
    tokens: str
    logits: str
    seconds: float


def write_model(folder: str, layers: int, hidden: int, seed: int = 0, dtype: str = "bfloat16") -> str:
    """A random Qwen3 of `layers` layers in `folder`; its weights follow from the seed."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads = max(8, hidden // 128)
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(4, heads // 4),
        head_dim=128 if hidden >= 1024 else 32,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def load(
    folder: str, device: torch.device, *, dtype: torch.dtype | str = "auto", trust_remote_code: bool = False
) -> Any:
    """The model on this rank: cut by its plan over all ranks, or whole where there is one."""
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    world = dist.get_world_size() if dist.is_initialized() else 1
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code, "use_safetensors": True}
    if world == 1:
        return AutoModelForCausalLM.from_pretrained(folder, **options).to(device).eval()
    from transformers.distributed import DistributedConfig

    # its bar comes with a lock of several processes, which a rank that is ended would leave behind
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    spread = DistributedConfig(tp_plan="auto", tp_size=world)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=spread, **options).eval()


class _Slices:
    """A tensor as a file of safetensors gives it: what is taken from it is a contiguous copy of that part alone."""

    def __init__(self, whole: torch.Tensor) -> None:
        self._whole = whole

    def get_shape(self) -> list[int]:
        return list(self._whole.shape)

    def get_dtype(self) -> str:
        return {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[self._whole.dtype]

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._whole[index].clone(memory_format=torch.contiguous_format)


def cut(whole: Any) -> Any:
    """This rank's share of a model that every rank holds whole, by its own plan; nothing goes by way of a disk.

    A share is a copy, so that the whole one's memory is free again once the caller lets go of it.

    Args:
        whole: A causal LM of transformers with the same weights on every rank.
    """
    import torch.distributed as dist
    from transformers.distributed import DistributedConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    tensors = {name: _Slices(parameter.detach()) for name, parameter in whole.named_parameters()}  # a tied one once
    spread = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
    return (
        type(whole)
        .from_pretrained(None, config=whole.config, state_dict=tensors, dtype=whole.dtype, distributed_config=spread)
        .eval()
    )


def traces(
    folder: str, device: str, ways: tuple[str, ...], batches: tuple[int, ...], steps: int, seed: int = 0
) -> tuple[list[Trace], dict[str, list[str]]]:
    """In a rank, or alone: the trace of one prompt in batches of several sizes; and the coverage of each way."""
    import torch.distributed as dist

    import nondet
    from nondet.kernels.dispatch.rank_free import rank_free

    rank = dist.get_rank() if dist.is_initialized() else 0
    place = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    model = load(str(Path(folder)), place)
    drawn = torch.Generator().manual_seed(seed)
    prompts = torch.randint(0, model.config.vocab_size, (max(batches), 24), generator=drawn).to(place)
    found: list[Trace] = []
    coverage: dict[str, list[str]] = {}
    for way in ways:
        with ExitStack() as stack, torch.no_grad():
            block = stack.enter_context(nondet.batch_invariant()) if way != "stock" else None
            if way == "rank-free":
                stack.enter_context(rank_free(model))
            _decode(model, prompts[:1], 2)  # first uses prove members
            for batch in batches:
                found.append(_trace(way, model, prompts[:batch], steps))
            coverage[way] = block.coverage().lines() if block is not None else []
    return found, coverage


def _trace(way: str, model: Any, prompts: torch.Tensor, steps: int) -> Trace:
    started = time.perf_counter()
    tokens, logits = _decode(model, prompts, steps)
    bits = hashlib.sha256()
    for step in logits:
        bits.update(step.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    seconds = time.perf_counter() - started
    chosen = hashlib.sha256(repr(tokens).encode()).hexdigest()[:16]
    return Trace(way, len(prompts), chosen, bits.hexdigest()[:16], seconds)


def _decode(model: Any, prompts: torch.Tensor, steps: int) -> tuple[list[int], list[torch.Tensor]]:
    """Greedy: tokens and logits [V] of the first request, step by step."""
    cache, ids = None, prompts
    tokens, rows = [], []
    for _ in range(steps):
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, logits = out.past_key_values, out.logits[:, -1]
        ids = logits.argmax(-1, keepdim=True)
        rows.append(logits[0].clone())
        tokens.append(ids[0, 0])
    return [int(t) for t in torch.stack(tokens)], rows


# In a rank: the continuous-batching engine over a model that is cut by its own tensor-parallel plan.
#
# Every rank runs the same requests in the same order, and the collectives keep them in step. What comes back is rank
# 0's session and every rank's digest of it, so that ranks that came to different answers are seen.

# implementation -> what stands under the model in a rank; see `_enter`
RANK_WAYS = ("stock", "stock-no-cudnn", "stock-flash", "invariant", "rank-free")

_model: Any = None


@dataclass(frozen=True)
class Played:
    """What one rank has to say of a session.

    Attributes:
        digest: SHA-256 (first 16 hex digits) over ids, logprob bits and schedules of all requests.
        session: Rank 0's; None of the others.
        coverage: What the dispatcher says, as `Coverage.counts`; empty for stock.
        ran: What launchers noted, with counts.
        refusal: What the engine refuses, and what to try; empty where it does not.
    """

    digest: str = ""
    session: Session | None = None
    coverage: Counter[str] = field(default_factory=Counter)
    ran: Counter[str] = field(default_factory=Counter)
    refusal: tuple[str, str] | None = None


def open_model(folder: str, dtype: str, device: str, threads: int, trust_remote_code: bool = False) -> int:
    """Load this rank's share; returns how many parameters that is.

    Args:
        threads: Of this rank on a CPU. The caller's own number: bits follow it, so that ranks can only be held against
            one process at the same.

    Raises:
        ValueError: heads or widths that the ranks don't divide, as transformers says it.
    """
    global _model
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    rank = dist.get_rank()
    place = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    _model = load(folder, place, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code)
    return sum(_local(p).numel() for p in _model.parameters())


def _local(parameter: Any) -> Any:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def play(
    impl: str,
    requests: Sequence[Request],
    load: Load,
    seed: int,
    eos: Sequence[int],
    forced: Mapping[str, Sequence[int]] | None = None,
    setting: Setting = PLAIN,
) -> Played:
    """One session of the engine on this rank, under `impl`."""
    import torch
    import torch.distributed as dist

    from nondet.core.launch import listen
    from nondet.sampling.engine import run_session

    with ExitStack() as stack:
        block = _enter(impl, stack)
        ran = stack.enter_context(listen())
        stack.enter_context(torch.no_grad())
        stack.enter_context(failures_told())
        try:
            session = run_session(_model, requests, load, seed=seed, eos=eos, forced=forced, setting=setting)
        except UserError as error:
            return Played(refusal=(error.what, error.hint))
        coverage = Counter(block.coverage().counts()) if block is not None else Counter[str]()
    return Played(
        digest=_digest(session),
        session=session if dist.get_rank() == 0 else None,
        coverage=coverage,
        ran=Counter(ran),
    )


@contextmanager
def failures_told() -> Iterator[None]:
    """Tell of what ends the engine's thread before the engine looks for the other ranks.

    It waits for them to end their step first, and a step that waits for this rank never ends.
    """
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager as Manager

    handle = Manager._handle_critical_error

    def told(self: Any, error: Exception, processor: Any) -> None:
        if not isinstance(error, MemoryError):  # of all ranks alike: it has an answer of its own
            fail_now(error)
        handle(self, error, processor)

    Manager._handle_critical_error = told
    try:
        yield
    finally:
        Manager._handle_critical_error = handle


def _enter(impl: str, stack: ExitStack) -> Any:
    if impl.startswith("stock"):
        from nondet.sampling.implementations import implementation

        stack.enter_context(implementation(impl))
        return None
    from nondet.kernels.dispatch.block import batch_invariant
    from nondet.kernels.dispatch.rank_free import rank_free

    block = stack.enter_context(batch_invariant())
    if impl == "rank-free":
        stack.enter_context(rank_free(_model))
    return block


def _digest(session: Session) -> str:
    sha = hashlib.sha256()
    for outcome in session.outcomes:
        sha.update(repr((outcome.request.id, outcome.token_ids, outcome.finish, outcome.schedule)).encode())
        sha.update(outcome.logprobs)
    return sha.hexdigest()[:16]


# The continuous-batching engine over several ranks, as an engine of `nondet sample`.
#
# The caller is no rank: it hands the plan to a group of its own (see `nondet.ranks.group`), in which each rank runs
# transformers' engine over its share of the model. One request's bits can then follow the batch in one more way (the
# order of a sum over ranks goes by the message's size) and the number of ranks in another (another cut of K).

_SESSION = "nondet.sampling.ranks"
LOAD_LIMIT_S, SESSION_LIMIT_S = 600.0, 1800.0


class RanksEngine:
    """A group of ranks that holds one model. Close it, or use it in a `with` statement.

    Args:
        loaded: The model as the caller loaded it: its tokenizer, its identity and its weights are what the ranks get.
        world: Ranks; 1 too, for a comparison by one means.

    Attributes:
        shares: Parameters that each rank holds.

    Raises:
        UserError: ranks that can't be had, or a model that can't be cut over them.
    """

    def __init__(self, loaded: LoadedModel, world: int, *, trust_remote_code: bool = False) -> None:
        import torch

        check_loader()
        if world != 1:
            check_ranks([world], loaded.device, torch.cuda.device_count())
        check_heads(loaded.name, loaded.model.config, world)
        self.world, self.impl = world, "stock"
        self._model = loaded.model
        self._coverage: Counter[str] = Counter()
        self._group: RankGroup | None = None
        with _folder(loaded) as folder:
            try:
                self._group = RankGroup(world, loaded.device, limit_s=limit_or(SESSION_LIMIT_S))
                self.shares: list[int] = self._group.ask(
                    f"{_SESSION}:open_model",
                    str(folder),
                    loaded.dtype,
                    loaded.device,
                    torch.get_num_threads(),
                    trust_remote_code,
                    limit_s=limit_or(LOAD_LIMIT_S),
                )
            except RankError as error:
                self.close()
                raise UserError(
                    f"{loaded.name} could not be put on {world} ranks: {error}",
                    "Use fewer --ranks, or a model with a tensor-parallel plan.",
                ) from error
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> RanksEngine:
        return self

    def __exit__(self, *rest: object) -> None:
        self.close()

    def close(self) -> None:
        """End the ranks."""
        if self._group is not None:
            self._group.close()
            self._group = None

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank; empty once they have ended."""
        return self._group.pids if self._group is not None else []

    def describe(self) -> dict[str, Any]:
        """What is fixed beside the load."""
        return TransformersEngine(self._model).describe() | {"ranks": self.world, "sampling": "greedy"}

    @contextmanager
    def implementation(self, name: str) -> Iterator[Callable[[], Counter[str]]]:
        """Put the implementation under the model in every rank, for the sessions inside the `with` block.

        Yields:
            What rank 0's dispatcher has said so far, over all sessions of the block.

        Raises:
            UnknownNameError: no such implementation of several ranks.
        """
        if name not in RANK_WAYS:
            raise UnknownNameError("implementation under --ranks", name, RANK_WAYS)
        before, self.impl, self._coverage = self.impl, name, Counter()
        try:
            yield lambda: Counter(self._coverage)
        finally:
            self.impl = before

    def run(
        self,
        requests: Sequence[Request],
        load: Load,
        *,
        seed: int = 0,
        eos: Sequence[int] = (),
        on_token_count: Callable[[Request, int], None] | None = None,
        forced: Mapping[str, Sequence[int]] | None = None,
        watcher: Watcher | None = None,
        until: str | None = None,
        setting: Setting = PLAIN,
    ) -> Session:
        """See `nondet.sampling.engine.run_session`. Finished requests are told at the session's end.

        Raises:
            UserError: the engine refuses, or a session that ranks can't run (watched, or cut short).
        """
        if watcher is not None or until is not None:
            raise UserError("a session over ranks can't be watched or cut short", "Trace the model on one rank.")
        if self._group is None:
            raise UserError("the ranks have ended", "Start again with --resume.")
        try:
            parts: list[Played] = self._group.ask(
                f"{_SESSION}:play", self.impl, list(requests), load, seed, list(eos), forced, setting
            )
        except RankError as error:
            self.close()
            return Session(outcomes=_lost(requests, str(error)), steps=0, tokens=0, seconds=0.0, fatal=str(error))
        refusal = next((p.refusal for p in parts if p.refusal is not None), None)
        if refusal is not None:
            raise UserError(*refusal)
        session = parts[0].session
        assert session is not None  # noqa: S101 - rank 0 gives one wherever it refuses nothing
        self._coverage += parts[0].coverage
        for name, times in parts[0].ran.items():
            note(name, times)
        if len({p.digest for p in parts}) > 1:
            fatal = f"{self.world} ranks came to {len({p.digest for p in parts})} different answers in one session"
            return Session(outcomes=_lost(requests, fatal), steps=session.steps, tokens=0, seconds=0.0, fatal=fatal)
        if on_token_count is not None:
            for outcome in session.outcomes:
                on_token_count(outcome.request, len(outcome.token_ids))
        return session


def _lost(requests: Sequence[Request], reason: str) -> list[Outcome]:
    return [
        Outcome(
            request=request,
            token_ids=[],
            logprobs=b"",
            margins=b"",
            runner_up=[],
            finish="error",
            schedule=[],
            batch_min=0,
            batch_max=0,
            reason=reason,
        )
        for request in requests
    ]


def check_loader() -> None:
    """Refuse where the package is missing by which transformers loads a model in shares.

    Raises:
        UserError: as said.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise UserError("a model over ranks needs the package accelerate", "pip install accelerate")


def check_heads(name: str, config: Any, world: int) -> None:
    """Refuse what transformers would cut in the middle of a head.

    Raises:
        UserError: the ranks don't divide the heads.
    """
    text = config.get_text_config()
    for key, what in (("num_key_value_heads", "key heads"), ("num_attention_heads", "heads")):
        heads = getattr(text, key, None)
        if isinstance(heads, int) and heads % world:
            raise UserError(f"{world} ranks: {name} has {heads} {what}", "Give a number of ranks that divides them.")


@contextmanager
def _folder(loaded: LoadedModel) -> Iterator[Path]:
    """Where the ranks load from: the model's own folder, else its weights as the caller holds them, for a while."""
    from nondet.sampling.model import EMBEDDED, embedded_folder, quiet

    if loaded.name == EMBEDDED:
        yield embedded_folder()
        return
    local = Path(loaded.name)
    if local.is_dir():
        yield local.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="nondet-ranks-") as folder:
        with quiet():
            loaded.model.save_pretrained(folder)
        yield Path(folder)
