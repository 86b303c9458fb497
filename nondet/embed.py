"""Encoders: whether a text's vector depends on its batch, and what that does to its neighbours."""

from __future__ import annotations

import hashlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace

from nondet.core.compare import difference, same
from nondet.core.launch import check_device_alive
from nondet.core.measure import Trial, failed, kept_warnings, measure, reason_of
from nondet.core.records import Axis, EmbedPass, Judged, Neighbours, Row
from nondet.core.runfile import RunWriter
from nondet.errors import UserError
from nondet.probes.rounding import FINER, apart, judged, rounding_of
from nondet.sampling.implementations import implementation
from nondet.sampling.model import (
    LoadedModel,
    check_dtype,
    check_vocabulary,
    identity_of,
    local_folder,
    offline,
    quiet,
    read_config,
    read_tokenizer,
    read_weights,
    weight_names,
)

ALONE = "alone"
_PADDED = f"{ALONE}, padded"


@dataclass(frozen=True)
class Arm:
    """One way to batch all texts for the encoder."""

    name: str
    batches: tuple[tuple[int, ...], ...]  # indices of texts, batch by batch; each text once
    width: int = 0  # padded to this many tokens; 0: to the longest text of the batch
    packed: bool = False  # the texts of a batch are in one row, and see only their own tokens


