"""What programs that are a front of ``guozhuang run`` under another system's name share: how they end, and lists of hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.launch.console.say import WHO, say

_INTERRUPTED = 130  # the exit code after Ctrl-C, as shells have it


def ended(run: Callable[[], int], who: str = WHO) -> int:
    """Carry out a program, and return its exit code: 2, after its message, for a UsageError, 1 for a WorldError.

    Args:
        run: returns the exit code of a run that these errors did not end.
        who: the name that begins the message.
    """
    try:
        return run()
    except (UsageError, WorldError) as error:
        say(str(error), who)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        say("interrupted", who)
        return _INTERRUPTED


def without_ports(hosts: Iterable[str], port: str = "") -> tuple[list[str], list[str]]:
    """Return hosts that are written "host" or "host:port of ssh" without the port, and the words that give the port.

    Args:
        hosts: at least one.
        port: that of hosts without one; "": what ssh's settings say.

    Raises:
        UsageError: the hosts have different ports, and ``guozhuang run`` takes one.
    """
    pairs = [each.partition(":") for each in hosts]
    ports = {own or port for _, _, own in pairs}
    if len(ports) > 1:
        fix = "give one port for all, or none and the ports in ~/.ssh/config"
        raise UsageError(explain("the hosts have different ports of ssh", value=", ".join(hosts), fix=fix))
    words = ["--ssh-port", *ports] if ports != {""} else []
    return [name for name, _, _ in pairs], words
