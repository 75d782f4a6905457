"""The weights of a node exist once: what that means for a script, and that it trains as before.

What holds for every kind of division is in test_sharding.py, which runs over shared memory too.
"""

from __future__ import annotations

import copy
import io
import itertools
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from guozhuang.errors import MismatchError, PeerLost, UsageError
from guozhuang.gradients.products import _Product
from guozhuang.groups.agreement import store_of
from guozhuang.sharding import clip_grad_norm_, shard
from guozhuang.sharding.arrivals import arrival_of
from guozhuang.sharding.averaged import averaged_gradients
from guozhuang.sharding.shared import linear_gradients
from guozhuang.sharding.shared.carrier import SharedCarrier
from guozhuang.sharding.shared.linear_gradients import PlacingHook
from tests.processes.cases import (
    assert_equal_across_ranks,
    batch,
    mean_loss,
    mlp,
    names_of_cases,
    results_of_cases,
    twin_of,
)
from tests.ranks import RankError, run_ranks
from tests.waiting import LIMIT_S, NEVER_S, until

WORDS, WIDTH, TOKENS = 4000, 96, 7  # an embedding of 1.5 MB: large enough to be lent its gradient


def words(rank: int, step: int) -> Tensor:
    return torch.randint(0, WORDS, (3, TOKENS), generator=torch.Generator().manual_seed(100 * step + rank))


class Pair:
    """A divided model, and a twin in every process that is trained on the joined batch."""

    def __init__(self, model: nn.Module, make: Callable[..., torch.optim.Optimizer] | None = None) -> None:
        make = make or (lambda p: torch.optim.AdamW(p, lr=0.01))
        self.twin = twin_of(model)
        self.twin_optimizer = make(self.twin.parameters())
        self.model, self.optimizer = shard(model, make(model.parameters()))
        assert isinstance(self.optimizer.carrier, SharedCarrier)

    def backward(self, loss_of: Callable[[nn.Module, int, int], Tensor], step: int) -> None:
        world_size = dist.get_world_size()
        loss_of(self.model, dist.get_rank(), step).backward()
        for rank in range(world_size):
            (loss_of(self.twin, rank, step) / world_size).backward()

    def update(self) -> None:
        for optimizer in (self.optimizer, self.twin_optimizer):
            optimizer.step()
            optimizer.zero_grad()

    def train(
        self, loss_of: Callable[[nn.Module, int, int], Tensor] | None = None, steps: int = 4, first: int = 0
    ) -> None:
        for step in range(first, first + steps):
            self.backward(loss_of or rows_loss, step)
            self.update()

    def check(self, atol: float = 1e-6) -> None:
        pairs = zip(self.model.named_parameters(), self.twin.named_parameters(), strict=True)
        for (name, found), (_, expected) in pairs:
            rtol, atol_here = (1e-5, atol) if found.dtype != torch.bfloat16 else (2e-2, 4e-3)
            torch.testing.assert_close(
                found, expected, rtol=rtol, atol=atol_here, msg=lambda text, n=name: f"{n}: {text}"
            )
        assert_equal_across_ranks(self.model)


def rows_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    loss: Tensor = model(batch(rank, step)).pow(2).mean()
    return loss


def inode_at(address: int) -> tuple[str, str]:
    with open("/proc/self/maps") as lines:
        for line in lines:
            span, _, _, device, inode, *_ = line.split()
            low, high = (int(part, 16) for part in span.split("-"))
            if low <= address < high:
                return device, inode
    raise AssertionError("no such address")


# ---- the one copy ------------------------------------------------------------


def case_all_ranks_read_the_same_file(rank: int, world_size: int) -> None:
    pair = Pair(mlp())
    pair.train()
    mine = [inode_at(p.data_ptr()) for p in pair.model.parameters()]
    everybody: list[Any] = [None] * world_size
    dist.all_gather_object(everybody, mine)
    assert len({place for places in everybody for place in places}) == 1, everybody
    # Nothing of it is this rank's own: the pages are those of the file.
    weights = pair.optimizer.carrier._shared
    assert weights._view.own_pages(0, weights._where.num_bytes) == []
    pair.check()


def case_changes_in_place_by_all_ranks_count_once(rank: int, world_size: int) -> None:
    pair = Pair(mlp())
    for step in range(6):
        pair.train(steps=1, first=step)
        with torch.no_grad():
            for model in (pair.model, pair.twin):
                for p in model.parameters():
                    p.mul_(0.9).clamp_(-0.5, 0.5)
        pair.check()  # before the next step already
    pair.train(first=6)
    pair.check()


