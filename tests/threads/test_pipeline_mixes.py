"""Stages whose samples are divided too, by tokens or rows: equal to one process, in the order of GPipe and of each schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from guozhuang.errors import UsageError
from guozhuang.parallel.division import division_of, whole
from guozhuang.parallel.pipeline.microbatches import cut_batch
from guozhuang.sharding.clip import clip_grad_norm_
from guozhuang.strategies.divided import prepare_divided
from guozhuang.strategies.table import get
from guozhuang.strategies.ways import Setup
from guozhuang.world.layout import Layout

from .ranks import GENERATOR, run_threads

pytestmark = pytest.mark.filterwarnings("ignore:the model drew random numbers in code that drew none")
WIDTH, TOKENS, WORDS = 16, 13, 30
Batch = tuple[dict[str, Tensor], Tensor]


class Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.causal = causal

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return x + self.out(found.transpose(1, 2).flatten(2)).relu()  # type: ignore[no-any-return]


class Tagger(nn.Module):
    """Positions and masks are made between the parts; the first embedding is also the head; the first block comes twice."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(TOKENS, WIDTH))
        self.blocks = nn.ModuleList(Attention(causal) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight, self.causal = self.words.weight, causal

    def forward(self, words: Tensor, keep: Tensor, weights: Tensor) -> dict[str, Tensor]:
        x = self.words(words) * weights + self.places[: words.shape[1]]
        mask = None if self.causal else keep[:, None, None, :]
        for i in (0, 1, 2, 0, 3):
            x = checkpoint(self.blocks[i], x, mask, use_reentrant=False) if i == 1 else self.blocks[i](x, mask)
        return {"logits": self.head(x), "first": x[:, 0]}


class Layers(nn.Module):
    """PyTorch's own layers, whose matrices the axis tp divides without a word."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 24, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, words: Tensor, keep: Tensor, weights: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.layers(self.words(words) * weights, src_key_padding_mask=~keep))}


class Bend(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int = 1) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inner, outer, 3, stride, 1), nn.BatchNorm2d(outer)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu()  # type: ignore[no-any-return]


class UNet(nn.Module):
    """What goes down is joined to what comes up, across the cuts; a parameter of the model itself scales it."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.ModuleList([Bend(3, 4), Bend(4, 6, 2)]), nn.ModuleList([Bend(6, 4), Bend(8, 4)])
        self.out, self.skip = nn.Conv2d(4, 2, 1), nn.Parameter(torch.ones(1))

    def forward(self, image: Tensor) -> Tensor:
        first = self.down[0](image)
        x = self.up[0](self.down[1](first))
        x = self.up[1](torch.cat([F.interpolate(x, size=first.shape[2:]), first * self.skip], 1))
        return self.out(x)  # type: ignore[no-any-return]


def tagged(rows: int, generator: torch.Generator) -> Batch:
    length = TOKENS if rows == 8 else 5
    words, labels = torch.randint(0, WORDS, (2, rows, length), generator=generator)
    keep = torch.arange(length) < torch.randint(length // 2, length, (rows, 1), generator=generator)
    weights = torch.rand(rows, length, 1, generator=generator, dtype=torch.float64)
    return {"words": words, "keep": keep, "weights": weights}, labels.masked_fill(~keep, -100)


def pictured(rows: int, generator: torch.Generator) -> Batch:
    height = 13 if rows == 8 else 6
    image = torch.randn(rows, 3, height, 7, generator=generator, dtype=torch.float64)
    return {"image": image}, torch.randint(0, 2, (rows, height, 7), generator=generator)


def loss_of(found: Any, labels: Tensor) -> Tensor:
    """A mean over labels, whose number differs between samples."""
    if isinstance(found, Tensor):
        return F.cross_entropy(found, labels)
    return F.cross_entropy(found["logits"].flatten(0, 1), labels.flatten())


def coupled(found: Any, labels: Tensor) -> Tensor:
    """A loss in which the samples of a batch depend on each other, and on another output."""
    parts = list(found.values()) if isinstance(found, dict) else [found]
    return loss_of(found, labels) + sum((part - part.mean(0)).square().mean().sqrt() for part in parts)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, torch.Generator], Batch]]] = {
    "causal": (Tagger, tagged),
    "masked": (lambda: Tagger(causal=False), tagged),
    "layers": (Layers, tagged),
    "unet": (UNet, pictured),
}


def made(name: str) -> tuple[nn.Module, Iterator[Batch]]:
    """Return a model and batches of 8, 8 and 6 rows, the last one of smaller samples too."""
    make, batch = MODELS[name]
    with GENERATOR:
        torch.manual_seed(4)
        model = make().double()
    generator = torch.Generator().manual_seed(7)
    return model, (batch(rows, generator) for rows in (8, 8, 6))


