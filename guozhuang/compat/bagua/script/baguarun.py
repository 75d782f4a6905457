"""``baguarun``: start the ranks of several hosts over ssh. It is ``guozhuang run -H`` with Bagua's options."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from guozhuang.compat.bagua.distributed.options import add_options, launch
from guozhuang.compat.fronts import without_ports
from guozhuang.errors import UsageError, explain
from guozhuang.launch.hosts.placement import parse_hosts

__all__ = ["main"]


def words_for(argv: Sequence[str]) -> tuple[list[str], argparse.Namespace]:
    """Return the command line of ``guozhuang run``, and the parsed options.

    Raises:
        UsageError: no hosts are named, or they have different ports.
    """
    found = _parser().parse_args(argv)
    text = found.host_list or os.environ.get("BAGUA_NODE_DOMAIN_NAMES", "")
    if not text.strip(", "):
        fix = "give --host_list host1,host2, or set BAGUA_NODE_DOMAIN_NAMES"
        raise UsageError(explain("baguarun needs the hosts on which it starts ranks", fix=fix))
    names, port = without_ports(parse_hosts(text), found.ssh_port or os.environ.get("BAGUA_SSH_PORT", ""))
    words = ["-H", ",".join(f"{name}:{found.nproc_per_node}" for name in names)]
    words += port
    words += ["--master-port", str(found.master_port)] if found.master_port is not None else []
    for variable in found.variables:
        words += ["-x", variable]
    words += ["--no-python"] if found.no_python else []
    return [*words, found.training_script, *found.training_script_args], found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher; see ``options.launch`` for what it returns."""
    return launch(words_for, argv)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="baguarun", description=__doc__, allow_abbrev=False)
    parser.add_argument("--host_list", help="host[:port],...; else BAGUA_NODE_DOMAIN_NAMES")
    parser.add_argument(
        "--ssh_port", help="the port of ssh on all hosts; else BAGUA_SSH_PORT, else that of ssh's settings"
    )
    parser.add_argument("--nproc_per_node", type=int, required=True, help="ranks of each host")
    parser.add_argument("--master_port", type=int, help="the port at which ranks meet on the first host")
    parser.add_argument("--no_python", action="store_true", help="the script is a program")
    parser.add_argument("-x", dest="variables", action="append", default=[], help="NAME or NAME=VALUE, for all ranks")
    add_options(parser)
    parser.add_argument("training_script", help="what each rank runs")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


if __name__ == "__main__":
    sys.exit(main())