def case_ranks_that_change_weights_differently_are_told(rank: int, world_size: int) -> None:
    for change_on in ((0,), (0, 1)):
        pair = Pair(mlp())
        pair.train()
        if rank in change_on:
            with torch.no_grad():
                pair.model[2].weight.add_(1.0 + rank)
        rows_loss(pair.model, rank, 9).backward()
        with pytest.raises(MismatchError, match="between steps") as caught:
            pair.optimizer.step()
        assert ("2.weight" in str(caught.value)) == (rank in change_on)
        pair.optimizer.zero_grad()


def case_a_write_past_the_version_counter_is_told(rank: int, world_size: int) -> None:
    pair = Pair(mlp())
    pair.model[2].weight.data.mul_(0.5)
    rows_loss(pair.model, rank, 0).backward()
    with pytest.raises(UsageError, match=r"2\.weight.*no_grad"):
        pair.optimizer.step()
    pair.model[2].weight.data  # noqa: B018  looking is free
    # Later, a part of the weights is looked at per step: here that is all of them, small as they are.
    pair = Pair(mlp())
    pair.train(steps=5)
    pair.model[4].bias.data.add_(1.0)
    rows_loss(pair.model, rank, 0).backward()
    with pytest.raises(UsageError, match=r"4\.|2\."):
        pair.optimizer.step()
    dist.barrier()


def case_other_memory_is_brought_back(rank: int, world_size: int) -> None:
    pair = Pair(mlp())
    pair.train()
    for model in (pair.model, pair.twin):
        flat = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(flat * 0.5, model.parameters())
    pair.train(first=4)
    pair.check()
    pair.model.to(torch.float64)
    rows = batch(rank, 9).double()
    pair.model(rows).mean().backward()
    with pytest.raises(UsageError, match=r"float32.*float64.*before prepare"):
        pair.optimizer.step()
    dist.barrier()


def case_checkpoints_in_the_middle(rank: int, world_size: int) -> None:
    pair = Pair(mlp())
    pair.train()
    state = copy.deepcopy(pair.model.state_dict())
    copied = copy.deepcopy(pair.model)
    before = [p.clone() for p in copied.parameters()]
    twin_state = copy.deepcopy(pair.twin.state_dict())
    optimizer_state, twin_optimizer_state = (
        copy.deepcopy(o.state_dict()) for o in (pair.optimizer, pair.twin_optimizer)
    )
    pair.train(first=4)
    assert all(torch.equal(p, q) for p, q in zip(copied.parameters(), before, strict=True)), "a copy is a copy"
    pair.model.load_state_dict(state)
    pair.twin.load_state_dict(twin_state)
    pair.optimizer.load_state_dict(optimizer_state)
    pair.twin_optimizer.load_state_dict(twin_optimizer_state)
    pair.check()
    with torch.no_grad():  # evaluation reads what was loaded, before any step
        pair.model.eval()
        torch.testing.assert_close(pair.model(batch(0, 3)), pair.twin(batch(0, 3)))
        pair.model.train()
    pair.train(first=4)
    pair.check()


def case_saving_one_parameter_saves_it_alone(rank: int, world_size: int) -> None:
    pair = Pair(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 50_000), nn.Linear(50_000, 3)))
    pair.train(steps=1)
    rows_loss(pair.model, rank, 1).backward()
    for tensor in (pair.model[0].weight, pair.model[0].weight.grad):
        written = io.BytesIO()
        torch.save(tensor, written)
        assert written.tell() < 10_000
        written.seek(0)
        assert torch.equal(torch.load(written), tensor)
    loaded = pickle.loads(pickle.dumps(pair.model))
    assert inode_at(loaded[0].weight.data_ptr()) != inode_at(pair.model[0].weight.data_ptr())
    loaded(batch(rank)).mean().backward()


def case_a_rank_evaluates_alone(rank: int, world_size: int) -> None:
    pair, store, key = Pair(mlp()), store_of(dist.group.WORLD), "waits while another one evaluates"
    pair.train()
    if rank == 0:
        pair.model.eval()
        seen = [pair.model(batch(0, 0)).sum().item() for _ in range(20)]
        store.wait(
            [f"{key}/{each}" for each in range(1, world_size)]
        )  # the others wait in their step, and do not write
        seen += [pair.model(batch(0, 0)).sum().item() for _ in range(20)]
        assert len(set(seen)) == 1
        pair.model.train()
    else:
        telling = threading.Thread(target=tell_when_it_waits, args=(f"{key}/{rank}", threading.get_native_id()))
        telling.start()
    pair.train(first=4)
    if rank:
        telling.join()
    pair.check()


