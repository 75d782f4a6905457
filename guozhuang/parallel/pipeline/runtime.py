"""The engine of a pipeline: carries out one rank's list of actions with its stages, for every schedule and for halves of one.

[Note: what lives how long] From the forward of a microbatch in a stage until its backward there, the engine keeps what the
stage received, what it sent and, in the last stage, its result; autograd's graph between them hangs on these. So activations
of as many microbatches are held as the schedule has in flight. Gradients that come back are handed to autograd at once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from guozhuang.errors import MismatchError, explain

from .played import PlayedTransfers
from .schedule import (
    BACKWARD,
    FORWARD,
    INPUTS,
    WEIGHTS,
    Action,
    PipelineSchedule,
    Simulated,
    chain,
    make_schedule,
    simulate,
)
from .transfers import ACTIVATIONS, CONCLUSION, GRADIENTS, StageMessage, StageTransfers, shapes_of

#: Returns what the rank of the last stage tells all ranks after an action there, from the number of its microbatch.
Conclude = Callable[[int], Sequence[Tensor]]
#: Returns where the backward of a microbatch begins, from its number and the last stage's result: tensors and their gradients.
Seeds = Callable[[int, Any], tuple[Sequence[Tensor], Sequence[Tensor | None]]]


class StageResult(Protocol):
    """What the forward of a stage returns.

    Attributes:
        sends: by destination stage what is sent there; the same destinations each time.
        result: the model's output, or what is to be made of it; of the last stage only.
    """

    sends: Mapping[int, Sequence[Tensor | None]]
    result: Any


class RunsForward(Protocol):
    """A stage, as far as the engine knows it."""

    def forward(self, microbatch: Any, received: dict[int, list[Tensor | None]]) -> StageResult:
        """Compute one microbatch.

        Args:
            microbatch: its inputs, as they were given to :meth:`PipelineRuntime.begin`.
            received: by source stage what that stage sent. Tensors that required a gradient there require one here.
        """
        ...

    def around_backward(self, microbatch: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the backward of a microbatch runs."""
        ...


class WeightsLater(Protocol):
    """What a runtime of a schedule with divided backwards needs: see ``deferred.py``."""

    def begin(self, *, is_divided: bool) -> Any:
        """Return what keeps products of one microbatch in one stage until :meth:`compute`; see ``deferred.py``."""
        ...

    def of(self, kept: Any) -> contextlib.AbstractContextManager[None]:
        """Return a context in which products leave the gradients of their weights for later, in what :meth:`begin` returned."""
        ...

    def compute(self, kept: Any) -> None:
        """Compute the gradients of weights that were left for later there."""
        ...


@dataclass
class _InFlight:
    """One microbatch in one stage between its forward and its backward. See [Note: what lives how long]."""

    sends: Mapping[int, Sequence[Tensor | None]]
    result: Any
    arrived: dict[int, list[Tensor | None]]
    gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict)


