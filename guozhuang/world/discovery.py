"""Find out which launcher started this process, from its environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from guozhuang.errors import UsageError, explain
from guozhuang.world import dmlc, mpi, slurm, torchrun
from guozhuang.world.identity import Identity
from guozhuang.world.variables import number

# Tried in this order: DMLC's variables are exported for this purpose, as RANK is. Under mpirun inside a Slurm job ranks inherit
# srun's variables too, so Open MPI comes before Slurm.
# To add a launcher, write a module with a function like those below, and add the function to this tuple.
LAUNCHERS: tuple[Callable[[Mapping[str, str]], Identity | None], ...] = (
    dmlc.read,
    mpi.read_open_mpi,
    slurm.read,
    mpi.read_hydra,
)


def discover(environ: Mapping[str, str] | None = None) -> Identity:
    """Return the identity of the process that has this environment (None: of this one). Changes nothing, waits for nobody.

    RANK is set for this very purpose, so it takes precedence over the variables that a scheduler sets in every process. Reads
    nothing but ``environ``, except under Hydra, where only the command line of its helper distinguishes one run from another.

    Raises:
        UsageError: the environment is half set, or contradicts itself.
    """
    environ = os.environ if environ is None else environ
    if "RANK" not in environ:
        for read in LAUNCHERS:
            identity = read(environ)
            if identity is not None:
                _check_size(environ, identity)
                return identity
    alone = Identity("alone", rank=0, size=1, local_rank=0, local_size=1, node_rank=0, num_nodes=1)
    return torchrun.read(environ) or alone


def _check_size(environ: Mapping[str, str], identity: Identity) -> None:
    """Raise if WORLD_SIZE, which a batch script may export, differs from the launcher's number of processes."""
    size = number(environ, "WORLD_SIZE", fix="leave WORLD_SIZE out: the launcher tells it")
    if size is not None and size != identity.size:
        what = (
            f"WORLD_SIZE={size} was exported, but the launcher ({identity.launcher}) started {identity.size} processes"
        )
        fix = "leave WORLD_SIZE out, or export RANK for each process too"
        raise UsageError(explain(what, rank=identity.rank, fix=fix))
