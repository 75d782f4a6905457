"""Save snapshots in the background: copy the state, then let a thread write it while the training goes on.

[Note: who writes what] Rank 0 writes what all ranks share, and each rank writes what is its own. The threads of the ranks agree
through the store, never by a collective, which would come between those of the training. Rank 0 makes the partial folder and
posts the hashes of its tensors. The others meanwhile hash theirs, and compare their replicas; they leave out those tensors of
their own that equal rank 0's under the same name; they write, and post what they wrote, or why they could not. If every
rank has written, rank 0 makes the checkpoint whole (see [Note: whole or not at all] in folder.py) and posts the outcome.
A save that fails is given up on all ranks: the training goes on, unless replicas differ, which no later step would mend.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from guozhuang.checkpoint.files import Facts, digest, write_json, write_tensors
from guozhuang.checkpoint.folder import CheckpointFolder
from guozhuang.checkpoint.state import Flat
from guozhuang.errors import CheckpointError, MismatchError, explain
from guozhuang.groups.serial import SerialThread, SerialWork
from guozhuang.net.client import look_s
from guozhuang.net.ended import ended_with_0
from guozhuang.units import listed, shown_path
from guozhuang.units import size as shown_size

# The longest wait of one rank for the files of another one: a disk of 1 MB/s takes so long for 1.8 GB.
LIMIT_S = 1800.0
_LOOK_S = 0.5  # seconds between two looks whether the rank that is waited for has ended
_MAX_NAMED = 5
_log = logging.getLogger("guozhuang")


class Board:
    """Short texts that ranks post for each other under names; each rank reads without waiting inside the store.

    Args:
        store: a store for this purpose only; None for one rank.
        rank: this rank.
        size: the number of ranks.
    """

    def __init__(self, store: dist.Store | None, rank: int, size: int) -> None:
        self.rank, self.size, self._store = rank, size, store
        self._own: dict[str, str] = {}

    def post(self, name: str, value: Any) -> None:
        """Post a value that JSON can hold, under a name that is new."""
        text = json.dumps(value)
        if self._store is None:
            self._own[name] = text
        else:
            self._store.set(name, text)

    def read(self, name: str, limit_s: float, peer: int) -> Any:
        """Wait for a value.

        Raises:
            CheckpointError: rank ``peer`` did not post it within ``limit_s`` seconds, or it has ended with exit code 0.
        """
        began, next_look_s = time.monotonic(), _LOOK_S
        while not self._is_posted(name):
            waited_s = time.monotonic() - began
            if waited_s > limit_s:
                what = f"rank {peer} did not answer within {limit_s:g} s while a checkpoint was saved"
                raise CheckpointError(explain(what, value=name, rank=self.rank, fix="look at that rank's disk and log"))
            if waited_s >= next_look_s and self._store is not None:
                next_look_s = waited_s + _LOOK_S
                if peer in ended_with_0(self._store) and not self._is_posted(name):  # posted before it ended
                    what = f"rank {peer} ended with exit code 0, and others save a checkpoint"
                    fix = "let every rank call gz.save, or train, equally often"
                    raise CheckpointError(explain(what, value=name, rank=self.rank, fix=fix))
            time.sleep(look_s(waited_s, self.size))
        return json.loads(self._own[name] if self._store is None else self._store.get(name))

    def forget(self, *names: str) -> None:
        """Remove values that every rank has read."""
        for name in names:
            if self._store is None:
                self._own.pop(name, None)
            else:
                self._store.delete_key(name)

    def _is_posted(self, name: str) -> bool:
        return name in self._own if self._store is None else self._store.check([name])


@dataclass
class Snapshot:
    """Copies of what one rank saves.

    Attributes:
        step: the step.
        shared: what all ranks share; on ranks other than 0 their replicas of its tensors, to be compared.
        own: what is this rank's own.
        about: entries of the manifest.
    """

    step: int
    shared: Flat
    own: Flat
    about: dict[str, Any]


@dataclass
class _Save:
    """One save in the background, and its outcome once its work has ended: two empty texts if the checkpoint is whole.

    ``number`` tells it from other saves of the same step, which there are after a restore of an older one.
    """

    number: int
    step: int
    failure: str = ""
    differ: str = ""


class Saver:
    """Takes snapshots of this rank and writes them in a thread, one at a time.

    Args:
        folder: where checkpoints go.
        board: how the ranks' threads agree.
        keep: how many checkpoints stay; None: all.
        write: writes a file of tensors; tests replace it.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        board: Board,
        keep: int | None,
        write: Callable[..., Facts] = write_tensors,
    ) -> None:
        self.folder, self.board, self._keep, self._write = folder, board, keep, write
        self._thread = SerialThread("guozhuang checkpoint")
        self._staged: dict[str, Tensor] = {}
        self._num_saves = 0
        self._save: _Save | None = None
        self._work: SerialWork | None = None
        self._names: list[list[str]] = []  # what was posted for the last saves
        self._last_whole: int | None = None
        self._is_clean = False

    @property
    def is_busy(self) -> bool:
        """Whether a save is still being written."""
        return self._work is not None and not self._work.is_completed()

    def start(self, step: int, shared: Flat, own: Flat, replicated: bool, about: dict[str, Any]) -> None:
        """Copy the state and begin to write the copy. Not while a save is being written.

        Args:
            step: the step that was completed.
            shared: what all ranks share.
            own: what is this rank's own.
            replicated: whether ranks other than 0 have replicas of the shared tensors.
            about: entries of the manifest.
        """
        assert not self.is_busy
        self._num_saves += 1
        is_saved = self.board.rank == 0 or replicated
        copies = self._stage({**(shared.tensors if is_saved else {}), **own.tensors})
        snapshot = Snapshot(
            step,
            Flat(shared.tree, {key: copies[key] for key in shared.tensors} if is_saved else {}),
            Flat(own.tree, {key: copies[key] for key in own.tensors}),
            about,
        )
        save = self._save = _Save(self._num_saves, step)
        self._work = self._thread.run(lambda: self._run(save, snapshot))

    def _stage(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors into memory that is used again for each save: new pages would cost more time than the copy."""
        before, self._staged = self._staged, {}
        for key, tensor in tensors.items():
            place = before.get(key)
            if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype:
                place = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._staged[key] = place.copy_(tensor)
        return self._staged

    def wait(self, limit_s: float | None = None) -> None:
        """Wait until the save in progress has ended.

        Args:
            limit_s: give up waiting after so many seconds; the thread goes on.
        """
        if self._work is not None:
            self._work.wait(datetime.timedelta(seconds=limit_s or 0))

    def outcome(self) -> str:
        """Return why the last save was given up; "" if it succeeded, is in progress, or there was none.

        Raises:
            MismatchError: the replicas of the ranks differ; the text names ranks and parameters.
        """
        save = self._save
        if save is None or self.is_busy:
            return ""
        self._save = None if save.failure or save.differ else save
        if save.differ:
            raise MismatchError(save.differ)
        return save.failure

    # ---- what runs in the thread -------------------------------------------------------------------------------------------

    def _run(self, save: _Save, snapshot: Snapshot) -> None:
        began = time.monotonic()
        try:
            self._save_all(save, snapshot) if self.board.rank == 0 else self._save_mine(save, snapshot)
        except Exception as error:
            save.failure = _why(error)
        if self.board.rank != 0:
            return
        if save.failure or save.differ:
            self.folder.give_up(snapshot.step)
            last = (
                "there is none yet"
                if self._last_whole is None
                else f"the last one is {shown_path(self.folder.of(self._last_whole))}"
            )
            _log.warning("the checkpoint of step %d was given up: %s; %s", save.step, save.failure or save.differ, last)
        else:
            self._last_whole = snapshot.step
            size = sum(tensor.nbytes for part in (snapshot.shared, snapshot.own) for tensor in part.tensors.values())
            took_s = time.monotonic() - began
            _log.info("saved %s in %.1f s: %s", shown_path(self.folder.of(save.step)), took_s, shown_size(size))
        try:
            self.board.post(f"{save.number}/outcome", {"failure": save.failure, "differ": save.differ})
        except RuntimeError as error:  # the store is gone, and with it the other ranks
            save.failure = save.failure or str(error)

    def _save_all(self, save: _Save, snapshot: Snapshot) -> None:
        """Rank 0: write what is shared and its own, wait for the others, and make the checkpoint whole."""
        board, step = self.board, snapshot.step
        self._forget_older()
        digests: dict[str, str] = {}
        failure = ""
        files: dict[str, Facts] = {}
        try:
            if not self._is_clean:
                self.folder.clean()
                self._is_clean = True
            partial = self.folder.begin(step)
            if board.size > 1:
                digests = _digests(snapshot)
        except Exception as error:
            failure = _why(error)
        names = [
            f"{save.number}/hashes",
            f"{save.number}/outcome",
            *(f"{save.number}/written/{rank}" for rank in range(1, board.size)),
        ]
        self._names.append(names)
        if board.size > 1:
            kinds = {key: _kind(tensor) for key, tensor in snapshot.own.tensors.items()}
            board.post(names[0], {"failure": failure, "digests": digests, "kinds": kinds, "plain": _plain(snapshot)})
        if not failure:
            try:
                for name, part in (("shared", snapshot.shared), ("rank-0", snapshot.own)):
                    files |= self._write_part(partial, name, part, digests)
            except Exception as error:
                failure = _why(error)
        differ = []
        for rank in range(1, board.size):
            told = board.read(f"{save.number}/written/{rank}", LIMIT_S, rank)
            if told["failure"]:
                failure = failure or f"rank {rank}: {told['failure']}"
            if told["differ"]:
                differ.append((rank, told["differ"]))
            files |= told["files"]
        if differ:
            save.differ = _difference(differ)
        elif failure:
            save.failure = failure
        else:
            self.folder.finish(step, files, snapshot.about)
            if self._keep is not None:
                self.folder.prune(self._keep, step)

    def _save_mine(self, save: _Save, snapshot: Snapshot) -> None:
        """Another rank: compare the replicas with rank 0's, and write what is this rank's own."""
        board = self.board
        told: dict[str, Any] = {"failure": "", "differ": [], "files": {}}
        digests: dict[str, str] = {}
        try:
            digests = _digests(snapshot)  # while rank 0 hashes its own
        except Exception as error:
            told["failure"] = _why(error)
        theirs = board.read(f"{save.number}/hashes", LIMIT_S, 0)
        if not theirs["failure"] and not told["failure"]:
            try:
                known = theirs["digests"]
                told["differ"] = [key for key in snapshot.shared.tensors if digests[key] != known.get(key)]
                if snapshot.shared.tensors and theirs["plain"] != _plain(snapshot):
                    told["differ"].append("plain values of the optimizer, as learning rates")
                if not told["differ"]:
                    told["files"] = self._write_own(snapshot, digests, known, theirs["kinds"])
            except Exception as error:
                told["failure"] = _why(error)
        board.post(f"{save.number}/written/{board.rank}", told)
        outcome = board.read(f"{save.number}/outcome", 2 * LIMIT_S, 0)
        save.failure, save.differ = outcome["failure"], outcome["differ"]

    def _write_own(
        self, snapshot: Snapshot, digests: Mapping[str, str], known: Mapping[str, str], kinds: Mapping[str, str]
    ) -> dict[str, Facts]:
        rank = self.board.rank
        partial = self.folder.partial(snapshot.step)
        if not partial.is_dir():
            what = f"{socket.gethostname()} does not see the folder that rank 0 made"
            raise CheckpointError(explain(what, value=str(partial), fix="give a folder that all nodes share"))
        as_rank_0 = {key: f"rank-0{key.removeprefix(f'rank-{rank}')}" for key in snapshot.own.tensors}
        own = snapshot.own.tensors
        same = {
            key: theirs
            for key, theirs in sorted(as_rank_0.items())
            if known.get(theirs) == digests[key] and kinds.get(theirs) == _kind(own[key])
        }
        kept = {key: tensor for key, tensor in own.items() if key not in same}
        return self._write_part(partial, f"rank-{rank}", Flat(snapshot.own.tree, kept), digests, same)

    def _write_part(
        self, partial: Path, name: str, part: Flat, digests: Mapping[str, str], as_rank_0: Mapping[str, str] = {}
    ) -> dict[str, Facts]:
        """Write a part; ``as_rank_0`` maps keys of tensors that are left out to the keys of rank 0's equal ones."""
        tree = {"tree": part.tree, "as_rank_0": dict(as_rank_0)}
        return {
            f"{name}.json": write_json(partial / f"{name}.json", tree),
            f"{name}.safetensors": self._write(partial / f"{name}.safetensors", part.tensors, digests),
        }

    def _forget_older(self) -> None:
        """Remove what was posted two saves ago: every rank has read it, because it takes part in this save."""
        while len(self._names) > 1:
            self.board.forget(*self._names.pop(0))


def _digests(snapshot: Snapshot) -> dict[str, str]:
    return {key: digest(t) for part in (snapshot.shared, snapshot.own) for key, t in part.tensors.items()}


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _plain(snapshot: Snapshot) -> str:
    """Return the hash of the shared values that are no tensors and must be equal on all ranks."""
    return hashlib.sha256(json.dumps(snapshot.shared.tree["trained"], sort_keys=True).encode()).hexdigest()


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror or error}{where}"
    return str(error)


def _difference(differ: list[tuple[int, list[str]]]) -> str:
    lines = []
    for rank, keys in differ:
        names = [key.removeprefix("shared/trained/") for key in keys]
        lines.append(f"rank {rank}: {listed(names, _MAX_NAMED)}")
    what = "replicas that must be equal on all ranks differ from rank 0's, so no checkpoint was saved: " + "; ".join(
        lines
    )
    fix = "look for code that changes weights on some ranks only, or for failing memory; go on from the last checkpoint"
    return explain(what, fix=fix)
