"""The settings of an elastic run: filled in by ``horovodrun`` and ``horovod.run``, read by the elastic driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


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
    elastic_timeout_s: float = 600.0
    reset_limit: int | None = None
    cooldown_range: tuple[int, int] | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    output_filename: str | None = None
    prefix_timestamp: bool = False
    start_timeout_s: float = 30.0
    verbose: bool = False
    network_interfaces: Sequence[str] = ()
