"""Layers of which each rank has a part: by output features ("columns"), by input features ("rows"), by heads.

A layer is changed in place: its parameters are cut, and its class becomes a subclass that enters or leaves the divided region.
The module, its name, its hooks and its Parameter objects stay, so whatever holds one of them need not know.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from typing_extensions import override

from ...errors import UsageError, explain
from ..division import divide, division_of
from ..random import divided, undivided
from ..spans import Span, SpansOfRanks
from . import functions

Spans: TypeAlias = tuple[Span, ...]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
LINEARS = (nn.Linear, NonDynamicallyQuantizableLinear)


class Cutter:
    """Cuts parameters to this rank's parts, each once however many modules hold it.

    Attributes:
        group: the ranks that have the parts.
        index: this rank's number among them.
        num_ranks: how many there are.
        region: what all layers that are divided enter and leave.
        cut: for each parameter or buffer that was cut, by its id, what was cut how.
        layers: the ids of the modules that compute with this rank's parts.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.index, self.num_ranks = group, group.rank(), group.size()
        self.region = TensorRegion(group)
        self.cut: dict[int, tuple[Tensor, int, Spans]] = {}
        self.layers: set[int] = set()
        self.num_whole_elements = 0

    def spans_of_all(self, length: int) -> SpansOfRanks:
        """Return the parts of all ranks; some have one more than others, where the length does not divide."""
        return SpansOfRanks.in_order(length, self.num_ranks)

    def spans(self, length: int, num_pieces: int = 1) -> Spans:
        """Return this rank's part of each of the ``num_pieces`` equal pieces that lie one after the other."""
        size = length // num_pieces
        ((start, stop),) = self.spans_of_all(size).of_ranks[self.index]
        return tuple((piece * size + start, piece * size + stop) for piece in range(num_pieces))

    def __call__(self, tensor: Tensor | None, dim: int, spans: Spans) -> None:
        """Keep these ranges of the tensor's dim; nothing is done for None, and for a tensor that was cut so already."""
        if tensor is None:
            return
        known = self.cut.get(id(tensor))
        if known is not None:
            if known[1:] != (dim, spans):
                what = "a parameter that several layers share would be cut in two ways"
                fix = "cut all of them along one dim: an embedding by rows goes together with a linear layer that is gathered"
                raise UsageError(explain(what, value=tuple(division_of(tensor).shape), fix=fix))  # type: ignore[union-attr]
            return
        self.cut[id(tensor)] = (tensor, dim, spans)
        if isinstance(tensor, nn.Parameter):
            self.num_whole_elements += tensor.numel()
        divide(tensor, dim, spans, self.group)  # type: ignore[arg-type]


class TensorRegion:
    """What lies between the first divided layers and the last one: the same input is entered once for all that read it.

    The query, key and value of attention read one tensor. Entering it once for the three makes one all_reduce of their sum.
    All layers of a model share one region, so that of what was entered and not left, as where torch.utils.checkpoint ends a
    second forward before its last layers, no more than two tensors are kept.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._entered: list[tuple[Tensor, int, Tensor]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorRegion:
        memo[id(self)] = made = TensorRegion(self.group)
        return made

    def enter(self, whole: Tensor) -> Tensor:
        """Return what a divided layer reads: see :func:`functions.enter`."""
        for given, version, entered in self._entered:
            if given is whole and version == whole._version and torch.is_grad_enabled():
                return entered
        entered = functions.enter(whole, self.group)
        if entered is not whole:
            # Two, because attention reads at most two tensors. What a forward that failed left is dropped by later ones.
            self._entered = [*self._entered[-1:], (whole, whole._version, entered)]
        return entered

    def leave(self, addend: Tensor) -> Tensor:
        """Return the sum of the ranks' results: see :func:`functions.summed`."""
        self._entered.clear()
        return functions.summed(addend, self.group)


class Columns:
    """Mixed into a layer of which each rank has some output features; its output is divided, or gathered if asked for."""

    region: TensorRegion
    gathered_spans: SpansOfRanks | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Compute this rank's outputs of the whole input."""
        if self.gathered_spans is None:
            return super().forward(self.region.enter(input))  # type: ignore[misc, no-any-return]
        # No rows follow, which would leave the region.
        divided: Tensor = super().forward(functions.enter(input, self.region.group))  # type: ignore[misc]
        return functions.gathered(divided, feature_dim(self), self.gathered_spans, self.region.group)


class Rows:
    """Mixed into a layer of which each rank has some input features; the bias is whole, and added once after the sum."""

    region: TensorRegion
    bias: Tensor | None
    weight: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Compute the whole output of this rank's part of the input, together with the other ranks."""
        whole = self.region.leave(self._product(input))
        return whole if self.bias is None else whole.add_(self._shaped(self.bias))

    def _product(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight)

    def _shaped(self, bias: Tensor) -> Tensor:
        return bias


