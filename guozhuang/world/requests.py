"""What the command line asked of this process, handed on by `guozhuang run` through the environment."""

from __future__ import annotations

import os


def requested_strategy() -> str | None:
    """The name given by ``guozhuang run --strategy NAME`` (environment GUOZHUANG_STRATEGY); None if none was."""
    return os.environ.get("GUOZHUANG_STRATEGY") or None


def requested_timeline() -> str | None:
    """The path given by ``guozhuang run --timeline FILE`` (environment GUOZHUANG_TIMELINE); None if none was.

    Each rank writes its own part to that path with ".rank" and its number added, ``trace.json.rank3``; ``guozhuang run``
    joins the parts of its node into the file itself when the ranks have ended.
    """
    return os.environ.get("GUOZHUANG_TIMELINE") or None
