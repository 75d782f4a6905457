"""Images divided over ranks: every operation, and whole networks, equal one process's: outputs, gradients, statistics."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from guozhuang.parallel.axes import make_axes
from guozhuang.parallel.space import divide_space
from guozhuang.parallel.space.tensor import SpaceTensor
from guozhuang.world.layout import Layout
from tests.threads.ranks import GENERATOR, run_threads


class Operation(nn.Module):
    """A convolution, so that the model is one of images, and an operation on what it returns."""

    def __init__(self, operation: Callable[[Any], Any], num_dims: int) -> None:
        super().__init__()
        convolution = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[num_dims]
        self.first, self.operation = convolution(3, 4, 1), operation
        if isinstance(operation, nn.Module):
            self.inner = operation

    def forward(self, image: Any) -> Any:
        return self.operation(self.first(image))


def divided(model: nn.Module, size: int) -> Callable[..., Any]:
    around = divide_space(model, make_axes(Layout(space=size)))

    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = around.inputs(args, kwargs)
        return around.outputs(model(*args, **kwargs))

    return forward


def average_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def close(what: str, found: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype, f"{what}: {found.shape}, {expected.shape}"
    if not torch.equal(found, expected):
        worst = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
        assert worst <= tolerance, f"{what}: {worst:.2e}"


def equals_one_process(rank: int, size: int, cases: list[tuple[Any, Tensor, nn.Module]]) -> None:
    for name, image, model in cases:
        one, mine = copy.deepcopy(model), copy.deepcopy(model)
        results = []
        for which, forward in ((one, one), (mine, divided(mine, size))):
            given = image.clone().requires_grad_()
            output = forward(given)
            factors = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).view(output.shape).sin()
            (output * factors).sum().backward()
            if which is mine:
                average_gradients(mine)
            results.append((output, given.grad, [p.grad for p in which.parameters()], list(which.buffers())))
        (expected, d_image, gradients, buffers), (found, my_d_image, my_gradients, my_buffers) = results
        assert not isinstance(found, SpaceTensor)
        close(f"{name}: output", found.detach(), expected.detach())
        close(f"{name}: gradient of the image", my_d_image, d_image)
        for i, (a, b) in enumerate(zip(my_gradients, gradients, strict=True)):
            assert (a is None) == (b is None), f"{name}: gradient {i}"
            if a is not None:
                close(f"{name}: gradient {i}", a, b)
        for i, (a, b) in enumerate(zip(my_buffers, buffers, strict=True)):
            close(f"{name}: buffer {i}", a, b)


def two(*args: Any, **kwargs: Any) -> nn.Module:
    return nn.Conv2d(4, 4, *args, **kwargs)


class Concatenated(nn.Module):
    def forward(self, x: Any) -> Any:
        y = F.interpolate(F.max_pool2d(x, 2), size=x.shape[-2:], mode="nearest")
        return (
            torch.cat([x, torch.zeros_like(x), torch.ones(x.shape, dtype=x.dtype), y], 1)
            * torch.arange(x.shape[2])[:, None]
        )


class Excited(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 2, 1), nn.ReLU(), nn.Conv2d(2, 4, 1), nn.Sigmoid()
        )

    def forward(self, x: Any) -> Any:
        return x * self.layers(x) + x.mean((2, 3), keepdim=True)


class Placed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.place, self.slope = nn.Parameter(torch.randn(1, 4, 13, 1)), nn.Parameter(torch.randn(9))

    def forward(self, x: Any) -> Any:
        x += self.place
        return (1.5 - x[:, :, 1:-1] * self.slope).relu_().clamp(max=2.0)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Any) -> Any:
        tokens = x.flatten(2).transpose(1, 2)
        return x + self.inner(tokens, tokens, tokens)[0].transpose(1, 2).reshape(x.shape)


class ChannelsBehind(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x: Any) -> Any:
        return x + self.layers(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


IMAGES: dict[int, tuple[int, ...]] = {1: (2, 3, 23), 2: (2, 3, 13, 9), 3: (2, 3, 11, 5, 4)}
OPERATIONS: dict[str, tuple[int, Callable[[], Any]]] = {
    "convolution": (2, lambda: two(3, padding=1)),
    "strides": (2, lambda: two((3, 2), stride=2, padding=(1, 0), bias=False)),
    "stride without kernel": (2, lambda: two(1, stride=2)),
    "wider than a part": (2, lambda: two((11, 3), padding=(5, 1))),
    "dilated": (2, lambda: two(3, padding=(4, 2), dilation=(4, 2))),
    "dilated within parts": (2, lambda: two((3, 5), padding=(2, 2), dilation=(2, 1), groups=2)),
    "same, even kernel": (2, lambda: two((4, 2), padding="same")),
    "valid": (2, lambda: two((4, 2), padding="valid")),
    "depthwise": (2, lambda: two(5, padding=2, groups=4)),
    "reflect": (2, lambda: two(7, padding=3, padding_mode="reflect")),
    "replicate": (2, lambda: two(7, padding=3, padding_mode="replicate")),
    "circular": (2, lambda: two(7, padding=(6, 3), padding_mode="circular")),
    "1-d": (1, lambda: nn.Conv1d(4, 4, 5, stride=3, padding=4)),
    "3-d": (3, lambda: nn.Conv3d(4, 4, (3, 2, 1), padding=(1, 1, 0), stride=(1, 2, 1))),
    "transposed": (2, lambda: nn.ConvTranspose2d(4, 4, 2, stride=2)),
    "transposed, overlapping": (2, lambda: nn.ConvTranspose2d(4, 4, 5, stride=3, padding=2, output_padding=2)),
    "transposed, dilated": (2, lambda: nn.ConvTranspose2d(4, 4, 3, dilation=2, padding=1, groups=2, bias=False)),
    "transposed with gaps": (1, lambda: nn.ConvTranspose1d(4, 4, 1, stride=3, output_padding=2)),
    "transposed 3-d": (3, lambda: nn.ConvTranspose3d(4, 4, 3, stride=2, padding=1)),
    "max pooling": (2, lambda: nn.MaxPool2d(3, 2, 1)),
    "max pooling, aligned": (2, lambda: nn.Sequential(nn.ConstantPad2d((0, 0, 0, 11), 0.5), nn.MaxPool2d(2))),
    "max pooling, ceil": (2, lambda: nn.MaxPool2d(3, 2, ceil_mode=True)),
    "max pooling 1-d, dilated": (1, lambda: nn.MaxPool1d(3, 2, 1, dilation=2)),
    "max pooling 3-d": (3, lambda: nn.MaxPool3d(2, 1)),
    "average pooling": (2, lambda: nn.AvgPool2d(3, 2, 1)),
    "average pooling, ceil": (2, lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True)),
    "average pooling without padding": (2, lambda: nn.AvgPool2d((3, 5), 2, (1, 2), count_include_pad=False)),
    "average pooling 1-d": (1, lambda: nn.AvgPool1d(4, 3, 2)),
    "average pooling 3-d": (3, lambda: nn.AvgPool3d(2, 1, divisor_override=3)),
    "adaptive average": (2, lambda: nn.AdaptiveAvgPool2d((3, 4))),
    "adaptive average 1-d": (1, lambda: nn.AdaptiveAvgPool1d(5)),
    "adaptive average 3-d": (3, lambda: nn.AdaptiveAvgPool3d((None, 1, 2))),
    "global max": (2, lambda: nn.Sequential(nn.ReLU(), nn.AdaptiveMaxPool2d(1))),
    "adaptive max": (2, lambda: nn.AdaptiveMaxPool2d(3)),
    "nearest": (2, lambda: nn.Upsample(scale_factor=2)),
    "nearest to a size": (2, lambda: nn.Upsample(size=(21, 7))),
    "nearest-exact": (2, lambda: nn.Upsample(size=(20, 7), mode="nearest-exact")),
    "nearest 3-d": (3, lambda: nn.Upsample(scale_factor=2)),
    "linear": (1, lambda: nn.Upsample(scale_factor=1.7, mode="linear")),
    "bilinear": (2, lambda: nn.Upsample(scale_factor=2, mode="bilinear")),
    "bilinear, aligned": (2, lambda: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)),
    "bilinear by 4": (2, lambda: nn.Upsample(scale_factor=4, mode="bilinear")),
    "bilinear to a size": (2, lambda: nn.Upsample(size=(31, 5), mode="bilinear")),
    "bilinear, smaller": (2, lambda: nn.Upsample(scale_factor=0.5, mode="bilinear", align_corners=False)),
    "trilinear": (3, lambda: nn.Upsample(scale_factor=2, mode="trilinear")),
    "bicubic": (2, lambda: nn.Upsample(scale_factor=2, mode="bicubic")),
    "pixel shuffle": (2, lambda: nn.PixelShuffle(2)),
    "pixel unshuffle": (2, lambda: nn.Sequential(nn.ZeroPad2d((0, 0, 0, 2)), nn.PixelUnshuffle(3))),
    "batch norm": (2, lambda: nn.BatchNorm2d(4)),
    "batch norm, cumulative": (1, lambda: nn.BatchNorm1d(4, momentum=None)),
    "batch norm 3-d": (3, lambda: nn.BatchNorm3d(4, affine=False)),
    "batch norm without statistics": (2, lambda: nn.BatchNorm2d(4, track_running_stats=False)),
    "batch norm in evaluation": (2, lambda: nn.BatchNorm2d(4).eval()),
    "group norm": (2, lambda: nn.GroupNorm(2, 4)),
    "instance norm": (2, lambda: nn.InstanceNorm2d(4, affine=True)),
    "instance norm, tracked": (2, lambda: nn.InstanceNorm2d(4, track_running_stats=True)),
    "layer norm": (2, lambda: nn.LayerNorm((4, 13, 9))),
    "local response norm": (2, lambda: nn.LocalResponseNorm(3)),
    "cat": (2, Concatenated),
    "excitation": (2, Excited),
    "places": (2, Placed),
    "attention": (2, Attention),
    "channels behind": (2, ChannelsBehind),
    "flatten": (2, lambda: nn.Sequential(nn.Flatten(), nn.Linear(4 * 13 * 9, 3))),
    "softmax over channels": (2, lambda: nn.Softmax2d()),
    "prelu": (1, lambda: nn.PReLU(4)),
    "crop": (2, lambda: lambda x: x[..., 2:-3, ::2]),
    "stride by index": (2, lambda: lambda x: x[:, 1:, ::3].sum(1)),
    "a row": (2, lambda: lambda x: x[:, :, 5] * 2),
    "flip": (2, lambda: lambda x: x + x.flip((2, 3))),
    "roll": (2, lambda: lambda x: x - torch.roll(x, (3, 1), (2, 3))),
    "sums": (2, lambda: lambda x: x.sum() + x.mean(2).sum(1).mean(0)),
    "extremes": (2, lambda: lambda x: x.relu().amax((2, 3)) + x.amin((1, 2), keepdim=True).sum() + x.max(1)[0].var()),
    "norm": (2, lambda: lambda x: F.normalize(x, dim=1) / x.norm()),
    "splits": (2, lambda: lambda x: torch.stack([a * b for a, b in zip(x.chunk(2, 1), x.split(2, 1), strict=True)], 2)),
    "reshape": (2, lambda: lambda x: x.view(2, 2, 2, 13, 9).transpose(1, 2).reshape(x.shape).unsqueeze(0).squeeze(0)),
    "turned": (2, lambda: lambda x: x @ x.transpose(2, 3)),
    "glu": (2, lambda: nn.GLU(1)),
    "where": (2, lambda: lambda x: torch.where(x > 0, x, 0.1 * x) + x.masked_fill(x < 0.2, 0.0)),
    "max of two": (2, lambda: lambda x: torch.max(x, -x).movedim(2, 0)),
}  # fmt: skip


def made(names: list[str]) -> list[tuple[str, Tensor, nn.Module]]:
    cases = []
    for name in names:
        num_dims, make = OPERATIONS[name]
        with GENERATOR:
            torch.manual_seed(0)
            model = Operation(make(), num_dims).double()
            cases.append((name, torch.randn(IMAGES[num_dims], dtype=torch.float64), model))
    return cases


@pytest.mark.parametrize("size", [3, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_operations(size: int) -> None:
    run_threads(equals_one_process, size, made(list(OPERATIONS)))


class Residual(nn.Module):
    def __init__(self, channels: int, wider: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, wider, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(wider, wider, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(wider) for _ in range(3 if stride > 1 else 2))
        self.short = nn.Conv2d(channels, wider, 1, stride, bias=False) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)), inplace=True)))
        y += x if self.short is None else self.norms[2](self.short(x))
        return F.relu_(y)


class ResNet(nn.Module):
    """The stem and four stages of a ResNet, and its classifier."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        stem = (nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(True), nn.MaxPool2d(3, 2, 1))
        stages = [(Residual(width, width, 1), Residual(width, 2 * width, 2)), (Residual(2 * width, 4 * width, 2),)]
        self.body = nn.Sequential(*stem, *(block for stage in stages for block in stage))
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(4 * width, 5)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(torch.flatten(self.pool(self.body(image)), 1))


