"""Which hosts of ``-H`` can be reached over ssh, before anything is started there."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from guozhuang.check.results import Absence

_MOST_AT_ONCE = 64


def unreachable(hosts: Sequence[str], ssh_options: Sequence[str], limit_s: float) -> list[Absence]:
    """Knock at every host at once; return those that let nobody in, with what ssh said.

    Args:
        hosts: as ssh takes them, ``user@name`` too.
        ssh_options: port, identity and configuration, as ssh takes them.
        limit_s: for each host.
    """
    with ThreadPoolExecutor(min(_MOST_AT_ONCE, max(len(hosts), 1))) as pool:
        reasons = list(pool.map(lambda host: _knock(host, ssh_options, limit_s), hosts))
    found = zip(hosts, reasons, strict=True)
    return [
        Absence(None, host, "cannot be reached", "ssh was tried", reason)
        for host, reason in found
        if reason is not None
    ]


def _knock(host: str, ssh_options: Sequence[str], limit_s: float) -> str | None:
    """What ssh says against it; None if it lets us in."""
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(int(limit_s), 1)}", *ssh_options]
    try:
        done = subprocess.run(
            ["ssh", *options, "--", host, "exit 0"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s + 2.0,
            errors="replace",
        )
    except FileNotFoundError:
        return "there is no program `ssh` here"
    except subprocess.TimeoutExpired:
        return f"no answer within {limit_s + 2.0:g} s"
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip() and not line.startswith("Warning:")]
    return lines[-1] if lines else f"ssh ended with code {done.returncode}"
