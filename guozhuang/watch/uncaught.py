"""Uncaught errors of a rank: how they are shown, and what the reports of other ranks say of them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from guozhuang.errors import WorldError
from guozhuang.watch import report, stacks

if TYPE_CHECKING:
    from guozhuang.watch.heartbeat import Heartbeat


class UncaughtErrors:
    """Shows uncaught errors of a rank from now on, until ``leave_alone``.

    Args:
        heartbeat: that of this rank.
        stop: called with an error of gloo: leaves the heartbeat, which waits for the report of the ranks that are lost.
    """

    def __init__(self, heartbeat: Heartbeat, stop: Callable[[BaseException], None]) -> None:
        self._heartbeat, self._stop, self._is_over = heartbeat, stop, False
        self._show, self._show_of_thread = sys.excepthook, threading.excepthook
        sys.excepthook, threading.excepthook = self.show, self.show_of_thread

    def leave_alone(self) -> None:
        """Put back what showed errors before; where the script has put something else in the place since, pass errors on."""
        self._is_over = True
        if sys.excepthook == self.show:
            sys.excepthook = self._show
        if threading.excepthook == self.show_of_thread:
            threading.excepthook = self._show_of_thread

    def show(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Show an error of gloo as one sentence, below Python's own frames; and others as they are."""
        if not self._is_over and stacks.is_of_gloo(error):
            self._stop(error)
            kind, error = WorldError, report.in_a_sentence(error, self._heartbeat.rank, self._heartbeat.lost())
        self._show(kind, error, trace)

    def show_of_thread(self, ended: threading.ExceptHookArgs) -> None:
        """Show the error that ended a thread, and have reports name the two: other ranks may wait for that thread's work."""
        if not self._is_over and ended.exc_value is not None and not isinstance(ended.exc_value, SystemExit):
            name = ended.thread.name if ended.thread is not None else "?"
            self._heartbeat.note_dead_thread(name, ended.exc_value)
        self._show_of_thread(ended)
