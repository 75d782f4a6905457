"""``python -m bagua.distributed.launch``: start the ranks of one node. It is ``guozhuang run`` with Bagua's options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from guozhuang.compat.bagua.distributed.options import add_options, launch
from guozhuang.errors import UsageError, explain

__all__ = ["main"]

_ADDR, _PORT = "127.0.0.1", 29500


def words_for(argv: Sequence[str]) -> tuple[list[str], argparse.Namespace]:
    """Return the command line of ``guozhuang run``, and the parsed options.

    Raises:
        UsageError: (a ValueError) ``-m`` with ``--no_python``.
    """
    found = _parser().parse_args(argv)
    if found.module and found.no_python:
        fix = "give one of them: -m runs a module with Python, --no_python runs any program"
        raise UsageError(explain("-m and --no_python exclude each other", fix=fix))
    words = ["--nproc-per-node", str(found.nproc_per_node)]
    addr, port = found.master_addr, found.master_port
    if found.nnodes > 1:
        words += ["--nnodes", str(found.nnodes), "--node-rank", str(found.node_rank)]
        addr, port = addr or _ADDR, _PORT if port is None else port
    elif addr is None and port is None:
        words.append("--standalone")
    words += [] if addr is None else ["--master-addr", addr]
    words += [] if port is None else ["--master-port", str(port)]
    words += ["--pass-local-rank", "local_rank"] if found.set_additional_flag else []
    words += ["--copy-output", found.logdir] if found.logdir else []
    words += ["-m"] if found.module else ["--no-python"] if found.no_python else []
    return [*words, found.training_script, *found.training_script_args], found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher; see ``options.launch`` for what it returns."""
    return launch(words_for, argv)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bagua.distributed.launch", description=__doc__, allow_abbrev=False)
    parser.add_argument("--nnodes", type=int, default=1, help="nodes; each needs such a command (default: 1)")
    parser.add_argument("--node_rank", type=int, default=0, help="the number of this node (default: 0)")
    parser.add_argument("--nproc_per_node", type=int, default=1, help="ranks of this node (default: 1)")
    parser.add_argument("--master_addr", help=f"address of node 0 (default: {_ADDR}); one node is at 127.0.0.1")
    parser.add_argument("--master_port", type=int, help=f"port of node 0 (default: {_PORT}; with one node a free one)")
    parser.add_argument("--set_additional_flag", action="store_true", help="give each rank --local_rank=NUMBER")
    parser.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")
    parser.add_argument("--no_python", action="store_true", help="the script is a program")
    parser.add_argument(
        "--logdir", help="a folder that also gets what ranks print, in node_N_local_rank_N_stdout and _stderr"
    )
    parser.add_argument("--host_list", help="of baguarun; no use here")
    parser.add_argument("--ssh_port", help="of baguarun; no use here")
    add_options(parser)
    parser.add_argument("training_script", help="what each rank runs")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


if __name__ == "__main__":
    sys.exit(main())