def tell_when_it_waits(key: str, thread: int) -> None:
    """Set a key as soon as a thread of this process sleeps inside a function of the package."""

    def sleeps() -> bool:
        state = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        return state == "S" and "/guozhuang/" in frame.f_code.co_filename

    until(sleeps)
    store_of(dist.group.WORLD).set(key, "")


def case_workers_of_a_loader_are_forked_in_the_middle(rank: int, world_size: int) -> None:
    pair = Pair(mlp())
    pair.train(steps=1)
    loader = DataLoader(
        TensorDataset(batch(rank, 5, rows=8)), batch_size=4, num_workers=1, multiprocessing_context="fork"
    )
    for (rows,) in loader:
        pair.model(rows).pow(2).mean().backward()
        pair.optimizer.step()
        pair.optimizer.zero_grad()
    assert_equal_across_ranks(pair.model)


def _halve(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)


def case_a_child_process_cannot_spoil_the_weights(rank: int, world_size: int) -> None:
    pair = Pair(mlp())
    pair.train()
    child = mp.get_context("fork").Process(target=_halve, args=(pair.model,))
    child.start()
    child.join(LIMIT_S)
    assert child.exitcode == 0
    pair.check()
    pair.train(first=4)
    pair.check()


def case_two_models_on_one_group(rank: int, world_size: int) -> None:
    first, second = Pair(mlp()), Pair(mlp(seed=5), lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9))
    for step in range(4):
        first.backward(rows_loss, step)
        second.backward(rows_loss, step)
        second.update()
        first.update()
        total = torch.ones(3)
        dist.all_reduce(total)  # other collectives of the group go in between
        work = dist.all_reduce(total, async_op=True)
        first.backward(rows_loss, step + 10)
        first.update()
        work.wait()
        assert total[0] == world_size**2
    first.check()
    second.check()


def case_divided_anew_after_the_first_is_closed(rank: int, world_size: int) -> None:
    model = mlp()
    for _ in range(2):
        pair = Pair(model)
        pair.train()
        pair.check()
        pair.optimizer.carrier.close()


# ---- gradients ------------------------------------------------------------


class Language(nn.Module):
    """Words in, a number out; the embedding is used twice, or its weight again as an output layer."""

    def __init__(self, kind: str = "plain", padding_idx: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.kind = kind
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=padding_idx)
        self.middle = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        found = self.words(tokens)
        if self.kind == "in place":
            found += 1.0
        result = torch.tanh(self.middle(found))
        if self.kind == "tied":
            result = nn.functional.linear(result, self.words.weight)
        if self.kind == "twice":
            result = result * self.words(tokens.flip(0) // 2)
        return result


def words_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    loss: Tensor = model(words(rank, step)).pow(2).sum() * 0.01
    return loss


def case_gradients_of_embeddings(rank: int, world_size: int) -> None:
    for kind in ("plain", "tied", "twice", "in place"):
        for padding_idx in (None, int(words(0, 0)[0, 0])):
            # Not Adam, which turns a rounding of a tiny gradient into a part of a step.
            pair = Pair(Language(kind, padding_idx), lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9))
            for step in range(5):
                pair.backward(words_loss, step)
                if step == 2:  # two backwards in one step
                    pair.backward(words_loss, 77)
                dense = pair.model.words.weight.grad
                assert dense.layout == torch.strided and dense.shape == (WORDS, WIDTH)
                if step == 3:  # rows that no batch named get something too
                    for model in (pair.model, pair.twin):
                        with averaged_gradients(model):
                            model.words.weight.grad.add_(model.words.weight.detach(), alpha=0.01)
                if step == 4:
                    for model in (pair.model, pair.twin):
                        model.words.weight.grad.data.add_(model.words.weight.detach(), alpha=0.01)
                pair.update()
            pair.check(atol=2e-6)


