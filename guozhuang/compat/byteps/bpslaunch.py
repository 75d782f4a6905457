"""The program ``bpslaunch``: one per machine and role starts the ranks of a worker, a server, or the scheduler.

All of them are agents of ``guozhuang run`` that meet: the scheduler keeps the store and has neither ranks nor servers, a worker
has ranks, a server has one parameter server. They may be started in any order, end together, and with one worker alone nobody
has to meet. ``bpslaunch CMD...`` and ``python -m guozhuang.compat.byteps.bpslaunch CMD...`` are the same.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from collections.abc import Sequence

from guozhuang import compat
from guozhuang.compat.byteps import variables
from guozhuang.compat.fronts import ended
from guozhuang.compat.horovod.common.extension import BPSLAUNCH
from guozhuang.errors import UsageError, explain
from guozhuang.launch import agent
from guozhuang.launch.console.say import say
from guozhuang.launch.request import LaunchedRole, Members, Request, launched_role, members_of

_WHO = "bpslaunch"
_NOT_THEIRS = "servers of BytePS itself cannot be mixed with these; start all by this bpslaunch"


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``bpslaunch``, which has no options of its own; the environment says what it starts.

    Args:
        argv: the command that each rank of a worker runs; None: the arguments of this process.

    Returns:
        0 if every rank of the run ended with 0; the code of the rank that failed first, 128 + its number for a signal; 1 if the
        machines did not meet, or one was lost; 2 for variables or a command that cannot work.
    """
    return ended(lambda: _launch(list(sys.argv[1:] if argv is None else argv)), _WHO)


def _launch(command: list[str]) -> int:
    if BPSLAUNCH in os.environ:  # in a rank, whose launcher was given a script or a line with a bpslaunch in it
        command = _command_of_a_rank(command)
        os.execvp(command[0], command)
    role = launched_role(os.environ)
    if role.role == "worker":
        command = _command_of_a_rank(command)
        notes = variables.without_meaning(os.environ)
        for note in notes if role.worker == 0 else ():
            say(note, _WHO)
    elif not role.meets:
        return 0
    return agent.main(words_for(role, command), request(members_of(role, _NOT_THEIRS)))


def words_for(role: LaunchedRole, command: Sequence[str]) -> list[str]:
    """Translate a role to a command line of ``guozhuang run``.

    Args:
        role: what to start.
        command: what each rank runs. Servers and the scheduler have no ranks, so nothing runs it there.
    """
    program = ["--no-python", *command] if role.role == "worker" else ["--no-python", sys.executable]
    if not role.meets:
        return ["--standalone", "--nproc-per-node", str(role.num_ranks), *program]
    number = {"worker": 1 + role.worker}.get(role.role, 0)
    words = ["--nnodes", str(1 + role.num_workers + role.num_servers), "--node-rank", str(number)]
    words += ["--master-addr", role.host, "--master-port", role.port]
    words += ["--interface", role.interface] if role.interface is not None else []
    return [*words, "--nproc-per-node", str(role.num_ranks if role.role == "worker" else 1), *program]


def request(members: Members | None = None) -> Request:
    """Return what ranks are told besides the variables of ``guozhuang run``, and who meets whom."""
    told = {"BYTEPS_LOCAL_RANK": "{local_rank}", "BYTEPS_LOCAL_SIZE": "{local_size}", BPSLAUNCH: "1"}
    extension = dataclasses.replace(compat.extension(), rank_variables=told)
    return Request(extension, variables={"PYTHONUNBUFFERED": "1"}, members=members)


def _command_of_a_rank(command: list[str]) -> list[str]:
    """Return the command as it is; a single word that is no program, as of ``bpslaunch "a && b"``, is a line for a shell.

    Raises:
        UsageError: there is no command, or no such program.
    """
    if not command:
        what = "a worker needs a command: bpslaunch CMD..., as in bpslaunch python train.py"
        raise UsageError(explain(what, fix="give it; roles and addresses are in DMLC_ROLE and other variables"))
    if shutil.which(command[0]) is not None:
        return command
    if len(command) > 1 or len(command[0].split()) < 2:
        raise UsageError(explain("there is no such program", value=command[0], fix="check its name, and PATH"))
    return ["sh", "-c", command[0]]


if __name__ == "__main__":
    sys.exit(main())
