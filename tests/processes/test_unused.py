"""Parameters without a gradient: found when asked, reported when not, on every rank; and parameters that are frozen."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from guozhuang import DistributedDataParallel, SyncBatchNorm
from guozhuang.errors import UnusedParameterError, WorldError
from guozhuang.groups.agreement import store_of
from tests.processes.cases import (
    Twins,
    as_tests,
    assert_same_grads,
    batch,
    grads,
    seeded,
    twin_of,
)
from tests.processes.expiring import expires_soon
from tests.ranks import RankError, run_ranks
from tests.waiting import LIMIT_S, NEVER_S

SMALL = {"bucket_cap_mb": 0.0001}  # a bucket per parameter, nearly


class Branches(nn.Module):
    """Four branches that are added up; `use` names those that take part."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(3):
            self.trunk = nn.Linear(6, 6)
            self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))

    def forward(self, x: Tensor, use: str = "0123", trunk: bool = True) -> Tensor:
        h = self.trunk(x) if trunk else x
        return sum((self.branches[int(name)](h) for name in use), torch.zeros(3))


def loss_of(model: nn.Module, rank: int, step: int, use: str = "0123") -> Tensor:
    return model(batch(rank, step), use=use).pow(2).mean()


def compare(uses: list[list[str]], zero: bool | None = True, **options: Any) -> None:
    """Step by step; `uses[step][rank]` names the branches. `zero`: set_to_none of zero_grad, or None for no zero_grad."""
    twins = Twins(Branches(), **{**SMALL, **options})
    for step in twins.steps(len(uses), zero is not None, bool(zero)):
        twins.backward(lambda model, r, step=step: loss_of(model, r, step, uses[step][r]))


DIFFERENT = [["0", "1"], ["01", "1"], ["2", "2"], ["0123", "3"], ["3", "012"], ["0", "0"], ["0123", "0123"]]


def case_found_per_rank_and_per_step(rank, world_size):
    """Used nowhere: None stays None. Used on one rank: the mean, on all ranks."""
    for options in ({}, {"batched_grad_copy": True}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 25}):
        compare(DIFFERENT, find_unused_parameters=True, **options)


def case_earlier_gradients_of_unused_parameters_are_kept(rank, world_size):
    for zero in (False, None):
        for options in ({}, {"batched_grad_copy": True}, {"bucket_cap_mb": 25}):
            compare([["0123", "0123"], *DIFFERENT], zero, find_unused_parameters=True, **options)


def case_the_previous_value_is_kept_to_the_bit(rank, world_size):
    bare = Branches()
    ddp = DistributedDataParallel(bare, find_unused_parameters=True)
    ddp(batch(rank)).pow(2).mean().backward()
    before = grads(bare.branches[3])
    for step in range(3):
        ddp(batch(rank, step), use="012").pow(2).mean().backward()
        for name, value in grads(bare.branches[3]).items():
            assert torch.equal(value, before[name])


def case_as_torch_does_it(rank, world_size):
    def run(kind):
        ddp, found = kind(Branches(), find_unused_parameters=True, **SMALL), []
        for step, of_rank in enumerate(DIFFERENT):
            ddp.zero_grad()
            ddp(batch(rank, step), use=of_rank[rank]).pow(2).mean().backward()
            found.append(grads(ddp))
        return found

    for ours, theirs in zip(run(DistributedDataParallel), run(TorchDDP), strict=True):
        assert_same_grads(ours, theirs)


def case_outputs_that_the_loss_does_not_use(rank, world_size):
    """The parameters took part in forward, but no gradient reaches them."""

    class Many(Branches):
        def forward(self, x: Tensor) -> dict[str, Any]:
            h = self.trunk(x)
            return {"out": [branch(h) for branch in self.branches], "nothing": None, "input": x}

    Twins(Many(), find_unused_parameters=True).train(
        4, lambda model, r, step: model(batch(r, step))["out"][(step + r) % 4].pow(2).mean()
    )


def case_sparse_gradients_unused_here_or_everywhere(rank, world_size):
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with seeded(3):
                self.words = nn.Embedding(7, 4, sparse=True)
                self.kinds = nn.Embedding(5, 4, sparse=True)
                self.out = nn.Linear(4, 2)

        def forward(self, use: str, index: Tensor) -> Tensor:
            h = torch.zeros(len(index), 4)
            if "w" in use:
                h = h + self.words(index)
            if "k" in use:
                h = h + self.kinds(index % 5)
            return self.out(h)

    uses = (["w", "k"], ["w", "w"], ["wk", "k"], ["", "w"], ["", ""])
    Twins(Words(), find_unused_parameters=True).train(
        len(uses), lambda model, r, step: model(uses[step][r], (torch.arange(4) * (r + 2) + step) % 7).pow(2).mean()
    )


def case_static_graph_with_unused(rank, world_size):
    for uses in (["01", "01"], ["0", "1"]):
        for zero in (True, False, None):
            compare([uses] * 4, zero, static_graph=True)


