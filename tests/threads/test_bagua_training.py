"""``model.with_bagua`` with each algorithm, among ranks that are threads."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import guozhuang.compat.bagua.torch_api as bagua
from guozhuang import DistributedDataParallel
from guozhuang.compat.bagua.torch_api.algorithms import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry
from guozhuang.compat.bagua.torch_api.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer
from guozhuang.compat.bagua.torch_api.data_parallel import DistributedDataParallel as BaguaDDP
from guozhuang.errors import MismatchError, UsageError
from guozhuang.exchange import decentralized, low_precision_decentralized
from guozhuang.exchange.codecs.quantize8 import MinMax8
from guozhuang.exchange.compressed import Compressed
from guozhuang.exchange.decentralized import partner
from guozhuang.groups.hierarchical.nodes import Nodes

from .ranks import run_threads


class _Net(nn.Module):
    """Bagua's test net: 2-10-50-4 without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = (nn.Linear(*sizes, bias=False) for sizes in ((2, 10), (10, 50), (50, 4)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc3(self.fc2(self.fc1(x).relu()).relu()).softmax(1)
        return out


def _made(seed: int) -> _Net:
    """Return a net of that seed; ranks are threads, so the global generator serves none of them."""
    net, generator = _Net(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.rand(p.shape, generator=generator) - 0.5)
    return net


def _batches(rank: int, num: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    draw = lambda *size: torch.randn(*size, generator=generator)  # noqa: E731
    return [(draw(4, 2), draw(4, 4)) for _ in range(num)]


def _step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> float:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _everyones(flat: Tensor, size: int) -> list[Tensor]:
    found = [torch.empty_like(flat) for _ in range(size)]
    dist.all_gather(found, flat)
    return found


def _algorithm(name: str, optimizer: Any = None, **options: Any) -> Algorithm:
    return QAdamAlgorithm(optimizer, **options) if name == "qadam" else Algorithm.init(name, **options)


def _gradients_equal_ddp(rank: int, size: int) -> None:
    bagua.init_process_group()
    batches = _batches(rank, 10)
    expected = []
    for exchange in (None, Compressed(MinMax8())):
        model = _made(0)
        wrapped = DistributedDataParallel(model, bucket_cap_mb_list=[10])
        if exchange is not None:
            wrapped.use_exchange(exchange)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x, y in batches:
            _step(wrapped, optimizer, x, y)
        expected.append(_flat(model))
    one = Algorithm.init("gradient_allreduce")
    cases = [
        (one, expected[0], True),
        (one, expected[0], True),
        (Algorithm.init("gradient_allreduce", hierarchical=True), expected[0], True),
        (Algorithm.init("bytegrad", hierarchical=False), expected[1], True),
        (Algorithm.init("bytegrad"), expected[0], True),  # on one node nothing is coded
    ]
    for algorithm, wanted, exactly in cases:
        model = _made(rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        keys = list(model.state_dict())
        x, y = batches[0]
        _step(model, optimizer, x, y)  # before it trains with others
        model.load_state_dict(_made(rank).state_dict())
        assert model.with_bagua([optimizer], algorithm) is model  # type: ignore[operator]
        assert list(model.state_dict()) == keys and len(list(model.modules())) == 4
        assert torch.equal(_flat(model), _flat(_made(0)))
        for x, y in batches:
            _step(model, optimizer, x, y)
        assert torch.equal(_flat(model), wanted) if exactly else torch.allclose(_flat(model), wanted)
        assert model.bagua_ddp.bagua_train_step_counter == 10  # type: ignore[union-attr]
    total = _made(0)
    optimizer = torch.optim.SGD(total.parameters(), lr=0.01 / size)
    total.with_bagua([optimizer], Algorithm.init("gradient_allreduce", average=False))  # type: ignore[operator]
    for x, y in batches:
        _step(total, optimizer, x, y)
    torch.testing.assert_close(_flat(total), expected[0])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gradient_algorithms_equal_our_strategies(size: int) -> None:
    run_threads(_gradients_equal_ddp, size)


def _no_sync(rank: int, size: int) -> None:
    bagua.init_process_group()
    (x1, y1), (x2, y2) = _batches(rank, 2)
    models = _made(0), _made(0)
    wrapped = DistributedDataParallel(models[0])
    models[1].with_bagua([torch.optim.SGD(models[1].parameters(), lr=0.1)], Algorithm.init("gradient_allreduce"))  # type: ignore[operator]
    with wrapped.no_sync():
        nn.functional.mse_loss(wrapped(x1), y1).backward()
    nn.functional.mse_loss(wrapped(x2), y2).backward()
    ddp: Any = models[1].bagua_ddp
    ddp.require_backward_grad_sync = False
    nn.functional.mse_loss(models[1](x1), y1).backward()
    ddp.require_backward_grad_sync = True
    nn.functional.mse_loss(models[1](x2), y2).backward()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)


def test_gradients_add_up_without_sync() -> None:
    run_threads(_no_sync, 2)


_OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.2}),
    (torch.optim.Adam, {}),
    (torch.optim.Rprop, {}),
]


