"""Bagua's mixture of experts and checkpoints, among ranks that are threads."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import guozhuang.compat.bagua.torch_api as bagua
from guozhuang.compat.bagua.moe import MoE, is_moe_param
from guozhuang.compat.bagua.torch_api import checkpoint
from guozhuang.compat.bagua.torch_api.algorithms import Algorithm
from guozhuang.compat.bagua.torch_api.moe.gates import TopKGate, top1, top2
from guozhuang.errors import UsageError
from tests.waiting import until

from .ranks import run_threads

LOGITS = torch.tensor([[2.0, 1, 0], [0, 2, 1], [1, 0, 2], [3, 0, 0]])


def test_the_numbers_of_a_gate() -> None:
    found = top1(LOGITS, factor=2.0, min_capacity=1)
    assert found.combine.shape == (4, 3, 3) and found.exp_counts.tolist() == [2, 1, 1]
    torch.testing.assert_close(found.combine.sum((1, 2)), torch.tensor([0.665241, 0.665241, 0.665241, 0.909443]))
    torch.testing.assert_close(found.l_aux, torch.tensor(1.1080205))
    assert ((found.combine > 0).sum(0) <= 1).all()  # one token at a place
    both = top2(LOGITS, factor=2.0)
    torch.testing.assert_close(both.combine.sum((1, 2)), torch.ones(4))
    assert ((both.combine > 0).sum((1, 2)) == 2).all()
    torch.testing.assert_close(both.l_aux, found.l_aux)


def test_a_gate_computes_in_float32_under_autocast() -> None:
    gate, tokens = TopKGate(8, 4).eval(), torch.randn(16, 8)
    torch.manual_seed(0)
    plain = gate(tokens)
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(gate(tokens).combine, plain.combine)


def test_places_run_out_and_tokens_may_be_left_out() -> None:
    same = torch.zeros(8, 4)
    same[:, 1] = 5.0
    found = top1(same, factor=1.0, min_capacity=3)
    assert int((found.combine.sum((1, 2)) > 0).sum()) == 3 and found.exp_counts.tolist() == [0, 8, 0, 0]
    used = torch.tensor([1, 0, 1, 0, 0, 0, 0, 0])
    found = top1(same, factor=1.0, min_capacity=3, used_token=used)
    assert (found.combine.sum((1, 2)) > 0).long().tolist() == used.tolist()
    with pytest.raises(AssertionError, match="min_capacity"):
        top1(same, factor=1.0, min_capacity=9)
    crowded = top2(same, factor=0.5)  # two places for each expert
    assert crowded.combine.shape == (8, 4, 2) and int((crowded.combine[:, 1] > 0).sum()) == 2
    assert top1(same[:1], 100.0, 1).combine.shape[2] == 1  # no more places than tokens


@pytest.mark.parametrize("policy", [None, "None", "Jitter", "RSample"])
def test_policies(policy: str | None) -> None:
    gate = TopKGate(6, 3, 1, min_capacity=1, eval_capacity_factor=3.0, noisy_gate_policy=policy)
    x = torch.randn(9, 6, dtype=torch.float64)
    assert gate(x).combine.shape == (9, 3, 3)
    one, other = gate.eval()(x), gate(x)
    assert one.combine.shape == (9, 3, 9) and torch.equal(one.combine.sum(2), other.combine.sum(2))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"k": 3}, ValueError, "k=3"),
        ({"noisy_gate_policy": "other"}, AssertionError, "RSample"),
        ({"num_local_experts": 0}, ValueError, "at least one expert"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        MoE(4, nn.Linear(4, 4), **options)


def _expert(number: int) -> nn.Linear:
    made, generator = nn.Linear(5, 5), torch.Generator().manual_seed(number)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.rand(p.shape, generator=generator) - 0.5)
    return made


def _tokens(rank: int) -> Tensor:
    return torch.randn(6, 2, 5, generator=torch.Generator().manual_seed(50 + rank))


def _spread(rank: int, size: int, num_local: int) -> None:
    bagua.init_process_group()
    moe = MoE(5, _expert(0), num_local, 1, capacity_factor=100.0)
    gate = torch.randn(size * num_local, 5, generator=torch.Generator().manual_seed(7))
    moe.bagua_moe.gate.wg.weight.data.copy_(gate)
    assert moe.num_experts == size * num_local
    whole = [_expert(number) for number in range(moe.num_experts)]
    for i, mine in enumerate(moe.bagua_moe.experts.bagua_experts):
        mine.load_state_dict(whole[rank * num_local + i].state_dict())
    assert [name for name, p in moe.named_parameters() if not is_moe_param(p)] == ["bagua_moe.gate.wg.weight"]
    x = _tokens(rank).requires_grad_()
    output, l_aux, counts = moe(x)
    assert output.shape == x.shape and counts.sum() == 12
    (output.square().sum() + l_aux).backward()

    gates = [nn.Parameter(gate.clone()) for _ in range(size)]
    inputs = [_tokens(other).requires_grad_() for other in range(size)]
    for other in range(size):
        tokens = inputs[other].reshape(-1, 5)
        shares = F.linear(tokens, gates[other]).softmax(1)
        best = shares.argmax(1)
        out = torch.stack([shares[i, e] * whole[int(e)](tokens[i]) for i, e in enumerate(best)])
        chosen = F.one_hot(best, moe.num_experts).float().mean(0)
        balance = (shares.mean(0) * chosen).sum() * moe.num_experts
        (out.square().sum() + balance).backward()
        if other == rank:
            torch.testing.assert_close(output.reshape(-1, 5), out)
            torch.testing.assert_close(l_aux, balance)
    torch.testing.assert_close(x.grad, inputs[rank].grad)
    torch.testing.assert_close(moe.bagua_moe.gate.wg.weight.grad, gates[rank].grad)
    for i, mine in enumerate(moe.bagua_moe.experts.bagua_experts):
        theirs = whole[rank * num_local + i]
        for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(
                torch.zeros_like(p) if p.grad is None else p.grad, torch.zeros_like(q) if q.grad is None else q.grad
            )


@pytest.mark.parametrize(("size", "num_local"), [(1, 2), (2, 2), (3, 1), (4, 2)])
def test_spread_experts_compute_what_one_rank_would(size: int, num_local: int) -> None:
    run_threads(_spread, size, num_local)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(4, 5)
        self.expert_of_nothing = nn.Linear(5, 5)  # a name that is no expert's
        self.moe = MoE(5, nn.Linear(5, 5), 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out, _, _ = self.moe(self.expert_of_nothing(self.entry(x).relu()))
        return out[:, 0]  # type: ignore[no-any-return]


def _stands_in(function: Callable[..., object], thread: str) -> bool:
    """Whether a thread is inside a function."""
    found = {each.name: each.ident for each in threading.enumerate()}
    frame = sys._current_frames().get(found.get(thread) or 0)
    while frame is not None and frame.f_code is not inspect.unwrap(function).__code__:
        frame = frame.f_back
    return frame is not None


def _saved(rank: int, size: int, folder: Path) -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        checkpoint.save_checkpoint(1, folder / "early", nn.Linear(1, 1))
    assert not (folder / "early").exists()
    bagua.init_process_group()
    assert checkpoint.load_checkpoint(folder, nn.Linear(1, 1)) == 0

    def made() -> tuple[Any, torch.optim.Optimizer, Any]:
        net: Any = _Net()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        return net, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)

    def train(net: Any, optimizer: torch.optim.Optimizer, scheduler: Any) -> list[float]:
        losses, data = [], torch.Generator().manual_seed(rank)
        for _ in range(4):
            x = torch.randn(32, 4, generator=data)
            optimizer.zero_grad()
            loss = F.mse_loss(net(x), x.sum(1))
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(float(loss.detach()))
        return losses

    net, optimizer, scheduler = made()
    net.with_bagua([optimizer], Algorithm.init("gradient_allreduce"))
    train(net, optimizer, scheduler)
    checkpoint.save_checkpoint(1000, folder, net, optimizer, scheduler)
    names = {path.name for path in (folder / "iter_0001000").iterdir()}
    wanted = {f"expert_{i}_mp_rank_00_model_states.pt" for i in range(2 * size)} | {"mp_rank_00_model_states.pt"}
    assert names == wanted | {f"expert_parallel_rank_{i}_mp_rank_00_optim_states.pt" for i in range(size)}
    again, steps, rates = made()
    assert checkpoint.load_checkpoint(folder, again, steps, rates) == 1000
    for (name, p), q in zip(net.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(p, q), name
    assert steps.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
    assert rates.last_epoch == 4
    plain = nn.Linear(1, 1 + rank)
    checkpoint.save_checkpoint(2000, folder / "plain", plain)
    alone = nn.Linear(1, 1)
    assert checkpoint.load_checkpoint(folder / "plain", alone) == 2000
    with pytest.raises(RuntimeError, match=r"Unexpected key|size mismatch|Missing key"):
        checkpoint.load_checkpoint(folder / "plain", nn.Linear(3, 1))
    assert checkpoint.load_checkpoint(folder / "plain", nn.Sequential(), strict=False) == 2000
    with pytest.raises(UsageError, match="no optimizer"):
        checkpoint.load_checkpoint(folder / "plain", alone, torch.optim.SGD(alone.parameters()))
    with pytest.raises(UsageError, match="whole number"):
        checkpoint.save_checkpoint(-1, folder, net)
    bagua.communication._get_default_group().get_global_communicator().abort()
    if rank != 0:  # it comes when rank 0 has written its own files and waits
        whole = folder / "late" / "iter_0003000" / "mp_rank_00_model_states.pt"
        until(lambda: whole.exists() and _stands_in(torch.distributed.barrier, "rank 0"))
    checkpoint.save_checkpoint(3000, folder / "late", net)  # waits for all files though collectives return at once now
    assert wanted <= {path.name for path in (folder / "late" / "iter_0003000").iterdir()}
    if rank == 0:
        tracker = folder / "latest_checkpointed_iteration.txt"
        tracker.write_text("newest")
        with pytest.raises(UsageError, match="names no iteration"):
            checkpoint.load_checkpoint(folder, net)
        tracker.write_text("release")
        with pytest.raises(UsageError, match="missing"):
            checkpoint.load_checkpoint(folder, net)


def test_checkpoints(tmp_path: Path) -> None:
    run_threads(_saved, 2, tmp_path)
