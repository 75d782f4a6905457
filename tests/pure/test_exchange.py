"""What exchanges say of themselves, without a process."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from guozhuang.exchange import AllReduce, CommHook
from guozhuang.exchange.cast import Cast


@pytest.mark.parametrize(("size", "expected"), [(1, 0), (2, 400), (4, 600), (100, 792)])
def test_a_ring_sends_two_parts_less_than_everything_twice(size: int, expected: int) -> None:
    assert AllReduce().traffic(100, 4, size) == expected
    assert Cast(torch.bfloat16, AllReduce()).traffic(100, 4, size) == expected // 2
    assert Cast(torch.float16, AllReduce()).traffic(100, 2, size) == expected // 2  # never wider than it was


def test_hooks_of_one_collective_are_known() -> None:
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook):
        assert CommHook(hook, None).one_round
    for hook in (powerSGD_hook.powerSGD_hook, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)):
        assert not CommHook(hook, None).one_round

    def own(state: object, bucket: object) -> None: ...

    assert not CommHook(own, None).one_round
    own.one_round = True
    assert CommHook(own, None).one_round
