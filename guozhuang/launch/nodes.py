"""Which node this agent is, where a scheduler started one agent per node and the command line does not say."""

from __future__ import annotations

from collections.abc import Mapping

from guozhuang.errors import UsageError, explain
from guozhuang.world import mpi, slurm
from guozhuang.world.identity import LaunchedNode


def of_this_agent(environ: Mapping[str, str]) -> LaunchedNode | None:
    """The node that srun or mpirun started this agent on; None where neither did, or where it started a single one.

    Raises:
        UsageError: several agents were started on a node: one per rank instead of one per node.
    """
    for launcher, per_node, find in (
        ("srun", "srun --ntasks-per-node=1", slurm.node_of),
        ("mpirun", "mpirun --map-by ppr:1:node", mpi.node_of),
    ):
        node = find(environ)
        if node is None:
            continue
        if node.num_tasks != 1:
            what = f"{launcher} started `guozhuang run` {node.num_tasks} times on this node, each to start ranks of its own"
            fix = (
                f"let it start one per node, as in `{per_node} guozhuang run -np RANKS train.py`; or leave `guozhuang run` "
                f"out, as in `{launcher} python train.py`, with a process per rank"
            )
            raise UsageError(explain(what, fix=fix))
        return node if node.num_nodes > 1 else None
    return None
