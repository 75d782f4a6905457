"""Training on ranks equals training in one process on the joined batch, and all ranks hold the same bits.

Three comparisons, each against a twin that cannot share our mistakes:

- one process, the joined batch, within 1e-6 of the largest weight of each tensor;
- PyTorch's own DDP in the same ranks: with 2 ranks the same bits, since a sum of two has one rounding whatever the buckets are;
- the other ranks: the same bits, always.

Why some cases run in float64 against the single process: AdamW divides each gradient by its own size, so a gradient that is
zero but for rounding moves a weight by up to the learning rate in a direction that rounding chose. BERT has such gradients (the
bias of the attention keys shifts all scores alike; rows of other gradients come close to zero), and so has a convolution's bias
in front of a batch normalization. No order of summation can agree there in float32. In float64 the rounding drowns in AdamW's
eps, so the bound stays at 1e-6, and the float32 run is compared with PyTorch's DDP bit by bit instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from guozhuang import DistributedDataParallel
from tests.ranks import run_ranks

STEPS = 20
ROWS = 4  # per rank
TOLERANCE = 3e-6  # 1.05e-6 after 20 steps was seen on one kind of processor: kernels round differently


# ---- models -----------------------------------------------------------------------------------------------------------


class TwoConvolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 6, 3, stride=2, bias=False),
            nn.BatchNorm2d(6, momentum=None),
            nn.ReLU(),
        )
        self.head = nn.Linear(6, 4)
        # As in a trained model: relative to a bias that 20 steps grew from zero, every rounding looks large.
        for i in (1, 4):
            nn.init.normal_(self.body[i].bias)
            nn.init.uniform_(self.body[i].weight, 0.5, 1.5)

    def forward(self, x: Tensor, _: int) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Tied(nn.Module):
    """The output layer uses the embedding's own weight, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(23, 12)
        self.middle = nn.Linear(12, 12)
        self.out = nn.Linear(12, 23, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: Tensor, _: int) -> Tensor:
        return self.out(torch.tanh(self.middle(self.embedding(x))).mean(1))


class Branches(nn.Module):
    """Which branch runs is chosen from outside; the last one never does."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(10, 8)
        self.branches = nn.ModuleList(
            [nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8)]
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.head(torch.tanh(self.branches[branch](self.stem(x))))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 4)

    def forward(self, x: Tensor, _: int) -> Tensor:
        return self.linear(x)


class TinyBert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            vocab_size=97,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=512,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=4,
        )
        self.bert = BertForSequenceClassification(config)
        for name, parameter in self.bert.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(
                    parameter, std=0.1
                )  # see TwoConvolutions; and the keys' biases would stay pure rounding

    def forward(self, x: Tensor, _: int) -> Tensor:
        return self.bert(input_ids=x).logits


def images(rows: int) -> Tensor:
    return torch.randn(rows, 3, 7, 7)


def vectors(rows: int) -> Tensor:
    return torch.randn(rows, 10)


def tokens(rows: int) -> Tensor:
    return torch.randint(0, 23, (rows, 12))


def same_branch(rank: int, step: int) -> int:
    return step // 3 % 2


def own_branch(rank: int, step: int) -> int:
    """Rank 0 changes branch with every step, the others every third: used here only, elsewhere only, and everywhere."""
    return step % 2 if rank == 0 else step // 3 % 2


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    branch: Callable[[int, int], int] = same_branch
    sync_batch_norm: bool = False
    options: dict[str, Any] = field(default_factory=dict)


SMALL_BUCKETS = {"bucket_cap_mb": 0.0005}
CASES = {
    "linear": Case(Plain, vectors),
    "cnn": Case(TwoConvolutions, images, sync_batch_norm=True, options=SMALL_BUCKETS),
    "bert": Case(TinyBert, tokens, options={"bucket_cap_mb": 0.3}),
    "tied": Case(Tied, tokens, options=SMALL_BUCKETS),
    "unused": Case(Branches, vectors, options={"find_unused_parameters": True, **SMALL_BUCKETS}),
    "unused-by-rank": Case(Branches, vectors, own_branch, options={"find_unused_parameters": True, **SMALL_BUCKETS}),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.02, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
}


# ---- one run ------------------------------------------------------------------------------------------------------------


def build(case: Case, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(7)
    return case.model().to(dtype)


def joined_batch(case: Case, step: int, num_ranks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of rank 0, then of rank 1, ..."""
    torch.manual_seed(1000 + step)
    x, target = case.inputs(ROWS * num_ranks), torch.randint(0, 4, (ROWS * num_ranks,))
    return (x.to(dtype) if x.is_floating_point() else x), target


def of_rank(tensor: Tensor, rank: int) -> Tensor:
    return tensor[rank * ROWS : (rank + 1) * ROWS]


def alone(case: Case, optimizer: str, dtype: torch.dtype, num_ranks: int) -> nn.Module:
    """One process. Where ranks take different branches, each part of the batch takes its own."""
    model = build(case, dtype)
    stepper = OPTIMIZERS[optimizer](model.parameters())
    for step in range(STEPS):
        x, target = joined_batch(case, step, num_ranks, dtype)
        branches = [case.branch(rank, step) for rank in range(num_ranks)]
        stepper.zero_grad()
        if len(set(branches)) == 1:
            loss = F.cross_entropy(model(x, branches[0]), target)
        else:
            outputs = [model(of_rank(x, rank), branch) for rank, branch in enumerate(branches)]
            loss = F.cross_entropy(torch.cat(outputs), target)
        loss.backward()
        stepper.step()
    return model


