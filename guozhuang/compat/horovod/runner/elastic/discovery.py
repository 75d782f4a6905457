"""Which hosts there are: asked of the user's script every second, or fixed."""

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
# A script that hangs is ended; the hosts stay what they were.
_SCRIPT_S = 60.0
_JOIN_S = 5.0


class DiscoveryError(RuntimeError):
    """The script failed; the text says how."""


class HostSource(Protocol):
    """Where hosts are found."""

    def find(self) -> dict[str, int]:
        """The slots of each host, in their order."""

    def close(self) -> None:
        """From another thread: a ``find`` that is under way ends soon."""


class FixedHosts:
    """Hosts that stay the same.

    Args:
        hosts: (name, slots) of each.
    """

    def __init__(self, hosts: Sequence[tuple[str, int]]) -> None:
        self._hosts = merged(hosts)

    def find(self) -> dict[str, int]:
        """The slots of each host, in their order."""
        return dict(self._hosts)

    def close(self) -> None:
        """Nothing is under way."""


class HostDiscoveryScript:
    """A command that prints a host a line, ``name:slots`` or ``name``.

    Args:
        script: for the shell.
        default_slots: of a host that is printed without a number.
    """

    def __init__(self, script: str, default_slots: int) -> None:
        self._script, self._default_slots = script, default_slots
        self._lock = threading.Lock()  # for the two that follow
        self._process: subprocess.Popen[str] | None = None
        self._is_over = False

    def find(self) -> dict[str, int]:
        """The slots of each host, in the order of the script. One call at a time.

        Raises:
            DiscoveryError: it ended with something else than 0, hung, was ended by ``close``, or printed what is no host.
        """
        with self._lock:
            if self._is_over:
                raise DiscoveryError(f"the discovery script is not run any more: {self._script}")
            process = self._process = subprocess.Popen(
                self._script, shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, errors="replace", start_new_session=True,
            )  # fmt: skip
        try:
            out, err = process.communicate(timeout=_SCRIPT_S)
        except BaseException as error:  # an interrupt too
            self._kill()
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            what = f"the discovery script did not end within {_SCRIPT_S:g} s: {self._script}"
            raise DiscoveryError(what) from None
        finally:
            with self._lock:
                self._process = None
        if process.returncode != 0:
            said = f", saying: {err.strip()[-500:]}" if err.strip() else ""
            raise DiscoveryError(f"the discovery script {self._script} ended with exit code {process.returncode}{said}")
        return parse(out, self._default_slots)

    def close(self) -> None:
        """End the script if it runs, with all that it has started. It is not run any more."""
        with self._lock:
            self._is_over = True
        self._kill()

    def _kill(self) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError, PermissionError):
            if self._process is not None:
                os.killpg(self._process.pid, signal.SIGKILL)


def parse(text: str, default_slots: int) -> dict[str, int]:
    """What a discovery script printed: the slots of each host.

    Args:
        text: a host a line; empty lines are skipped.
        default_slots: of a host without a number.

    Raises:
        DiscoveryError: a line is no host.
    """
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        try:
            [host] = parse_hosts(line, "the output of the discovery script")
        except ValueError as error:  # a UsageError among them
            raise DiscoveryError(
                f"the discovery script printed a line that is no host with its slots: {line!r}"
            ) from error
        found.append((host.name, default_slots if host.slots is None else host.slots))
    return merged(found)


def merged(hosts: Sequence[tuple[str, int]]) -> dict[str, int]:
    """A host that is named twice has the slots of both."""
    found: dict[str, int] = {}
    for name, slots in hosts:
        found[name] = found.get(name, 0) + slots
    return found


class Watch:
    """Asks again and again, in a thread of its own. ``close`` ends it.

    Args:
        source: of the hosts; ``close`` closes it.
        say: called, in that thread, when asking begins to fail, and when it works again.
    """

    def __init__(self, source: HostSource, say: Callable[[str], None]) -> None:
        self._source, self._say = source, say
        self._over = threading.Event()
        self._newest = source.find()
        self._thread = threading.Thread(target=self._run, name="horovod discovery", daemon=True)
        self._thread.start()

    def newest(self) -> dict[str, int]:
        """What was found last."""
        return self._newest

    def close(self) -> None:
        """End the thread, and a script that still runs."""
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
