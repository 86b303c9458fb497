"""`fold`: gradients of weights whose bits follow neither the micro-batch size, nor padding, nor packing.

Order of reduction, class "fold": each weight's gradient is one chain over tokens in float32: sequences in the order of
the batch, each padded with zeros to a multiple of 16 tokens and anchored at its first token, in steps of 16; and the
chain starts from the gradient so far. So it is cut nowhere: whether eight sequences come in one micro-batch or one by
one, the same steps are added in the same order, and to keep the float32 sums between two steps changes nothing. A
padded place is no token, and a step of zeros adds none.

- A linear layer's weight: acc[n, k] += sum over the step's 16 tokens of grad[t, n] * x[t, k], by one library call of
  the same sizes and layout for every step on a CPU (so whatever order that takes within a step, it is the same one),
  by one kernel's chain on CUDA (`nondet.kernels.fold.cuda`).
- Norms' weights and biases: 16 tokens' rows by halves in float32, then step by step in float64: as near to the exact
  sum as torch's own, which adds all rows by halves.
- Embeddings: row after row, in the order of the tokens.

Every use of a weight has a chain of its own (tied embeddings have two), and these are added at the end in the order of
the model's modules: else micro-batches would interleave them in another order than one batch does.

What it rests on: the gradients of activations have to be batch-invariant, which is for `batch_invariant(training=True)`
to see to, and the loss has to be a sum over tokens with weights that were fixed beforehand.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from nondet.core.launch import note
from nondet.errors import UserError
from nondet.kernels.dispatch.state import count, current, guarded
from nondet.kernels.dispatch.transformers import form_of, installed_form

STEP = 16  # tokens: of wgmma's and mma.sync's k in 16-bit formats
_COVERED = "Take a model whose operators batch_invariant(training=True) covers, in all families."
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Arguments of a call that are read here, or move no token.
_KNOWN = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k"}
_KNOWN |= {"labels", "num_items_in_batch", "logits_to_keep"}


class Span(NamedTuple):
    """Where a sequence lies in a batch [B, T]."""

    row: int
    first: int  # column
    length: int


class Places(NamedTuple):
    """Of the tokens of a module's input, in the order of the fold."""

    rows: torch.Tensor  # index of each token among the flattened leading axes
    slots: torch.Tensor  # its place in the chain: sequence after sequence, each from a multiple of 16 on
    size: int  # places in all, a multiple of 16
    others: torch.Tensor  # index of what belongs to no sequence: padding
    taken: torch.Tensor | None  # int32 [size], whose token a place holds, -1: nobody's; None: they lie as they are


