"""The environment variables and import folder that launchers need for Horovod scripts, and those that ``horovodrun`` adds."""

from __future__ import annotations

import dataclasses

from guozhuang.compat.redirect import ON_PATH_FOLDER
from guozhuang.launch.request import Extension, with_folders

# In an elastic run this environment variable holds a worker's number and the address of the driver.
ELASTIC = "GUOZHUANG_HOROVOD_ELASTIC"
# Variables by which a launcher gives one process its rank and sizes; runs that the process starts do not inherit them.
OF_A_PROCESS = tuple(
    "HOROVOD_" + name
    for name in ("HOSTNAME", "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "ELASTIC")
)
# The same for BytePS's scripts. ``bpslaunch`` sets the last one in its ranks: it has said already what means nothing.
BPSLAUNCH = "GUOZHUANG_BPSLAUNCH"
_OF_BYTEPS = ("BYTEPS_LOCAL_RANK", "BYTEPS_LOCAL_SIZE", "BYTEPS_GLOBAL_RANK", BPSLAUNCH)
EXTENSION = Extension(
    python_path=(ON_PATH_FOLDER,),
    of_a_process=(ELASTIC, *OF_A_PROCESS, *_OF_BYTEPS),
    carried=("HOROVOD_", "BAGUA_", "BYTEPS_"),
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
#: The path of ``ON_PATH_FOLDER`` on this machine.
ON_PATH = with_folders("", EXTENSION.python_path)["PYTHONPATH"]
