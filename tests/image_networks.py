"""Networks on images as they are usually written, small, and what one of them keeps for backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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


def saved_bytes(forward: Callable[[Any], Any], image: Tensor, parameters: set[int]) -> int:
    """The bytes that autograd keeps for backward, each storage once, without parameters."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = max(kept.get(storage.data_ptr(), 0), tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward(image)  # held until all is counted
    del output
    return sum(kept.values())
