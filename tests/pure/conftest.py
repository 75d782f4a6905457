"""What several files of this folder begin with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .horovod_alone import MirrorChannel


@pytest.fixture
def channel() -> Iterator[MirrorChannel]:
    """A Horovod world in this process alone, as several ranks that do the same would see it."""
    from .horovod_alone import mirror_world

    with mirror_world() as made:
        yield made
