"""A process group whose ranks change while it lives, by the interface that torch.distributed has for this from 2.14 on.

    dist.init_process_group("shm", enable_reconfigure=True)
    handle = dist._get_reconfigure_handle()     # a text; the ranks-to-be exchange theirs by whatever way they have
    dist._reconfigure(uuid, handles).wait()     # the place of a handle in the list is the rank of the process that made it

Each change makes a group of its own for the ranks of that change, to which this group hands its calls.

[Note: which change a call belongs to] A handle holds the card of a socket on which its process waits for the ranks of one
change (rendezvous.py), so ranks on one node connect without another exchange; each try makes a new one. The secrets of the
cards are mixed with the ``uuid`` and all handles of the change, so that only ranks that make the same change connect. The
first rank to come writes their digest under the ``uuid`` in the store: a ``uuid`` that was used before is refused on every
rank at once.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from typing_extensions import override

from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.groups import roll_call
from guozhuang.groups.base import OwnBackend
from guozhuang.groups.forwarding import ForwardingGroup
from guozhuang.groups.serial import CallWork
from guozhuang.groups.shared_memory.engine import native_built
from guozhuang.groups.shared_memory.process_group import SharedMemoryGroup, own_note
from guozhuang.groups.shared_memory.rendezvous import Card, Listener

_BACKLOG = 1024  # the most connections of other ranks that wait while this rank has not begun the change
_FIX = "exchange the texts that _get_reconfigure_handle returns now, and give all ranks the same list"


class ReconfigureError(UsageError, RuntimeError):
    """A change of a group's ranks that cannot work. Also a RuntimeError, which PyTorch's own backends raise here."""


class ReconfigureHandle(NamedTuple):
    """What one process tells the others for a change; ``str`` and ``read`` turn it into a text and back.

    Attributes:
        is_built: whether the C part of the shared-memory group was built in that process.
        card: by which the other processes of its node connect to it.
    """

    is_built: bool
    card: Card

    def __str__(self) -> str:
        return f"shm:{int(self.is_built)}:{self.card}"

    @classmethod
    def read(cls, text: str) -> ReconfigureHandle:
        """Return the handle that ``str`` turned into this text; raise ReconfigureError for another text."""
        try:
            name, is_built, card = text.split(":", 2)
            if name != "shm":
                raise ValueError(name)
            return cls(bool(int(is_built)), Card.read(card))
        except ValueError as error:
            raise ReconfigureError(explain('no handle of an "shm" group', value=text, fix=_FIX)) from error


class ReconfigurableGroup(OwnBackend, ForwardingGroup):
    """A process group whose ranks are chosen by ``reconfigure``, any number of times; it has none before the first.

    Constructing it is not collective. Ranks that are gone take no part in a change, nor do ranks that are left out. Collectives
    that have not ended by then raise after the change. If a change fails, the group stays as it was; all ranks then exchange
    new handles.

    Args:
        store: a store that this group alone uses, the same for all processes that may ever join.
        rank: this process's rank until the first change.
        size: the number of ranks until the first change.
        timeout: the limit of each collective, and of a change that has no limit of its own.
    """

    supports_reconfigure = True

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: datetime.timedelta,
    ) -> None:
        super().__init__(rank, size, "shm")
        self._store, self._timeout = store, timeout
        self._listener: Listener | None = None
        self._group: Any = None
        self._lacks = "it has no ranks yet: call torch.distributed._reconfigure first"

    def get_reconfigure_handle(self) -> str:
        """Return the text by which other processes name this one in the next change. Not collective."""
        if self._listener is None:
            self._listener = Listener(self._rank, own_note(), _BACKLOG)
        return str(ReconfigureHandle(native_built(), self._listener.card))

    def reconfigure(self, opts: Any) -> dist.Work:
        """Make the processes of these handles the ranks of the group. All of them must call it, and no other process.

        Args:
            opts: torch.distributed's ``ReconfigureOptions``: ``uuid``, new for every change; ``handles``, one for each rank,
                by rank in a list, while a set is sorted; ``timeout``, the limit of the change, None for the group's own.

        Returns:
            A work that is done.

        Raises:
            ReconfigureError: the handles or the uuid cannot work.
            PeerLost: a rank ended, or failed, during the change.
            WorldError: ranks did not come in time; the text names them.
        """
        texts = list(opts.handles) if isinstance(opts.handles, Sequence) else sorted(opts.handles)
        handles = [ReconfigureHandle.read(text) for text in texts]
        mine = self.get_reconfigure_handle()
        if len(set(texts)) < len(texts) or mine not in texts:
            what = "handles must be different" if mine in texts else "the handle of this rank is not among the handles"
            raise ReconfigureError(explain(what, value=texts, rank=self._rank, fix=_FIX))
        lacking = [rank for rank, each in enumerate(handles) if not each.is_built]
        if lacking:
            fix = "install a C compiler there and reinstall guozhuang, or use the gloo backend"
            raise ReconfigureError(explain(f'"shm" needs its C part, which was not built for ranks {lacking}', fix=fix))
        rank, size, timeout = texts.index(mine), len(texts), opts.timeout or self._timeout
        listener, self._listener = self._listener, None
        assert listener is not None
        try:
            digest = self._claim(opts.uuid, texts, rank)
            cards = [_of_this_change(each.card, digest) for each in handles]
            made = self._make(dist.PrefixStore(f"reconfigure/{opts.uuid}", self._store), rank, timeout, listener, cards)
        finally:
            listener.close()
        made.set_timeout(self._timeout)
        before, self._group = self._group, made
        self._rank, self._size = rank, size
        if self is dist.group.WORLD:  # only the default group can be made with enable_reconfigure
            dist.distributed_c10d._world.pg_group_ranks[self] = {each: each for each in range(size)}
        if before is not None:
            _drop(before)
        return CallWork()

    def _claim(self, uuid: int, texts: Sequence[str], rank: int) -> str:
        """Return the digest of this change. See [Note: which change a call belongs to]."""
        digest = hashlib.sha256("\n".join([str(uuid), *texts]).encode()).hexdigest()
        if self._store.compare_set(f"reconfigure/{uuid}", "", digest).decode() != digest:
            what = "this uuid was already used for another change of the group's ranks, or with other handles"
            raise ReconfigureError(explain(what, value=uuid, rank=rank, fix="give a new uuid for every change"))
        return digest

    def _make(
        self, store: dist.Store, rank: int, timeout: datetime.timedelta, listener: Listener, cards: Sequence[Card]
    ) -> Any:
        processes, size = [card.process for card in cards], len(cards)
        if len({each.node for each in processes}) == 1:
            return SharedMemoryGroup(store, rank, size, timeout, invited=(listener, cards))
        from guozhuang.groups.hierarchical import HierarchicalGroup

        def ended(peer: int) -> int | None:
            return processes[peer].pid if processes[peer].has_ended(processes[rank].node) else None

        try:
            # A rank that is gone is named here: the parts of the group would wait for it without naming it.
            roll_call.call(store, "present", rank, size, "", timeout.total_seconds(), ended)
            return HierarchicalGroup(store, rank, size, timeout, processes)
        except BaseException as error:
            for topic in ("present", "connected"):  # on one of them the other ranks wait
                roll_call.tell_failed(store, topic, rank, error)
            raise

    @override
    def _target(self) -> Any:
        if self._group is None:
            raise WorldError(explain(f"this group takes no calls: {self._lacks}", rank=self._rank))
        return self._group

    def __getattr__(self, name: str) -> Any:
        """Return what the group of the last change has besides, such as ``empty``."""
        if name.startswith("__") or self.__dict__.get("_group") is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._group, name)

    # Properties that torch.distributed reads.

    @property
    @override
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")] if self._group is None else super()._device_types

    @override
    def _group_on(self, device: torch.device) -> Any:
        return self._target()

    def get_error(self) -> Any:
        """Return success: what a rank fails with, it raises."""
        return torch._C._distributed_c10d.ErrorType.SUCCESS

    def _get_sequence_number_for_group(self) -> int:
        return int(self._target()._get_sequence_number_for_group())

    @override
    def set_timeout(self, timeout: datetime.timedelta) -> None:
        super().set_timeout(timeout)
        if self._group is not None:
            self._group.set_timeout(timeout)

    def abort(self) -> None:
        """Leave the ranks at once: peers that wait for this rank raise. A later ``reconfigure`` gives the group ranks again."""
        self._end("abort")

    def shutdown(self) -> None:
        """Leave the ranks: running collectives get some seconds to end; peers that wait for this rank afterwards raise."""
        self._end("shutdown")

    def _end(self, how: str) -> None:
        before, self._group = self._group, None
        self._lacks = f"it has left its ranks ({how}): call torch.distributed._reconfigure with a new uuid"
        if before is not None and how == "abort":
            _drop(before)
        elif before is not None:
            before.shutdown()
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def _drop(group: Any) -> None:
    """Leave a group at once, and free its connections: ``abort`` keeps those over several nodes."""
    group.abort()
    group.shutdown()


def _of_this_change(card: Card, digest: str) -> Card:
    """Return a card whose secret only ranks that make the change of this digest know."""
    return card._replace(secret=hashlib.sha256(f"{card.secret} {digest}".encode()).hexdigest()[: len(card.secret)])
