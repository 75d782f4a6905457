"""Training with a DistributedOptimizer on real ranks equals training in one process on all ranks' batches."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import guozhuang as gz
import guozhuang.compat.horovod.torch as hvd
from guozhuang.exchange.adasum import factors
from guozhuang.lab import compare, options
from guozhuang.lab.results import from_json
from tests.ranks import run_ranks

from .horovod_programs import run_programs
from .horovod_training import (
    CASES,
    STEPS,
    TOLERANCE,
    Net,
    alone,
    batch,
    both,
    build,
    difference,
    digest,
    loss_of,
    on_rank,
    sgd,
    wrapped,
)


def all_cases(rank: int, num_ranks: int, backend: str) -> dict[str, tuple[float, str]]:
    gz.init(backend=backend)
    hvd.init()
    found = {}
    for place, (name, case) in enumerate(CASES.items()):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            net = on_rank(case, rank)
        error = difference(net, alone(case, num_ranks)) if place % num_ranks == rank else 0.0
        found[name] = (error, digest(net))
    if num_ranks != 3:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "grad and param do not obey the gradient layout")  # permuted ones
            run_programs(range(8 * num_ranks), rank)
    hvd.shutdown()
    gz.shutdown()
    return found


@pytest.mark.parametrize(
    ("num_ranks", "backend"),
    [(2, "shm"), *(pytest.param(*each, marks=pytest.mark.slow) for each in [(3, "gloo"), (4, "shm")])],
)
def test_weights_equal_those_of_one_process(num_ranks: int, backend: str) -> None:
    results = run_ranks(all_cases, num_ranks, backend, init=False)
    wrong = []
    for name, case in CASES.items():
        if len({result[name][1] for result in results}) != 1:
            wrong.append(f"{name}: ranks hold different bits")
        error = max(result[name][0] for result in results)
        if not error <= case.tolerance:
            wrong.append(f"{name}: differs by {error:.2e}")
    assert not wrong, "\n".join(wrong)


# ---- several optimizers, orders, process sets, failures ---------------------------------------------------------------------


def in_other_orders(rank: int, num_ranks: int) -> list[float]:
    """Two models with an optimizer each; ranks go through them in different orders, and step in the same."""
    hvd.init()
    pairs = []
    for prefix in ("a", "b"):
        net = build(Net)
        names = net.named_parameters(prefix=prefix)
        pairs.append((net, hvd.DistributedOptimizer(sgd(net.parameters()), named_parameters=names)))
    for step in range(STEPS):
        order = pairs if rank % 2 == 0 else pairs[::-1]
        for net, _ in order:
            loss_of(net, step, rank, both(rank, step)).backward()
        for _, optimizer in pairs:
            optimizer.step()
        for _, optimizer in order:
            optimizer.zero_grad()
    twin = alone(CASES["sgd"], num_ranks)
    return [difference(net, twin) for net, _ in pairs]


def in_a_process_set(rank: int, num_ranks: int) -> tuple[float, str]:
    """The last rank trains by itself, the others together."""
    first = hvd.ProcessSet(range(num_ranks - 1))
    hvd.init(process_sets=[first])
    net = build(Net)
    optimizer = wrapped(sgd(net.parameters()), net, process_set=first)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, step, rank, both(rank, step)).backward()
        optimizer.step()
    if first.included():
        return difference(net, alone(CASES["sgd"], num_ranks - 1)), digest(net)
    twin = build(Net)
    plain = sgd(twin.parameters())
    for step in range(STEPS):
        plain.zero_grad()
        loss_of(twin, step, rank, both(rank, step)).backward()
        plain.step()
    return difference(net, twin), ""


def with_uneven_data(rank: int, num_ranks: int) -> float:
    """Rank r has r + 2 batches; means are divided by all ranks to the end."""
    hvd.init()
    net, twin = build(Net), build(Net)
    optimizer, plain = wrapped(sgd(net.parameters()), net), sgd(twin.parameters())
    for step in range(rank + 2):
        optimizer.zero_grad()
        loss_of(net, step, rank, both(rank, step)).backward()
        optimizer.step()
    assert hvd.join() in range(num_ranks)
    hvd.broadcast_parameters(net.state_dict(), root_rank=num_ranks - 1)
    for step in range(num_ranks + 1):
        plain.zero_grad()
        for other in range(num_ranks):
            if step < other + 2:
                (loss_of(twin, step, other, both(rank, step)) / num_ranks).backward()
        plain.step()
    return difference(net, twin)


def after_a_mismatch(rank: int, num_ranks: int) -> tuple[str, float]:
    """On rank 1 a layer has another shape; all are told, and the next step works."""
    hvd.init()
    odd = nn.Linear(3, 2 + (rank == 1))
    wrong = wrapped(sgd(odd.parameters()), odd)
    odd(torch.ones(1, 3)).sum().backward()
    try:
        wrong.step()
        said = ""
    except hvd.HorovodInternalError as error:
        said = str(error)
    return said, difference(on_rank(CASES["sgd"], rank), alone(CASES["sgd"], num_ranks))


def adaptive_steps(rank: int, num_ranks: int) -> tuple[float, str]:
    """The sum of the steps that each rank would make, by the formula; each rank keeps its own momentum."""
    hvd.init()
    net, twin = build(Net), build(Net)
    optimizer = wrapped(sgd(net.parameters()), net, op=hvd.Adasum)
    theirs = [sgd(twin.parameters()) for _ in range(num_ranks)]
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, step, rank, both(rank, step)).backward()
        optimizer.step()
        start = copy.deepcopy(twin.state_dict())
        went = []
        for other, plain in enumerate(theirs):
            twin.load_state_dict(start)
            plain.zero_grad()
            loss_of(twin, step, other, both(rank, step)).backward()
            plain.step()
            went.append([p.detach().clone() for p in twin.parameters()])
        twin.load_state_dict(start)
        for p, *ends in zip(twin.parameters(), *went, strict=True):
            rows = torch.stack([(end - p).detach().flatten() for end in ends]).double()
            step_of_all = (factors((rows @ rows.T)[None])[0][None] @ rows)[0].reshape(p.shape)
            p.data.add_(step_of_all.float())
    return difference(net, twin), digest(net)


def closures_that_decide(rank: int, num_ranks: int) -> tuple[float, str]:
    """LBFGS calls the closure as often as the loss makes it; the ranks' own losses differ."""
    hvd.init()
    optimizer_of = partial(torch.optim.LBFGS, lr=0.5, max_iter=6, line_search_fn="strong_wolfe")
    net, twin = (build(Net).to(torch.float64, memory_format=torch.contiguous_format) for _ in range(2))
    optimizer, plain = wrapped(optimizer_of(net.parameters()), net), optimizer_of(twin.parameters())

    def of(module: nn.Module, step: int, of_rank: int) -> Tensor:
        x, target = batch(step, of_rank)
        return F.cross_entropy(module(x.double()), target)

    for step in range(3):

        def ours(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = of(net, step, rank)
            loss.backward()
            return loss

        def joined(step: int = step) -> Tensor:
            plain.zero_grad()
            loss = torch.stack([of(twin, step, other) for other in range(num_ranks)]).mean()
            loss.backward()
            return loss

        assert abs(optimizer.step(ours) - plain.step(joined)) < 1e-6
    return difference(net, twin), digest(net)


def where_gradients_become_nan(rank: int, num_ranks: int) -> list[str]:
    """``--stop-on-nan`` ends a step by whole tensors, which comes first, and one by buckets."""
    said = []
    for bad_step in (0, 2):
        hvd.init()
        net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        optimizer = wrapped(sgd(net.parameters()), net)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GUOZHUANG_STOP_ON_NAN", "1")
            for _ in range(bad_step):
                optimizer.zero_grad()
                net(torch.ones(1, 3)).sum().backward()
                optimizer.step()
            optimizer.zero_grad()
            with pytest.raises(FloatingPointError) as error:
                net(torch.full((1, 3), torch.nan)).sum().backward()
        said.append(str(error.value))
        hvd.shutdown()
    return said


def all_situations(rank: int, num_ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for situation in (
        in_other_orders,
        in_a_process_set,
        with_uneven_data,
        after_a_mismatch,
        adaptive_steps,
        closures_that_decide,
        where_gradients_become_nan,
    ):
        found[situation.__name__] = situation(rank, num_ranks)
        hvd.shutdown()
    return found


def test_in_every_situation() -> None:
    results = run_ranks(all_situations, 3, init=False)
    for rank, result in enumerate(results):
        assert max(result["in_other_orders"]) < TOLERANCE
        assert result["in_a_process_set"][0] < TOLERANCE
        assert result["with_uneven_data"] < TOLERANCE
        said, error = result["after_a_mismatch"]
        assert "Mismatched allreduce tensor shapes" in said and error < TOLERANCE
        assert result["adaptive_steps"][0] < 1e-5
        assert result["closures_that_decide"][0] < TOLERANCE
        for step, said in zip((0, 2), result["where_gradients_become_nan"], strict=True):
            assert said.startswith(f"[rank {rank}] step {step}: the gradient of "), said
    assert results[0]["in_a_process_set"][1] == results[1]["in_a_process_set"][1]
    for situation in ("adaptive_steps", "closures_that_decide"):
        assert len({result[situation][1] for result in results}) == 1


# ---- the strategy -----------------------------------------------------------------------------------------------------------


class BreaksOff(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise KeyError("broken off")


def clipped_after_a_backward_that_raised(rank: int) -> None:
    """Gradients are means when backward returns, also after an earlier backward was broken off in the middle."""
    model, optimizer = gz.prepare(net := nn.Linear(3, 2), sgd(net.parameters()), "horovod")
    with pytest.raises(KeyError):
        model(BreaksOff.apply(torch.ones(1, 3, requires_grad=True))).sum().backward()
    optimizer.synchronize()
    optimizer.zero_grad()
    model(torch.full((1, 3), rank + 1.0)).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((2, 3), 1.5))
    optimizer.step()


def by_strategy(rank: int, num_ranks: int) -> tuple[bool, bool]:
    gz.init()
    clipped_after_a_backward_that_raised(rank)
    trained = []
    for strategy in ("horovod", "ddp"):
        net = build(Net, rank)
        model, optimizer = gz.prepare(net, sgd(net.parameters()), strategy)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step, rank, both(rank, step)).backward()
            optimizer.step()
        trained.append(net)
        assert isinstance(optimizer, torch.optim.SGD)
    was_running = hvd.is_initialized()
    del model, optimizer
    gz.shutdown()
    return digest(trained[0]) == digest(trained[1]), was_running and not hvd.is_initialized()


def test_the_strategy_gives_the_bits_of_ddp_and_ends_with_the_world() -> None:
    assert run_ranks(by_strategy, 2, init=False) == [(True, True)] * 2


@pytest.mark.slow
def test_compare_has_a_row_for_it(tmp_path: Path) -> None:
    parser = options.parser()
    more = [
        "--strategies",
        "single,ddp,horovod",
        "--steps",
        "6",
        "--warmup-steps",
        "2",
        "--rounds",
        "1",
        "--timeout",
        "60",
    ]
    told = ["--workload", "tests.processes.tiny_workload:make", "--out", str(tmp_path), "--device", "cpu", *more]
    assert compare.run(parser.parse_args(told)) == 0
    rows = {row.name: row for row in from_json((tmp_path / "results.json").read_text()).rows if row.ok}
    assert list(rows) == ["single", "ddp", "horovod"]
    assert rows["horovod"].losses == pytest.approx(rows["single"].losses, rel=1e-5)
    assert rows["horovod"].difference is not None and rows["horovod"].difference.relative < 1e-5
    assert rows["horovod"].ranks_identical
