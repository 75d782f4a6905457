"""A divided model sends what its formula says, and little more: bytes of a training step that the kernel counts on gloo."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import guozhuang as gz
from guozhuang.lab.measure import tcp_sent_bytes
from tests.processes.cases import results_of_cases
from tests.ranks import GROUP_TIMEOUT_S

ROWS, TOKENS, WIDTH, INNER, NUM_LAYERS, NUM_OUTPUTS = 8, 64, 64, 96, 3, 4
CHANNELS, PIXELS = 16, 64
#: A step also sends headers, texts that ranks compare, and a generator's state: at most so many bytes more.
OVERHEAD_BYTES = 20_000
WARM_UP, STEPS = 4, 2  # ranks compare whole batches in the first three


class Layers(nn.Module):
    """A transformer's encoder with a layer before it and one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, NUM_OUTPUTS)
        kind = nn.TransformerEncoderLayer
        self.layers = nn.ModuleList(kind(WIDTH, 4, INNER, 0.0, batch_first=True) for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def convolutions() -> nn.Module:
    inner = [nn.Conv2d(CHANNELS, CHANNELS, 5, padding=2) for _ in range(NUM_LAYERS)]
    return nn.Sequential(nn.Conv2d(3, CHANNELS, 1), *inner, nn.Conv2d(CHANNELS, 1, 1))


TOKEN_BATCH, IMAGE_BATCH = (ROWS, TOKENS, WIDTH), (ROWS, 3, PIXELS, PIXELS)
ACTIVATION = 4 * ROWS * TOKENS * WIDTH  # bytes of what one layer hands to the next
OUTPUT = 4 * ROWS * TOKENS * NUM_OUTPUTS
NUM_PARAMETERS = {kind: sum(p.numel() for p in kind().parameters()) for kind in (Layers, convolutions)}


@dataclass(frozen=True)
class Formula:
    """What the ranks of a layout send in a step.

    Attributes:
        model: makes it.
        batch: its shape.
        num_bytes: of each rank.
    """

    model: Callable[[], nn.Module]
    batch: tuple[int, ...]
    num_bytes: tuple[int, int]


# Both ranks average gradients, by an all-reduce of 2 (n - 1) / n = 1 times their bytes.
FORMULAS = {
    # Activations go to the second stage, their gradients and the outputs to the first one.
    "pp=2": Formula(Layers, TOKEN_BATCH, (ACTIVATION, ACTIVATION + OUTPUT)),
    # Of each layer attention and the feed-forward part end in a sum over the ranks, and begin with one of gradients.
    "tp=2": Formula(Layers, TOKEN_BATCH, (4 * NUM_LAYERS * ACTIVATION,) * 2),
    # Queries, keys, values and what attention returns: half of a rank's half goes to the other one, and back for the gradients.
    "sequence=2": Formula(
        Layers, TOKEN_BATCH, (2 * 4 * NUM_LAYERS * ACTIVATION // 4 + OUTPUT // 2 + 4 * NUM_PARAMETERS[Layers],) * 2
    ),
    # Two rows next to the other rank's part, in each convolution of 5 by 5, and their gradients.
    "space=2": Formula(
        convolutions,
        IMAGE_BATCH,
        (
            4 * (2 * NUM_LAYERS * 2 * ROWS * CHANNELS * PIXELS + ROWS * PIXELS * PIXELS // 2)
            + 4 * NUM_PARAMETERS[convolutions],
        )
        * 2,
    ),
    "dp=2": Formula(Layers, TOKEN_BATCH, (4 * NUM_PARAMETERS[Layers],) * 2),
}


def train(layout: str) -> int:
    """Return the bytes that this rank sends in a step."""
    formula = FORMULAS[layout]
    torch.manual_seed(0)
    model = formula.model()
    model, optimizer = gz.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), strategy="hybrid", layout=layout)
    sent = 0
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            sent = tcp_sent_bytes() or 0
        batch = torch.randn(formula.batch, generator=torch.Generator().manual_seed(step))
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return ((tcp_sent_bytes() or 0) - sent) // STEPS


def run(rank: int, size: int, module: str, names: list[str]) -> dict[str, str]:
    gz.init("gloo", timeout_s=GROUP_TIMEOUT_S)
    failed = {}
    for layout in names:
        found, wanted = train(layout), FORMULAS[layout].num_bytes[rank]
        if not 0 <= found - wanted <= 0.02 * wanted + OVERHEAD_BYTES:
            failed[layout] = f"{found} bytes are sent, in place of {wanted}"
    gz.shutdown()
    return failed


check = results_of_cases(__name__, 2, list(FORMULAS), run, init=False)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells how many bytes a process sent")
@pytest.mark.parametrize("layout", FORMULAS)
def test_what_is_sent_is_what_the_formula_says(layout: str) -> None:
    check(layout)
