"""A fake world: one process is a rank of many, trains for real, and its communication is recorded and carries nothing."""

from .process_group import FakeNodeGroup, FakeSegments, enter
from .recorder import Recorder

__all__ = ["FakeNodeGroup", "FakeSegments", "Recorder", "enter"]