class _RowsOfTransposed(Rows):
    """The rows of a layer whose weight is (inputs, outputs)."""

    @override
    def _product(self, input: Tensor) -> Tensor:
        return input @ self.weight


class _RowsOfConvolution(Rows):
    @override
    def _product(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, self.weight, None)  # type: ignore[attr-defined, no-any-return]

    @override
    def _shaped(self, bias: Tensor) -> Tensor:
        return bias.view(-1, *[1] * (self.weight.dim() - 2))


class _Vocabulary(nn.Embedding):
    """An embedding of which each rank has some rows; the sum over ranks has the one that is not zero."""

    region: TensorRegion
    first_row: int

    @override
    def forward(self, input: Tensor) -> Tensor:
        own = input - self.first_row
        is_foreign = (own < 0) | (own >= self.weight.shape[0])
        # What no rank has stays an index out of range, so that every rank raises as one process does.
        is_elsewhere = is_foreign & (input >= 0) & (input < self.num_embeddings)
        found = F.embedding(own.masked_fill(is_elsewhere, 0), self.weight, self.padding_idx)
        return self.region.leave(found.masked_fill(is_foreign.unsqueeze(-1), 0.0))


def is_transposed(layer: nn.Module) -> bool:
    """Whether the layer is Hugging Face's ``Conv1D``: a linear layer whose weight is (inputs, outputs)."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__ == "transformers.pytorch_utils"


def can_be_divided(layer: nn.Module) -> bool:
    """Whether the layer is one that ``columns`` and ``rows`` take: an unchanged linear layer or convolution."""
    is_known = type(layer) in LINEARS or type(layer) in CONVOLUTIONS or is_transposed(layer)
    return is_known and holds_parameters(layer, "weight", "bias")


def holds_parameters(layer: nn.Module, *names: str) -> bool:
    """Whether these are the layer's own parameters, or None, and its forward is that of its class.

    Otherwise something computes them anew before each call, such as ``torch.nn.utils.weight_norm`` and ``prune``.
    """
    return all(name in layer._parameters for name in names) and "forward" not in vars(layer)


def num_features(layer: Any) -> tuple[int, int]:
    """The layer's numbers of input and output features or channels."""
    if is_transposed(layer):
        return int(layer.weight.shape[0]), int(layer.weight.shape[1])
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return layer.in_channels, layer.out_channels


def feature_dim(layer: Any) -> int:
    """Which dim of the layer's output its features or channels are, counted from the end."""
    return 1 - int(layer.weight.dim()) if isinstance(layer, CONVOLUTIONS) else -1


