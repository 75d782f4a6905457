"""Enter and leave the world, which is all processes of a run: ``init``, ``shutdown``, ``current``.

[Note: leaving] Gloo cannot cancel a collective. Destroying a group that still has one in flight waits until the peers
answer, leave or run into the time-out; without destroying it the interpreter would wait all the same, or abort. A rank
that leaves because of an exception must not wait so long: its peers wait for it, and a launcher acts only when the process has
ended. So after an uncaught exception there is a limit of 5 s, after which the process ends with code 1, its exit code
in any case. A rank that leaves without an exception waits for the collectives it started.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import logging
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from guozhuang.errors import UsageError, explain
from guozhuang.net.meeting_point import MeetingPoint, PortSequence
from guozhuang.registry import registry
from guozhuang.watch.processes import wait_for_threads
from guozhuang.world import devices, requests
from guozhuang.world.connecting import check_settings, check_ways, complete, make_group, settings
from guozhuang.world.identity import Identity, World
from guozhuang.world.layout import Layout
from guozhuang.world.requests import HangTimeout, layout_of_environment, requested_backend, requested_hang_timeout
from guozhuang.world.versions import default_store, newer_than_tried

# Modules about launchers and stores are imported inside the functions that need them, to keep ``import guozhuang`` cheap.
if TYPE_CHECKING:
    from guozhuang.net.meet import WorldStore
    from guozhuang.watch.heartbeat import Heartbeat
    from guozhuang.watch.uncaught import UncaughtErrors

DEFAULT_TIMEOUT_S = 600.0
FAKE = "fake world"  # the launcher of a world of which one process plays a rank, and nobody the others
# After an uncaught exception the process ends within so many seconds, also with a collective in flight: [Note: leaving].
_LEAVE_AFTER_ERROR_S = 5.0
_log = logging.getLogger("guozhuang")


@dataclass
class _Session:
    """The state of this process: the current world, and all that is needed to leave it and to enter another one.

    Attributes:
        world: the current world; None outside of a world.
        made_group: ``init`` made the default process group, so ``shutdown`` destroys it.
        backend: the backend of the default process group, as asked for or chosen.
        timeout_s: the time limit that was given to ``init``.
        set_interfaces: names of the variables of gloo and NCCL that ``init`` set and ``shutdown`` removes.
        meeting: the open store; kept after ``shutdown``, because a peer may enter its next world before this rank has left.
        met_at: the meeting point of ``meeting``.
        generation: how many worlds were entered through ``meeting``.
        heartbeat: the heartbeat of this rank, which must stop before the group is destroyed.
        uncaught: shows the uncaught errors of this rank, together with the heartbeat.
        before_leaving: functions that ``shutdown`` calls before it destroys the group.
        process: number of the process that entered the world; a forked child is no rank.
    """

    world: World | None = None
    made_group: bool = False
    backend: str = ""
    timeout_s: float = DEFAULT_TIMEOUT_S
    set_interfaces: tuple[str, ...] = ()
    meeting: WorldStore | None = None
    met_at: MeetingPoint | PortSequence | None = None
    generation: int = 0
    heartbeat: Heartbeat | None = None
    uncaught: UncaughtErrors | None = None
    before_leaving: list[Callable[[], None]] = field(default_factory=list)
    process: int = 0


_session = _Session()


def init(
    backend: str | None = None, device: str | torch.device | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> World:
    """Identify the launcher of this process, meet the other ranks, and make the default process group.

    Every rank must call this. A second call returns the same world. If ``torch.distributed.init_process_group`` was
    called before, its group is used as it is, and the caller must destroy it.

    Args:
        backend: any name that torch.distributed knows, also "cpu:gloo,cuda:nccl". None: the backend of ``guozhuang run
            --backend``; without that nccl for CUDA, and for the CPU "shm" if all ranks are on one Linux node, else gloo.
        device: "cpu", "cuda" (the device of the local rank), "cuda:1" or a ``torch.device``. None: the CUDA device of the
            local rank if there is one and the backend serves it, else the CPU.
        timeout_s: limit in seconds for each of these: connecting to the store, the roll call of the ranks, connecting the
            ranks to each other, and every collective of the default group.

    Returns:
        The world. If its device is a CUDA device, it is made the current one.

    Raises:
        UsageError: the environment is half set or contradicts itself; an argument cannot work, or contradicts the world
            entered before.
        MismatchError: ranks have different versions, backends, strategies or other settings; the text has a table of them.
        WorldError: a rank did not join in time, ended before, or cannot be reached by another one; the text names it.
    """
    if not (isinstance(timeout_s, int | float) and math.isfinite(timeout_s) and timeout_s > 0):
        raise UsageError(explain("timeout_s must be a number of seconds above 0", value=timeout_s, fix="leave it out"))
    world = current()
    if world is not None:
        if world.launcher != FAKE:
            _check_same(world, backend, device, timeout_s)
        return world
    from guozhuang.watch import afterwards

    afterwards.stop()
    backend = backend if backend is not None else requested_backend()
    if dist.is_initialized():
        return _adopt(backend, device, timeout_s)
    from guozhuang.net.meet import RankCard, roll_call
    from guozhuang.world import slurm
    from guozhuang.world.discovery import discover
    from guozhuang.world.threads.settle import available_cpus

    identity = discover()
    hang_timeout = requested_hang_timeout()
    # Check the arguments before any wait, so that impossible ones raise at once. The roll call determines the device's index.
    note = devices.devices_seen(backend, device)
    if identity.launcher == "alone" and slurm.hint(os.environ):
        _log.warning("%s", slurm.hint(os.environ))
    store, meeting = meet(identity, timeout_s)
    cards = [RankCard("", note)]
    if identity.size > 1:
        own = note, settings(backend, device), available_cpus()
        cards = roll_call(store, identity.rank, identity.size, timeout_s, *own)
    hosts = [each.host for each in cards]
    meeting.remove_note()
    cpu_backend, why = devices.backend_of_cpu_ranks(hosts)
    check_settings(cards, identity.rank, cpu_backend)
    identity = complete(identity, hosts)
    chosen_backend, chosen_device = devices.choose_own(
        backend, device, identity, hosts, [each.note for each in cards], os.environ, cpu_backend
    )
    if backend is None and chosen_device.type == "cpu" and identity.rank == 0:
        _log.info("backend %s, the default here: %s", chosen_backend, why)
    before_leaving(devices.take(chosen_device, identity.rank, cards))
    _set_interfaces(len(set(hosts)) > 1, meeting.host)
    try:
        check_ways(store, identity, hosts, chosen_backend, timeout_s)
        make_group(chosen_backend, store, identity, timeout_s, chosen_device)
    except BaseException:
        _restore_interfaces()
        raise
    world = _enter(identity, chosen_device, chosen_backend, timeout_s, made_group=True, asked=(backend, device))
    _start_heartbeat(store, world, identity, hang_timeout, behind_door=bool(meeting.doors))
    return world


def enter_made(identity: Identity, device: torch.device, backend: str, timeout_s: float) -> World:
    """Enter a :data:`FAKE` world; the caller has made its default group, which stands for ``backend``; ``shutdown`` ends it."""
    return _enter(identity, device, backend, timeout_s, made_group=True, asked=(backend, device))


def current() -> World | None:
    """Return the world that ``init`` entered and ``shutdown`` has not left yet; None without one."""
    if _session.world is not None and not dist.is_initialized():
        _forget()  # the user destroyed the group, and so left the world
    return _session.world


def lay_out(layout: Layout) -> World:
    """Lay out the ranks of the current world in another way, and return it. Loaders that are made from now on follow it."""
    assert _session.world is not None
    world = _session.world = replace(_session.world, layout=layout)
    registry.data_share = (world.data_rank, world.data_size)
    return world


def shutdown() -> None:
    """Leave the world: destroy the process group if ``init`` made it; a group that existed before stays.

    Does nothing without a world. Is called automatically at exit. ``init`` may be called again afterwards, by every rank.
    Waits for collectives that are in flight, at most for the time-out of the group.
    """
    if current() is None:
        return
    while _session.before_leaving:
        _session.before_leaving.pop()()
    _stop_heartbeat()
    if _session.made_group:
        dist.destroy_process_group()
        if dist.is_gloo_available():
            # Gloo's threads release the last work, and Python objects with it, a moment after the wait for it has ended.
            # That aborts the process if the interpreter is exiting by then, so wait here where they still are.
            wait_for_threads("pt_gloo_runloop")
    _forget()


def before_leaving(action: Callable[[], None]) -> None:
    """Have ``shutdown`` call ``action`` once, before it destroys the process group; the action registered last is called first.

    Not called if the user destroys the group. For code that keeps threads or process groups of its own in this world.
    """
    if action not in _session.before_leaving:
        _session.before_leaving.append(action)


def _start_heartbeat(
    store: dist.Store, world: World, identity: Identity, hang_timeout: HangTimeout, *, behind_door: bool = False
) -> None:
    if world.size == 1:
        return
    if hang_timeout == "off":
        _log.info("no heartbeat: it was switched off")
        return
    from guozhuang.watch import heartbeat

    point = identity.meeting_point
    keeps = world.rank == 0 and not (isinstance(point, MeetingPoint) and point.is_kept_by_launcher)
    _session.heartbeat = heartbeat.start(
        store,
        world.rank,
        world.size,
        hang_timeout,
        keeps_store=keeps,
        behind_door=behind_door,
        error_file=os.environ.get("TORCHELASTIC_ERROR_FILE", ""),
    )
    if _session.heartbeat is not None:
        from guozhuang.watch.uncaught import UncaughtErrors

        _session.uncaught = UncaughtErrors(_session.heartbeat, _stop_heartbeat)


def _stop_heartbeat(error: BaseException | None = None) -> None:
    running, _session.heartbeat = _session.heartbeat, None
    if running is not None:
        running.stop(error)


def _forget() -> None:
    _stop_heartbeat()
    if _session.uncaught is not None:
        _session.uncaught.leave_alone()
        _session.uncaught = None
    _restore_interfaces()
    _session.world = registry.data_share = registry.own_time = registry.shares = None
    _session.made_group = False
    _session.before_leaving.clear()
    atexit.unregister(_leave)


def _leave() -> None:
    """Leave the world at exit. See [Note: leaving]."""
    if os.getpid() != _session.process:
        return
    error = getattr(sys, "last_value", None)
    if error is not None:
        faulthandler.dump_traceback_later(_LEAVE_AFTER_ERROR_S, exit=True)
    try:
        _stop_heartbeat(error)  # first, so that the other ranks learn of the error even if a later step fails
        shutdown()
    except Exception as failure:
        _log.warning("leaving the world failed: %s", failure)
    finally:
        if error is not None:
            faulthandler.cancel_dump_traceback_later()


def _enter(
    identity: Identity,
    device: torch.device,
    backend: str,
    timeout_s: float,
    *,
    made_group: bool,
    asked: tuple[str | None, str | torch.device | None],
) -> World:
    assert identity.local_rank is not None and identity.local_size is not None
    assert identity.node_rank is not None and identity.num_nodes is not None
    world = World(
        rank=identity.rank,
        size=identity.size,
        local_rank=identity.local_rank,
        local_size=identity.local_size,
        node_rank=identity.node_rank,
        num_nodes=identity.num_nodes,
        device=device,
        launcher=identity.launcher,
        layout=layout_of_environment(identity.size),
    )
    registry.data_share, registry.shares = (world.data_rank, world.data_size), requests.requested_shares()
    _session.world, _session.made_group = world, made_group
    _session.backend, _session.timeout_s, _session.process = backend, timeout_s, os.getpid()
    atexit.unregister(_leave)
    atexit.register(_leave)
    if world.rank == 0:
        _say_if_newer()
    by_whom = ["chosen" if one is None else "as asked" for one in asked]
    _log.info(
        "rank %d of %d on node %d of %d, launcher %s; backend %s (%s), device %s (%s)%s",
        *(world.rank, world.size, world.node_rank, world.num_nodes, world.launcher),
        *(backend, by_whom[0] if made_group else "found", device, by_whom[1]),
        "" if made_group else "; the process group was there already",
    )
    return world


@functools.cache  # once in a process, which may enter several worlds
def _say_if_newer() -> None:
    if text := newer_than_tried():
        _log.warning("%s", text)


def _check_same(world: World, backend: str | None, device: str | torch.device | None, timeout_s: float) -> None:
    fix = "call gz.shutdown() first, or give the same arguments"
    if backend is not None and backend.lower() != _session.backend.lower():
        what = f"gz.init was called before, with backend {_session.backend!r}"
        raise UsageError(explain(what, value=backend, rank=world.rank, fix=fix))
    index, num = world.device.index or 0, devices.num_cuda()  # a bare "cuda" means the device of the world
    if device is not None and devices.choose(None, device, index, num, launcher=world.launcher)[1] != world.device:
        what = f"gz.init was called before, with device {str(world.device)!r}"
        raise UsageError(explain(what, value=str(device), rank=world.rank, fix=fix))
    if _session.made_group and timeout_s not in (DEFAULT_TIMEOUT_S, _session.timeout_s):
        what = f"gz.init was called before, with timeout_s={_session.timeout_s:g}"
        raise UsageError(explain(what, value=timeout_s, rank=world.rank, fix=fix))


def _adopt(backend: str | None, device: str | torch.device | None, timeout_s: float) -> World:
    """Enter a world with the process group that the user made. ``timeout_s`` limits the roll call, if there is one."""
    from guozhuang.net.meet import RankCard, roll_call
    from guozhuang.net.store import next_part
    from guozhuang.world.discovery import discover
    from guozhuang.world.threads.settle import available_cpus

    rank, size, found = dist.get_rank(), dist.get_world_size(), str(dist.get_backend())
    if backend is not None and backend.lower() not in (found, dist.get_backend_config()):
        what = f"torch.distributed was initialised before, with backend {found!r}"
        raise UsageError(
            explain(what, value=backend, rank=rank, fix="leave the backend (--backend) out, or initialise once")
        )
    hang_timeout = requested_hang_timeout()
    known = found if found in dist.Backend.backend_list and found != dist.Backend.UNDEFINED else None
    given = Identity("environment", rank, size)
    # A process group made by hand needs no variables of a launcher, so errors in half set ones are ignored.
    with contextlib.suppress(UsageError):
        identity = discover()
        given = identity if (identity.rank, identity.size) == (rank, size) else given
    store = default_store()
    if size > 1:
        store = next_part(store, "adopted", rank)
    note = devices.devices_seen(known, device)
    # Every rank takes part: one that decided by its own environment could wait for others whose environment differs.
    cards = [RankCard("", note)]
    if size > 1:
        cards = roll_call(store, rank, size, timeout_s, note, None, available_cpus())
    has_places = None not in (given.local_rank, given.local_size, given.node_rank, given.num_nodes)
    if size == 1:
        given = replace(given, local_rank=None, local_size=None)
    if size > 1 and has_places and given.launcher not in devices.BIND_DEVICES:
        identity = given
    else:
        identity = complete(given, [each.host for each in cards])
    _, chosen_device = devices.choose_own(
        known, device, identity, [c.host for c in cards], [c.note for c in cards], os.environ
    )
    before_leaving(devices.take(chosen_device, rank, cards))
    world = _enter(identity, chosen_device, found, timeout_s, made_group=False, asked=(backend, device))
    _start_heartbeat(store, world, identity, hang_timeout)
    return world


def meet(identity: Identity, timeout_s: float) -> tuple[dist.Store, WorldStore]:
    """Return the store of this world: a new one, or a new key prefix in the store of an earlier world of this process.

    Every rank must call equally often. ``init`` calls it too; a program that calls it earlier gets another part.

    Raises:
        UsageError, WorldError: the store could not be started, or not be reached in time.
    """
    from guozhuang.net.meet import open_store

    meeting = _session.meeting
    if meeting is None or identity.meeting_point is None or _session.met_at != identity.meeting_point:
        _leave_meeting()
        meeting = _session.meeting = open_store(
            identity.meeting_point,
            identity.rank,
            timeout_s,
            log_notices=not identity.local_rank,  # one log line per node; where the local rank is unknown, every rank logs
            is_one_node=identity.local_size == identity.size,
        )
        _session.generation, _session.met_at = 0, identity.meeting_point
        # The store is closed at exit, because the threads that serve its ``Door`` must end before the interpreter does.
        atexit.unregister(_leave_meeting)
        atexit.register(_leave_meeting)
    _session.generation += 1
    attempt = identity.meeting_point.attempt if identity.meeting_point else "0"
    return dist.PrefixStore(f"guozhuang/{attempt}/{_session.generation}", meeting.store), meeting


def _leave_meeting() -> None:
    if _session.meeting is not None:
        _session.meeting.close()
        _session.meeting = None


def _set_interfaces(is_remote: bool, host: str | None) -> None:
    from guozhuang.net import interfaces

    wanted = interfaces.variables_of_ranks(host if is_remote else None, os.environ)
    # The variables stay set as long as the world lasts, because groups that are made later read them too.
    os.environ.update(wanted)
    _session.set_interfaces = tuple(wanted)


def _restore_interfaces() -> None:
    for name in _session.set_interfaces:
        os.environ.pop(name, None)
    _session.set_interfaces = ()
