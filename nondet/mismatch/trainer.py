"""A trainer's full forward over prompt and completion: its layout, its formats, and faults that tests plant."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from nondet.errors import UserError, each_once, suggestion
from nondet.mismatch.figures import Logprobs
from nondet.mismatch.rollouts import Rollout
from nondet.sampling.logprobs import token_logprobs

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
_FP8_MOST, _BLOCK = 448.0, 128  # of float8_e4m3fn; rows and columns that share a scale

T = TypeVar("T")
Formula = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _chosen(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return values.gather(-1, ids[:, None]).squeeze(-1).float()


# Name -> how a trainer may compute the logprobs of ids [N] from logits [N, V].
FORMULAS: dict[str, Formula] = {
    "log_softmax": lambda x, ids: _chosen(x.float().log_softmax(-1), ids),
    "logsumexp": lambda x, ids: _chosen(x.float(), ids) - x.float().logsumexp(-1),
    "softmax-log": lambda x, ids: _chosen(x.float().softmax(-1), ids).log(),
    "token_logprobs": lambda x, ids: token_logprobs(x, ids),
    "low-precision": lambda x, ids: _chosen(x.log_softmax(-1), ids),
}


def at_heat(formula: Formula, heat: float, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Logprobs at a temperature; at 1 the formula's own bits."""
    return formula(logits if heat == 1 else logits / heat, ids)


@dataclass(frozen=True)
class Spec:
    """A trainer, as `--trainer` describes it; "" means the model's own."""

    dtype: str = ""  # of its weights
    autocast: str = ""  # the dtype that products run in
    padding: str = "right"  # or "left", or "packed": all rollouts of a micro-batch in one row
    micro: int = 0  # rollouts of one forward; 0: all
    formula: str = "log_softmax"  # a key of `FORMULAS`
    head: str = ""  # "float32" where logits are computed from the last hidden state in float32


_CHOICES: dict[str, Sequence[str]] = {
    "dtype": [*DTYPES],
    "autocast": ["bfloat16", "float16"],
    "padding": ["right", "left", "packed"],
    "micro": [],
    "formula": [*FORMULAS],
    "head": ["float32"],
}


def parse_spec(text: str) -> Spec:
    """Read "dtype=float32,autocast=bfloat16,padding=left,micro=4". Raises UserError: a key or a value is unknown."""
    given: dict[str, Any] = {}
    pairs = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    each_once("--trainer", (key for key, _, _ in pairs))
    for key, _, value in pairs:
        if key not in _CHOICES:
            raise UserError(f"--trainer: unknown key {key!r}", suggestion(key, _CHOICES))
        number = key == "micro" and value.isdecimal() and int(value) <= 2**20
        if not number and value not in _CHOICES[key]:
            hint = "Give a number of rollouts, 0 for all." if key == "micro" else suggestion(value, _CHOICES[key])
            raise UserError(f"--trainer: {key}={value!r} is unknown", hint)
        given[key] = int(value) if number else value
    return Spec(**given)


@dataclass(frozen=True)
class Fault:
    """What one side may have done differently: a hypothesis, or in tests a planted fault."""

    positions: str = ""  # "gap": completions one later; "restart": from 0; "double": 0, 2, ...; "shift": from 1
    mask: bool = True  # False where padding on the left is attended to and counted as positions
    front: int = 0  # tokens of the prompt that are dropped at its beginning; -1: its first token is there twice
    back: int = 0  # and at its end


NO_FAULT = Fault()


def _text(rollout: Rollout, fault: Fault) -> tuple[list[int], list[int]] | None:
    """The ids, and the positions of the sampled ones; None where the prompt is too short to drop from."""
    ids, start, front = list(rollout.ids), rollout.drawn[0], max(fault.front, 0)
    if front + fault.back >= start:
        return None
    text = [*ids[: max(0, -fault.front)], *ids[front : start - fault.back], *ids[start:]]
    return text, [i + len(text) - len(ids) for i in rollout.drawn]


Keep = Callable[[torch.Tensor, torch.Tensor], None]


def widths(rollouts: Sequence[Rollout], micro: int) -> list[int]:
    """The padded length of each rollout in its micro-batch."""
    return [max(len(r.ids) for r in part) for part in micro_batches(rollouts, micro) for _ in part]


def micro_batches(of: Sequence[T], micro: int) -> Iterator[Sequence[T]]:
    """Consecutive parts of so many; 0: one part."""
    size = micro or len(of)
    for first in range(0, len(of), size):
        yield of[first : first + size]


