"""Tensor parallelism: what cannot be divided is refused or stays whole, and what a script may do with a divided model."""

from __future__ import annotations

import copy
import functools
import random as of_python
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from guozhuang.errors import UsageError
from guozhuang.parallel.tensor import divide_tensors
from guozhuang.parallel.tensor.pairs import find_pairs

from .ranks import run_threads
from .test_parallel_tensor import Calling, OnlyTensor, Plain, differences, error, family, of_rows, random, step


class Attention(nn.Module):
    """An attention that keeps its number of heads under a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.head_dim = 4, 3
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(12, 12) for _ in range(4))


REFUSALS: dict[str, tuple[Callable[[], nn.Module], Any, int, str]] = {
    "matches nothing": (Plain, {"blocks.*.upp": "columns"}, 2, r"'blocks\.\*\.upp'.*did you mean 'blocks\.\*\.up'"),
    "unknown word": (Plain, {"head": "column"}, 2, "'column'.*write 'columns'"),
    "another kind": (Plain, {"tokens": "columns"}, 2, "'tokens' divided by columns, which a Embedding cannot be"),
    "no attention": (Plain, {"blocks.0": "heads"}, 2, "ModuleDict"),
    "few columns": (Plain, {"blocks.*.up": "columns"}, 8, "'blocks.0.up' has fewer outputs.*got 7.*tp=7"),
    "uneven": (
        lambda: nn.Sequential(nn.Linear(4, 7), nn.Dropout(), nn.Linear(7, 4), nn.LayerNorm(4)),
        {"0": "columns", "2": "rows"},
        2,
        "not equally many on all 2 ranks.*got 7.*name the dropout",
    ),
    "tied to a whole layer": (Plain, {"tokens": "rows"}, 2, "'weight' of 'head' belongs to another layer.*gathered"),
    "tied and cut in two ways": (Plain, {"tokens": "rows", "head": "rows"}, 2, "in two ways.*got .10, 12."),
    "channels that are mixed": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 3, 1)),
        {"0": "columns", "1": "channels", "2": "rows"},
        2,
        "'1' divided by channels",
    ),
    "synchronized statistics": (
        lambda: nn.Sequential(nn.SyncBatchNorm(4)),
        {"0": "channels"},
        2,
        "a SyncBatchNorm cannot",
    ),
    "heads under another name": (
        lambda: nn.Sequential(Attention()),
        {"0": "heads"},
        2,
        "where the attention '0' keeps its number of heads, 4 .*perhaps in heads.*num_heads in Attention",
    ),
    "heads": (lambda: nn.MultiheadAttention(24, 6), None, 4, "6 heads, which 4 ranks.*tp=1, 2, 3 or 6"),
    "nothing": (lambda: nn.LayerNorm(4), None, 2, "nothing in LayerNorm"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    make, plan, num_ranks, text = REFUSALS[name]
    models = [make() for _ in range(num_ranks)]

    def of_rank(rank: int, _: int) -> None:
        with pytest.raises(UsageError, match=text):
            divide_tensors(models[rank], OnlyTensor(), plan)  # type: ignore[arg-type]

    run_threads(of_rank, num_ranks)


def test_fewer_heads_of_keys_than_ranks() -> None:
    model, _ = family("llama")
    models = [copy.deepcopy(model) for _ in range(4)]

    def of_rank(rank: int, _: int) -> None:
        with pytest.raises(UsageError, match=r"4 heads and 2 heads of keys and values, which 4 ranks .* tp=1 or 2"):
            divide_tensors(models[rank], OnlyTensor())  # type: ignore[arg-type]

    run_threads(of_rank, 4)


class Shared(nn.Module):
    """Two blocks that are traced each for itself and have one of two layers in common, and a pair that is divided."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Calling(), Calling()
        self.second.down = self.first.down
        self.pair = nn.Sequential(nn.Linear(12, 9), nn.GELU(), nn.Linear(9, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x)) if float(x.detach().sum()) < 1e9 else x
        return self.pair(x)


class Changed(nn.TransformerEncoderLayer):
    """A subclass with something that is not elementwise between the layers."""

    def forward(self, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.norm1(src + self.linear2(torch.softmax(self.linear1(src), -1)))


def computed_anew() -> nn.Module:
    """A pair whose weights a hook computes before each call, and one that is divided."""
    pair = [nn.utils.weight_norm(nn.Linear(12, 8, bias=False)), nn.GELU()]
    pair += [nn.utils.weight_norm(nn.Linear(8, 12, bias=False)), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 5)]
    return nn.Sequential(*pair)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("name", ["shared", "changed", "weight norm", "replaced forward"])
