"""Results sorted into classes of equal bits, by the comparisons of `nondet.compare` and no other."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from nondet.compare import agreement, bits, difference, looked_at, raw_equal, same, sizes_of_differences
from nondet.result import Difference

__all__ = ["ClassBook"]

_TOGETHER = 2**22  # elements of classes that are compared before anybody looks
_KEPT_BYTES = 2**26  # of results that wait on a GPU to be compared with one look
_MATRIX = {"cpu": 2**20, "cuda": 2**31}  # elements, to compare each of some results with each


class ClassBook:
    """Sorts results into classes of equal bits, numbered by first appearance.

    One representative a class is kept on the device; a new result is compared with the class of its predecessor first,
    since sweeps change class rarely.
    """

    def __init__(self) -> None:
        self.representatives: list[torch.Tensor] = []
        self.labels: list[int] = []
        self._patterns: list[torch.Tensor] = []
        self._waiting: list[torch.Tensor] = []
        self._waiting_bytes = 0

    def add_later(self, result: torch.Tensor) -> None:
        """Label one result by the time of `settle`: a GPU goes on meanwhile. It is copied; its owner may write to it.

        Raises:
            ValueError: as `add`.
        """
        if not _is_slow_to_ask(result):
            self.add(result)
            return
        self._check(result)
        self._waiting.append(result.detach().clone())
        self._waiting_bytes += result.numel() * result.element_size()
        if self._waiting_bytes > _KEPT_BYTES:
            self.settle()

    def settle(self) -> None:
        """Label what waits."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        self.add_each(waiting)

    def add_each(self, results: Sequence[torch.Tensor]) -> None:
        """As `add` of one after the other, with few looks: mostly all are alike, which one look tells.

        Raises:
            ValueError: as `add`.
        """
        rest = list(results)
        if rest and not self.labels:
            self.add(rest.pop(0))
        for result in rest:
            self._check(result)
        if rest:
            last = self.labels[-1]
            flags = looked_at([agreement(self.representatives[last], result) for result in rest])
            alike = (*flags, False).index(False)
            self.labels += [last] * alike
            rest = rest[alike:]
        work = len(rest) * (len(rest) + len(self._patterns)) * self.representatives[0].numel() if rest else 0
        if len(rest) > 1 and work <= _MATRIX["cuda" if rest[0].is_cuda else "cpu"]:
            self._add_matrix(rest)
            return
        for result in rest:
            self.add(result)

    def _add_matrix(self, results: Sequence[torch.Tensor]) -> None:
        """Each with each, and with every class: one look."""
        patterns = [bits(result) for result in results]
        together = torch.stack(patterns).reshape(len(patterns), patterns[0].numel())
        known = len(self._patterns)
        rows = [(together == pattern.flatten()).all(1) for pattern in (*self._patterns, *patterns)]
        equal: list[list[bool]] = torch.stack(rows).tolist()
        labels: list[int] = []
        for i, result in enumerate(results):
            label = next((k for k in range(known) if equal[k][i]), None)
            if label is None:
                label = next((labels[j] for j in range(i) if equal[known + j][i]), None)
            if label is None:
                label = len(self.representatives)
                self.representatives.append(result.detach().clone())
                self._patterns.append(patterns[i].clone())
            labels.append(label)
        self.labels += labels

    def _check(self, result: torch.Tensor) -> None:
        first = next((x[0] for x in (self.representatives, self._waiting) if x), result)
        if first.shape != result.shape or first.dtype != result.dtype:
            got = f"{tuple(first.shape)} {first.dtype} against {tuple(result.shape)} {result.dtype}"
            raise ValueError(f"variants are not comparable: {got}")

    def add(self, result: torch.Tensor) -> int:
        """Label one result.

        Raises:
            ValueError: its shape or dtype is not that of the results before it.
        """
        self.settle()
        self._check(result)
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
        self.settle()
        if self.labels or results.numel() == 0:  # torch.unique refuses empty slices; they are all alike
            begin = len(self.labels)
            last = self.representatives[self.labels[-1]] if self.labels else None
            fits = last is not None and last.shape == results.shape[1:] and last.dtype == results.dtype
            if fits and bool(self.come_again(results, [self.labels[-1]] * len(results))):
                self.labels += [self.labels[-1]] * len(results)
            else:
                self.add_each(list(results))
            return self.labels[begin:]
        pattern = bits(results)
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

    def come_again(self, results: torch.Tensor, labels: Sequence[int]) -> torch.Tensor:
        """Whether each slice of `results` has the bits of the class that its label names: one answer for all.

        A bool tensor, for `nondet.compare.looked_at`.

        Raises:
            ValueError: they have another shape or dtype than what was labelled.
        """
        if len(results) != len(labels):
            return torch.tensor(False)
        kinds = list(dict.fromkeys(labels))
        answers = []
        for label in kinds:
            expected = self.representatives[label]
            some = results if len(kinds) == 1 else _slices(results, [i for i, at in enumerate(labels) if at == label])
            if some.shape[1:] != expected.shape:
                raise ValueError(f"not comparable: {tuple(some.shape[1:])} against {tuple(expected.shape)}")
            if len(kinds) == 1:
                return agreement(some, expected.expand_as(some))
            answers.append(same(some, expected.expand_as(some)).all())
        return torch.stack(answers).all() if answers else torch.tensor(True)

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
        if not others:
            return Difference(mismatched=0, compared=self._patterns[0].numel(), max_abs=0.0, max_ulp=0)
        sizes = sizes_of_differences(first, others) if len(others) > 1 else [(0.0, 0.0, 0.0)]
        widest = max(range(len(others)), key=sizes.__getitem__)
        return msgspec.structs.replace(difference(first, others[widest]), label=widest + 1)


def _is_slow_to_ask(x: torch.Tensor) -> bool:
    """Does a look at x wait for a device?"""
    return x.is_cuda


def _slices(x: torch.Tensor, places: list[int]) -> torch.Tensor:
    """Slices of x along its first axis; float8 is picked from as bytes, since it has no indexing everywhere."""
    return x.view(torch.uint8)[places].view(x.dtype) if x.element_size() == 1 else x[places]
