"""A folder of checkpoints: which are whole, how a new one gets its name, and which older ones are deleted.

[Note: whole or not at all] A checkpoint is written into ``step-N.partial``. All its files are flushed to the disk, then the
manifest with their hashes, then the folder; all is read back and compared; then the folder is renamed to ``step-N``, and the
folder around it is flushed. A rename is atomic, so whatever ends the process, or the machine, a folder named ``step-N`` holds
all of its files. The newest checkpoint is what a listing finds: there is no file that says so and could be wrong. An older
one is deleted only after a newer one has been read back, and gets the ending ``.partial`` before its files go. One that a new
one of the same step replaces is moved aside between two renames; if the process ends there, :meth:`CheckpointFolder.recover`
moves it back.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from guozhuang.checkpoint.files import Facts, broken, read_json, read_tensors, sync_folder, write_json
from guozhuang.checkpoint.schema import MANIFEST_RECORD, PART_RECORD, fault
from guozhuang.errors import CheckpointError, UsageError, explain

FORMAT = "guozhuang checkpoint 1"
MANIFEST = "manifest.json"
LOCK = ".lock"
_LATE_S, _LATE_LOOKS = 3.0, 30  # how long a network file system may take to show a new file, and how often to look
_MAX_MANIFEST_BYTES, _MAX_LOCK_BYTES = 1 << 30, 64
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")
_FILE = re.compile(r"(shared|rank-[0-9]{1,9})\.(json|safetensors)")


class CheckpointFolder:
    """The checkpoints in one folder.

    Args:
        path: the folder; it need not exist before a checkpoint is saved.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))

    def steps(self) -> list[int]:
        """Return the steps of which there is a checkpoint, the newest first; whether they are whole is not known yet.

        Raises:
            UsageError: the path is no folder, or may not be read.
        """
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        except OSError as error:
            what = f"the folder of checkpoints cannot be read: {error.strerror}"
            raise UsageError(explain(what, value=str(self.path), fix="give another folder")) from error
        return sorted((int(m[1]) for name in names if (m := _STEP.fullmatch(name))), reverse=True)

    def of(self, step: int) -> Path:
        """Return the path of a whole checkpoint."""
        return self.path / f"step-{step}"

    def partial(self, step: int) -> Path:
        """Return the path of a checkpoint that is being written or deleted."""
        return self.path / f"step-{step}.partial"

    def begin(self, step: int) -> Path:
        """Make the folder into which a checkpoint is written.

        Raises:
            OSError: it cannot be made.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = self.partial(step)
        _remove(partial)
        partial.mkdir(mode=0o700)
        return partial

    def finish(self, step: int, files: Mapping[str, Facts], about: Mapping[str, Any]) -> None:
        """Make a written checkpoint whole. See [Note: whole or not at all].

        Args:
            step: the step.
            files: the facts about each file in the partial folder.
            about: further entries of the manifest.

        Raises:
            OSError: the disk failed.
            CheckpointError: what was read back is not what was written.
        """
        partial, target = self.partial(step), self.of(step)
        saved_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        body = {"format": FORMAT, "step": step, "saved_at": saved_at, **about, "files": dict(files)}
        write_json(partial / MANIFEST, {**body, "sha256": _own_hash(body)})
        sync_folder(partial)
        verify(partial, step, afresh=True)
        if os.path.lexists(target):  # it was refused when the run was resumed, or the same step is saved again
            os.rename(target, self._replaced(step))
        try:
            os.rename(partial, target)
        finally:
            self.recover()
        sync_folder(self.path)
        _remove(self._replaced(step))

    def give_up(self, step: int) -> None:
        """Remove what was written of a checkpoint that did not become whole."""
        _remove(self.partial(step))

    def _replaced(self, step: int) -> Path:
        return self.path / f"step-{step}.replaced.partial"

    def prune(self, keep: int, step: int) -> None:
        """Delete all but the newest ``keep`` checkpoints up to ``step``, which was read back.

        Those of later steps stay: the run has begun before them because they are not whole, or because it was asked to.
        """
        for older in [each for each in self.steps() if each <= step][keep:]:
            self._discard(self.of(older))

    def recover(self) -> None:
        """Give checkpoints their names back that a run had moved aside for new ones, and that ended before these had theirs."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self.path):
                if (match := re.fullmatch(rf"{_STEP.pattern}\.replaced\.partial", name)) and not os.path.lexists(
                    self.of(int(match[1]))
                ):
                    os.rename(self.path / name, self.of(int(match[1])))

    def clean(self) -> None:
        """Remove the partial folders that an earlier run left."""
        self.recover()
        with contextlib.suppress(OSError):
            for name in os.listdir(self.path):
                if re.fullmatch(rf"{_STEP.pattern}(\.old|\.replaced)?\.partial", name):
                    _remove(self.path / name)

    def _discard(self, checkpoint: Path) -> None:
        leaving = checkpoint.with_name(f"{checkpoint.name}.old.partial")
        _remove(leaving)
        with contextlib.suppress(OSError):
            os.rename(checkpoint, leaving)
            sync_folder(self.path)
            _remove(leaving)