def _by_parts(rank: int, size: int) -> None:
    """Backwards of what the script makes of parts of the module are averaged too, each of them."""
    bagua.init_process_group()
    model, plain = _made(0), _made(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model.with_bagua([optimizer], Algorithm.init("gradient_allreduce"))  # type: ignore[operator]

    def backward(net: _Net, x: Tensor, y: Tensor) -> None:
        nn.functional.mse_loss(net.fc3(net.fc2(net.fc1(x))), y).backward()

    everyones = [_batches(other, 3) for other in range(size)]
    for number in range(3):
        backward(model, *everyones[rank][number])
        for other in range(size):
            backward(plain, *everyones[other][number])
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            torch.testing.assert_close(p.grad, q.grad / size)
        if number == 1:  # the second backward has added to the first one's mean
            optimizer.step()
            optimizer.zero_grad()
            plain.zero_grad()
    model.bagua_ddp.require_backward_grad_sync = False  # type: ignore[union-attr]
    optimizer.zero_grad()
    backward(model, *everyones[rank][0])
    alone = _made(0)
    backward(alone, *everyones[rank][0])
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), alone.parameters(), strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 3])
def test_parts_of_the_module_are_averaged_too(size: int) -> None:
    run_threads(_by_parts, size)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _starts_from_rank_0(rank: int, size: int) -> None:
    bagua.init_process_group()
    for kind, options in _OPTIMIZERS:
        model = _made(rank)
        optimizer: Any = kind(model.parameters(), **{"lr": 0.01 + rank, **options})  # type: ignore[arg-type]
        for x, y in _batches(rank, 5 if rank else 7):
            _step(model, optimizer, x, y)
        model.with_bagua([optimizer], Algorithm.init("gradient_allreduce"))  # type: ignore[operator]
        found: list[Any] = [None] * size
        dist.all_gather_object(found, (model.state_dict(), optimizer.state_dict()))
        assert all(_same(found[0], each) for each in found)


def test_weights_and_optimizers_start_from_rank_0() -> None:
    run_threads(_starts_from_rank_0, 2)


