"""The engine of a pipeline computes what one process computes, under every schedule, and names what it could not receive."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from guozhuang.errors import MismatchError
from guozhuang.parallel.pipeline import transfers
from guozhuang.parallel.pipeline.deferred import DeferredWeights
from guozhuang.parallel.pipeline.runtime import PipelineRuntime
from tests.threads.ranks import GENERATOR, run_threads


@dataclass
class Out:
    sends: dict[int, list[Tensor | None]] = field(default_factory=dict)
    result: Any = None


class Part:
    """A stage of a model in which stage s adds what a stage before the last one sent on a second way, if there is one."""

    def __init__(self, block: nn.Module, stage: int, num_stages: int, edges: set[tuple[int, int]]) -> None:
        self.block, self.stage, self.last = block, stage, num_stages - 1
        self.destinations = [b for a, b in sorted(edges) if a == stage]

    def forward(self, microbatch: Tensor, received: dict[int, list[Tensor | None]]) -> Out:
        given = microbatch if self.stage == 0 else received[self.stage - 1][0]
        for source, tensors in received.items():
            if source != self.stage - 1:
                given = given + tensors[0]
        out = self.block(given)
        if self.stage == self.last:
            return Out(result=out)
        return Out({b: [out, None, torch.tensor(self.stage)] for b in self.destinations})

    def around_backward(self, microbatch: Tensor) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def blocks(num: int) -> list[nn.Module]:
    with GENERATOR:
        torch.manual_seed(3)
        # A stage may change in place what it received.
        return [nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6), nn.Tanh()).double() for _ in range(num)]


def edges_of(num: int, skips: bool) -> set[tuple[int, int]]:
    return {(s, s + 1) for s in range(num - 1)} | ({(0, num - 1)} if skips and num > 2 else set())


def expected(num: int, skips: bool, rows: Tensor) -> list[list[Tensor]]:
    parts, sent = blocks(num), {}
    out = rows
    for s, part in enumerate(parts):
        if skips and num > 2 and s == num - 1:
            out = out + sent[0]
        out = sent[s] = part(out.clone())
    (out**2).mean().backward()
    return [[p.grad for p in part.parameters()] for part in parts]


ROWS = torch.arange(222, dtype=torch.float64).reshape(37, 6).sin()


def _train(rank: int, size: int, name: str, v: int, m: int, skips: bool) -> Any:
    num = size * v
    mine = {s: block for s, block in enumerate(blocks(num)) if s % size == rank}
    edges = edges_of(num, skips)
    parts = {s: Part(block, s, num, edges) for s, block in mine.items()}
    group = dist.group.WORLD
    assert group is not None
    weights = DeferredWeights(nn.ModuleList(mine.values())) if name == "zero-bubble" else None
    runtime = PipelineRuntime(group, parts, name, v, edges, weights=weights)
    total = torch.zeros((), dtype=torch.float64)

    def seeds(k: int, result: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
        loss = (result**2).sum() / ROWS.numel()
        total.add_(loss.detach())
        return [loss], [None]

    for _ in range(2):  # a second batch adds up, as backward does
        run = runtime.begin([piece.clone() for piece in ROWS.tensor_split(m)])
        if name == "gpipe":
            run.execute("F")
            run.execute("BIW", seeds, lambda _: [total.clone()])
        else:
            run.execute("FBIW", seeds, lambda _: [total.clone()])
    gradients = {s: [p.grad for p in block.parameters()] for s, block in mine.items()}
    return gradients, run.conclusions[0][0], runtime.most_in_flight, runtime.transfers.most_buffers


@pytest.mark.parametrize(
    ("name", "v", "num_ranks"),
    (("gpipe", 1, 3), ("1f1b", 1, 3), ("interleaved", 2, 2), ("1f1b", 1, 1), ("zero-bubble", 1, 3)),
)
def test_gradients_are_those_of_one_process(name: str, v: int, num_ranks: int) -> None:
    for m, skips in ((1, False), (4, False), (11, True)):
        found = run_threads(_train, num_ranks, name, v, m, skips)
        right = expected(num_ranks * v, skips, ROWS.clone())
        for gradients, conclusion, _, _ in found:
            assert float(conclusion) == float(found[-1][1]) > 0
            for stage, each in gradients.items():
                for got, want in zip(each, right[stage], strict=True):
                    torch.testing.assert_close(got, 2 * want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("num_ranks", (2, 4))
def test_few_microbatches_are_in_flight_and_few_buffers_are_kept(num_ranks: int) -> None:
    for rank, (_, _, in_flight, buffers) in enumerate(run_threads(_train, num_ranks, "1f1b", 1, 32, False)):
        assert in_flight == num_ranks - rank
        assert 1 <= buffers <= num_ranks + 1


def _hooked(rank: int, size: int, name: str) -> tuple[Any, ...]:
    block = blocks(2)[rank]
    seen: list[str] = []
    linear = block[1]
    linear.weight.register_hook(lambda gradient: (seen.append("weight"), gradient * 2)[1])
    linear.bias.register_post_accumulate_grad_hook(lambda parameter: seen.append("bias"))
    if rank == 1:  # what it received requires a gradient
        linear.register_full_backward_hook(lambda module, given, got: seen.append("module"))
    # Autograd's own node for the other rank's weight cannot tell who hooks it.
    node = linear.bias.expand_as(linear.bias).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: seen.append("node"))
    weights = DeferredWeights(block) if name == "zero-bubble" else None
    group = dist.group.WORLD
    assert group is not None
    runtime = PipelineRuntime(group, {rank: Part(block, rank, 2, edges_of(2, False))}, name, weights=weights)
    run = runtime.begin([piece.clone() for piece in ROWS.tensor_split(4)])
    run.execute("FBIW", lambda k, result: ([result.sum()], [None]))
    return sorted(seen), linear.weight.grad, linear.bias.grad


def test_hooks_run_as_under_a_whole_backward() -> None:
    for got, want in zip(run_threads(_hooked, 2, "zero-bubble"), run_threads(_hooked, 2, "1f1b"), strict=True):
        assert got[0] == want[0] and got[0].count("weight") == got[0].count("bias") == got[0].count("node") == 4
        assert torch.equal(got[1], want[1]) and torch.equal(got[2], want[2])


class Conv1D(nn.Module):
    """A linear layer with a transposed weight, as GPT-2 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 5).double()), nn.Parameter(torch.zeros(5).double())

    def forward(self, given: Tensor) -> Tensor:
        return torch.addmm(self.bias, given, self.weight)