class Layout:
    """Where the sequences of one call of the model lie: `spans` of ids [B, T], in the order of the batch.

    Args:
        columns: Of each row, those that the output projection sees (`logits_to_keep`); None: all.
    """

    def __init__(self, shape: tuple[int, int], spans: Iterable[Span], columns: np.ndarray | None = None) -> None:
        self.shape = shape
        self.size = 0
        slot = np.full(shape, -1, np.int64)
        for row, first, length in spans:
            place = slot[row, first : first + length] if 0 <= row < shape[0] and first >= 0 else slot[:0]
            if len(place) != length or (place >= 0).any():
                where = f"the sequence at row {row}, column {first}, of {length} tokens"
                raise UserError(f"{where} lies outside of a batch of {shape}, or over another one")
            place[:] = np.arange(self.size, self.size + length)
            self.size += -(-length // STEP) * STEP
        self._slot = slot
        self._columns = columns
        self._places: dict[tuple[int, torch.device], Places] = {}
        self.strays: dict[str, torch.Tensor] = {}  # modules that saw padding -> whether with a gradient

    def places(self, tokens: int, device: torch.device) -> Places | None:
        """Of an input of that many tokens, all of the batch or those of `columns`; None: it is neither."""
        slot = self._slot
        if tokens != slot.size:
            if self._columns is None or tokens != slot.shape[0] * len(self._columns):
                return None
            slot = slot[:, self._columns]
        at = (tokens, device)
        if at not in self._places:
            self._places[at] = _places(slot.tobytes(), self.size, device)
        return self._places[at]


@functools.lru_cache(maxsize=16)
def _places(slots: bytes, size: int, device: torch.device) -> Places:
    """By the slot of each token, int64. A layout that was met before copies nothing, so a CUDA graph can hold it."""
    flat = np.frombuffer(slots, np.int64)
    (rows,) = np.nonzero(flat >= 0)
    rows = rows[np.argsort(flat[rows], kind="stable")]
    taken = np.full(size, -1, np.int32)
    taken[flat[rows]] = rows
    as_they_lie = np.array_equal(taken, np.arange(len(flat)))
    parts = (rows, flat[rows], np.nonzero(flat < 0)[0], taken)
    first, second, others, last = (torch.from_numpy(x).to(device) for x in parts)
    return Places(first, second, size, others, None if as_they_lie else last)


def layout_of(arguments: dict[str, Any]) -> Layout:
    """The layout that a call's own arguments say, as transformers' causal models name them.

    `attention_mask` [B, T] of ones and zeros, or none; `position_ids`; or `cu_seq_lens_q`. Without any of them each row
    is one sequence.

    Raises:
        UserError: they say no layout, or contradict each other; the line says which.
    """
    known = {k: v for k, v in arguments.items() if v is not None and v is not False}
    ids = known.get("input_ids", known.get("inputs_embeds"))
    if not isinstance(ids, torch.Tensor) or ids.dim() < 2:
        raise _unknown("the call has no input_ids [B, T] and no inputs_embeds [B, T, H]")
    for name, value in known.items():
        if isinstance(value, torch.Tensor) and name not in _KNOWN:
            raise _unknown(f"argument {name!r} may move tokens, for all that is known of it")
    if "labels" in known and "num_items_in_batch" not in known:
        what = "labels without num_items_in_batch: the loss is a mean over the micro-batch, which moves the gradient"
        raise UserError(what, "Take a sum over tokens with weights that are fixed beforehand.")
    cache = known.get("past_key_values")
    if cache is not None and cache.get_seq_length():
        raise _unknown("past_key_values hold tokens already")
    rows, columns = ids.shape[:2]
    spans = _spans(known, rows, columns)
    if "position_ids" in known:
        spans = _by_positions(known, spans, rows, columns)
    elif any(span.first for span in spans):
        which = "packed sequences" if "cu_seq_lens_q" in known else "left padding"
        raise UserError(f"{which} without position_ids: positions follow the layout, so the gradient does by meaning")
    return Layout((rows, columns), spans, _kept_columns(known.get("logits_to_keep", 0), columns))


def _unknown(what: str) -> UserError:
    return UserError(f"fold does not know where the sequences lie: {what}", "Say it with Fold.sequences() before.")


def _spans(known: dict[str, Any], rows: int, columns: int) -> list[Span]:
    """Of cu_seq_lens_q, else of the mask's ones, else whole rows."""
    mask, borders = known.get("attention_mask"), known.get("cu_seq_lens_q")
    if borders is not None:
        ends = [int(x) for x in borders.reshape(-1).tolist()]
        steps = np.diff(ends)
        if mask is not None or rows != 1 or len(ends) < 2 or ends[0] or ends[-1] > columns or (steps < 0).any():
            raise _unknown(f"cu_seq_lens_q {ends[:8]} beside a mask, or not within one row of {columns}")
        return [Span(0, int(a), int(n)) for a, n in zip(ends, steps, strict=False)]
    if mask is None:
        return [Span(row, 0, columns) for row in range(rows)]
    if not isinstance(mask, torch.Tensor) or mask.shape != (rows, columns):
        raise _unknown(f"an attention_mask of {getattr(mask, 'shape', mask)} is none of [B, T]")
    held = mask.detach().cpu().numpy()
    if not np.isin(held, (0, 1)).all():
        raise _unknown("attention_mask has other numbers than 0 and 1")
    spans = []
    for row, ones in enumerate(held.astype(bool)):
        (at,) = np.nonzero(ones)
        if len(at) and at[-1] - at[0] + 1 != len(at):
            raise _unknown(f"attention_mask has a hole in row {row}")
        spans.append(Span(row, int(at[0]) if len(at) else 0, len(at)))
    return spans


def _by_positions(known: dict[str, Any], spans: list[Span], rows: int, columns: int) -> list[Span]:
    """Each span's positions count from 0; where nothing else is said, a 0 begins a sequence."""
    given = known["position_ids"]
    if given.dim() != 2 or given.shape[1] != columns or given.shape[0] not in (1, rows):
        raise _unknown(f"position_ids of {tuple(given.shape)} are none of [B, T]")
    places = given.detach().expand(rows, columns).cpu().numpy()
    free = "attention_mask" not in known and "cu_seq_lens_q" not in known
    found = []
    for row, first, length in spans:
        held = places[row, first : first + length]
        (begins,) = np.nonzero(np.diff(held, prepend=held[:1] - 2) != 1)
        for begin, end in zip(begins, [*begins[1:], length], strict=True):
            if held[begin] != 0:
                raise _unknown(f"position_ids of row {row} go on with {held[begin]} at column {first + begin}")
            found.append(Span(row, first + int(begin), int(end - begin)))
        if len(begins) > 1 and not free:
            raise _unknown(f"position_ids begin anew within a sequence of row {row}, which the mask calls one")
    return found


def _kept_columns(asked: Any, columns: int) -> np.ndarray | None:
    """What `logits_to_keep` leaves, as transformers reads it."""
    if isinstance(asked, torch.Tensor) and asked.dim():
        return np.arange(columns)[asked.cpu().numpy()]
    return np.arange(columns)[-int(asked) :] if int(asked) else None


# What is added up. All of it runs on torch's own kernels: elementwise operations, whose bits are IEEE 754's, and on a
# CPU one product of fixed sizes.


def fold_product(acc: torch.Tensor, grad: torch.Tensor, x: torch.Tensor, at: Places | None = None) -> None:
    """acc [N, K] float32 += grad [S, N] transposed times x [S, K], both of one floating dtype, S a multiple of 16.

    With `at` grad and x are [tokens, ...], and are taken to their places.
    """
    if acc.is_cuda:
        from nondet.kernels.fold import cuda  # needs Triton

        cuda.fold_product(acc, grad, x, at and at.taken)
    else:
        note("fold_product[16, library]")
        grad, x = (t if at is None else _placed(t, at) for t in (grad, x))
        for left, right in zip(grad.float().split(STEP), x.float().split(STEP), strict=True):
            acc.addmm_(left.t(), right)


def fold_rows(acc: torch.Tensor, rows: torch.Tensor) -> None:
    """acc [H] float64 += rows [S, heads, H] float32, S a multiple of 16: 16 tokens by halves, then step by step."""
    part = rows.reshape(-1, STEP * rows.shape[1], rows.shape[2])
    while part.shape[1] > 1:
        half = part.shape[1] // 2
        part = torch.cat((part[:, :half] + part[:, half : 2 * half], part[:, 2 * half :]), 1)
    steps = part[:, 0].double()
    if acc.is_cuda:
        from nondet.kernels.fold import cuda

        cuda.fold_steps(acc, steps)
    else:
        note("fold_rows[16]")
        for step in steps:
            acc += step


def fold_lookup(acc: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> None:
    """acc [V, H] float32, row ids[t] += rows[t] [T, H] float32, one after the other for each id. No atomics.

    The k-th tokens of all ids are added at once: they meet nowhere, so no order among them is left to chance.
    """
    note("fold_lookup")
    order = ids.argsort(stable=True)
    kept = ids[order]
    rank = torch.arange(len(kept), device=kept.device) - torch.searchsorted(kept, kept)
    for turn in range(int(rank.max()) + 1 if len(kept) else 0):
        tokens = order[rank == turn]
        acc[ids[tokens]] += rows[tokens]


def _placed(x: torch.Tensor, at: Places) -> torch.Tensor:
    """x [tokens, ...] -> [S, ...]: each token at its place, zeros at the others."""
    if at.taken is None:
        return x
    return x.new_zeros((at.size, *x.shape[1:])).index_copy_(0, at.slots, x[at.rows])


def _micro_batches(
    x: torch.Tensor, gradient: torch.Tensor, lengths: torch.Tensor, micro: int, padding: str
) -> Iterator[tuple[Layout, torch.Tensor, torch.Tensor]]:
    """(layout, x, gradient) of each micro-batch, zeros at padding; as `linear_weight_gradient` takes them."""
    start = 0
    for part in (t.tolist() for t in lengths.split(micro or len(lengths))):
        whole = [t[start : start + sum(part)] for t in (x, gradient)]
        start += sum(part)
        if padding == "packed":
            laid = [t[None] for t in whole]
            spans = [Span(0, sum(part[:i]), n) for i, n in enumerate(part)]
        else:
            laid = [torch.nn.utils.rnn.pad_sequence(t.split(part), True, padding_side=padding) for t in whole]
            spans = [Span(i, (laid[0].shape[1] - n) * (padding == "left"), n) for i, n in enumerate(part)]
        yield Layout((laid[0].shape[0], laid[0].shape[1]), spans), laid[0].flatten(0, 1), laid[1].flatten(0, 1)


def sequence_lengths(shape: Mapping[str, int], device: str) -> torch.Tensor:
    """Of M tokens, for `nondet bench`: sequences of 512, on a CPU of 32, the last of what is left."""
    length = 32 if device == "cpu" else 512
    return torch.tensor([min(length, shape["M"] - start) for start in range(0, shape["M"], length)])


Add = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Places], None]


