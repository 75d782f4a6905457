"""The exceptions of Horovod's interface."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective failed: ranks asked for different things, a peer is gone, or the world was left while it was under way.

    Where ranks differed the job goes on, and later collectives work. ``hvd.elastic.run`` takes it as a reason to restore
    the last committed state and to meet again.
    """


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts came or went during an elastic run; raised by ``state.commit()`` and ``state.check_host_updates()``.

    Attributes:
        skip_sync: hosts only went: the ranks that stay hold the same state already.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("hosts came or went" if not skip_sync else "hosts went")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Parts of two versions were put together."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Say which version of ``name`` this was made for, and which one is installed."""
    return (
        f"this was made for {name} {version}, but {name} {installed_version} is installed. "
        f"Fix: install {name} {version}, or install this again next to the version that is there."
    )
