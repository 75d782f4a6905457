"""Which backwards are to be synchronized: those of a graph that a synchronized forward made, or a part of it.

[Note: whose graph] A forward decides whether its backward is synchronized, and most backwards say so themselves: they pass a
tensor that the forward returned. Some do not: an auxiliary loss that the model keeps, a gradient penalty, which is built from
the graph by ``autograd.grad(create_graph=True)``. Others only look like them: a call of the bare module, a forward inside
``no_sync``. To tell these apart the graph itself is looked at. Autograd numbers its nodes as it makes them, so the numbers at
the beginning and at the end of a synchronized forward say which nodes are that forward's. A backward that has not passed an
output is looked at when it brings its first gradient: its roots are in the frame that runs the engine, and the graph below them
is searched for a node with such a number. Numbers fall along the edges of a graph, so the search ends where they become too
small.
"""

from __future__ import annotations

import bisect
import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from ..errors import UsageError, explain

_ENGINE = _engine_run_backward.__code__
_NUM_KEPT = 1024


def current_number() -> int:
    """Return the number that autograd gives the next node of this thread."""
    return int(torch.autograd._get_sequence_nr())


class Forwards:
    """The graphs that synchronized forwards have made, as ranges of autograd's numbers."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._task, self._is_ours = -1, False  # the backward that was looked at last, and what was found

    def add(self, start: int) -> None:
        """Take note that backwards through the nodes from this number up to now are to be synchronized."""
        end = current_number()
        if end > start:
            at = bisect.bisect(self._starts, start)  # another thread counts by itself
            self._starts.insert(at, start)
            self._ends.insert(at, end)
        if len(self._starts) > _NUM_KEPT:
            del self._starts[0], self._ends[0]

    def made_what_runs(self, name: str, rank: int) -> bool:
        """Tell whether the backward that runs now goes through a synchronized forward.

        Args:
            name: of the parameter to which it has brought a gradient, for the error.
            rank: of this process, for the error.

        Raises:
            UsageError: the roots of the backward are not found.
        """
        if not self._starts:
            return False
        task = torch._C._current_graph_task_id()
        if task != self._task:
            roots = _roots()
            if roots is None:
                what = "a gradient came by a backward of which it cannot be told whether it is to be averaged over the ranks"
                fix = "start it by torch.autograd.backward, from what a forward of the wrapper has returned"
                raise UsageError(explain(what, value=name, rank=rank, fix=fix))
            self._task, self._is_ours = task, any(self._reaches(root) for root in roots)
        return self._is_ours

    def _reaches(self, root: Any) -> bool:
        waiting, met = [root], {root}
        while waiting:
            node = waiting.pop()
            number = node._sequence_nr()
            at = bisect.bisect(self._starts, number) - 1
            if at >= 0 and number < self._ends[at]:
                return True
            if number < self._starts[0]:
                continue
            for below, _ in node.next_functions:
                if below is not None and below not in met:
                    met.add(below)
                    waiting.append(below)
        return False


def _roots() -> list[Any] | None:
    """Return the nodes from which the running backward began, and those of backwards around it; None if they are not found.

    On accelerators a backward runs in threads of the engine, while the frame is in the thread that called it.
    """
    for frame in (sys._getframe(), *sys._current_frames().values()):
        outputs: list[Any] = []
        each: FrameType | None = frame
        while each is not None:
            if each.f_code is _ENGINE:
                some = each.f_locals["t_outputs"]
                outputs += [some] if isinstance(some, Tensor) else some
            each = each.f_back
        if outputs:
            nodes = [output.grad_fn if isinstance(output, Tensor) else output.node for output in outputs]
            return [node for node in nodes if node is not None]
    return None
