"""Reports of the reference, which one rank has, on all ranks that hold the model together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .noise import Noise, ReferencePair, dense
from .reference import ReferenceReport


class Reports:
    """Hands reports on. Every rank must make the same calls.

    Args:
        group: the ranks that hold one copy of the model; the first one has the reference.
        copies: the ranks that hold the same parts of other copies; None: there is one copy.
    """

    def __init__(self, group: dist.ProcessGroup, copies: dist.ProcessGroup | None) -> None:
        self._group, self._copies = group, copies
        self._full: ReferenceReport | None = None

    def forget(self) -> None:
        """Let go of the last report."""
        self._full = None

    def next(self, references: ReferencePair | None, event: str) -> tuple[ReferenceReport | None, str]:
        """Return the next report, with shapes and dtypes in the place of its tensors; or None, and why there is none.

        Args:
            references: on the first rank.
            event: what the report is to be of.
        """
        told: list[Any] = [None]
        self._full = None
        if self._group.rank() == 0:
            assert references is not None
            self._full = full = self._of_copies(references.next())
            forms: dict[str, Any] = {
                table: {key: None if each is None else (each.shape, each.dtype) for key, each in tensors.items()}
                for table, tensors in (("gradients", full.gradients), ("values", full.values))
            }
            told = [replace(full, **forms)]
        dist.broadcast_object_list(told, group=self._group, group_src=0)
        report: ReferenceReport = told[0]
        if report.event == event:
            return report, ""
        return None, report.why or f"the script of one process goes another way ({report.event} in place of {event})"

    def noise(self, references: ReferencePair | None) -> Noise:
        """Return how much what the last report tells depends on rounding; nothing, if that cannot be known.

        Args:
            references: on the first rank.
        """
        told: list[Any] = [None if references is None else references.noise()]
        dist.broadcast_object_list(told, group=self._group, group_src=0)
        found: Noise = told[0]
        return found

    def tensor(
        self, report: ReferenceReport, table: str, key: tuple[int, str], *, is_mean: bool = False
    ) -> Tensor | None:
        """Return a tensor of the last report.

        Args:
            report: the last one.
            table: "gradients" or "values".
            key: the number of the model, and the name of the parameter.
            is_mean: it is to be the mean over the copies of the model.
        """
        form: Any = getattr(report, table)[key]
        if form is None:
            return None
        shape, dtype = form
        if self._full is not None:
            tensor = dense(getattr(self._full, table)[key]).contiguous()
            if is_mean and self._copies is not None:
                tensor = tensor.clone()
                dist.all_reduce(tensor, group=self._copies)
                tensor /= self._copies.size()
        else:
            tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            dist.broadcast(tensor, group=self._group, group_src=0)
        return tensor

    def _of_copies(self, report: ReferenceReport) -> ReferenceReport:
        """Return a report that is of the same event, and has the same gradients, for all copies of the model."""
        if self._copies is None:
            return report
        forms = {key: (each.shape, each.dtype) for key, each in report.gradients.items() if each is not None}
        everyones: list[Any] = [None] * self._copies.size()
        dist.all_gather_object(everyones, (report.event, report.why, forms), group=self._copies)
        if any(event != report.event for event, _, _ in everyones):
            why = next((why for event, why, _ in everyones if event == "left"), "copies of the model go different ways")
            return ReferenceReport("left", why=why)
        for _, _, theirs in everyones:
            for key, (shape, dtype) in theirs.items():
                if report.gradients.get(key) is None:
                    report.gradients[key] = torch.zeros(shape, dtype=dtype)
        return report
