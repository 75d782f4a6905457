"""What ranks tell each other about a send and its receive: the messages on their channels."""

from __future__ import annotations

import errno
import struct
from typing import Final

# kind, name of the dtype, then four numbers that each kind uses for its own
MESSAGE: Final = struct.Struct("<4s20sqqqq")
OFFER: Final = b"OFFR"  # sender -> receiver: number, tag, elements, whether the payload follows
ASK: Final = b"ASK "  # receiver -> sender: number
CHUNK: Final = b"CHNK"  # sender -> receiver: number, slot, offset, bytes
EMPTIED: Final = b"EMPT"  # receiver -> sender: slot
DONE: Final = b"DONE"  # receiver -> sender: number; the payload that came along was taken
DIFFERS: Final = b"DIFF"  # receiver -> sender: number, elements it wants
GIVEN_UP: Final = b"GONE"  # sender -> receiver: number, 1; receiver -> sender: number, 0
ALONG_BYTES: Final = 16 << 10  # a payload up to this size comes along with its offer
LONGEST_BYTES: Final = MESSAGE.size + ALONG_BYTES
TAGS: Final = range(-(1 << 63), 1 << 63)  # what a message has room for

# What the system says of a socket whose other end is gone. All else (memory, descriptors) says nothing about the peer.
ENDED: Final = frozenset((errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN))


def pack(kind: bytes, *numbers: int, dtype: str = "", payload: bytes = b"") -> bytes:
    """Put a message together; numbers that a kind does not use are 0."""
    return MESSAGE.pack(kind, dtype.encode(), *(*numbers, 0, 0, 0, 0)[:4]) + payload
