"""``TrainingState``: everything that a training needs to go on exactly, as one object with a state.

[Note: what a resumed run needs] A run that goes on from a checkpoint makes the same bits as one that was not interrupted if it
has: weights and all buffers, also those that ``state_dict`` leaves out; the optimizer's state and groups; the exchange's
state, its step and its layout of buckets, which decides the order of sums; schedulers, scalers and averages (``gz.keep``);
the position of each loader, counted in batches that were trained on; the epoch; the generators of torch, of the accelerator, of
``random`` and of numpy, of each rank; and the same versions, kernels and numbers of threads, which are recorded and compared.
What is a rank's own is saved under the rank's name; of ranks that are more than were saved, rank r takes what rank r modulo n
had, but for the generators, which stay as the script seeded them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from guozhuang.checkpoint import trained as of_trained
from guozhuang.checkpoint.kept import Objects, RestoresItself, Values, is_stateful, objects_of, set_values, state_of
from guozhuang.checkpoint.process import machine, set_generators, states_of_generators
from guozhuang.checkpoint.schema import state_fault
from guozhuang.checkpoint.tree import flatten, unflatten
from guozhuang.errors import CheckpointError, UsageError, explain
from guozhuang.groups.agreement import agree
from guozhuang.groups.subgroups import timeout_s
from guozhuang.registry import Stateful, registry

_log = logging.getLogger("guozhuang")
_T = TypeVar("_T")
# What a checkpoint holds of a model, besides its optimizer.
_OF_MODULE = frozenset({"parameters", "buffers", "extra"})


def place() -> tuple[int, int]:
    """Return this rank and the number of ranks; (0, 1) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


@dataclass
class Flat:
    """A part of a checkpoint: what all ranks share, or what is one rank's own.

    Attributes:
        tree: the state as JSON, in which keys stand for tensors.
        tensors: the tensors by their keys.
    """

    tree: Any
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, state: Any, path: str) -> Flat:
        """Flatten a state; its tensors are not copied."""
        tensors: dict[str, Tensor] = {}
        return cls(flatten(state, path, tensors), tensors)

    @property
    def state(self) -> Any:
        """The state that was flattened."""
        return unflatten(self.tree, self.tensors)


