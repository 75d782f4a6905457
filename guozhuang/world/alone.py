"""Nobody started us as one of several: a world of one, which needs no network."""

from __future__ import annotations

from collections.abc import Mapping

from guozhuang.world.identity import Identity


def read(environ: Mapping[str, str]) -> Identity:
    """The identity of a process that no launcher speaks of; ``environ`` is not looked at."""
    del environ
    return Identity("alone", rank=0, size=1, local_rank=0, local_size=1, node_rank=0, num_nodes=1)
