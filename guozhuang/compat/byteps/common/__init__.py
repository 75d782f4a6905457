"""``byteps.common``: the functions that enter, leave and query the world, as methods of ``BytePSBasics``."""

from __future__ import annotations

from guozhuang.compat.byteps.torch import session

__all__ = ["BytePSBasics"]


class BytePSBasics:
    """The functions of ``byteps.torch`` of these names. All objects refer to the one world of this process.

    Args:
        *where: where BytePS's own finds its library; not looked at.
    """

    def __init__(self, *where: object) -> None:
        pass

    init, shutdown = staticmethod(session.init), staticmethod(session.shutdown)
    suspend, resume = staticmethod(session.suspend), staticmethod(session.resume)
    rank, size = staticmethod(session.rank), staticmethod(session.size)
    local_rank, local_size = staticmethod(session.local_rank), staticmethod(session.local_size)
    get_pushpull_speed = staticmethod(session.get_pushpull_speed)