def twice(channels: int, wider: int) -> nn.Module:
    layers = [nn.Conv2d(channels, wider, 3, padding=1), nn.BatchNorm2d(wider), nn.ReLU(True)]
    return nn.Sequential(*layers, nn.Conv2d(wider, wider, 3, padding=1), nn.BatchNorm2d(wider), nn.ReLU(True))


class UNet(nn.Module):
    """A U-Net of the usual form: skips that are padded to the same shape, transposed or bilinear upsampling."""

    def __init__(self, width: int = 4, depth: int = 3, bilinear: bool = False) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(depth + 1)]
        pairs = list(itertools.pairwise(widths))
        self.start, self.end = twice(3, width), nn.Conv2d(width, 2, 1)
        self.down = nn.ModuleList(nn.Sequential(nn.MaxPool2d(2), twice(a, b)) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in reversed(pairs))
        if bilinear:
            shrink = [nn.Conv2d(b, a, 1) for a, b in reversed(pairs)]
            bigger = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
            self.up = nn.ModuleList(nn.Sequential(bigger, each) for each in shrink)
        self.joined = nn.ModuleList(twice(2 * a, a) for a, _ in reversed(pairs))

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        skips = [self.start(image)]
        for down in self.down:
            skips.append(down(skips[-1]))
        x = skips.pop()
        for up, join in zip(self.up, self.joined, strict=True):
            skip = skips.pop()
            x = up(x)
            dy, dx = skip.size()[2] - x.size()[2], skip.size()[3] - x.size()[3]
            x = join(torch.cat([skip, F.pad(x, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])], dim=1))
        return {"mask": self.end(x)}


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet": (ResNet, (2, 3, 83, 40)),
    "unet": (UNet, (1, 3, 45, 26)),
    "bilinear unet": (lambda: UNet(bilinear=True), (2, 3, 47, 20)),
}