def in_microbatches(model: nn.Module, inputs: dict[str, Tensor], count: int) -> Any:
    """Return outputs of a model with BatchNorm as it has them in microbatches, which is asked for nowhere else."""
    if not isinstance(model, UNet) or not model.training:
        return model(**inputs)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    before = [{name: buffer.clone() for name, buffer in norm.named_buffers()} for norm in norms]
    seen: dict[nn.Module, list[Tensor]] = {norm: [] for norm in norms}
    hooks = [norm.register_forward_pre_hook(lambda norm, args: seen[norm].append(args[0].detach())) for norm in norms]
    found = torch.cat([model(**part.kwargs) for part in cut_batch((), inputs, count)])
    for norm, hook, buffers in zip(norms, hooks, before, strict=True):
        hook.remove()
        for name, buffer in buffers.items():
            setattr(norm, name, buffer)
        F.batch_norm(torch.cat(seen[norm]), norm.running_mean, norm.running_var, None, None, True, norm.momentum)
        norm.num_batches_tracked += 1
    return found


def train(
    model: nn.Module, call: Any, optimizer: Any, batches: Iterator[Batch], step: Any, count: int
) -> dict[str, Any]:
    """Train three steps, and return all that must be equal on all ranks."""
    found: dict[str, Any] = {"losses": [], "norms": [], "inputs": []}
    parameters = dict(model.named_parameters())
    for inputs, labels in batches:
        optimizer.zero_grad()
        if step is not None:
            found["losses"].append(step(**inputs, targets=labels))
        else:
            if "weights" in inputs:
                found["inputs"].append(inputs["weights"].requires_grad_())
            loss = coupled(call(**inputs) if call is not model else in_microbatches(model, inputs, count), labels)
            loss.backward()
            found["losses"].append(loss.detach())
        for name, parameter in parameters.items():
            division = division_of(parameter)
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found[name] = (gradient if division is None else whole(gradient, division)).clone()
        found["norms"].append(clip_grad_norm_(call.parameters(), 0.5))
        optimizer.step()
        last = inputs
    model.eval()
    if call is not model:
        dist.barrier()  # ranks that are threads have one generator, whose state is compared; in evaluation nobody draws
    with torch.no_grad():
        found["outputs"] = call(**last)
    found["inputs"] = [each.grad for each in found["inputs"]]
    return found | {"state": call.state_dict(), "optimizer": optimizer.state_dict()["state"]}


def check(name: str, layout: Layout, schedule: str = "gpipe", count: int = 3, **wishes: Any) -> None:
    model, batches = made(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)

    def stepped(targets: Tensor, **inputs: Tensor) -> Tensor:
        loss = loss_of(in_microbatches(model, inputs, count), targets)
        loss.backward()
        return loss.detach()

    with_steps = schedule != "gpipe"
    expected = train(model, model, optimizer, batches, stepped if with_steps else None, count)
    if with_steps:
        wishes |= {"loss": loss_of, "schedule": schedule}
    wishes |= {"proof": name != "unet"}  # BatchNorm of microbatches is not that of one process

    def on_rank(rank: int, size: int) -> dict[str, Any]:
        mine, batches = made(name)
        optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-2, eps=1e-4)
        setup = Setup(SimpleNamespace(layout=layout), wishes={"num_microbatches": count, **wishes})  # type: ignore[arg-type]
        pair = prepare_divided(mine, optimizer, setup, get("hybrid"))
        prepared, stepper = pair[0], pair[1]

        def step(targets: Tensor, **inputs: Tensor) -> Tensor:
            return prepared.step(*inputs.values(), targets)  # type: ignore[no-any-return]

        return train(mine, prepared, stepper, batches, step if with_steps else None, count)

    for found in run_threads(on_rank, layout.size):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


QUICK = (("causal", Layout(pp=2, sequence=2), "gpipe"), ("unet", Layout(pp=2, space=2), "1f1b"))


@pytest.mark.parametrize(("name", "layout", "schedule"), QUICK)
def test_stages_of_divided_samples_train_as_one_process(name: str, layout: Layout, schedule: str) -> None:
    check(name, layout, schedule)


def test_rows_and_tokens_are_not_divided_together() -> None:
    setup = Setup(SimpleNamespace(layout=Layout(space=2, sequence=2)))  # type: ignore[arg-type]

    def refused(rank: int, size: int) -> None:
        with pytest.raises(UsageError, match=r"rows of images and sequence by tokens.*space=2,sequence=2"):
            prepare_divided(UNet(), torch.optim.SGD(UNet().parameters()), setup, get("hybrid"))

    run_threads(refused, 4)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
@pytest.mark.parametrize(
    ("name", "layout", "wishes"),
    [
        ("causal", Layout(pp=2, sequence=2), {"attention": "ring"}),
        ("masked", Layout(pp=2, sequence=3), {"attention": "ring"}),
        ("masked", Layout(pp=3, sequence=2), {"cut": ["blocks.1", "blocks.0#2"]}),
        ("layers", Layout(pp=2, sequence=2, tp=2), {}),
        ("unet", Layout(pp=2, space=3), {}),
        ("unet", Layout(pp=3, space=2), {"cut": ["down.1", "up.1"]}),
        ("unet", Layout(pp=2, space=2, tp=2), {}),
    ],
)
def test_every_schedule_and_layout(name: str, layout: Layout, schedule: str, wishes: dict[str, Any]) -> None:
    if schedule == "interleaved" and "cut" in wishes:
        pytest.skip("the cut is that of schedules with one stage a rank")
    check(name, layout, schedule, **wishes)
