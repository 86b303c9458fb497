"""Speculative decoding inside of transformers' continuous batching, and the sources of drafts.

A decoding request adds its last token *and* k drafted ones to the step: k + 1 query tokens over the same paged cache.
The drafts that the model would have chosen itself are kept, with its choice after the last of them, as in greedy
verification (Leviathan et al., 2023). Keys of rejected drafts are overwritten before they are read. So with exact
arithmetic the ids are those of plain greedy decoding, whatever drafts: a completion that differs shows that the bits of
a position depend on how many query tokens are computed with it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch

from nondet.errors import UserError
from nondet.sampling.orders import ORDERS, Order
from nondet.sampling.plan import Load, Request, Setting
from nondet.sampling.schedule import SessionLog, two_largest

if TYPE_CHECKING:
    from nondet.sampling.model import LoadedModel

# (contexts: prompt and generated tokens of each request, most tokens) -> drafts of each
Draft = Callable[[Sequence[Sequence[int]], int], list[list[int]]]

# Prompt lookup; the first half of the model's own layers; a model of its own, which --draft-model names; and the
# editing form, whose draft is an earlier text that is being changed.
DRAFTERS = ("lookup", "draft", "model", "edit")
_NGRAMS = (3, 2, 1)
_WINDOW = 16  # tokens of the context that a draft model sees


def order_of(model: Any, requests: Sequence[Request], load: Load, log: SessionLog, setting: Setting) -> Order:
    """The setting's order of service, with its drafts; a `UserError` where no draft could be verified."""
    order = ORDERS[setting.order]({r.id: r for r in requests}, setting.chunk)
    if not setting.drafts:
        return order
    if load.graphs or log.forced:
        what = "CUDA graphs" if load.graphs else "forced tokens"
        raise UserError(f"speculative decoding does not go with {what}", "Vary one of the two.")
    return Speculation(order, _make_draft(setting, model), setting.draft_tokens, log)


def _make_draft(setting: Setting, model: Any) -> Draft:
    if setting.drafts == "draft":
        return _greedy(_half(model))
    if setting.drafts == "model":
        small = _draft_model(setting.draft_model, str(model.dtype).removeprefix("torch."), model.device.type).model
        # padding rows are not a token of the model that verifies
        return _greedy(small, model.get_input_embeddings().weight.shape[0])
    guess = look_up if setting.drafts == "lookup" else partial(edit, earlier=setting.earlier)
    return lambda contexts, most: [guess(context, most) for context in contexts]


def look_up(context: Sequence[int], most: int) -> list[int]:
    """Prompt lookup: what came after the latest earlier occurrence of the last 3, 2 or 1 tokens."""
    return _after(context[:-1], context, most, step=-1)


def edit(context: Sequence[int], most: int, earlier: Sequence[int]) -> list[int]:
    """The editing form: the earlier text continues after the first occurrence of the last 3, 2 or 1 tokens in it."""
    return _after(earlier, context, most, step=1)


def _after(text: Sequence[int], context: Sequence[int], most: int, step: int) -> list[int]:
    for size in _NGRAMS:
        last = tuple(context[-size:])
        for start in range(len(text) - size)[::step]:
            if tuple(text[start : start + size]) == last:
                return list(text[start + size : start + size + most])
    return []


def check_draft_model(name: str, loaded: LoadedModel) -> dict[str, Any]:
    """The draft model's description for the run's header; a `UserError` where its tokens are not those of `loaded`."""
    draft = _draft_model(name, loaded.dtype, loaded.device)
    if draft.tokenizer.get_vocab() != loaded.tokenizer.get_vocab():
        what = f"--draft-model {name}: its tokenizer has other tokens than that of {loaded.name}"
        raise UserError(what, "Give a smaller model of the same family.")
    return {"name": draft.name, **draft.identity}


@lru_cache(maxsize=1)  # sessions follow one another, each with the same one
def _draft_model(name: str, dtype: str, device: str) -> LoadedModel:
    from nondet.sampling.model import EMBEDDED, load_model

    return load_model(None if name == EMBEDDED else name, dtype, device)