class _Entrance(torch.autograd.Function):
    """Hands received tensors to a stage as if they were computed, so that it may change them; takes their gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, told: tuple[_InFlight, list[tuple[int, int]]]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.told = told
        held, places = told
        tensors = [held.arrived[source][i] for source, i in places]
        return tuple(tensor.detach() for tensor in tensors if tensor is not None)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        held, places = ctx.told
        held.gradients.update((place, g) for place, g in zip(places, gradients, strict=True) if g is not None)
        return None, None


class PipelineRuntime:
    """Carries out the actions of one rank of a pipeline. Every rank of the group must construct it, with equal arguments.

    Args:
        group: the ranks of the pipeline.
        stages: this rank's stages by their numbers; stage s is on rank s modulo the number of ranks.
        schedule: the name of the schedule.
        stages_per_rank: number of stages of each rank.
        edges: pairs of stages (source, destination), of all ranks: the second one needs outputs of the first. None: each needs
            those of the stage before it.
        device: where received tensors are put.
        weights: leaves gradients of weights for later, under schedules with divided backwards; None: all gradients are computed
            where those of the inputs are.
        transfers: those of another runtime of the same ranks and device, whose batches do not overlap with this one's in an
            ``execute``; None: made.

    Attributes:
        most_in_flight: of how many microbatches this rank has held activations at most.
        transfers: the messages of this rank.
        busy_s: by stage, for how many seconds this rank has computed for it; of an accelerator, has launched its kernels.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        stages: Mapping[int, RunsForward],
        schedule: str,
        stages_per_rank: int = 1,
        edges: Iterable[tuple[int, int]] | None = None,
        device: torch.device | str = "cpu",
        weights: WeightsLater | None = None,
        transfers: StageTransfers | None = None,
    ) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.stages, self._name, self._stages_per_rank = dict(stages), schedule, stages_per_rank
        self.num_stages = self.size * stages_per_rank
        edges = chain(self.num_stages) if edges is None else frozenset(edges)
        self.edges = edges
        self.sources = {s: sorted(a for a, b in edges if b == s) for s in range(self.num_stages)}
        self.destinations = {s: sorted(b for a, b in edges if a == s) for s in range(self.num_stages)}
        self.weights = weights
        size = self.size
        self.recorder = getattr(group, "recorder", None)  # of a fake world
        made = StageTransfers if self.recorder is None else PlayedTransfers
        self.transfers = transfers or made(group, lambda stage: stage % size, torch.device(device))
        self.most_in_flight = 0
        self.busy_s = dict.fromkeys(self.stages, 0.0)
        self._schedules: dict[int, PipelineSchedule] = {}
        self._simulated: dict[int, Simulated] = {}
        self._num_runs = 0

    def schedule(self, num_microbatches: int) -> PipelineSchedule:
        """Return the actions of all ranks for a number of microbatches.

        Raises:
            UsageError: they would wait for ever; the text has a table of them.
        """
        if num_microbatches not in self._schedules:
            made = make_schedule(self._name, self.size, num_microbatches, self._stages_per_rank)
            self._simulated[num_microbatches] = simulate(made, self.edges)
            self._schedules[num_microbatches] = made
        return self._schedules[num_microbatches]

    def bound(self, num_microbatches: int) -> int:
        """Return of how many microbatches a rank holds activations at most, counted in each of its stages."""
        return max(self._simulated[num_microbatches].in_flight)

    def actions(self, num_microbatches: int, kinds: str) -> Sequence[Action]:
        """Return the actions of this rank, in order; of all ranks in a fake world, where this process plays them all."""
        schedule = self.schedule(num_microbatches)
        if self.recorder is None:
            return schedule.half(kinds, self.rank)
        starts = self._simulated[num_microbatches].starts
        return sorted((action for action in starts if action.kind in kinds), key=starts.__getitem__)

    def playing(self, action: Action) -> contextlib.AbstractContextManager[None]:
        """Return a context in which an action is carried out; a fake world records whose it is."""
        if self.recorder is None:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[None] = self.recorder.playing(action.stage % self.size)
        return context

    @contextlib.contextmanager
    def computing(self, stage: int) -> Iterator[None]:
        """Count the time in this context as time that a stage has computed."""
        began_s = time.perf_counter()
        yield
        self.busy_s[stage] += time.perf_counter() - began_s

    def begin(self, microbatches: Sequence[Any]) -> PipelineRun:
        """Begin with a batch, cut into microbatches; several batches may be between their forward and their backward."""
        self._num_runs += 1
        return PipelineRun(self, microbatches, self._num_runs)