class TrainingState(Stateful):
    """The state of the whole training, which ``gz.prepare``, ``gz.loader``, ``gz.keep`` and ``gz.epochs`` have registered.

    ``state_dict`` and ``load_state_dict`` make it usable by ``torch.distributed.checkpoint``. Every rank must call them. The
    weights are tensors there; all else is bytes, of which each rank has its own under its own name.

    There is one in a process: every call of the class returns it, until the world is left.

    Attributes:
        step: the number of steps that were made since the state was first asked for, by its class or by a function such as
            ``gz.keep``; after a resume those of the saved run count too. See [Note: between two steps] in registry.py.
        values: what ``gz.keep`` was given.
        epochs: for each loop of ``gz.epochs``, in the order of their beginnings, how many epochs are complete.
        is_in_epoch: whether the script is inside an epoch, which comes again after a resume; None: it counts epochs itself.
    """

    _only: ClassVar[TrainingState | None] = None
    _begin_session: ClassVar[Callable[[], None]]  # that of run.py, which counts steps; it stands on this module

    step: int
    values: Values
    epochs: list[int]
    is_in_epoch: bool | None
    _later: list[Any]  # states of loaders that the script has not made yet

    def __new__(cls) -> TrainingState:
        """Return the state of this process."""
        if cls._only is None:
            cls._only = made = super().__new__(cls)
            made.step, made.values, made.epochs, made.is_in_epoch, made._later = 0, Values(), [], None, []
            cls._begin_session()
        return cls._only

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a copy be the state of the process in which it is made, of which there is one."""
        return TrainingState, ()

    @classmethod
    def forget(cls) -> None:
        """Let the next call begin anew, because the world was left."""
        cls._only = None

    # ---- taking it ---------------------------------------------------------------------------------------------------------

    def capture(self, everywhere: bool = False) -> tuple[Flat, Flat, bool]:
        """Return what all ranks share and what is this rank's own, without copies. Every rank must call it between two steps.

        Args:
            everywhere: return the whole shared part on every rank, also if ranks hold parts of it.

        Returns:
            The shared part; this rank's part; and whether each rank holds replicas of the shared tensors. If not, the shared
            part is complete on rank 0 only, unless it was wanted everywhere.

        Raises:
            UsageError: nothing is registered, or a value is of a type that cannot be saved.
        """
        self._check()
        rank, _ = place()
        with torch.no_grad():
            found = [of_trained.capture(each, everywhere or rank == 0) for each in registry.trained]
            for (shared_part, own_part, _), (first, _, _) in zip(found, _of_same_module(found), strict=True):
                if first is not shared_part:  # a model with several optimizers is saved with the first of them
                    for state in (shared_part, own_part):
                        for key in _OF_MODULE & state.keys():
                            del state[key]
            shared = {
                "step": self.step + registry.has_stepped,  # the pause of a step that was made may be still to come
                "epochs": self.epochs,
                "loaders": [self._position(loader) for loader in registry.loaders],
                "trained": [each[0] for each in found],
            }
            own = {
                "trained": [each[1] for each in found],
                "kept": {name: state_of(value) for name, value in vars(self.values).items()},
                "generators": states_of_generators(),
            }
        return Flat.of(shared, "shared"), Flat.of(own, f"rank-{rank}"), all(each[2] for each in found)

    def _position(self, loader: Any) -> dict[str, Any]:
        found: dict[str, Any] = (
            loader.state_dict() if self.is_in_epoch is None else loader.state_to_go_on(self.is_in_epoch)
        )
        return found

    def settle(self) -> None:
        """Do what taking the state does to the training: make weights equal that are exchanged now and then. Collective.

        It is called where a save is due and left out because of a slow disk, so that the disk does not change the training.
        """
        for each in registry.trained:
            of_trained.settle(each)

    def about(self) -> dict[str, Any]:
        """Return what the manifest of a checkpoint says about the run, and what decides which kernels compute."""
        return {
            "ranks": place()[1],
            "strategies": [each.strategy for each in registry.trained],
            "machine": machine(),
        }

    def forgotten(self) -> list[str]:
        """Return what is seen of the training that a checkpoint would not hold: sentences for the log."""
        found = []
        kept = [getattr(value, "optimizer", None) for value in vars(self.values).values()]
        for each in registry.trained:
            both = (each.optimizer, getattr(each.optimizer, "inner", None))
            is_scheduled = any(getattr(getattr(one, "step", None), "_wrapped_by_lr_sched", False) for one in both)
            if is_scheduled and not any(one is mine for one in kept for mine in both if mine is not None):
                what = "a learning-rate scheduler changes the optimizer, and checkpoints do not hold it"
                found.append(explain(what, fix="call gz.keep(scheduler=scheduler) before gz.epochs or gz.restore"))
        if not registry.loaders:
            what = (
                "no gz.loader was made before the first epoch: batches of another loader have no position to be saved"
            )
            found.append(explain(what, fix="take gz.loader, or the epoch that was interrupted begins anew"))
        return found

    def _check(self) -> None:
        if not registry.trained and not vars(self.values):
            what = "there is nothing to save: no model was prepared by gz.prepare, and gz.keep was given nothing"
            fix = "where the script wraps its model itself, call gz.keep(model=model, optimizer=optimizer) first"
            raise UsageError(explain(what, fix=fix))

    # ---- restoring it ------------------------------------------------------------------------------------------------------

    def check(self, shared: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Raise unless a saved state fits what is registered; change nothing.

        Raises:
            UsageError: another model, optimizer or dataset was saved; the text says what differs.
        """
        self._check()
        mine = registry.trained
        if len(mine) != len(shared["trained"]):
            what = f"the checkpoint holds {len(shared['trained'])} prepared models, and gz.prepare was called {len(mine)} times"
            raise UsageError(explain(what, fix="call gz.prepare as in the saved run, before gz.epochs or gz.restore"))
        for each, theirs, its_own in zip(mine, *_completed(shared, own), strict=True):
            of_trained.check(each, theirs, its_own)
        for name, value in vars(self.values).items():
            if name in own["kept"] and is_stateful(value) != own["kept"][name]["stateful"]:
                what = f"gz.keep({name}=...) was given another kind of value than when the checkpoint was saved"
                raise UsageError(explain(what, value=type(value).__name__, fix="keep the same objects"))
        positions = [(loader, loader.state_dict()) for loader in registry.loaders]
        try:
            for loader, state in zip(registry.loaders, shared["loaders"], strict=False):
                loader.load_state_dict(state)  # raises if it has other data
        finally:
            for loader, position in positions:
                loader.load_state_dict(position)

    def check_together(self, shared: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Raise on all ranks unless the saved state fits what is registered on each; change nothing. Every rank must call it.

        Raises:
            UsageError: see :meth:`check`.
        """
        failure: UsageError | None = None
        try:
            self.check(shared, own)
        except UsageError as error:
            failure = error
        raise_together(str(failure or ""), failure)

    def restore(
        self, shared: Mapping[str, Any], own: Mapping[str, Any], first: Mapping[str, Any], about: Mapping[str, Any]
    ) -> list[str]:
        """Set everything that is registered to a state that :meth:`check` has accepted. Every rank must call it.

        Args:
            shared: what all ranks share.
            own: what was saved on this rank, or on the one that takes its place.
            first: what was saved on rank 0, for what was each rank's own and is shared here.
            about: what :meth:`about` returned in the saved run.

        Returns:
            What could not be restored, and what differs from the saved run so that bits may differ: sentences for the log.

        Raises:
            UsageError: an object of the script does not take its state, on this or another rank; nothing was changed on any.
            MismatchError: replicas differ between ranks after all; the text names the first that does.
        """
        rank, size = place()
        notes = []
        mine = self.about()
        (all_shared, all_own), (_, all_first) = _completed(shared, own), _completed(shared, first)
        _restore_objects(objects_of(self.values, own["kept"], zip(registry.trained, all_own, strict=True)))
        for i, each in enumerate(registry.trained):
            all_own[i], made_one = of_trained.make_one(each, all_own[i], all_first[i])
            if made_one and about["ranks"] > 1:
                what = f"each rank had its own {' and '.join(made_one)} under {about['strategies'][i]}"
                notes.append(f"{what}; all ranks go on with those of rank 0, because {each.strategy} shares them")
            same = (mine["ranks"], each.strategy) == (about["ranks"], about["strategies"][i])
            if left_out := of_trained.restore(each, all_shared[i], all_own[i], same):
                notes.append(f"{left_out} was left out, because it belongs to {about['ranks']} ranks")
            if switched := of_trained.switched(each, all_shared[i]):
                notes.append(f"requires_grad was set otherwise when it was saved, and stays as it is here: {switched}")
        notes += set_values(self.values, own["kept"])
        self.step, self.epochs = shared["step"], list(shared["epochs"])
        self._load_loaders(shared["loaders"])
        registry.has_stepped = False
        self._compare_replicas()
        differ = [f"{key} ({theirs} then, {mine['machine'].get(key)} now)" for key, theirs in about["machine"].items()
                  if mine["machine"].get(key) != theirs]  # fmt: skip
        if differ:
            notes.append(f"bits may differ from the saved run's, because these differ: {', '.join(differ)}")
        if rank < about["ranks"]:
            set_generators(own["generators"])  # last: nothing after it draws
        for each in registry.trained:
            if hasattr(type(each.model), "draw_alike"):
                each.model.draw_alike()  # the states may be of ranks that had other places
        if size != about["ranks"]:
            notes.append(
                f"it was saved by {about['ranks']} ranks and goes on with {size}: sums have another order of terms"
            )
        return notes

    def _compare_replicas(self) -> None:
        group = dist.group.WORLD if place()[1] > 1 else None
        if group is not None:
            lines = [f"{i}: {line}" for i, each in enumerate(registry.trained) for line in of_trained.replicas(each)]
            fix = "look for a disk or a memory that fails; each rank has read its own copy of the files"
            agree(group, "the restored weights and optimizers", lines, timeout_s(group), fix)

    def _load_loaders(self, states: list[Any]) -> None:
        loaders = registry.loaders
        for loader, state in zip(loaders, states, strict=False):
            loader.load_state_dict(state)
        self._later = states[len(loaders) :]
        registry.on_loader = self._on_loader if self._later else None

    def _on_loader(self, loader: Any) -> None:
        """Restore a loader that is made after its state was read, by a script that makes a new loader in each epoch."""
        if self._later:
            loader.load_state_dict(self._later.pop(0))

    # ---- the interface of torch.distributed.checkpoint ---------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in the form that ``torch.distributed.checkpoint`` saves. Every rank must call it."""
        from safetensors.torch import save

        shared, own, _ = self.capture(everywhere=True)
        rank, _ = place()
        weights = {key: shared.tensors.pop(key) for key in list(shared.tensors) if "/parameters/" in key}
        packed = {}
        for name, part in (("shared", shared), (f"rank-{rank}", own)):
            tensors = {key: tensor.cpu().contiguous().clone() for key, tensor in part.tensors.items()}
            packed[name] = save(tensors, {"tree": json.dumps(part.tree)})
        packed["about"] = json.dumps(self.about()).encode()
        return {"weights": weights, **packed}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned on this rank. Every rank must call it, with the saved number of ranks.

        Raises:
            CheckpointError: it is not what :meth:`state_dict` returned; the text names the entry that differs.
            UsageError: another model, optimizer or dataset was saved, or this rank's own state is missing.
        """
        from safetensors.torch import load

        rank, _ = place()
        name = f"rank-{rank}"
        if name not in state_dict:
            what = "the state holds nothing of this rank: it was saved by fewer ranks"
            raise UsageError(explain(what, rank=rank, fix="start as many ranks, or use gz.save and gz.restore"))
        about = json.loads(state_dict["about"])
        parts = []
        for text, more in ((state_dict["shared"], state_dict["weights"]), (state_dict[name], {})):
            tensors = load(text)  # checks the header
            length = int.from_bytes(text[:8], "little")
            tree = json.loads(json.loads(text[8 : 8 + length])["__metadata__"]["tree"])
            parts.append(Flat(tree, {**tensors, **{k: v.clone() for k, v in more.items()}}).state)
        if found := state_fault(*parts):
            raise CheckpointError(explain(f"the state is not one that can be restored: {found}", rank=rank))
        self.check_together(*parts)
        first = [parts[1]]
        if place()[1] > 1:
            dist.broadcast_object_list(first)
        for note in self.restore(parts[0], parts[1], first[0], about):
            _log.warning("%s", note)


def of_all(value: Any) -> list[Any]:
    """Return every rank's value, in the order of ranks. Every rank must call it."""
    _, size = place()
    found: list[Any] = [value] * size
    if size > 1:
        dist.all_gather_object(found, value)
    return found


def raise_together(failure: str, cause: Exception | None) -> None:
    """Raise a UsageError on all ranks if one of them has a failure, a sentence. Every rank must call it."""
    failures = of_all(failure)
    if any(failures):
        which = next(i for i, text in enumerate(failures) if text)
        raise UsageError(failures[which] + ("" if failure else f" (on rank {which})")) from cause


def _restore_objects(some: Iterable[RestoresItself]) -> None:
    """Restore the objects of all ranks, or none. See [Note: the script's objects first] in kept.py. Every rank must call it."""
    objects = Objects(some)
    failure, cause = objects.restore()
    if any(of_all(failure)) and (lost := objects.go_back()):
        failure = f"{failure or 'an object of another rank cannot'}; and what these had before could not be given back: {lost}"
    fix = "mend its load_state_dict or set_extra_state; all else is as it was before"
    raise_together(explain(failure, fix=fix) if failure else "", cause)


def _of_same_module(values: Sequence[_T]) -> list[_T]:
    """Return for each prepared optimizer the value of the first one that was prepared with the same model."""
    modules = [id(each.module) for each in registry.trained]
    return [values[modules.index(module)] for module in modules]


def _completed(shared: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the saved parts of each prepared model and optimizer, with what was saved once for several optimizers."""
    both = [
        [
            {key: first[key] for key in _OF_MODULE & first.keys()} | each
            for first, each in zip(_of_same_module(some), some, strict=True)
        ]
        for some in (shared["trained"], own["trained"])
    ]
    return both[0], both[1]
