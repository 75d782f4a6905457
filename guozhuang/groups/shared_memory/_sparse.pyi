"""The interface of the C part of sparse.py."""

from collections.abc import Sequence

from .sparse import Piece

def take(pieces: Sequence[Piece], /) -> None: ...
def add(
    dst: int, srcs: tuple[int, ...], marks: tuple[int, ...], num_bytes: int, dtype: int, scale: float, /
) -> None: ...