def case_skip_all_reduce_of_unused(rank, world_size):
    for cap in (SMALL, {"bucket_cap_mb": 25}):
        for zero in (True, False, None):
            options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, **cap}
            compare([["13", "13"]] * 4, zero, **options)


def case_a_set_changes_but_is_not_asked_for(rank, world_size):
    """Everything unused in one step, named at the next forward of every rank that missed something."""
    ddp = DistributedDataParallel(Branches())
    for step in range(2):
        ddp(batch(rank, step)).pow(2).mean().backward()
    ddp(batch(rank, 2), use="0" if rank == 0 else "012").pow(2).mean().backward()
    with pytest.raises(RuntimeError) as caught:
        ddp(batch(rank, 3))
    assert type(caught.value).__name__ == "UnusedParameterError"
    lines = str(caught.value).splitlines()
    by_rank = {line.split()[0]: line for line in lines if line.strip()[:1].isdigit()}
    assert "branches.1.weight" in by_rank["0"] and "branches.3.bias" in by_rank["0"], str(caught.value)
    assert "branches.1.weight" not in by_rank["1"] and "branches.3.weight" in by_rank["1"]
    assert "trunk" not in str(caught.value)
    assert "find_unused_parameters" in lines[0]


def case_a_caught_error_is_not_the_cause_of_what_comes_later(rank, world_size):
    ddp = DistributedDataParallel(Branches())
    ddp(batch(rank), use="012").pow(2).mean().backward()
    with pytest.raises(UnusedParameterError):
        ddp(batch(rank))
    broken = RuntimeError("a connection was closed")
    dist.barrier()
    assert isinstance(ddp.reducer.cause_of(broken, "the exchange"), UnusedParameterError)
    for step in range(2):
        ddp(batch(rank, step)).pow(2).mean().backward()
    assert isinstance(ddp.reducer.cause_of(broken, "the exchange"), WorldError)
    ddp(batch(rank), use="01" if rank else "0123").pow(2).mean().backward()
    dist.barrier()
    if rank == 1:  # the earlier error of rank 0 is not in the table
        with pytest.raises(UnusedParameterError, match=r"0 +\(none reported\)\n +1 +branches\.2"):
            ddp(batch(rank))
    dist.barrier()


def case_error_about_unused_also_where_the_first_step_missed(rank, world_size):
    ddp = DistributedDataParallel(Branches())
    ddp(batch(rank), use="012").pow(2).mean().backward()
    with pytest.raises(RuntimeError, match=r"branches\.3\.bias"):
        ddp(batch(rank))


def case_forward_without_a_backward_is_no_error(rank, world_size):
    ddp = DistributedDataParallel(Branches())
    for step in range(3):
        ddp.zero_grad()
        ddp(batch(rank, step), use="0")  # dropped, as validation code does that forgot no_grad
        with torch.no_grad():
            ddp(batch(rank, step), use="1")
        ddp(batch(rank, step)).pow(2).mean().backward()


# ---- frozen and thawed ----------------------------------------------------------------------------------------------


def case_freezing_and_thawing_on_all_ranks(rank, world_size):
    for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}, {"batched_grad_copy": True}):
        twins = Twins(Branches(), **SMALL, **options)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in twins.both]
        frozen = [(), (0,), (0, 2), (), (), (3,), (0, 1, 2, 3), ()]
        for step in twins.steps(len(frozen)):
            for model in (twins.ddp.module, twins.twin):
                for i, branch in enumerate(model.branches):
                    branch.requires_grad_(i not in frozen[step])
            twins.backward(loss_of, step)
            twins.check()
            for optimizer in optimizers:
                optimizer.step()
        twins.check_weights()


def case_frozen_at_construction_thawed_later(rank, world_size):
    bare = Branches()
    bare.branches.requires_grad_(False)
    twins = Twins(bare)
    for step in twins.steps(4):
        if step == 2:
            for model in (bare, twins.twin):
                model.branches.requires_grad_(True)
        twins.backward(loss_of, step)


def case_frozen_with_gradients_of_micro_batches(rank, world_size):
    """What was accumulated before a parameter was frozen is not exchanged any more; the others' sums are."""
    bare = Branches()
    twin, ddp = twin_of(bare), DistributedDataParallel(bare)
    for step in range(3):
        for model in (ddp, twin):
            model.zero_grad()
        with ddp.no_sync():
            ddp(batch(rank, step)).pow(2).mean().backward()
        for r in range(world_size):
            (twin(batch(r, step)).pow(2).mean() / world_size).backward()
        for model in (bare, twin):
            model.branches[0].requires_grad_(False)
        ddp(batch(rank, step + 5)).pow(2).mean().backward()
        for r in range(world_size):
            (twin(batch(r, step + 5)).pow(2).mean() / world_size).backward()
        ours, theirs = grads(ddp), grads(twin)
        for name in [n for n in ours if n.startswith("branches.0")]:
            del ours[name], theirs[name]
        assert_same_grads(ours, theirs)
        for model in (bare, twin):
            model.branches[0].requires_grad_(True)


test_cases = as_tests(globals(), (2,), on="threads")


