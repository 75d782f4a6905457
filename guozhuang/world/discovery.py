"""Which launcher started this process, found out from its environment alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from guozhuang.world import alone, foreign, torchrun
from guozhuang.world.identity import Identity

# In the order of asking: what was exported for this very purpose outranks what a scheduler leaves in every process.
# A further launcher is one file with such a function, and one line here.
LAUNCHERS: tuple[Callable[[Mapping[str, str]], Identity | None], ...] = (
    torchrun.read,
    foreign.refuse,
    alone.read,
)


def discover(environ: Mapping[str, str]) -> Identity:
    """The identity of the process that has this environment. Pure: reads nothing else, changes nothing.

    Raises:
        UsageError: the environment is half set, contradicts itself, or belongs to a launcher we cannot follow.
    """
    for read in LAUNCHERS:
        identity = read(environ)
        if identity is not None:
            return identity
    raise AssertionError("the last launcher of the list always answers")