def _added(acc: torch.Tensor, batches: Iterable[tuple[Layout, torch.Tensor, torch.Tensor]], add: Add) -> torch.Tensor:
    for layout, rows, above in batches:
        at = layout.places(len(rows), rows.device)
        assert at is not None  # noqa: S101 - the layout is of these very rows
        add(acc, above, rows, at)
    return acc


def linear_weight_gradient(
    x: torch.Tensor, gradient: torch.Tensor, lengths: torch.Tensor, micro: int = 0, padding: str = "packed"
) -> torch.Tensor:
    """What `fold` adds up of a linear layer's weight [N, K], rounded once to x's dtype, without a model around it.

    Args:
        x, gradient: [T, K] and [T, N], the tokens of all sequences, one sequence after the other.
        lengths: int64 [sequences], on the CPU.
        micro: Sequences of a micro-batch; 0: all.
        padding: "packed", "left" or "right", of a micro-batch.
    """
    acc = torch.zeros((gradient.shape[1], x.shape[1]), dtype=torch.float32, device=x.device)
    batches = _micro_batches(x, gradient, lengths, micro, padding)
    return _added(acc, batches, fold_product).to(x.dtype)


def norm_weight_gradient(
    x: torch.Tensor, gradient: torch.Tensor, lengths: torch.Tensor, micro: int = 0, padding: str = "packed"
) -> torch.Tensor:
    """As `linear_weight_gradient`, of a norm's weight [K]: x [T, K] are the normalized rows that it multiplies."""
    acc = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
    batches = _micro_batches(x, gradient, lengths, micro, padding)
    products = lambda g, r, at: _placed((g.float() * r.float())[:, None], at)  # noqa: E731 - a name for the line
    return _added(acc, batches, lambda a, g, r, at: fold_rows(a, products(g, r, at))).to(x.dtype)


