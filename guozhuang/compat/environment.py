"""Environment variables for a while."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def env(**wanted: str | None) -> Iterator[None]:
    """Set environment variables for the ``with`` block, or remove those given as None; restore them after it. Not thread-safe.

    Raises:
        TypeError: a value is no string; nothing is changed then.
    """
    before = {name: os.environ.get(name) for name in wanted}
    try:
        _put(wanted)
        yield
    finally:
        _put(before)


def _put(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
