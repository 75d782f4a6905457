"""Process sets: subsets of the ranks, each of which runs collectives of its own.

``hvd.init(process_sets=[...])`` registers them, or ``hvd.add_process_set`` at any time: every rank of the world must call that,
and HOROVOD_DYNAMIC_PROCESS_SETS=1 or ``hvd.init(process_sets="dynamic")`` must have allowed it.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Sequence
from typing import Any, TypeGuard

from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.gradients.named import NegotiationError

from .exceptions import HorovodInternalError
from .state import HorovodState, SetMember, required

_NOT_DYNAMIC = (
    "process sets can be added and removed after hvd.init() only where that was allowed before. "
    'Fix: set HOROVOD_DYNAMIC_PROCESS_SETS=1, or call hvd.init(process_sets="dynamic").'
)


# Scripts may give lists of ranks or mpi4py communicators; mpi4py is imported only when a communicator is given.


def is_communicator(given: object) -> TypeGuard[Any]:
    """Return whether an object is an mpi4py communicator, and not a list of ranks."""
    return hasattr(given, "Get_group") and hasattr(given, "Get_size")


def ranks_of(communicator: Any) -> list[int]:
    """Return the ranks of a communicator's members in ``MPI.COMM_WORLD``, in the communicator's order.

    Raises:
        UsageError: mpi4py cannot be imported.
    """
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    except ImportError as error:
        what = f"an MPI communicator was given, and mpi4py cannot be imported: {error}"
        raise UsageError(explain(what, fix="install mpi4py, or give a list of ranks")) from error
    members = list(range(communicator.Get_size()))
    return list(mpi.Group.Translate_ranks(communicator.Get_group(), members, mpi.COMM_WORLD.Get_group()))


def checked(ranks: Sequence[int], size: int, what: str) -> tuple[int, ...]:
    """Check a list of ranks, and return it as a tuple.

    Args:
        ranks: the ranks, in any order.
        size: the number of ranks in the world; valid ranks are 0 to size - 1.
        what: the name of the argument that holds them, which begins the text of an error.

    Raises:
        ValueError: the list is empty, or holds a rank twice or one that does not exist.
        TypeError: a rank is no whole number.
    """
    chosen = tuple(operator.index(rank) for rank in ranks)
    if not chosen:
        raise ValueError(explain(f"{what} needs at least one rank", value=list(chosen)))
    if len(set(chosen)) != len(chosen):
        raise ValueError(explain(f"{what} names a rank twice", value=list(chosen)))
    if min(chosen) < 0 or max(chosen) >= size:
        raise ValueError(
            explain(f"{what} names a rank that does not exist; there are 0 to {size - 1}", value=list(chosen))
        )
    return chosen


class ProcessSet:
    """A subset of the ranks. It can be used once ``hvd.init`` or ``hvd.add_process_set`` has registered it.

    Args:
        ranks_or_comm: ranks of the Horovod world in any order, or a communicator of mpi4py.

    Attributes:
        process_set_id: 0 for the set of all ranks, 1 and up for others; None while it is not registered.
        ranks: the ranks in rising order; None for a communicator that is not registered yet.
        mpi_comm: the communicator, if one was given.

    Raises:
        TypeError: a rank is no whole number.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Any) -> None:
        if is_communicator(ranks_or_comm):
            self.mpi_comm = ranks_or_comm
        else:
            self.ranks = sorted(operator.index(rank) for rank in ranks_or_comm)

    def size(self) -> int | None:
        """Return the number of ranks of the set; None while it is not registered."""
        member = self._member()
        return None if member is None else len(member.ranks)

    def rank(self) -> int | None:
        """Return the rank of this process within the set; None while the set is not registered.

        Raises:
            ValueError: this process is no member.
        """
        member = self._member()
        if member is None:
            return None
        mine = required().rank
        if mine not in member.ranks:
            raise ValueError(explain(f"this process is not a member of {self}", rank=mine, fix="ask included() first"))
        return member.ranks.index(mine)

    def included(self) -> bool | None:
        """Return whether this process is a member of the set; None while the set is not registered."""
        member = self._member()
        return None if member is None else required().rank in member.ranks

    def _member(self) -> SetMember | None:
        return None if self.process_set_id is None else required().sets.get(self.process_set_id)

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    __repr__ = __str__


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set. Every rank of the world must call with the same ranks, members or not.

    Args:
        process_set: a process set that is not registered, a sequence of ranks, or a communicator of mpi4py.

    Returns:
        The registered process set; the same object if a ``ProcessSet`` was given.

    Raises:
        ValueError: not initialised; not allowed (see the module); a rank of the set does not exist; another set has the same
            ranks; the ranks of the world gave different sets (a ``MismatchError``, on all of them).
        HorovodInternalError: a rank is lost, or did not call in time.
    """
    here = required()
    if not here.dynamic:
        raise ValueError(_NOT_DYNAMIC)
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if made.process_set_id is not None and made.process_set_id in here.sets:
        raise ValueError(explain(f"{made} is registered already", rank=here.rank))
    ranks = ranks_in(made, here)
    known = _id_of(ranks, here)
    if known is not None:
        what = f"a process set of the ranks {list(ranks)} exists already, with id {known}"
        raise ValueError(explain(what, rank=here.rank, fix="use that one"))
    register(made, ranks, here)
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. Every rank of the world must call, and the set must have no unfinished operations.

    Returns:
        False if it is the global set or not registered, True otherwise. Its ``process_set_id`` is None then.

    Raises:
        ValueError: not initialised, or not allowed (see the module); the ranks gave different sets.
        HorovodInternalError: a rank is lost, or did not call in time.
    """
    here = required()
    number = process_set.process_set_id
    if number is None or number == 0 or number not in here.sets:
        return False
    if not here.dynamic:
        raise ValueError(_NOT_DYNAMIC)
    try:
        here.engine.remove(here.sets[number].channel)
    except (NegotiationError, WorldError) as error:
        raise HorovodInternalError(str(error)) from error
    for each in here.sets.pop(number).objects:
        each.process_set_id = None
    return True


