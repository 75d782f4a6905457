"""Torch's own reading of torchrun's options, and the command of a rank."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, run_script_path

from guozhuang.errors import UsageError, explain
from guozhuang.world import versions

# What --run-path asks for, in a process of its own: torch would do it in one that does not end with the agent.
_RUN_PATH = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


def read(options: argparse.Namespace) -> tuple[LaunchConfig, list[str]]:
    """Torch's own reading of the options: its configuration, and the program to start with its arguments.

    Raises:
        UsageError: torch refuses an option.
    """
    command: Callable[..., object] | str
    try:
        config, command, arguments = config_from_args(options)
    except (ValueError, AssertionError, RuntimeError, OSError) as error:
        what = f"torch elastic refused the options: {error}"
        raise UsageError(explain(what, fix="see `guozhuang run --help`")) from error
    if command is run_script_path:
        return config, [sys.executable, "-u", "-c", _RUN_PATH, *arguments]
    assert isinstance(command, str)
    return config, [command, *arguments]


def with_local_rank(
    words: Sequence[str], options: argparse.Namespace, pass_local_rank: str | None, local_rank: str
) -> list[str]:
    """The command of a rank whose script reads its local rank from an option.

    Args:
        words: the program and its arguments.
        options: torchrun's, as parsed.
        pass_local_rank: the option ("--local-rank"); None: the script reads variables.
        local_rank: its value, unless each rank has a device of its own and is the first on it.
    """
    if pass_local_rank is None:
        return list(words)
    number = "0" if versions.field(options, "virtual_local_rank") else local_rank
    at = len(words) - len(options.training_script_args)
    return [*words[:at], f"{pass_local_rank}={number}", *words[at:]]
