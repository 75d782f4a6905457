"""What programs that are a front of ``guozhuang run`` under another system's name share: how they end, and lists of hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.launch.console.say import WHO, say
from guozhuang.launch.hosts.placement import Host

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


def without_ports(hosts: Sequence[Host], port: str = "", user: str = "") -> tuple[list[str], list[str]]:
    """Return the names of hosts that are written "host" or "host:port of ssh", for ``-H``, and the words that give the port.

    Args:
        hosts: as they are read for ``-H``, where the number of slots stands in the place of the port; at least one.
        port: that of hosts without one; "": what ssh's settings say.
        user: for hosts without one; "": what ssh's settings say.

    Raises:
        UsageError: the hosts have different ports, and ``guozhuang run`` takes one.
    """
    ports = {port if each.slots is None else str(each.slots) for each in hosts}
    if len(ports) > 1:
        given = ", ".join(each.name if each.slots is None else f"{each.name}:{each.slots}" for each in hosts)
        fix = "give one port for all, or none and the ports in ~/.ssh/config"
        raise UsageError(explain("the hosts have different ports of ssh", value=given, fix=fix))
    names = []
    for each in hosts:
        own, at, name = each.name.rpartition("@")
        name = f"[{name}]" if ":" in name else name
        names.append(f"{own or user}@{name}" if at or user else name)
    return names, ["--ssh-port", *ports] if ports != {""} else []
