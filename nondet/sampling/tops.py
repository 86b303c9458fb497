"""The two largest logits of every step of a CUDA graph, kept on the device by the graph itself.

A replay runs no Python, so a hook on the model runs twice for each graph (once for the step that comes before its
capture, once while it is captured) and never again. What it launches is in the graph. So it writes to a ring of places
on the device and moves on by a counter that lies there, too; the host reads the ring when it is full, and at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["TopRing", "two_largest"]

_PLACES = 512


def two_largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values (float32) and token ids (int64), [rows, 2], of logits [rows, vocabulary]; reads only.

    Maxima rather than topk: among equals topk may choose by the number of rows, and the tool would be part of what it
    looks for.
    """
    rows = logits.float()
    first = rows.max(dim=-1, keepdim=True)
    second = rows.scatter(-1, first.indices, float("-inf")).max(dim=-1, keepdim=True)
    return torch.cat([first.values, second.values], -1), torch.cat([first.indices, second.indices], -1)


class TopRing:
    """Places for the two largest logits of `rows` rows in each of so many steps.

    Args:
        rows: Most rows of a step, those that fill a graph up included.
    """

    def __init__(self, rows: int, device: torch.device, places: int = _PLACES) -> None:
        self.places = places
        self._values = torch.zeros(places, rows, 2, dtype=torch.float32, device=device)
        self._ids = torch.zeros(places, rows, 2, dtype=torch.int64, device=device)
        self._steps = torch.zeros(1, dtype=torch.int64, device=device)
        self._read = 0

    def write(self, logits: torch.Tensor) -> None:
        """Launch what keeps the step's two largest of logits [rows, vocabulary], and moves on."""
        values, ids = two_largest(logits)
        place = self._steps % self.places
        self._values[:, : len(values)].index_copy_(0, place, values[None])
        self._ids[:, : len(ids)].index_copy_(0, place, ids[None])
        self._steps += 1

    def full(self, steps: int) -> bool:
        """Whether the next step would overwrite one that nobody has read, after so many steps in all."""
        return steps - self._read >= self.places

    def read(self, rows: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What was not read yet, on the host; call it between steps. A step that crashed has left nothing.

        Args:
            rows: For each step from the first, how many of its rows belong to a request.
        """
        values, ids, ran = self._values.cpu(), self._ids.cpu(), int(self._steps)
        if ran > len(rows):
            raise RuntimeError(f"{ran} forwards for {len(rows)} steps: whose margins they are can't be told")
        steps = ran
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for step in range(self._read, steps):
            place = step % self.places
            kept.append((values[place, : rows[step]].clone(), ids[place, : rows[step]].clone()))
        self._read = steps
        return kept

    def hook(self, _module: Any, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Forward hook of the model; see `write`."""
        logits = output.logits[0]
        wanted = kwargs["logits_indices"]
        if logits.shape[0] != wanted.shape[0]:
            logits = logits[wanted]  # a model without logits_to_keep gives a row for every query token
        self.write(logits)
