"""Elastic training: a training function continues from the last committed state after ranks were lost or added.

[Note: elastic run] ``run_fn`` calls the user's function, and calls it again after each change::

    sync the state, unless all ranks hold the same           ->  call the function        ->  done
    a collective failed (``HorovodInternalError``)           ->  restore the last commit  ->  leave the world, enter the next
    hosts were added or removed (``HostsUpdatedInterrupt``)  ->  keep the present state   ->  leave the world, enter the next

Under ``horovodrun`` with ``--host-discovery-script`` or ``--min-np`` a driver decides which ranks are in the next world
(``horovod.runner.elastic``). Without a driver the set of processes is fixed: after a failure ``guozhuang run`` and torchrun
restart *all* of them. So there the exception leaves ``run``, the process ends, and the restarted script resumes from its own
checkpoints. Hosts are never added or removed there.

[Note: who may skip a sync] Ranks that remain after others were only *removed* hold the same state, and need no sync. But a sync
is a collective, and ranks may have left the last world for different reasons. So each rank reports to the driver whether it may
skip, and all follow the driver's decision: skip only if all may, and no rank is new.
"""

from __future__ import annotations

import abc
import copy
import functools
import logging
import queue
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from guozhuang.compat.horovod.common import elastic_variables

from .exceptions import HorovodInternalError, HostsUpdatedInterrupt

if TYPE_CHECKING:
    from guozhuang.compat.horovod.runner.elastic.worker import Membership

_ONLY_REMOVED = 1  # equals ``HostUpdateResult.removed``, whose module is not imported here
_log = logging.getLogger("guozhuang")


class State(abc.ABC):
    """The state of an elastic training. Subclasses save and restore it; this base class checks for added and removed hosts.

    Args:
        bcast_object: broadcasts an object from rank 0 and returns it on every rank.
        get_rank: returns the rank of this process.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object, self._rank = bcast_object, get_rank
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Register functions to call each time the ranks have changed, after ``hvd.init()`` and before the state is synced.

        Args:
            callbacks: functions without arguments, the same on every rank; to adapt values that depend on ``hvd.size()``, such
                as a learning rate.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Adapt the state to a changed set of ranks by ``reset`` and the callbacks. ``hvd.elastic.run`` calls this."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Record that hosts were added or removed, for the next ``check_host_updates``.

        Args:
            timestamp: the time of the change; later changes have larger ones.
            update_res: a ``HostUpdateResult``.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state to return to after a failure, and check for changed hosts. All ranks must call it equally often.

        It costs a copy of the state in memory, and two small broadcasts; work since the last commit is lost after a failure.

        Raises:
            HostsUpdatedInterrupt: hosts were added or removed; on every rank.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Check whether rank 0 has learned of added or removed hosts. All ranks must call it equally often.

        Raises:
            HostsUpdatedInterrupt: hosts were added or removed; on every rank. ``run`` handles it.
        """
        for timestamp, result in _heard(self._rank()):
            self.on_hosts_updated(timestamp, result)
        # Ranks may learn of a change at different times. Rank 0 decides for all, so that all leave the world together.
        before, newest, all_updates = self._last_updated_timestamp, self._last_updated_timestamp, 0
        while not self._host_messages.empty():
            timestamp, result = self._host_messages.get()
            if timestamp > newest:
                newest, all_updates = timestamp, all_updates | int(result)
        before, self._last_updated_timestamp, all_updates = self._bcast_object((before, newest, all_updates))
        if self._last_updated_timestamp > before:
            raise HostsUpdatedInterrupt(all_updates == _ONLY_REMOVED)

    @abc.abstractmethod
    def save(self) -> None:
        """Keep a copy of the present state, for ``restore``."""

    @abc.abstractmethod
    def restore(self) -> None:
        """Set the state back to the copy that was saved last."""

    @abc.abstractmethod
    def sync(self) -> None:
        """Replace the state by that of rank 0, and save it. Every rank must call this."""

    def reset(self) -> None:  # noqa: B027 - most states have nothing that depends on it
        """Rebuild the parts of the state that depend on the set of ranks, which has changed. Called before reset callbacks."""


class ObjectState(State):
    """The state of an elastic training as plain attributes: numbers, lists, any objects that can be pickled.

    Args:
        bcast_object: broadcasts an object from rank 0 and returns it on every rank.
        get_rank: returns the rank of this process.
        **kwargs: names and first values of the attributes.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = dict(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._saved_state = self._copied()

    if TYPE_CHECKING:  # for type checkers, since a state's attributes are named at run time only

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    def save(self) -> None:
        """Keep copies of the attributes that were named in the constructor."""
        self._saved_state = self._copied()

    def restore(self) -> None:
        """Set the attributes to copies of the saved values."""
        for name, value in copy.deepcopy(self._saved_state).items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Broadcast the *present* attributes of rank 0, and save them. Every rank must call this.

        Horovod broadcasts the ones that rank 0 has saved. These match the models and optimizers, whose present values are
        synced, only right after a commit or a restore.
        """
        if self._saved_state:
            for name, value in self._bcast_object(self._present()).items():
                setattr(self, name, value)
        self.save()

    def _present(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}

    def _copied(self) -> dict[str, Any]:
        return copy.deepcopy(self._present())


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """Wrap a training function so that it is called again after each change of the ranks. See [Note: elastic run].

    Args:
        func: called as ``func(state, ...)`` with a ``State``, and again with the same arguments after each change.
        reset: leaves the world and enters the next one.

    Returns:
        The wrapped function. Every rank must call it.
    """

    @functools.wraps(func)
    def run(state: State, *args: Any, **kwargs: Any) -> Any:
        has_driver = elastic_variables.driver() is not None
        if not has_driver and state._rank() == 0:
            _log.warning(
                "hvd.elastic.run without an elastic driver (horovodrun --host-discovery-script or --min-np): hosts cannot come "
                "or go, and after a failed collective this process ends, for its launcher to start all ranks again"
            )
        skip_sync = is_back = False
        while True:
            try:
                if is_back:
                    state.on_reset()
                if not skip_sync:
                    state.sync()
                    _has_state()
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                if not has_driver:
                    raise
                _log.warning("going back to the last commit: %s", error)
                may_skip_sync = False
                state.restore()
            except HostsUpdatedInterrupt as interrupt:
                if not has_driver:
                    raise
                may_skip_sync = interrupt.skip_sync
            skip_sync, is_back = _come_back(reset, may_skip_sync), True

    return run


def _come_back(reset: Callable[[], None], may_skip_sync: bool) -> bool:
    """Enter the next world; return whether all its ranks may skip the sync of the state. See [Note: who may skip a sync].

    If a rank is lost before that world is complete, ``init`` joins the one after it, and reports that a sync is needed.
    """
    membership = _membership()
    membership.may_skip_sync = may_skip_sync
    reset()
    return membership.current is not None and membership.current.may_skip_sync


def _has_state() -> None:
    """Record, for the next report to the elastic driver if there is one, that this process holds the trained state."""
    if elastic_variables.driver() is not None:
        _membership().has_state = True


def _heard(rank: int) -> list[tuple[float, int]]:
    """Return the changes of hosts that the driver has reported since the last call; an empty list on ranks other than 0."""
    if rank != 0 or elastic_variables.driver() is None:
        return []
    return [(each.timestamp, int(each.result)) for each in _membership().updates()]


def _membership() -> Membership:
    from guozhuang.compat.horovod.runner.elastic import worker

    found = worker.membership()
    assert found is not None, "there is a driver"
    return found
