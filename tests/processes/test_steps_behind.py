"""Ranks that make fewer steps than others, or other steps than ranks without data can know of."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from guozhuang.errors import UsageError
from tests.processes.cases import names_of_cases, results_of_cases
from tests.processes.mean_of_two import (
    assert_equal_everywhere,
    batch,
    flat,
    train,
    twins,
    wrapped,
)
from tests.ranks import RankError, run_ranks


def skips(start_step: int, last: int, rank: int, size: int) -> None:
    """Rank 1 leaves out the last step, in which the others exchange weights and so wait for it."""
    ddp, optimizer = wrapped(start_step)
    for step in range(last + 1):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(x), y).backward()
        if not (rank == 1 and step == last):
            optimizer.step()
    with captured_log() as lines:
        began_s = time.monotonic()
        ddp.eval()
    assert time.monotonic() - began_s < 8  # far below the time-out
    assert ddp.around is not None and ddp.around.step == last + 1
    assert_equal_everywhere(flat(ddp))
    if rank == 1:
        [line] = lines
        assert f"rank 1 came to agree on one set of weights after {last} optimizer steps" in line
        assert f"rank 0 in step {last}" in line
    else:
        assert not lines


def case_a_skipped_step_in_which_others_wait(rank: int, size: int) -> None:
    skips(0, 3, rank, size)


def case_a_skipped_step_at_whose_end_others_compare_weights(rank: int, size: int) -> None:
    skips(3, 2, rank, size)


def case_a_slow_rank_is_not_behind(rank: int, size: int) -> None:
    ddp, optimizer = wrapped()
    train(ddp, optimizer, rank, range(3))
    if rank == 1:
        time.sleep(2.2)
    with captured_log() as lines:
        train(ddp, optimizer, rank, range(3, 4))
        ddp.eval()
    assert ddp.around is not None and ddp.around.step == 4 and not lines
    assert torch.allclose(flat(ddp), flat(twins(size, 4)[rank]), atol=1e-6)
    # Rank 0 said that it waited in step 3. That means nothing where steps are counted anew.
    ddp.load_exchange_state_dict({"step": 0, "exchange": {}, "weights": {"step": 1, "exchange": {"num_steps": 1}}})
    ddp.agree()
    ddp.around.changed = True
    if rank == 0:
        time.sleep(1.5)
    with captured_log() as lines:
        ddp.agree()
    assert ddp.around.step == 1 and not lines


@contextmanager
def captured_log() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("guozhuang").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("guozhuang").removeHandler(handler)


def case_accumulation_in_a_join(rank: int, size: int) -> None:
    ddp, optimizer = wrapped(start_step=1)
    with ddp.join():
        for step in range(3 + 2 * rank):
            x, y = batch(rank, step)
            optimizer.zero_grad()
            with ddp.no_sync():
                (nn.functional.mse_loss(ddp(x[:4]), y[:4]) / 2).backward()
            (nn.functional.mse_loss(ddp(x[4:]), y[4:]) / 2).backward()
            optimizer.step()
    assert ddp.around is not None and ddp.around.step == 3 + 2 * (size - 1)
    assert_equal_everywhere(flat(ddp))


def case_accumulation_in_a_join_without_no_sync(rank: int, size: int) -> None:
    for averages in (0, 3):
        ddp, optimizer = wrapped(start_step=averages)
        x, _ = batch(rank, 0)
        with pytest.raises(UsageError, match=r"second forward came before optimizer.step.*no_sync"), ddp.join():
            ddp(x).sum().backward()
            ddp(x).sum().backward()
            optimizer.step()


def case_steps_in_a_join_of_which_nobody_hears(rank: int, size: int) -> None:
    ddp, optimizer = wrapped()
    x, _ = batch(rank, 0)
    with pytest.raises(UsageError, match="without a synchronized forward"), ddp.join(), ddp.no_sync():
        ddp(x).sum().backward()
        optimizer.step()


def case_accumulation_in_a_join_that_ends_early(rank: int, size: int) -> None:
    ddp, optimizer = wrapped()
    x, _ = batch(rank, 0)
    with ddp.join(throw_on_early_termination=True):
        ddp(x).sum().backward()
        ddp(x).sum().backward()
        optimizer.step()


NAMES = names_of_cases(globals())
ON_TWO, ON_THREE = results_of_cases(__name__, 2, NAMES), results_of_cases(__name__, 3, NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_on_two_ranks(name: str) -> None:
    ON_TWO(name)


@pytest.mark.parametrize("name", NAMES)
def test_on_three_ranks(name: str) -> None:
    ON_THREE(name)


def accumulate_alone(rank: int, size: int) -> None:
    ddp, optimizer = wrapped()
    x, _ = batch(rank, 0)
    with ddp.join():
        for _ in range(rank):
            ddp(x).sum().backward()
            ddp(x).sum().backward()
            optimizer.step()


def test_accumulation_without_no_sync_while_another_rank_has_no_data() -> None:
    began_s = time.monotonic()
    results = run_ranks(accumulate_alone, 2, collect_errors=True)
    assert isinstance(results[1], RankError) and results[1].type_name == UsageError.__name__
    assert isinstance(results[0], RankError)
    assert time.monotonic() - began_s < 25  # both at once, and not by the time-out
