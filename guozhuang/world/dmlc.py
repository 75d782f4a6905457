"""The identity of a worker process by the variables DMLC_* and BYTEPS_*, which bpslaunch sets, or a user by hand.

There a "worker" is a node with one process per device, so its processes are numbered node by node. ``bpslaunch`` sets RANK and
the variables that belong to it too, which come first; what stands here is for processes that were started without it. Those
need no scheduler: rank 0 keeps the store, at the scheduler's address.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from guozhuang.errors import UsageError, explain
from guozhuang.net.meeting_point import MeetingPoint
from guozhuang.world import torchrun
from guozhuang.world.identity import Identity
from guozhuang.world.variables import number

_SIGNS = (
    "BYTEPS_LOCAL_RANK",
    "BYTEPS_LOCAL_SIZE",
    "BYTEPS_GLOBAL_RANK",
    "DMLC_NUM_WORKER",
    "DMLC_WORKER_ID",
    "DMLC_ROLE",
)
_FIX = "start the script with bpslaunch, which sets it, or export it for each process"
_PORT = "DMLC_PS_ROOT_PORT, or end a scheduler that holds it: processes that were started by hand need none"
# What of an environment other than the place of a process decides how ranks meet.
_KEPT = ("GUOZHUANG_SECRET", "KUBERNETES_SERVICE_HOST")


def read(environ: Mapping[str, str]) -> Identity | None:
    """Return the identity given by DMLC_NUM_WORKER, DMLC_WORKER_ID, BYTEPS_LOCAL_RANK and so on; None if none of them is set.

    Raises:
        UsageError: the environment is half set, contradicts itself, or is that of a server or of the scheduler.
    """
    present = [name for name in _SIGNS if name in environ]
    if not present:
        return None
    role = environ.get("DMLC_ROLE", "worker").strip()
    if role != "worker":
        what = f"DMLC_ROLE={role}: this process is no worker, and only workers run the training script"
        raise UsageError(explain(what, fix=f"start it as `DMLC_ROLE={role} bpslaunch`, or export DMLC_ROLE=worker"))
    unset = f"unset {', '.join(present)} to run as one process"
    told = (f"but {present[0]}={environ[present[0]]!r} is", f"{_FIX}; or {unset}")
    num_workers = needed(environ, "DMLC_NUM_WORKER", *told, at_least=1)
    local_size = needed(environ, "BYTEPS_LOCAL_SIZE", *told, at_least=1)
    local_rank = needed(environ, "BYTEPS_LOCAL_RANK", *told, below=("BYTEPS_LOCAL_SIZE", local_size))
    size = num_workers * local_size
    rank = number(environ, "BYTEPS_GLOBAL_RANK", below=("DMLC_NUM_WORKER * BYTEPS_LOCAL_SIZE", size), fix=_FIX)
    if rank is None:
        worker = needed(environ, "DMLC_WORKER_ID", *told, below=("DMLC_NUM_WORKER", num_workers))
        rank = worker * local_size + local_rank
    elif rank % local_size != local_rank:
        what = f"BYTEPS_GLOBAL_RANK={rank} is not process BYTEPS_LOCAL_RANK={local_rank} of any {local_size} in a row"
        fix = "leave BYTEPS_GLOBAL_RANK out: DMLC_WORKER_ID * BYTEPS_LOCAL_SIZE + BYTEPS_LOCAL_RANK is taken"
        raise UsageError(explain(what, fix=fix))
    places = {
        "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": rank // local_size, "GROUP_WORLD_SIZE": num_workers,
    }  # fmt: skip
    found = {name: str(value) for name, value in places.items()} | {k: environ[k] for k in _KEPT if k in environ}
    if size > 1:
        found["MASTER_ADDR"], found["MASTER_PORT"] = meeting(environ, f"{size} processes")
    identity = torchrun.read(found)
    assert identity is not None
    point = identity.meeting_point
    return (
        replace(identity, meeting_point=replace(point, port_option=_PORT))
        if isinstance(point, MeetingPoint)
        else identity
    )


def meeting(environ: Mapping[str, str], who: str) -> tuple[str, str]:
    """Return DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT.

    Args:
        environ: the environment.
        who: what errors call those that meet there.

    Raises:
        UsageError: one is not set, or the port is none.
    """
    for name in ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"):
        if not environ.get(name, "").strip():
            what = f"environment variable {name} is not set, but {who} must meet"
            raise UsageError(explain(what, fix="export the same one for all of them"))
    limit = ("the number of TCP ports", 65536)
    port = number(environ, "DMLC_PS_ROOT_PORT", at_least=1, below=limit, fix="export the same port for all of them")
    return environ["DMLC_PS_ROOT_URI"].strip(), str(port)


def needed(
    environ: Mapping[str, str],
    name: str,
    why: str,
    fix: str,
    at_least: int = 0,
    below: tuple[str, int] | None = None,
) -> int:
    """Return the whole number that a variable holds; UsageError if it is not set, with ``why`` that matters, and the remedy."""
    found = number(environ, name, at_least=at_least, below=below, fix=fix) if environ.get(name, "").strip() else None
    if found is None:
        raise UsageError(explain(f"environment variable {name} is not set, {why}", fix=fix))
    return found
