"""Where things lie in the main segment of a rank: its control page, the areas for data, and what each word means.

Every rank of a group maps the main segments of all ranks. A control page is written by its own rank only.
"""

from __future__ import annotations

import enum
from typing import Final

# The control page. Words are little-endian u32, each on a cache line of its own so that ranks do not disturb each other.
MAGIC: Final = 0x475A0001  # "GZ", layout version 1
MAGIC_OFFSET: Final = 0
ARRIVED_OFFSET: Final = 64  # +1 per barrier; peers wait on it as a futex
ASLEEP_OFFSET: Final = 128  # 0, or 1 + the rank on whose `arrived` this rank sleeps
STATE_OFFSET: Final = 192  # a State
DOING_OFFSET: Final = 256  # what the rank is doing, in words, ended by NUL
DOING_BYTES: Final = 120  # at most, without the NUL
# Two descriptor slots, used in turn. See [Note: one barrier per operation] in _barrier.c.
DESCRIPTOR_OFFSETS: Final = (512, 1024)
DESCRIPTOR_BYTES: Final = 256  # compared among ranks, byte by byte
PRIVATE_BYTES: Final = 128  # follows the compared part; read by peers, not compared
CONTROL_BYTES: Final = 4096

# The main segment: the control page, then
NUM_ONE_SHOT_AREAS: Final = 2  # used in turn, as the descriptor slots
ONE_SHOT_BYTES: Final = 64 * 1024  # of one area
ONE_SHOT_OFFSET: Final = CONTROL_BYTES
RING_OFFSET: Final = ONE_SHOT_OFFSET + NUM_ONE_SHOT_AREAS * ONE_SHOT_BYTES
RING_BYTES: Final = 32 * 1024 * 1024  # by default; the staging ring
NUM_SLOTS: Final = 8  # point to point
SLOT_BYTES: Final = 256 * 1024  # of one slot
SLOTS_OFFSET: Final = RING_OFFSET + RING_BYTES
MAIN_BYTES: Final = SLOTS_OFFSET + NUM_SLOTS * SLOT_BYTES


class State(enum.IntEnum):
    """What a rank says about itself in its control page."""

    ALIVE = 0
    LEFT = 1  # it gave the group back; it will not arrive any more
    BROKEN = 2  # a collective failed on it; it will not arrive any more
