"""What trainers ask of a model and an optimizer that ``gz.prepare`` has returned, whatever the strategy has made of them."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from guozhuang.distributed import DistributedDataParallel
from guozhuang.errors import UsageError, explain
from guozhuang.registry import registry
from guozhuang.sharding import is_dtensor
from guozhuang.strategies import (
    MARK,
    PreparedAlready,
    device_ids,
    get,
    prepare,
    prepare_unseen,
    several,
    takes_several,
)

_said: set[str] = set()


def say_once(text: str) -> None:
    """Say something on rank 0, once in a process."""
    is_first = dist.get_rank() == 0 if dist.is_initialized() else os.environ.get("RANK") in (None, "", "0")
    if text not in _said and is_first:
        print(f"guozhuang: {text}", file=sys.stderr, flush=True)
    _said.add(text)


def is_one_of_several() -> bool:
    """Return whether this process has a group with others, or was told by a launcher that it is to have one."""
    if dist.is_initialized():
        return dist.get_world_size() > 1
    text = os.environ.get("WORLD_SIZE", "1")
    return "RANK" in os.environ and text.isdigit() and int(text) > 1


def is_gone(backend: object) -> bool:
    """Return whether a backend is oneCCL's for CPUs, and its bindings for PyTorch, which have ended, have not registered it."""
    return str(backend).lower() in ("ccl", "cpu:ccl") and "ccl" not in dist.Backend.backend_list


@contextmanager
def as_equal(model: nn.Module) -> Iterator[None]:
    """Let code that would copy rank 0's weights to all ranks leave out a model whose weights a strategy keeps equal."""
    mark = vars(model).get(MARK)
    if isinstance(mark, PreparedAlready):
        vars(model)[MARK] = [*dict(model.named_parameters()), *dict(model.named_buffers())]
    try:
        yield
    finally:
        if isinstance(mark, PreparedAlready):
            vars(model)[MARK] = mark


def wrap(
    model: nn.Module,
    optimizers: list[Optimizer],
    strategy: str,
    options: Mapping[str, Any],
    trainer: str,
    call: str,
    *,
    is_seen: bool,
) -> tuple[Any, list[Optimizer]]:
    """Prepare a model with its optimizers, and say once by which strategy the trainer trains. Every rank must call it.

    Args:
        model: the bare model.
        optimizers: those that a strategy other than ddp is to step: exactly one, or several if it takes them.
        strategy: a name that ``gz.prepare`` knows.
        options: arguments of ``DistributedDataParallel``.
        trainer: the name of the trainer.
        call: how a script hands both over, for the error.
        is_seen: whether scripts get to see what this returns, and not their own module alone.

    Raises:
        UsageError: the strategy needs the one optimizer, and there is none or several.
    """
    if len(optimizers) == 1 or (optimizers and strategy != "ddp" and takes_several(get(strategy).prepare)):
        call_of = prepare if is_seen else prepare_unseen
        model, made = call_of(model, tuple(optimizers), strategy, ddp_options=options)
        optimizers = list(several(made))
    elif strategy == "ddp":
        model = DistributedDataParallel(model, **{"device_ids": device_ids(model), **options})
    else:
        what = f"strategy {strategy} takes a model together with its one optimizer, and there are {len(optimizers)}"
        fix = f"prepare both in one call, {call}, with one optimizer for all parameters; or choose the strategy ddp"
        raise UsageError(explain(what, value=strategy, fix=fix))
    group = f"{dist.get_world_size()} ranks on backend {dist.get_backend()}"
    say_once(f"{trainer} trains by strategy {strategy}, {group}")
    return model, optimizers


def agree(model: nn.Module) -> None:
    """Make the weights of all ranks equal, if ranks train alone under this strategy. Every rank must call it."""
    make_equal = getattr(model, "agree", None)
    if isinstance(model, DistributedDataParallel) and make_equal is not None:
        make_equal()


def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float, optimizers: Sequence[Optimizer]) -> None:
    """Clip each element of the averaged gradients to the range from -clip_value to clip_value. Every rank must call it.

    Where a sharded optimizer averages gradients at its step, it does so now, and the parts of this rank are clipped.
    """
    sharded: list[Any] = [each for each in optimizers if hasattr(each, "carrier") and each.carrier.averages]
    for optimizer in sharded:
        optimizer.collect()
        for part in optimizer.carrier.weights:
            if part.grad is not None:
                part.grad.clamp_(-clip_value, clip_value)
    if not sharded:
        nn.utils.clip_grad_value_(parameters, clip_value)


