"""The identity of a process that no launcher started: a world of one, which needs no network."""

from __future__ import annotations

from collections.abc import Mapping

from guozhuang.world.identity import Identity


def read(environ: Mapping[str, str]) -> Identity:
    """Return the identity of a process without a launcher; ``environ`` is not read."""
    del environ
    return Identity("alone", rank=0, size=1, local_rank=0, local_size=1, node_rank=0, num_nodes=1)