def _remove(path: Path) -> None:
    """Delete what has a name of this program: a folder with its files; of a link, the link and not where it leads."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def hold(path: Path) -> tuple[int | None, str]:
    """Keep other runs on this machine from writing into a folder as long as this process lives.

    Returns:
        A descriptor that holds the lock (None on a file system without locks), and the sign that :func:`sees` looks for.

    Raises:
        UsageError: another run writes into it, it cannot be made, or its lock is a link or no file of this program.
    """
    fix = "give --checkpoint another folder"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path / LOCK, flags, 0o600)
    except OSError as error:
        if (path / LOCK).is_symlink():
            raise UsageError(_foreign_lock(path, "a link")) from error
        what = f"the folder for checkpoints cannot be written to: {error.strerror}"
        raise UsageError(explain(what, value=str(path), fix=fix)) from error
    told = os.fstat(descriptor)
    if not stat.S_ISREG(told.st_mode) or told.st_nlink != 1 or told.st_size > _MAX_LOCK_BYTES:
        os.close(descriptor)
        raise UsageError(_foreign_lock(path, "no file that guozhuang has made"))
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        what = "another run saves checkpoints into this folder"
        raise UsageError(explain(what, value=str(path), fix=f"{fix}, or end the other run")) from error
    except OSError:  # a file system without locks
        has_lock = False
    else:
        has_lock = True
    sign = secrets.token_hex(8)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, sign.encode(), 0)
        os.fsync(descriptor)
    except OSError as error:
        os.close(descriptor)
        what = f"the folder for checkpoints cannot be written to: {error.strerror}"
        raise UsageError(explain(what, value=str(path), fix=fix)) from error
    if not has_lock:
        os.close(descriptor)
    return (descriptor if has_lock else None), sign


def _foreign_lock(path: Path, what: str) -> str:
    """Return the text of an error: a run would overwrite the lock, and so what somebody else has put in its place."""
    what = f"{LOCK} in the folder for checkpoints is {what}, so it is not written"
    return explain(what, value=str(path / LOCK), fix="remove it, or give --checkpoint another folder")


def sees(path: Path, sign: str) -> bool:
    """Tell whether a folder is the one that :func:`hold` gave this sign, for a node that may see new files late."""
    for _ in range(_LATE_LOOKS):
        with contextlib.suppress(OSError):
            descriptor = os.open(path / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if os.read(descriptor, _MAX_LOCK_BYTES) == sign.encode():
                    return True
            finally:
                os.close(descriptor)
        time.sleep(_LATE_S / _LATE_LOOKS)
    return False


def is_checkpoint(path: Path) -> bool:
    """Tell whether a path has the name of one checkpoint."""
    return _STEP.fullmatch(path.name) is not None


def manifest_of(checkpoint: Path, step: int | None = None) -> dict[str, Any]:
    """Read the manifest of a checkpoint.

    Args:
        checkpoint: its folder.
        step: the step that it must be of; None: the one that the folder's name says.

    Raises:
        CheckpointError: there is none, or it is not as it was written.
    """
    if step is None:
        match = _STEP.fullmatch(checkpoint.name)
        if match is None:
            raise CheckpointError(explain("this is no folder of a checkpoint, step-N", value=str(checkpoint)))
        step = int(match[1])
    if checkpoint.is_symlink() or not checkpoint.is_dir():
        raise broken(checkpoint, "it is no folder")
    path = checkpoint / MANIFEST
    if path.is_symlink() or not path.is_file():
        raise broken(checkpoint, f"it has no {MANIFEST}")
    if path.stat().st_size > _MAX_MANIFEST_BYTES:
        raise broken(checkpoint, f"{MANIFEST} is too large")
    try:
        body = json.loads(path.read_bytes())
        own = body.pop("sha256")
        if own != _own_hash(body):
            raise broken(checkpoint, f"{MANIFEST} does not have the contents that were written")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise broken(checkpoint, f"{MANIFEST} cannot be read: {error}") from error
    if body.get("format") != FORMAT:
        raise broken(checkpoint, f"its format is {body.get('format')!r}, and this version reads {FORMAT!r}")
    if found := fault(body, MANIFEST_RECORD, MANIFEST):
        raise broken(checkpoint, found)
    if body["step"] != step:
        raise broken(checkpoint, f"its name says step {step}, its manifest step {body['step']}")
    names_are_plain = all(_FILE.fullmatch(name) for name in body["files"])
    if not names_are_plain:
        raise broken(checkpoint, f"{MANIFEST} names files that no checkpoint has")
    wanted = {"shared", *(f"rank-{rank}" for rank in range(min(body["ranks"], len(body["files"]))))}
    if parts_of(body) != sorted(wanted):
        raise broken(checkpoint, f"{MANIFEST} does not list one part for each of {body['ranks']} ranks")
    return dict(body)


def read_part(
    checkpoint: Path, manifest: Mapping[str, Any], part: str, *, afresh: bool = False
) -> tuple[Any, dict[str, Tensor]]:
    """Read and verify a part of a checkpoint, "shared" or "rank-3"; return its JSON and its tensors.

    Raises:
        CheckpointError: a file is missing or not as it was written.
    """
    files = manifest["files"]
    missing = [name for name in (f"{part}.json", f"{part}.safetensors") if name not in files]
    if missing:
        raise broken(checkpoint, f"its manifest does not list {' and '.join(missing)}")
    tree = read_json(checkpoint, f"{part}.json", files[f"{part}.json"], afresh=afresh)
    if found := fault(tree, PART_RECORD, f"{part}.json"):
        raise broken(checkpoint, found)
    return tree, read_tensors(checkpoint, f"{part}.safetensors", files[f"{part}.safetensors"], afresh=afresh)


def parts_of(manifest: Mapping[str, Any]) -> list[str]:
    """Return the names of the parts of a checkpoint."""
    return sorted({name.partition(".")[0] for name in manifest["files"]})


def verify(checkpoint: Path, step: int | None = None, *, afresh: bool = False) -> dict[str, Any]:
    """Read all of a checkpoint, compare it with its hashes, and return its manifest.

    Args:
        checkpoint: its folder.
        step: the step that it must be of; None: the one that the folder's name says.
        afresh: read from the disk, and not from the memory of the operating system.

    Raises:
        CheckpointError: a file is missing or not as it was written; the text names it.
    """
    manifest = manifest_of(checkpoint, step)
    for part in parts_of(manifest):
        read_part(checkpoint, manifest, part, afresh=afresh)
    return manifest


def _own_hash(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
