"""The program ``horovodrun``: reads its command line and runs the job with Guozhuang's launcher.

``horovodrun ...``, ``python -m horovod.runner.launch ...`` and ``python -m guozhuang.compat.horovod.runner.launch ...`` are the
same.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from guozhuang.compat.fronts import ended
from guozhuang.compat.horovod.runner import arguments, static_run
from guozhuang.compat.horovod.version import __version__
from guozhuang.launch.console.say import say

_WHO = "horovodrun"


def run_commandline(argv: Sequence[str] | None = None) -> int:
    """Run ``horovodrun`` with a command line.

    Args:
        argv: the arguments after the program's name; None: those of this process.

    Returns:
        0 if every process ended with 0, or for ``--check-build``; 1 if a process did not, after naming it, or if another host
        could not start its processes; 2 for a command line that this host finds cannot work; 128 + its number if a signal
        ended this process.
    """
    return ended(lambda: _run(argv), _WHO)


def _run(argv: Sequence[str] | None) -> int:
    found = parse_args(argv)
    if found.check_build:
        print(_features(), flush=True)
        return 0
    for note in notes(found):
        say(note, _WHO)
    with talking(_WHO, found.verbose):
        failures: list[str] = []
        code = run_job(found, failures.append)
    for failure in failures:
        say(failure, _WHO)
    return 1 if failures else code


def run_job(found: argparse.Namespace, failed: Callable[[str], None], more: Mapping[str, str] | None = None) -> int:
    """Run an elastic job, or one with a fixed number of processes, to its end; see ``static_run.run`` for the arguments.

    ``failed`` is not called for an elastic job, whose driver names the first worker that failed itself.
    """
    if not arguments.is_elastic(found):
        return static_run.run(found, failed, more)
    from guozhuang.compat.horovod.runner.elastic.driver import run_elastic  # imported late: few runs are elastic
    from guozhuang.compat.horovod.runner.elastic.settings import settings_of

    return run_elastic(settings_of(found, more))


@contextlib.contextmanager
def talking(who: str, verbose: bool) -> Iterator[None]:
    """Show the launcher's log on standard error inside the ``with`` block, if ``verbose``.

    Args:
        who: the name that begins each line.
        verbose: whether to show it.
    """
    if not verbose:
        yield
        return
    log = logging.getLogger("guozhuang")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"{who}: %(message)s"))
    before = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False  # each line appears once, also if the caller has set up logging
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; see ``arguments.parse``."""
    return arguments.parse(sys.argv[1:] if argv is None else argv)


def notes(found: argparse.Namespace) -> list[str]:
    """Return a sentence for each given option that has no effect, or another effect than the user may expect."""
    lines = []
    if found.use_mpi:
        lines.append("--mpi changes nothing: processes are started by Guozhuang's launcher, without mpirun")
    given = [name for name, value in (("--mpi-args", found.mpi_args), ("--binding-args", found.binding_args)) if value]
    if given:
        lines.append(f"{' and '.join(given)} mean nothing here: no mpirun is started")
    if found.nics and len(set(found.nics)) > 1:
        lines.append(f"of the network interfaces the first is used for all: {found.nics[0]}")
    return lines


def _features() -> str:
    """Return the table of ``--check-build``: which features are available, in Horovod's order, then Guozhuang's own."""
    import torch

    from guozhuang.compat.horovod.common import util  # imported late: loads the engine, which runs do not need

    frameworks = {"TensorFlow": False, "PyTorch": True, "MXNet": False}
    controllers = {"MPI": util.mpi_built(), "Gloo": util.gloo_built()}
    operations = {
        "NCCL": bool(util.nccl_built()),
        "DDL": util.ddl_built(),
        "CCL": util.ccl_built(),
        "MPI": util.mpi_built(),
        "Gloo": util.gloo_built(),
        "shared memory, between processes of a host": sys.platform == "linux",
    }
    lines = [f"Horovod v{__version__}, by Guozhuang on PyTorch {torch.__version__}:"]
    for title, rows in (
        ("Available Frameworks", frameworks),
        ("Available Controllers", controllers),
        ("Available Tensor Operations", operations),
    ):
        lines += ["", f"{title}:", *(f"    [{'X' if there else ' '}] {name}" for name, there in rows.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run_commandline())
