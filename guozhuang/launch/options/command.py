"""Let torch parse torchrun's options, and make the command of a rank."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, run_script_path

from guozhuang.errors import UsageError, explain
from guozhuang.world import versions

# Runs the script for --run-path in a process that we start: torch would use one that does not end with the agent.
_RUN_PATH = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


def read(options: argparse.Namespace) -> tuple[LaunchConfig, list[str]]:
    """Let torch read the options; return its configuration, and the program to start with its arguments.

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
    """Return the command of a rank, with its local rank as an option if the script reads it from one.

    Args:
        words: the program and its arguments.
        options: torchrun's options, as parsed.
        pass_local_rank: the option ("--local-rank"); None: the script reads environment variables.
        local_rank: the value; replaced by 0 with --virtual-local-rank, where each rank sees only its own device.
    """
    if pass_local_rank is None:
        return list(words)
    number = "0" if versions.field(options, "virtual_local_rank") else local_rank
    at = len(words) - len(options.training_script_args)
    return [*words[:at], f"{pass_local_rank}={number}", *words[at:]]