def case_the_gradient_of_an_embedding_is_its_own(rank: int, world_size: int) -> None:
    pair = Pair(Language(), lambda p: torch.optim.SGD(p, lr=0.01))
    tokens, weight = words(rank, 0), pair.model.words.weight
    expected = torch.autograd.grad(words_loss(pair.twin, rank, 0), pair.twin.words.weight)[0]
    found = torch.autograd.grad(words_loss(pair.model, rank, 0), weight)[0]
    torch.testing.assert_close(found, expected)
    pair.backward(words_loss, 1)  # the memory of `found` is not written to
    torch.testing.assert_close(found, expected)
    pair.update()
    kept = found.clone()
    for step in range(2, 4):
        pair.backward(words_loss, step)
        pair.update()
    assert torch.equal(found, kept)
    pair.check()
    hooked = []
    handle = weight.register_hook(lambda g: hooked.append(g.layout))
    words_loss(pair.model, rank, 4).backward()
    handle.remove()
    assert hooked == [torch.strided]
    pair.model.zero_grad()
    # A graph of the gradient.
    loss = pair.model(tokens).pow(2).sum()
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    gradient.pow(2).sum().backward()
    assert weight.grad is not None and weight.grad.abs().sum() > 0
    # A copy of the model has an embedding of its own.
    copied = copy.deepcopy(pair.model)
    copied.zero_grad()
    words_loss(copied, rank, 0).backward()
    assert copied.words.weight.grad.data_ptr() != weight.grad.data_ptr()
    assert not isinstance(
        next(iter(copied.words._forward_hooks.values())), type(next(iter(pair.model.words._forward_hooks.values())))
    )


def case_the_lent_gradient_is_used(rank: int, world_size: int) -> None:
    pair = Pair(Language())
    addresses: set[int] = set()
    for step in range(3):
        pair.backward(words_loss, step)
        carrier = pair.optimizer.carrier
        index = list(map(id, carrier.parameters)).index(id(pair.model.words.weight))
        gradient = pair.model.words.weight.grad
        rows = carrier.gradients.lend(index).rows_of(gradient)
        assert rows is not None and len(rows.unique()) == len(words(rank, step).unique())
        pair.update()
        torch.testing.assert_close(carrier.gradients.views[index], gradient, rtol=0, atol=0)
        addresses.add(gradient.data_ptr())
        del gradient
    assert len(addresses) == 1, "the same memory serves every step"
    marks = carrier.gradients._marks
    assert float(marks.count_nonzero()) < 0.5 * marks.numel(), "most pages are known to be zeros"