def _greedy(small: Any, rows: int | None = None) -> Draft:
    """The model's most likely tokens, of the first `rows`, from the last tokens of each context; without a cache."""

    @torch.no_grad()
    def draft(contexts: Sequence[Sequence[int]], most: int) -> list[list[int]]:
        texts = [list(context[-_WINDOW:]) for context in contexts]
        for _ in range(most if texts else 0):
            longest = max(map(len, texts))
            # filled on the right: a causal model's last real row does not see it
            ids = torch.tensor([t + [0] * (longest - len(t)) for t in texts], device=small.device)
            logits = small(input_ids=ids, use_cache=False).logits
            last = torch.tensor([len(t) - 1 for t in texts], device=small.device)
            chosen = logits[torch.arange(len(texts), device=small.device), last, :rows].argmax(-1).tolist()
            for text, token in zip(texts, chosen, strict=True):
                text.append(token)
        return [text[len(text) - most :] for text in texts]

    return draft


def has_halves(model: Any) -> bool:
    """Whether the model's layers are at transformers' usual attribute."""
    return isinstance(getattr(model.base_model, "layers", None), torch.nn.ModuleList)


def _half(model: Any) -> Any:
    """The first half of the model's layers, with its own embedding, norm and head. The weights are a copy, because the
    engine switches the attention of the model's own layers."""
    layers = model.base_model.layers
    kept = max(1, len(layers) // 2)
    small = copy.deepcopy(model, {id(layer): None for layer in list(layers)[kept:]})
    small.base_model.layers = torch.nn.ModuleList(list(small.base_model.layers._modules.values())[:kept])
    small.config.num_hidden_layers = kept
    if getattr(small.config, "layer_types", None):
        small.config.layer_types = small.config.layer_types[:kept]
    small.set_attn_implementation("sdpa")
    return small.eval()


class Speculation(Order):
    """The drafts of one session, from proposal to verdict, in an order of service; `log` counts them."""

    def __init__(self, order: Order, draft: Draft, most: int, log: SessionLog) -> None:
        super().__init__(order.requests, order.chunk)
        self.arrange, self.admitted = order.arrange, order.admitted  # type: ignore[method-assign] # its own
        self.draft, self.most, self.log = draft, most, log
        self._drafts: dict[str, list[int]] = {}
        self._states: dict[str, Any] = {}
        self._futures: dict[str, Any] = {}
        self._cache: Any = None

    def before(self, states: Iterable[Any], cache: Any) -> None:
        """Append drafts to the last token of each decoding request, before the step is scheduled."""
        self._cache = cache
        self._drafts, self._states, self._futures = {}, {}, {}
        ready = [s for s in states if s.status.name == "DECODING" and s.generated_tokens]
        contexts = [[*s.initial_tokens, *s.generated_tokens] for s in ready]
        drafts = self.draft(contexts, self.most) if ready else []
        for state, tokens in zip(ready, drafts, strict=True):
            # the token after the last draft is the model's own, so one fewer than are missing may be drafted
            kept = tokens[: max(0, state._new_tokens_limit - len(state.generated_tokens) - 1)]
            state.tokens_to_process = [state.generated_tokens[-1], *kept]
            self._states[state.request_id], self._drafts[state.request_id] = state, kept

    def allowed(self, state: Any, budget: int) -> int | None:
        """None where the request decodes under speculation: its drafts are cut to what the step has room for."""
        name = state.request_id
        if name not in self._drafts or self._states[name] is not state:
            return super().allowed(state, budget)
        state.tokens_to_process = state.tokens_to_process[: max(1, budget)]
        self._drafts[name] = self._drafts[name][: len(state.tokens_to_process) - 1]
        return None

    def scheduled(self, futures: Iterable[Any]) -> None:
        """See `Order`."""
        self._futures = {f.state.request_id: f for f in futures}

    def hooks(self) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
        """Widen the step's logits, and decide after it which drafts are kept."""
        return [self.widen], [self.verify]

    def widen(self, _module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Forward pre-hook: request the logits after every draft, not only after the last one."""
        if "logits_to_keep" in kwargs:
            wanted = kwargs["logits_indices"]
            extra = torch.tensor(self._rows(), dtype=wanted.dtype, device=wanted.device)
            kwargs["logits_to_keep"] = torch.cat([wanted, extra])
        return args, kwargs

    def _rows(self) -> list[int]:
        """Rows of the step whose next token is a draft; the row of the last draft is the engine's own."""
        rows, first = list[int](), 0
        for span in self.log.pack:
            rows += [first + i for i in range(len(self._drafts.get(span.request, ())))]
            first += span.rows
        return rows

    def verify(self, _module: Any, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Forward hook: decide what is kept, note the two largest logits of every kept token, hide the extra rows."""
        wanted = kwargs["logits_indices"]
        logits, rows = output.logits[0], self._rows()
        if logits.shape[0] == wanted.shape[0] + len(rows):
            own, extra = logits[: wanted.shape[0]], logits[wanted.shape[0] :]
            output.logits = output.logits[:, : wanted.shape[0]]
        else:  # a model without logits_to_keep gives a row for every query token, and the engine picks its own
            own, extra = logits[wanted], logits[rows]
        # as the engine chooses: softmax in float32, its largest, the logarithm of that
        chances = torch.softmax(extra.float(), dim=-1)
        picked = chances.argmax(dim=-1, keepdim=True)
        logprobs = chances.gather(1, picked).squeeze(-1).log().tolist()
        choices = list(zip(picked.squeeze(-1).tolist(), logprobs, strict=True))
        # the log's rows of this step, in the order of the tokens: the kept ones, of all requests
        names, kept, at = [], [own[:0]], 0  # a step in which no request gets a token has its entry, too
        for row, name in enumerate(self.log.rows[-1]):
            drafts = self._drafts.get(name, [])
            mine = choices[at : at + len(drafts)]
            wrong = (i for i, draft in enumerate(drafts) if draft != mine[i][0])
            agreed = next(wrong, len(drafts))
            if drafts:
                self.log.drafted += len(drafts)
                self.log.accepted += agreed
                self._settle(name, mine, agreed)
            # where all drafts were right the token after the last one, which the engine chose, is added
            pieces = [extra[at : at + min(agreed + 1, len(drafts))], own[row : row + (agreed == len(drafts))]]
            names += [name] * sum(map(len, pieces))
            kept += pieces
            at += len(drafts)
        self.log.rows[-1] = names
        self.log.top.append(two_largest(torch.cat(kept)))

    def _settle(self, name: str, mine: list[tuple[int, float]], agreed: int) -> None:
        """Have the engine's own bookkeeping take several tokens at once when it adds this request's token."""
        state = self._states[name]
        plain = type(state).update_and_check_completion

        def update(token: int, logprob: float | None) -> bool:
            del state.update_and_check_completion  # for this step only
            before = state.position_offset - len(mine) - 1
            tokens = [*mine, (token, logprob)] if agreed == len(mine) else mine[: agreed + 1]
            done, taken = False, 0
            for chosen, its_logprob in tokens:
                done, taken = plain(state, chosen, its_logprob), taken + 1
                if done:
                    break
            state.position_offset = before + taken
            future = self._futures[name]
            future.complete_blocks = _completed(self._cache, future.complete_blocks, before, taken)
            return bool(done)

        state.update_and_check_completion = update


def _completed(cache: Any, before: Any, start: int, rows: int) -> Any:
    """Pages that these tokens complete: in transformers 5.17 one number, later one for each kind of layer."""
    if isinstance(before, int):
        return (start % cache.block_size + rows) // cache.block_size
    sizes = {name: cache.cache_allocators[name].tokens_per_page for name in cache.cache_allocators} if before else {}
    counts = {name: (start % size + rows) // size for name, size in sizes.items()}
    return {name: count for name, count in counts.items() if count}