class PipelineRun:
    """One batch on its way through the stages of this rank. Made by :meth:`PipelineRuntime.begin`.

    Attributes:
        results: by microbatch what the last stage made of it; empty on ranks without the last stage, and after its backward.
        conclusions: what the rank of the last stage told all ranks in the last :meth:`execute`, in its order.
    """

    def __init__(self, runtime: PipelineRuntime, microbatches: Sequence[Any], number: int) -> None:
        self._runtime, self._microbatches, self._number = runtime, microbatches, number
        self._schedule = runtime.schedule(len(microbatches))
        # The places of (stage, microbatch) whose backward is divided.
        self._divided = {each[1:] for each in runtime.actions(len(microbatches), INPUTS)}
        self._held: dict[tuple[int, int], _InFlight] = {}
        self._weights_left: list[tuple[int, int]] = []
        self._products: dict[tuple[int, int], Any] = {}  # of several open batches, each run has its own
        self._around_backwards: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self.results: dict[int, Any] = {}
        self.conclusions: list[Sequence[Tensor | None]] = []

    def execute(
        self,
        kinds: str = "FBIW",
        seeds: Seeds | None = None,
        conclude: Conclude | None = None,
        around_backwards: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        """Carry out the actions of some kinds in the order of the schedule. Every rank of the pipeline must call it.

        Args:
            kinds: "F" for the forward half of "gpipe", "BIW" for its backward half; everything by default.
            seeds: called on the rank of the last stage where the backward of a microbatch begins. Every rank gives one if there
                are backwards.
            conclude: called on the rank of the last stage after its last backward, or, in a half without backwards, after each
                of its forwards; what it returns is sent to all ranks, which find it in ``conclusions``. All ranks give one, or
                none.
            around_backwards: returns a context in which autograd runs the backward of a microbatch.

        Raises:
            PeerLost, WorldError, MismatchError: a message did not come; the text names stage, microbatch and action.
        """
        runtime, last = self._runtime, self._runtime.num_stages - 1
        transfers = runtime.transfers
        self._around_backwards = around_backwards
        actions = runtime.actions(len(self._microbatches), kinds)
        concluding = self._concluding(kinds) if conclude is not None else ()
        # Conclusions are taken at the end, so the rank that sends them must not wait for that.
        most = runtime.bound(len(self._microbatches)) + len(concluding)
        transfers.begin(self._number, len(self._microbatches), most)
        for peer in range(runtime.size):
            if peer != runtime.rank:
                transfers.expect(peer, self._messages_from(peer, kinds, concluding))
        self.conclusions = []
        action = None
        for action in actions:
            with runtime.playing(action):
                self._carry_out(action, seeds if action.stage == last else None)
                if action in concluding and conclude is not None:
                    told = list(conclude(action.microbatch))
                    self.conclusions.append(told)
                    for rank in range(runtime.size):
                        if rank != self._schedule.rank_of(last):
                            transfers.send(
                                StageMessage(CONCLUSION, last, rank, action.microbatch), told, action.in_words
                            )
        why = "the end of the batch" if action is None else f"the end of the batch, after the {action.in_words}"
        if runtime.rank != self._schedule.rank_of(last) and runtime.recorder is None:
            messages = [StageMessage(CONCLUSION, last, runtime.rank, each.microbatch) for each in concluding]
            self.conclusions = [transfers.receive(message, why) for message in messages]
            transfers.release(messages)
        transfers.finish(why)

    def _carry_out(self, action: Action, seeds: Seeds | None) -> None:
        if action.kind == FORWARD:
            self._forward(action)
        elif action.kind == WEIGHTS:
            self._compute_weights(action)
        else:
            self._backward(action, seeds)

    def _concluding(self, kinds: str) -> Sequence[Action]:
        """Return the actions after which the rank of the last stage tells all ranks something; see :meth:`execute`."""
        last = self._runtime.num_stages - 1
        actions = [each for each in self._schedule.half(kinds, self._schedule.rank_of(last)) if each.stage == last]
        return [each for each in actions if each.kind in (BACKWARD, INPUTS)][-1:] or actions

    def _messages_from(self, peer: int, kinds: str, concluding: Sequence[Action]) -> list[StageMessage]:
        """Return the messages that a rank sends to this one, in the order in which it sends them."""
        runtime, messages = self._runtime, []
        for action in self._schedule.half(kinds, peer):
            kind, stage, k = action
            if kind == FORWARD:
                for target in runtime.destinations[stage]:
                    if self._schedule.rank_of(target) == runtime.rank:
                        messages.append(StageMessage(ACTIVATIONS, stage, target, k))
            elif kind != WEIGHTS:
                for target in runtime.sources[stage]:
                    if self._schedule.rank_of(target) == runtime.rank:
                        messages.append(StageMessage(GRADIENTS, stage, target, k))
            if action in concluding:
                messages.append(StageMessage(CONCLUSION, stage, runtime.rank, k))
        return messages

    def _receive(self, message: StageMessage, action: Action) -> list[Tensor | None]:
        """Return a message; compute gradients of weights that were left for later until it comes."""
        transfers = self._runtime.transfers
        while self._weights_left and not transfers.has(message):
            self._compute_next_weights()
        return transfers.receive(message, action.in_words)

    def _forward(self, action: Action) -> None:
        runtime, stage, k = self._runtime, action.stage, action.microbatch
        arrived = {
            source: self._receive(StageMessage(ACTIVATIONS, source, stage, k), action)
            for source in runtime.sources[stage]
        }
        held = _InFlight({}, None, arrived)
        received = {source: list(tensors) for source, tensors in arrived.items()}
        if torch.is_grad_enabled():
            places = [
                (source, i)
                for source, tensors in arrived.items()
                for i, tensor in enumerate(tensors)
                if tensor is not None and tensor.requires_grad
            ]
            if places:
                entered: Any = _Entrance.apply(torch.empty(0, requires_grad=True), (held, places))  # type: ignore[no-untyped-call]
                for (source, i), tensor in zip(places, entered, strict=True):
                    received[source][i] = tensor
        with runtime.computing(stage), self._weights_later(stage, k):
            out = runtime.stages[stage].forward(self._microbatches[k], received)
        assert sorted(out.sends) == runtime.destinations[stage], f"stage {stage} sends to {sorted(out.sends)}"
        for target, tensors in out.sends.items():
            runtime.transfers.send(StageMessage(ACTIVATIONS, stage, target, k), tensors, action.in_words)
        if stage == runtime.num_stages - 1:
            self.results[k] = out.result
        if not torch.is_grad_enabled():
            runtime.transfers.release([StageMessage(ACTIVATIONS, source, stage, k) for source in arrived])
        else:
            held.sends, held.result = out.sends, out.result
            self._held[stage, k] = held
            runtime.most_in_flight = max(runtime.most_in_flight, len(self._held) + len(self._weights_left))

    def _backward(self, action: Action, seeds: Seeds | None) -> None:
        runtime, stage, k = self._runtime, action.stage, action.microbatch
        held = self._held[stage, k]
        roots: list[Tensor] = []
        gradients: list[Tensor | None] = []
        for target, sent in held.sends.items():
            message = StageMessage(GRADIENTS, target, stage, k)
            for tensor, gradient in zip(sent, self._receive(message, action), strict=True):
                if tensor is None or gradient is None:
                    continue
                if tensor.shape != gradient.shape:
                    got, was = shapes_of([gradient]), shapes_of([tensor])
                    what = f"{action.in_words}: {message} have one of {got} for an output of {was}"
                    raise MismatchError(explain(what, rank=runtime.rank, fix="give all ranks the same model"))
                roots.append(tensor)
                gradients.append(gradient)
        if seeds is not None:
            more, their_gradients = seeds(k, self.results.pop(k))
            roots += more
            gradients += their_gradients
        if roots:
            around = runtime.stages[stage].around_backward(self._microbatches[k])
            with runtime.computing(stage), self._weights_later(stage, k), around, self._around_backwards():
                torch.autograd.backward(roots, gradients)
        del self._held[stage, k], roots, gradients
        runtime.transfers.release([StageMessage(GRADIENTS, target, stage, k) for target in held.sends])
        runtime.transfers.release([StageMessage(ACTIVATIONS, source, stage, k) for source in held.arrived])
        if runtime.weights is not None:
            self._weights_left.append((stage, k))
        for source, tensors in held.arrived.items():
            back = [held.gradients.get((source, i)) for i in range(len(tensors))]
            runtime.transfers.send(StageMessage(GRADIENTS, stage, source, k), back, action.in_words)
        if action.kind == BACKWARD:
            self._compute_weights(action)

    def _weights_later(self, stage: int, k: int) -> contextlib.AbstractContextManager[Any]:
        weights = self._runtime.weights
        if weights is None:
            return contextlib.nullcontext()
        if (stage, k) not in self._products:
            self._products[stage, k] = weights.begin(is_divided=(stage, k) in self._divided)
        return weights.of(self._products[stage, k])

    def _compute_weights(self, action: Action) -> None:
        """Compute gradients of weights at the place that the schedule has for them, unless a wait was used for them before."""
        if (place := (action.stage, action.microbatch)) in self._weights_left:
            self._compute_next_weights(self._weights_left.index(place))

    def _compute_next_weights(self, number: int = 0) -> None:
        assert self._runtime.weights is not None, "a schedule with divided backwards needs weights="
        place = self._weights_left.pop(number)
        with self._runtime.computing(place[0]):
            self._runtime.weights.compute(self._products.pop(place))