def test_what_stays_whole(name: str) -> None:
    torch.manual_seed(0)
    if name == "weight norm":
        # A copy of such a module cannot be made, so each rank makes its own.
        models = [computed_anew().double() for _ in range(3)]
        for model in models[1:]:
            model.load_state_dict(models[0].state_dict())
        expected = models[2](random(7, 12))

        def of_rank(rank: int, _: int) -> float:
            divide_tensors(models[rank], OnlyTensor())  # type: ignore[arg-type]
            return error(models[rank](random(7, 12)), expected)

        assert max(run_threads(of_rank, 2)) < 1e-6
    elif name == "shared":
        assert differences(Shared(), of_rows, 2, least_share=0.09) < 1e-6
    elif name == "changed":
        model = nn.Sequential(Changed(16, 4, 22, 0.0, batch_first=True))
        assert differences(model, lambda model: model(random(2, 5, 16)).square().mean(), 2, least_share=0.3) < 1e-6
    else:
        model = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 5))
        model[0].forward = nn.Linear(12, 8).double().forward  # type: ignore[method-assign]
        with pytest.raises(AssertionError, match="nothing in Sequential"):
            differences(model, of_rows, 2)


class Ambiguous(nn.Module):
    """Functions of dropout whose sizes do not tell on two ranks which of them acts on divided features."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.5, self.training)
        return self.down(F.dropout(F.relu(self.up(x)), 0.5, self.training))


def test_dropout_that_cannot_be_told_apart_leaves_a_pair_whole() -> None:
    models = [Ambiguous() for _ in range(3)]

    def of_rank(rank: int, num_ranks: int) -> None:
        if num_ranks == 3:
            divide_tensors(models[rank], OnlyTensor())  # type: ignore[arg-type]
            return
        with pytest.raises(UsageError, match="nothing in Ambiguous"):
            divide_tensors(models[rank], OnlyTensor())  # type: ignore[arg-type]

    run_threads(of_rank, 2)
    run_threads(of_rank, 3)


def test_tokens_out_of_range_raise_on_every_rank() -> None:
    models = [nn.Sequential(nn.Embedding(10, 4)) for _ in range(2)]

    def of_rank(rank: int, _: int) -> None:
        divide_tensors(models[rank], OnlyTensor(), {"0": "rows"})  # type: ignore[arg-type]
        models[rank](torch.arange(10))
        for token in (10, 25, -1):
            with pytest.raises(IndexError):
                models[rank](torch.tensor([3, token]))

    run_threads(of_rank, 2)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Calling() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_checkpoints_keep_no_activations_of_other_layers() -> None:
    models = [Checkpointed() for _ in range(2)]

    def of_rank(rank: int, _: int) -> int:
        divide_tensors(models[rank], OnlyTensor(), {"blocks.*.up": "columns", "blocks.*.down": "rows"})  # type: ignore[arg-type]
        models[rank](torch.randn(7, 12)).sum().backward()
        regions = {id(r): r for each in models[rank].modules() if (r := getattr(each, "region", None)) is not None}
        return sum(len(region._entered) for region in regions.values())

    assert max(run_threads(of_rank, 2)) <= 2


class Counting(nn.Module):
    """A forward that changes a buffer and a list, and draws by Python's own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.calling, self.seen = Calling(), []
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen.append(of_python.random())
        return self.calling(x)


def keeps(lock: Any, module: nn.Module, given: Any, output: Any) -> None:
    """A hook that holds what cannot be copied, as a process group."""


def test_looking_at_a_model_changes_nothing() -> None:
    model, state = Counting(), of_python.getstate()
    model.calling.register_forward_hook(functools.partial(keeps, threading.Lock()))  # which cannot be copied
    assert len(find_pairs(model, ())) == 1
    assert model.count == 0 and model.seen == [] and of_python.getstate() == state


@pytest.mark.slow
def test_shared_norms_that_are_trained_later() -> None:
    model, loss_of = family("qwen3")
    model = model.double()
    _, expected = step(copy.deepcopy(model), loss_of)
    models = [copy.deepcopy(model).requires_grad_(False) for _ in range(2)]

    def of_rank(rank: int, _: int) -> float:
        divide_tensors(models[rank], OnlyTensor())  # type: ignore[arg-type]
        assert not any(parameter.requires_grad for parameter in models[rank].parameters())
        _, found = step(models[rank].requires_grad_(True), loss_of)
        return max(error(found[name], value) for name, value in expected.items())

    assert max(run_threads(of_rank, 2)) < 1e-6
