"""The objects of a training that a checkpoint holds, and the moments at which it may be taken.

``gz.prepare`` and ``gz.loader`` tell this module what they made; the checkpoint package, which lies above both, reads it.

[Note: between two steps] A step of a training loop does not end with ``optimizer.step()``: after it the script steps its
schedulers, updates its averages and sets gradients to None. All of that has happened when the script asks its loader for the
next batch, and nothing of the next step has: no random number was drawn and no batch was counted. So the loader calls
:meth:`Registry.pause` at that moment, as ``gz.epochs`` does between epochs. The micro-steps of gradient accumulation are no
steps: ``pause`` acts only if an optimizer has stepped since it was last called. While a pass over one loader goes on, others do
not pause: an evaluation inside the training loop, and a second loader of which a batch is taken between the steps of two
optimizers, come in the middle of a step.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from guozhuang.errors import UsageError, explain


class Stateful(Protocol):
    """An object whose state can be saved and restored: the protocol of ``torch.distributed.checkpoint.stateful.Stateful``."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: nested dicts and lists of tensors and plain values."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore what :meth:`state_dict` returned."""
        ...


class _PostHooks(Protocol):
    def register_step_post_hook(self, hook: Callable[..., None]) -> Any: ...


@dataclass(frozen=True)
class Trained:
    """A model and an optimizer that were prepared together.

    Attributes:
        module: the user's module, without a wrapper.
        model: what the script calls in its place.
        optimizer: what the script steps.
        strategy: the name of the strategy.
        why_equal: why its ranks need equal parts of a batch: a clause for an error; "" if they do not.
    """

    module: Any
    model: Any
    optimizer: Any
    strategy: str
    why_equal: str = ""


class OfOneModel:
    """A hook for one model only: copies of the model get a :class:`NoHook` in its place, and pickles what does nothing too.

    [Note: pickles without this package] A model that was saved with ``torch.save(model)`` is loaded where this package may not
    be. So what stands in a pickle in the place of its objects is of Python's library: for a hook a method that takes any
    arguments and does nothing.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> NoHook:
        return NoHook()

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")


class NoHook(OfOneModel):
    """The hook that a copy of a model has instead of an :class:`OfOneModel`; does nothing."""

    def __call__(self, *_: Any) -> None:
        """Do nothing; the layer's output stays as it is."""


class BatchWeight:
    """How much this rank's gradient counts in the mean over the ranks, where these have unequal parts of a global batch.

    [Note: unequal parts] The mean loss over the b_r samples of rank r has the gradient g_r. That of the mean over the whole
    batch is sum(b_r g_r) / sum(b_r), which is the mean over n ranks of w_r g_r with the weight w_r = b_r n / sum(b_r). So
    what averages gradients multiplies this rank's by its weight first, and everything behind it (clipping, the optimizer) is
    as with equal parts. The weight is that of the batch which the loader has handed out last. Gradients that a rank has kept
    for itself by then, those of micro-batches, belong to the weight before: what holds them listens, and is told the factor
    by which it multiplies them, so that each counts by its own weight.

    Attributes:
        value: the weight of this rank; 1.0 for equal parts.
        num_ranks: how many ranks have parts of the batch; 0: all parts are equal. The same on all ranks.
    """

    def __init__(self) -> None:
        self.value, self.num_ranks = 1.0, 0
        self._listeners: list[weakref.WeakMethod[Callable[[float], object]]] = []

    def listen(self, keep: Callable[[float], object]) -> None:
        """Call a bound method, held weakly, with the factor for gradients that a rank keeps whenever the weight changes."""
        self._listeners = [each for each in self._listeners if each() is not None]
        self._listeners.append(weakref.WeakMethod(keep))

    def leave(self, keep: Callable[[float], object]) -> None:
        """Call a bound method no more that was given to :meth:`listen`."""
        self._listeners = [each for each in self._listeners if each() not in (None, keep)]

    def set(self, value: float, num_ranks: int) -> None:
        """Change the weight to that of a batch, which is now handed out. Not collective."""
        before, self.value, self.num_ranks = self.value, value, num_ranks
        if value != before:
            for listener in self._listeners:
                if (keep := listener()) is not None:
                    keep(before / value)

    def among(self, num_ranks: int, rank: int) -> float:
        """Return the weight in a mean over so many ranks.

        Raises:
            UsageError: the parts are unequal, and were divided among another number of ranks.
        """
        if self.num_ranks not in (0, num_ranks):
            what = f"a batch has {self.num_ranks} unequal parts, and gradients are averaged over {num_ranks} ranks"
            fix = "make the loader with equal shares, or train over the ranks that share it"
            raise UsageError(explain(what, value=num_ranks, rank=rank, fix=fix))
        return self.value