# ---- states: whole ones, and what one rank alone has


def whole_state(each: nn.Module | Optimizer) -> dict[str, Any]:
    """Return the state of a model or an optimizer with whole tensors, on the CPU if it is divided. Every rank must call it."""
    state: dict[str, Any] = each.state_dict()
    return _whole(state) if _is_divided(each) else state


def load_whole_state(each: nn.Module | Optimizer, state: Mapping[str, Any], **options: Any) -> Any:
    """Load a state with whole tensors into a model or an optimizer. Every rank must call it.

    Args:
        each: the model or the optimizer.
        state: what :func:`whole_state` returned, in a run of any number of ranks.
        **options: further arguments of ``load_state_dict``.

    Returns:
        What ``load_state_dict`` returns.
    """
    if not _is_divided(each):
        return each.load_state_dict(state, **options)  # type: ignore[arg-type]
    if isinstance(each, nn.Module):
        own = each.state_dict()
        return each.load_state_dict({key: _like(own.get(key), value) for key, value in state.items()}, **options)
    parameters = dict(enumerate(_parameters(each)))
    per_parameter = {
        key: {name: _like(parameters.get(key), value) for name, value in values.items()}
        for key, values in state["state"].items()
    }
    return each.load_state_dict({**state, "state": per_parameter}, **options)


@contextmanager
def taking_whole_states(several: Iterable[Any]) -> Iterator[None]:
    """Let ``state_dict`` and ``load_state_dict`` of models and optimizers mean whole states, for code that calls them."""
    divided = [each for each in several if isinstance(each, nn.Module | Optimizer) and _is_divided(each)]
    for each in divided:
        vars(each)["state_dict"] = functools.partial(_by_class, each, whole_state)
        vars(each)["load_state_dict"] = functools.partial(_by_class, each, load_whole_state)
    try:
        yield
    finally:
        for each in divided:
            del vars(each)["state_dict"], vars(each)["load_state_dict"]


def _by_class(each: nn.Module | Optimizer, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function with an object of which it is to find the methods that :func:`taking_whole_states` has replaced."""
    replaced = {name: vars(each).pop(name) for name in ("state_dict", "load_state_dict")}
    try:
        return call(each, *args, **options)
    finally:
        vars(each).update(replaced)


def own_state(models: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """Return what this rank alone has of prepared models and their optimizers; one dict for each. Every rank must call it."""
    found = []
    for each in registry.trained:
        if not any(each.model is model for model in models):
            continue
        state: dict[str, Any] = {}
        for name, part in (("model", each.model), ("optimizer", each.optimizer)):
            if hasattr(part, "exchange_state_dict"):
                exchange = part.exchange_state_dict()
                if exchange.get("exchange") or "weights" in exchange:
                    state[name] = exchange
        if "weights" in state.get("model", {}):  # ranks train alone, each with an optimizer of its own
            state["alone"] = each.optimizer.state_dict()
        found.append(state)
    return found


def load_own_state(saved: list[dict[str, Any]] | None, models: Sequence[nn.Module]) -> None:
    """Load what :func:`own_state` returned on this rank, after the weights. Every rank must call it.

    Args:
        saved: None if there is nothing for this rank; then no rank loads anything.
        models: prepared as those whose state was saved.
    """
    trained = [each for each in registry.trained if any(each.model is model for model in models)]
    has_parts = [None] * dist.get_world_size()
    dist.all_gather_object(has_parts, None if saved is None else len(saved))
    if any(count != len(trained) for count in has_parts):
        return
    for each, state in zip(trained, saved or (), strict=True):
        if "alone" in state:
            each.optimizer.load_state_dict(state["alone"])
        for name, part in (("model", each.model), ("optimizer", each.optimizer)):
            if name in state:
                part.load_exchange_state_dict(state[name])


def _is_divided(each: nn.Module | Optimizer) -> bool:
    return any(is_dtensor(parameter) for parameter in _parameters(each))


def _parameters(each: nn.Module | Optimizer) -> Iterator[Any]:
    if isinstance(each, nn.Module):
        yield from each.parameters()
    else:
        for group in each.param_groups:
            yield from group["params"]


def _whole(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _whole(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return value.full_tensor().to("cpu", copy=True) if is_dtensor(value) else value


def _like(own: Any, value: Any) -> Any:
    """Return a whole tensor divided as ``own`` is, if that is a DTensor of the same shape; else the value itself."""
    if not (is_dtensor(own) and isinstance(value, Tensor) and own.shape == value.shape) or is_dtensor(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
