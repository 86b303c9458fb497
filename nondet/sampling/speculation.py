"""Speculative decoding inside of transformers' continuous batching, which has none of its own.

A request that decodes brings its last token *and* k drafted ones to the step: k + 1 query tokens over the same paged
cache, in the same forward pass as everybody else's. The model's choice after each of them is compared with the draft;
the drafts that it would have chosen itself are kept, with its choice after the last of them, as in greedy verification
(Leviathan et al., 2023). The position falls back to what was kept: keys of rejected drafts are written over before
anybody reads them.

With exact arithmetic the ids are those of plain greedy decoding. A completion that parts shows that the bits of a
position depend on how many query tokens are computed with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from nondet.sampling.drafters import Draft
from nondet.sampling.schedule import SessionLog

__all__ = ["Speculation"]


class Speculation:
    """The drafts of one session, from proposal to verdict.

    Attributes:
        drafted, accepted: Tokens, over all requests.
    """

    def __init__(self, draft: Draft, most: int, log: SessionLog) -> None:
        self.draft, self.most, self.log = draft, most, log
        self.drafted = self.accepted = 0
        self._drafts: dict[str, list[int]] = {}
        self._states: dict[str, Any] = {}
        self._futures: dict[str, Any] = {}
        self._cache: Any = None

    def propose(self, states: Iterable[Any], cache: Any) -> None:
        """Put drafts behind the last token of each request that decodes, before the step is scheduled.

        Args:
            states: transformers' RequestStates that are active.
            cache: The paged cache, asked for the size of its pages.
        """
        self._cache = cache
        self._drafts, self._states, self._futures = {}, {}, {}
        ready = [s for s in states if s.status.name == "DECODING" and s.generated_tokens]
        contexts = [[*s.initial_tokens, *s.generated_tokens] for s in ready]
        drafts = self.draft(contexts, self.most) if ready else []
        for state, tokens in zip(ready, drafts, strict=True):
            # the token after the last draft is the model's own, so that one fewer than are missing may be drafted
            kept = tokens[: max(0, state._new_tokens_limit - len(state.generated_tokens) - 1)]
            state.tokens_to_process = [state.generated_tokens[-1], *kept]
            self._states[state.request_id], self._drafts[state.request_id] = state, kept

    def cut(self, state: Any, budget: int) -> bool:
        """Whether the request decodes under speculation; its drafts are cut to what the step has room for."""
        name = state.request_id
        if name not in self._drafts or self._states[name] is not state:
            return False
        state.tokens_to_process = state.tokens_to_process[: max(1, budget)]
        self._drafts[name] = self._drafts[name][: len(state.tokens_to_process) - 1]
        return True

    def scheduled(self, futures: Iterable[Any]) -> None:
        """Note who is in the step (transformers' FutureRequestStates)."""
        self._futures = {f.state.request_id: f for f in futures}

    def widen(self, _module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Forward pre-hook: ask for the logits after every draft, not only after the last one."""
        if "logits_to_keep" in kwargs:
            wanted = kwargs["logits_indices"]
            extra = torch.tensor(self._rows(), dtype=wanted.dtype, device=wanted.device)
            kwargs["logits_to_keep"] = torch.cat([wanted, extra])
        return args, kwargs

    def _drafting(self) -> list[tuple[str, list[int], int]]:
        """(request, its drafts, its first row in the step) of those who have drafts in the step."""
        found, row = [], 0
        for span in self.log.pack:
            if self._drafts.get(span.request):
                found.append((span.request, self._drafts[span.request], row))
            row += span.rows
        return found

    def _rows(self) -> list[int]:
        """Rows whose next token is a draft; the row of the last draft is the engine's own."""
        return [first + i for _, drafts, first in self._drafting() for i in range(len(drafts))]

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
        choices = picked.squeeze(-1).tolist()
        kept: dict[str, int] = {}
        at = 0
        for name, drafts, _ in self._drafting():
            mine = list(zip(choices[at : at + len(drafts)], logprobs[at : at + len(drafts)], strict=True))
            agreed = next((i for i, d in enumerate(drafts) if d != mine[i][0]), len(drafts))
            kept[name] = agreed
            self.drafted += len(drafts)
            self.accepted += agreed
            self._settle(name, mine, agreed)
            at += len(drafts)
        self._record(own, extra, kept)

    def _settle(self, name: str, mine: list[tuple[int, float]], agreed: int) -> None:
        """Have the engine's own bookkeeping take several tokens at once when it hands this request its token."""
        state = self._states[name]
        plain = type(state).update_and_check_completion

        def update(token: int, logprob: float | None) -> bool:
            del state.update_and_check_completion  # this step's alone
            before = state.position_offset - len(mine) - 1
            # where all drafts were right the token after the last one, which the engine chose, comes on top
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

    def _record(self, own: torch.Tensor, extra: torch.Tensor, kept: dict[str, int]) -> None:
        """The log's rows of this step, in the order of the tokens: those that were kept, of everybody."""
        names, pieces, at = [], [own[:0]], 0  # a step in which nobody gets a token has its entry, too
        for row, name in enumerate(self.log.rows[-1]):
            count = len(self._drafts.get(name, []))
            agreed = kept.get(name, 0)
            mine = [extra[at : at + min(agreed + 1, count)]]
            if agreed == count:
                mine.append(own[row : row + 1])
            names += [name] * sum(len(m) for m in mine)
            pieces += mine
            at += count
        self.log.rows[-1] = names
        self.log.keep_tops(torch.cat(pieces))


def _completed(cache: Any, before: Any, start: int, rows: int) -> Any:
    """Pages that `rows` tokens from position `start` on complete, as the engine counts them.

    transformers 5.17 has a number, later ones a number for each kind of layer.
    """
    if isinstance(before, int):
        return (start % cache.block_size + rows) // cache.block_size
    sizes = {name: cache.cache_allocators[name].tokens_per_page for name in cache.cache_allocators} if before else {}
    counts = {name: (start % size + rows) // size for name, size in sizes.items()}
    return {name: count for name, count in counts.items() if count}
