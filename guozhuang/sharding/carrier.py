"""The base class of the objects that move gradients and weights between ranks for the sharded optimizer."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import UsageError, explain
from ..gradients.awaited import AwaitedBackwards
from ..gradients.buckets import view_in
from ..gradients.passes import weakly
from ..gradients.step_reducer import StepReducer, check_gradient
from ..gradients.unused import UsedAnywhere
from ..registry import registry
from .arrivals import Arrival
from .changes import SeenGradients
from .parts import Block, BucketLayout

if TYPE_CHECKING:
    from ..gradients.alike import Alike

#: Bytes of gradients that one all-reduce of :meth:`Carrier.average` takes together.
AVERAGED_BYTES: Final = 32 << 20


class Carrier(ABC):
    """Moves gradients to the ranks that own them, and new weights back. Methods are collective unless they say otherwise.

    A subclass makes the flat weights, places the parameters' data there and calls this constructor last. It is constructed on
    all ranks, which hold equal weights already. ``ShardedOptimizer`` does the rest: closures, hooks, the optimizer's
    state, checkpoints, agreement about the layout.

    Args:
        names: names of the parameters, for errors.
        parameters: the user's parameters, by their index in the layout. On each an :class:`Arrival` is registered.
        layout: which rank owns which elements.
        group: the ranks.
        flats: the weights of each bucket, 1-dimensional.
        listens: whether gradients are handled as they arrive. Not in a pipeline, which adds to them with each microbatch, and
            not always by autograd: it calls :meth:`backward_ended`.

    Attributes:
        blocks: this rank's blocks, in the order of :meth:`BucketLayout.blocks_of`. ``collect`` and ``split`` may replace the
            list by finer blocks over the same elements; then ``weights`` is replaced too, and the sharded optimizer converts
            the state.
        weights: the tensors that the user's optimizer steps: one leaf per block over this rank's part of the flat weights. It
            has the parameter's shape if the block is whole; else it is 1-dimensional, padding included (its values and
            gradients stay zeros).
        is_collected: whether ``collect`` was called, and neither ``publish`` nor ``skip`` after it.
        is_averaged: whether ``average`` was called, and no backward after it: ``p.grad`` is the mean, or what was made of it.
        has_replicas: whether each rank holds weights of its own.
        averages: whether it averages gradients. If not, ``p.grad`` holds averages, and no :class:`Arrival` is registered.
        follow: called before gradients are averaged: the optimizer takes up other groups, which may close this carrier. With
            ids of parameters or gradients, only if it holds some of these.
        exchanging: the reducer, if the user has chosen the exchange of gradients; its state belongs to a checkpoint.
    """

    exchanging: StepReducer | None = None
    follow: Callable[[Collection[int] | None], object] = staticmethod(lambda wanted: None)
    averages = has_replicas = True
    _alike: Alike | None = None
    _alive: ClassVar[weakref.WeakSet[Carrier]] = weakref.WeakSet()

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        layout: BucketLayout,
        group: dist.ProcessGroup,
        flats: Sequence[Tensor],
        listens: bool = True,
    ) -> None:
        self._names, self.parameters, self.layout, self.group, self.listens = names, parameters, layout, group, listens
        self._flats, self._rank, self._size = flats, group.rank(), group.size()
        self._separate: frozenset[int] = frozenset()
        self._unused: frozenset[int] = frozenset()  # parameters without a gradient on any rank in this step
        self._is_open = self.is_collected = self.is_averaged = self._came_late = False
        self._kept: list[Tensor | None] = []  # each parameter's ``grad`` at the time of ``collect``
        self._num_meetings = self._num_dropped = 0
        self._seen = SeenGradients(names, parameters, self._rank)
        self._make_blocks()
        if self.averages:
            registry.weight.listen(self._keep_weighted)
        self._handles: list[Any] = [
            p.register_post_accumulate_grad_hook(Arrival(self, i)) for i, p in enumerate(parameters) if self.averages
        ]
        if self.averages and self._size > 1:
            self._alive.add(self)

    @classmethod
    def alive(cls) -> list[Carrier]:
        """Return the carriers of several ranks that were not closed."""
        return list(cls._alive)

    # ---- methods that the sharded optimizer calls in a step -------------------------------------------------------------

    def collect(self) -> None:
        """After backward and before the step, set ``weights[i].grad`` to the mean over ranks of the block's gradient.

        It is None if no rank has a gradient for the block's parameters; a parameter with a gradient on some ranks counts as
        zero on the others. If a block holds both kinds of parameters, it is split first. Gradients are read from ``p.grad``
        now, also those that the user assigned (no hook has fired for them). A second call before ``publish`` or
        ``skip`` does nothing: changes made to ``weights[i].grad`` in between (clipping, unscaling) stay.

        Raises:
            UsageError: a gradient is sparse or of another dtype; a parameter was moved to another device or dtype; a
                backward has added to gradients that were collected already, or the script has changed or dropped some.
        """
        if not self.is_collected:
            self._open()
            for _ in self._means(keep=True):
                pass
            self._kept = [p.grad for p in self.parameters]
            self.is_collected = True
            self._seen.note_all()
        elif self._came_late:
            what = "a backward has added to gradients that were averaged already, by clip_grad_norm_"
            fix = "clip after the last backward of a step, or call zero_grad() between"
            raise UsageError(explain(what, rank=self._rank, fix=fix))
        else:
            self._follow_drops()

    def average(self) -> None:
        """Make each ``p.grad`` the mean over ranks, in place; a second call before the next backward does nothing.

        What the script does to it afterwards is what the step uses, for the mean of equal gradients is that gradient. It is
        there too on ranks without a gradient, if any rank has one.

        Raises:
            UsageError: gradients were changed, or collected, already; one is sparse or of another dtype.
        """
        if self.is_averaged:
            return
        if self.is_collected:
            what = "gz.clip_grad_norm_ has averaged the gradients of this step already, and the step uses its result"
            fix = "call gz.clip_grad_norm_ last, or PyTorch's functions alone"
            raise UsageError(explain(what, rank=self._rank, fix=fix))
        if self._size == 1:
            return
        self._seen.check()
        self._send_rest()
        flags = [p.grad is not None for p in self.parameters]
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        told = torch.tensor(flags, dtype=torch.int32, device=device)
        counts = UsedAnywhere(told, self.group, device).counts() if flags else []
        weight = registry.weight.among(self._size, self._rank)
        with torch.no_grad():
            for some in _together([i for i, count in enumerate(counts) if count], self.parameters):
                for i in some:
                    parameter = self.parameters[i]
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    check_gradient(parameter.grad, parameter, self._names[i], self._rank)
                gradients = [self.parameters[i].grad.detach() for i in some]  # type: ignore[union-attr]
                flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).mul_(weight / self._size)
                dist.all_reduce(flat, group=self.group)
                for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                    gradient.copy_(mean.view(gradient.shape))
        self.is_averaged = True

    def stretches(self) -> Iterator[Sequence[int]]:
        """Yield this rank's blocks in parts, each as soon as its mean gradients are there; called instead of ``collect``.

        Every rank must iterate to the end, and then call ``publish``. ``blocks`` and ``weights`` may be replaced before the
        first part, not later. After ``collect`` all blocks come as one part.

        Yields:
            Indices of blocks whose ``weights[i].grad`` is what ``collect`` would make it. The optimizer must have stepped them
            when the next part is asked for: then the gradients may be gone, and the new weights are being sent.
        """
        if self.is_collected:
            self.collect()
            yield range(len(self.blocks))
        else:
            self._open()
            yield from self._means(keep=False)

    def publish(self) -> None:
        """Make all ranks' new weights visible to every rank after the step; drop the blocks' gradients."""
        assert self._is_open
        self._publish()
        self._drop()
        registry.num_means += 1

    def skip(self) -> None:
        """Drop the collected gradients of the blocks (set them to None) without a step, if any were collected."""
        self._num_dropped += self._seen.has_any
        if self._is_open:
            self._drop()
        else:
            self._forget()

    def split(self, separate: frozenset[int]) -> None:
        """Give each of these parameters blocks that no other parameter shares, on all ranks. Not after ``collect``."""
        if not separate <= self._separate:
            self._separate |= separate
            self._make_blocks()

    def arrived(self, index: int) -> None:
        """Handle a gradient that autograd has accumulated in ``parameters[index].grad``. Not collective."""
        if self.is_collected:
            kept = self._kept[index]
            if self.parameters[index].grad is kept or (kept is None and self._holds_kept()):
                self._came_late = True
                return
            self._drop()  # the program has set the collected gradient to None, so a new step begins
        if self.is_averaged:
            self._seen.note_all()
            self.is_averaged = False
        self._on_gradient(index)
        self._seen.note(index)

    def backward_ended(self) -> None:
        """Handle the gradients of a backward through a pipeline. Not collective."""
        for i, parameter in enumerate(self.parameters if self.is_collected else ()):
            if parameter.grad is not None:
                self.arrived(i)
        if not self.is_collected:
            self.is_averaged = False
            self._seen.note_all()

    def close(self) -> None:
        """Remove the hooks from the parameters, which stay usable, as do their gradients; ``weights`` does not."""
        registry.weight.leave(self._keep_weighted)
        self._alive.discard(self)
        self.synchronize()
        self._start_over()
        for handle in self._handles:
            handle.remove()

    def _keep_weighted(self, factor: float) -> None:
        """Multiply the gradients that this rank has kept. See [Note: unequal parts] in registry.py."""
        with torch.no_grad():
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.data.mul_(factor)  # not seen as a change: [Note: changed gradients] in changes.py

    def _holds_kept(self) -> bool:
        pairs = zip(self.parameters, self._kept, strict=True)
        return any(kept is not None and parameter.grad is kept for parameter, kept in pairs)

    def _follow_drops(self) -> None:
        """Drop what ``collect`` has set where the script has dropped all gradients since; raise where it changed some."""
        self._seen.check()
        kept = [i for i, gradient in enumerate(self._kept) if gradient is not None]
        dropped = [i for i in kept if self._seen.is_other(i)]
        if dropped and len(dropped) < len(kept):
            what = (
                f"the gradient of {self._names[dropped[0]]} was dropped after gz.clip_grad_norm_ had averaged it, and the step "
                "uses the averages"
            )
            fix = "set it to None before gz.clip_grad_norm_, or let requires_grad_(False) freeze the parameter"
            raise UsageError(explain(what, rank=self._rank, fix=fix))
        are_zeros = any(self.parameters[i].grad is not None for i in dropped)
        for weight in self.weights if dropped else ():
            if are_zeros and weight.grad is not None:
                weight.grad.zero_()
            else:
                weight.grad = None

    def _open(self) -> None:
        if self._is_open:  # the optimizer raised in the middle of the last step, so drop that step's gradients
            self._drop()
        elif self._size > 1 and not self.is_averaged:
            self._seen.check()
        self._unused = self._meet()
        self._is_open = True
        if self._unused - self._separate:
            blocks = [block for rank in range(self._size) for block in self.layout.blocks_of(rank, self._separate)]
            mixed = {i for b in blocks if not b.parameters <= self._unused for i in b.parameters & self._unused}
            self.split(frozenset(mixed))
        for weight in self.weights:
            weight.grad = None

    # ---- methods that compare the ranks; see [Note: what is told, and what is compared then] in gradients/alike.py -------

    def compare_ranks(self, awaited: AwaitedBackwards) -> None:
        """Compare from now on what ranks have done; ``awaited`` knows the model's forwards without a backward."""
        if self._size == 1 or not self.averages:
            return
        from ..gradients.alike import Alike  # imported only when needed

        self._awaited = awaited
        self._alike = Alike(self.group, self.parameters, weakly(self._count_left_out))
        self._alike.compares_weights = self.has_replicas

    def _count_left_out(self) -> tuple[int, int]:
        certain, most = self._awaited.counts()
        return certain + self._num_dropped, most + self._num_dropped

    def _tell(self) -> int:
        """Return 32 bits that are equal on all ranks that have done the same. Called before the ranks meet."""
        if self._alike is None:
            return 0
        self._alike.follow(self._names, self.parameters)
        return self._alike.digest(self._num_meetings)

    def _compare(self, is_alike: bool) -> None:
        """After the ranks have met, raise a MismatchError if they did not all tell the same, and find why."""
        if self._alike is not None:
            if not is_alike:
                self._alike.compare(self._num_meetings)
            self._awaited.stepped()
        self._num_meetings += 1

    def _drop(self) -> None:
        for weight in self.weights:
            weight.grad = None
        self._is_open = self.is_collected = self._came_late = False
        self._kept = []
        self._forget()
        self._start_over()

    def _forget(self) -> None:
        self.is_averaged = False
        self._seen.forget()

    def _make_blocks(self) -> None:
        self.blocks: Sequence[Block] = self.layout.blocks_of(self._rank, self._separate)
        self.weights: Sequence[nn.Parameter] = [
            nn.Parameter(self._of_block(block, self._flats[block.bucket], block.start)) for block in self.blocks
        ]
        self._held = [block.parameters for block in self.blocks]
        self._use_blocks()

    def _of_block(self, block: Block, flat: Tensor, start: int) -> Tensor:
        """Return the part of a flat tensor that belongs to a block, in the shape in which the optimizer sees the block.

        Args:
            block: one of this rank's blocks.
            flat: 1-dimensional.
            start: the element of ``flat`` at which the block begins.
        """
        if block.is_whole:
            return view_in(flat, start, self.parameters[block.pieces[0].parameter])
        return flat[start : start + block.num_elements]

    # ---- methods that a subclass defines --------------------------------------------------------------------------------

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until this rank has the new values of all weights. Not collective."""

    @abstractmethod
    def _use_blocks(self) -> None:
        """Set the attributes that depend on ``blocks`` and ``weights``, which were replaced."""

    @abstractmethod
    def _on_gradient(self, index: int) -> None:
        """Handle the gradient that autograd has just added to ``parameters[index].grad``, for the step to come."""

    @abstractmethod
    def _send_rest(self) -> None:
        """Send what other ranks have sent in backward, so that every rank's next collective is the same. Not collective."""

    @abstractmethod
    def _meet(self) -> frozenset[int]:
        """Wait for all ranks' gradients, or start to exchange them; return the parameters for which no rank has a gradient."""

    @abstractmethod
    def _means(self, keep: bool) -> Iterator[Sequence[int]]:
        """Set the gradients of ``weights`` and yield the indices of their blocks, part by part, as :meth:`stretches` says.

        Args:
            keep: leave all gradients valid until the end, and send no weights between.
        """

    @abstractmethod
    def _publish(self) -> None:
        """Send those new weights that ``_means`` has not sent yet."""

    @abstractmethod
    def _start_over(self) -> None:
        """Drop everything that was kept about this step's gradients."""


