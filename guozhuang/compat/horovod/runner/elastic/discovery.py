"""Find the hosts of an elastic run: by the user's script, which is run every second, or from a fixed list."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import IO

from guozhuang.launch.hosts.placement import parse_hosts

_ASK_EVERY_S = 1.0
# A script that runs for longer than this many seconds is killed, and the hosts found before are kept.
_SCRIPT_S = 60.0
_POLL_S = 0.01


class DiscoveryError(RuntimeError):
    """The user's discovery script failed; the message describes the failure."""


class HostDiscovery:
    """Finds the hosts of a run, by a script of the user that prints ``name:slots`` or ``name`` per line, or in a fixed list.

    Args:
        script: the command, run by the shell; None: the hosts are ``hosts``.
        default_slots: the slots of a host that is printed without a number.
        hosts: (name, slots) of each host, if there is no script.

    Attributes:
        newest: the slots of each host, in the order in which the hosts were named.
    """

    def __init__(self, script: str | None, default_slots: int, hosts: Sequence[tuple[str, int]] = ()) -> None:
        self._script, self._default_slots = script, default_slots
        self.newest = merged(hosts)
        self._process: subprocess.Popen[bytes] | None = None
        self._started = -_ASK_EVERY_S
        self._failed = ""
        self._files: list[IO[bytes]] = []

    def find(self) -> None:
        """Run the discovery script for the first time, and wait until it ends.

        Raises:
            DiscoveryError: the script did not end with 0, did not end in time, or printed a line that is no host.
        """
        try:
            while self._script is not None and not self._look(time.monotonic()):
                time.sleep(_POLL_S)
        finally:
            self.close()  # also after a KeyboardInterrupt: the script must not be left running

    def turn(self, now: float) -> str:
        """Start the discovery script once a second, and read its output when it has ended. Never waits.

        Args:
            now: the present time, by the monotonic clock in seconds.

        Returns:
            A text for the user when the script begins to fail, and when it works again; else "".
        """
        if self._script is None or (self._process is None and now < self._started + _ASK_EVERY_S):
            return ""
        try:
            if not self._look(now):
                return ""
        except (DiscoveryError, OSError) as error:
            before, self._failed = self._failed, str(error)
            return f"{error}. The hosts that were found before stay" if str(error) != before else ""
        before, self._failed = self._failed, ""
        return "the discovery script works again" if before else ""

    def close(self) -> None:
        """Kill the discovery script if it runs, with all processes that it started."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _look(self, now: float) -> bool:
        """Start the script if it does not run; return whether it has ended, and if so read ``newest`` from its output."""
        assert self._script is not None
        if self._process is None:
            self._started = now
            self._files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
            self._process = subprocess.Popen(
                self._script, shell=True, stdin=subprocess.DEVNULL, stdout=self._files[0], stderr=self._files[1],
                start_new_session=True,
            )  # fmt: skip
        code = self._process.poll()
        if code is None and now < self._started + _SCRIPT_S:
            return False
        self.close()
        for file in self._files:
            file.seek(0)
        out, err = (file.read().decode(errors="replace") for file in self._files)
        self._files.clear()
        if code is None:
            raise DiscoveryError(f"the discovery script did not end within {_SCRIPT_S:g} s: {self._script}")
        if code != 0:
            printed = f", saying: {err.strip()[-500:]}" if err.strip() else ""
            raise DiscoveryError(f"the discovery script {self._script} ended with exit code {code}{printed}")
        self.newest = parse(out, self._default_slots)
        return True


def parse(text: str, default_slots: int) -> dict[str, int]:
    """Return the number of slots of each host in the output of a discovery script.

    Args:
        text: one host per line; empty lines are skipped.
        default_slots: the slots of a host without a number.

    Raises:
        DiscoveryError: a line is no host.
    """
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        try:
            [host] = parse_hosts(line, "the output of the discovery script")
        except ValueError as error:  # ``parse_hosts`` raises UsageError, which is a ValueError
            raise DiscoveryError(
                f"the discovery script printed a line that is no host with its slots: {line!r}"
            ) from error
        found.append((host.name, default_slots if host.slots is None else host.slots))
    return merged(found)


def merged(hosts: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Return the number of slots by host; add the numbers of a host that is named twice."""
    found: dict[str, int] = {}
    for name, slots in hosts:
        found[name] = found.get(name, 0) + slots
    return found
