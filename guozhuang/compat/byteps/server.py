"""``import byteps.server`` is a server or the scheduler until the run ends, in a process whose DMLC_ROLE says that it is one.

An import as ``guozhuang.compat.byteps.server``, or in a process of another role, does nothing.
"""

from __future__ import annotations

import os
import sys

from guozhuang.compat.byteps import bpslaunch


def imported_as_theirs() -> None:
    """Do what ``bpslaunch`` does for DMLC_ROLE=server and DMLC_ROLE=scheduler; return when all ranks have ended with 0.

    Raises:
        SystemExit: with the exit code of ``bpslaunch``, if it is another one.
    """
    if os.environ.get("DMLC_ROLE", "").strip() in ("server", "scheduler"):
        code = bpslaunch.main([])
        if code:
            sys.exit(code)
