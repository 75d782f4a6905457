"""A rank of a pipeline that is killed or stopped is named at once, with the stage, the microbatch and the action that waits."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from guozhuang.errors import WorldError
from guozhuang.parallel.axes import make_axes
from guozhuang.parallel.pipeline import divide_pipeline
from guozhuang.world.layout import Layout
from tests.ranks import run_ranks
from tests.waiting import NEVER_S

pytestmark = pytest.mark.slow


class Block(nn.Module):
    """Fails on its rank: at a forward, or at the backward through it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.fail: Any = None

    def forward(self, rows: Tensor) -> Tensor:
        out = self.linear(rows).tanh()
        if self.fail is not None and out.requires_grad and not out.is_meta:
            self.fail(out)
        return out


def _failing(rank: int, size: int, signal_number: int, action: str) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    pipe = divide_pipeline(
        model, make_axes(Layout(pp=size)), cut=["2"], num_microbatches=4, schedule="1f1b", loss=nn.MSELoss()
    )
    rows, told, count = torch.randn(8, 8), list[str](), [0]
    pipe.step(rows, rows)

    def at_third(*_: Any) -> None:
        count[0] += 1
        if count[0] == 3:
            os.kill(os.getpid(), signal_number)

    if rank == 1:
        model[3].fail = at_third if action == "forward" else lambda out: out.register_hook(at_third)
    logging.getLogger("guozhuang").addHandler(handler := logging.Handler())
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())

    def tell(record: logging.LogRecord) -> None:
        told.append(record.getMessage())
        if rank == 0 and signal_number == signal.SIGSTOP:
            os.kill(pids[1], signal.SIGCONT)  # as if somebody had read the line

    handler.emit = tell  # type: ignore[method-assign]
    try:
        pipe.step(rows, rows)
    except WorldError as error:
        return str(error)
    return told[0] if told else ""


@pytest.mark.parametrize("backend", ("gloo", "shm"))
@pytest.mark.parametrize("action", ("forward", "backward"))
def test_a_killed_rank_is_named(backend: str, action: str) -> None:
    # Nobody waits for the time-out of the group.
    found = run_ranks(
        _failing, 2, signal.SIGKILL, action, backend=backend, collect_errors=True, group_timeout_s=NEVER_S
    )
    text = found[0]
    # Messages lie in shared memory at once, but may end with a process whose gloo had not sent them yet.
    k = 1 if backend == "gloo" and "microbatch 1" in text else 2
    assert f"backward of microbatch {k} in stage 0" in text
    assert f"gradients of microbatch {k} from stage 1 to stage 0" in text and "rank 1" in text


def test_a_stopped_rank_is_named_and_the_training_goes_on() -> None:
    text, _ = run_ranks(_failing, 2, signal.SIGSTOP, "backward", backend="shm", group_timeout_s=NEVER_S)
    assert "rank 1 (pid" in text and "is stopped" in text and "backward of microbatch 2 in stage 0 waits" in text
