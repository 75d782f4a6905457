"""Weights that servers hold: each worker pushes what its optimizer changed and pulls what all have made of them.

Formula: servers hold w, seeded with the weights of rank 0. After its optimizer's step rank r has w_r' where it pulled w_r; it
sends d = s (w_r' - w_r), the server does w <- w + d at once, and answers with w, which is w_r from then on. s is 1, or 1/n
with ``average``. A worker that is more than ``max_staleness_steps`` steps ahead of the slowest active one gets its answer when
that one has caught up; each part of the weights counts by itself.
Error: gradients are of weights that lack at most the last n (max_staleness_steps + 1) deltas. With 0 each step of all workers
starts from the same weights: w plus the sum of all d, added in the order in which they came.
With s = 1 the changes of n workers add up, as if the learning rate were n times that of their mean: divide it by n, or set
``average``.
Traffic: the weights once per step to servers of their own; 2 (n-1)/n times where the workers serve.
Source: Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014; deltas as in BytePS, Jiang et al.,
OSDI 2020; the bound: Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NIPS 2013.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from guozhuang.errors import UsageError, explain
from guozhuang.exchange.numbers import is_finite
from guozhuang.exchange.weights import WeightExchange
from guozhuang.weights.flat import FlatWeights, Named

from .lines import Errand
from .links import Links
from .meeting import num_servers
from .parts import Part, cut
from .protocol import Kind, Message
from .synchronous import check_numbers

_log = logging.getLogger("guozhuang")


@dataclass
class AsyncServersState:
    """What a worker keeps.

    Attributes:
        pulled: the weights as they came last, flat; where the worker began its step.
        changed: room for what the optimizer changed, alike.
        leaving: where the changes are sent from: ``changed`` itself, or a copy on the CPU.
        coming: where weights arrive: ``pulled`` itself, or a copy on the CPU.
    """

    group: dist.ProcessGroup
    links: Links
    parameters: Named
    weights: FlatWeights
    pulled: list[Tensor]
    changed: list[Tensor]
    leaving: list[Tensor]
    coming: list[Tensor]
    parts: Sequence[Part]
    rests: bool = False


@dataclass(frozen=True)
class AsyncParameterServer(WeightExchange[AsyncServersState]):
    """Asynchronous training with a bound.

    Args:
        max_staleness_steps: how many steps a worker may be ahead of the slowest one; 0: all wait for all in every step.
        average: whether to add the mean of the workers' changes instead of their sum.
        part_bytes: the most that travels as one part, in bytes.
        servers: None: those that ``guozhuang run --servers`` started, or else the workers themselves. 0: the workers. K:
            exactly K processes that ``guozhuang run`` started.

    Raises:
        UsageError: a number that makes no sense.
    """

    max_staleness_steps: int = 4
    average: bool = False
    part_bytes: int = 4_000_000
    servers: int | None = None

    def __post_init__(self) -> None:
        if self.max_staleness_steps < 0:
            raise UsageError(explain("max_staleness_steps is a count, at least 0", value=self.max_staleness_steps))
        check_numbers(self.part_bytes, self.servers)

    @property
    def in_step(self) -> bool:
        """False: no rank waits for a certain step of another one, but for the bound."""
        return False

    def prepare(self, parameters: Named, group: dist.ProcessGroup) -> AsyncServersState:
        """Meet the servers and seed them with the weights of rank 0, which all ranks take. Every rank must call.

        Raises:
            UsageError: the run has another number of servers.
            WorldError: a rank or a server did not come in time; the text names it.
        """
        links = Links(group, self.servers, self.part_bytes)
        weights = FlatWeights(parameters)
        pulled, changed = weights.copy(), weights.empty()
        on_cpu = [flat.device.type == "cpu" for flat in pulled]
        leaving, coming = (
            [f if c else _pinned(f) for f, c in zip(flats, on_cpu, strict=True)] for flats in (changed, pulled)
        )
        sizes = [(flat.numel(), flat.element_size()) for flat in pulled]
        parts = cut(sizes, self.part_bytes, len(links.lines)) if links.lines else []
        state = AsyncServersState(group, links, parameters, weights, pulled, changed, leaving, coming, parts)
        self._seed(state)
        return state

    def before_step(self, state: AsyncServersState, step: int) -> None:
        """Nothing: the optimizer steps from the weights that were pulled last."""

    def after_step(self, state: AsyncServersState, step: int) -> None:
        """Push what the optimizer changed; take what the servers have. May wait for slower workers, see the module."""
        if state.parts:
            state.rests = False
            self._change(state, step)
            self._ask(state, Kind.DELTA, has_payload=True)

    def rest(self, state: AsyncServersState) -> None:
        """Hold nobody any more, until the next step: this rank's data has ended before that of others. Not collective."""
        if state.parts and not state.rests:
            self._ask(state, Kind.REST, has_payload=False)
            state.rests = True

    def agree(self, state: AsyncServersState) -> None:
        """Push what was changed since the last pull; wait for all other active workers; take the same weights on all."""
        if state.parts:
            self._change(state, None)
            has_payload = any(bool(changed.count_nonzero()) for changed in state.changed)
            self._ask(state, Kind.AGREE, has_payload)
            state.rests = False

    def close(self, state: AsyncServersState) -> None:
        """Leave the servers, in the background; the others are no longer held by this worker."""
        state.links.close()

    def state_dict(self, state: AsyncServersState) -> dict[str, Any]:
        """Return the names of the weights that the servers hold: after ``agree`` they are those of the model itself."""
        return {"held": [name for name, _ in state.parameters]}

    def load_state_dict(self, state: AsyncServersState, saved: Mapping[str, Any]) -> None:
        """Seed the servers anew, with the loaded weights of rank 0, which all ranks take. Every rank must call.

        Raises:
            UsageError: it belongs to another method, or to other parameters.
        """
        if saved and saved.get("held") != [name for name, _ in state.parameters]:
            what = "the checkpoint was saved with another exchange, or for other parameters"
            raise UsageError(explain(what, value=sorted(saved), fix="choose the exchange that it was saved with"))
        state.weights.read(state.pulled)
        self._seed(state)

    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> float:
        """Return the bytes of the weights, to servers of their own; else twice what is of other workers' shares."""
        num_bytes = num_elements * element_bytes
        return num_bytes if num_servers(self.servers) else 2 * (world_size - 1) * num_bytes / world_size

    def _seed(self, state: AsyncServersState) -> None:
        if not state.parts:
            return
        is_source = state.group.rank() == 0
        if is_source:
            for leaving, pulled in zip(state.leaving, state.pulled, strict=True):
                leaving.copy_(pulled)
        self._ask(state, Kind.SEED, has_payload=is_source)

    @torch.no_grad()
    def _change(self, state: AsyncServersState, step: int | None) -> None:
        """Write what was changed since the last pull to where it leaves from."""
        state.weights.read(state.changed)
        for i, (changed, pulled) in enumerate(zip(state.changed, state.pulled, strict=True)):
            changed -= pulled
            if not is_finite(changed):
                self._say(state, i, step)
            if self.average:
                changed /= state.group.size()
            if state.leaving[i] is not changed:
                state.leaving[i].copy_(changed)

    def _say(self, state: AsyncServersState, index: int, step: int | None) -> None:
        views = state.weights.views(state.changed)[index]
        name, *more = [
            name
            for name, view in zip(state.weights.names[index], views, strict=True)
            if not bool(view.isfinite().all())
        ]
        others = f" and of {len(more)} more parameters" if more else ""
        where = "before weights are agreed on" if step is None else f"step {step}"
        what = (
            f"{where}: the change of {name!r}{others} holds NaN or infinity, and so do the servers' weights from now on"
        )
        _log.warning("%s", explain(what, rank=state.group.rank()))

    def _ask(self, state: AsyncServersState, kind: Kind, has_payload: bool) -> None:
        """Send a message for each part, wait for the answers, and take the weights."""
        errands = []
        for part in state.parts:
            here = slice(part.start, part.start + part.num_elements)
            leaving, coming = state.leaving[part.tensor][here], state.coming[part.tensor][here]
            bound = self.max_staleness_steps if kind is Kind.SEED else 0
            message = Message(kind, 0, part.index, bound, leaving.dtype, part.num_elements, has_payload)
            errands.append((part.server, Errand(message, leaving if has_payload else None, coming, part.urgency)))
        state.links.send(errands)
        for _, errand in errands:
            errand.wait()
        for pulled, coming in zip(state.pulled, state.coming, strict=True):
            if pulled is not coming:
                pulled.copy_(coming)
        state.weights.write(state.pulled)


def _pinned(flat: Tensor) -> Tensor:
    return torch.empty_like(flat, device="cpu", pin_memory=flat.device.type == "cuda")
