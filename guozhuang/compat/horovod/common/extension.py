"""What every run gets so that Horovod's scripts run as they are, and what processes of ``horovodrun`` find besides."""

from __future__ import annotations

import dataclasses

from guozhuang.launch.request import Extension, with_folders

# Where the driver of an elastic run is.
ELASTIC = "GUOZHUANG_HOROVOD_ELASTIC"
# What a launcher tells one process of who it is, in a run that is elastic or not; no other run inherits it.
OF_A_PROCESS = tuple(
    "HOROVOD_" + name
    for name in ("HOSTNAME", "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "ELASTIC")
)
# A folder that holds the package `horovod` alone. Where Horovod itself is installed, that package steps aside for it.
FOLDER = "compat/horovod/on_path"
EXTENSION = Extension(
    python_path=(FOLDER,),
    of_a_process=(ELASTIC, *OF_A_PROCESS),
    carried=("HOROVOD_",),
    other_names={"GLOO_SOCKET_IFNAME": "HOROVOD_GLOO_IFACE"},
)
OF_HOROVODRUN = dataclasses.replace(
    EXTENSION,
    rank_variables={
        "HOROVOD_HOSTNAME": "{host}",
        "HOROVOD_RANK": "{rank}",
        "HOROVOD_SIZE": "{size}",
        "HOROVOD_LOCAL_RANK": "{local_rank}",
        "HOROVOD_LOCAL_SIZE": "{local_size}",
        "HOROVOD_CROSS_RANK": "{cross_rank}",
        "HOROVOD_CROSS_SIZE": "{cross_size}",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    },
)
#: The folder's path on this machine.
ON_PATH = with_folders("", EXTENSION.python_path)["PYTHONPATH"]