def trains_as_one_process(rank: int, size: int, model: nn.Module, images: list[Tensor]) -> None:
    """Losses, gradients, weights and running statistics of every step, from images of several heights."""
    one, mine = copy.deepcopy(model), copy.deepcopy(model)
    forwards = {one: one, mine: divided(mine, size)}
    optimizers = {each: torch.optim.SGD(each.parameters(), 0.05, momentum=0.9) for each in forwards}
    for image in images:
        losses = {}
        for each, forward in forwards.items():
            output = forward(image)
            output = output["mask"] if isinstance(output, dict) else output
            target = torch.arange(output.numel() // output.shape[1]).view(-1, *output.shape[2:]) % output.shape[1]
            losses[each] = F.cross_entropy(output, target)
            optimizers[each].zero_grad()
            losses[each].backward()
        average_gradients(mine)
        close("loss", losses[mine].detach(), losses[one].detach(), 1e-7)
        for (name, a), b in zip(mine.named_parameters(), one.parameters(), strict=True):
            close(f"gradient of {name}", a.grad, b.grad, 1e-7)
        for optimizer in optimizers.values():
            optimizer.step()
        for (name, a), b in zip(mine.state_dict().items(), one.state_dict().values(), strict=True):
            close(name, a, b, 1e-7)
    one.eval()
    mine.eval()
    with torch.no_grad():
        found, expected = forwards[mine](images[0]), one(images[0])
    close("evaluation", *(each["mask"] if isinstance(each, dict) else each for each in (found, expected)), 1e-7)


QUICK = [("resnet", 3), ("unet", 3)]
SLOW = [(name, size) for name in NETWORKS for size in (2, 3, 4) if (name, size) not in QUICK]


@pytest.mark.parametrize(("name", "size"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)])
def test_networks_train_as_in_one_process(name: str, size: int) -> None:
    make, shape = NETWORKS[name]
    with GENERATOR:
        torch.manual_seed(0)
        model = make().double()
        images = [torch.randn(*shape[:2], shape[2] + 3 * i, shape[3], dtype=torch.float64) for i in range(3)]
    run_threads(trains_as_one_process, size, model, images)


def saved_bytes(forward: Callable[[Any], Any], image: Tensor, parameters: set[int]) -> tuple[int, list[int]]:
    """The bytes that autograd keeps for backward, each storage once, without parameters."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = max(kept.get(storage.data_ptr(), 0), tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward(image)
    return sum(kept.values()), list((output["mask"] if isinstance(output, dict) else output).shape)


def memory_is_divided(rank: int, size: int, model: nn.Module, image: Tensor) -> float:
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}
    return saved_bytes(divided(model, size), image, own)[0] / saved_bytes(model, image, own)[0]


@pytest.mark.parametrize("name", [pytest.param("resnet", marks=pytest.mark.slow), "unet"])
def test_activations_of_one_image_are_divided(name: str) -> None:
    make, _ = NETWORKS[name]
    with GENERATOR:
        torch.manual_seed(0)
        model, image = make(), torch.randn(1, 3, 256, 64)
    shares = run_threads(memory_is_divided, 2, model, image)
    assert max(shares) <= 1.15 / 2, shares
