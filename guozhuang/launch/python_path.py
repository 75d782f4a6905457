"""What ranks are told for scripts of Horovod: the search path where ``import horovod`` is found, variables of one process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# Where the driver of an elastic run is.
ELASTIC = "GUOZHUANG_HOROVOD_ELASTIC"
# What a launcher tells one process of who it is, in a run that is elastic or not; no other run inherits it.
OF_A_PROCESS = tuple(
    "HOROVOD_" + name
    for name in ("HOSTNAME", "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "ELASTIC")
)
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
