"""The functions that scripts call: ``save``, ``restore``, ``epochs``, ``keep``, and saves that the command line asks for."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from guozhuang.checkpoint.folder import CheckpointFolder, hold, is_checkpoint, sees
from guozhuang.checkpoint.kept import Values, is_stateful
from guozhuang.checkpoint.reading import read
from guozhuang.checkpoint.saver import Board, Saver
from guozhuang.checkpoint.schedule import SaveTimes
from guozhuang.checkpoint.state import Flat, TrainingState, of_all, place
from guozhuang.errors import CheckpointError, UsageError, explain
from guozhuang.groups.subgroups import timeout_s
from guozhuang.net.end_request import EndRequest
from guozhuang.net.store import next_part
from guozhuang.registry import registry
from guozhuang.units import shown_path
from guozhuang.watch.processes import ENDED_BY_SIGTERM
from guozhuang.world import before_leaving, requested_checkpoint
from guozhuang.world.torchrun import store_of_launcher
from guozhuang.world.versions import default_store

_log = logging.getLogger("guozhuang")
# How long a process that ends because of an error waits for the save in progress.
_LAST_S = 2.0


@dataclass
class _Saving:
    """What this process has saved and restored.

    Attributes:
        savers: by their folders.
        schedule: when to save without being asked; None before :func:`begin`, or if it was not requested.
        folder: where the schedule saves.
        end_request: on rank 0, the launcher's request to save and end; None where no launcher could make one.
        has_skipped: whether a save was left out because of a slow disk; that is said once.
        has_begun: whether the requested checkpoint was looked for.
        restored_from: the path that was given to the last :func:`restore`.
        num_loops: how many loops of :func:`epochs` have begun.
        lock: a descriptor that holds the folder's lock.
        watched: models whose forwards begin a step where no ``gz.loader`` does.
    """

    savers: dict[Path, Saver] = field(default_factory=dict)
    schedule: SaveTimes | None = None
    folder: Path | None = None
    end_request: EndRequest | None = None
    has_begun: bool = False
    has_skipped: bool = False
    restored_from: Path | None = None
    num_loops: int = 0
    lock: int | None = None
    watched: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)

    @property
    def state(self) -> TrainingState:
        """What is saved."""
        return TrainingState()


_saving = _Saving()


def keep(**values: Any) -> Values:
    """Name what else changes while the script trains, so that checkpoints hold it. Call it before ``epochs`` or ``restore``.

    Args:
        **values: objects with ``state_dict`` and ``load_state_dict`` (schedulers, scalers, averages; in a script that wraps its
            model itself also the model and the optimizer), which are restored in place; or numbers, texts, None, tensors, and
            lists and dicts of these.

    Returns:
        The values as attributes, all that were ever given: ``kept = gz.keep(best=0.0)``, then ``kept.best = accuracy``. Set the
        attribute to change a value; after a resume it is what it was.

    Raises:
        UsageError: a value is of a type that a checkpoint cannot hold.
    """
    begin_session()
    for name, value in values.items():
        if not is_stateful(value):
            Flat.of(value, name)  # raises now, and not at the first save
        if isinstance(value, torch.optim.Optimizer):
            value.register_step_post_hook(registry.stepped)
        setattr(_saving.state.values, name, value)
    return _saving.state.values


def epochs(num_epochs: int, **values: Any) -> Iterator[int]:
    """Iterate over the numbers of epochs, from 0 or where a restored checkpoint stopped. Every rank must call it.

    Under ``guozhuang run --checkpoint DIR`` the first loop restores the newest whole checkpoint of DIR before its first epoch,
    so everything must have been prepared and kept by then. Checkpoints are saved between steps as asked, and after the last
    epoch. An epoch that was interrupted comes again; ``gz.loader`` gives its remaining batches. If the launcher gets SIGTERM
    meanwhile, all ranks save after the same step, and end with SystemExit.

    Args:
        num_epochs: how many epochs the whole training has.
        **values: what else changes while the script trains, as for :func:`keep`: ``gz.epochs(3, scheduler=scheduler)``.

    Raises:
        CheckpointError: DIR holds checkpoints, and none of them is whole.
        UsageError: the checkpoint does not fit the model, the optimizer or the dataset.
    """
    keep(**values)
    begin()
    state, loop = _saving.state, _saving.num_loops
    _saving.num_loops += 1
    state.epochs += [0] * (loop + 1 - len(state.epochs))
    last_saved = state.step
    request = _saving.end_request
    with contextlib.nullcontext() if request is None else request.awaited():
        for epoch in range(state.epochs[loop], num_epochs):
            state.epochs[loop], state.is_in_epoch = epoch, True
            yield epoch
            state.epochs[loop], state.is_in_epoch = epoch + 1, False
            if any(loader.sampler.ends == "uneven" for loader in registry.loaders):
                # A rank without a batch takes part in the pause of the others.
                registry.has_stepped = any(of_all(registry.has_stepped))
            registry.pause()
        if _saving.folder is not None and state.step > last_saved:
            with contextlib.suppress(CheckpointError):  # the log has said why; the training itself is complete
                save(_saving.folder)
        if _saving.folder is not None and of_all(request is not None and request.is_made())[0]:
            _end(_saver(_saving.folder))  # the request came after the last check


def save(folder: str | os.PathLike[str], *, wait: bool = True) -> None:
    """Save a checkpoint ``folder/step-N`` of everything that was registered. Every rank must call it, after the same step.

    Call it between two steps: when the optimizer, the schedulers and averages have stepped, and gradients were set to None.
    Under an exchange of weights (``diloco``, ``local-sgd``, ``decentralized``) the ranks' weights are made equal first.

    Args:
        folder: where checkpoints are; the same on all ranks, seen by all nodes.
        wait: return when the checkpoint is on the disk and was read back. False: return when the state has been copied; if a
            save into this folder is still being written, wait for that one first.

    Raises:
        CheckpointError: it could not be saved (only with ``wait``; otherwise the log says so).
        MismatchError: replicas differ between ranks; the text names ranks and parameters.
        UsageError: nothing is registered, or a value cannot be saved.
    """
    begin_session()
    saver = _saver(Path(os.path.abspath(folder)))
    saver.wait()
    saver.outcome()
    _start(saver)
    if wait:
        saver.wait()
        if failure := saver.outcome():
            raise CheckpointError(explain(f"the checkpoint could not be saved: {failure}", value=str(folder)))


def restore(folder: str | os.PathLike[str]) -> int | None:
    """Restore the newest whole checkpoint of a folder. Every rank must call it, after ``prepare``, ``loader`` and ``keep``.

    Everything is read and compared with its hashes before anything is changed. A checkpoint that is not whole is left out,
    with a line in the log, and the next older one is taken. The number of ranks and the strategy may be others than in the
    saved run.

    Args:
        folder: of the checkpoints, or of one of them (``.../step-500``); all nodes must see it.

    Returns:
        The number of steps that were made; None if the folder holds no checkpoint.

    Raises:
        CheckpointError: there are checkpoints, and none is whole.
        UsageError: the checkpoint does not fit the model, the optimizer or the dataset; nothing was changed.
    """
    begin_session()
    path = Path(os.path.abspath(folder))
    found = CheckpointFolder(path)
    rank, _ = place()
    if is_checkpoint(path):
        found, steps = CheckpointFolder(path.parent), [int(path.name[5:])]
    else:
        steps = _steps_of_first(found)
    _saving.restored_from = path
    seen = of_all(not steps or found.of(steps[0]).is_dir())
    if seen[0] and not all(seen):
        what = f"rank {seen.index(False)} does not see the checkpoints that rank 0 sees"
        raise UsageError(explain(what, value=str(path), rank=rank, fix="give a folder that all nodes share"))
    reasons = []
    for step in steps:
        checkpoint = found.of(step)
        parts, failure = read(checkpoint)
        failures = [text for text in of_all(failure) if text]
        if failures:
            reasons.append(failures[0])
            if rank == 0:
                _log.warning("%s It is left out.", failures[0])
            continue
        assert parts is not None
        _apply(checkpoint, *parts)
        return step
    if reasons:
        what = f"none of the {len(reasons)} checkpoints in {found.path} is whole: {reasons[0]}"
        raise CheckpointError(explain(what, fix="move the folder away to begin anew, or copy a whole checkpoint back"))
    return None


def _steps_of_first(folder: CheckpointFolder) -> list[int]:
    """Return the steps that rank 0 finds in a folder. Every rank must call it."""
    found: list[int] | str = []
    if place()[0] == 0:
        try:
            folder.recover()
            found = folder.steps()
        except UsageError as error:
            found = str(error)
    theirs = of_all(found)[0]
    if isinstance(theirs, str):
        raise UsageError(theirs)
    return list(theirs)


def _apply(checkpoint: Path, shared: Any, own: Any, first: Any, manifest: dict[str, Any]) -> None:
    """Restore a whole checkpoint on all ranks, or on none."""
    state, (rank, _) = _saving.state, place()
    try:
        state.check_together(shared, own)
        notes = state.restore(shared, own, first, manifest)
    except UsageError as error:
        raise UsageError(f"{checkpoint}: {error}") from error
    of_all("")  # under ``sharded`` ranks share memory: none goes on before all have written
    if rank == 0:
        _log.warning("goes on from %s, saved %s", shown_path(checkpoint), manifest["saved_at"])
        for note in notes:
            _log.warning("%s: %s", checkpoint.name, note)


# ---- saves that `guozhuang run --checkpoint` asks for ---------------------------------------------------------------------


def begin() -> None:
    """Restore the checkpoint that ``guozhuang run --checkpoint`` names, once, and save to it from now on. Collective."""
    begin_session()
    asked = requested_checkpoint()
    if _saving.has_begun:
        return
    _saving.has_begun = True
    if asked is None:
        return
    _saving.folder = Path(asked.folder)
    failure = sign = ""
    rank, _ = place()
    if rank == 0:
        try:
            _saving.lock, sign = hold(_saving.folder)
        except UsageError as error:
            failure = str(error)
    failure, sign = of_all((failure, sign))[0]
    if failure:
        raise UsageError(failure)
    hosts = of_all("" if sees(_saving.folder, sign) else f"rank {rank} on {socket.gethostname()}")
    if blind := [who for who in hosts if who]:
        what = f"the folder for checkpoints is not one and the same for all ranks: {blind[0]} does not see rank 0's"
        raise UsageError(
            explain(what, value=str(_saving.folder), fix="give --checkpoint a folder that all nodes share")
        )
    for note in _saving.state.forgotten() if rank == 0 else ():
        _log.warning("%s", note)
    # What the script restored itself from elsewhere is where the training began; where it stopped comes before that.
    began = _saving.restored_from
    if began is None or (
        _saving.folder not in (began, began.parent) and _steps_of_first(CheckpointFolder(_saving.folder))
    ):
        restore(_saving.folder)
    board, must_end = _saver(_saving.folder).board, None
    if rank == 0 and (store := default_store() if board.size > 1 else store_of_launcher()) is not None:
        _saving.end_request = EndRequest(store)
        must_end = _saving.end_request.is_made
    _saving.schedule = SaveTimes(asked.every_steps, asked.every_s, board, _limit_s(), must_end)


def begin_session() -> None:
    """Let this module count the steps of what was prepared, and wait for saves when the process ends."""
    if registry.on_pause is None:
        registry.on_pause = _on_pause
        before_leaving(_leave)
        atexit.unregister(_leave)
        atexit.register(_leave)  # for scripts that make the process group themselves
    _watch()


TrainingState._begin_session = begin_session


def _on_pause() -> None:
    state = _saving.state
    state.step += 1
    for saver in _saving.savers.values():
        saver.outcome()
    if requested_checkpoint() is not None and not _saving.has_begun:
        what = "a checkpoint was asked for, and the script began to train without looking for the last one"
        fix = "write `for epoch in gz.epochs(n)` in place of `range(n)`, after everything was prepared"
        raise UsageError(explain(what, value="--checkpoint", fix=fix))
    schedule = _saving.schedule
    if schedule is not None and _saving.folder is not None and schedule.is_due(state.step):
        saver, (rank, _) = _saver(_saving.folder), place()
        board = saver.board
        if rank == 0:
            board.post(f"go/{schedule.num_steps}", schedule.is_last or not saver.is_busy)
        if board.read(f"go/{schedule.num_steps}", _limit_s(), 0):
            saver.wait()
            schedule.saved()
            _start(saver)
            if schedule.is_last:
                _end(saver)
            return
        _saving.state.settle()
        if rank == 0:
            what = "no checkpoint of step %d was saved: the one before is still being written, so the disk is too slow for %s"
            _log.log(logging.DEBUG if _saving.has_skipped else logging.WARNING, what, state.step, schedule)
            _saving.has_skipped = True


def _end(saver: Saver) -> NoReturn:
    """End this process when the save in progress has ended, because the launcher got SIGTERM. Every rank must call it."""
    if _saving.end_request is not None:
        _saving.end_request.is_obeyed = True
    saver.wait()
    saver.outcome()
    where = saver.folder.of(_saving.state.step)
    if place()[0] == 0 and where.is_dir():  # otherwise the log says already why it is not
        _log.warning(
            "the run was asked to end, and %s is saved; the same command goes on from there", shown_path(where)
        )
    raise SystemExit(ENDED_BY_SIGTERM)


def _start(saver: Saver) -> None:
    shared, own, replicated = _saving.state.capture()
    saver.start(shared.tree["step"], shared, own, replicated, _saving.state.about())


def _saver(path: Path) -> Saver:
    """Return the saver of a folder. Every rank must call it."""
    if path not in _saving.savers:
        rank, size = place()
        store = next_part(default_store(), "checkpoint", rank) if size > 1 else None
        asked = requested_checkpoint()
        keeps = asked.keep if asked is not None and Path(asked.folder) == path else None
        _saving.savers[path] = Saver(CheckpointFolder(path), Board(store, rank, size), keeps)
    return _saving.savers[path]


def _watch() -> None:
    """Let forwards of the models begin a step in a script whose batches come from another loader than ``gz.loader``."""
    kept = [value for value in vars(_saving.state.values).values() if isinstance(value, torch.nn.Module)]
    for model in [*(each.model for each in registry.trained), *kept]:
        if model not in _saving.watched:
            _saving.watched.add(model)
            model.register_forward_pre_hook(_on_forward)


def _on_forward(model: torch.nn.Module, inputs: Any) -> None:
    if not registry.loaders and model.training and torch.is_grad_enabled():
        registry.pause()


def _limit_s() -> float:
    return timeout_s(dist.group.WORLD) if dist.group.WORLD is not None else 0.0


def _leave() -> None:
    """Wait for saves in progress, and forget everything; called when the world is left."""
    for saver in _saving.savers.values():
        with contextlib.suppress(Exception):
            saver.wait(_LAST_S if getattr(sys, "last_value", None) is not None else None)
    if _saving.lock is not None:
        os.close(_saving.lock)
    registry.clear()
    TrainingState.forget()
    vars(_saving).update(vars(_Saving()))
