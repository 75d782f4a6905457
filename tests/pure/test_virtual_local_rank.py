"""`--virtual-local-rank`: LOCAL_RANK is 0 in all ranks, and each sees its own device only."""

from __future__ import annotations

import pytest

from guozhuang.errors import UsageError
from guozhuang.world import torchrun

RANK_1 = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost", "MASTER_PORT": "1234", "TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "0",
}  # fmt: skip


def test_the_true_one_counts() -> None:
    environ = RANK_1 | {"GUOZHUANG_LOCAL_RANK": "1"}
    found = torchrun.read(environ)
    assert found is not None and (found.rank, found.local_rank) == (1, 1)
    assert torchrun.has_virtual_local_rank(environ)


def test_left_by_a_run_around_it_it_does_not() -> None:
    environ = RANK_1 | {"GUOZHUANG_LOCAL_RANK": "5", "LOCAL_RANK": "1"}
    found = torchrun.read(environ)
    assert found is not None and found.local_rank == 1
    assert not torchrun.has_virtual_local_rank(environ)


def test_what_contradicts_itself_is_named() -> None:
    with pytest.raises(UsageError, match="GUOZHUANG_LOCAL_RANK is not RANK=1"):
        torchrun.read(RANK_1 | {"GUOZHUANG_LOCAL_RANK": "0"})
    with pytest.raises(UsageError, match="GUOZHUANG_LOCAL_RANK"):
        torchrun.read(RANK_1 | {"GUOZHUANG_LOCAL_RANK": "2"})
