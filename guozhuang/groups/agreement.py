"""Compare values that must be equal on all ranks, before a collective on unequal ones would hang or corrupt memory.

The comparison uses the group's key-value store, not a collective: values may differ in size, the wait has a limit,
and when the limit passes the error names the ranks that are missing.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import Store

from ..errors import MismatchError, explain, rank_table
from ..net.client import attempt, within
from ..net.store import next_part
from . import roll_call

STORE_S = 1.5  # the limit of one request to the store when a step has failed: the store's host may be what was lost


def agree(
    group: dist.ProcessGroup,
    what: str,
    lines: Sequence[str],
    timeout_s: float,
    fix: str,
    look: Callable[[], object] = lambda: None,
) -> None:
    """Raise on every rank unless ``lines`` is the same on all ranks of the group. Every rank must call it.

    Args:
        group: the ranks that compare.
        what: the name of the compared values, for the error: "the parameters of the model".
        lines: this rank's description, one item per line.
        timeout_s: seconds to wait for the other ranks.
        fix: advice for the user whose ranks differ.
        look: called every 0.2 s while ranks are missing; it raises if the missing ranks have ended.

    Raises:
        MismatchError: ranks differ; the text has a table with each rank's version of the first line that differs.
        WorldError: a rank did not join within the time; the text names it.
    """
    size = group.size()
    if size == 1:
        return
    rank = group.rank()
    store, behind = store_of(group), f"the store in which the ranks compare {what}"
    # The store counts each rank's calls: the n-th calls of all ranks belong together, and use keys with this number.
    turn = within(timeout_s, behind, lambda: store.add(f"guozhuang/agree/turns/{rank}", 1), rank=rank)
    prefix = f"guozhuang/agree/{turn}"
    digest = hashlib.sha256("\n".join([what, *lines]).encode()).hexdigest()

    def gather(kind: str, card: str) -> list[str]:
        topic, purpose = f"{prefix}/{kind}", f"to compare {what}"

        def call() -> list[str]:
            who = members_of(group)
            return roll_call.call(
                store, topic, rank, size, card, timeout_s, look=lambda *_: look(), purpose=purpose, members=who
            )

        # The call names the ranks that are late. The longer limit is for a store that does not answer, as behind a cut cable.
        return within(timeout_s + STORE_S, behind, call, rank=rank)

    digests = gather("digest", digest)
    if turn > 2:
        for kind in ("digest", "text"):
            roll_call.forget(store, f"guozhuang/agree/{turn - 2}/{kind}", rank)
    if len(set(digests)) > 1:
        texts = [text.split("\n") for text in gather("text", "\n".join([what, *lines]))]
        raise MismatchError(_difference(what, texts, rank, fix))


def store_of(group: dist.ProcessGroup) -> Store:
    """Return the key-value store of a group; groups do not see each other's keys.

    Exception: a group made without ``new_group`` uses the store of the default group.
    """
    # PyTorch has no public function that returns a group's store.
    known = dist.distributed_c10d._world.pg_map
    default = dist.group.WORLD
    assert default is not None, "there is no process group"
    _, store = known[group] if group in known else known[default]
    return store


def members_of(group: dist.ProcessGroup) -> list[int]:
    """Return the number that each rank of a group has in the world; [] of a group that torch.distributed does not know."""
    return dist.get_process_group_ranks(group) if group in dist.distributed_c10d._world.pg_map else []


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _limited(function: Callable[..., Any], *arguments: Any) -> Any:
    return attempt(STORE_S, functools.partial(function, *arguments))


class StoreNotices:
    """Notices (short texts) that ranks write to a store for each other when a step has failed.

    Readers ask for the number of notices, and for the notices themselves only if there are new ones: ranks that wait may read
    every second, and one process serves them all.

    Args:
        store: a store used for this purpose only.
        rank: this process.
        size: number of ranks.
        call: calls a method of the store with its arguments; ``Client.call``, where each answer needs a limit of its own.
    """

    def __init__(self, store: Store, rank: int, size: int, call: Callable[..., Any] = _call) -> None:
        self._store, self._rank, self._size, self._call = store, rank, size, call

    def leave(self, step: int, text: str) -> None:
        """Write this rank's notice about a step; do nothing if the store is gone."""
        with contextlib.suppress(RuntimeError):
            self._call(self._store.set, f"{step}/{self._rank}", text)
            # Last, so that a rank that reads the new count also finds the notice.
            self._call(self._store.add, f"{step}/count", 1)

    def read(
        self, step: int, patience_s: float, is_enough: Callable[[dict[int, str]], bool] = lambda found: False
    ) -> dict[int, str]:
        """Return the notices about a step, by rank, of all ranks that wrote one.

        Return those that were read so far if the store is gone with the process that hosted it, or answers too late.

        Args:
            step: only notices about this step are read; notices are never withdrawn.
            patience_s: the longest wait for ranks that have written none, in seconds.
            is_enough: returns True for notices that make further ones unnecessary; the wait then ends.
        """
        keys = {rank: f"{step}/{rank}" for rank in range(self._size)}
        deadline = time.monotonic() + patience_s
        found: dict[int, str] = {}
        while True:
            try:
                if self._call(self._store.add, f"{step}/count", 0) > len(found):
                    for rank in [rank for rank in keys if rank not in found]:
                        if self._call(self._store.check, [keys[rank]]):
                            found[rank] = self._call(self._store.get, keys[rank]).decode()
            except RuntimeError:  # the store is gone: DistNetworkError or DistStoreError
                return found
            if len(found) == self._size or time.monotonic() >= deadline or is_enough(found):
                return found
            time.sleep(0.02)


class StepNotices(StoreNotices):
    """The notices that the ranks of a group leave for each other about failed steps; see ``StoreNotices``.

    A store that does not answer, as behind a cut cable, is given up after ``STORE_S`` seconds.

    Args:
        group: the ranks.
        topic: a name for the subject of the notices. Every rank must construct the notices of a topic in the same order.
    """

    def __init__(self, group: dist.ProcessGroup, topic: str) -> None:
        super().__init__(next_part(store_of(group), topic, group.rank()), group.rank(), group.size(), _limited)


def _difference(what: str, texts: Sequence[list[str]], rank: int, fix: str) -> str:
    longest = max(len(text) for text in texts)
    padded = [text + ["(nothing)"] * (longest - len(text)) for text in texts]
    first = next(i for i in range(longest) if len({text[i] for text in padded}) > 1)
    rows = [(r, len(texts[r]) - 1, text[first]) for r, text in enumerate(padded)]
    place = "what is compared" if first == 0 else f"item {first - 1}"
    table = rank_table(("rank", "items", f"first difference ({place})"), rows)
    return f"{explain(f'ranks differ in {what}', rank=rank, fix=fix)}\n{table}"
