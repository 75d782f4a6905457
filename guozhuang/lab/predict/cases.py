"""What is predicted, case by case, and what of one process must be measured for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from guozhuang.cost.cluster import SHARED_MEMORY, SHARED_MEMORY_LINK, Cluster, LinkSpeed
from guozhuang.cost.describe import TCP_LATENCY_S
from guozhuang.cost.prediction.predict import BUCKETED, NO_EXCHANGE, ONE_PROCESS
from guozhuang.errors import UsageError, explain
from guozhuang.lab.contender import Contender
from guozhuang.lab.predict import profile as profiles
from guozhuang.world.machine import usable_cores

_MOST_CROWD = 8  # processes that are measured side by side


@dataclass(frozen=True)
class Case:
    """A strategy on a number of ranks of the cluster, before it is predicted.

    Attributes:
        one: the strategy, as a row of a comparison has it.
        cluster: where the ranks will train; it may have more of them.
        num_ranks: how many ranks.
        on_one_machine: how many of them share a machine.
        num_threads: compute threads of each.
        backend: what carries their collectives.
        is_here: whether they would all run on this machine.
    """

    one: Contender
    cluster: Cluster
    num_ranks: int
    on_one_machine: int
    num_threads: int
    backend: str
    is_here: bool


def unmeasured_machine(on_cpu: bool) -> Cluster:
    """Return this machine as a cluster of one node, before anything of it is measured.

    Raises:
        UsageError: the ranks would compute on CUDA devices.
    """
    cores = usable_cores()
    memory = float(psutil.virtual_memory().total)
    if not on_cpu:
        what = "predictions for CUDA devices from a profile are not calibrated yet"
        raise UsageError(explain(what, fix="say --device cpu, or ask guozhuang plan --model, which uses data sheets"))
    unknown = LinkSpeed(TCP_LATENCY_S, 0.0)
    return Cluster(1, cores, cores, SHARED_MEMORY_LINK, unknown, SHARED_MEMORY, node_memory_bytes=memory, name="here")


def wanted(cases: Sequence[Case]) -> profiles.Wanted:
    """Return what must be measured to predict these."""
    least = min(case.num_threads for case in cases)
    crowds = {(1, least): None}
    for case in cases:
        crowds[1, case.num_threads] = None
        crowds[min(case.on_one_machine, _MOST_CROWD), case.num_threads] = None
    backends = dict.fromkeys(case.backend for case in cases if case.num_ranks > 1)
    recordings = [
        profiles.Recording(case.one, case.num_ranks, case.cluster.num_nodes, case.backend, least)
        for case in cases
        if case.one.strategy not in (NO_EXCHANGE, ONE_PROCESS, *(BUCKETED if case.num_ranks == 1 else ()))
    ]
    return profiles.Wanted(tuple(crowds), tuple(backends), tuple(recordings))