Conv1D.__module__ = "transformers.pytorch_utils"


@pytest.mark.parametrize("layer", (nn.Linear(6, 5).double(), nn.Linear(6, 5, bias=False).double(), Conv1D()))
def test_the_gradients_of_weights_are_computed_later(layer: nn.Module) -> None:
    (layer(ROWS) ** 2).sum().backward()
    expected = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    weights, rows = DeferredWeights(layer), ROWS.clone().requires_grad_()
    with weights.of(first := weights.begin()):
        (layer(rows) ** 2).sum().backward()
    assert rows.grad is not None and not any(p.grad is not None for p in layer.parameters())
    weights.compute(first)
    seen: list[Tensor | None] = []  # None in the first half
    handle = get_gradient_edge(layer.weight).node.register_prehook(lambda gradients: seen.extend(gradients))
    for time in (1, 2, 3):  # a hook that comes later sees what is added, until it is removed
        for parameter, gradient in zip(layer.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, time * gradient)
        assert len([each for each in seen if each is not None]) == min(1, time - 1)
        if time == 2:
            handle.remove()
        with weights.of(later := weights.begin()):
            (layer(rows) ** 2).sum().backward()
        weights.compute(later)


def test_rows_of_embeddings_are_added_later() -> None:
    """Also into a table that is the weight of a product; the row of padding gets nothing."""
    words = torch.tensor([[1, 0, 3], [3, 2, 2]])
    gradients = []
    for is_later in (False, True):
        table = nn.Embedding(5, 6, padding_idx=2)
        head = nn.Linear(6, 5, bias=False)
        table.weight = head.weight = nn.Parameter(torch.arange(30.0).sin().view(5, 6))
        model = nn.Sequential(table, head)
        weights = DeferredWeights(model)
        for part in words:
            products = weights.begin()
            with weights.of(products) if is_later else contextlib.nullcontext():
                before = head.weight.grad
                (model(part) ** 2).sum().backward()
            assert not is_later or head.weight.grad is before
            weights.compute(products)
        gradients.append(head.weight.grad)
    torch.testing.assert_close(*gradients)


def test_only_messages_on_the_cpu_do_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "store_of", lambda group: dist.HashStore())
    group: Any = SimpleNamespace(works_tell_their_end=True, rank=lambda: 0)
    polls = [transfers.StageTransfers(group, int, torch.device(each))._polls for each in ("cpu", "cuda")]
    assert polls == [True, False]  # the works of a group for CUDA abort it if a short wait for them ends too early


def test_a_store_that_is_gone_ends_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(transfers, "store_of", lambda group: store)
    group: Any = SimpleNamespace(rank=lambda: 0)
    waits = transfers.StageTransfers(group, int, torch.device("cpu"))
    asked: list[Any] = []

    class Gone:
        def check(self, keys: list[str]) -> bool:
            asked.append(keys)
            raise dist.DistNetworkError("the connection was closed")

    monkeypatch.setattr(transfers, "store_of", lambda group: Gone())
    for _ in range(2):
        waits._look(1, transfers.StageMessage(transfers.ACTIVATIONS, 1, 0, 0), "forward")
    assert len(asked) == 1


def test_a_table_may_change_between_a_forward_and_its_backward() -> None:
    table = nn.Embedding(5, 6, max_norm=0.5)
    weights = DeferredWeights(table)
    with weights.of(products := weights.begin(is_divided=False)):
        first = table(torch.tensor([1, 2]))
        table(torch.tensor([3]))  # makes its rows shorter
        first.sum().backward()
    weights.compute(products)
    assert table.weight.grad is not None
    assert table.weight.grad.sum(1).tolist() == [0, 6, 6, 0, 0]


def test_a_parametrized_weight_is_computed_once_a_call() -> None:
    found = []
    for is_later in (False, True):
        with GENERATOR:
            torch.manual_seed(4)
            layer = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6).double())
        weights = DeferredWeights(layer)
        with weights.of(weights.begin()) if is_later else contextlib.nullcontext():
            layer(ROWS)
        found.append(dict(layer.named_buffers())["parametrizations.weight.0._u"])
    assert torch.equal(*found)


def _other_batches(rank: int, size: int) -> None:
    parts = {rank: Part(blocks(2)[rank], rank, 2, edges_of(2, False))}
    group = dist.group.WORLD
    assert group is not None
    runtime = PipelineRuntime(group, parts, "gpipe")
    with torch.no_grad():
        if rank == 0:
            runtime.begin(ROWS.tensor_split(2)).execute("F")
        else:
            text = "rank 0 sent the activations of microbatch 0 from stage 0 to stage 1, batch 1 of 2 microbatches, in place"
            with pytest.raises(MismatchError, match=text):
                runtime.begin(ROWS.tensor_split(3)).execute("F")


def test_ranks_with_other_batches_are_told() -> None:
    run_threads(_other_batches, 2)
