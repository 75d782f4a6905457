"""The settings of an elastic run: made from the command line of ``horovodrun``, read by the elastic driver."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from guozhuang.compat.horovod.common import variables as horovod_variables
from guozhuang.compat.horovod.runner import static_run
from guozhuang.launch.options import nodes

_ELASTIC_TIMEOUT_S = 600.0
_START_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class ElasticSettings:
    """The settings of an elastic run.

    Attributes:
        command: the program of a worker and its arguments.
        num_proc: the number of workers needed before training starts; at least ``min_np``.
        min_np: the smallest number of workers with which training continues.
        max_np: the largest number of workers; None: one for each slot.
        slots_per_host: the slots of a host for which the script prints no number; None: 1.
        host_discovery_script: prints one host per line, "name" or "name:slots"; None: the hosts are those of ``hosts``.
        hosts: (name, slots) of each host; None if there is a script.
        elastic_timeout_s: how long the driver waits for enough slots, and workers for each other, after a change.
        reset_limit: how many times the set of workers may change; None: any number.
        cooldown_range: least and most seconds for which a host whose worker failed gets no further ones; None: for ever.
        ssh_port: the port of ssh on all hosts; None: ssh's configuration decides.
        ssh_identity_file: a private key for ssh; None: ssh's configuration decides.
        env: variables that workers get besides those of this process.
        output_filename: a folder that gets rank.<rank>/stdout and stderr of each worker; None: nothing is written.
        prefix_timestamp: put the time before each line that is shown.
        start_timeout_s: for how long a round waits for a new worker to call ``hvd.init()``; also limits reaching a host.
        verbose: report each step of the driver.
        network_interfaces: names of the network interfaces to use; empty: they are chosen automatically.
    """

    command: Sequence[str]
    num_proc: int
    min_np: int
    max_np: int | None = None
    slots_per_host: int | None = None
    host_discovery_script: str | None = None
    hosts: Sequence[tuple[str, int]] | None = None
    elastic_timeout_s: float = _ELASTIC_TIMEOUT_S
    reset_limit: int | None = None
    cooldown_range: tuple[int, int] | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    output_filename: str | None = None
    prefix_timestamp: bool = False
    start_timeout_s: float = _START_TIMEOUT_S
    verbose: bool = False
    network_interfaces: Sequence[str] = ()


def settings_of(found: argparse.Namespace, more: Mapping[str, str] | None = None) -> ElasticSettings:
    """Convert a parsed command line of ``horovodrun`` to the settings of an elastic run.

    Args:
        found: the command line, as ``arguments.parse`` returns it.
        more: further variables for the workers.

    Raises:
        UsageError: hosts or variables that cannot be read; srun or mpirun started several horovodruns, and no host was named.
    """
    environment = horovod_variables.read()
    named = static_run.hosts_of(found)
    hosts: list[tuple[str, int]] | None = None
    if found.host_discovery_script is None:
        slots = found.slots or 1
        hosts = [(host.name, slots if host.slots is None else host.slots) for host in named]
        if not hosts:
            nodes.refuse_others("horovodrun")
            hosts = [("localhost", found.max_num_proc or found.num_proc)]
    return ElasticSettings(
        command=tuple(found.command),
        num_proc=found.num_proc,
        min_np=found.num_proc if found.min_num_proc is None else found.min_num_proc,
        max_np=found.max_num_proc,
        slots_per_host=found.slots,
        host_discovery_script=found.host_discovery_script,
        hosts=hosts,
        elastic_timeout_s=found.elastic_timeout or environment.elastic_timeout or _ELASTIC_TIMEOUT_S,
        reset_limit=found.reset_limit,
        cooldown_range=None if found.cooldown_range is None else (found.cooldown_range[0], found.cooldown_range[1]),
        ssh_port=found.ssh_port,
        ssh_identity_file=found.ssh_identity_file,
        env={**static_run.variables_for(found), **(more or {})},
        output_filename=found.output_filename,
        prefix_timestamp=found.prefix_output_with_timestamp,
        start_timeout_s=found.start_timeout or environment.start_timeout or _START_TIMEOUT_S,
        verbose=found.verbose,
        network_interfaces=tuple(dict.fromkeys(found.nics or ())),
    )
