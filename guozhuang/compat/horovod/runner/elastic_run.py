"""Start an elastic run of ``horovodrun``: turn its command line into settings for the elastic driver."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from guozhuang.compat.horovod.common import variables as horovod_variables
from guozhuang.compat.horovod.runner import static_run
from guozhuang.compat.horovod.runner.settings import ElasticSettings
from guozhuang.launch.options import nodes

_ELASTIC_TIMEOUT_S = 600.0
_START_TIMEOUT_S = 30.0


def run(found: argparse.Namespace, more: Mapping[str, str] | None = None) -> int:
    """Run the job to its end, and return the driver's exit code. ``static_run.run`` describes the arguments.

    Raises:
        UsageError: the options cannot work; nothing was started.
    """
    from guozhuang.compat.horovod.runner.elastic.driver import run_elastic

    return run_elastic(settings_of(found, more))


def settings_of(found: argparse.Namespace, more: Mapping[str, str] | None = None) -> ElasticSettings:
    """Return the command line as settings for the driver.

    Raises:
        UsageError: hosts or variables that cannot be read; srun or mpirun started several horovodruns, and no host was named.
    """
    told = horovod_variables.read()
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
        elastic_timeout_s=found.elastic_timeout or told.elastic_timeout or _ELASTIC_TIMEOUT_S,
        reset_limit=found.reset_limit,
        cooldown_range=None if found.cooldown_range is None else (found.cooldown_range[0], found.cooldown_range[1]),
        ssh_port=found.ssh_port,
        ssh_identity_file=found.ssh_identity_file,
        env={**static_run.variables_for(found), **(more or {})},
        output_filename=found.output_filename,
        prefix_timestamp=found.prefix_output_with_timestamp,
        start_timeout_s=found.start_timeout or told.start_timeout or _START_TIMEOUT_S,
        verbose=found.verbose,
        network_interfaces=tuple(dict.fromkeys(found.nics or ())),
    )
