"""Torchrun's options for logs (``--redirects``, ``--tee``, ``--logs-specs`` and the filters) for ranks that we start."""

from __future__ import annotations

import contextlib
import os
import string
import sys
from collections.abc import Mapping
from typing import IO, Any

from torch.distributed.elastic.multiprocessing import LogsDest
from torch.distributed.elastic.multiprocessing.tail_log import TailLog
from torch.distributed.launcher.api import LaunchConfig

from guozhuang.world import versions


class TorchrunLogs:
    """The log files of one attempt, and the threads that print new lines of them.

    Args:
        config: the options as torch parsed them.
        environs: the environment variables of each local rank.
    """

    def __init__(self, config: LaunchConfig, environs: dict[int, dict[str, str]]) -> None:
        assert config.logs_specs is not None
        self.files: LogsDest = config.logs_specs.reify(environs)
        self._stack = contextlib.ExitStack()
        self._tails: list[TailLog] = []
        prefixes = _prefixes(config, environs)
        for name, teed, shown_on in (
            ("stdout", self.files.tee_stdouts, sys.stdout),
            ("stderr", self.files.tee_stderrs, sys.stderr),
        ):
            self._tail(config.role, teed, shown_on, prefixes)
            filters = versions.field(config, f"duplicate_{name}_filters")
            if filters:
                path = getattr(self.files, f"filtered_{name}")
                copy = self._stack.enter_context(open(path, "w", errors="replace", buffering=1))  # noqa: SIM115
                has_one = _has_one_of(tuple(filters))
                self._tail(config.role, teed, copy, prefixes, log_line_filter=has_one)

    def _tail(self, role: str, files: dict[int, str], shown_on: IO[str], prefixes: Any, **more: Any) -> None:
        self._tails.append(TailLog(role, files, shown_on, prefixes, **more).start())  # type: ignore[arg-type]

    def of_rank(self, local_rank: int) -> list[str]:
        """Return the files that hold this rank's output."""
        found = (self.files.stdouts.get(local_rank), self.files.stderrs.get(local_rank))
        return [path for path in found if path]

    def close(self) -> None:
        """Show the remaining lines, and end the threads. Call it after all ranks of the attempt have ended."""
        for tail in self._tails:
            tail.stop()
        self._stack.close()


def _has_one_of(needles: tuple[str, ...]) -> Any:
    return lambda line: any(needle in line for needle in needles)


def _prefixes(config: LaunchConfig, environs: Mapping[int, Mapping[str, str]]) -> dict[int, str] | None:
    template = config.log_line_prefix_template
    if not template:
        return None
    return {
        local_rank: string.Template(template).safe_substitute(
            role_name=config.role, rank=environ["RANK"], local_rank=local_rank
        )
        for local_rank, environ in environs.items()
    }


def remove_if_empty(config: LaunchConfig) -> None:
    """Remove torchrun's log folder if it is empty, because no rank was started."""
    with contextlib.suppress(OSError):
        assert config.logs_specs is not None
        os.rmdir(str(config.logs_specs.root_log_dir))