class Wide(nn.Module):
    """Linear layers whose weight is large enough for its gradient to be computed in its place; one may serve twice."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(5)
        self.kind = kind
        self.first = nn.Linear(6, 520)
        self.large = nn.Linear(520, 520)
        self.last = nn.Linear(520, 521, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        x = torch.tanh(self.first(rows))
        x = self.large(x[:, None, :] if self.kind == "three axes" else x)
        if self.kind == "twice":
            x = self.large(torch.tanh(x))
        if self.kind == "recomputed":
            return torch.utils.checkpoint.checkpoint(self.last, x, use_reentrant=False)
        if self.kind == "in place":
            x.relu_()
        return self.last(x)


def count_places(model: nn.Module) -> list[int]:
    """For each large weight, the number of gradients that lie in their place."""
    return [
        int(arrival_of(p).carrier.gradients.handed.holds(arrival_of(p).parameter, p.grad))
        for p in (model.large.weight, model.last.weight)
    ]


def case_gradients_of_linear_layers_have_the_same_bits(rank: int, world_size: int) -> None:
    for kind in ("plain", "three axes", "twice", "in place", "recomputed"):
        with mock.patch.object(linear_gradients, "SMALLEST_BYTES", 1 << 20):
            pair = Pair(Wide(kind), lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9))
        for step in range(5):
            alone = copy.deepcopy(pair.model)  # without the hooks
            alone.zero_grad()
            assert not any(isinstance(hook, PlacingHook) for hook in alone.large._forward_hooks.values())
            rows_loss(alone, rank, step).backward()
            pair.backward(rows_loss, step)
            if step == 3:  # the second backward of a step is added
                rows_loss(alone, rank, 77).backward()
                pair.backward(rows_loss, 77)
            for p, q in zip(pair.model.parameters(), alone.parameters(), strict=True):
                assert torch.equal(p.grad, q.grad), (kind, step, p.shape)
            assert count_places(pair.model) == ([1, 1] if step else [0, 0])
            pair.update()
        pair.check()


def case_a_gradient_is_computed_in_its_place_only_where_nobody_sees_it(rank: int, world_size: int) -> None:
    with mock.patch.object(linear_gradients, "SMALLEST_BYTES", 1 << 20):
        pair = Pair(Wide(), lambda p: torch.optim.SGD(p, lr=1e-3))
    weight, twin = pair.model.large.weight, pair.twin.large.weight
    gradients = arrival_of(weight).carrier.gradients
    view = gradients.views[arrival_of(weight).parameter]
    seen: list[int] = []
    product, mm = _Product.backward, torch.mm
    pair.train(steps=2)
    with mock.patch.object(torch, "mm", lambda a, b, out=None: (seen.append(out.data_ptr()), mm(a, b, out=out))[1]):
        pair.train(steps=1, first=2)
        assert seen.count(view.data_ptr()) == 1
        seen.clear()
        # autograd.grad: the program's own, whatever comes later
        (found,) = torch.autograd.grad(rows_loss(pair.model, rank, 3), weight)
        expected = found.clone()
        assert not seen
        pair.train(steps=1, first=3)
        assert torch.equal(found, expected) and view.data_ptr() in seen
        seen.clear()
        # backward(inputs=...) goes to p.grad
        rows_loss(pair.model, rank, 4).backward(inputs=[weight])
        assert seen == [view.data_ptr()] and weight.grad.is_set_to(view)
        pair.model.zero_grad()
        seen.clear()
        # a hook of the program's
        hooked: list[Tensor] = []
        handle = weight.register_hook(hooked.append)
        rows_loss(pair.model, rank, 5).backward()
        handle.remove()
        assert view.data_ptr() not in seen and hooked[0].data_ptr() != view.data_ptr()
        assert torch.equal(hooked[0], weight.grad)
        pair.model.zero_grad()
        seen.clear()
        # somebody keeps a tensor over the memory
        keeper = view.detach()
        rows_loss(pair.model, rank, 5).backward()
        assert view.data_ptr() not in seen and weight.grad.is_set_to(view)
        del keeper
        pair.model.zero_grad()
        seen.clear()
        # other dtypes inside autocast
        with torch.autocast("cpu", torch.bfloat16):
            rows_loss(pair.model, rank, 6).backward()
        assert not seen
        pair.model.zero_grad()
        # no gradient wanted
        weight.requires_grad_(False)
        rows_loss(pair.model, rank, 6).backward()
        weight.requires_grad_(True)
        assert weight.grad is None
        pair.model.zero_grad()
        # graphs of gradients, as PyTorch's
        for model, of in ((pair.model, weight), (pair.twin, twin)):
            (gradient,) = torch.autograd.grad(rows_loss(model, rank, 7), of, create_graph=True)
            gradient.pow(2).sum().backward()
        torch.testing.assert_close(weight.grad, twin.grad)
        pair.model.zero_grad(), pair.twin.zero_grad()
        seen.clear()

        # a backward that breaks off leaves nothing behind
        def fails(gradient: Tensor) -> None:
            raise KeyError("the program's own")

        handle = pair.model.first.bias.register_hook(fails)
        with pytest.raises(KeyError):
            rows_loss(pair.model, rank, 8).backward()
        handle.remove()
        pair.model.zero_grad()
        pair.train(steps=2, first=9)
        assert view.data_ptr() in seen
    assert product is _Product.backward
    pair.check()
    functional = torch.func.functional_call(pair.model, dict(pair.twin.named_parameters()), (batch(rank, 0),))
    torch.testing.assert_close(functional, pair.twin(batch(rank, 0)))
    rows = torch.func.vmap(pair.model)(batch(rank, 0))
    torch.testing.assert_close(rows, pair.twin(batch(rank, 0)))


class Odd(nn.Module):
    """channels_last, bf16, one element, none, a transposed weight, and a parameter that some steps do not use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.empty(0, 5))
        self.transposed = nn.Parameter(torch.randn(5, 4).t())
        self.sometimes = nn.Parameter(torch.randn(700))
        self.halves = nn.Parameter(torch.randn(33).to(torch.bfloat16))
        self.large = nn.Linear(5, 30_000)

    def forward(self, rows: Tensor, uses: bool) -> Tensor:
        x = self.conv(rows.new_ones(2, 3, 6, 6).to(memory_format=torch.channels_last) * rows[0, 0]).mean((0, 2, 3))
        x = self.large(x @ self.transposed).mean() * self.scale + self.none.sum() + self.halves.float().pow(2).mean()
        if uses:
            x = x + (self.sometimes.expand(3, 700) * rows[0, 1]).sum() * 1e-3
        return x


def case_odd_models(rank: int, world_size: int) -> None:
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    ):
        pair = Pair(Odd(), make)
        for step in range(6):
            pair.backward(lambda model, r, s: model(batch(r, s), uses=s % 3 == 0 or (s % 3 == 1 and r == 0)), step)
            pair.update()
        pair.check()


