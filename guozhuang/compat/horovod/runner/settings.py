"""What an elastic run is to be: filled in by ``horovodrun`` and ``horovod.run``, read by the elastic driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ElasticSettings:
    """An elastic run.

    Attributes:
        command: the program of a worker and its arguments.
        num_proc: how many workers there must be before training starts; at least ``min_np``.
        min_np: how many workers must be left for training to go on.
        max_np: how many workers there may be; None: as many as there are slots.
        slots_per_host: for hosts whose slots the script does not say; None: 1.
        host_discovery_script: prints a host a line, "name" or "name:slots"; None: the hosts are those of ``hosts``.
        hosts: (name, slots) of each host where no script finds them; None with a script.
        elastic_timeout_s: how long the driver waits for enough slots, and workers for each other, after a change.
        reset_limit: how many times the set of workers may change; None: any number.
        cooldown_range: least and most seconds for which a host whose worker failed gets no further ones; None: for ever.
        ssh_port: of all hosts; None: as ssh decides.
        ssh_identity_file: private key for ssh; None: as ssh decides.
        env: variables that workers get besides those of this process.
        output_filename: folder that gets rank.<rank>/stdout and stderr of each worker; None: nothing is written.
        prefix_timestamp: put the time before each line that is shown.
        start_timeout_s: how long a worker that was started may take to come to the driver.
        verbose: say what the driver does.
        network_interfaces: names of those to be used; empty: the driver's own choice.
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
