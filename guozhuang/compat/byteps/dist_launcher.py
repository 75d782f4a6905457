"""BytePS's ``dist_launcher.py``: start workers and servers over ssh. It is ``guozhuang run -H`` with BytePS's options.

``python -m byteps.dist_launcher`` and ``python -m guozhuang.compat.byteps.dist_launcher`` are the same.
"""

from __future__ import annotations

import argparse
import collections
import sys
from collections.abc import Sequence

from guozhuang.compat.byteps import bpslaunch, variables
from guozhuang.compat.fronts import ended, without_ports
from guozhuang.errors import UsageError, explain
from guozhuang.launch import agent
from guozhuang.launch.console.say import say
from guozhuang.launch.hosts.placement import Host, read_hostfile
from guozhuang.launch.request import launched_role

_WHO = "dist_launcher"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher with a command line; None: that of this process. Exit codes are those of ``bpslaunch.main``."""

    def run() -> int:
        words, notes = words_for(sys.argv[1:] if argv is None else argv)
        for note in notes:
            say(note, _WHO)
        return agent.main(words, bpslaunch.request())

    return ended(run, _WHO)


def words_for(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the command line of ``guozhuang run``, and sentences about what has no effect.

    Raises:
        UsageError: a file names no hosts, or hosts that cannot be; a variable has no value; there is no command.
    """
    found = _parser().parse_args(argv)
    workers, servers = read_hostfile(found.worker_hostfile), read_hostfile(found.server_hostfile)
    asked = [Host(found.scheduler_ip, found.scheduler_ssh_port)] if found.scheduler_ssh_port else []
    names, ssh_port = without_ports([*workers, *servers, *asked], user=found.username or "")
    mine, theirs = names[: len(workers)], names[len(workers) : len(workers) + len(servers)]
    environ = dict(_variable(each) for each in found.env)
    notes = variables.without_meaning(environ)
    if workers[0].name != found.scheduler_ip:
        notes.append(f"no scheduler is started at {found.scheduler_ip}: {workers[0].name}, worker 0, keeps the store")
    # As one bpslaunch with these variables would have ranks. Which devices "all" means is seen on each host.
    one = {"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "1", "DMLC_WORKER_ID": "0"}
    has_all = environ.get("NVIDIA_VISIBLE_DEVICES") == "all"
    number = "gpu" if has_all else str(launched_role(environ | one).num_ranks)
    words = ["-H", ",".join(mine), "--nproc-per-node", number, *_where(mine, theirs), *ssh_port]
    words += ["--master-port", str(found.scheduler_port)]
    words += ["--interface", found.interface] if found.interface else []
    words += ["--ssh-identity", found.identity_file] if found.identity_file else []
    for name, value in environ.items():
        words += ["-x", f"{name}={value}"]
    command = found.command[1:] if found.command[:1] == ["bpslaunch"] else found.command
    if not command:
        raise UsageError(
            explain("dist_launcher needs the command of the workers", fix="as in bpslaunch python train.py")
        )
    is_line = len(command) == 1 and len(command[0].split()) > 1
    return [*words, "--no-python", *(["sh", "-c"] if is_line else []), *command], notes


def _where(workers: Sequence[str], servers: Sequence[str]) -> list[str]:
    """Return the words that place servers: on hosts of their own, or spread over those of the workers."""
    if len(set(workers)) < len(workers):
        what = "a worker is a machine with one process for each device, and a host is named twice"
        raise UsageError(explain(what, value=", ".join(workers), fix="name it once, and all devices by --env"))
    own = [name for name in servers if name not in workers]
    if not own:
        return ["--servers", str(len(servers))]
    if len(own) < len(servers):
        fix = "put all servers on hosts of their own, or all on those of workers"
        raise UsageError(
            explain("some servers are on hosts of workers, and some are not", value=", ".join(own), fix=fix)
        )
    return ["--server-hosts", ",".join(f"{name}:{count}" for name, count in collections.Counter(servers).items())]


def _variable(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not (name and colon):
        raise UsageError(explain("--env takes NAME:VALUE", value=text, fix="as in --env NVIDIA_VISIBLE_DEVICES:0,1"))
    return name, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=_WHO, description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("-WH", "--worker-hostfile", required=True, help="a file with one host[:port of ssh] in a line, for workers")
    add("-SH", "--server-hostfile", required=True, help="the same for servers")
    add("-i", "--identity_file", help="private key for ssh")
    add("--scheduler-ip", required=True, help="worker 0, which keeps the store; no scheduler is started elsewhere")
    add("--scheduler-port", required=True, type=int, help="the port of the store on worker 0")
    add("--interface", help="the network interface (default: the one that leads to worker 0)")
    add("--env", action="append", default=[], help="NAME:VALUE, for all workers and servers")
    add("--username", help="the user's name for ssh")
    add("--scheduler-ssh-port", type=int, help="the port of ssh, which all hosts share")
    add("command", nargs=argparse.REMAINDER, help="what workers run: bpslaunch python train.py")
    return parser


if __name__ == "__main__":
    sys.exit(main())
