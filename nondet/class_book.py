"""Results sorted into classes of equal bits, by the comparisons of `nondet.compare` and no other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import torch

from nondet.compare import bits, difference, identical, raw_equal, same
from nondet.result import Difference

__all__ = ["ClassBook"]

_TOGETHER = 2**22  # elements of classes that are compared before anybody looks


class ClassBook:
    """Sorts results into classes of equal bits, numbered by first appearance.

    One representative a class is kept on the device; a new result is compared with the class of its predecessor first,
    since sweeps change class rarely.
    """

    def __init__(self) -> None:
        self.representatives: list[torch.Tensor] = []
        self.labels: list[int] = []
        self._patterns: list[torch.Tensor] = []

    def add(self, result: torch.Tensor) -> int:
        """Label one result.

        Raises:
            ValueError: its shape or dtype is not that of the results before it.
        """
        if self.representatives:
            first = self.representatives[0]
            if first.shape != result.shape or first.dtype != result.dtype:
                got = f"{tuple(first.shape)} {first.dtype} against {tuple(result.shape)} {result.dtype}"
                raise ValueError(f"variants are not comparable: {got}")
        last = self.labels[-1] if self.labels else -1
        if self.labels and raw_equal(self.representatives[last], result):  # mostly: no pattern need be made
            self.labels.append(last)
            return last
        pattern = bits(result)
        known = self._known(pattern)
        if known is not None:
            self.labels.append(known)
            return known
        self.representatives.append(result.detach().clone())
        self._patterns.append(pattern.clone())
        self.labels.append(len(self._patterns) - 1)
        return self.labels[-1]

    def _known(self, pattern: torch.Tensor) -> int | None:
        """The class that has this pattern: some are asked at once, since each answer is waited for."""
        each = max(1, _TOGETHER // max(1, pattern.numel()))
        for start in range(0, len(self._patterns), each):
            some = self._patterns[start : start + each]
            answers = torch.stack([(x == pattern).all() for x in some]).tolist()
            if True in answers:
                return start + answers.index(True)
        return None

    def add_many(self, results: torch.Tensor) -> list[int]:
        """Label each slice of `results` along its first axis, in one pass on the device.

        Args:
            results: [n, ...]; each of the n slices is one result.
        """
        if self.labels:
            return [self.add(r) for r in results]
        pattern = bits(results)
        if pattern.numel() == 0:  # torch.unique refuses empty slices; they are all alike
            return [self.add(r) for r in results]
        pattern = pattern.reshape(results.shape[0], -1)
        # mostly all are alike: that is one comparison, while torch.unique sorts whole slices
        differs = (pattern != pattern[:1]).any(1)
        inverse = torch.zeros(results.shape[0], dtype=torch.int64, device=results.device)
        if bool(differs.any()):
            inverse[differs] = torch.unique(pattern[differs], dim=0, return_inverse=True)[1] + 1
        order: dict[int, int] = {}
        for i, group in enumerate(inverse.tolist()):
            if group not in order:
                order[group] = len(order)
                self.representatives.append(results[i].detach().clone())
                self._patterns.append(bits(results[i]).clone())
            self.labels.append(order[group])
        return list(self.labels)

    def come_again(self, results: torch.Tensor, labels: Sequence[int]) -> bool:
        """Whether each slice of `results` has the bits of the class that its label names: one answer for all.

        Raises:
            ValueError: they have another shape or dtype than what was labelled.
        """
        if len(results) != len(labels):
            return False
        kinds = list(dict.fromkeys(labels))
        answers = []
        for label in kinds:
            expected = self.representatives[label]
            some = results if len(kinds) == 1 else _slices(results, [i for i, at in enumerate(labels) if at == label])
            if some.shape[1:] != expected.shape:
                raise ValueError(f"not comparable: {tuple(some.shape[1:])} against {tuple(expected.shape)}")
            if len(kinds) == 1:
                return identical(some, expected.expand_as(some))
            answers.append(same(some, expected.expand_as(some)).all())
        return not answers or bool(torch.stack(answers).all())

    @property
    def sizes(self) -> list[int]:
        """Results in each class."""
        counts = [0] * len(self.representatives)
        for label in self.labels:
            counts[label] += 1
        return counts

    def widest_difference(self) -> Difference | None:
        """The largest difference of any class from the first: by NaN or infinite, by ULP, by mismatched elements."""
        if not self.representatives:
            return None
        first, *others = self.representatives
        differences: Iterable[Difference] = [
            msgspec.structs.replace(difference(first, x), label=label) for label, x in enumerate(others, 1)
        ] or [difference(first, first)]
        return max(differences, key=lambda d: (d.nonfinite, d.max_ulp, d.mismatched))


def _slices(x: torch.Tensor, places: list[int]) -> torch.Tensor:
    """Slices of x along its first axis; float8 is picked from as bytes, since it has no indexing everywhere."""
    return x.view(torch.uint8)[places].view(x.dtype) if x.element_size() == 1 else x[places]
