"""Models of known structure: the layers of PyTorch's transformer, and model families of the package ``transformers``.

A family's modules are known by their folder there and by the names of their parts; nothing of that package is imported. A
module that has other parts than the plan knows is left whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import nn

from ...errors import UsageError, explain
from .attention import divide_attention, is_plain
from .layers import (
    Cutter,
    can_be_divided,
    check_heads,
    columns,
    draws,
    drop_input,
    num_features,
    rows,
    sum_gradients,
    vocabulary,
)

FAMILIES = (
    *("albert", "bart", "bert", "camembert", "distilbert", "electra", "gemma", "gpt2", "llama", "mbart", "mistral"),
    *("modernbert", "mt5", "opt", "qwen2", "qwen3", "roberta", "t5", "vit", "xlm_roberta"),
)
#: Elementwise functions that stand between the two layers of PyTorch's transformer.
_ACTIVATIONS = (F.relu, F.gelu, F.silu, F.leaky_relu, F.elu)
_HEAD_SIZES = ("attention_head_size", "head_dim", "key_value_proj_dim")
_COUNTS = (
    *("num_heads", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads"),
    *("all_head_size", "inner_dim", "split_size"),
)


@dataclass(frozen=True)
class Attention:
    """How a kind of attention is divided by heads.

    Attributes:
        columns: the layers that make queries, keys and values, as paths below the module.
        rows: the layer that reads the joined heads.
        owner: the path of the module whose forward handles the heads; "" is the module itself.
        packed: whether a layer's output is several pieces side by side, such as queries, keys and values.
        per_head: embeddings with a column for each head.
        shared: whole modules that are applied to each head.
        after: dropouts behind ``rows``, in the owner's forward.
    """

    columns: tuple[str, ...]
    rows: str
    owner: str = ""
    packed: bool = False
    per_head: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class FeedForward:
    """Layers by columns, elementwise functions, and a layer by rows.

    Attributes:
        columns: the layers that read the input; several if their outputs are multiplied.
        rows: the layer that reads the result.
        packed: whether the output of the first is several pieces side by side that are multiplied.
        between: dropouts between them.
        rate: the attribute that says with which probability the module drops features between them by a function.
    """

    columns: tuple[str, ...]
    rows: str
    packed: bool = False
    between: tuple[str, ...] = ()
    rate: str = ""


ATTENTIONS = (
    Attention(("self.query", "self.key", "self.value"), "output.dense", owner="self"),
    Attention(("query", "key", "value"), "dense", after=("output_dropout",)),
    Attention(("q_lin", "k_lin", "v_lin"), "out_lin"),
    Attention(("c_attn",), "c_proj", packed=True, after=("resid_dropout",)),
    Attention(("c_attn", "q_attn"), "c_proj", packed=True, after=("resid_dropout",)),
    Attention(("q", "k", "v"), "o", per_head=("relative_attention_bias",)),
    Attention(("q_proj", "k_proj", "v_proj"), "o_proj", shared=("q_norm", "k_norm")),
    Attention(("q_proj", "k_proj", "v_proj"), "out_proj"),
    Attention(("Wqkv",), "Wo", packed=True, after=("out_drop",)),
)
FEED_FORWARDS = (
    FeedForward(("intermediate.dense",), "output.dense"),
    FeedForward(("ffn",), "ffn_output"),
    FeedForward(("lin1",), "lin2"),
    FeedForward(("c_fc",), "c_proj"),
    FeedForward(("wi",), "wo", between=("dropout",)),
    FeedForward(("wi_0", "wi_1"), "wo", between=("dropout",)),
    FeedForward(("fc1",), "fc2", rate="activation_dropout"),
    FeedForward(("Wi",), "Wo", packed=True, between=("drop",)),
    FeedForward(("gate_proj", "up_proj"), "down_proj"),
)


def _part(module: nn.Module, path: str) -> Any:
    for name in path.split(".") if path else ():
        module = getattr(module, name, None)  # type: ignore[assignment]
    return module


def _all_are_layers(module: nn.Module, pattern: Attention | FeedForward) -> bool:
    return all(can_be_divided(_part(module, path)) for path in (*pattern.columns, pattern.rows))


def attention_of(module: nn.Module) -> Attention | None:
    """Return how the module is divided by heads; None if it is no attention of a known structure."""
    for pattern in ATTENTIONS:
        owner = _part(module, pattern.owner)
        if owner is None or not _all_are_layers(module, pattern):
            continue
        known = {f"{pattern.owner}.{path}".lstrip(".") for path in (*pattern.per_head, *pattern.shared)}
        known |= {*pattern.columns, pattern.rows}
        inside = f"{pattern.owner}." if pattern.owner else ""
        with_parameters = {
            inside + name for name, part in owner.named_children() if any(True for _ in part.parameters())
        }
        has_own = any(True for _ in owner.parameters(recurse=False))
        others = {name for name in with_parameters - known if not (name == "LayerNorm" and pattern.rows == "dense")}
        if others or has_own or _head_size(owner) is None:
            continue
        norms = [_part(owner, path) for path in pattern.shared]
        if all(norm is None or norm.weight.shape == (_head_size(owner),) for norm in norms):
            return pattern
    return None


def feed_forward_of(module: nn.Module) -> FeedForward | None:
    """Return how the module's two layers are divided; None if it has none of a known structure."""
    return next((pattern for pattern in FEED_FORWARDS if _all_are_layers(module, pattern)), None)


