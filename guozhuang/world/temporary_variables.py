"""Set environment variables for a while."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def temporary_variables(**wanted: str | None) -> Iterator[None]:
    """Inside of it the environment of this process has these variables; None removes one. Not for several threads at once.

    Raises:
        TypeError: a value is no text; nothing is changed then.
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
