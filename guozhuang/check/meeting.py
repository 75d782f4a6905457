"""Where ranks are to meet, as far as it is told before they do."""

from __future__ import annotations

from guozhuang.net.meeting_point import MeetingPoint
from guozhuang.world.identity import Identity


def host(found: Identity) -> str:
    """A name or an address; "" where nothing is told."""
    point = found.meeting_point
    if point is None:
        return ""
    if isinstance(point, MeetingPoint):
        return point.host
    return "localhost" if point.is_one_node else next(iter(point.hosts), "")