def _head_size(owner: nn.Module) -> int | None:
    return next((getattr(owner, name) for name in _HEAD_SIZES if hasattr(owner, name)), None)


def divide_heads(module: nn.Module, pattern: Attention, cutter: Cutter, name: str) -> None:
    """Leave this rank its heads of the attention.

    Raises:
        UsageError: the heads, or the heads of keys and values, do not divide by the ranks.
    """
    owner, joined = _part(module, pattern.owner), _part(module, pattern.rows)
    head_size, width = _head_size(owner), num_features(joined)[0]
    assert head_size is not None
    layers = [(path, _part(module, path)) for path in pattern.columns]
    pieces = [max(1, num_features(layer)[1] // width) if pattern.packed else 1 for _, layer in layers]
    counts = [num_features(layer)[1] // number // head_size for (_, layer), number in zip(layers, pieces, strict=True)]
    num_heads = width // head_size
    heads = {"heads": num_heads}
    if min(counts) < num_heads:
        heads["heads of keys and values"] = min(counts)
    check_heads(name, heads, cutter.num_ranks)
    _check_counts(name, owner, num_heads)
    for (path, layer), number in zip(layers, pieces, strict=True):
        columns(layer, cutter, num_pieces=number, name=f"{name}.{path}")
    rows(joined, cutter, name=f"{name}.{pattern.rows}")
    for path in pattern.per_head:
        embedding = _part(owner, path)
        if embedding is not None:
            cutter(embedding.weight, 1, cutter.spans(num_heads))
            cutter.layers.add(id(embedding))
            embedding.embedding_dim = num_heads // cutter.num_ranks
    for path in pattern.shared:
        norm = _part(owner, path)
        if norm is not None:
            sum_gradients(list(norm.parameters()), cutter.group)
    for path in pattern.after:
        draws(_part(owner, path), None)
    for count in _COUNTS:
        if isinstance(getattr(owner, count, None), int):
            setattr(owner, count, getattr(owner, count) // cutter.num_ranks)
    draws(owner, (-3, cutter.spans(num_heads), num_heads))  # attention probabilities: (samples, heads, tokens, tokens)


def _check_counts(name: str, owner: nn.Module, num_heads: int) -> None:
    """Raise if the module may keep its number of heads under a name that is not known, and would not learn its own part's."""
    counts = {attribute: value for attribute, value in vars(owner).items() if type(value) is int and value == num_heads}
    if counts and not set(counts) & set(_COUNTS) and not is_known(owner):
        what = f"it cannot be told where the attention {name!r} keeps its number of heads, {num_heads}"
        fix = f"call it {_COUNTS[0]} in {type(owner).__name__}, or leave the attention out of the plan"
        raise UsageError(explain(what, value="perhaps in " + ", ".join(counts), fix=fix))


def divide_feed_forward(module: nn.Module, pattern: FeedForward, cutter: Cutter, name: str) -> None:
    """Leave this rank its part of the features between the two layers."""
    last = _part(module, pattern.rows)
    width = num_features(last)[0]
    for path in pattern.columns:
        layer = _part(module, path)
        pieces = num_features(layer)[1] // width if pattern.packed else 1
        columns(layer, cutter, num_pieces=pieces, name=f"{name}.{path}")
    rows(last, cutter, name=f"{name}.{pattern.rows}")
    for path in pattern.between:
        draws(_part(module, path), (-1, cutter.spans(width), width))
    if rate := getattr(module, pattern.rate, 0.0) if pattern.rate else 0.0:
        # Of the module's own draws it could not be told which are between the two: so the layer behind them draws instead.
        setattr(module, pattern.rate, 0.0)
        drop_input(last, rate, (-1, cutter.spans(width), width))


def is_known(module: nn.Module) -> bool:
    """Whether the module belongs to one of the families whose structure stands here."""
    package, _, rest = type(module).__module__.partition(".models.")
    return package == "transformers" and rest.partition(".")[0] in FAMILIES


def divide_known(model: nn.Module, cutter: Cutter) -> Iterator[nn.Module]:
    """Divide what is of a known structure; yield each module that was handled, with all below it.

    Raises:
        UsageError: heads do not divide by the ranks.
    """
    for name, module in list(model.named_modules()):
        if is_plain(module):
            divide_attention(module, cutter, name)
            yield module
        if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            if _divide_transformer_layer(module, cutter, name):
                yield module
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # its layers' fast path would be taken; see _divide_transformer_layer
        if not is_known(module):
            continue
        if (attention := attention_of(module)) is not None:
            divide_heads(module, attention, cutter, name)
            yield module
        if (pair := feed_forward_of(module)) is not None:
            divide_feed_forward(module, pair, cutter, name)
            yield module
    if is_known(model) and hasattr(model, "get_input_embeddings"):
        _divide_vocabulary(model, cutter)


def _divide_transformer_layer(layer: Any, cutter: Cutter, name: str) -> bool:
    if isinstance(layer, nn.TransformerEncoderLayer):
        layer.activation_relu_or_gelu = 0  # turns off the fast path, which reads the parameters of all parts by itself
    base = nn.TransformerEncoderLayer if isinstance(layer, nn.TransformerEncoderLayer) else nn.TransformerDecoderLayer
    is_elementwise = layer.activation in _ACTIVATIONS or type(layer.activation).__module__.startswith("torch.nn.")
    own = [each for kind in type(layer).__mro__[: type(layer).__mro__.index(base)] for each in vars(kind).values()]
    names = {name for each in own for name in getattr(getattr(each, "__code__", None), "co_names", ())}
    calls_parts = bool(names & {"linear1", "linear2"})  # a subclass puts other things between them
    if type(layer)._ff_block is not base._ff_block or calls_parts or not is_elementwise:
        return False
    pair = FeedForward(("linear1",), "linear2", between=("dropout",))
    if not _all_are_layers(layer, pair):
        return False
    divide_feed_forward(layer, pair, cutter, name)
    return True


def _divide_vocabulary(model: Any, cutter: Cutter) -> None:
    """Divide the embedding of tokens, and the layer that gives each token its score, which is often tied to it."""
    embedding, scores = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or embedding.num_embeddings < cutter.num_ranks:
        return
    holders = {
        name: module
        for name, module in model.named_modules()
        if any(own is embedding.weight for own in module.parameters(recurse=False))
    }
    embeddings = {name: module for name, module in holders.items() if isinstance(module, nn.Embedding)}
    if any(name not in embeddings and module is not scores for name, module in holders.items()):
        return
    if scores is not None and not can_be_divided(scores):
        return
    for name, module in embeddings.items():
        vocabulary(module, cutter, name=name)
    if scores is not None and num_features(scores)[1] >= cutter.num_ranks:
        name = next(name for name, module in model.named_modules() if module is scores)
        columns(scores, cutter, gathers=True, name=name)
