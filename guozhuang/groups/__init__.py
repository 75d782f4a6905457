"""Process groups (which ranks communicate, and over what) and how the ranks of a group agree."""

from typing import Any

from .agreement import StepNotices, agree

__all__ = ["AbortableGroup", "StepNotices", "agree"]


def __getattr__(name: str) -> Any:
    """Import ``AbortableGroup`` when it is first asked for, because few need it."""
    if name != "AbortableGroup":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .gloo import AbortableGroup

    return AbortableGroup
