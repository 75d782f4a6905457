"""Images divided over ranks: every operation, and whole networks, equal one process's: outputs, gradients, statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from guozhuang.errors import UsageError
from guozhuang.parallel.activations import DividedTensor
from guozhuang.parallel.axes import make_axes
from guozhuang.parallel.space import divide_space
from guozhuang.world.layout import Layout
from tests.image_networks import ResNet, UNet, saved_bytes
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
        assert not isinstance(found, DividedTensor)
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


class OnPixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Any) -> Any:
        tokens = self.layer(x.flatten(2).transpose(1, 2))
        tokens = tokens + (tokens @ tokens.mT).softmax(-1) @ tokens
        return tokens.transpose(1, 2).reshape(x.shape)


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


def test_layers_on_pixels_as_tokens_are_divided(caplog: pytest.LogCaptureFixture) -> None:
    with GENERATOR:
        torch.manual_seed(0)
        model = Operation(OnPixels(), 2).double()
        image = torch.randn(2, 3, 13, 9, dtype=torch.float64)
    run_threads(equals_one_process, 3, [("tokens", image, model)])
    assert "computed on the whole tensor" not in caplog.text


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


def memory_is_divided(rank: int, size: int, model: nn.Module, image: Tensor) -> float:
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}
    return saved_bytes(divided(model, size), image, own) / saved_bytes(model, image, own)


@pytest.mark.parametrize("name", [pytest.param("resnet", marks=pytest.mark.slow), "unet"])
def test_activations_of_one_image_are_divided(name: str) -> None:
    make, _ = NETWORKS[name]
    with GENERATOR:
        torch.manual_seed(0)
        model, image = make(), torch.randn(1, 3, 256, 64)
    shares = run_threads(memory_is_divided, 2, model, image)
    assert max(shares) <= 1.15 / 2, shares


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def set_a_row(x: Any) -> Any:
    x[:, :, 3] = 0.0
    return x


def watch(x: Any) -> Any:
    x.register_hook(print)
    return x


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "function": (Doubled.apply, "torch.autograd.Function.*'Doubled'"),
    "in place": (set_a_row, "__setitem__ changes an activation in place"),
    "hook": (watch, "register_hook of an activation"),
    "out": (lambda x: torch.add(x, 1, out=torch.empty(x.shape, dtype=x.dtype)), "result of out="),
    "memory": (lambda x: x.data_ptr(), "data_ptr of an activation"),
}


def refuses_each(size: int, cases: Iterable[tuple[Callable[[Any], Any], str]]) -> Tensor:
    """Check that each operation is refused with its text on an image, and return the image."""
    image = torch.randn(1, 3, 8, 4)
    for operation, text in cases:
        with GENERATOR:
            model = Operation(operation, 2)
        with pytest.raises(UsageError, match=text):
            divided(model, size)(image)
    return image


def refuses(rank: int, size: int) -> None:
    image = refuses_each(size, REFUSED.values())
    with pytest.raises(UsageError, match=r"has 1 rows for 2 ranks.*use at most 1"):
        divided(nn.Conv2d(3, 3, 1), size)(image[:, :, :1])
    with pytest.raises(UsageError, match=r"the model has none.*got 'Linear'"):
        divided(nn.Linear(3, 3), size)
    with pytest.raises(UsageError, match=r"leave nn.BatchNorm as it is"):
        divided(nn.Sequential(nn.Conv2d(3, 3, 1), nn.SyncBatchNorm(3)), size)
    with pytest.raises(RuntimeError, match="must match the size"):
        divided(Operation(lambda x: x + torch.ones(5, 1), 2), size)(image)


def test_what_cannot_be_right_is_refused_by_name() -> None:
    run_threads(refuses, 2)


class Mixed(nn.Module):
    """Arguments by name, checkpoints, and layers that run one sample without a dimension of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 3, 3, 2))
        self.head = nn.Sequential(nn.Conv2d(3, 4, 3, 1, 2), nn.AvgPool2d(2), nn.ConvTranspose2d(4, 2, 2, 2))

    def forward(self, image: Tensor, *, scale: Tensor, names: list[str]) -> tuple[list[str], Tensor]:
        body = checkpoint(self.body, image, use_reentrant=False)
        return names, torch.stack([self.head(each) for each in body * scale])


def gradients_of(model: nn.Module, forward: Callable[..., Any], image: Tensor, half: bool) -> list[Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        names, output = forward(image, scale=torch.tensor(2.0), names=["a"])
    assert names == ["a"] and (not half or output.dtype == torch.bfloat16)
    output.float().square().mean().backward()
    trained = dict(model.named_parameters())
    del trained["body.0.bias"]  # its gradient, before a BatchNorm, is 0 to rounding
    return [output.detach().float(), *(each.grad for each in trained.values() if each.grad is not None)]


def mixes(rank: int, size: int, model: nn.Module, image: Tensor) -> None:
    one, mine, halves = (copy.deepcopy(model) for _ in range(3))
    exact = gradients_of(one, one, image, False)
    rounded = gradients_of(halves, halves, image, True)
    found = gradients_of(mine, divided(mine, size), image, False)
    average_gradients(mine)
    for i, (a, b) in enumerate(zip(found, exact, strict=True)):
        close(f"tensor {i}", a, b, 3e-5)
    mine.zero_grad()
    found = gradients_of(mine, divided(mine, size), image.contiguous(memory_format=torch.channels_last), True)
    average_gradients(mine)
    for i, (a, b, c) in enumerate(zip(found, exact, rounded, strict=True)):
        assert (a - b).norm() <= 1.5 * (c - b).norm() + 0.01 * b.norm(), f"tensor {i} under autocast"
    with torch.no_grad():
        assert not divided(mine, size)(image, scale=torch.tensor(1.0), names=[])[1].requires_grad


def test_checkpoints_autocast_and_memory_formats() -> None:
    with GENERATOR:
        torch.manual_seed(0)
        model, image = Mixed(), torch.randn(2, 3, 22, 10)
    run_threads(mixes, 3, model, image)
