"""Models of the grammar: parts, ties, hooks, buffers, draws, batch statistics, kinds of outputs; grammar.py chooses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH, TOKENS, ROWS, TARGETS = 8, 4, 12, 3

# ---- parts of a model


class Feed(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Again(nn.Module):
    """Computes its block once more in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Feed()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inside, x, use_reentrant=False)  # type: ignore[no-any-return]


class Own(nn.Module):
    """Parameters of a module's own, of three shapes; one of them is used in evaluation alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(WIDTH))
        self.more = nn.ParameterList([torch.randn(WIDTH, WIDTH) / 4 for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.more[0] + self.shift) @ self.more[1] * self.scale


class Number(nn.Module):
    """A parameter without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.scale


class Words(nn.Module):
    """An embedding of what the first feature is rounded to."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table((x.detach()[..., 0] * 2).long().clamp(-4, 4) + 4)  # type: ignore[no-any-return]


class Mixed(nn.Module):
    """Two experts, both called; a gate weighs them for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return sum(weights[..., i : i + 1] * torch.tanh(expert(x)) for i, expert in enumerate(self.experts))  # type: ignore[return-value]


class Turns(nn.Module):
    """Two branches that take turns: one of them has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.branches, self.calls = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return torch.tanh(self.branches[self.calls % 2](x))


class Drawn(nn.Module):
    """Drops features by a generator of its own, whose seed is a count of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inside(x))
        if not self.training:
            return x
        self.calls += 1
        kept = torch.rand(WIDTH, generator=torch.Generator().manual_seed(self.calls)) > 0.3
        return x * kept / 0.7


class Dropped(nn.Module):
    """PyTorch's dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(torch.tanh(self.inside(x)), 0.3, self.training)


class Counting(nn.Module):
    """A buffer that counts calls, and one that is in no state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH), persistent=False)
        self.inside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1  # type: ignore[has-type]
        return torch.tanh(self.inside(x) + self.shift) / (1 + 0.1 * self.count)  # type: ignore[no-any-return, operator]


class Remembering(nn.Module):
    """A buffer with an average of its own weight, which its output contains."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        found = torch.tanh(self.inside(x) + self.mean)  # type: ignore[operator]
        if self.training:
            with torch.no_grad():
                self.mean.copy_(0.5 * self.mean + 0.5 * self.inside.bias)  # type: ignore[operator]
        return found


class Statistics(nn.Module):
    """Batch statistics of all ranks; running ones in evaluation. A bias before them would have rounding for a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x)
        return torch.tanh(self.norm(x.flatten(0, -2)).view_as(x))


class Fixed(Statistics):
    """Running statistics alone, as in fine-tuning."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.eval()

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.norm.eval()
        return self


class Elsewhere(nn.Module):
    """Does something else in evaluation, and cuts the graph on a way aside."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found = F.softplus(self.inside(x)) + 0.5 * x.detach()
        return found if self.training else found.clamp(max=1.0)


class Twice(nn.Module):
    """Its layer is called twice, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, WIDTH)
        self.other = self.inside

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.other(torch.tanh(self.inside(x))))


class Borrowing(nn.Module):
    """Uses the weight of its layer itself, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inside(x)) + x @ F.normalize(self.inside.weight, dim=1)


class Keeping(nn.Module):
    """Keeps a loss in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.kept = nn.Linear(WIDTH, WIDTH), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inside(x))
        self.kept = x.pow(4).mean()
        return x


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3 / 9

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0] ** 2 / 3  # type: ignore[no-any-return]


class OwnFunction(nn.Module):
    """A function with a backward of its own, and operations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found = self.inside(x)
        found += 0.5 * x
        return torch.tanh(Cubed.apply(found).mul_(2))  # type: ignore[no-untyped-call]


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)[0]  # type: ignore[no-any-return]


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2), nn.GroupNorm(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.inside(x.transpose(1, 2)))).transpose(1, 2)


