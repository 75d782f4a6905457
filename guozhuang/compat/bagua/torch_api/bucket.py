"""``BaguaBucket``: the tensors that are exchanged together, to look at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from guozhuang.errors import explain
from guozhuang.exchange.decentralized import DecentralizedState
from guozhuang.exchange.low_precision_decentralized import RingState

if TYPE_CHECKING:
    from guozhuang.distributed import DistributedDataParallel

    from .algorithms import AlgorithmImpl

NO_CORE = (
    "Guozhuang stands in for Bagua's Python interface; its Rust core (bagua_core) is not there: "
    "derive from GradientExchange or WeightExchange"
)


def get_backend(model_name: str) -> None:
    """Raise the error that says that Bagua's Rust core is not there.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(NO_CORE)


class BaguaBucket:
    """Tensors of one dtype that are exchanged together. ``model.bagua_buckets`` lists those of an algorithm.

    With the algorithm decentralized, ``_peer_weight`` is the last average of weights; with low_precision_decentralized,
    ``_weight``, ``_left_peer_weight`` and ``_right_peer_weight`` are the replicas of this rank's and its neighbours' weights.

    Args:
        tensors: the tensors, at least one.
        name: the name of the bucket.
        flatten: whether to make the tensors views of one storage, with their values.
        alignment: pad the storage with zeros to a multiple of so many elements.
    """

    def __init__(self, tensors: Sequence[Tensor], name: str, flatten: bool, alignment: int = 1) -> None:
        if not tensors or len({t.dtype for t in tensors}) > 1 or alignment < 1:
            what = "a bucket holds at least one tensor, all of one dtype, and its alignment is at least 1"
            value = [str(t.dtype) for t in tensors], alignment
            raise ValueError(explain(what, value=value, fix="make a bucket for each dtype"))
        self.tensors, self.name = list(tensors), name
        rest = sum(t.numel() for t in tensors) % alignment
        self.padding_tensor = tensors[0].new_zeros(alignment - rest) if rest else None
        if flatten:
            self._flatten()

    @property
    def _all(self) -> list[Tensor]:
        return self.tensors if self.padding_tensor is None else [*self.tensors, self.padding_tensor]

    def flattened_tensor(self) -> Tensor:
        """Return a new 1-dimensional tensor of all values, and the padding."""
        return torch.cat([t.detach().reshape(-1) for t in self._all])

    def check_flatten(self) -> bool:
        """Return whether the tensors lie one behind the other in one storage."""
        place = self._all[0].data_ptr()
        for each in self._all:
            if each.data_ptr() != place or not each.is_contiguous():
                return False
            place += each.numel() * each.element_size()
        return True

    def bytes(self) -> int:
        """Return the bytes of the tensors, without the padding."""
        return sum(t.numel() * t.element_size() for t in self.tensors)

    def _flatten(self) -> None:
        flat, begin = self.flattened_tensor(), 0
        for each in self._all:
            each.data = flat[begin : begin + each.numel()].view(each.shape)
            begin += each.numel()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("append_") or name in ("clear_ops", "bagua_backend_tensor"):
            raise NotImplementedError(NO_CORE)
        raise AttributeError(f"a bucket of this algorithm has no attribute {name}")


def buckets_of(
    ddp: DistributedDataParallel, method: AlgorithmImpl, trained: Sequence[tuple[str, nn.Parameter]]
) -> list[BaguaBucket]:
    """Return the buckets that are exchanged: of gradients, or of weights, which are one bucket for each dtype and device.

    Args:
        ddp: exchanges the gradients, unless they stay on each rank.
        method: the method at work.
        trained: names of parameters, and the parameters.
    """
    if ddp.reducer is not None:
        layout = ddp.reducer.named_layout() or [[name for name, _ in trained]]
        held = dict(zip(ddp.reducer.names, ddp.reducer.parameters, strict=True))
        return [
            BaguaBucket([held[name] for name in names], f"bucket_{i}", flatten=False) for i, names in enumerate(layout)
        ]
    state = method.state
    made: list[BaguaBucket] = []
    kinds = dict.fromkeys((p.dtype, p.device) for _, p in trained)
    for i, kind in enumerate(kinds):
        bucket = BaguaBucket([p for _, p in trained if (p.dtype, p.device) == kind], f"bucket_{i}", flatten=False)
        made.append(bucket)
        if isinstance(state, DecentralizedState) and state.lane is not None:
            bucket._peer_weight = state.lane.copies[0][i]  # type: ignore[attr-defined]
        if isinstance(state, RingState):
            for which, name in (("own", "_weight"), ("left", "_left_peer_weight"), ("right", "_right_peer_weight")):
                if which in state.replicas:
                    setattr(bucket, name, state.replicas[which][i])
    return made
