"""Decides which backwards average gradients over the ranks: those through a graph that a synchronized forward made.

[Note: whose graph] A forward decides whether its backward is synchronized. Most backwards are easy to recognize: they pass a
tensor that the forward returned. Some do not: an auxiliary loss that the model keeps, a gradient penalty, which is built from
the graph by ``autograd.grad(create_graph=True)``. Others only look like them: a call of the bare module, a forward inside
``no_sync``. To tell these apart the graph itself is searched. Autograd numbers its nodes as it makes them, so the numbers at
the beginning and at the end of a synchronized forward say which nodes are that forward's. A backward that has not passed an
output is examined at its first gradient: its roots are in the stack frame that runs autograd's engine, and the graph below
them is searched for a node with such a number. Numbers fall along the edges of a graph, so the search ends where they become
too small.
"""

from __future__ import annotations

import bisect
import dataclasses
import sys
import types
from collections import deque
from collections.abc import Mapping, Set
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward

from ..errors import UsageError, explain

_ENGINE = _engine_run_backward.__code__
_NUM_KEPT = 1024


def current_number() -> int:
    """Return the sequence number that autograd will give to the next node that this thread makes."""
    return int(torch.autograd._get_sequence_nr())


class Forwards:
    """The graphs whose backwards average gradients over the ranks, as ranges of the numbers that autograd gives to nodes."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._task, self._is_ours = -1, False  # the backward that was examined last, and whether it averages gradients

    def add(self, start: int) -> None:
        """Record that backwards through autograd nodes numbered from ``start`` up to now average gradients over the ranks."""
        end = current_number()
        if end > start:
            at = bisect.bisect(self._starts, start)  # not always at the end: each thread numbers its own nodes
            self._starts.insert(at, start)
            self._ends.insert(at, end)
        if len(self._starts) > _NUM_KEPT:
            del self._starts[0], self._ends[0]

    def made_what_runs(self, name: str, rank: int) -> bool:
        """Return whether the running backward averages gradients: whether it goes through the graph of a recorded forward.

        Args:
            name: name of the parameter that has just got a gradient, for the error.
            rank: rank of this process, for the error.

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
    """Return the nodes from which the running backward and backwards around it began; None if they are not found.

    They are read from stack frames of all threads: on accelerators a backward runs in threads of autograd's engine, while the
    frame with its roots belongs to the thread that called ``backward``.
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


_PLAIN = (str, bytes, int, float, bool, complex, type(None))
# Objects that an output may refer to but that hold no results of this forward: a module would lead through the whole model,
# and a function or a class to every object of the program.
_NO_OUTPUTS = (
    *(nn.Module, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType),
    *(types.CodeType, types.FrameType),
)


def tensors_with_graph(output: object) -> list[Tensor]:
    """Return those of :func:`leaves_of` that backward can start from: the tensors with a ``grad_fn``, each once."""
    found = {id(leaf): leaf for leaf in leaves_of(output) if isinstance(leaf, Tensor) and leaf.grad_fn is not None}
    return list(found.values())


def leaves_of(output: object) -> list[Any]:
    """Return the tensors, numbers and texts in ``output``, in order; and None for each object that is not searched.

    Searches tuples, lists, sets, mappings, dataclasses, and the attributes of any other object (such as a model's own class
    of results), but not modules, functions and classes. An object that is met twice is searched once.
    """
    found: list[Any] = []
    met: dict[int, object] = {}  # keeps the objects alive: the id of a deleted object may be reused
    waiting: list[Any] = [output]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (Tensor, *_PLAIN)):
            found.append(value)
        elif isinstance(value, _NO_OUTPUTS) or id(value) in met:
            found.append(None)
        else:
            met[id(value)] = value
            waiting.extend(reversed(_inside(value)))
    return found


def _inside(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (tuple, list, Set, deque)):
        return list(value)
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return list(getattr(value, "__dict__", {}).values())
