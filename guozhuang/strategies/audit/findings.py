"""Gradients that a step uses, compared with those of one process; what a difference may come from, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...errors import explain
from ...parallel.proof.compare import difference_of, precision
from ...parallel.proof.noise import TIMES, Noise, dense
from ...registry import registry
from ...sharding.carrier import Carrier
from ...sharding.optimizer import ShardedOptimizer
from ...sharding.whole import is_dtensor

#: Gradients by the name of the parameter.
Gradients = dict[str, Tensor | None]


def used_gradients(module: nn.Module, optimizer: Any) -> Gradients:
    """Return the whole gradients that the coming step of an optimizer uses. Every rank must call it."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = {name: p for name, p in module.named_parameters() if id(p) in held}
    if isinstance(optimizer, ShardedOptimizer) and optimizer.carrier.averages and optimizer.group.size() > 1:
        means = _means(optimizer.carrier, optimizer.group)
        return {name: means.get(id(p)) for name, p in named.items()}
    found: Gradients = {}
    for name, parameter in named.items():
        gradient: Any = parameter.grad
        if gradient is not None:
            gradient = gradient.full_tensor() if is_dtensor(gradient) else dense(gradient)
        found[name] = gradient
    return found


def _means(carrier: Carrier, group: dist.ProcessGroup) -> dict[int, Tensor | None]:
    """Return the mean gradients of what is divided between ranks, as the step uses them, by identity of the parameter."""
    parameters = carrier.parameters
    if carrier.is_averaged:
        return {id(p): p.grad for p in parameters}
    wholes = [torch.zeros_like(p, memory_format=torch.contiguous_format) for p in parameters]
    has_some = torch.zeros(len(parameters))
    if carrier.is_collected:  # and may have been clipped since
        for block, weight in zip(carrier.blocks, carrier.weights, strict=True):
            for piece in block.pieces if weight.grad is not None else ():
                first = piece.offset - block.start
                part = dense(weight.grad).reshape(-1)[first : first + piece.end - piece.start]  # type: ignore[arg-type]
                wholes[piece.parameter].view(-1)[piece.start : piece.end] = part
                has_some[piece.parameter] = 1
    else:
        scale = registry.weight.among(group.size(), group.rank()) / group.size()
        for i, parameter in enumerate(parameters):
            if parameter.grad is not None:
                wholes[i].copy_(dense(parameter.grad)).mul_(scale)
                has_some[i] = 1
    dist.all_reduce(has_some, group=group)
    for whole in wholes:
        if whole.numel():
            dist.all_reduce(whole, group=group)
    return {
        id(p): whole if some else None for p, whole, some in zip(parameters, wholes, has_some.tolist(), strict=True)
    }


def differences(found: Gradients, wanted: Mapping[str, Tensor | None], number: int, noise: Noise) -> dict[str, str]:
    """Return in words, by parameter, what differs by more than rounding.

    Args:
        found: what the ranks' step uses.
        wanted: what one process has.
        number: of the model, as ``noise`` counts it.
        noise: what rounding changes.
    """
    texts = {}
    largest = max((float(dense(each).norm()) for each in wanted.values() if each is not None), default=0.0)
    for name, mine in found.items():
        other = wanted.get(name)
        if mine is None or other is None:
            some = other if mine is None else mine
            if some is not None and bool(dense(some).any()):
                there = "there is none, and in one process there is one"
                texts[name] = there if mine is None else "there is one, and in one process there is none"
            continue
        floor = 100 * torch.finfo(mine.dtype).eps * largest + TIMES * noise.get(("gradient", f"{number}.{name}"), 0.0)
        text = difference_of(mine, dense(other), floor)
        if text is not None:
            texts[name] = text
    return texts


def common_factor(found: Gradients, wanted: Mapping[str, Tensor | None]) -> float | None:
    """Return the number by which all gradients are those of one process; None if there is no such number."""
    pairs = [
        (dense(g).double(), dense(w).double())
        for n, g in found.items()
        if g is not None and (w := wanted.get(n)) is not None
    ]
    size = sum(float(w.square().sum()) for _, w in pairs)
    if not size:
        return None
    factor = sum(float((g * w).sum()) for g, w in pairs) / size
    apart = sum(float((g - factor * w).square().sum()) for g, w in pairs)
    least = max((precision(g.dtype) for g in found.values() if g is not None), default=0.0)
    return factor if apart <= (10 * least * factor) ** 2 * size else None


def explained(
    texts: Mapping[str, str], factor: float | None, num_ranks: int, step: int, strategy: str, module: nn.Module
) -> str:
    """Return the text of the error for gradients that are not those of one process.

    Args:
        texts: what differs, by parameter; not empty.
        factor: the common factor of all gradients, if there is one.
        num_ranks: how many ranks share the data.
        step: the number of the optimizer's step.
        strategy: its name.
        module: whose gradients they are.
    """
    name, text = next(iter(texts.items()))
    if factor is not None:
        what = f"audit of step {step} under {strategy}: gradients are exactly {_words(factor)} those of one process"
        fix = _for_factor(factor, num_ranks)
    else:
        what = (
            f"audit of step {step} under {strategy}: the gradients of {len(texts)} parameters are not those of one process; "
            f"of {name!r}: {text}"
        )
        fix = "; ".join(_causes(module))
    return explain(what, fix=f"{fix}. Or leave --audit out, if it is meant")


def _words(factor: float) -> str:
    known = {0.5: "half of", 2.0: "twice", 0.25: "a quarter of", 1 / 3: "a third of"}
    return next((word for value, word in known.items() if abs(value - factor) < 1e-4), f"{factor:.6g} times")


def _for_factor(factor: float, num_ranks: int) -> str:
    if abs(factor * num_ranks - 1) < 1e-4:
        return (
            f"this is 1/n with {num_ranks} ranks: a mean of sums (reduction='sum'), a mean of means of which one alone has "
            "tokens, or a mean that the script divides by the number of ranks. The strategy averages over ranks: use "
            "gz.global_mean(loss_sum, count), or multiply a sum by the number of ranks, read in each step (world.data_size)"
        )
    if abs(factor / num_ranks - 1) < 1e-4:
        return (
            f"this is n with {num_ranks} ranks: the script multiplies a mean by the number of ranks, or sums over them what "
            "the strategy averages: leave that out, or use gz.global_mean(loss_sum, count)"
        )
    return (
        "a mean of means, each divided by a rank's own number of tokens, samples or micro-batches: use "
        "gz.global_mean(loss_sum, count) and gz.accumulate(model, steps, weight=num_tokens)"
    )


def _causes(module: nn.Module) -> Sequence[str]:
    causes = []
    if any(
        isinstance(each, _BatchNorm) and not isinstance(each, nn.SyncBatchNorm) and each.training
        for each in module.modules()
    ):
        causes.append(
            "BatchNorm takes the statistics of each rank's part of the batch: nn.SyncBatchNorm.convert_sync_batchnorm(model) "
            "before prepare takes those of all"
        )
    causes.append(
        "a mean over tokens, of which ranks have different numbers, is a mean of means: gz.global_mean(loss_sum, count)"
    )
    causes.append("a loss that compares samples needs those of all ranks: gz.all_gather(features)")
    return causes
