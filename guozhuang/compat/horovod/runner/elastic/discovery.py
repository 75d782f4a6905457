"""Find the hosts of an elastic run: by the user's script, which is run every second, or from a fixed list."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from guozhuang.launch.hosts.placement import parse_hosts

_ASK_EVERY_S = 1.0
# Limit in seconds for the script; after it the script is killed, and the hosts found before stay.
_SCRIPT_S = 60.0
_JOIN_S = 5.0


class DiscoveryError(RuntimeError):
    """The script failed; the text says how."""


class HostSource(Protocol):
    """A source of hosts: a script, or a fixed list."""

    def find(self) -> dict[str, int]:
        """Return the number of slots of each host, in the order of the hosts."""

    def close(self) -> None:
        """Make a ``find`` that runs in another thread end soon."""


class FixedHosts:
    """A fixed list of hosts.

    Args:
        hosts: (name, slots) of each.
    """

    def __init__(self, hosts: Sequence[tuple[str, int]]) -> None:
        self._hosts = merged(hosts)

    def find(self) -> dict[str, int]:
        """Return the number of slots of each host, in the order of the hosts."""
        return dict(self._hosts)

    def close(self) -> None:
        """Do nothing: ``find`` never blocks."""


class HostDiscoveryScript:
    """A command of the user that prints one host per line, ``name:slots`` or ``name``.

    Args:
        script: the command, run by the shell.
        default_slots: the slots of a host that is printed without a number.
    """

    def __init__(self, script: str, default_slots: int) -> None:
        self._script, self._default_slots = script, default_slots
        self._lock = threading.Lock()  # guards the next two attributes
        self._process: subprocess.Popen[str] | None = None
        self._is_over = False

    def find(self) -> dict[str, int]:
        """Run the script and return the slots of each host, in the order printed. Only one thread may call it at a time.

        Raises:
            DiscoveryError: the script did not end with 0, hung, was killed by ``close``, or printed a line that is no host.
        """
        try:
            with self._lock:
                if self._is_over:
                    raise DiscoveryError(f"the discovery script is not run any more: {self._script}")
                process = self._process = subprocess.Popen(
                    self._script, shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                    text=True, errors="replace", start_new_session=True,
                )  # fmt: skip
            out, err = process.communicate(timeout=_SCRIPT_S)
        except subprocess.TimeoutExpired:
            raise DiscoveryError(f"the discovery script did not end within {_SCRIPT_S:g} s: {self._script}") from None
        finally:
            self._kill()  # also after a KeyboardInterrupt: the script must not be left running
            with self._lock:
                started, self._process = self._process, None
            if started is not None:
                started.wait()
        if process.returncode != 0:
            said = f", saying: {err.strip()[-500:]}" if err.strip() else ""
            raise DiscoveryError(f"the discovery script {self._script} ended with exit code {process.returncode}{said}")
        return parse(out, self._default_slots)

    def close(self) -> None:
        """Kill the script if it runs, with all processes that it started, and never run it again."""
        with self._lock:
            self._is_over = True
        self._kill()

    def _kill(self) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError, PermissionError):
            if self._process is not None and self._process.returncode is None:
                os.killpg(self._process.pid, signal.SIGKILL)


def parse(text: str, default_slots: int) -> dict[str, int]:
    """Return the slots of each host that a discovery script printed.

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
        except ValueError as error:  # includes UsageError
            raise DiscoveryError(
                f"the discovery script printed a line that is no host with its slots: {line!r}"
            ) from error
        found.append((host.name, default_slots if host.slots is None else host.slots))
    return merged(found)


def merged(hosts: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Return the slots of each host; those of a host that is named twice are added."""
    found: dict[str, int] = {}
    for name, slots in hosts:
        found[name] = found.get(name, 0) + slots
    return found


class Watch:
    """A thread that asks for the hosts every second. ``close`` ends it.

    Args:
        source: the source of the hosts; ``close`` closes it too.
        say: called in that thread with a text when the source begins to fail, and when it works again.
    """

    def __init__(self, source: HostSource, say: Callable[[str], None]) -> None:
        self._source, self._say = source, say
        self._over = threading.Event()
        self._newest = source.find()
        self._thread = threading.Thread(target=self._run, name="horovod discovery", daemon=True)
        self._thread.start()

    def newest(self) -> dict[str, int]:
        """Return the hosts found last, with their slots."""
        return self._newest

    def close(self) -> None:
        """End the thread, and a script that is still running."""
        self._over.set()
        self._source.close()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        failed = ""
        while not self._over.wait(_ASK_EVERY_S):
            try:
                self._newest = self._source.find()
            except (DiscoveryError, OSError) as error:
                if self._over.is_set():
                    return
                if str(error) != failed:
                    self._say(f"{error}. The hosts that were found before stay")
                failed = str(error)
                continue
            if failed:
                self._say("the discovery script works again")
            failed = ""