def build_arms(lengths: Sequence[int], batch: int, seed: int) -> list[Arm]:
    """The arms for texts of these lengths, `batch` at a time; the first one is what the others are compared with."""
    everyone = range(len(lengths))
    ordered, shuffled = sorted(everyone, key=lambda i: (lengths[i], i)), list(everyone)
    random.Random(f"nondet embed {seed}").shuffle(shuffled)  # noqa: S311 - an order, not a secret
    odd = max(2, batch // 2 - 1)  # a multiple of no tile
    return [
        Arm(ALONE, _cut(everyone, 1)),
        Arm(f"alone, padded to {max(lengths)}", _cut(everyone, 1), width=max(lengths)),
        Arm(f"sorted by length, {batch} a batch", _cut(ordered, batch)),
        Arm(f"shuffled, {batch} a batch", _cut(shuffled, batch)),
        Arm(f"shuffled otherwise, {odd} a batch", _cut(shuffled[::-1], odd)),
        Arm(f"packed, {batch} in a row", _cut(shuffled, batch), packed=True),
    ]


def _cut(order: Sequence[int], size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(order[start : start + size]) for start in range(0, len(order), size))


def encode(loaded: LoadedModel, texts: Sequence[str]) -> tuple[list[list[int]], int]:
    """(token ids of each text, how many texts were cut at the context); a `UserError` for a text without a token."""
    rows = [loaded.encode(text) for text in texts]
    if [] in rows:
        raise UserError(f"text {rows.index([]) + 1} has no tokens", "Take it out, or give it some text.")
    long = [i for i, ids in enumerate(rows) if len(ids) > (loaded.context or 0)]
    for i in long:
        rows[i] = loaded.tokenizer.encode(texts[i], truncation=True, max_length=loaded.context)
    return rows, len(long)


def load_encoder(where: str, dtype: str, device: str) -> LoadedModel:
    """Load an encoder, a model of transformers that reads whole texts, from a local folder or by its hub name. Raises
    UserError: it doesn't exist, is not an encoder, or can't be loaded here."""
    from transformers import AutoModel

    torch_dtype = check_dtype(dtype, device)
    local = local_folder(where)
    options: dict[str, Any] = {} if local is not None else {"local_files_only": offline(where)}
    with quiet():
        config = read_config(where, local, options)
        _check_encoder(where, config)
        names = weight_names(where, local, config, options)
        tokenizer = read_tokenizer(where, local, options)
        tokenizer.model_max_length, limit = 10**9, tokenizer.model_max_length
        options["dtype"] = torch_dtype
        model = read_weights(AutoModel, where, local, config, options, extra="pooler")  # no vector of ours needs one
    check_vocabulary(where, model, tokenizer)
    attention = getattr(model.config, "_attn_implementation", None)
    identity = {"name": where, **identity_of(model, where, local, names, dtype), "attention": attention}
    return LoadedModel(
        where, model.to(device).eval(), tokenizer, device, dtype, _context(config, limit), eos=(), identity=identity
    )


def _check_encoder(where: str, config: Any) -> None:
    """Refuse, as a `UserError`, a model that reads from left to right, or has a decoder."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as ENCODERS

    both = getattr(config, "is_encoder_decoder", False)
    if both or config.model_type not in ENCODERS or getattr(config, "is_decoder", False):
        what = ", ".join(getattr(config, "architectures", None) or []) or config.model_type
        kind = "an encoder with a decoder" if both else "no encoder that transformers knows"
        hint = "Give one such as all-MiniLM-L6-v2; for models that generate text use nondet sample."
        raise UserError(f"{where} is a {what}, {kind}", hint)


def _context(config: Any, limit: Any) -> int:
    """Most tokens of a text: the smaller limit of tokenizer and model."""
    positions = getattr(config, "max_position_embeddings", None)
    limits = [x for x in (limit, positions) if isinstance(x, int) and 0 < x < 10**6]
    if positions and getattr(config, "model_type", "") in ("roberta", "xlm-roberta", "camembert", "mpnet"):
        limits.append(positions - 2)  # these count positions from the padding's id on
    return min(limits, default=512)


POOLINGS = ("mean", "cls")
_ROWS = 1024  # of the matrix of similarities at a time


def vectors(loaded: LoadedModel, ids: Sequence[Sequence[int]], arm: Arm) -> torch.Tensor:
    """[texts of the arm, poolings, hidden] in the model's dtype, in the order of the texts, whatever the batches. The
    mean runs over a text's own tokens, sum over the mask and then divided, as sentence encoders do; cls is the first
    token's."""
    order = torch.tensor([i for members in arm.batches for i in members])
    with torch.inference_mode():
        pooled = [
            _packed(loaded, ids, members) if arm.packed else _padded(loaded, ids, members, arm.width)
            for members in arm.batches
        ]
        return torch.cat(pooled)[order.argsort().to(loaded.device)]


def _padded(loaded: LoadedModel, ids: Sequence[Sequence[int]], members: Sequence[int], width: int) -> torch.Tensor:
    width = max(width, *(len(ids[i]) for i in members))
    padding = getattr(loaded.tokenizer, "pad_token_id", None)
    tokens = torch.full((len(members), width), padding if isinstance(padding, int) else 0, dtype=torch.long)
    mask = torch.zeros((len(members), width), dtype=torch.long)
    for row, i in enumerate(members):
        tokens[row, : len(ids[i])] = torch.tensor(ids[i])
        mask[row, : len(ids[i])] = 1
    tokens, mask = tokens.to(loaded.device), mask.to(loaded.device)
    hidden = loaded.model(input_ids=tokens, attention_mask=mask).last_hidden_state
    return _pooled(hidden, mask[..., None].to(hidden.dtype))


def _pooled(hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[n, poolings, D] of texts [n, T, D] and weights [n, T, 1]."""
    return torch.stack([(hidden * weights).sum(1) / weights.sum(1), hidden[:, 0]], 1)


def _packed(loaded: LoadedModel, ids: Sequence[Sequence[int]], members: Sequence[int]) -> torch.Tensor:
    """A batch in one row: positions restart with each text, and a mask of blocks separates the texts."""
    lengths = [len(ids[i]) for i in members]
    owner = torch.repeat_interleave(torch.arange(len(members)), torch.tensor(lengths))
    mask = (owner[:, None] == owner[None, :])[None, None].to(loaded.device)
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(loaded.device)
    tokens = torch.tensor([[token for i in members for token in ids[i]]], device=loaded.device)
    hidden = loaded.model(input_ids=tokens, attention_mask=mask, position_ids=positions).last_hidden_state[0]
    return torch.cat([_pooled(text[None], text.new_ones((1, len(text), 1))) for text in hidden.split(lengths)])


def _unit(x: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / wide.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)


def cosine_distances(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """1 - cosine of each row of `a` [n, D] with the same row of `b`, in float64; rows of equal bits give 0."""
    return (_unit(a) - _unit(b)).square().sum(-1) / 2  # the same for unit vectors, and exact where they are close


def nearest(x: torch.Tensor, k: int) -> torch.Tensor:
    """[n, k] indices of the k nearest other rows of x [n, D] by cosine in float64, ties by index."""
    unit = _unit(x)
    out = []
    for start in range(0, len(x), _ROWS):
        block = unit[start : start + _ROWS] @ unit.T
        block[:, start : start + _ROWS].fill_diagonal_(-2.0)
        out.append(block.sort(dim=1, descending=True, stable=True).indices[:, :k])
    return torch.cat(out)


def rank_changes(a: torch.Tensor, b: torch.Tensor) -> dict[str, int]:
    """How many rows of two results of `nearest` changed: their nearest, the set of their k nearest, only its order."""
    sets = (a.sort(1).values != b.sort(1).values).any(1)
    changed = {"top1_changed": a[:, 0] != b[:, 0], "topk_changed": sets, "topk_reordered": (a != b).any(1) & ~sets}
    return {name: int(rows.sum()) for name, rows in changed.items()}


K = 10
# A packed text may differ from the single text by this many roundings of the dtype, and by at most a seventh of its
# length; further apart, the model has not separated the texts.
_ROUNDINGS, _APART_MOST = 1000, 0.14
_JUDGED = 256  # texts that are computed again, with noise and beside others
Progress = Callable[[str, str], None]


def describe(
    loaded: LoadedModel, texts: Sequence[str], ids: Sequence[Sequence[int]], cut: int, **options: Any
) -> dict[str, Any]:
    """The plan of an embed run, for its header."""
    lengths, digest = [len(row) for row in ids], hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
    plan = {"texts": len(texts), "texts_digest": digest, "tokens": sum(lengths), "longest": max(lengths), "cut": cut}
    return plan | {"model": loaded.identity, "device": loaded.device, "dtype": loaded.dtype} | options


def collect(
    loaded: LoadedModel,
    ids: Sequence[Sequence[int]],
    impls: Sequence[str],
    writer: RunWriter,
    *,
    batch: int,
    seed: int,
    progress: Progress | None = None,
) -> None:
    """Measure whatever the run file does not hold yet; `progress` is called with (implementation, arm) of each pass."""
    arms = build_arms([len(row) for row in ids], batch, seed)
    for impl in impls:
        shape = {"texts": len(ids), "poolings": len(POOLINGS), "hidden": int(loaded.identity["hidden"] or 0)}
        case: dict[str, Any] = {
            "case": f"{len(ids)} texts, each alone and in batches",
            "shape": shape,
            "inputs": "texts",
        }
        case |= {"dtype": loaded.dtype, "device": loaded.device, "varied": "batches", "axis": Axis.BATCH.value}
        head = Row(probe="embed", operator="encoder", **case, exact=False, impl=impl, status="")
        if head.key not in writer.done:
            _Implementation(loaded, ids, arms, impl, writer, progress).run(head)


@dataclass
class _Implementation:
    loaded: LoadedModel
    ids: Sequence[Sequence[int]]
    arms: Sequence[Arm]
    impl: str
    writer: RunWriter
    progress: Progress | None
    passes: dict[str, EmbedPass] = field(default_factory=dict)
    results: list[torch.Tensor] = field(default_factory=list)

    def run(self, head: Row) -> None:
        """Write the passes, what they did to neighbours, and last the row, which marks completion."""
        started = time.perf_counter()
        with kept_warnings() as caught, implementation(self.impl) as counts:
            try:
                arms = (arm for arm in self.arms if not arm.packed or self._can_pack(arm))
                trials = [Trial(arm.name, partial(self._compute, arm, counts)) for arm in arms]
                row = measure(head, trials, extra=self._keep, started=started)
                if row.differs and not row.replays_parted:
                    row = replace(row, judged=self._judged(row))
            except Exception as error:  # noqa: BLE001 - whatever a model raises becomes a row; the run goes on
                row = failed(head, error, started, caught)
                check_device_alive(self.loaded.device, error)
        for record in (*self.passes.values(), *self._neighbours(row)):
            if record.key not in self.writer.done:
                self.writer.write(record)
        self.writer.write(row)

    def _compute(self, arm: Arm, counts: Callable[[], Counter[str]]) -> torch.Tensor:
        """All texts in one arm; its pass is recorded the first time."""
        before, started = counts(), time.perf_counter()
        out = vectors(self.loaded, self.ids, arm)
        if self.loaded.device == "cuda":
            torch.cuda.synchronize()
        if arm.name not in self.passes:
            self._pass(arm, time.perf_counter() - started, counts() - before)
            if self.progress is not None:
                self.progress(self.impl, arm.name)
        return out

    def _pass(self, arm: Arm, seconds: float, ran: Counter[str], reason: str = "") -> None:
        widths = [max(arm.width, *(len(self.ids[i]) for i in members)) for members in arm.batches]
        tokens = sum(map(len, self.ids))
        padded = sum(width * len(members) for width, members in zip(widths, arm.batches, strict=True))
        counts = {"texts": len(self.ids), "batches": len(arm.batches), "tokens": tokens}
        counts["computed"] = tokens if arm.packed else padded
        made = EmbedPass(impl=self.impl, arm=arm.name, **counts, seconds=seconds, ran=dict(ran), reason=reason)
        self.passes[arm.name] = made

    def _can_pack(self, arm: Arm) -> bool:
        """Whether the model separates packed texts: else the arm computes something else, and is left out."""
        few = Arm(arm.name, (arm.batches[0],), packed=True)
        try:
            packed = vectors(self.loaded, self.ids, few)
            solo = vectors(self.loaded, self.ids, Arm(ALONE, _cut(arm.batches[0], 1)))
        except Exception as error:  # noqa: BLE001 - a model that takes no positions or masks says so in its own way
            reason = f"the model can't pack texts: {reason_of(error)[1]}"
        else:
            apart = float(cosine_distances(packed.flatten(0, 1), solo.flatten(0, 1)).max())
            relative = min(_APART_MOST, _ROUNDINGS * torch.finfo(packed.dtype).eps)
            if apart <= relative * relative / 2:
                return True
            reason = f"the model does not keep packed texts apart (1 - cosine {apart:.2g})"
        self._pass(arm, 0.0, Counter(), reason)
        return False

    def _judged(self, row: Row) -> Judged:
        """Whether vectors are apart by rounding, from a few batches. What is none stays as large in float64, where a
        short format hides it."""
        mixed = next(arm for arm in self.arms if arm.name.startswith("shuffled"))
        few = Arm(mixed.name, mixed.batches[: max(1, _JUDGED // len(mixed.batches[0]))])
        found = self._found(few, {str(v): self.results[label] for v, label in zip(row.values, row.labels, strict=True)})
        wide = self._in_float64(few) if found.kind != "bug" else None
        # a model that rounds to its own format whatever it is given shows nothing in float64
        finer = wide is not None and wide.bound and found.bound and FINER * wide.bound <= found.bound
        return wide if wide and finer and (wide.kind == "bug" or found.kind == "open") else found

    def _found(self, few: Arm, by_arm: Mapping[str, torch.Tensor]) -> Judged:
        """What vectors of each arm show, beside noise at the sums of these batches, and neighbours of other values."""
        solo, at = by_arm[ALONE], sorted(i for members in few.batches for i in members)
        bound = rounding_of(lambda ids: vectors(self.loaded, ids, few), self.ids, solo.dtype)
        half, leaked = {i for members in few.batches for i in members[::2]}, 0.0
        for mine in filter(None, (half, {*at} - half)):
            beside = [ids if i in mine else ids[::-1] for i, ids in enumerate(self.ids)]
            pair = [vectors(self.loaded, ids, few)[[i in mine for i in at]] for ids in (self.ids, beside)]
            leaked = max(leaked, apart(pair, [0, 1])["1"]["far"])
        far = {arm: apart([solo, result], [0, 1])["1"]["far"] for arm, result in by_arm.items()}
        padded = max(size for arm, size in far.items() if arm.startswith(_PADDED))
        look = "leak" if leaked else "padding" if padded > (bound or 0.0) else "number"
        return judged(leaked or max(far.values()), bound, solo.dtype, look)

    def _in_float64(self, few: Arm) -> Judged | None:
        """What these batches show with weights in float64; None where the model does not compute in it."""
        every = [*self.loaded.model.parameters(), *self.loaded.model.buffers()]
        held, at = [x.data for x in every], sorted(i for members in few.batches for i in members)
        arms = [Arm(ALONE, _cut(at, 1)), Arm(_PADDED, _cut(at, 1), width=max(len(self.ids[i]) for i in at)), few]
        try:
            for x in every:
                x.data = x.data.double() if x.is_floating_point() else x.data
            return self._found(few, {arm.name: vectors(self.loaded, self.ids, arm) for arm in arms})
        except Exception:  # noqa: BLE001 - a kernel that takes no float64 says so in its own way
            return None
        finally:
            for x, data in zip(every, held, strict=True):
                x.data = data

    def _keep(self, results: list[torch.Tensor], _: Any) -> dict[str, Any]:
        self.results = results  # the distinct ones: each arm's is the one of its class
        return {"poolings": list(POOLINGS)}

    def _neighbours(self, row: Row) -> Iterator[Neighbours]:
        texts, k = len(self.ids), min(K, len(self.ids) - 1)
        for at, pooling in enumerate(POOLINGS if row.labels else ()):
            solo = self.results[0][:, at]
            ranks = nearest(solo, k)
            by_class = [_figures(solo, result[:, at], ranks, k) for result in self.results]
            for value, label in zip(row.values, row.labels, strict=True):
                if value != ALONE:
                    figures = by_class[label]
                    yield Neighbours(impl=self.impl, arm=str(value), pooling=pooling, texts=texts, k=k, **figures)


def _figures(solo: torch.Tensor, other: torch.Tensor, ranks: torch.Tensor, k: int) -> dict[str, Any]:
    """The figures of `Neighbours` for one arm's vectors [n, D]."""
    differ = (~same(solo, other)).any(1)
    return {
        "parted": int(differ.sum()),
        "first": int(differ.to(torch.uint8).argmax()) if bool(differ.any()) else None,
        "max_ulp": difference(solo, other).max_ulp,
        "cosine_distance": float(cosine_distances(solo, other).max().nan_to_num(2.0)),
        **rank_changes(ranks, nearest(other, k)),
    }
