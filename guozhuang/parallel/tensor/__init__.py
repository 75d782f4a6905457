"""Tensor parallelism: the large matrix products of a model divided over the ranks of the axis "tp", in place.

The parameters stay plain local tensors in the same Parameter objects, so that optimizers, fused ones too, need not know.
Outside of divided regions every rank computes the same.
Source: Shoeybi et al. 2019, Megatron-LM, https://arxiv.org/abs/1909.08053.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from ...errors import UsageError, explain
from .attention import divide_attention, is_plain
from .families import attention_of, divide_heads, divide_known
from .layers import (
    CONVOLUTIONS,
    Cutter,
    Spans,
    can_be_divided,
    channels,
    columns,
    draws,
    feature_dim,
    holds_parameters,
    num_features,
    rows,
    vocabulary,
)
from .pairs import Found, find_pairs

if TYPE_CHECKING:
    from ..axes import Axes

__all__ = ["divide_tensors"]

_log = logging.getLogger("guozhuang")
WORDS = ("columns", "rows", "gathered", "channels", "heads")


def divide_tensors(model: nn.Module, axes: Axes, plan: Mapping[str, str] | None = None) -> None:
    """Divide the model's parameters over the ranks of the axis "tp", in place. Every rank must call it, with equal models.

    Args:
        model: its parameters are equal on all ranks.
        axes: the ranks' axes; nothing is done where "tp" has one rank.
        plan: by hand, names of modules, in which ``*`` stands for one part between dots, and what becomes of them: "columns"
            (a linear layer or convolution by outputs, which stay divided), "rows" (by inputs, the output is summed; an
            embedding by rows), "gathered" (by outputs, which are gathered), "channels" (BatchNorm or a depthwise convolution
            between the two), "heads" (an attention). What it does not name stays whole. None: what is found by structure.

    Raises:
        UsageError: an entry of the plan matches nothing or names what cannot be divided so; heads do not divide by the ranks;
            or nothing in the model can be divided.
    """
    group = axes.group("tp")
    if group is None:
        return
    cutter = Cutter(group)
    num_elements = sum(parameter.numel() for parameter in model.parameters())
    if plan is not None:
        _divide_by_hand(model, plan, cutter)
    else:
        _divide_by_structure(model, cutter, axes.everyone)
    _check_shared(model, cutter)
    share = cutter.num_whole_elements / max(num_elements, 1)
    if not share:
        what = f"nothing in {type(model).__name__} was found that {cutter.num_ranks} ranks of the axis tp can divide"
        fix = 'name the layers, plan={"mlp.up": "columns", "mlp.down": "rows"}, or choose another strategy'
        raise UsageError(explain(what, fix=fix))
    if axes.everyone.rank() == 0:
        text = f"tensor: {share:.0%} of {num_elements:,} parameters are divided over {cutter.num_ranks} ranks"
        largest = sorted(_whole_parameters(model, cutter).items(), key=lambda item: -item[1])[:3]
        if share < 0.5 and largest:
            text += "; whole on each: " + ", ".join(f"{name} ({length:,})" for name, length in largest)
        _log.log(logging.INFO if share >= 0.5 else logging.WARNING, text)


def _whole_parameters(model: nn.Module, cutter: Cutter) -> dict[str, int]:
    return {name: each.numel() for name, each in model.named_parameters() if id(each) not in cutter.cut}


def _divide_by_structure(model: nn.Module, cutter: Cutter, everyone: dist.ProcessGroup) -> None:
    handled: set[int] = set()
    for module in divide_known(model, cutter):
        handled |= {id(part) for part in module.modules()}
    parts = dict(model.named_modules())
    # One rank looks, so that all divide alike; and a trace changes what calling a module means in the whole process.
    pairs = [find_pairs(model, handled) if everyone.rank() == 0 else None]
    device = next((parameter.device for parameter in model.parameters()), None)
    dist.broadcast_object_list(pairs, group=everyone, group_src=0, device=device)
    for pair in pairs[0] or ():
        _divide_pair(pair, parts, cutter)


def _divide_pair(pair: Found, parts: Mapping[str, Any], cutter: Cutter) -> None:
    last = parts[pair.rows]
    width, num_outputs = num_features(last)
    outside = {num_outputs, *(num_features(parts[name])[0] for name in pair.columns)}
    if width < cutter.num_ranks or (pair.calls_dropout and outside & set(cutter.spans_of_all(width).counts)):
        return  # too narrow; or what the owner draws before or behind the pair could not be told from what it draws between
    part = (feature_dim(last), cutter.spans(width), width)
    for name in pair.columns:
        columns(parts[name], cutter, name=name)
    for name in pair.channels:
        channels(parts[name], cutter, width)
    rows(last, cutter, name=pair.rows)
    for name in pair.dropouts:
        draws(parts[name], part)
    if pair.calls_dropout:
        draws(parts[pair.rows.rpartition(".")[0]], part)


def _divide_by_hand(model: nn.Module, plan: Mapping[str, str], cutter: Cutter) -> None:
    words = dict(_resolved(model, plan))
    parts = dict(model.named_modules())
    divided = _divided_features(words, parts, cutter)
    for name, word in words.items():
        part: Any = parts[name]
        if word in ("columns", "rows", "gathered") and can_be_divided(part) and getattr(part, "groups", 1) == 1:
            if word == "rows":
                rows(part, cutter, name=name)
            else:
                columns(part, cutter, gathers=word == "gathered", name=name)
        elif word == "columns" and isinstance(part, nn.Dropout) and name.rpartition(".")[0] in divided:
            draws(part, divided[name.rpartition(".")[0]])
        elif word == "rows" and type(part) is nn.Embedding and holds_parameters(part, "weight"):
            vocabulary(part, cutter, name=name)
        elif word == "channels" and (num_channels := _num_channels(part)) >= cutter.num_ranks:
            channels(part, cutter, num_channels)
        elif word == "heads" and is_plain(part):
            divide_attention(part, cutter, name)
        elif word == "heads" and (attention := attention_of(part)) is not None:
            divide_heads(part, attention, cutter, name)
        else:
            what = f"the plan wants {name!r} divided by {word}, which a {type(part).__name__} cannot be"
            fix = (
                "use columns, rows or gathered for linear layers and convolutions without groups, rows for "
                "embeddings, columns for a dropout beside the layers that it stands between, channels for BatchNorm and "
                "depthwise convolutions, heads for attention with separate layers for queries, keys and values"
            )
            raise UsageError(explain(what, fix=fix))


def _num_channels(part: Any) -> int:
    """How many channels the module treats each apart; 0 if it does not."""
    if type(part) in CONVOLUTIONS and holds_parameters(part, "weight", "bias") and part.groups == part.in_channels:
        return int(part.groups)
    is_own = isinstance(part, nn.modules.batchnorm._BatchNorm) and not isinstance(part, nn.SyncBatchNorm)
    return int(part.num_features) if is_own else 0


def _check_shared(model: nn.Module, cutter: Cutter) -> None:
    """Raise if a module that was not divided computes with a matrix of which this rank has a part only."""
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1 and id(parameter) in cutter.cut and id(module) not in cutter.layers:
                what = f"the parameter {own!r} of {name!r} belongs to another layer too, which is divided, and {name!r} is not"
                fix = 'name both in the plan, an embedding as "rows" and the layer that is tied to it as "gathered", or neither'
                raise UsageError(explain(what, fix=fix))


def _divided_features(
    words: Mapping[str, str], parts: Mapping[str, Any], cutter: Cutter
) -> dict[str, tuple[int, Spans, int]]:
    """For each module that holds columns: of which dim which features are this rank's, of how many.

    A module that holds nothing but columns and the rows behind them is told to draw so, unless draws behind the rows could be
    of that size too.
    """
    found = {}
    for owner in {name.rpartition(".")[0] for name, word in words.items() if word == "columns"}:
        held = {name: part for name, part in parts[owner].named_children() if any(True for _ in part.parameters())}
        named = {name: words.get(f"{owner}.{name}".lstrip(".")) for name in held}
        layers = [part for name, part in held.items() if named[name] == "columns" and can_be_divided(part)]
        width = num_features(layers[0])[1] if layers else 0
        if width < cutter.num_ranks:
            continue  # columns tells so
        found[owner] = (feature_dim(layers[0]), cutter.spans(width), width)
        ends = {
            num_features(held[name])[1] for name, word in named.items() if word == "rows" and can_be_divided(held[name])
        } | {num_features(layer)[0] for layer in layers}
        if owner and set(named.values()) == {"columns", "rows"} and not ends & set(cutter.spans_of_all(width).counts):
            draws(parts[owner], found[owner])
        elif len(set(cutter.spans_of_all(width).counts)) > 1 and not any(
            word == "columns" and isinstance(parts[name], nn.Dropout) and name.rpartition(".")[0] == owner
            for name, word in words.items()
        ):
            # Ranks that draw masks of different sizes would draw different masks for all that is whole from then on.
            what = (
                f"the outputs of columns in {owner or 'the model'} are not equally many on all {cutter.num_ranks} ranks"
            )
            fix = "name the dropout between columns and rows too, with the word columns, or choose a width that divides"
            raise UsageError(explain(what, value=width, fix=fix))
    return found


def _resolved(model: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The names of modules that the entries of a plan mean; of two entries for one module the later one counts."""
    names = [name for name, _ in model.named_modules()]
    for entry, word in plan.items():
        if word not in WORDS:
            near = difflib.get_close_matches(str(word), WORDS, 1)
            fix = f"write {near[0]!r}" if near else f"use one of {', '.join(WORDS)}"
            raise UsageError(explain(f"the plan's entry {entry!r} has an unknown word", value=word, fix=fix))
        pattern = re.compile(re.escape(entry).replace(r"\*", r"[^.]+"))
        found = [name for name in names if name and pattern.fullmatch(name)]
        if not found:
            near = difflib.get_close_matches(entry, [_general(name) for name in names if name], 3, 0.4)
            fix = (
                f"did you mean {' or '.join(map(repr, dict.fromkeys(near)))}?"
                if near
                else "look at model.named_modules()"
            )
            raise UsageError(explain("an entry of the plan matches no module of the model", value=entry, fix=fix))
        yield from ((name, word) for name in found)


def _general(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
