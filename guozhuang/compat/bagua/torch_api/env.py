"""Ranks and sizes as the launcher's variables tell them; scripts ask before the process group is there."""

from __future__ import annotations

import os
import socket

from guozhuang.errors import UsageError, explain


def get_rank() -> int:
    """Return RANK, or 0 if it is not set. Raises UsageError, as all functions here, if the variable is no whole number."""
    return _number("RANK", 0)


def get_world_size() -> int:
    """Return WORLD_SIZE, or 1 if it is not set."""
    return _number("WORLD_SIZE", 1)


def get_local_rank() -> int:
    """Return LOCAL_RANK, or 0 if it is not set."""
    return _number("LOCAL_RANK", 0)


def get_local_size() -> int:
    """Return LOCAL_WORLD_SIZE, or 1 if it is not set."""
    return _number("LOCAL_WORLD_SIZE", 1)


def get_default_bucket_size() -> int:
    """Return BAGUA_DEFAULT_BUCKET_SIZE, or 10 MiB if it is not set: the bytes of a bucket."""
    default = 10 << 20
    return _number("BAGUA_DEFAULT_BUCKET_SIZE", default, least=1, fix=f"leave it out for {default}")


def _number(
    name: str, default: int, least: int = 0, fix: str = "start the script with `guozhuang run`, which sets it"
) -> int:
    text = os.environ.get(name, str(default)).strip()
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        what = f"environment variable {name} must be a whole number, at least {least}"
        raise UsageError(explain(what, value=text, fix=fix))
    return int(text)


def find_free_network_port() -> int:
    """Return a port of this machine that nobody listens at now; another process may take it at any time."""
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])