def case_accumulation_clipping_and_kept_graphs(rank: int, world_size: int) -> None:
    pair = Pair(nn.Sequential(nn.Linear(6, 9000), nn.Tanh(), nn.Linear(9000, 3)))
    for step in range(6):
        pair.backward(rows_loss, step)
        pair.backward(rows_loss, step + 50)
        if step % 2:
            found = clip_grad_norm_(pair.model.parameters(), 0.01)
            expected = nn.utils.clip_grad_norm_(pair.twin.parameters(), 0.01)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        if step == 4:
            with averaged_gradients(pair.model):
                for p, q in zip(pair.model.parameters(), pair.twin.parameters(), strict=True):
                    p.grad, q.grad = p.grad * 2, q.grad * 2
        pair.update()
    loss = mean_loss(pair.model, 1, 1)
    loss.backward(retain_graph=True)
    loss.backward()
    pair.optimizer.step()
    assert_equal_across_ranks(pair.model)


def case_stretches_are_as_one(rank: int, world_size: int) -> None:
    import guozhuang.sharding.shared.carrier as shared

    whole, shared.STRETCH_BYTES = shared.STRETCH_BYTES, 4096
    try:
        # Not Adam: among 63,000 gradients some are so small that its division makes their rounding visible.
        pair = Pair(
            nn.Sequential(nn.Linear(6, 9000), nn.Tanh(), nn.Linear(9000, 3)),
            lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9),
        )
    finally:
        shared.STRETCH_BYTES = whole
    optimizer, carrier = pair.optimizer, pair.optimizer.carrier
    for step in range(4):
        pair.backward(rows_loss, step)
        carrier.collect()
        sums = [weight.grad.clone() for weight in carrier.weights]
        carrier.skip()
        seen: list[int] = []
        for indices in carrier.stretches():
            seen += indices
            assert all(torch.equal(carrier.weights[i].grad, sums[i]) for i in indices)
        assert sorted(seen) == list(range(len(carrier.blocks)))
        carrier.publish()
        pair.update()
    assert optimizer.carrier is carrier
    pair.check()


NAMES = names_of_cases(globals())
RESULTS = {n: results_of_cases(__name__, n, NAMES, backend="shm") for n in (2, 3)}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_cases(num_ranks: int, name: str) -> None:
    RESULTS[num_ranks](name)


# ---- a rank that dies ------------------------------------------------------------


def _step_until_killed(rank: int, world_size: int) -> Any:
    pair = Pair(mlp())
    pair.train(steps=2)
    num_steps = 0

    def die() -> None:
        until(lambda: num_steps >= 3)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        threading.Thread(target=die).start()
    try:
        for step in itertools.count():
            num_steps = step
            rows_loss(pair.model, rank, step).backward()
            pair.optimizer.step()
            pair.optimizer.zero_grad()
    except PeerLost as error:
        return error.rank, [p.isfinite().all().item() for p in pair.model.parameters()]


def test_a_dead_rank_is_named_in_the_step() -> None:
    # Nobody waits for the time-out of the group.
    outcomes = run_ranks(_step_until_killed, 3, backend="shm", collect_errors=True, group_timeout_s=NEVER_S)
    assert isinstance(outcomes[1], RankError) and outcomes[1].exit_code == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome, tuple), outcome
        lost, finite = outcome
        assert lost == 1 and all(finite)


def _memory(rank: int, world_size: int) -> dict[str, int]:
    model = nn.Linear(4000, 4000, bias=False)  # 64 MB
    model, optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        model(torch.ones(1, 4000)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    found: dict[str, int] = {}
    with open("/proc/self/smaps") as lines:
        inside = ""
        for line in lines:
            if "memfd:" in line:
                inside = line.split("memfd:")[1].split()[0]
            elif "-" in line.split()[0]:
                inside = ""
            elif inside and line.startswith("Pss:"):
                found[inside] = found.get(inside, 0) + int(line.split()[1]) * 1024
    dist.barrier()
    return found


def test_the_weights_take_memory_once() -> None:
    found = run_ranks(_memory, 2, backend="shm")
    total = {name: sum(each.get(name, 0) for each in found) for name in found[0]}
    weights = 4000 * 4000 * 4
    assert weights <= total["weights"] < 1.1 * weights, total
    assert 2 * weights <= total["gradients"] < 2.2 * weights, total
