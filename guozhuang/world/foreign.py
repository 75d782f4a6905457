"""Launchers that are recognised but cannot be joined by themselves: a clear error instead of N silent worlds of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from guozhuang.errors import UsageError, explain
from guozhuang.world.identity import Identity
from guozhuang.world.variables import number


@dataclass(frozen=True)
class _Launcher:
    name: str
    size_variable: str
    rank_variable: str


# SLURM_STEP_*, not SLURM_NTASKS: a batch script has the latter too, without being inside a step.
_LAUNCHERS = (
    _Launcher("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    _Launcher("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    _Launcher("Hydra's mpiexec (MPICH, Intel MPI)", "PMI_SIZE", "PMI_RANK"),
)


def refuse(environ: Mapping[str, str]) -> Identity | None:
    """None where no such launcher is seen, or where it started one process only.

    Raises:
        UsageError: the process is one of several started by such a launcher, which say nothing of RANK and WORLD_SIZE.
    """
    for launcher in _LAUNCHERS:
        name = launcher.size_variable
        size = number(environ, name, fix=f"unset {name} if {launcher.name} did not start this process")
        if size is not None and size > 1:
            what = (
                f"{launcher.name} started {size} processes ({name}={size}), but RANK and WORLD_SIZE are not set, so "
                "each of them would train alone"
            )
            fix = (
                f"let {launcher.name} start one `guozhuang run` (or torchrun) per node; or export in each process "
                f"RANK=${launcher.rank_variable}, WORLD_SIZE=${name}, MASTER_ADDR and MASTER_PORT"
            )
            raise UsageError(explain(what, fix=fix))
    return None
