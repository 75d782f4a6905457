"""A fake world: one process is a rank of many, trains for real, and its communication is recorded and carries nothing."""

from .entering import enter
from .node import FakeNodeGroup, FakeSegments
from .recorder import Recorder

__all__ = ["FakeNodeGroup", "FakeSegments", "Recorder", "enter"]
