"""What the command line asked of this process, handed on by `guozhuang run` through the environment."""

from __future__ import annotations

import os

from guozhuang.world.variables import number


def requested_strategy() -> str | None:
    """The name given by ``guozhuang run --strategy NAME`` (environment GUOZHUANG_STRATEGY); None if none was."""
    return os.environ.get("GUOZHUANG_STRATEGY") or None


def requested_backend() -> str | None:
    """The name given by ``guozhuang run --backend NAME`` (environment GUOZHUANG_BACKEND); None if none was."""
    return os.environ.get("GUOZHUANG_BACKEND") or None


def requested_groups() -> int:
    """The number given by ``guozhuang run --groups K`` (environment GUOZHUANG_GROUPS); 1 if none was.

    Raises:
        UsageError: the variable holds no whole number of at least 1.
    """
    if not os.environ.get("GUOZHUANG_GROUPS"):
        return 1
    fix = "give `guozhuang run --groups` a count of process groups, or unset it"
    return number(os.environ, "GUOZHUANG_GROUPS", at_least=1, fix=fix) or 1


def requested_gloo_interface() -> str | None:
    """The network interfaces that gloo was told to use (gloo's own environment variable GLOO_SOCKET_IFNAME), or None."""
    return os.environ.get("GLOO_SOCKET_IFNAME") or None


def requested_timeline() -> str | None:
    """The path given by ``guozhuang run --timeline FILE`` (environment GUOZHUANG_TIMELINE); None if none was.

    Each rank writes its own part to that path with ".rank" and its number added, ``trace.json.rank3``; ``guozhuang run``
    joins the parts of its node into the file itself when the ranks have ended.
    """
    return os.environ.get("GUOZHUANG_TIMELINE") or None
