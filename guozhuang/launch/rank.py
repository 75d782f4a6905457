"""The program that the agent starts for a rank: it asks to be killed with the agent, then ``exec``s the rank's command.

Run as a file by an interpreter without site packages, so that it costs some ten milliseconds; it imports nothing of the
package. See [Note: no orphans] in guard.py.

    python -I -S rank.py AGENT_PID COMMAND ...
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str]) -> int:
    """Replace this process by the rank's command. Return only if that fails, with the exit code that a shell would give."""
    command = list(arguments[1:])
    if not begin(int(arguments[0])):
        return 128 + signal.SIGKILL
    # Python ignores both signals at its start, and a program that is not Python would inherit that through exec.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"guozhuang run: {command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126


def begin(agent: int) -> bool:
    """Ask the kernel to kill this process when the agent ends, and open its terminal; return False if the agent has ended.

    Args:
        agent: the process id of the agent, which is the parent of this process.
    """
    if not _end_with_the_agent(agent):
        return False  # the agent has already ended, so nothing would end this rank
    for descriptor, name in ((1, "GUOZHUANG_STDOUT"), (2, "GUOZHUANG_STDERR")):
        terminal = os.environ.pop(name, "")
        if terminal:
            _use_terminal(terminal, descriptor)
    _note_store()
    return True


def _end_with_the_agent(agent: int) -> bool:
    """Ask the kernel to kill this process when the agent ends; return False if the agent has already ended."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # The kernel sends no signal for an agent that ended before the call; but then the parent is another process.
    return os.getppid() == agent


def _note_store() -> None:
    """Write down which store the launcher keeps for this rank, for ``_guozhuang_start`` to tell a script's own stores from it.

    The name of the error file tells this launcher from one that the script starts, whose ranks inherit the note.
    """
    os.environ.pop("GUOZHUANG_RUN_STORE", None)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        os.environ["GUOZHUANG_RUN_STORE"] = f"{address} {os.environ.get('TORCHELASTIC_ERROR_FILE', '')}"


def _use_terminal(path: str, descriptor: int) -> None:
    """Open a terminal as this descriptor, but not as the controlling terminal.

    See [Note: the terminal of rank 0] in console/streams.py.
    """
    try:
        terminal = os.open(path, os.O_RDWR | os.O_NOCTTY)
    except OSError:
        return  # without the terminal the rank keeps the stream that the agent opened
    os.dup2(terminal, descriptor)
    os.close(terminal)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
