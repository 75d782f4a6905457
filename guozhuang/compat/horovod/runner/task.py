"""The program of each process of ``horovod.run``: fetches the function, calls it, and sends back its result.

The launcher starts it as ``python -m guozhuang.compat.horovod.runner.task``.
"""

from __future__ import annotations

import os
import pickle
import sys

from guozhuang.compat.horovod.common import variables as horovod_variables
from guozhuang.compat.horovod.common.basics import state
from guozhuang.compat.horovod.runner import mailbox
from guozhuang.errors import UsageError, explain


def main() -> None:
    """Fetch the function, call it and send the result. An exception of the function ends the process with its traceback."""
    import cloudpickle

    secret, doors = _requested()
    with mailbox.visit(secret, doors) as visitor:
        path, function = pickle.loads(visitor.function())
    # The caller's path is added, so that modules beside its script can be imported.
    sys.path += [entry for entry in path if entry not in sys.path]
    result = cloudpickle.dumps(cloudpickle.loads(function)())
    with mailbox.visit(secret, doors) as visitor:
        visitor.leave(_rank(), result)


def _requested() -> tuple[bytes, list[tuple[str, int]]]:
    """Return the secret and the doors of the mailbox that holds the function.

    They come from environment variable GUOZHUANG_TASK, as in ``00ff...@127.0.0.1:41234,10.0.0.1:41235``. It is removed, so that
    processes started from here do not inherit the secret.

    Raises:
        UsageError: the variable is missing, or holds something else.
    """
    secret, _, doors = os.environ.pop("GUOZHUANG_TASK", "").partition("@")
    try:
        found = [(host, int(port)) for host, _, port in (door.rpartition(":") for door in doors.split(","))]
        return bytes.fromhex(secret), found
    except ValueError:
        # The value is not shown: it holds a secret.
        what = "environment variable GUOZHUANG_TASK does not say where the function is to be found"
        raise UsageError(explain(what, fix="this program is started by horovod.run(), not by hand")) from None


def _rank() -> int:
    """Return the rank of this process among all that were launched; in an elastic run its present one.

    It may differ from the rank in the Horovod world: with ``hvd.init(comm=...)`` there may be several such worlds.
    """
    here = state()
    rank = horovod_variables.read().rank if here is None else here.world.rank
    if rank is None:
        fix = "this program is started by horovod.run(), not by hand"
        raise UsageError(explain("HOROVOD_RANK is not set, so nobody knows whose result this is", fix=fix))
    return rank


if __name__ == "__main__":
    main()