def on_ranks(
    case: Case, optimizer: str, dtype: torch.dtype, rank: int, num_ranks: int, wrapper: type[nn.Module], sync: bool
) -> nn.Module:
    """``sync``: whether batch statistics are those of the joined batch."""
    model = build(case, dtype)
    if rank > 0:  # the construction must repair it
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(float(rank))
    if case.sync_batch_norm and sync:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    ddp = wrapper(model, **case.options)
    stepper = OPTIMIZERS[optimizer](ddp.parameters())
    for step in range(STEPS):
        x, target = joined_batch(case, step, num_ranks, dtype)
        stepper.zero_grad()
        F.cross_entropy(ddp(of_rank(x, rank), case.branch(rank, step)), of_rank(target, rank)).backward()
        stepper.step()
    return ddp.module


def difference(ours: nn.Module, twin: nn.Module) -> tuple[float, str]:
    """The largest difference of a weight or buffer, relative to the largest of its tensor, and that tensor's name."""
    expected = twin.state_dict()
    assert expected.keys() == ours.state_dict().keys()
    worst = (0.0, "")
    for name, value in ours.state_dict().items():
        largest = max(float(expected[name].abs().max()), torch.finfo(torch.float32).tiny)
        worst = max(worst, (float((value - expected[name]).abs().max()) / largest, name))
    return worst


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    sha = hashlib.sha256()
    for name, value in tensors:
        sha.update(name.encode())
        sha.update(value.detach().contiguous().numpy().tobytes())
    return sha.hexdigest()


Run = tuple[str, str, torch.dtype, str]  # case, optimizer, dtype, twin


@dataclass(frozen=True)
class Outcome:
    """What one rank found: digests of its parameters, of all its state, and of the state that PyTorch's DDP came to."""

    error: tuple[float, str]
    parameters: str
    state: str
    peer_state: str


def compare(rank: int, num_ranks: int, runs: list[Run]) -> list[Outcome]:
    outcomes = []
    for place, (name, optimizer, dtype, twin) in enumerate(runs):
        case = CASES[name]
        sync = twin == "single"
        ours = on_ranks(case, optimizer, dtype, rank, num_ranks, DistributedDataParallel, sync)
        error, peer_state = (0.0, ""), ""
        if twin == "torch":
            peer = on_ranks(case, optimizer, dtype, rank, num_ranks, TorchDDP, sync)
            error, peer_state = difference(ours, peer), digest(peer.state_dict().items())
        elif place % num_ranks == rank:  # the weights are the same everywhere, so one rank compares
            error = difference(ours, alone(case, optimizer, dtype, num_ranks))
        state = ours.state_dict().items()
        outcomes.append(Outcome(error, digest(ours.named_parameters()), digest(state), peer_state))
    return outcomes


def check(num_ranks: int, runs: list[Run]) -> None:
    results = run_ranks(compare, num_ranks, runs)
    wrong = []
    for run, outcomes in zip(runs, zip(*results, strict=True), strict=True):
        if len({outcome.parameters for outcome in outcomes}) != 1:
            wrong.append(f"{run}: ranks hold different bits")
        error, name = max(outcome.error for outcome in outcomes)
        if not error <= TOLERANCE:
            wrong.append(f"{run}: {name} differs by {error:.2e}")
        if run[3] == "torch" and any(outcome.state != outcome.peer_state for outcome in outcomes):
            wrong.append(f"{run}: not the bits of PyTorch's DDP (largest difference {error:.2e} in {name})")
    assert not wrong, "\n".join(wrong)


# ---- the tests ------------------------------------------------------------------------------------------------------------


SINGLE: list[Run] = [
    ("linear", "sgd", torch.float32, "single"),
    ("linear", "adamw", torch.float32, "single"),
    ("cnn", "sgd", torch.float32, "single"),
    ("tied", "sgd", torch.float32, "single"),
    ("tied", "adamw", torch.float32, "single"),
    ("unused", "sgd", torch.float32, "single"),
    ("unused", "adamw", torch.float32, "single"),
    ("unused-by-rank", "sgd", torch.float32, "single"),
    ("unused-by-rank", "adamw", torch.float32, "single"),
    ("cnn", "adamw", torch.float64, "single"),
]
BERT: list[Run] = [("bert", "sgd", torch.float32, "single"), ("bert", "adamw", torch.float64, "single")]
# Two ranks only: with more, the order of a ring's sums depends on where a gradient lies in its bucket.
TORCH: list[Run] = [(name, optimizer, torch.float32, "torch") for name in CASES for optimizer in OPTIMIZERS]


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_weights_equal_those_of_one_process_on_the_joined_batch(num_ranks: int) -> None:
    check(num_ranks, SINGLE + BERT)


def test_two_ranks_have_the_bits_of_torch_ddp() -> None:
    """Plain BatchNorm among them, whose statistics are each rank's own and whose buffers come from rank 0."""
    check(2, TORCH)
