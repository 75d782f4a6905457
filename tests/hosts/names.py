"""Names for hosts that have none: h0, h1, ... resolve on each of them, as on a cluster whose /etc/hosts Debian wrote."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.hosts.network import Hosts


@contextlib.contextmanager
def names(hosts: Hosts, num: int) -> Iterator[None]:
    """Every host's name leads to its address on all others, and to 127.0.1.1 on itself. Commands started within see it."""
    folders = [Path("/etc/netns") / hosts._name(host) for host in range(num)]
    try:
        for host, folder in enumerate(folders):
            folder.mkdir(parents=True)
            lines = ["127.0.0.1 localhost", f"127.0.1.1 h{host}"]
            lines += [f"{hosts.address(other)} h{other}" for other in range(num) if other != host]
            (folder / "hosts").write_text("\n".join(lines) + "\n")
        yield
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            Path("/etc/netns").rmdir()
