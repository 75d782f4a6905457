"""Divides the tokens of a model's sequences over ranks: blocks get divided hidden states, callers get whole outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ...errors import UsageError, explain
from ...groups.subgroups import twin
from ..activations.outputs import whole_output
from ..activations.tensor import DividedTensor, Place
from ..axes import Around, Axes, with_mean_gradient
from ..pipeline.blocks import find_blocks
from ..spans import SpansOfRanks
from . import attention as _attention  # noqa: F401 (importing it registers what it knows)
from .team import Team


def divide_sequence(model: nn.Module, axes: Axes, attention: str = "auto") -> Around:
    """Let each rank of the axis ``sequence`` compute a part of the tokens of each sample. Every rank must call it.

    What embeddings before the blocks and blocks of the model's block lists get is divided; from there on all that is computed
    from it is divided too, until a function needs whole tensors. Parameters stay whole. See [Note: as if it were whole]
    in activations/tensor.py and [Note: gradients of parts] in activations/tensor.py.

    Args:
        model: changed in place: its blocks get hooks.
        axes: the groups; the axis ``sequence`` has several ranks.
        attention: ``"ulysses"``: each rank computes some heads for all tokens; ``"ring"``: each rank computes all heads for
            its own tokens, and keys and values travel; ``"auto"``: by heads where their number divides by the ranks.

    Returns:
        What must be done around each call of the model.

    Raises:
        UsageError: the model has no list of blocks, or is compiled; and, in the first forward, a block joins tokens by
            something that is not attention, or no block gets hidden states of (batch, tokens, features).
    """
    group = axes.group("sequence")
    assert group is not None, axes.layout
    compiled = [name or "the model" for name, each in model.named_modules() if _is_compiled(each)]
    if compiled:
        what = "A compiled model cannot be divided by tokens, because its operations are not seen"
        fix = "do not call torch.compile under this strategy"
        raise UsageError(explain(what, value=compiled[0], rank=group.rank(), fix=fix))
    lists = find_blocks(model)
    if not lists:
        what = "The sequence cannot be divided: the model has no list of blocks"
        fix = "keep the blocks of the model in an nn.ModuleList or nn.Sequential of one class, or take another strategy"
        raise UsageError(explain(what, value=type(model).__qualname__, rank=group.rank(), fix=fix))
    team = Team(twin(group), attention, {id(each): name for name, each in model.named_modules()})
    call = _ModelCall(team)
    for each in lists:
        for name, block in zip(each.names, each.modules, strict=True):
            entry = _Entry(call, name, dim=0 if _has_tokens_first(block) else 1)
            block.register_forward_pre_hook(entry.before, with_kwargs=True)
            block.register_forward_hook(entry.after, always_call=True)
    inside = {id(part) for found in lists for block in found.modules for part in block.modules()}
    for module in model.modules():
        if isinstance(module, nn.Embedding) and id(module) not in inside and not _has_tokens_first(model):
            module.register_forward_pre_hook(call.divide_ids)
    # Before whoever wraps the model sees its outputs, such as data parallelism around it.
    model.register_forward_hook(_whole_after)
    return Around(call.begin, call.end, team)


def _whole_after(model: nn.Module, args: Any, outputs: Any) -> Any:
    return whole_output(outputs)


def _is_compiled(module: nn.Module) -> bool:
    return isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None


def _has_tokens_first(block: nn.Module) -> bool:
    return any(isinstance(each, nn.MultiheadAttention) and not each.batch_first for each in block.modules())


class _ModelCall:
    """One call of the model, and what was seen in calls so far."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self._seen: list[str] = []  # what the blocks of this call got that could not be divided
        self._has_divided = False

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.team.in_blocks.clear()
        self.team.begin()
        self._seen.clear()

        def alike(each: Any) -> Any:
            return with_mean_gradient(each, self.team.group) if isinstance(each, Tensor) else each

        return tree_map(alike, (args, dict(kwargs)))  # type: ignore[no-any-return]

    def end(self, outputs: Any) -> Any:
        if not self._has_divided and self._seen:
            what = (
                "The sequence cannot be divided: no block got hidden states of (batch, tokens, features), "
                f"but {'; '.join(dict.fromkeys(self._seen))}"
            )
            fix = "take another strategy; the strategy space divides images"
            raise UsageError(explain(what, rank=self.team.rank, fix=fix))
        outputs = whole_output(outputs)
        self.team.begin(is_running=False)
        return outputs

    def divide(self, hidden: Any, name: str, dim: int) -> Any:
        """Divide what a block gets, unless it is divided already or has too few tokens for the ranks: they all compute them."""
        if not isinstance(hidden, Tensor):
            return hidden
        if isinstance(hidden, DividedTensor):
            self._has_divided = True
            return hidden
        if hidden.dim() != 3 or not hidden.is_floating_point():
            self._seen.append(f"{name} a tensor of shape {tuple(hidden.shape)}")
            return hidden
        self._has_divided = True
        if hidden.shape[dim] < self.team.size:
            return hidden
        # What checkpointing computes again in the backward is divided as it was, although the order may have changed since.
        team, spans = hidden.__dict__.get("token_spans", (None, None))
        if team is not self.team:
            spans = self.team.spans(hidden.shape[dim])
            hidden.__dict__["token_spans"] = self.team, spans
        return self._part(hidden, dim, spans)

    def divide_ids(self, embedding: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Divide the numbers of tokens or positions (batch, tokens) that an embedding before the blocks gets."""
        ids = args[0] if args else None
        if not isinstance(ids, Tensor) or isinstance(ids, DividedTensor) or ids.dim() != 2 or self.team.in_blocks:
            return args
        if ids.is_meta:
            return args
        return args if ids.shape[1] < self.team.size else (self._part(ids, 1, self.team.spans(ids.shape[1])), *args[1:])

    def _part(self, whole: Tensor, dim: int, spans: SpansOfRanks) -> Tensor:
        part = spans.part(whole, dim, self.team.rank)
        # With memory of its own, so that the whole need not be kept.
        return DividedTensor(part.clone(memory_format=torch.contiguous_format), Place(dim, spans, self.team))


class _Entry:
    """The hooks of one block."""

    def __init__(self, call: _ModelCall, name: str, dim: int) -> None:
        self._call, self._name, self._dim = call, name, dim

    def before(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        first = next((key for key, value in kwargs.items() if isinstance(value, Tensor)), "")
        hidden = args[0] if args else kwargs.get(first)
        if isinstance(hidden, Tensor) and hidden.is_meta:  # a pipeline asks what the whole output looks like
            return args, kwargs
        self._call.team.in_blocks.append(self._name)
        hidden = self._call.divide(hidden, self._name, self._dim)
        if args:
            return (hidden, *args[1:]), kwargs
        return args, {**kwargs, first: hidden} if first else kwargs

    def after(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        team = self._call.team
        if team.in_blocks[-1:] != [self._name]:  # a pipeline has passed over this call
            return
        first = output[0] if isinstance(output, tuple | list) and output else output
        is_lost = isinstance(first, Tensor) and not isinstance(first, DividedTensor)
        if args and isinstance(args[0], DividedTensor) and is_lost:
            team.refuse_model(f"a function of {type(block).__qualname__} that torch does not announce")
        team.in_blocks.pop()