class Registry:
    """Refers weakly to what ``gz.prepare`` and ``gz.loader`` have returned, in the order in which they were made.

    Attributes:
        on_pause: called between two steps, if an optimizer has stepped; None: nothing acts there.
        on_loader: called with each new loader; None: nothing acts there.
        has_stepped: whether an optimizer has stepped since the last pause.
        num_steps: how often optimizers have stepped.
        own_time: what the heartbeat tells of the own time of this process, and its timer; None: it is not measured.
        data_share: the number of this rank's share of the data, and how many shares there are; None outside of a world.
        shares: by what loaders divide batches that the script makes without ``shares``: "speed"; None: equally.
        weight: of the batch that was handed out last.
        num_means: how often gradients have been averaged over the ranks; ranks that train together have the same number.
        num_exchanges: how often this process has exchanged messages that torch does not count, as those with parameter servers.
    """

    def __init__(self) -> None:
        self.on_pause: Callable[[], None] | None = None
        self.on_loader: Callable[[Any], None] | None = None
        self.has_stepped = False
        self.num_steps = 0
        self.own_time: Any = None
        self.data_share: tuple[int, int] | None = None
        self.shares: str | None = None
        self.weight = BatchWeight()
        self.num_means = self.num_exchanges = 0
        self._leader: weakref.ref[Any] | None = None  # the loader that pauses
        # references to a Trained's objects, its strategy, and why that needs equal parts
        self._trained: list[tuple[list[weakref.ref[Any]], str, str]] = []
        self._loaders: list[weakref.ref[Any]] = []

    @property
    def trained(self) -> list[Trained]:
        """The models and optimizers of which the script still holds all parts."""
        found = []
        for references, strategy, why_equal in self._trained:
            module, model, optimizer = (reference() for reference in references)
            if module is not None and model is not None and optimizer is not None:
                found.append(Trained(module, model, optimizer, strategy, why_equal))
        return found

    def trained_with(self, model: object) -> Trained | None:
        """Return what was prepared with this model, which is the script's, the bare one, or one of both compiled; else None."""
        given = {id(model), id(getattr(model, "_orig_mod", model))}  # torch.compile's wrapper, and what is in it
        return next((each for each in self.trained if given & {id(each.model), id(each.module)}), None)

    @property
    def loaders(self) -> list[Any]:
        """The loaders that the script still holds."""
        return [loader for reference in self._loaders if (loader := reference()) is not None]

    def add_trained(
        self, module: object, model: object, optimizer: _PostHooks, strategy: str, why_equal: str = ""
    ) -> None:
        """Remember a prepared model with its optimizer, whose steps count from now on. See :class:`Trained`."""
        self._trained.append(([weakref.ref(module), weakref.ref(model), weakref.ref(optimizer)], strategy, why_equal))
        optimizer.register_step_post_hook(self.stepped)

    def forget(self, model: object) -> None:
        """Forget a prepared model, because it is trained with another optimizer from now on."""
        self._trained = [each for each in self._trained if each[0][1]() is not model]

    def add_loader(self, loader: object) -> None:
        """Remember a loader."""
        self._loaders = [reference for reference in self._loaders if reference() is not None]
        self._loaders.append(weakref.ref(loader))
        if self.on_loader is not None:
            self.on_loader(loader)

    def clear(self) -> None:
        """Forget everything, because the world was left in which it was made."""
        self.on_pause = self.on_loader = None
        self.has_stepped = False
        self._leader = self.own_time = None
        self._trained, self._loaders = [], []
        self.weight = BatchWeight()

    def leads(self, loader: Any) -> bool:
        """Tell whether a loader is the one that pauses; it becomes so if no other one has a pass that goes on."""
        if self.may_lead(loader):
            self._leader = weakref.ref(loader)
            return True
        return False

    def may_lead(self, loader: Any) -> bool:
        """Tell whether no other loader is the one that pauses."""
        leader = None if self._leader is None else self._leader()
        return leader is None or leader is loader or not leader.is_open

    def pause(self) -> None:
        """Let ``on_pause`` act if an optimizer has stepped since the last pause. See [Note: between two steps]."""
        if self.has_stepped and self.on_pause is not None:
            self.has_stepped = False
            self.on_pause()

    def stepped(self, optimizer: object, args: object, kwargs: object) -> None:
        """Record that an optimizer has stepped; registered as its hook."""
        self.has_stepped = True
        self.num_steps += 1


#: The registry of this process.
registry = Registry()
