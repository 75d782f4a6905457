"""Enter the Horovod world and leave it, and what there is to ask about it."""

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
    """The world of this process. One object for each framework module; all speak of the same world.

    Attributes:
        Average, Sum, Adasum, Min, Max, Product: how an all-reduce combines, as integers.
    """

    Average = int(Reduction.AVERAGE)
    Sum = int(Reduction.SUM)
    Adasum = int(Reduction.ADASUM)
    Min = int(Reduction.MIN)
    Max = int(Reduction.MAX)
    Product = int(Reduction.PRODUCT)

    def init(self, comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
        """Meet the other ranks and start the engine. A second call looks up process sets, or allows them, and nothing else.

        Every process that the launcher started must call, also those that ``comm`` leaves to another Horovod world.

        Args:
            comm: None for all processes; ranks of some of them, rising; or an mpi4py communicator. The processes of one
                launch may form several worlds, each with its own list.
            process_sets: process sets to register, the same on all ranks; or "dynamic" to allow them to come and go.

        Raises:
            ValueError: ``comm`` or ``process_sets`` cannot be; this process is not in ``comm``; a HOROVOD_* variable is wrong,
                or was set by a launcher that says another rank or size; a second call with another ``comm``; processes
                that ``comm`` names gave another one; on rank 0 alone: the file of HOROVOD_TIMELINE cannot be written.
            MismatchError: (a ValueError) ranks have different settings of the engine, or gave different process sets.
            WorldError: a rank did not come in time; the text names it.
            HorovodInternalError: a rank was lost, or did not come, after the ranks had met.
            RuntimeError: in an elastic run, where ranks that were lost are no error and the next round is waited for: this
                process is in no round any more ("removed from elastic job"), or the driver is silent.
        """
        dynamic = isinstance(process_sets, str)
        if dynamic and str(process_sets).lower() != "dynamic":
            raise ValueError(explain('process_sets is a list of ProcessSet, or "dynamic"', value=process_sets))
        listed = [] if process_sets is None or isinstance(process_sets, str) else list(process_sets)
        here = state()
        if here is not None and not _is_current(here):
            self.shutdown()  # its world has ended without it, with all groups
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
        variables = horovod_variables.read()  # what is wrong is said before anybody is waited for
        horovod_variables.set_log_level(variables)
        os.environ.update(EXTENSION.defaults(os.environ))
        settings = horovod_variables.settings_from(variables)
        if elastic_variables.driver() is None:
            self._enter(comm, listed, settings)
        else:
            from guozhuang.compat.horovod.runner.elastic import worker

            worker.enter(lambda membership: self._enter(comm, listed, settings, membership))

    def shutdown(self) -> None:
        """Leave the world; without one it does nothing. Called at exit by itself, and by ``guozhuang.shutdown()``.

        Waits a few seconds for the others to leave, too. What is under way fails with ``HorovodInternalError``, here and on
        ranks that wait for this one. ``init`` may be called again afterwards, by every rank.
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
            _end(here.made_group)
            if here.made_world and _is_current(here):
                gz_world.shutdown()

    def _enter(
        self, comm: Any, listed: Sequence[ProcessSet], settings: Settings, membership: Membership | None = None
    ) -> None:
        """Make the Horovod world, as far as the last process set of ``listed``. Leaves nothing behind when it raises."""
        variables = horovod_variables.read()  # now: an elastic driver has just told this process its place anew
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
        """Tell whether this process is between ``init`` and ``shutdown``, and the world that it entered still there."""
        here = state()
        return here is not None and _is_current(here)

    def start_timeline(self, file_path: str, mark_cycles: bool = False) -> None:
        """Begin to write a Chrome trace of the collectives; on rank 0, other ranks write nothing. Not collective.

        Args:
            file_path: of the JSON file; one that is being written ends.
            mark_cycles: mark the rounds in which ranks agreed on what to run.

        Raises:
            ValueError: not initialised, or HOROVOD_TIMELINE was not set before ``init``.
            OSError: on rank 0 alone: the file cannot be written. What was being written before has ended then.
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
        """End the timeline and complete its file; without one it does nothing.

        Raises:
            ValueError: not initialised.
        """
        required().engine.stop_timeline()

    def rank(self) -> int:
        """Return the rank of this process, from 0. ValueError before ``init``, as the next ones."""
        return required().rank

    def size(self) -> int:
        """Return how many ranks there are."""
        return required().size

    def local_rank(self) -> int:
        """Return the rank of this process among those of its node."""
        return required().local_rank

    def local_size(self) -> int:
        """Return how many ranks this node has."""
        return required().local_size

    def cross_rank(self) -> int:
        """Return the place of this node among those that have a rank with this local rank."""
        return required().cross_rank

    def cross_size(self) -> int:
        """Return how many nodes have a rank with this local rank."""
        return required().cross_size

    def is_homogeneous(self) -> bool:
        """Tell whether all nodes have equally many ranks."""
        return required().is_homogeneous

    def mpi_threads_supported(self) -> bool:
        """Raise ValueError: MPI carries nothing here."""
        required()
        raise ValueError(explain("MPI carries nothing here, so there is no answer", fix="ask mpi_enabled() first"))

    def mpi_enabled(self) -> bool:
        """Tell whether MPI carries the collectives: never. It may start the ranks, as any launcher."""
        return False

    def mpi_built(self) -> bool:
        """Tell whether MPI could carry the collectives: no."""
        return False

    def gloo_enabled(self) -> bool:
        """Tell whether ranks agree without MPI: always."""
        return True

    def gloo_built(self) -> bool:
        """Tell whether ranks can agree without MPI: yes."""
        return True

    def nccl_built(self) -> int:
        """Return NCCL's version code as in its header (21003 for 2.10.3), or 0 where PyTorch was built without it."""
        if not dist.is_nccl_available():
            return 0
        major, minor, patch = (*torch.cuda.nccl.version(), 0, 0)[:3]
        thousands = (major, minor) <= (2, 8)  # 2.8.4 is 2804, 2.9.6 is 20906
        return int(major * 1000 + minor * 100 + patch if thousands else major * 10000 + minor * 100 + patch)

    def ddl_built(self) -> bool:
        """Tell whether IBM's DDL is there: no."""
        return False

    def ccl_built(self) -> bool:
        """Tell whether Intel's oneCCL is there: no."""
        return False

    def cuda_built(self) -> bool:
        """Tell whether tensors of CUDA devices can be given: where PyTorch was built for them."""
        return torch.version.cuda is not None

    def rocm_built(self) -> bool:
        """Tell whether tensors of ROCm devices can be given: where PyTorch was built for them."""
        return torch.version.hip is not None

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """Return the ranks of every process set by its id, the global one (0) among them."""
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
    """Start the engine among the ranks that ``comm`` chooses. Every process of the world must call."""
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
        told = _told(engine, world)
    except BaseException:
        if engine is not None:
            engine.close()
        _end(made_group)
        raise
    place = place_of(rank, told)
    here = HorovodState(
        engine=engine,
        world=world,
        variables=variables,
        rank=rank,
        size=len(told),
        local_rank=place.local_rank,
        local_size=place.local_size,
        cross_rank=place.cross_rank,
        cross_size=place.cross_size,
        is_homogeneous=place.is_homogeneous,
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
    """The ranks of the world that ``comm`` names; all of them where it is None or empty, as in Horovod."""
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


def _told(engine: NamedEngine, world: World) -> list[tuple[int, int]]:
    """Return of every rank its node, and its place there by the launcher's word."""
    mine = torch.tensor([[world.node_rank, world.local_rank]])
    try:
        (found,) = engine.world.submit(Submission(Kind.ALLGATHER, "guozhuang.places", (mine,))).wait()
    except NegotiationError as error:
        raise HorovodInternalError(str(error)) from error
    return [(node, place) for node, place in found.tolist()]


def _is_current(here: HorovodState) -> bool:
    """Whether the processes of a Horovod world are still connected: its world may have been left, or its groups destroyed."""
    return here.world is gz_world.current()


def _end(group: dist.ProcessGroup | None) -> None:
    """End a group, unless it has ended with the default group already."""
    if group is not None and group in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)
