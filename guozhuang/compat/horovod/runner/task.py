"""What each process of ``horovod.run`` does: fetch the function, call it, leave what it returns.

``python -m guozhuang.compat.horovod.runner.task``, started by the launcher.
"""

from __future__ import annotations

import pickle
import sys

from guozhuang.compat.horovod.common import variables as horovod_variables
from guozhuang.compat.horovod.common.basics import state
from guozhuang.compat.horovod.runner import mailbox
from guozhuang.errors import UsageError, explain
from guozhuang.world.requests import requested_task


def main() -> None:
    """Do all of it. An exception of the function ends the process, with its traceback."""
    import cloudpickle

    secret, doors = requested_task()
    with mailbox.visit(secret, doors) as visitor:
        path, function = pickle.loads(visitor.function())
    # Modules that lie beside the caller's script are found here as well.
    sys.path += [entry for entry in path if entry not in sys.path]
    result = cloudpickle.dumps(cloudpickle.loads(function)())
    with mailbox.visit(secret, doors) as visitor:
        visitor.leave(_rank(), result)


def _rank() -> int:
    """The rank of this process among all that were launched, in an elastic run the one it has now.

    Not that in the Horovod world: of these there may be several, ``hvd.init(comm=...)``.
    """
    here = state()
    rank = horovod_variables.read().rank if here is None else here.world.rank
    if rank is None:
        fix = "this program is started by horovod.run(), not by hand"
        raise UsageError(explain("HOROVOD_RANK is not set, so nobody knows whose result this is", fix=fix))
    return rank


if __name__ == "__main__":
    main()