def embedding_weight_gradient(
    x: torch.Tensor, gradient: torch.Tensor, lengths: torch.Tensor, micro: int = 0, padding: str = "packed"
) -> torch.Tensor:
    """As `linear_weight_gradient`, of an embedding [K, N]: a token's id is where its row of x [T, K] is largest."""
    acc = torch.zeros((x.shape[1], gradient.shape[1]), dtype=torch.float32, device=x.device)
    batches = _micro_batches(x, gradient, lengths, micro, padding)
    add: Add = lambda a, g, r, at: fold_lookup(a, g[at.rows].float(), r[at.rows].argmax(-1))  # noqa: E731 - likewise
    return _added(acc, batches, add).to(x.dtype)


def _stock(
    label: str,
    of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    gradient: torch.Tensor,
    lengths: torch.Tensor,
    micro: int = 0,
    padding: str = "packed",
) -> torch.Tensor:
    """As autograd has it: a sum a micro-batch, added to `.grad` in its dtype."""
    note(f"{label} a micro-batch")
    parts = (of(rows, above) for _, rows, above in _micro_batches(x, gradient, lengths, micro, padding))
    return functools.reduce(torch.add, parts)


def _looked_up(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    ids, padded = x.argmax(-1), (x == 0).all(-1)
    found: torch.Tensor = torch.ops.aten.embedding_dense_backward(
        gradient[~padded], ids[~padded], x.shape[1], -1, False
    )
    return found


linear_weight_gradient_stock = functools.partial(_stock, "torch.mm", lambda x, g: g.t() @ x)
norm_weight_gradient_stock = functools.partial(_stock, "torch.sum", lambda x, g: (g * x).sum(0))
embedding_weight_gradient_stock = functools.partial(_stock, "embedding_dense_backward", _looked_up)


def _sequences(*tensors: torch.Tensor, lengths: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """STEP tokens of each tensor in float32 at a time, sequence by sequence, zeros behind a sequence's end."""
    for pieces in zip(*(t.float().split(lengths.tolist()) for t in tensors), strict=True):
        for parts in zip(*(piece.split(STEP) for piece in pieces), strict=True):
            yield [torch.nn.functional.pad(t, (0, 0, 0, STEP - len(t))) for t in parts]


def fold_anchor(
    x: torch.Tensor, gradient: torch.Tensor, lengths: torch.Tensor, micro: int = 0, padding: str = "packed"
) -> torch.Tensor:
    """Class "fold" as it is written down: sequence by sequence, in steps of 16 tokens; no micro-batch, no padding."""
    acc = torch.zeros((gradient.shape[1], x.shape[1]), dtype=torch.float32)
    for left, right in _sequences(gradient, x, lengths=lengths):
        acc.addmm_(left.t(), right)
    return acc.to(x.dtype)


def fold_norm_anchor(
    x: torch.Tensor, gradient: torch.Tensor, lengths: torch.Tensor, micro: int = 0, padding: str = "packed"
) -> torch.Tensor:
    """As `fold_anchor`, of a norm's weight: 16 tokens by halves in float32, one such sum after the other in float64."""
    acc = torch.zeros(x.shape[1], dtype=torch.float64)
    for left, right in _sequences(gradient, x, lengths=lengths):
        part = left * right
        for half in (8, 4, 2, 1):
            part = part[:half] + part[half:]
        acc += part[0]
    return acc.to(x.dtype)


def fold_lookup_anchor(
    x: torch.Tensor, gradient: torch.Tensor, lengths: torch.Tensor, micro: int = 0, padding: str = "packed"
) -> torch.Tensor:
    """As `fold_anchor`, of an embedding: token after token."""
    acc = torch.zeros((x.shape[1], gradient.shape[1]), dtype=torch.float32)
    for place, row in zip(x.argmax(-1).tolist(), gradient.float(), strict=True):
        acc[place] += row
    return acc.to(x.dtype)


class _Call(NamedTuple):
    """One call of the model with gradients, and the modules that it has gone through."""

    serial: int
    layout: Layout
    seen: set[str]


class _Use:
    """A module with parameters to learn, the sums of its gradients so far, and the serial of the last call in them."""

    def __init__(self, name: str, module: Any) -> None:
        self.name = name or "the model"
        self.module = module
        self.learnt = {n: p for n, p in module._parameters.items() if p is not None and p.requires_grad}
        self.sums: dict[str, torch.Tensor] = {}
        self.added = 0
        self._heads_first: bool | None = None
        self._form = installed_form(type(module)) or form_of(type(module))
        self._add = self._known()
        for n, p in self.learnt.items():
            if type(p) is not torch.nn.Parameter or p.dtype not in DTYPES:
                raise UserError(f"fold has no sums for {self.name}.{n}: {type(p).__name__} of {p.dtype}")
            if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
                raise UserError(f"{self.name}.{n} has hooks on its gradient, which fold would pass by", "Remove them.")

    def _known(self) -> Callable[[Places, torch.Tensor, torch.Tensor], None]:
        module = self.module
        if "forward" not in module.__dict__:
            if type(module) is torch.nn.Linear:
                return guarded(self._linear)
            plain = type(module) is torch.nn.Embedding and not (module.sparse or module.scale_grad_by_freq)
            if plain and module.max_norm is None:
                return guarded(self._embedding)
            if self._form is not None and set(self.learnt) == {"weight"}:
                return self._norm
        raise UserError(
            f"fold does not know the gradient of {', '.join(self.learnt)} of {self.name} ({type(module).__name__})",
            "It knows torch's Linear and Embedding, and the RMSNorm of Llama, T5 and Gemma; freeze what else there is.",
        )

    def hide(self, *unused: object) -> None:
        """Before the module runs: autograd is not to compute what is added up here."""
        if torch.is_grad_enabled():
            for parameter in self.learnt.values():
                parameter.requires_grad_(False)

    def add(self, layout: Layout, x: torch.Tensor, grad: torch.Tensor) -> None:
        """x, the module's input, and grad of its output, in the layout's order, onto the sums."""
        looked_up = x.shape == grad.shape[:-1]
        lead, seen = (x.shape if looked_up else x.shape[:-1]), tuple(x.shape)
        if len(lead) == 3 and self._form is not None:  # heads, before the tokens or behind them
            if lead[1] != lead[2]:
                self._heads_first = lead[1] != layout.shape[1]
            elif self._heads_first is None and lead[1] != 1:  # no call before has told
                raise UserError(f"{self.name} saw {seen}: which axis is the tokens'?", "Pad by one more column.")
            if self._heads_first:
                x, grad = x.transpose(1, 2), grad.transpose(1, 2)
            lead = x.shape[:2]
        tokens = lead.numel()
        at = layout.places(tokens, grad.device)
        if at is None or len(lead) > 2 or (len(lead) == 2 and lead[0] != layout.shape[0]):
            raise _unknown(f"{self.name} saw {seen} in a call of {layout.shape}")
        grad = grad.reshape(tokens, -1, grad.shape[-1])
        if at.others.numel():  # looked at once, after the pass: a GPU would have to be waited for
            layout.strays[self.name] = (grad[at.others] != 0).any()
        self._add(at, x.reshape(tokens, -1, 1 if looked_up else x.shape[-1]), grad)
        count("replaced", f"fold of {type(self.module).__name__}")

    def _sum(self, name: str) -> torch.Tensor:
        if name not in self.sums:
            learnt = self.learnt[name]
            dtype = torch.float64 if learnt.dim() == 1 else torch.float32
            self.sums[name] = torch.zeros_like(learnt, dtype=dtype, requires_grad=False)
        return self.sums[name]

    def _linear(self, at: Places, x: torch.Tensor, grad: torch.Tensor) -> None:
        if "weight" in self.learnt:
            fold_product(self._sum("weight"), grad[:, 0], x[:, 0].to(grad.dtype), at)  # as autocast had it
        if "bias" in self.learnt:
            fold_rows(self._sum("bias"), _placed(grad[:, :1], at).float())

    def _embedding(self, at: Places, x: torch.Tensor, grad: torch.Tensor) -> None:
        ids, rows = x[:, 0, 0][at.rows], grad[:, 0][at.rows].float()
        if self.module.padding_idx is not None:
            kept = ids != self.module.padding_idx
            ids, rows = ids[kept], rows[kept]
        fold_lookup(self._sum("weight"), rows, ids)

    def _norm(self, at: Places, x: torch.Tensor, grad: torch.Tensor) -> None:
        wide = x.float()  # by the operators that the block replaces: a row's bits are its own
        form: Any = self._form
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + getattr(self.module, form.eps))
        normed = normed.to(x.dtype).float() if form.round_first else normed

        def add() -> None:
            fold_rows(self._sum("weight"), _placed(grad.float() * normed, at))

        guarded(add)()


class _Tap(torch.autograd.Function):
    """The module's output as it is; on the way back its gradient is added up."""

    @staticmethod
    def forward(
        ctx: Any, out: torch.Tensor, x: torch.Tensor, anchor: torch.Tensor, fold: Fold, use: _Use, call: _Call
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.more = fold, use, call, _backward_now() != -1
        return out.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        fold, use, call, again = ctx.more
        fold._add(use, call, ctx.saved_tensors[0], grads[0], again)
        return grads[0], None, None, None, None, None


_backward_now: Callable[[], int] = torch._C._current_graph_task_id  # the one that this thread is in; -1: none


class Fold:
    """One `with fold(model)`. See `fold`."""

    def __init__(self, model: Any) -> None:
        self._model = model
        learning = ((n, m) for n, m in model.named_modules() if any(p.requires_grad for p in m.parameters(False)))
        self._uses = [_Use(name, module) for name, module in learning]
        self._hooks: list[Any] = []
        self._call: _Call | None = None
        self._inside = False
        self._calls = 0
        self._told: list[Span] | None = None
        self._task = -1  # the backward pass that is under way
        self._before: Counter[str] = Counter()
        self._risks: Counter[str] = Counter()  # of the last call, forward
        self._published: dict[int, tuple[torch.Tensor, int]] = {}  # of a parameter: its gradient, and its version

    def sequences(self, spans: Iterable[tuple[int, int, int]]) -> None:
        """Say where the sequences of the next call lie, where its arguments do not: (row, first column, tokens)."""
        self._told = [Span(*span) for span in spans]

    def main_grad(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """The gradient so far in float32, of the parameter's shape: what `parameter.grad` is rounded from; or None."""
        at = ((use.sums, name) for use in self._uses for name, p in use.learnt.items() if p is parameter)
        parts = [sums[name] for sums, name in at if name in sums]
        return functools.reduce(torch.add, parts).float() if parts else None

    def __enter__(self) -> Fold:
        _refuse_surroundings()
        if self._hooks:
            raise UserError("this fold(model) is entered already", "Call fold(model) again after it was left.")
        self._hooks.append(self._model.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True))
        self._hooks.append(self._model.register_forward_hook(self._end, always_call=True))
        for use in self._uses:
            self._hooks.append(use.module.register_forward_pre_hook(use.hide))
            self._hooks.append(use.module.register_forward_hook(self._tap(use), always_call=True))
        return self

    def __exit__(self, *unused: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._forget()

    def _forget(self) -> None:
        """After a refusal too: half a gradient is none."""
        for use in self._uses:
            use.sums.clear()
        self._published.clear()
        self._call, self._inside, self._told, self._task = None, False, None, -1

    def _begin(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() or _backward_now() != -1:
            return
        _refuse_surroundings()
        told, self._told = self._told, None
        arguments = {**inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments}
        for name, value in list(arguments.items()):
            if isinstance(value, dict):  # **kwargs
                arguments |= arguments.pop(name)
        if told is None:
            layout = layout_of(arguments)
        else:
            first = next(x for x in arguments.values() if isinstance(x, torch.Tensor) and x.dim() > 1)
            asked = arguments.get("logits_to_keep", 0)
            layout = Layout((first.shape[0], first.shape[1]), told, _kept_columns(asked, first.shape[1]))
        self._before, self._risks = _at_risk(), Counter()
        self._calls += 1
        self._call = _Call(self._calls, layout, set())
        self._inside = True

    def _end(self, *unused: object) -> None:
        if self._inside and _backward_now() == -1:
            self._inside = False
            self._risks = _at_risk() - self._before

    def _tap(self, use: _Use) -> Callable[..., torch.Tensor | None]:
        def hook(module: Any, args: tuple[Any, ...], out: Any) -> torch.Tensor | None:
            for parameter in use.learnt.values():  # whatever happened: they learn again
                parameter.requires_grad_(True)
            if not torch.is_grad_enabled() or not isinstance(out, torch.Tensor):
                return None
            call, again = self._call, _backward_now() != -1
            if call is None or not (self._inside or again):
                line = f"{use.name} was called past the model given to fold"
                raise UserError(line, "Give fold() the module that is called.")
            if not again:
                if use.name in call.seen:
                    raise UserError(f"{use.name} is called twice in one call: which use is first depends on the batch")
                call.seen.add(use.name)
            if len(args) != 1:
                raise UserError(f"{use.name} was called with other arguments than its one input")
            anchor = torch.zeros((), dtype=torch.float32, requires_grad=True)
            tapped: torch.Tensor = _Tap.apply(out, args[0].detach(), anchor, self, use, call)
            return tapped

        return hook

    def _add(self, use: _Use, call: _Call, x: torch.Tensor, grad: torch.Tensor, again: bool) -> None:
        try:
            self._check(use, call, again)
            use.add(call.layout, x, grad)
        except BaseException:
            self._forget()
            raise
        use.added = call.serial

    def _check(self, use: _Use, call: _Call, again: bool) -> None:
        _refuse_surroundings()
        if again:
            raise UserError("fold does not follow reentrant checkpointing", "Take use_reentrant=False.")
        if call is not self._call or use.added >= call.serial:
            line = "fold follows one micro-batch at a time: a call of the model, then its backward pass, once"
            raise UserError(line, "Put what belongs to one loss into one call.")
        task = _backward_now()
        if task != self._task:
            self._task = task
            _refuse_risks(self._risks)
            self._before = _at_risk()
            self._start()
            torch.autograd.Variable._execution_engine.queue_callback(self._publish)

    def _start(self) -> None:
        """Go on from the gradients that were published, or begin anew where they were taken away or made zero."""
        for use in self._uses:
            for name, parameter in use.learnt.items():
                grad, known = parameter.grad, self._published.get(id(parameter))
                if grad is not None and known is not None and known[0] is grad and known[1] == grad._version:
                    continue
                if grad is not None and bool((grad != 0).any()):
                    line = f"the gradient of {use.name}.{name} was not made by this fold, or changed since"
                    raise UserError(line, "Call zero_grad() first, and change gradients after the last micro-batch.")
                use.sums.pop(name, None)
        self._published.clear()

    def _publish(self) -> None:
        """After a backward pass: `parameter.grad`, rounded once to the parameter's dtype."""
        self._task = -1
        risks = _at_risk() - self._before
        strays = self._call.layout.strays if self._call is not None else {}
        devices = {told.device for told in strays.values()}
        stray = any(bool(torch.stack([t for t in strays.values() if t.device == d]).any()) for d in devices)
        if risks or stray:
            self._forget()
        _refuse_risks(risks)
        if stray:
            name = next(name for name, told in strays.items() if told)
            line = "Leave what belongs to no sequence out of the loss; else it depends on the padding by meaning."
            raise UserError(f"{name}: the loss has a gradient at padding", line)
        parameters = {id(p): p for use in self._uses for p in use.learnt.values()}
        with torch.no_grad():
            for parameter in parameters.values():
                total = self.main_grad(parameter)
                if total is not None:
                    parameter.grad = total.to(parameter.dtype)
                    self._published[id(parameter)] = parameter.grad, parameter.grad._version


def _at_risk() -> Counter[str]:
    """Calls so far that the innermost block could not hold to their rows."""
    coverages = current().coverages
    return Counter() if not coverages else coverages[-1].left + coverages[-1].at_risk


def _refuse_risks(risks: Counter[str]) -> None:
    """A gradient that was added up well of parts that follow the batch follows it as well."""
    if risks:
        what = "; ".join(f"{name} ({times} calls)" for name, times in risks.most_common(3))
        raise UserError(f"fold has nothing to stand on, the model's own gradient is at risk: {what}", _COVERED)


def _refuse_surroundings() -> None:
    """Without what the promise rests on."""
    if not current().training:
        raise UserError("fold(model) outside of batch_invariant(training=True)", "Run the backward pass inside, too.")
    if torch.compiler.is_compiling():
        raise UserError("fold does not follow torch.compile", "Leave the model uncompiled.")
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        raise UserError("fold is for one rank: across several the order of sequences is not settled")


def fold(model: torch.nn.Module) -> Fold:
    """Have a model's gradients follow neither micro-batch size, nor padding, nor packing, bit for bit.

        with nondet.batch_invariant(training=True), nondet.fold(model):
            for micro_batch in batch:
                loss(model(**micro_batch)).backward()
            optimizer.step()
            optimizer.zero_grad()

    After each backward pass `parameter.grad` is the gradient so far, rounded from float32 (`Fold.main_grad`), and
    `zero_grad()` begins anew. The order of reduction: `nondet.kernels.fold.gradients`.

    THE LOSS HAS TO BE A SUM OVER TOKENS with weights that are fixed before the batch is cut: a mean over a micro-batch
    makes the gradient depend on it by meaning, which no kernel can mend. Micro-batches come in the batch's order.
    Where sequences lie is read from the call's arguments (`attention_mask` [B, T], `position_ids`, `cu_seq_lens_q`;
    without them each row is one), or said by `Fold.sequences`; never guessed.

    Args:
        model: The module that is called. Parameters that do not learn are left alone. Gradient checkpointing may be on
            (use_reentrant=False).

    Raises:
        UserError: a layer that is not known here; on entering outside of `batch_invariant(training=True)`; and in a
            pass: an unknown layout, operators at risk, a gradient at padding, two calls before one backward pass, a
            gradient that was changed between micro-batches. What was added up is dropped then.
    """
    return Fold(model)
