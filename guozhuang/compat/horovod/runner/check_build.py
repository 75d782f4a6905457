"""The table that ``horovodrun --check-build`` prints."""

from __future__ import annotations

import sys

import torch

from guozhuang.compat.horovod.common import util
from guozhuang.compat.horovod.version import __version__


def table() -> str:
    """Return the table: which features are available, in Horovod's order, then Guozhuang's own."""
    frameworks = {"TensorFlow": False, "PyTorch": True, "MXNet": False}
    controllers = {"MPI": util.mpi_built(), "Gloo": util.gloo_built()}
    operations = {
        "NCCL": bool(util.nccl_built()),
        "DDL": util.ddl_built(),
        "CCL": util.ccl_built(),
        "MPI": util.mpi_built(),
        "Gloo": util.gloo_built(),
        "shared memory, between processes of a host": sys.platform == "linux",
    }
    lines = [f"Horovod v{__version__}, by Guozhuang on PyTorch {torch.__version__}:"]
    for title, rows in (
        ("Available Frameworks", frameworks),
        ("Available Controllers", controllers),
        ("Available Tensor Operations", operations),
    ):
        lines += ["", f"{title}:", *(f"    [{'X' if there else ' '}] {name}" for name, there in rows.items())]
    return "\n".join(lines)
