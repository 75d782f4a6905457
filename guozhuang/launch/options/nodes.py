"""Find the number of this node from srun's or mpirun's variables, if they started one agent per node."""

from __future__ import annotations

import os
from collections.abc import Mapping

from guozhuang.errors import UsageError, explain
from guozhuang.world import mpi, slurm
from guozhuang.world.identity import LaunchedNode


def of_this_agent(environ: Mapping[str, str], who: str = "guozhuang run") -> LaunchedNode | None:
    """Return the node that srun or mpirun started this agent on; None if neither did, or if they started a single agent.

    Args:
        environ: the environment with srun's or mpirun's variables.
        who: the agent's program, for the text of an error.

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
            what = f"{launcher} started `{who}` {node.num_tasks} times on this node, each to start ranks of its own"
            fix = (
                f"let it start one per node, as in `{per_node} guozhuang run -np RANKS train.py`; or leave `{who}` "
                f"out, as in `{launcher} python train.py`, with a process per rank"
            )
            raise UsageError(explain(what, fix=fix))
        return node if node.num_nodes > 1 else None
    return None


def refuse_others(who: str) -> None:
    """Refuse to continue if srun or mpirun started this program, which starts all ranks of a run itself, several times.

    Args:
        who: the program's name.

    Raises:
        UsageError: srun or mpirun started the program several times, on one node or several.
    """
    node = of_this_agent(os.environ, who)
    if node is not None:
        what = f"srun or mpirun started `{who}` on {node.num_nodes} nodes, and each would start all ranks of a run of its own"
        fix = f"start `{who}` once and give -H host1:N,host2:N; or `srun --ntasks-per-node=1 guozhuang run`, without it"
        raise UsageError(explain(what, fix=fix))