def _decentralized_by_hand(
    size: int, num: int, mode: str, interval: int, lr: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the weights of all ranks after ``num`` steps by the formula of the algorithm, and the last averages."""
    models = [_made(0) for _ in range(size)]
    batches = [_batches(rank, num) for rank in range(size)]
    peers = [torch.empty(0)] * size
    turn = 0
    for i in range(num):
        before = [_flat(model) for model in models]
        for model, each in zip(models, batches, strict=True):
            model.zero_grad()
            nn.functional.mse_loss(model(each[i][0]), each[i][1]).backward()
        if i % interval == 0:
            for rank, model in enumerate(models):
                other = partner(turn, rank, size)
                averaged = torch.stack(before).mean(0)
                if mode == "shift_one":
                    averaged = before[rank] if other is None else (before[rank] + before[other]) / 2
                peers[rank] = averaged
                nn.utils.vector_to_parameters(averaged.clone(), model.parameters())
            turn += 1
        for model in models:
            with torch.no_grad():
                for p in model.parameters():
                    assert p.grad is not None
                    p -= lr * p.grad
    return [_flat(model) for model in models], peers


def _decentralized(rank: int, size: int, mode: str, interval: int) -> None:
    bagua.init_process_group()
    model = _made(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options = {"hierarchical": False, "peer_selection_mode": mode, "communication_interval": interval}
    model.with_bagua([optimizer], Algorithm.init("decentralized", **options))  # type: ignore[operator]
    for x, y in _batches(rank, 10):
        _step(model, optimizer, x, y)
    weights, peers = _decentralized_by_hand(size, 10, mode, interval, 0.5)
    torch.testing.assert_close(_flat(model), weights[rank], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.bagua_buckets[0]._peer_weight, peers[rank], rtol=1e-5, atol=1e-6)  # type: ignore[index,union-attr]


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize(("mode", "size"), [("all", 3), ("shift_one", 4), ("shift_one", 3)])
def test_decentralized_equals_its_formula(mode: str, size: int, interval: int) -> None:
    run_threads(_decentralized, size, mode, interval)


def _accumulated(rank: int, size: int) -> None:
    """Forwards count, not steps: with two forwards a step, the first and the third exchange for interval 2."""
    bagua.init_process_group()
    model = _made(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options = {"hierarchical": True, "communication_interval": 2}
    model.with_bagua([optimizer], Algorithm.init("decentralized", **options))  # type: ignore[operator]
    single = _made(0)
    single_optimizer = torch.optim.SGD(single.parameters(), lr=0.5)
    batches = _batches(rank, 8)
    for i, (x, y) in enumerate(batches):
        if i % 2 == 0:
            before = _everyones(_flat(single), size)
        for each in (model, single):
            nn.functional.mse_loss(each(x), y).backward()
        if i % 2 == 0:
            nn.utils.vector_to_parameters(torch.stack(before).mean(0), single.parameters())
        if i % 2 == 1:
            for each in (optimizer, single_optimizer):
                each.step()
                each.zero_grad()
    torch.testing.assert_close(_flat(model), _flat(single), rtol=1e-5, atol=1e-6)
    model.eval()
    model(batches[0][0])
    assert model.bagua_ddp.bagua_train_step_counter == 8  # type: ignore[union-attr]


def test_the_interval_counts_forwards() -> None:
    run_threads(_accumulated, 2)


def _ring(rank: int, size: int, hierarchical: bool) -> None:
    bagua.init_process_group()
    model = _made(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    algorithm = Algorithm.init("low_precision_decentralized", hierarchical=hierarchical)
    model.with_bagua([optimizer], algorithm)  # type: ignore[operator]
    for x, y in _batches(rank, 10):
        _step(model, optimizer, x, y)
    everyones = _everyones(_flat(model), size)
    bucket: Any = model.bagua_buckets[0]  # type: ignore[index]
    assert torch.equal(bucket._weight, _flat(model))
    if hierarchical:
        assert all(torch.equal(each, everyones[0]) for each in everyones)
        return
    assert not torch.equal(everyones[0], everyones[1])
    assert torch.equal(bucket._left_peer_weight, everyones[(rank - 1) % size])
    assert torch.equal(bucket._right_peer_weight, everyones[(rank + 1) % size])
    model.load_state_dict(_made(1).state_dict())  # replicas begin anew
    x, y = _batches(rank, 1)[0]
    _step(model, optimizer, x, y)
    assert torch.equal(model.bagua_buckets[0]._left_peer_weight, _everyones(_flat(model), size)[(rank - 1) % size])  # type: ignore[index,union-attr]
    model.fc1.weight.data.add_(0)
    other = torch.optim.SGD(model.fc1.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"fc2\.weight"):
        model.with_bagua([other], algorithm)  # type: ignore[operator]


@pytest.mark.parametrize(("size", "hierarchical"), [(2, False), (3, False), (3, True)])
def test_low_precision_decentralized(size: int, hierarchical: bool) -> None:
    run_threads(_ring, size, hierarchical)


def _qadam(rank: int, size: int) -> None:
    bagua.init_process_group()
    models = _made(0), _made(rank)
    adam = torch.optim.Adam(models[0].parameters(), lr=0.01, weight_decay=0.1)
    optimizer = QAdamOptimizer(models[1].parameters(), lr=0.01, weight_decay=0.1, warmup_steps=10)
    wrapped = DistributedDataParallel(models[0])
    models[1].with_bagua([optimizer], QAdamAlgorithm(optimizer, hierarchical=False))  # type: ignore[operator]
    for i, (x, y) in enumerate(_batches(rank, 40)):
        _step(models[1], optimizer, x, y)
        if i < 10:
            _step(wrapped, adam, x, y)
        if i == 9:
            torch.testing.assert_close(_flat(models[1]), _flat(models[0]), rtol=0, atol=1e-6)
    everyones = _everyones(_flat(models[1]), size)
    assert all(torch.equal(each, everyones[0]) for each in everyones) and bool(everyones[0].isfinite().all())
    assert set(optimizer.state[models[1].fc1.weight]) >= {"step", "exp_avg", "exp_avg_sq"}


def test_qadam() -> None:
    run_threads(_qadam, 2)


def _async(rank: int, size: int, warmup: int, num_steps: tuple[int, ...]) -> None:
    bagua.init_process_group()
    model, alone = _made(rank), _made(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sole = torch.optim.SGD(alone.parameters(), lr=0.05)
    algorithm: Any = Algorithm.init("async", sync_interval_ms=1, warmup_steps=warmup)
    model.with_bagua([optimizer], algorithm)  # type: ignore[operator]
    impl: Any = model.bagua_algorithm
    impl.resume(model)
    for x, y in _batches(rank, num_steps[rank]):
        _step(model, optimizer, x, y)
        _step(alone, sole, x, y)
    impl.abort(model)
    everyones = _everyones(_flat(model), size)
    assert all(torch.equal(each, everyones[0]) for each in everyones)
    spread = _everyones(_flat(alone), size)
    assert not torch.equal(spread[0], spread[1])
    model.eval()
    model(torch.zeros(1, 2))
    model.train()
    impl.resume(model)
    x, y = _batches(rank, 1)[0]
    for _ in range(20):
        _step(model, optimizer, x, y)
    algorithm.abort(model)
    impl.abort(model)
    with pytest.raises(UsageError, match="async"):
        algorithm.abort(alone)


@pytest.mark.parametrize(("warmup", "num_steps"), [(0, (50, 100)), (10, (60, 60, 60))])
def test_async(warmup: int, num_steps: tuple[int, ...]) -> None:
    run_threads(_async, len(num_steps), warmup, num_steps)


def _switched(rank: int, size: int) -> None:
    bagua.init_process_group()
    model = _made(rank)
    adam = QAdamOptimizer(model.parameters(), lr=0.001, warmup_steps=5)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    names = ["bytegrad", "decentralized", "gradient_allreduce", "qadam", "async", "low_precision_decentralized"]
    for name in names:
        optimizer: Any = adam if name == "qadam" else sgd
        steps = [0]
        model.with_bagua([optimizer], _algorithm(name, adam))  # type: ignore[operator]
        handle = optimizer.register_step_post_hook(lambda *_, steps=steps: steps.append(1))
        assert all(torch.equal(each, _flat(model)) for each in _everyones(_flat(model), size))
        for x, y in _batches(rank, 12):
            _step(model, optimizer, x, y)
        handle.remove()
        assert len(steps) == 13
        if name == "async":
            model.bagua_algorithm.abort(model)  # type: ignore[operator,union-attr]
    assert bool(_flat(model).isfinite().all())
    copied: Any = copy.deepcopy(model)
    assert copied.bagua_ddp is None
    copied(torch.zeros(1, 2)).sum().backward()  # the copy trains alone


def test_one_algorithm_after_the_other() -> None:
    run_threads(_switched, 2)


class _Unused(_Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x).relu()).softmax(1)[:, :4]  # type: ignore[no-any-return]


def _wrapper(rank: int, size: int) -> None:
    bagua.init_process_group()
    for unused, wanted in ((True, {"fc1.weight", "fc2.weight"}), (False, {"fc1.weight", "fc2.weight", "fc3.weight"})):
        model: nn.Module = _Unused() if unused else _Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped: Any = BaguaDDP(model, optimizers=[optimizer], find_unused_parameters=unused)
        assert all(key.startswith("module.") for key in wrapped.state_dict())
        for x, y in _batches(rank, 3):
            _step(wrapped, optimizer, x, y)
        assert {name for name, _ in wrapped.inner.bagua_build_params()} == wanted
        assert all(torch.equal(each, _flat(model)) for each in _everyones(_flat(model), size))
        assert wrapped.bagua_train_step_counter == 3 and wrapped.inner.bagua_optimizers == [optimizer]
        with wrapped.no_sync():
            assert not wrapped.require_backward_grad_sync
        wrapped.module.fc1.requires_grad_(False)  # the buckets are as they were until the next forward
        named = dict(wrapped.module.named_parameters())
        held = [t.data_ptr() for bucket in wrapped.bagua_buckets for t in bucket.tensors]
        assert {named[name].data_ptr() for name in wanted} <= set(held)
        alone = copy.deepcopy(wrapped)
        assert alone.inner is None and not hasattr(alone, "parameters_to_ignore")
        for name in ("scatter", "to_kwargs", "gather", "join", "register_comm_hook"):
            with pytest.raises(NotImplementedError, match=name):
                getattr(wrapped, name)
    # Warnings are caught for all threads at once, so one rank does it.
    with pytest.warns(UserWarning, match="PyTorch's class") if rank == 0 else nullcontext():
        of_bagua = bagua.communication._get_default_group()
        made = BaguaDDP(_Net(), process_group=of_bagua, broadcast_buffers=False)
        assert type(made) is nn.parallel.DistributedDataParallel
    with pytest.raises(AssertionError, match="requires a gradient"):
        BaguaDDP(_Net().requires_grad_(False))


def test_distributed_data_parallel() -> None:
    run_threads(_wrapper, 2)


def _own(rank: int, size: int) -> None:
    """A group of some ranks, parameters that stay, several optimizers, and an algorithm of the user's own."""
    bagua.init_process_group()

    class Mine(Algorithm):
        def reify(self, process_group: Any) -> AlgorithmImpl:
            class Impl(AlgorithmImpl):
                def gradients(self, forward: int, optimizers: Any) -> Any:
                    return Compressed(MinMax8())

            return Impl(process_group)

    class Foreign(Algorithm):
        def reify(self, process_group: Any) -> Any:
            return object()

    group = bagua.communication.new_group([0, 2])
    if rank != 1:
        model: Any = _made(rank)
        model._bagua_params_and_buffers_to_ignore = ["fc2.weight"]
        model.fc3.weight.expert = True
        optimizers = [
            torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in (model.fc1, model.fc2, model.fc3)
        ]
        for part, optimizer in zip((model.fc1, model.fc2, model.fc3), optimizers, strict=True):
            optimizer.state[part.weight]["momentum_buffer"] = torch.full_like(part.weight, float(rank))
        model.with_bagua(optimizers, Mine(), group)
        assert torch.equal(model.fc1.weight, _made(0).fc1.weight)
        assert torch.equal(model.fc2.weight, _made(rank).fc2.weight)
        state = [optimizer.state[p]["momentum_buffer"] for optimizer in optimizers for p in optimizer.state]
        assert [int(each.flatten()[0]) for each in state] == [0, rank, rank]
        x, y = _batches(rank, 1)[0]
        nn.functional.mse_loss(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
        others = [torch.empty_like(model.fc1.weight) for _ in range(2)]
        dist.all_gather(others, model.fc1.weight.detach(), group=group.torch_group)
        assert torch.equal(others[0], others[1])
        assert [name for name, _ in model.bagua_ddp.bagua_build_params()] == ["fc1.weight"]
        assert not hasattr(model, "_ddp_params_and_buffers_to_ignore")
    model = _made(0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    refused: list[tuple[list[Any], Any, type[Exception], str]] = [
        ([sgd], Foreign(), NotImplementedError, "bagua_core"),
        ([sgd], "bytegrad", UsageError, "Algorithm"),
        ([model], Algorithm.init("bytegrad"), UsageError, "list of optimizers"),
        ([torch.optim.LBFGS(model.parameters())], Algorithm.init("bytegrad"), UsageError, "LBFGS"),
        ([sgd], QAdamAlgorithm(QAdamOptimizer(model.parameters())), UsageError, "not one of"),
    ]
    model.with_bagua([sgd], Algorithm.init("gradient_allreduce"))
    for optimizers, algorithm, error, text in refused:
        with pytest.raises(error, match=text):
            model.with_bagua(optimizers, algorithm)
    with pytest.raises(UsageError, match="list of optimizers"):
        BaguaDDP(model, optimizers=sgd)  # type: ignore[arg-type]
    (model(torch.ones(1, 2)) * rank).max().backward()
    grads = [torch.empty_like(model.fc1.weight) for _ in range(size)]
    dist.all_gather(grads, model.fc1.weight.grad)
    assert torch.equal(grads[0], grads[2])  # what was refused has changed nothing
    with pytest.raises(UsageError, match="one node"):
        model.with_bagua([sgd], Algorithm.init("decentralized", peer_selection_mode="shift_one"))
    ignoring = _made(0)
    ignoring._ddp_params_and_buffers_to_ignore = ["fc2.weight"]  # type: ignore[assignment]
    ignoring.fc3.weight.expert = True  # type: ignore[attr-defined]
    only_first = [torch.optim.SGD(ignoring.fc1.parameters(), lr=0.1)]
    ignoring.with_bagua(only_first, Algorithm.init("low_precision_decentralized"))  # type: ignore[operator]
    sparse: Any = nn.Embedding(3, 2, sparse=True)
    with pytest.raises(NotImplementedError, match="sparse-rows"):
        sparse.with_bagua([], Algorithm.init("bytegrad"))
    different: Any = nn.Linear(2 + rank, 1)
    with pytest.raises(MismatchError):
        different.with_bagua([], Algorithm.init("bytegrad"))


def test_groups_ignored_parameters_and_refusals() -> None:
    run_threads(_own, 3)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: Algorithm.init("other"), KeyError, "async, bytegrad, decentralized, gradient_allreduce, low_prec"),
        (lambda: GlobalAlgorithmRegistry.register("bytegrad", Algorithm), ValueError, "is registered"),
        (lambda: GlobalAlgorithmRegistry.register(Algorithm, "bytegrad"), TypeError, "text"),  # type: ignore[arg-type]
        (lambda: Algorithm.init("decentralized", peer_selection_mode="some"), ValueError, "shift_one"),
        (lambda: Algorithm.init("decentralized", communication_interval=0), ValueError, "at least 1"),
        (lambda: Algorithm.init("async", peer_selection_mode="some"), ValueError, "all"),
        (lambda: Algorithm.init("async", warmup_steps=-1), ValueError, "at least 0"),
        (lambda: QAdamAlgorithm(torch.optim.Adam([torch.zeros(1)])), ValueError, "QAdamOptimizer"),  # type: ignore[arg-type]
        (lambda: QAdamOptimizer([torch.zeros(1)], warmup_steps=0), ValueError, "warmup_steps"),
        (lambda: QAdamOptimizer([torch.zeros(1)], lr=-1.0), ValueError, "lr|learning rate"),
        (lambda: QAdamOptimizer([torch.zeros(1)], betas=(1.0, 0.9)), ValueError, "beta"),
    ],
)
def test_bad_arguments(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_qadam_alone_is_adam_in_its_warmup() -> None:
    losses = []
    for kind, options in ((torch.optim.Adam, {}), (QAdamOptimizer, {"warmup_steps": 200})):
        model = _made(13)
        optimizer: Any = kind(model.parameters(), lr=1e-3, weight_decay=0.1, **options)  # type: ignore[operator]
        losses.append([_step(model, optimizer, x, y) for x, y in _batches(0, 100)])
    assert losses[0] == losses[1] and math.isfinite(losses[0][-1])


def _named(rank: int, size: int) -> None:
    """Nothing of Bagua is in the way of what reads whole classes of modules, and a script may name its modules."""
    bagua.init_process_group()
    for given in (None, "head"):
        module: Any = nn.Linear(2, 1)
        with pytest.raises(AttributeError, match="'Linear' object has no attribute 'bagua_algorithm'"):
            _ = module.bagua_algorithm
        if given is not None:
            module.bagua_module_name = given
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module.with_bagua([optimizer], Algorithm.init("gradient_allreduce"))
        assert module.bagua_module_name == (given or f"Linear_{id(module)}")
        assert module.bagua_optimizers == [optimizer] and len(module.bagua_buckets) == 1
        assert [t.shape for t in module.bagua_buckets[0].tensors] == [p.shape for p in module.parameters()]
        copied = copy.deepcopy(module)
        assert (copied.bagua_ddp, copied.bagua_algorithm, copied.bagua_optimizers) == (None, None, None)
    if rank == 0:
        scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
        assert scripted(torch.ones(1, 2)).shape == (1, 3)
        torch.compile(nn.Linear(2, 3), backend="eager")(torch.ones(1, 2))


def test_names_copies_and_compilers() -> None:
    run_threads(_named, 2)


def _two_nodes(rank: int, size: int, name: str, options: dict[str, Any]) -> None:
    bagua.init_process_group()
    model = _made(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.with_bagua([optimizer], Algorithm.init(name, **options))  # type: ignore[operator]
    batches = _batches(rank, 3)
    before = _everyones(_flat(model), size)
    for x, y in batches:
        before = _everyones(_flat(model), size)
        _step(model, optimizer, x, y)
    everyones = _everyones(_flat(model), size)
    own_node = [r for r in range(size) if (r == 0) == (rank == 0)]
    assert all(torch.equal(everyones[rank], everyones[r]) for r in own_node) or name == "decentralized"
    if name == "decentralized":
        averages = [torch.stack(before[:1]).mean(0), torch.stack(before[1:]).mean(0)]
        peer = model.bagua_buckets[0]._peer_weight  # type: ignore[index,union-attr]
        torch.testing.assert_close(peer, torch.stack(averages).mean(0), rtol=1e-5, atol=1e-6)
    else:
        assert not torch.equal(everyones[0], everyones[1])
        if rank < 2:  # the ring of two leaders
            assert torch.equal(model.bagua_buckets[0]._left_peer_weight, everyones[1 - rank])  # type: ignore[index,union-attr]
    model.with_bagua([optimizer], Algorithm.init("gradient_allreduce"))  # type: ignore[operator]
    _step(model, optimizer, *batches[0])
    assert all(torch.equal(each, _flat(model)) for each in _everyones(_flat(model), size))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("decentralized", {}),
        ("decentralized", {"peer_selection_mode": "shift_one"}),
        ("low_precision_decentralized", {}),
    ],
)
def test_two_nodes_of_different_sizes(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a node average first, and the first ranks of the nodes exchange; rank 0 has a node of its own."""
    for module in (decentralized, low_precision_decentralized):
        monkeypatch.setattr(module, "find_nodes", lambda group, _: Nodes.of(["a", "b", "b"], group.rank()))
    run_threads(_two_nodes, 3, name, options)