def score(
    model: Any, rollouts: Sequence[Rollout], spec: Spec, fault: Fault = NO_FAULT, *, gradients: bool = False,
    keep: Keep | None = None, padded: Sequence[int] = (), formulas: Sequence[Formula] = (),
) -> Logprobs:  # fmt: skip
    """The logprobs of all sampled tokens, [n] float32, rollout by rollout. NaN for a prompt too short for the fault.
    With `gradients` the forward is one of training, with a graph, the model in train(). `keep` is called with (logits
    [k, V], ids [k]) of the rows that predict sampled tokens, in order. `padded`: lengths that rollouts are padded to
    where they are part of a batch; else by `spec.micro`. `formulas`, one for each rollout, replace `spec.formula`."""
    each, found = iter(formulas or [FORMULAS[spec.formula]] * len(rollouts)), []
    lengths = micro_batches(padded or widths(rollouts, spec.micro), spec.micro)
    model.train(gradients)
    device = next(model.parameters()).device.type
    cast = torch.autocast(device, DTYPES[spec.autocast]) if spec.autocast else nullcontext()
    with torch.set_grad_enabled(gradients), cast:
        for part, wide in zip(micro_batches(rollouts, spec.micro), lengths, strict=True):
            rows, tokens, counts = predicting_rows(model, part, spec, wide, fault)
            for rollout, logits, ids in zip(part, rows.split(counts), tokens.split(counts), strict=True):
                if len(ids) and keep is not None:
                    keep(logits.detach(), ids)
                nothing = np.full(len(rollout.drawn), np.nan, dtype=np.float32)
                formula = next(each)
                found.append(formula(logits, ids).detach().float().cpu().numpy() if len(ids) else nothing)
    return np.concatenate(found)


def layout(lengths: Sequence[int], padding: str, padded: Sequence[int] = ()) -> tuple[list[int], int]:
    """The column at which each of a forward's texts begins, and the width of its rows."""
    if padding == "packed":
        return [sum(lengths[:i]) for i in range(len(lengths))], sum(lengths)
    width = max(*padded, *lengths, 0)
    return [width - n if padding == "left" else 0 for n in lengths], width


def predicting_rows(
    model: Any, part: Sequence[Rollout], spec: Spec, lengths: Sequence[int], fault: Fault = NO_FAULT
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """(logits [n, V] of the rows that predict sampled tokens, these tokens [n], how many of each rollout: 0 where its
    prompt is too short for the fault), by one forward over these rollouts, padded to `lengths`."""
    texts = [_text(r, fault) for r in part]
    known = [t for t in texts if t is not None]
    if not known:
        return torch.empty((0, 1)), torch.empty(0), [0] * len(part)
    starts, width = layout([len(text) for text, _ in known], spec.padding, lengths)
    packed = spec.padding == "packed"
    ids = torch.zeros((1 if packed else len(known), width), dtype=torch.long)
    mask, positions, rows, tokens = torch.zeros_like(ids), torch.zeros_like(ids), list[int](), list[int]()
    for i, ((text, drawn), start) in enumerate(zip(known, starts, strict=True)):
        row, columns = 0 if packed else i, slice(start, start + len(text))
        ids[row, columns], mask[row, columns] = torch.tensor(text), 1
        position = torch.arange(len(text))
        after = (position >= drawn[0]).long()
        faults: dict[str, Any] = {"gap": after, "restart": -drawn[0] * after, "double": position, "shift": 1}
        positions[row, columns] = position + faults.get(fault.positions, 0)
        rows += [row * width + start + i - 1 for i in drawn]
        tokens += [text[i] for i in drawn]
    if not fault.mask:
        mask, positions = torch.ones_like(mask), torch.arange(width)[None].expand_as(ids)
    inputs = {"input_ids": ids, "position_ids": positions} | ({} if packed else {"attention_mask": mask})
    device = next(model.parameters()).device
    logits = _forward(model, {name: x.to(device) for name, x in inputs.items()}, spec.head)
    # index_select, because its gradient is added in the order of the rows
    logits = logits.flatten(0, 1).index_select(0, torch.tensor(rows, device=device))
    return logits, torch.tensor(tokens, device=device), [0 if text is None else len(text[1]) for text in texts]


def _forward(model: Any, inputs: dict[str, torch.Tensor], head: str) -> torch.Tensor:
    def single(layer: Any, args: tuple[torch.Tensor, ...], _: torch.Tensor) -> torch.Tensor:
        bias = getattr(layer, "bias", None)
        with torch.autocast(args[0].device.type, enabled=False):
            given = args[0].float(), layer.weight.float(), bias if bias is None else bias.float()
            return torch.nn.functional.linear(*given)

    # its bias, and what the model does to its logits (a soft cap, a scale), are kept
    with model.get_output_embeddings().register_forward_hook(single) if head else nullcontext():
        logits: torch.Tensor = model(**inputs, use_cache=False).logits
    return logits


@contextmanager
def weights_changed(model: Any, change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> Iterator[None]:
    """The model with other weights, by name and value (None: unchanged); its own are put back at the end."""
    own = {}
    try:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if (other := change(name, parameter)) is not None:
                    own[parameter] = parameter.detach().clone()
                    parameter.copy_(other)
        yield
    finally:
        with torch.no_grad():
            for parameter, value in own.items():
                parameter.copy_(value)


def rounded_to_fp8(_name: str, weight: torch.Tensor, scale: str) -> torch.Tensor | None:
    """A matrix in float8_e4m3fn with a scale per "row", "tensor" or "block" of 128 x 128; None for other tensors."""
    if weight.dim() != 2:
        return None
    exact = weight.detach().float()
    if scale == "block":
        most = torch.nn.functional.max_pool2d(exact.abs()[None], _BLOCK, ceil_mode=True)[0]
        most = most.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)[: exact.shape[0], : exact.shape[1]]
    else:
        most = exact.abs().amax(1, keepdim=True) if scale == "row" else exact.abs().amax()
    factor = most.clamp_min(1e-12) / _FP8_MOST
    return (exact / factor).to(torch.float8_e4m3fn).float() * factor
