"""Integers for what is under way: what asynchronous operations return, and ``synchronize`` takes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from guozhuang.errors import explain
from guozhuang.gradients.named import Handle, NegotiationError

from ..common.exceptions import HorovodInternalError

Finish = Callable[[list[Tensor], Handle], Any]
# Of what nobody has waited for when the world is left.
_NUM_KEPT: Final = 1000


@dataclass(slots=True)
class _Pending:
    """A handle of the engine, and how its outputs become what the caller is given."""

    handle: Handle
    finish: Finish


class HandleTable:
    """Numbers, from 1, for handles of the engine. May be used from several threads.

    A number stands for one operation as long as the process lives, also in worlds that are entered later.
    """

    def __init__(self) -> None:
        self._pending: dict[int, _Pending] = {}
        self._numbers = itertools.count(1)

    def add(self, handle: Handle, finish: Finish) -> int:
        """Return a number for ``handle``; ``finish`` makes of its outputs what the caller is given."""
        number = next(self._numbers)
        self._pending[number] = _Pending(handle, finish)
        return number

    def done(self, number: int) -> bool:
        """Tell, without waiting, whether it has ended, well or not.

        Raises:
            ValueError: the number is unknown, or was waited for before.
        """
        found = self._pending.get(number)
        if found is None:
            raise ValueError(explain("handle was not created here, or has been synchronized before", value=number))
        return found.handle.done()

    def wait(self, number: int) -> Any:
        """Return the result when it is there, and forget the number; None where that is unknown.

        Raises:
            HorovodInternalError: it failed.
        """
        found = self._pending.pop(number, None)
        if found is None:
            return None
        try:
            outputs = found.handle.wait()
        except NegotiationError as error:
            raise HorovodInternalError(str(error)) from error.__cause__  # the same words once
        return found.finish(outputs, found.handle)

    def left(self) -> None:
        """The world was left, and nothing is under way: keep how the newest operations ended, and forget the others.

        Of what failed the tensors are let go of.
        """
        for number in list(self._pending)[:-_NUM_KEPT]:
            self._pending.pop(number, None)
        for each in list(self._pending.values()):
            if each.handle.has_ended:
                try:
                    each.handle.wait()
                except NegotiationError:
                    each.finish = _nothing


def _nothing(outputs: list[Tensor], handle: Handle) -> None:
    """What becomes of an operation that failed: never called."""


table = HandleTable()


def poll(handle: int) -> bool:
    """Tell, without waiting, whether an asynchronous operation has ended; then ``synchronize`` will not wait.

    Raises:
        ValueError: the handle is unknown, or was synchronized before.
    """
    return table.done(handle)


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous operation and return its result; the handle is forgotten.

    Args:
        handle: from one of the ``_async`` functions. A handle that is unknown, or was synchronized before, gives None.

    Returns:
        The tensor; a list of them for grouped operations; (output, received_splits) for an all-to-all.

    Raises:
        HorovodInternalError: it failed, on every rank that took part; the text says which ranks differ in what. Or this rank
            has left the world while it was under way.
    """
    return table.wait(handle)


def synchronize_all(handles: Iterable[int]) -> list[Any]:
    """Wait for all of them, whatever becomes of each, and return their results. Nothing of them is under way afterwards.

    Raises:
        HorovodInternalError: the first one that failed.
    """
    results: list[Any] = []
    first: HorovodInternalError | None = None
    for handle in handles:
        try:
            results.append(synchronize(handle))
        except HorovodInternalError as error:
            first = first or error
    if first is not None:
        raise first
    return results
