"""A time-out that passes because somebody does not come, but only after what had to succeed within it."""

import datetime

import torch
import torch.distributed as dist

from tests.waiting import EXPIRES_S


def expires_soon() -> None:
    """All groups of this process get a time-out that is to be reached."""
    for group in list(dist.distributed_c10d._world.pg_map):
        group._get_backend(torch.device("cpu"))._set_default_timeout(datetime.timedelta(seconds=EXPIRES_S))
