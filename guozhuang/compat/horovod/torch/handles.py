"""The integer handles that asynchronous operations return and ``synchronize`` takes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable
from typing import Any, Final

from torch import Tensor

from guozhuang.errors import explain
from guozhuang.gradients.named import Handle, NegotiationError

from ..common.exceptions import HorovodInternalError

Finish = Callable[[list[Tensor], Handle], Any]
# After ``hvd.shutdown`` at most this many results are kept that ``synchronize`` has not fetched yet.
_NUM_KEPT: Final = 1000


class HandleTable:
    """Numbers the engine's handles, from 1, and finds them by their numbers. Thread-safe.

    A number is never used again in this process, also not after Horovod was shut down and initialised again.
    """

    def __init__(self) -> None:
        self._pending: dict[int, tuple[Handle, Finish]] = {}
        self._numbers = itertools.count(1)

    def add(self, handle: Handle, finish: Finish) -> int:
        """Return a number for ``handle``; ``finish`` turns the handle's outputs into the caller's result."""
        number = next(self._numbers)
        self._pending[number] = handle, finish
        return number

    def done(self, number: int) -> bool:
        """Return, without waiting, whether the operation with this number was completed or has failed.

        Raises:
            ValueError: the number is unknown, or was waited for before.
        """
        found = self._pending.get(number)
        if found is None:
            raise ValueError(explain("handle was not created here, or has been synchronized before", value=number))
        return found[0].done()

    def wait(self, number: int) -> Any:
        """Wait for the operation with this number, forget the number and return the result; None if the number is unknown.

        Raises:
            HorovodInternalError: it failed.
        """
        found = self._pending.pop(number, None)
        if found is None:
            return None
        handle, finish = found
        try:
            outputs = handle.wait()
        except NegotiationError as error:
            raise HorovodInternalError(str(error)) from error.__cause__  # not ``from error``, which has the same text
        return finish(outputs, handle)

    def settle(self, number: int) -> None:
        """Wait until the operation with this number was completed or has failed, without forgetting it or raising its error."""
        found = self._pending.get(number)
        if found is not None:
            with contextlib.suppress(NegotiationError):
                found[0].wait()

    def left(self) -> None:
        """Drop all but the newest results that were not fetched; called after a shutdown, when no operation is running.

        The tensors of failed operations are released.
        """
        for number in list(self._pending)[:-_NUM_KEPT]:
            self._pending.pop(number, None)
        for number, (handle, _) in list(self._pending.items()):
            if handle.has_ended:
                try:
                    handle.wait()
                except NegotiationError:
                    self._pending[number] = handle, lambda *_: None  # drops ``finish``, which holds tensors


table = HandleTable()


def poll(handle: int) -> bool:
    """Return at once whether an asynchronous operation has ended; if it has, ``synchronize`` will not wait.

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
        HorovodInternalError: it failed, on every rank that took part; the text says how the ranks differ. Or this rank
            has shut down Horovod while the operation was running.
    """
    return table.wait(handle)


def synchronize_all(handles: Iterable[int]) -> list[Any]:
    """Wait for all operations, also after one has failed, and return their results. None of them is running afterwards.

    Raises:
        HorovodInternalError: the error of the first operation that failed.
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
