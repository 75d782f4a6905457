"""Communicators of mpi4py, where a script gives one instead of a list of ranks. mpi4py is imported only then."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Sequence
from typing import Any, TypeGuard

from guozhuang.errors import UsageError, explain


def is_communicator(given: object) -> TypeGuard[Any]:
    """Tell an mpi4py communicator from a list of ranks."""
    return hasattr(given, "Get_group") and hasattr(given, "Get_size")


def ranks_of(communicator: Any) -> list[int]:
    """Return the ranks of a communicator's members in ``MPI.COMM_WORLD``, in the communicator's order.

    Raises:
        UsageError: mpi4py cannot be imported.
    """
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    except ImportError as error:
        what = f"an MPI communicator was given, and mpi4py cannot be imported: {error}"
        raise UsageError(explain(what, fix="install mpi4py, or give a list of ranks")) from error
    members = list(range(communicator.Get_size()))
    return list(mpi.Group.Translate_ranks(communicator.Get_group(), members, mpi.COMM_WORLD.Get_group()))


def checked(ranks: Sequence[int], size: int, what: str) -> tuple[int, ...]:
    """Return ranks as a tuple.

    Args:
        ranks: of a group of ``size``.
        size: how many ranks there are to choose from.
        what: what they are for; begins the text of the error.

    Raises:
        ValueError: there are none, one comes twice, or one is not among 0 .. size - 1.
        TypeError: one is no whole number.
    """
    chosen = tuple(operator.index(rank) for rank in ranks)
    if not chosen:
        raise ValueError(explain(f"{what} needs at least one rank", value=list(chosen)))
    if len(set(chosen)) != len(chosen):
        raise ValueError(explain(f"{what} names a rank twice", value=list(chosen)))
    if min(chosen) < 0 or max(chosen) >= size:
        raise ValueError(
            explain(f"{what} names a rank that does not exist; there are 0 to {size - 1}", value=list(chosen))
        )
    return chosen
