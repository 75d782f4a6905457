"""The batches of all ranks joined to one, as one process would have it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DistributedSampler as TorchDistributedSampler

from ...data import DistributedSampler
from ...data.stream import StridedStream
from ...generators import kept


class CannotJoinError(Exception):
    """Batches that cannot be joined; the text says why."""


def attempted(make: Callable[[], Any]) -> tuple[Any, str]:
    """Return what a function makes, and ""; or None, and why it cannot.

    The script's own code may fail where it is run once more, or on the samples of all ranks. An audit is no reason to end a
    training, and the other ranks wait for this one.
    """
    try:
        return make(), ""
    except CannotJoinError as error:
        return None, str(error)
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def joined(batches: Sequence[Any], lengths: Sequence[int]) -> Any:
    """Return the batches of all ranks as one: rows of tensors and elements of lists one behind the other.

    Args:
        batches: by rank; all of one structure.
        lengths: how many samples each has; 0: unknown.

    Raises:
        CannotJoinError: they differ in more than the number of samples, or samples do not come first.
    """
    first = batches[0]
    if any(type(each) is not type(first) for each in batches):
        raise CannotJoinError(f"ranks have batches of different types ({', '.join(_kinds(batches))})")
    if isinstance(first, Tensor):
        return _joined_tensors(batches, lengths)
    if isinstance(first, PackedSequence):  # whose rows are sorted by time
        raise CannotJoinError("a PackedSequence has no rows for its samples")
    if isinstance(first, Mapping):
        if any(each.keys() != first.keys() for each in batches):
            raise CannotJoinError("ranks have batches with different keys")
        parts = {key: joined([each[key] for each in batches], lengths) for key in first}
        made: Any = type(first)
        return parts if type(first) is dict else made(parts)
    if isinstance(first, list | tuple):
        if isinstance(first, list) and not any(isinstance(each, Tensor | Mapping | list | tuple) for each in first):
            return [value for each in batches for value in each]  # a value for each sample
        if len({len(each) for each in batches}) > 1:
            raise CannotJoinError("ranks have batches of different structures")
        fields = [joined(some, lengths) for some in zip(*batches, strict=True)]
        made = type(first)
        return made(*fields) if hasattr(first, "_fields") else made(fields)
    if first is None or isinstance(first, bool | int | float | str):
        if any(each != first for each in batches):
            raise CannotJoinError(f"ranks have different values of a whole batch ({first!r})")
        return first
    if type(first).__module__ == "numpy" and hasattr(first, "shape"):
        return _joined_tensors([torch.from_numpy(each) for each in batches], lengths).numpy()
    raise CannotJoinError(f"it is not known how to join batches of type {type(first).__name__}")


def _kinds(batches: Sequence[Any]) -> list[str]:
    return sorted({type(each).__name__ for each in batches})


def _joined_tensors(tensors: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    first = tensors[0]
    if first.dim() == 0:
        if any(each.dim() or bool(each != first) for each in tensors):
            raise CannotJoinError("ranks have different values of a whole batch")
        return first
    if any(each.dtype != first.dtype or each.shape[1:] != first.shape[1:] for each in tensors):
        shapes = ", ".join(str(tuple(each.shape)) for each in tensors)
        raise CannotJoinError(f"samples have different shapes on the ranks: {shapes}")
    if any(length and len(each) != length for each, length in zip(tensors, lengths, strict=True)):
        raise CannotJoinError(f"a tensor of shape {tuple(first.shape)} has no row for each of {lengths[0]} samples")
    return torch.cat([each.detach() for each in tensors])


def num_ranks_of(iterator: Any) -> int:
    """Return how many ranks share the batches of torch's iterator over a DataLoader; 0: that is not known."""
    source = iterator._dataset if isinstance(iterator._dataset, StridedStream) else iterator._index_sampler
    sampler = getattr(source, "sampler", source)
    if getattr(sampler, "ends", "pad") == "uneven":  # some ranks ask for a batch more than others
        return 0
    parts = getattr(source, "parts", None)
    if parts is not None:
        return int(parts.num_ranks)
    shares = isinstance(sampler, StridedStream | DistributedSampler | TorchDistributedSampler)
    return int(sampler.num_replicas) if shares else 0


class Remembered:
    """The indices of the samples in the batches that torch's iterators have asked for and not handed out yet."""

    _ATTRIBUTE = "_guozhuang_indices"

    def note(self, iterator: Any, indices: Any) -> None:
        """Remember the indices of a batch that the iterator asks for."""
        if not iterator._num_yielded and not getattr(iterator, "_send_idx", 0):
            vars(iterator)[self._ATTRIBUTE] = []  # a pass begins
        if self._ATTRIBUTE in vars(iterator):
            vars(iterator)[self._ATTRIBUTE].append(indices)

    def take(self, iterator: Any) -> Any:
        """Return the indices of the batch that the iterator hands out; None if they are not known."""
        waiting = vars(iterator).get(self._ATTRIBUTE)
        return waiting.pop(0) if waiting else None


def samples_of(iterator: Any, indices: Any, batch: Any) -> list[Any]:
    """Return the samples of a batch, read once more from the dataset; the random generators stay as they are.

    Raises:
        CannotJoinError: the dataset cannot be asked, or gives other samples the second time.
    """
    if not isinstance(indices, list) or not iterator._auto_collation or not hasattr(iterator._dataset, "__getitem__"):
        raise CannotJoinError("its samples cannot be read once more")
    with kept():
        samples = [iterator._dataset[index] for index in list.__iter__(indices)]
        again = iterator._collate_fn(samples)
    if not _same(again, batch):
        raise CannotJoinError("the dataset gives other samples when it is asked once more")
    return samples


def collated(iterator: Any, samples: Sequence[Sequence[Any]]) -> Any:
    """Return the batch that one process makes of the samples of all ranks."""
    with kept():
        return iterator._collate_fn([each for some in samples for each in some])


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return pickle.dumps(one) == pickle.dumps(other)
