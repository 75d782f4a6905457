"""The agents of a run that meet: by default one for each node, with ranks; another system's run may have others beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Members:
    """All agents of a run, as each of them must know them, and this one among them.

    Attributes:
        names: what errors call them, in the order of their numbers; the first keeps the store.
        takes_next: this agent has no number of its own (``--node-rank``): it takes the next free one from ``first_free`` on.
        first_free: the number from which on agents have none of their own.
        keeper: what errors call the first one with its store.
        has_ranks: whether this agent starts ranks.
        num_servers: how many parameter servers it starts if it has no ranks; with ranks the command line says.
        title: what errors call all of them.
        join_fix, number_fix, missing_fix, count_fix: the remedies where the store cannot be reached, where two agents have one
            number, where some do not come, and where they do not agree who takes part.
        port_option: what gives the port of the store, for errors; "" for the options of the command line.
    """

    names: Sequence[str]
    takes_next: bool = False
    first_free: int = 0
    keeper: str = "the agent of node 0"
    has_ranks: bool = True
    num_servers: int = 0
    title: str = "nodes"
    join_fix: str = (
        "check that `guozhuang run` was started there, address and port, and that both or none have GUOZHUANG_SECRET"
    )
    number_fix: str = "give each its own --node-rank; end agents of an earlier run"
    missing_fix: str = "look at the output of their agents, and check --node-rank and --nnodes of each"
    count_fix: str = "give all of them the same --nnodes; end agents of an earlier run"
    port_option: str = ""


def nodes(count: int) -> Members:
    """Return the members of a run of ``count`` nodes with one agent each."""
    return Members([f"node {node}" for node in range(count)])
