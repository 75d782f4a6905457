"""The search path of Python in the ranks: what ``import horovod`` finds there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# A folder that holds the package `horovod` alone. Found by its place: nothing here imports it.
HOROVOD = str(Path(__file__).parents[1] / "compat" / "horovod" / "on_path")


def with_horovod(environ: Mapping[str, str]) -> dict[str, str]:
    """PYTHONPATH for a rank in which ``import horovod`` is to be found; processes that the rank starts inherit it.

    What the user has on it comes first. Where Horovod itself is installed, that package steps aside for it.
    """
    # An empty variable is none, but an empty entry is the current folder.
    before = [environ["PYTHONPATH"]] if environ.get("PYTHONPATH") else []
    if before and HOROVOD in before[0].split(os.pathsep):
        return {}
    return {"PYTHONPATH": os.pathsep.join([*before, HOROVOD])}