def _together(indices: Sequence[int], parameters: Sequence[nn.Parameter]) -> Iterator[list[int]]:
    """Yield the indices in parts of one dtype and device, each of at most :data:`AVERAGED_BYTES` or one parameter."""
    part: list[int] = []
    num_bytes = 0
    for i in indices:
        parameter = parameters[i]
        last = parameters[part[-1]] if part else parameter
        is_alike = (last.dtype, last.device) == (parameter.dtype, parameter.device)
        if part and (not is_alike or num_bytes + parameter.nbytes > AVERAGED_BYTES):
            yield part
            part, num_bytes = [], 0
        part.append(i)
        num_bytes += parameter.nbytes
    if part:
        yield part


def is_at(parameter: Tensor, place: Tensor) -> bool:
    """Return whether a parameter lies in the memory of ``place``, in the same order."""
    return parameter.data_ptr() == place.data_ptr() and parameter.stride() == place.stride()


def put_back(parameter: Tensor, place: Tensor, name: str, rank: int) -> None:
    """Copy a parameter that was given other memory (``p.data = ...``) to ``place``, and make ``place`` its memory again.

    Raises:
        UsageError: the parameter has another dtype, device or shape now.
    """
    if (parameter.dtype, parameter.device, parameter.shape) != (place.dtype, place.device, place.shape):
        what = (
            f"{name} was {place.dtype} {tuple(place.shape)} on {place.device} when it was prepared "
            f"and is {parameter.dtype} {tuple(parameter.shape)} on {parameter.device} now"
        )
        raise UsageError(explain(what, rank=rank, fix="convert the model before prepare()"))
    with torch.no_grad():
        overlaps = parameter.untyped_storage().data_ptr() == place.untyped_storage().data_ptr()
        place.copy_(parameter.clone() if overlaps else parameter)
    parameter.data = place
