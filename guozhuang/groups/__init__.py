"""Who can talk to whom, and how ranks of a group agree."""

from .agreement import StepNotices, agree

__all__ = ["StepNotices", "agree"]
