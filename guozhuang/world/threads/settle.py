"""Look at the cores and threads of this process, have ``choice`` decide, and do what it says."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from guozhuang.errors import UsageError
from guozhuang.watch import processes
from guozhuang.world import machine, slurm
from guozhuang.world.mpi import OPEN_MPI
from guozhuang.world.requests import requested_bind
from guozhuang.world.threads import choice

_log = logging.getLogger("guozhuang")
# Set in ranks of `guozhuang run`, whose agent has chosen OMP_NUM_THREADS itself.
_OF_OUR_AGENT = "GUOZHUANG_RUN"


def available_cpus() -> list[int]:
    """Return the CPUs on which this rank may run, for the roll call: its own, or mpirun's.

    See [Note: threads and cores] in ``threads.choice``.
    """
    return _available(_wanted())[0]


def available_cores(environ: Mapping[str, str]) -> int:
    """Return how many cores the ranks that an agent starts on this node can keep busy."""
    given = cpus_of_step(environ)
    return machine.usable_cores() if given is None else max(1, min(machine.usable_cores(), given))


def leave_default_binding() -> None:
    """In an agent: run on the cores of mpirun if its default binding leaves some of them idle, so that the ranks do."""
    cpus, is_freed = _available(None)
    if is_freed:
        _run_on(cpus)


def settle(rank: int, cpus_of: Mapping[int, Sequence[int]]) -> Callable[[], None]:
    """Choose the threads and cores of this rank, which computes on the CPU; rank 0 logs the choice.

    Args:
        rank: this rank.
        cpus_of: the CPUs (``available_cpus``) of each rank of its node, by rank.

    Returns:
        A function that restores what this rank had before.

    Raises:
        UsageError: GUOZHUANG_BIND holds another word than it may.
    """
    before, num_before = machine.own_cpus(), torch.get_num_threads()
    available, was_freed = _available(_wanted())
    known = {**cpus_of, rank: available}
    chosen = choice.choose(
        choice.CoresOfRank(
            rank,
            known,
            machine.cores_of(sorted({cpu for cpus in known.values() for cpu in cpus})),
            num_before,
            chosen_by(),
            machine.quota_cores(),
            cpus_of_step(),
            requested_bind(),
            was_freed,
        )
    )
    cpus = sorted(chosen.cpus) if chosen.cpus is not None else available
    is_bound = cpus == before or _run_on(cpus)
    if chosen.num_threads != num_before:
        torch.set_num_threads(chosen.num_threads)
    if rank == 0:
        _log.info("%s", chosen.text)
    if not is_bound:
        _log.warning("[rank %d] the system does not let this process run on the CPUs %s alone", rank, cpus)
    if chosen.refused and rank == min(known):
        _log.warning("ranks of this node are not bound to cores (GUOZHUANG_BIND): %s", chosen.refused)

    def restore() -> None:
        if torch.get_num_threads() == chosen.num_threads != num_before:
            torch.set_num_threads(num_before)
        if is_bound and machine.own_cpus() == cpus != before:
            _run_on(before)

    return restore


def _wanted() -> int | None:
    return torch.get_num_threads() if chosen_by() else None


def _available(wanted: int | None) -> tuple[list[int], bool]:
    """Return the CPUs on which this process may run, and whether these are mpirun's, whose default binding leaves some idle.

    Args:
        wanted: the number of threads that a user chose for this rank; None: nobody did, or this process is an agent.
    """
    own = machine.own_cpus()
    counts = [os.environ.get(name, "") for name in (OPEN_MPI.size, OPEN_MPI.local_size)]
    mpirun = _first_without(OPEN_MPI.rank) if all(map(str.isdecimal, counts)) else None
    if mpirun is None:
        return own, False
    try:
        theirs = machine.own_cpus(mpirun)
    except OSError:
        return own, False
    num_ranks, num_local = map(int, counts)
    if not choice.leaves_idle(own, theirs, machine.cores_of(theirs), num_ranks, num_local, wanted):
        return own, False
    command = [word.decode(errors="replace") for word in processes.command_line(mpirun)]
    variables = {**_environment(mpirun), **os.environ}
    return (own, False) if choice.asks_for_binding(command, variables) else (theirs, True)


def cpus_of_step(environ: Mapping[str, str] | None = None) -> int | None:
    """Return the CPUs that Slurm gave to the step on this node, as ``slurm.cpus_of_step``, but None where that raises."""
    with contextlib.suppress(UsageError):  # a rank of another launcher need not have whole variables of Slurm
        return slurm.cpus_of_step(os.environ if environ is None else environ)
    return None


def chosen_by() -> str:
    """Return what chose the number of threads, or their places, for this rank; "" if nothing did."""
    first, was_set = _at_first()
    return choice.chosen_by(os.environ, _agents_variables(), was_set or torch.get_num_threads() != first)


@functools.cache  # later calls would see what `settle` has set, in an earlier world of this process
def _at_first() -> tuple[int, bool]:
    """Return torch's number of threads before this module changed it, and whether the script had set it.

    A build of torch with MKL tells: ``torch.set_num_threads`` ends MKL's own adjustment of that number. Without MKL any
    number that is no usual default is taken for the script's.
    """
    number = torch.get_num_threads()
    if not os.environ.get("MKL_DYNAMIC"):
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
            return number, not library.mkl_serv_get_dynamic()
    asked = {os.environ.get(name, "") for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    usual = {len(machine.own_cpus()), machine.num_cores(), os.cpu_count() or 1}
    return number, number not in usual | {int(each) for each in asked if each.isdecimal()}


def asked_threads() -> tuple[str, int | None]:
    """Return the text of OMP_NUM_THREADS, and the number of threads that it asks for; None if it is no number above 0."""
    text = os.environ.get("OMP_NUM_THREADS", "").strip()
    return text, (int(text) or None) if text.isascii() and text.isdigit() else None


def _agents_variables() -> list[str] | None:
    """Return the names of the variables that torchrun's agent was started with; None for any other agent, or an unknown one."""
    marker = "TORCHELASTIC_RUN_ID"
    agent = _first_without(marker) if marker in os.environ and _OF_OUR_AGENT not in os.environ else None
    if agent is None:
        return None
    words = [word.decode(errors="replace") for word in processes.command_line(agent)]
    is_ours = any(os.path.basename(word).split(".")[0] == "guozhuang" for word in words)
    return None if is_ours else list(_environment(agent)) or None


def _first_without(variable: str) -> int | None:
    """Return the nearest ancestor that was started without a variable of its ranks: their launcher. None: it is hidden."""
    for pid in processes.ancestors(os.getpid()):
        variables = _environment(pid)
        if variable not in variables:
            return pid if variables else None
    return None


def _environment(pid: int) -> dict[str, str]:
    pairs = (each.decode(errors="replace").partition("=") for each in processes.environment(pid))
    return {name: value for name, _, value in pairs}


def _run_on(cpus: Sequence[int]) -> bool:
    """Let all threads of this process run on these CPUs alone; return whether the system allowed it."""
    try:
        for thread in map(int, os.listdir(processes.path_of("task"))):
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(thread, cpus)
    except OSError:  # no such file or right here, or a cpuset that lacks these CPUs
        return False
    return True
