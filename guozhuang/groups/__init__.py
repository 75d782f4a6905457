"""Who can talk to whom, and how ranks of a group agree."""

from .agreement import Notices, agree

__all__ = ["Notices", "agree"]