def columns(layer: Any, cutter: Cutter, *, num_pieces: int = 1, gathers: bool = False, name: str = "") -> None:
    """Leave this rank its part of the layer's outputs.

    Args:
        layer: the layer; see :func:`can_be_divided`.
        cutter: what cuts parameters.
        num_pieces: the outputs are that many equal pieces side by side, each of which is divided.
        gathers: whether the output is whole, for what reads it may be anything.
        name: the layer's name, for errors.
    """
    num_outputs = num_features(layer)[1]
    if num_outputs // num_pieces < cutter.num_ranks:
        raise _too_few(name, "outputs", num_outputs // num_pieces, cutter.num_ranks)
    spans = cutter.spans(num_outputs, num_pieces)
    cutter(layer.weight, 1 if is_transposed(layer) else 0, spans)
    cutter(layer.bias, 0, spans)
    own = sum(stop - start for start, stop in spans)
    layer.region = cutter.region
    cutter.layers.add(id(layer))
    if gathers:
        assert num_pieces == 1
        layer.gathered_spans = cutter.spans_of_all(num_outputs)
    if is_transposed(layer):
        layer.nf = own
    elif isinstance(layer, nn.Linear):
        layer.out_features = own
    else:
        layer.out_channels = own
    _become(layer, Columns)


def rows(layer: Any, cutter: Cutter, *, name: str = "") -> None:
    """Leave this rank its part of the layer's inputs; the output is the sum over ranks. Arguments as of :func:`columns`."""
    num_inputs = num_features(layer)[0]
    if num_inputs < cutter.num_ranks:
        raise _too_few(name, "inputs", num_inputs, cutter.num_ranks)
    spans = cutter.spans(num_inputs)
    cutter(layer.weight, 0 if is_transposed(layer) else 1, spans)
    own = spans[0][1] - spans[0][0]
    layer.region = cutter.region
    cutter.layers.add(id(layer))
    if is_transposed(layer):
        layer.nx = own
        _become(layer, _RowsOfTransposed)
    elif isinstance(layer, nn.Linear):
        layer.in_features = own
        _become(layer, Rows)
    else:
        layer.in_channels = own
        _become(layer, _RowsOfConvolution)


def channels(layer: Any, cutter: Cutter, num_channels: int) -> None:
    """Leave this rank its channels of a layer that treats each channel apart: a depthwise convolution or BatchNorm."""
    spans = cutter.spans(num_channels)
    own = spans[0][1] - spans[0][0]
    cutter.layers.add(id(layer))
    if isinstance(layer, CONVOLUTIONS):
        per_channel = layer.out_channels // num_channels
        spans = tuple((start * per_channel, stop * per_channel) for start, stop in spans)
        layer.in_channels, layer.groups, layer.out_channels = own, own, own * per_channel
        cutter(layer.weight, 0, spans)
        cutter(layer.bias, 0, spans)
        return
    layer.num_features = own
    for tensor in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
        cutter(tensor, 0, spans)


def vocabulary(layer: nn.Embedding, cutter: Cutter, *, name: str = "") -> None:
    """Leave this rank its rows of an embedding, whose output stays whole.

    Raises:
        UsageError: the embedding renormalizes, scales by frequency, has sparse gradients, or fewer rows than there are ranks.
    """
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(layer, option):
            what = f"the embedding {name!r} cannot be divided by rows, because of its {option}"
            fix = f"make it without {option}, or leave it out of the plan"
            raise UsageError(explain(what, value=getattr(layer, option), fix=fix))
    if layer.num_embeddings < cutter.num_ranks:
        raise _too_few(name, "rows", layer.num_embeddings, cutter.num_ranks)
    spans = cutter.spans(layer.num_embeddings)
    start, stop = spans[0]
    cutter(layer.weight, 0, spans)
    padding = layer.padding_idx
    layer.padding_idx = padding - start if padding is not None and start <= padding < stop else None
    made: Any = layer
    made.first_row, made.region = start, cutter.region
    cutter.layers.add(id(layer))
    # A subclass that scales what its base class finds, as some model families have, stays in front.
    layer.__class__ = _Vocabulary if type(layer) is nn.Embedding else _joined(type(layer), _Vocabulary)


class _Drawing:
    """Mixed into a module that draws random numbers for this rank's part of activations, or, with ``part`` None, for the whole.

    See :mod:`guozhuang.parallel.random`: what one process draws is drawn, and the part is taken.
    """

    part: tuple[int, Spans, int] | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module itself."""
        with undivided() if self.part is None else divided(*self.part):
            return super().forward(*args, **kwargs)  # type: ignore[misc]


def draws(module: nn.Module | None, part: tuple[int, Spans, int] | None) -> None:
    """Let what draws in a module's forward draw for a part: of which dim, which spans of how many; None: for the whole."""
    if module is not None:
        made: Any = module
        made.part = part
        _become(module, _Drawing)


def sum_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum the gradients of whole parameters that are used inside a divided region, where each rank sees its own part's."""

    def total(gradient: Tensor) -> Tensor:
        dense = gradient.contiguous().clone()
        dist.all_reduce(dense, group=group)
        return dense

    for parameter in parameters:
        is_trained = parameter.requires_grad
        parameter.requires_grad_(True)  # a frozen parameter takes no hook, and may be trained later
        parameter.register_hook(total)
        parameter.requires_grad_(is_trained)


def drop_input(layer: nn.Module, rate: float, part: tuple[int, Spans, int]) -> None:
    """Let dropout act on a layer's input, which is this rank's part: of which dim, which spans of how many."""

    def before(called: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        with divided(*part):
            return (F.dropout(given[0], rate, called.training), *given[1:])

    layer.register_forward_pre_hook(before)


_made: dict[tuple[type, type], type] = {}


def _become(layer: nn.Module, kind: type) -> None:
    layer.__class__ = _joined(kind, type(layer))


def _joined(first: type, second: type) -> type:
    if (first, second) not in _made:
        _made[first, second] = type(
            "".join(each.__name__.removeprefix("_") for each in (first, second)), (first, second), {}
        )
    return _made[first, second]


def _too_few(name: str, what: str, length: int, num_ranks: int) -> UsageError:
    return UsageError(
        explain(
            f"the layer {name!r} has fewer {what} than there are ranks on the axis tp, which is {num_ranks}",
            value=length,
            fix=f"use at most tp={length}, or leave the layer out of the plan",
        )
    )


def check_heads(name: str, heads: Mapping[str, int], num_ranks: int) -> None:
    """Raise ``UsageError`` unless all numbers of heads divide by the ranks; it tells which numbers of ranks would do."""
    if all(number % num_ranks == 0 for number in heads.values()):
        return
    common = math.gcd(*heads.values())
    divisors = [number for number in range(1, common + 1) if common % number == 0]
    found = " and ".join(f"{number} {what}" for what, number in heads.items())
    what = f"the attention {name!r} has {found}, which {num_ranks} ranks of the axis tp cannot divide"
    fix = f"use tp={', '.join(map(str, divisors[:-1]))} or {divisors[-1]}" if common > 1 else "use tp=1"
    raise UsageError(explain(what, fix=fix))
