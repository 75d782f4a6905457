"""What one agent of a run by roles (worker, server, scheduler) is to start, by the variables DMLC_* and BYTEPS_*."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from guozhuang.errors import UsageError, explain
from guozhuang.launch.rendezvous.members import Members
from guozhuang.world.dmlc import meeting, needed

_ROLES = ("worker", "server", "scheduler")
_SAME_NUMBERS = "export the same DMLC_NUM_WORKER and DMLC_NUM_SERVER on all machines"
_EVERYWHERE = "export it: the same on all machines, but for DMLC_ROLE and DMLC_WORKER_ID"


@dataclass(frozen=True)
class LaunchedRole:
    """What one ``bpslaunch`` is to start, by its variables.

    Attributes:
        role: worker, server or scheduler.
        num_workers, num_servers: of the run. A worker is a machine, not a process. Without ``meets`` there are no servers.
        worker: the number of this worker, from 0; 0 for other roles.
        num_ranks: how many processes this worker starts.
        host, port: where the scheduler keeps the store; "" where one worker needs neither.
        interface: the network interface that DMLC_INTERFACE names; None without it.
        meets: whether several ``bpslaunch`` meet at the scheduler: more than one worker, or BYTEPS_FORCE_DISTRIBUTED.
    """

    role: str
    num_workers: int
    worker: int
    num_ranks: int
    num_servers: int = 0
    host: str = ""
    port: str = ""
    interface: str | None = None
    meets: bool = False


def launched_role(environ: Mapping[str, str]) -> LaunchedRole:
    """Read what a ``bpslaunch`` is to start.

    Raises:
        UsageError: a variable is missing or cannot be; the text names it.
    """
    role = environ.get("DMLC_ROLE", "").strip()
    if role not in _ROLES:
        what = "environment variable DMLC_ROLE says what bpslaunch starts"
        raise UsageError(explain(what, value=role or "not set", fix=f"export one of {', '.join(_ROLES)}"))
    told = (f"which a {role} needs", _EVERYWHERE)
    num_workers, worker = needed(environ, "DMLC_NUM_WORKER", *told, at_least=1), 0
    num_ranks = _num_devices(environ)
    if role == "worker":
        worker = needed(environ, "DMLC_WORKER_ID", *told, below=("DMLC_NUM_WORKER", num_workers))
        given = environ.get("BYTEPS_GLOBAL_RANK", "").strip()
        if given and given != str(worker * num_ranks):
            what = (
                f"BYTEPS_GLOBAL_RANK says another rank than DMLC_WORKER_ID={worker} with {num_ranks} processes a worker"
            )
            raise UsageError(
                explain(what, value=given, fix="leave it out: bpslaunch numbers the ranks by DMLC_WORKER_ID")
            )
    found = LaunchedRole(role, num_workers, worker, num_ranks)
    if num_workers == 1 and environ.get("BYTEPS_FORCE_DISTRIBUTED", "").strip() in ("", "0"):
        return found
    host, port = meeting(environ, f"a {role} and others")
    num_servers = needed(environ, "DMLC_NUM_SERVER", *told)
    interface = environ.get("DMLC_INTERFACE", "").strip() or None
    return replace(found, num_servers=num_servers, host=host, port=port, interface=interface, meets=True)


def members_of(role: LaunchedRole, advice: str) -> Members | None:
    """Return all that meet at the scheduler, this one among them; None if a worker is alone.

    Args:
        role: this one.
        advice: what else may be the matter if they do not agree who takes part.
    """
    if not role.meets:
        return None
    workers = [f"worker {number}" for number in range(role.num_workers)]
    return Members(
        ["scheduler", *workers, *(f"server {number}" for number in range(role.num_servers))],
        takes_next=role.role == "server",
        first_free=1 + role.num_workers,
        keeper="the scheduler",
        has_ranks=role.role == "worker",
        num_servers=int(role.role == "server"),
        title="bpslaunches",
        join_fix="check that `DMLC_ROLE=scheduler bpslaunch` was started, that DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT are its "
        "address everywhere, and that all or none have GUOZHUANG_SECRET",
        number_fix="give each worker a DMLC_WORKER_ID of its own; end processes of an earlier run",
        missing_fix=f"look at their output, and {_SAME_NUMBERS}; PET_RDZV_CONF=timeout=SECONDS changes the limit",
        count_fix=f"{_SAME_NUMBERS}; {advice}",
        port_option="DMLC_PS_ROOT_PORT",
    )


def _num_devices(environ: Mapping[str, str]) -> int:
    """Return the number of devices that NVIDIA_VISIBLE_DEVICES names: 1 if it names none, those of PyTorch for "all"."""
    text = environ.get("NVIDIA_VISIBLE_DEVICES", "").strip()
    if text == "all":
        import torch

        return max(1, torch.cuda.device_count())
    return 1 if text in ("", "none", "void") else len([each for each in text.split(",") if each.strip()])
