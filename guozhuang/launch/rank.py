"""What the agent starts in place of a rank's program: it ties its life to the agent's, then becomes the program by ``exec``.

Run as a file by an interpreter without site packages, so that it costs some ten milliseconds; it imports nothing of the
package. See [Note: no orphans] in guard.py.

    python -I -S rank.py AGENT_PID LOG_FOLDER COMMAND ...

LOG_FOLDER is empty where the output stays what the agent made it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str]) -> int:
    """Become the command. Returns only where that is impossible, with a shell's exit code for it."""
    agent, folder, command = int(arguments[0]), arguments[1], list(arguments[2:])
    if not _end_with_the_agent(agent):
        return 128 + signal.SIGKILL  # it is gone already: nobody would end us
    for descriptor, name in ((1, "GUOZHUANG_STDOUT"), (2, "GUOZHUANG_STDERR")):
        terminal = os.environ.pop(name, "")
        if terminal:
            _use_terminal(terminal, descriptor)
    if folder:
        _write_to(os.path.join(folder, f"rank{os.environ['RANK']}.log"))
    # Python ignores both in its own process, and exec would hand that on to a program that is not Python.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"guozhuang run: {command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126


def _end_with_the_agent(agent: int) -> bool:
    """Have the kernel kill this process when the agent ends, however it ends; False if it has ended already."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # After the call: an agent that ended before it was not noticed by the kernel, but is no longer our parent.
    return os.getppid() == agent


def _use_terminal(path: str, descriptor: int) -> None:
    """Make a terminal a stream of this process, but not its controlling one. See [Note: the terminal of rank 0]."""
    try:
        terminal = os.open(path, os.O_RDWR | os.O_NOCTTY)
    except OSError:
        return  # it stays the agent's
    os.dup2(terminal, descriptor)
    os.close(terminal)


def _write_to(path: str) -> None:
    """Send both streams to the end of a file: what is written stands there whole, whoever is killed."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    if os.fstat(file).st_size:
        os.write(file, f"--- started anew, attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}\n".encode())
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
