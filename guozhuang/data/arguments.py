"""Checks what ``gz.loader`` is given: batch sizes, shares, samplers, and options of torch's DataLoader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import IterableDataset

from guozhuang.data.progress import whole_number
from guozhuang.data.sampler import Ends
from guozhuang.errors import UsageError, explain


def whole_batch(
    batch_size: int | None, global_batch_size: int | None, num_replicas: int, *, is_divided: bool
) -> int | None:
    """Return how many samples a batch of all ranks together has; None if the dataset makes the batches."""
    if global_batch_size is None:
        return None if batch_size is None else num_replicas * whole_number("batch_size", batch_size, least=1)
    whole = whole_number("global_batch_size", global_batch_size, least=1)
    if batch_size != 1:
        what = "`batch_size` counts per rank and `global_batch_size` all ranks together; both were given"
        raise UsageError(explain(what, value=(batch_size, whole), fix="pass one of the two"))
    if is_divided and whole < num_replicas:
        what = f"`global_batch_size` has fewer samples than there are ranks, {num_replicas}, so a rank would get none"
        raise UsageError(explain(what, value=whole, fix=f"a global batch of {num_replicas} samples is enough"))
    if whole % num_replicas and not is_divided:
        near = f"{max(whole - whole % num_replicas, num_replicas)} or {whole + num_replicas - whole % num_replicas}"
        what = f"`global_batch_size` is no multiple of the number of ranks, {num_replicas}, so shares would differ"
        raise UsageError(explain(what, value=whole, fix=f"pass {near}, or start another number of ranks"))
    return whole


def why_equal(dataset: object, whole: int | None, batch_sampler: object, ends: Ends) -> str:
    """Return why the batches of a loader cannot be divided into unequal parts: a clause; "" if they can."""
    if isinstance(dataset, IterableDataset):
        return "an IterableDataset cannot be cut by index"
    if batch_sampler is not None or whole is None:
        return "the " + ("dataset" if batch_sampler is None else "batch sampler") + " makes the batches of single ranks"
    if ends == "uneven":
        return 'with ends="uneven" ranks get batches of their own, while parts of a batch use each sample once anyway'
    return ""


def check_given(
    sampler: object, batch_sampler: object, shuffle: bool | None, batch_size: int | None, drop_last: bool
) -> None:
    """Raise UsageError if a sampler or batch sampler was given with what it decides itself."""
    if sampler is not None and batch_sampler is not None:
        raise UsageError(explain("`sampler` and `batch_sampler` were both given", fix="pass one of the two"))
    name = "batch_sampler" if sampler is None else "sampler"
    if shuffle:
        what = f"`shuffle=True` was given, and `{name}` decides the order"
        raise UsageError(explain(what, fix="pass one of the two"))
    if batch_sampler is not None and (batch_size != 1 or drop_last):
        what = "`batch_sampler` makes the batches, so their size and the smaller last one are its own"
        fix = "leave batch_size, global_batch_size and drop_last out"
        raise UsageError(explain(what, value=(batch_size, drop_last), fix=fix))


def check_options(options: Mapping[str, Any]) -> None:
    """Raise UsageError for options of torch's DataLoader with which a resume would not hold."""
    if options.get("generator") is not None:
        what = "`generator` was given, but shuffle and workers are seeded by `seed`"
        raise UsageError(explain(what, fix="pass seed=... instead"))
    if not options.get("in_order", True):
        what = "`in_order=False` gives batches out of order, so that a state could not say which were used"
        raise UsageError(explain(what, fix="leave it out"))