def _wrapped(wrap: Callable[..., nn.Module], **options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(wrap(nn.Linear(WIDTH, WIDTH), **options), nn.Softplus())


PARTS: dict[str, Callable[[], nn.Module]] = {
    "a linear layer": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
    "a residual block": Feed,
    "checkpointing": Again,
    "parameters of its own": Own,
    "a parameter without a dimension": Number,
    "an embedding": Words,
    "two experts": Mixed,
    "branches in turns": Turns,
    "draws of its own generator": Drawn,
    "a buffer that counts": Counting,
    "a buffer that averages": Remembering,
    "batch statistics": Statistics,
    "fixed statistics": Fixed,
    "another way in evaluation": Elsewhere,
    "a layer called twice": Twice,
    "a weight used by two": Borrowing,
    "a function of its own": OwnFunction,
    "RMSNorm": lambda: nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()),
    "a layer without bias": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Softplus()),
    "weight_norm": _wrapped(parametrizations.weight_norm),
    "spectral_norm": _wrapped(parametrizations.spectral_norm),
    "orthogonal": _wrapped(parametrizations.orthogonal),
}
#: Some of them at which a second stage of a pipeline may begin, whatever comes before.
WHOLE = (
    "a residual block",
    "checkpointing",
    "parameters of its own",
    "another way in evaluation",
    "a function of its own",
)
OF_SEQUENCES: dict[str, Callable[[], nn.Module]] = {
    "attention": Attending,
    "a GRU": Recurrent,
    "a convolution": Convolved,
}
DROPOUT = "dropout"  # draws of torch's generator, which ranks that are threads share
OUTPUTS = ("a tensor", "a tuple", "a dict", "an object", "a list of all", "a loss in an attribute", "the loss itself")
TIES = ("none", "none", "the last weight is the first", "weights of two parts", "a part twice")
HOOKS = ("none", "none", "forward", "before forward", "backward", "of an activation", "of a parameter")


class Plan(Protocol):
    """What a model is made of."""

    parts: tuple[str, ...]
    ties: str
    hooks: str
    output: str


@dataclass
class Result:
    y: Tensor
    extra: Tensor


class Grown(nn.Module):
    """The model of a program."""

    def __init__(self, program: Plan) -> None:
        super().__init__()
        self.program = program
        made = {**PARTS, **OF_SEQUENCES, DROPOUT: Dropped}
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.parts = nn.ModuleList(made[name]() for name in program.parts)
        if program.output == "a loss in an attribute":
            self.keeper = Keeping()
        self.head = nn.Linear(WIDTH, TARGETS)
        if program.ties == "the last weight is the first":
            self.last.weight = self.first.weight
        elif program.ties == "weights of two parts":
            self.parts.append(nn.Linear(WIDTH, WIDTH))
            self.parts[-1].weight = self.last.weight  # type: ignore[union-attr]
        elif program.ties == "a part twice":
            self.parts.append(self.parts[0])
        self.add_hooks(self.parts[0])

    def add_hooks(self, part: nn.Module) -> None:
        if self.program.hooks == "forward":
            part.register_forward_hook(scales_output)
        elif self.program.hooks == "before forward":
            part.register_forward_pre_hook(shifts_input)
        elif self.program.hooks == "backward":
            part.register_full_backward_hook(scales_gradient)

    def forward(self, x: Tensor, target: Tensor | None = None) -> Any:
        hidden = [torch.tanh(self.first(x))]
        if self.program.hooks == "of an activation" and hidden[0].requires_grad:
            hidden[0].register_hook(halved)
        for part in self.parts:
            hidden.append(part(hidden[-1]))
        if self.program.output == "a loss in an attribute":
            hidden.append(self.keeper(hidden[-1]))
        y = self.head(self.last(hidden[-1]))
        if self.program.output == "the loss itself":
            return y if target is None else (y - target).pow(2).mean()
        kinds: dict[str, Callable[[], Any]] = {
            "a tuple": lambda: (y, hidden[1]),
            "a dict": lambda: {"y": y, "extra": [hidden[1]]},
            "an object": lambda: Result(y, hidden[1]),
            "a list of all": lambda: [y, *hidden],
        }
        return kinds.get(self.program.output, lambda: y)()


def halved(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def scales_output(module: nn.Module, given: Any, output: Tensor) -> Tensor:
    return output * 0.8


def shifts_input(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (given[0] + 0.1,)


def scales_gradient(module: nn.Module, of_inputs: Any, of_outputs: Any) -> Any:
    return tuple(None if each is None else each * 0.5 for each in of_inputs)


def y_of(found: Any) -> Tensor:
    """The predictions in what a model returned."""
    if isinstance(found, Tensor):
        return found
    return found["y"] if isinstance(found, dict) else found.y if isinstance(found, Result) else found[0]  # type: ignore[no-any-return]


def loss_of(model: Any, module: Any, x: Tensor, target: Tensor) -> Tensor:
    """The mean loss over rows, of all that the model returns or keeps."""
    kind = module.program.output
    if kind == "the loss itself":
        return model(x, target)  # type: ignore[no-any-return]
    found = model(x)
    loss = (y_of(found) - target).pow(2).mean()
    if kind == "a loss in an attribute":
        return loss + module.keeper.kept  # type: ignore[no-any-return]
    if kind == "a tensor":
        return loss
    extra = found["extra"] if kind == "a dict" else [found.extra] if kind == "an object" else found[1:]
    return loss + 0.1 * sum(each.pow(2).mean() for each in extra)  # type: ignore[no-any-return]
