"""Finds pairs in any model: a layer by columns, functions that treat each feature or channel apart, a layer by rows.

The data flow is read off a symbolic trace of the model, or of those of its parts that can be traced: parts whose control flow
depends on data cannot, and stay whole.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import operator
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from typing_extensions import override

from ...generators import kept
from .layers import CONVOLUTIONS, can_be_divided, is_transposed, num_features

_MODULES: tuple[type[nn.Module], ...] = (
    *(nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU),
    *(nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Threshold),
    *(nn.Dropout, nn.Identity),
)
_CHANNEL_MODULES: tuple[type[nn.Module], ...] = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    *(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.ZeroPad2d, nn.Upsample),
)
_FUNCTIONS: frozenset[Callable[..., Any]] = frozenset(
    {
        *(F.relu, F.relu6, F.gelu, F.silu, F.mish, F.leaky_relu, F.elu, F.selu, F.celu, F.softplus, F.softsign),
        *(F.logsigmoid, F.hardtanh, F.hardswish, F.hardsigmoid, F.threshold, F.tanh, F.sigmoid),
        *(torch.relu, torch.tanh, torch.sigmoid, torch.square, torch.abs, torch.clone, torch.neg, torch.exp),
        *(operator.mul, operator.add, operator.sub, operator.truediv, operator.pow, operator.neg),
        *(torch.mul, torch.add, torch.sub, torch.div, torch.pow),
    }
)
_CHANNEL_FUNCTIONS = frozenset({F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.interpolate})
_METHODS = frozenset(
    {"relu", "tanh", "sigmoid", "square", "abs", "clone", "contiguous", "relu_", "mul", "add", "sub", "pow"}
)


@dataclass
class Found:
    """A pair in a model.

    Attributes:
        columns: names of the layers that are divided by outputs.
        rows: name of the layer that is divided by inputs.
        channels: names of layers between them that have parameters for each channel.
        dropouts: names of the dropouts between them.
        calls_dropout: whether the function ``dropout`` is between them, called by the module that holds both.
    """

    columns: list[str]
    rows: str
    channels: list[str] = field(default_factory=list)
    dropouts: list[str] = field(default_factory=list)
    calls_dropout: bool = False


class _Tracer(fx.Tracer):
    def __init__(self, leaves: Collection[int]) -> None:
        super().__init__()
        self._leaves = leaves

    @override
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return id(m) in self._leaves or super().is_leaf_module(m, module_qualified_name) or is_transposed(m)


def find_pairs(model: nn.Module, handled: Collection[int]) -> list[Found]:
    """Find the pairs of a model.

    Args:
        model: read only.
        handled: ids of modules that are divided already, and are looked through no more.
    """
    copied = _copy(model)
    handled = {id(new) for old, new in zip(model.modules(), copied.modules(), strict=True) if id(old) in handled}
    holders: collections.Counter[int] = collections.Counter()
    for module in copied.modules():
        holders.update(id(parameter) for parameter in module.parameters(recurse=False))
    # By how many names each module can be reached.
    names_of = collections.Counter(id(module) for _, module in copied.named_modules(remove_duplicate=False))
    found: list[Found] = []
    seen: set[int] = set()
    with _attributes_kept(copied), kept():
        for prefix, module, graph in _traces(copied, "", handled):
            if id(module) not in seen:
                seen.add(id(module))
                found += _of_graph(graph, module, prefix, holders, names_of)
    taken: set[str] = set()
    result = []
    for pair in found:
        names = {*pair.columns, pair.rows, *pair.channels}
        if not names & taken:
            taken |= names
            result.append(pair)
    return result


def _copy(model: nn.Module) -> nn.Module:
    """Return a copy with the same parameters, whose buffers and lists a forward may change.

    What cannot be copied is shared: a process group that a hook holds, a lock, a file. A model that does not let itself be
    copied is returned.
    """
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    for module in reversed(list(model.modules())):  # parts before what contains them
        for name, value in vars(module).items():
            inside = value.values() if name.endswith("_hooks") and isinstance(value, dict) else [value]
            for each in inside if name != "_modules" else ():
                try:
                    copy.deepcopy(each, memo)
                except Exception:
                    memo[id(each)] = each
    with contextlib.suppress(Exception):
        return copy.deepcopy(model, memo)
    return model


@contextlib.contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """A forward that is traced may keep what it computed in attributes and buffers: they are put back."""
    before = [(module, dict(module.__dict__)) for module in model.modules()]
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
        for module, attributes in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)


def _traces(module: nn.Module, prefix: str, handled: Collection[int]) -> Iterator[tuple[str, nn.Module, fx.Graph]]:
    if id(module) in handled or not any(can_be_divided(part) for part in module.modules()):
        return
    if isinstance(module, nn.Sequential) or not type(module).__module__.startswith("torch.nn."):
        with contextlib.suppress(Exception):  # whatever a forward raises when its inputs have no values
            yield prefix, module, _Tracer(handled).trace(module)
            return
    for name, child in module.named_children():
        yield from _traces(child, f"{prefix}{name}.", handled)


def _of_graph(
    graph: fx.Graph,
    module: nn.Module,
    prefix: str,
    holders: collections.Counter[int],
    names_of: collections.Counter[int],
) -> Iterator[Found]:
    parts = dict(module.named_modules())
    calls = collections.Counter(node.target for node in graph.nodes if node.op in ("call_module", "get_attr"))
    named = {str(node.target).rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"}

    def is_own(node: fx.Node) -> bool:
        """Whether nothing else sees the module: it is called once, and its parameters belong to no other."""
        layer = parts[str(node.target)]
        return (
            calls[node.target] == 1
            and names_of[id(layer)] == names_of[id(module)]  # not also part of a module beside this one
            and str(node.target) not in named
            and all(holders[id(parameter)] == 1 for parameter in layer.parameters(recurse=False))
        )

    for last in graph.nodes:
        if last.op != "call_module" or not can_be_divided(parts[last.target]) or not is_own(last):
            continue
        layer: Any = parts[last.target]
        if (isinstance(layer, CONVOLUTIONS) and layer.groups != 1) or len(last.args) != 1 or last.kwargs:
            continue
        pair = _behind(last, layer, parts, is_own)
        if pair is not None:
            for names in (pair.columns, pair.channels, pair.dropouts):
                names[:] = [prefix + name for name in names]
            pair.rows = prefix + pair.rows
            yield pair


def _behind(last: fx.Node, layer: Any, parts: dict[str, nn.Module], is_own: Callable[[fx.Node], bool]) -> Found | None:
    """What stands before the layer as far as the first layers that can be divided by columns; None if something cannot."""
    width = num_features(layer)[0]
    is_convolution = isinstance(layer, CONVOLUTIONS)
    pair = Found([], str(last.target))
    inside, waiting = {last}, list(last.all_input_nodes)
    while waiting:
        node = waiting.pop()
        if node in inside:
            continue
        inside.add(node)
        part: Any = parts.get(str(node.target)) if node.op == "call_module" else None
        if part is not None and can_be_divided(part) and num_features(part)[1] == width:
            if not is_own(node) or isinstance(part, CONVOLUTIONS) != is_convolution:
                return None
            if not is_convolution or part.groups == 1:
                pair.columns.append(str(node.target))
                continue
            if part.groups != part.in_channels or part.out_channels != part.in_channels:
                return None
            pair.channels.append(str(node.target))
        elif part is not None:
            is_channel = is_convolution and type(part) in _CHANNEL_MODULES
            if not (type(part) in _MODULES or is_channel or _is_activation(part)):
                return None
            if isinstance(part, nn.Dropout):
                pair.dropouts.append(str(node.target))
                if not is_own(node):
                    return None
            if any(True for _ in part.parameters(recurse=False)) or any(True for _ in part.buffers(recurse=False)):
                if not is_own(node):
                    return None
                pair.channels.append(str(node.target))
        elif node.op == "call_function" and node.target is F.dropout:
            pair.calls_dropout = True
        elif not (
            (node.op == "call_function" and node.target in _FUNCTIONS)
            or (node.op == "call_function" and is_convolution and node.target in _CHANNEL_FUNCTIONS)
            or (node.op == "call_method" and node.target in _METHODS)
        ):
            return None
        waiting += node.all_input_nodes
    is_closed = all(set(node.users) <= inside for node in inside - {last})
    if not pair.columns or not is_closed or (pair.calls_dropout and not _hold_nothing_else(pair, parts)):
        return None
    return pair


def _hold_nothing_else(pair: Found, parts: dict[str, nn.Module]) -> bool:
    """Whether a module holds the pair and no other layers, so that its forward draws for nothing else of that size."""
    names = {*pair.columns, *pair.channels, pair.rows}
    owners = {name.rpartition(".")[0] for name in names}
    if len(owners) > 1:
        return False
    inside = {name for name, child in parts[owners.pop()].named_children() if any(True for _ in child.parameters())}
    return inside == {name.rpartition(".")[2] for name in names}


def _is_activation(part: nn.Module) -> bool:
    """Whether the module is one of the activations of the package ``transformers``, which all are elementwise."""
    return type(part).__module__ == "transformers.activations" and not any(True for _ in part.parameters())
