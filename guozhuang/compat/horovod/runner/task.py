"""The program that ``horovod.run`` starts in each process: ``python -m guozhuang.compat.horovod.runner.task``."""

from __future__ import annotations

from guozhuang.compat.horovod.common import variables as horovod_variables
from guozhuang.compat.horovod.common.state import state
from guozhuang.errors import UsageError, explain
from guozhuang.launch.functions import mailbox


def _rank() -> int:
    """Return the rank of this process among all that were launched; in an elastic run its rank in the present round.

    It may differ from the rank in the Horovod world: with ``hvd.init(comm=...)`` there may be several such worlds.
    """
    here = state()
    rank = horovod_variables.read().rank if here is None else here.world.rank
    if rank is None:
        fix = "this program is started by horovod.run(), not by hand"
        raise UsageError(explain("HOROVOD_RANK is not set, so nobody knows whose result this is", fix=fix))
    return rank


if __name__ == "__main__":
    mailbox.run(_rank)
