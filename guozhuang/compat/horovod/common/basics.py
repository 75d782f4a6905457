"""Enter and leave the Horovod world, and query it: ranks, sizes, and the features that are built in."""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from guozhuang import world as gz_world
from guozhuang.compat.horovod.common import elastic_variables
from guozhuang.compat.horovod.common import variables as horovod_variables
from guozhuang.compat.horovod.common.extension import EXTENSION
from guozhuang.compat.horovod.common.variables import HorovodVariables
from guozhuang.errors import UsageError, explain
from guozhuang.gradients.named import Kind, NamedEngine, NegotiationError, Reduction, Settings, Submission
from guozhuang.groups import subgroups
from guozhuang.world import World

from .exceptions import HorovodInternalError
from .process_sets import (
    ProcessSet,
    checked,
    enter_global,
    find_again,
    is_communicator,
    leave_all,
    ranks_of,
    register_all,
)
from .state import HorovodState, compare_worlds, place_of, required, set_state, state

if TYPE_CHECKING:
    from guozhuang.compat.horovod.runner.elastic.worker import Membership

__all__ = ["HorovodBasics", "state"]


class HorovodBasics:
    """Horovod's functions to enter, leave and query its world, as methods. All objects refer to the one world of this process.

    Attributes:
        Average, Sum, Adasum, Min, Max, Product: the reductions of an all-reduce, as integers.
    """

    Average = int(Reduction.AVERAGE)
    Sum = int(Reduction.SUM)
    Adasum = int(Reduction.ADASUM)
    Min = int(Reduction.MIN)
    Max = int(Reduction.MAX)
    Product = int(Reduction.PRODUCT)

    def init(self, comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
        """Connect to the other ranks and start the engine. A second call only looks up process sets, or allows dynamic ones.

        Every process that the launcher started must call this, even if its ``comm`` puts it into another Horovod world.

        Args:
            comm: None for all processes; the ranks of some of them in rising order; or an mpi4py communicator. The processes
                of one launch may form several worlds, each with its own list.
            process_sets: process sets to register, the same on all ranks; or "dynamic" to allow adding and removing them later.

        Raises:
            ValueError: ``comm`` or ``process_sets`` is invalid; this process is not in ``comm``; a HOROVOD_* variable is wrong,
                or names a rank or size other than the launched one; a second call with another ``comm``; processes
                that ``comm`` names gave another one; on rank 0 alone: the file of HOROVOD_TIMELINE cannot be written.
            MismatchError: (a ValueError) ranks have different settings of the engine, or gave different process sets.
            WorldError: a rank did not join in time; the text names it.
            HorovodInternalError: a rank was lost, or did not answer, after the ranks had met.
            RuntimeError: in an elastic run the driver has removed this process ("removed from elastic job"), or is silent. A
                lost rank is no error there: ``init`` waits for the next round.
        """
        dynamic = isinstance(process_sets, str)
        if dynamic and str(process_sets).lower() != "dynamic":
            raise ValueError(explain('process_sets is a list of ProcessSet, or "dynamic"', value=process_sets))
        listed = [] if process_sets is None or isinstance(process_sets, str) else list(process_sets)
        here = state()
        if here is not None and not _is_current(here):
            self.shutdown()  # clean up, since the ``guozhuang`` world below Horovod's has ended
            here = None
        if here is not None:
            _check_same(comm, here)
            if dynamic:
                horovod_variables.set_dynamic_process_sets()
                here.dynamic = True
            find_again(listed, here)
            return
        if dynamic:
            horovod_variables.set_dynamic_process_sets()
        variables = horovod_variables.read()  # read first: a wrong value raises before this rank waits for others
        horovod_variables.set_log_level(variables)
        os.environ.update(EXTENSION.defaults(os.environ))
        settings = horovod_variables.settings_from(variables)
        if elastic_variables.driver() is None:
            self._enter(comm, listed, settings)
        else:
            from guozhuang.compat.horovod.runner.elastic import worker

            worker.enter(lambda membership: self._enter(comm, listed, settings, membership))

    def shutdown(self) -> None:
        """Leave the Horovod world, if this process is in one. Also called at exit, and by ``guozhuang.shutdown()``.

        Waits a few seconds for the other ranks to leave too. Unfinished collectives fail with ``HorovodInternalError``, here
        and on ranks that wait for this one. ``init`` may be called again afterwards, by every rank.
        """
        here = state()
        if here is None:
            return
        atexit.unregister(self.shutdown)
        set_state(None)
        leave_all(here)
        try:
            here.engine.close()
        finally:
            if here.made_group is not None:
                subgroups.destroy(here.made_group)
            if here.made_world and _is_current(here):
                gz_world.shutdown()

    def _enter(
        self, comm: Any, listed: Sequence[ProcessSet], settings: Settings, membership: Membership | None = None
    ) -> None:
        """Create this process's Horovod world and register the process sets in ``listed``; undo all of it on an error."""
        variables = horovod_variables.read()  # read again: an elastic run has just set the rank's variables
        made_world = gz_world.current() is None
        world = gz_world.init(timeout_s=membership.world_timeout_s) if membership and made_world else gz_world.init()
        try:
            horovod_variables.check_world(variables, world.rank, world.size)
            here = _entered(comm, world, variables, settings, membership, made_world=made_world)
        except BaseException:
            if made_world:
                gz_world.shutdown()
            raise
        horovod_variables.log_what_means_nothing(here.rank, variables)
        set_state(here)
        atexit.unregister(self.shutdown)
        atexit.register(self.shutdown)
        gz_world.before_leaving(self.shutdown)
        try:
            register_all(listed, here)
            if variables.timeline and variables.timeline.upper() != "DYNAMIC":
                _start_timeline(here, variables.timeline)
        except BaseException:
            self.shutdown()
            raise

    def is_initialized(self) -> bool:
        """Tell whether this process is between ``init`` and ``shutdown``, and the world that it entered still exists."""
        here = state()
        return here is not None and _is_current(here)

    def start_timeline(self, file_path: str, mark_cycles: bool = False) -> None:
        """Begin to write a Chrome trace of the collectives. Only rank 0 writes; ranks may call independently.

        Args:
            file_path: the path of the JSON file; a timeline that is being written is ended first.
            mark_cycles: mark the rounds of negotiation in it.

        Raises:
            ValueError: not initialised, or HOROVOD_TIMELINE was not set before ``init``.
            OSError: on rank 0 alone: the file cannot be written. The timeline before it has ended then.
        """
        here = required()
        if not here.variables.timeline:
            raise ValueError(
                "no timeline can be started, because none was allowed. Fix: Set HOROVOD_TIMELINE=DYNAMIC before hvd.init(), "
                "or HOROVOD_TIMELINE to the path of a file."
            )
        here.engine.stop_timeline()
        here.engine.start_timeline(file_path, mark_cycles)

    def stop_timeline(self) -> None:
        """End the timeline that is being written and complete its file; do nothing if there is none.

        Raises:
            ValueError: not initialised.
        """
        required().engine.stop_timeline()

    def rank(self) -> int:
        """Return the rank of this process, from 0. Like all queries of ranks and sizes it raises ValueError before ``init``."""
        return required().rank

    def size(self) -> int:
        """Return the number of ranks in the Horovod world."""
        return required().size

    def local_rank(self) -> int:
        """Return the rank of this process among those of its node."""
        return required().place.local_rank

    def local_size(self) -> int:
        """Return how many ranks this node has."""
        return required().place.local_size

    def cross_rank(self) -> int:
        """Return the index of this node among the nodes that have a rank with this local rank."""
        return required().place.cross_rank

    def cross_size(self) -> int:
        """Return how many nodes have a rank with this local rank."""
        return required().place.cross_size

    def is_homogeneous(self) -> bool:
        """Tell whether all nodes have equally many ranks."""
        return required().place.is_homogeneous

    def mpi_threads_supported(self) -> bool:
        """Raise ValueError, because Guozhuang's collectives never use MPI."""
        required()
        raise ValueError(explain("MPI carries nothing here, so there is no answer", fix="ask mpi_enabled() first"))

    def mpi_enabled(self) -> bool:
        """Return False: MPI never carries the collectives, though it may start the ranks, like any other launcher."""
        return False

    def mpi_built(self) -> bool:
        """Return False: the collectives cannot be carried by MPI."""
        return False

    def gloo_enabled(self) -> bool:
        """Return True, as Horovod does where ranks coordinate without MPI."""
        return True

    def gloo_built(self) -> bool:
        """Return True, as Horovod does if it was built to coordinate ranks without MPI."""
        return True

    def nccl_built(self) -> int:
        """Return NCCL's version code as in its header (21003 for 2.10.3), or 0 where PyTorch was built without it."""
        if not dist.is_nccl_available():
            return 0
        major, minor, patch = (*torch.cuda.nccl.version(), 0, 0)[:3]
        thousands = (major, minor) <= (2, 8)  # NCCL writes version 2.8.4 as 2804, but 2.9.6 as 20906
        return int(major * 1000 + minor * 100 + patch if thousands else major * 10000 + minor * 100 + patch)

    def ddl_built(self) -> bool:
        """Return False: IBM's DDL is not built in."""
        return False

    def ccl_built(self) -> bool:
        """Return False: Intel's oneCCL is not built in."""
        return False

    def cuda_built(self) -> bool:
        """Tell whether tensors on CUDA devices are supported, that is, whether PyTorch was built for CUDA."""
        return torch.version.cuda is not None

    def rocm_built(self) -> bool:
        """Tell whether tensors on ROCm devices are supported, that is, whether PyTorch was built for ROCm."""
        return torch.version.hip is not None

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """Return the ranks of every process set by its id, including the global one (0)."""
        return {number: list(member.ranks) for number, member in sorted(required().sets.items())}


def _entered(
    comm: Any,
    world: World,
    variables: HorovodVariables,
    settings: Settings,
    membership: Membership | None,
    *,
    made_world: bool,
) -> HorovodState:
    """Start the engine on the ranks that ``comm`` chooses; return the Horovod world's state. Every process must call this."""
    group, made_group = dist.group.WORLD, None
    assert group is not None, "guozhuang.world.init made or found it"
    world_ranks = _chosen(comm, world.size)
    compare_worlds(group, world_ranks)
    if world.rank not in world_ranks:
        what = "hvd.init(comm=...) does not name the process that calls it"
        fix = "give each process the list of the world that it is in"
        raise ValueError(explain(what, value=list(world_ranks), rank=world.rank, fix=fix))
    if len(world_ranks) < world.size:
        group = made_group = subgroups.subgroup(group, world_ranks)
    rank = world_ranks.index(world.rank)
    engine = None
    try:
        engine = _engine(group, settings)
        if membership is not None:
            membership.breaks(
                functools.partial(engine.fail, "the driver of the elastic job has lost a worker of this round")
            )
        given = _places(engine, world)
    except BaseException:
        if engine is not None:
            engine.close()
        if made_group is not None:
            subgroups.destroy(made_group)
        raise
    here = HorovodState(
        engine=engine,
        world=world,
        variables=variables,
        rank=rank,
        size=len(given),
        place=place_of(rank, given),
        world_ranks=world_ranks,
        made_world=made_world,
        dynamic=bool(variables.dynamic_process_sets),
        sets={},
        made_group=made_group,
    )
    enter_global(here)
    return here


def _start_timeline(here: HorovodState, path: str) -> None:
    try:
        here.engine.start_timeline(path, bool(here.variables.timeline_mark_cycles))
    except OSError as error:
        what = f"HOROVOD_TIMELINE, or --timeline-filename, names a file that cannot be written: {error.strerror}"
        fix = "make its folder, name another file, or leave it out"
        raise UsageError(explain(what, value=path, rank=here.rank, fix=fix)) from error


def _chosen(comm: Any, size: int) -> tuple[int, ...]:
    """Return the ranks of the world that ``comm`` names; all ranks if it is None or empty, as in Horovod."""
    given = None if comm is None else ranks_of(comm) if is_communicator(comm) else list(comm)
    if not given:
        return tuple(range(size))
    chosen = checked(given, size, "hvd.init(comm=...)")
    if list(chosen) != sorted(chosen):
        raise ValueError(explain("hvd.init(comm=...) takes the ranks in rising order", value=list(chosen)))
    return chosen


def _check_same(comm: Any, here: HorovodState) -> None:
    if comm is not None and _chosen(comm, here.world.size) != here.world_ranks:
        what = f"hvd.init was called before, for the ranks {list(here.world_ranks)}"
        raise ValueError(explain(what, value=comm, rank=here.rank, fix="call hvd.shutdown() first"))


def _engine(group: dist.ProcessGroup, settings: Settings) -> NamedEngine:
    try:
        return NamedEngine(group, settings)
    except NegotiationError as error:
        raise HorovodInternalError(str(error)) from error


def _places(engine: NamedEngine, world: World) -> list[tuple[int, int]]:
    """Return (node rank, local rank) of each rank as its launcher gave them, gathered from all ranks."""
    mine = torch.tensor([[world.node_rank, world.local_rank]])
    try:
        (found,) = engine.world.submit(Submission(Kind.ALLGATHER, "guozhuang.places", (mine,))).wait()
    except NegotiationError as error:
        raise HorovodInternalError(str(error)) from error
    return [(node, place) for node, place in found.tolist()]


def _is_current(here: HorovodState) -> bool:
    """Return whether the world of guozhuang that a Horovod world was made on still exists, so its ranks are connected."""
    return here.world is gz_world.current()
