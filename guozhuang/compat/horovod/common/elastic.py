"""Elastic training: a function that goes on after ranks were lost or came, from the state that was committed last.

[Note: elastic run] ``run_fn`` calls the user's function, again and again if need be::

    sync the state, unless everybody holds the same -> the function -> done
    a collective failed (``HorovodInternalError``)  -> back to the last commit ->  leave the world, enter the next one
    hosts came or went (``HostsUpdatedInterrupt``)  -> what is, stays          ->  leave the world, enter the next one

Under ``horovodrun`` with ``--host-discovery-script`` or ``--min-np`` a driver says who is in the next world
(``horovod.runner.elastic``). Elsewhere nobody can: under ``guozhuang run`` or torchrun the set of processes is the launcher's,
which starts *all* of them anew after a failure. So there the exception leaves ``run``, the process ends, and a script begins
again from its own checkpoints. Hosts never come or go there.

[Note: who may skip a sync] Ranks that stay after others only *went* hold the same state, and need no sync. But a sync is a
collective, and not all may have left the last world for the same reason. So each says what it would do, and all do what the
driver says: skip only if all may, and nobody is new.
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

_ONLY_REMOVED = 1  # HostUpdateResult.removed
_log = logging.getLogger("guozhuang")


class State(abc.ABC):
    """What training needs to go on, and when it was last known to be whole. Subclasses hold it.

    Args:
        bcast_object: brings an object from rank 0 to all.
        get_rank: the rank of this process.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object, self._rank = bcast_object, get_rank
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Call these each time the set of ranks has changed, after ``hvd.init()`` and before the state is synced.

        Args:
            callbacks: without arguments; for what depends on ``hvd.size()``, as a learning rate. On every rank the same.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The set of ranks has changed; ``run`` calls this."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Hosts came or went; noticed by the next ``check_host_updates``.

        Args:
            timestamp: when; later ones are larger.
            update_res: a ``HostUpdateResult``.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state as one to come back to, and look whether hosts came or went. Every rank must call, as often.

        It costs a copy of the state in memory, and two small broadcasts: call it as often as lost work would cost more.

        Raises:
            HostsUpdatedInterrupt: hosts came or went; on every rank.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Look whether hosts came or went, as rank 0 has heard. Every rank must call, as often.

        Raises:
            HostsUpdatedInterrupt: they have; on every rank. ``run`` takes it.
        """
        for timestamp, result in _heard(self._rank()):
            self.on_hosts_updated(timestamp, result)
        # What the others hear may be later or earlier: rank 0 decides, else some would leave the world and others not.
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
        """Keep the state as it is, to come back to it."""

    @abc.abstractmethod
    def restore(self) -> None:
        """Come back to what was saved last."""

    @abc.abstractmethod
    def sync(self) -> None:
        """Take over the state of rank 0, and save it. Every rank must call."""

    def reset(self) -> None:  # noqa: B027 - most states have nothing that depends on it
        """The set of ranks has changed: make anew what depends on it. Called before the reset callbacks."""


class ObjectState(State):
    """Plain attributes: numbers, lists, whatever can be pickled.

    Args:
        bcast_object: brings an object from rank 0 to all.
        get_rank: the rank of this process.
        **kwargs: names and first values; they become attributes.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = dict(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._saved_state = self._copied()

    if TYPE_CHECKING:  # its attributes are what it was given

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    def save(self) -> None:
        """Keep copies of the attributes that were given names at the start."""
        self._saved_state = self._copied()

    def restore(self) -> None:
        """Set them back to copies of what was kept."""
        for name, value in copy.deepcopy(self._saved_state).items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Take over the attributes of rank 0 *as they are*, and keep copies. Every rank must call.

        Horovod takes over those that rank 0 has saved, which fit models and optimizers (synced as they are) only after a
        commit or a restore.
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
    """Wrap a training function, whose first argument is a ``State``. See [Note: elastic run].

    Args:
        func: to be called as ``func(state, ...)``; again after each change, with the same arguments.
        reset: leaves the world and enters the next one.

    Returns:
        The function that does this. Every rank must call it.
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
    """Enter the next world; whether everybody in it may skip the sync. See [Note: who may skip a sync].

    One that breaks before it is whole is left for the next by ``init``, which then tells the driver that a sync is needed.
    """
    membership = _membership()
    membership.may_skip_sync = may_skip_sync
    reset()
    return membership.current is not None and membership.current.may_skip_sync


def _has_state() -> None:
    """This process has what has been trained; without a driver nobody wants to know."""
    if elastic_variables.driver() is not None:
        _membership().has_state = True


def _heard(rank: int) -> list[tuple[float, int]]:
    """What rank 0 has heard from the driver since it was asked last; the others need not ask."""
    if rank != 0 or elastic_variables.driver() is None:
        return []
    return [(each.timestamp, int(each.result)) for each in _membership().updates()]


def _membership() -> Membership:
    from guozhuang.compat.horovod.runner.elastic import worker

    found = worker.membership()
    assert found is not None, "there is a driver"
    return found