def register(process_set: ProcessSet, ranks: tuple[int, ...], here: HorovodState) -> None:
    """Create the engine's channel for a process set, and give the set the next id. Every rank of the world must call this."""
    try:
        channel = here.engine.add(ranks, called="process set")
    except (NegotiationError, WorldError) as error:
        raise HorovodInternalError(str(error)) from error
    number, here.next_set = here.next_set, here.next_set + 1
    here.sets[number] = SetMember(channel, ranks, [process_set])
    process_set.process_set_id, process_set.ranks = number, list(ranks)


def register_all(process_sets: Sequence[ProcessSet], here: HorovodState) -> None:
    """Register the process sets that were given to ``hvd.init``. Every rank of the world must call with the same ones.

    Raises:
        ValueError: two sets have the same ranks, a set has all ranks, or a rank does not exist. Nothing is registered then.
    """
    seen = {tuple(range(here.size))}
    chosen = []
    for each in process_sets:
        ranks = ranks_in(each, here)
        if ranks in seen:
            raise ValueError(
                explain(f"{each} is a duplicate", rank=here.rank, fix="leave it out, and use the first one")
            )
        seen.add(ranks)
        chosen.append(ranks)
    for each, ranks in zip(process_sets, chosen, strict=True):
        register(each, ranks, here)


def find_again(process_sets: Sequence[ProcessSet], here: HorovodState) -> None:
    """Give the process sets of a second ``hvd.init`` the ids of the registered sets that have the same ranks.

    Raises:
        ValueError: no registered set has these ranks.
    """
    for each in process_sets:
        ranks = ranks_in(each, here)
        number = _id_of(ranks, here)
        if number is None:
            what = f"hvd.init was called before, without {each}"
            raise ValueError(explain(what, rank=here.rank, fix="call hvd.shutdown() first, or hvd.add_process_set"))
        each.process_set_id, each.ranks = number, list(ranks)
        if each not in here.sets[number].objects:
            here.sets[number].objects.append(each)


def enter_global(here: HorovodState) -> None:
    """Set the ranks of the global process set to all ranks of a new world."""
    global_process_set.ranks = list(range(here.size))
    here.sets[0] = SetMember(here.engine.world, tuple(range(here.size)))


def leave_all(here: HorovodState) -> None:
    """Unregister all process sets when the world ends; the global one keeps its id 0, and has no ranks until the next world."""
    for member in here.sets.values():
        for each in member.objects:
            each.process_set_id = None
    global_process_set.ranks = []


def ranks_in(process_set: ProcessSet, here: HorovodState) -> tuple[int, ...]:
    """Return the ranks of a process set as ranks of the Horovod world, in rising order.

    Raises:
        ValueError: a rank does not exist or is given twice; or there are none.
    """
    if not isinstance(process_set, ProcessSet):
        what = f"hvd.init takes objects of hvd.ProcessSet, not of {type(process_set).__name__}"
        raise ValueError(explain(what, value=process_set, rank=here.rank, fix="give hvd.ProcessSet([0, 1])"))
    ranks: Sequence[int] | None = process_set.ranks
    if process_set.mpi_comm is not None:
        members = ranks_of(process_set.mpi_comm)
        outside = [rank for rank in members if rank not in here.world_ranks]
        if outside:
            raise ValueError(explain(f"{process_set} has processes that hvd.init(comm=...) left out", value=outside))
        ranks = [here.world_ranks.index(rank) for rank in members]
    return tuple(sorted(checked(ranks or (), here.size, "a process set")))


def member_of(process_set: ProcessSet) -> SetMember:
    """Return the channel and ranks of a process set that this process is a member of.

    Raises:
        ValueError: not initialised; the set is not registered; this process is no member.
    """
    here = required()
    if not isinstance(process_set, ProcessSet):
        what = f"process_set is no object of hvd.ProcessSet, but of {type(process_set).__name__}"
        raise ValueError(explain(what, value=process_set, rank=here.rank, fix="leave it out, or give a registered one"))
    number = process_set.process_set_id
    member = None if number is None else here.sets.get(number)
    if member is None:
        fix = "give it to hvd.init(process_sets=[...]), or call hvd.add_process_set first"
        raise ValueError(explain(f"{process_set} is not registered", rank=here.rank, fix=fix))
    if member.channel.rank is None:
        fix = "call on the members only: if process_set.included()"
        raise ValueError(explain(f"this process is not a member of {process_set}", rank=here.rank, fix=fix))
    return member


def _id_of(ranks: tuple[int, ...], here: HorovodState) -> int | None:
    return next((number for number, member in here.sets.items() if member.ranks == ranks), None)
