"""A workload of your own for `guozhuang compare`: model, optimizer, data, loss, metric.

guozhuang compare --workload examples.own_workload:two_moons --option hidden=256
"""

import torch
from torch.utils.data import TensorDataset, default_collate

from guozhuang.workloads import Workload


def two_moons(options: dict[str, str]) -> Workload:
    hidden = int(options.get("hidden", 64))
    train, held_out = _points(4000, seed=0), _points(1000, seed=1)

    def make_model() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(2, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 2))

    def loss(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        with torch.no_grad():
            hits = model(held_out.tensors[0]).argmax(1) == held_out.tensors[1]
        return {"accuracy": hits.float().mean().item()}

    return Workload(
        name="two moons",
        model=make_model,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        train=train,
        collate=default_collate,
        loss=loss,
        evaluate=evaluate,
        batch_size=32,
        details={"hidden units": hidden, "samples": len(train)},
    )


def _points(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    angle = torch.pi * torch.rand(count, generator=generator)
    label = torch.arange(count) % 2
    side = 1.0 - 2.0 * label
    points = torch.stack([torch.cos(angle) * side + label, torch.sin(angle) * side + 0.5 * label], 1)
    return TensorDataset(points + 0.1 * torch.randn(count, 2, generator=generator), label)
