"""Translate messages about options of ``horovodrun`` into messages about arguments of the function ``horovod.run``."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from guozhuang.errors import UsageError

_NAMES = {
    "-np": "num_proc", "--min-np": "min_num_proc", "--max-np": "max_num_proc", "--slots-per-host": "slots",
    "--reset-limit": "reset_limit", "--blacklist-cooldown-range": "cooldown_range", "-H": "hosts", "--hostfile": "hostfile",
    "--host-discovery-script": "host_discovery_script", "--start-timeout": "start_timeout", "--ssh-port": "ssh_port",
    "--ssh-identity": "ssh_identity_file", "--ssh-identity-file": "ssh_identity_file", "--gloo": "use_gloo",
    "--mpi": "use_mpi", "--mpi-args": "mpi_args", "--output-filename": "output_filename", "--copy-output": "output_filename",
    "--interface": "network_interfaces", "horovodrun": "horovod.run",
}  # fmt: skip
_OPTION = re.compile(r"(?<![\w-])(" + "|".join(map(re.escape, _NAMES)) + r")(?![\w-])")


def translated(text: str) -> str:
    """Return a text with each option of ``horovodrun`` replaced by the argument of ``horovod.run``."""
    return _OPTION.sub(lambda found: _NAMES[found[1]], text)


@contextlib.contextmanager
def spoken() -> Iterator[None]:
    """Translate a UsageError raised in the ``with`` block, so that it names arguments instead of options."""
    try:
        yield
    except UsageError as error:
        raise UsageError(translated(str(error))) from error
