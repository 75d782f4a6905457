"""``horovod.run``: call a function in many processes, started by the launcher that ``horovodrun`` uses."""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from guozhuang.compat.horovod.runner import arguments, launch, static_run
from guozhuang.errors import UsageError, explain
from guozhuang.launch.console.say import say
from guozhuang.launch.functions.mailbox import Mailbox
from guozhuang.launch.hosts import ssh

_TASK = "guozhuang.compat.horovod.runner.task"
# Options of `guozhuang run` and horovodrun that an error's text may name, with the arguments of `horovod.run` to name instead.
_OTHER_NAMES = {
    "--ssh-identity": "ssh_identity_file", "--copy-output": "output_filename", "--interface": "network_interfaces",
    "--network-interfaces": "network_interfaces", "horovodrun": "horovod.run",
}  # fmt: skip


def call(function: Callable[[], Any], executable: str | None, **asked: Any) -> list[Any]:
    """Start the processes, call the function in each, and collect the results.

    Args:
        function: takes no arguments; it is pickled by cloudpickle.
        executable: the Python that runs the processes; None: the one of this process.
        **asked: values of options, by their field names in the result of ``arguments.parse``; others keep their defaults.

    Returns:
        The result of the function in each process, in rank order; in an elastic run those of the first ``min_num_proc`` ranks.

    Raises:
        UsageError: the options cannot work; nothing was started.
        RuntimeError: a process ended with anything but 0, or left no result.
    """
    found = arguments.parser().parse_args([])
    vars(found).update(asked, command=[executable or sys.executable, "-m", _TASK])
    with _naming_arguments():
        arguments.check(found)
        nics = _nics_for_the_mailbox(found)
    for note in launch.notes(found):
        say(translated(note), "horovod.run")
    mailbox = Mailbox(function, nics)
    try:
        with launch.talking("horovod.run", found.verbose), _naming_arguments():
            num_results = _run(found, mailbox)
        answers = [mailbox.answer(rank) for rank in range(num_results)]
    finally:
        mailbox.close()
    missing = [str(rank) for rank, answer in enumerate(answers) if answer is None]
    if missing:
        what = f"all processes ended well, but there is no result of rank {', '.join(missing)}"
        raise RuntimeError(explain(what, fix="look at what they printed; a function must return, not exit"))
    return [answer.result for answer in answers if answer is not None]


def translated(text: str) -> str:
    """Return a text with each option of ``horovodrun`` replaced by the argument of ``horovod.run`` that sets it."""
    actions = arguments.parser()._actions
    names = {option: action.dest for action in actions for option in action.option_strings} | _OTHER_NAMES
    anyone = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.sub(rf"(?<![\w-])({anyone})(?![\w-])", lambda found: names[found[1]], text)


@contextlib.contextmanager
def _naming_arguments() -> Iterator[None]:
    """Translate a UsageError raised in the ``with`` block, so that it names arguments instead of options."""
    try:
        yield
    except UsageError as error:
        raise UsageError(translated(str(error))) from error


def _run(found: argparse.Namespace, mailbox: Mailbox) -> int:
    """Run the processes to their end; return the number of results to expect."""
    failures: list[str] = []
    code = launch.run_job(found, failures.append, mailbox.variables)
    if code == 128 + signal.SIGINT and not failures:  # Ctrl-C ended this process; a rank that SIGINT ended is a failure
        raise KeyboardInterrupt
    if failures or code != 0:
        raise RuntimeError("\n".join(failures) or f"the run ended with exit code {code}; see what was said before")
    return int(found.min_num_proc or found.num_proc) if arguments.is_elastic(found) else int(found.num_proc)


def _nics_for_the_mailbox(found: argparse.Namespace) -> Sequence[str] | None:
    if found.host_discovery_script is not None:
        return list(found.nics or ())
    here = all(ssh.is_here(host.name) for host in static_run.hosts_of(found))
    return None if here else list(found.nics or ())
