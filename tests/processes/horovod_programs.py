"""Random programs: a DistributedOptimizer, and beside it the boring twin, which all-reduces each gradient by itself.

On two or four ranks a mean is the same in both ways, to the bit.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import guozhuang.compat.horovod.torch as hvd

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


class Program:
    """One program. ``shared`` is the same on all ranks, ``own`` is not.

    Attributes:
        ours, theirs: parameters of one and of the other.
        held: what the program has kept of gradients, and the values it had.
    """

    def __init__(self, seed: int, rank: int) -> None:
        self.seed, self.shared, self.own = seed, random.Random(seed), random.Random(100 * seed + rank)
        torch.manual_seed(seed)
        values = [self._value() for _ in range(self.shared.randint(1, 9))]
        self.ours, self.theirs = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
        self.num_passes, self.op = self.shared.randint(1, 3), self.shared.choice([hvd.Average, hvd.Sum])
        self.compression = self.shared.choice([hvd.Compression.none] * 3 + [hvd.Compression.fp16])
        more: dict[str, Any] = {}
        if self.shared.random() < 0.3:
            more["groups"] = self.shared.randint(1, 3)
        kind = self.shared.choice(["sgd", "foreach", "adamw"])
        self.plain = self._optimizer(kind, self.theirs)
        self.made = hvd.DistributedOptimizer(
            self._optimizer(kind, self.ours),
            named_parameters=[(f"{seed}.{i}", p) for i, p in enumerate(self.ours)],
            backward_passes_per_step=self.num_passes,
            op=self.op,
            compression=self.compression,
            **more,
        )
        self.held: list[tuple[Tensor, Tensor]] = []

    def _value(self) -> Tensor:
        shape = [self.shared.randint(1, 4) for _ in range(self.shared.randint(0, 4))]
        value = torch.randn(shape, dtype=self.shared.choice(DTYPES))
        if value.dim() == 4 and self.shared.random() < 0.5:
            return value.to(memory_format=torch.channels_last)
        return value.t() if value.dim() == 2 and self.shared.random() < 0.5 else value

    @staticmethod
    def _optimizer(kind: str, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        if kind == "adamw":
            return torch.optim.AdamW(parameters, lr=0.01, foreach=False)
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=kind == "foreach")

    def step(self) -> None:
        to_none = self._begin()
        passes = self.num_passes if self.own.random() < 0.8 else self.own.randint(0, self.num_passes)
        for _ in range(passes):
            self._backward()
        for i, p in enumerate(self.theirs):
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            told = {"compression": self.compression, "op": self.op, "name": f"twin.{self.seed}.{i}"}
            mean = hvd.allreduce(gradient.contiguous(), **told)
            if p.requires_grad or p.grad is not None:
                p.grad = torch.empty_like(p.detach()).copy_(mean)  # in the memory format that autograd gives it
        self.plain.step()
        if self.shared.random() < 0.3:
            self.made.synchronize()
            with self.made.skip_synchronize():
                self.made.step()
        else:
            self.made.step()
        for i, (p, twin) in enumerate(zip(self.ours, self.theirs, strict=True)):
            where = f"program {self.seed}, parameter {i}: "
            torch.testing.assert_close(p, twin, rtol=0, atol=0, equal_nan=True, msg=where.__add__)
        for tensor, value in self.held if to_none else ():
            assert torch.equal(tensor, value), f"program {self.seed}: a gradient of an earlier step changed"
        self._do_with_gradients()

    def _begin(self) -> bool:
        """Freeze and thaw, and zero gradients or not. Returns whether none is left."""
        for p, twin in zip(self.ours, self.theirs, strict=True):
            if self.shared.random() < 0.1:
                is_free = self.shared.random() < 0.6
                p.requires_grad_(is_free)
                twin.requires_grad_(is_free)
                if not is_free:
                    p.grad = twin.grad = None
        how = self.shared.choice(["none", "zero", "never"] if self.op == hvd.Average else ["none", "zero"])
        for optimizer in (self.made, self.plain) if how != "never" else ():
            optimizer.zero_grad(set_to_none=how == "none")
        return how == "none"

    def _backward(self) -> None:
        used = [i for i, p in enumerate(self.ours) if self.own.random() < 0.7 and p.requires_grad]
        for parameters in (self.ours, self.theirs) if used else ():
            torch.manual_seed(len(used))
            parts = [parameters[i] * torch.randint(-3, 4, parameters[i].shape) for i in used]
            sum(
                (part.square() if i % 2 else part).sum().double() for i, part in zip(used, parts, strict=True)
            ).backward()

    def _do_with_gradients(self) -> None:
        self.held = [(tensor, tensor.clone()) for tensor, _ in self.held]
        for p in self.ours:
            what = self.own.random()
            if p.grad is None or what > 0.3:
                continue
            if what < 0.2:
                kept = p.grad if what < 0.1 else p.grad.detach()
                self.held.append((kept, kept.clone()))
            elif what < 0.25:
                p.grad.data = p.grad.data.clone()
            else:
                p.grad = p.grad.clone()


def run_programs(seeds: Sequence[int], rank: int) -> None:
    """Run programs, on every rank; what differs raises AssertionError."""
    for seed in seeds:
        program = Program(seed, rank)
        for _ in range(program.shared.randint(3, 8)):
            program.step()
