"""Process groups (which ranks communicate, and over what) and how the ranks of a group agree."""

from .agreement import StepNotices, agree

__all__ = ["StepNotices", "agree"]
