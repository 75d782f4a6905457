"""What torch elastic is told to start: its own reading of the options, with our process in between (rank.py)."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.distributed.elastic.utils import macros
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, run_script_path

from guozhuang.errors import UsageError, explain
from guozhuang.world import versions

# What --run-path asks for, in a process of its own: torch would do it in one that has none of rank.py's care.
_RUN_PATH = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


def torchs(options: argparse.Namespace) -> tuple[LaunchConfig, Callable[..., object] | str, list[str]]:
    """Torch's own reading of the options: its configuration, the program or function to start, and the arguments.

    Raises:
        UsageError: torch refuses an option.
    """
    try:
        found: tuple[LaunchConfig, Callable[..., object] | str, list[str]] = config_from_args(options)
    except (ValueError, AssertionError, RuntimeError, OSError) as error:
        what = f"torch elastic refused the options: {error}"
        raise UsageError(explain(what, fix="see `guozhuang run --help`")) from error
    return found


def of_a_rank(
    options: argparse.Namespace,
    command: Callable[..., object] | str,
    arguments: Sequence[str],
    pass_local_rank: str | None,
    log_folder: str,
) -> list[str]:
    """The arguments with which the interpreter that runs this starts a rank.

    Args:
        options: torchrun's, as parsed.
        command: with ``arguments``, what ``torchs`` found.
        arguments: see ``command``.
        pass_local_rank: the option by which the script gets its local rank ("--local-rank"); None for none.
        log_folder: where the rank writes its file; "": its output stays what the agent made it.
    """
    # Torch elastic writes the local rank where "${local_rank}" stands, in any argument, and makes one "$" of each two.
    words = [word.replace("$", "$$") for word in arguments]
    if pass_local_rank is not None:
        # As LOCAL_RANK has it: with a virtual one each rank has a device of its own, and is the first on it.
        number = "0" if versions.field(options, "virtual_local_rank") else macros.local_rank
        words.insert(len(words) - len(options.training_script_args), f"{pass_local_rank}={number}")
    if command is run_script_path:
        command, words = sys.executable, ["-u", "-c", _RUN_PATH, *words]
    assert isinstance(command, str)
    entry = str(Path(__file__).with_name("rank.py"))
    return ["-I", "-S", *(word.replace("$", "$$") for word in (entry, str(os.getpid()), log_folder, command)), *words]