# ---- errors that end ranks ------------------------------------------------------------------------------------------


def misses_alone(rank, world_size, who, buffers, setup):
    if setup == "tcp":
        import guozhuang

        guozhuang.init(timeout_s=NEVER_S)
    bare: nn.Module = Branches()
    if buffers:
        bare.register_buffer("counter", torch.zeros(1))
    ddp, store = DistributedDataParallel(bare), store_of(dist.group.WORLD)
    for step in range(2):
        ddp(batch(rank, step)).pow(2).mean().backward()
    ddp(batch(rank, 2), use="012" if rank == who else "0123").pow(2).mean().backward()
    if rank == who:
        store.wait(["goes on"], datetime.timedelta(seconds=LIMIT_S))
    else:
        store.set("goes on", "")
    for step in range(20):
        ddp(batch(rank, 3 + step)).pow(2).mean().backward()


@pytest.mark.parametrize(
    ("who", "buffers", "setup"),
    [
        (1, False, "file"),
        (0, True, "tcp"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [(0, False, "tcp"), (1, True, "tcp"), (0, True, "file")]
        ),
    ],
)
def test_one_rank_missed_and_exits(who, buffers, setup):
    # Nobody waits for the time-out of the group: such a rank would have no exit code and no exception.
    limits: dict[str, Any] = {"group_timeout_s": NEVER_S, "collect_errors": True}
    outcomes = run_ranks(misses_alone, 2, who, buffers, setup, init=setup == "file", **limits)
    assert all(isinstance(o, RankError) for o in outcomes)
    assert outcomes[who].type_name == "UnusedParameterError"
    assert "branches.3.weight" in outcomes[who].message and "trunk" not in outcomes[who].message
    other = outcomes[1 - who]
    assert other.exit_code == 1, other.text  # raised; neither hung nor aborted
    if setup == "file":
        assert other.type_name == "UnusedParameterError", other.text
        assert "branches.3.weight" in other.message
    else:  # the store may have gone with the rank that held it
        assert other.type_name in ("UnusedParameterError", "WorldError", "PeerLost"), other.text


def freezes_alone(rank, world_size, who):
    bare = Branches()
    ddp = DistributedDataParallel(bare)
    for step in range(2):
        ddp(batch(rank, step)).pow(2).mean().backward()
    if rank == who:  # waits for the other one to compare its parameters, and leaves
        expires_soon()
        bare.branches[2].requires_grad_(False)
    for step in range(3):
        ddp(batch(rank, 3 + step)).pow(2).mean().backward()


@pytest.mark.parametrize("who", [0, 1])
def test_one_rank_freezes_a_parameter(who):
    outcomes = run_ranks(freezes_alone, 2, who, collect_errors=True, group_timeout_s=NEVER_S)
    assert all(isinstance(o, RankError) and o.exit_code == 1 for o in outcomes), outcomes
    assert outcomes[who].type_name in ("MismatchError", "WorldError")
    assert "branches.2.weight" in outcomes[who].message
    assert outcomes[1 - who].type_name in ("MismatchError", "WorldError", "PeerLost"), outcomes[1 - who].text


def freezes_differently(rank, world_size):
    bare = Branches()
    ddp = DistributedDataParallel(bare)
    ddp(batch(rank)).pow(2).mean().backward()
    bare.branches[rank].requires_grad_(False)
    ddp(batch(rank, 1)).pow(2).mean().backward()


def test_ranks_freeze_different_parameters():
    for outcome in run_ranks(freezes_differently, 2, collect_errors=True):
        assert outcome.type_name == "MismatchError", outcome
        assert "branches.0.weight" in outcome.message and "rank" in outcome.message


def batch_norm_between(rank, world_size):
    """The model itself communicates in backward while ranks miss different parameters."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.first, self.norm = nn.Linear(6, 6), SyncBatchNorm(6)
            self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

        def forward(self, x: Tensor, use: str) -> Tensor:
            h = self.norm(self.first(x))
            return sum(self.branches[int(name)](h) for name in use)

    bare = Both()
    ddp = DistributedDataParallel(bare, find_unused_parameters=True, **SMALL)
    reference = Both()
    joined = nn.BatchNorm1d(6)
    for step, of_rank in enumerate((["0", "12"], ["01", "2"], ["2", "2"], ["1", "0"], ["012", "1"])):
        for model in (ddp, reference):
            model.zero_grad()
        joined.zero_grad()
        ddp(batch(rank, step), of_rank[rank]).pow(2).mean().backward()
        h = joined(reference.first(torch.cat([batch(r, step) for r in range(world_size)])))
        for r, part in enumerate(h.chunk(world_size)):
            loss = sum(reference.branches[int(name)](part) for name in of_rank[r]).pow(2).mean() / world_size
            loss.backward(retain_graph=True)
        expected = grads(reference) | {f"norm.{name}": g for name, g in grads(joined).items()}
        assert_same_grads(grads(ddp), expected, rtol=1e-4, atol=1e-6)


def test_synchronized_batch_norm_with_different_parameters_per_rank():
    run_ranks(batch_norm_between, 2)
