"""The exceptions of Horovod's interface."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective failed: ranks submitted different operations, a peer is gone, or ``hvd.shutdown`` came before its end.

    If ranks only submitted different operations, later collectives still work. ``hvd.elastic.run`` handles this error: it
    restores the last committed state and enters the next world.
    """


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts were added or removed in an elastic run; raised by ``state.commit()`` and ``state.check_host_updates()``.

    Attributes:
        skip_sync: hosts were only removed: the remaining ranks hold the same state already.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("hosts came or went" if not skip_sync else "hosts went")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Parts of two different versions of a package are installed together."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Return an error text that names the needed version of the package ``name``, and the installed one."""
    return (
        f"this was made for {name} {version}, but {name} {installed_version} is installed. "
        f"Fix: install {name} {version}, or install this again next to the version that is there."
    )
