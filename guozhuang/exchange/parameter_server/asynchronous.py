"""Asynchronous training with weights held by servers: each worker pushes its optimizer's changes and pulls the current weights.

Formula: servers hold w, seeded with the weights of rank 0. If rank r pulled w_r and its optimizer's step made w_r' of it, the
rank sends d = s (w_r' - w_r); the server does w <- w + d at once, and answers with w, which is the new w_r. s is 1, or 1/n
with ``average``. A worker that is more than ``max_staleness_steps`` steps ahead of the slowest active one gets its answer when
that one has caught up; each part of the weights decides this by itself.
Error: gradients are of weights that lack at most the last n (max_staleness_steps + 1) deltas. With 0 each step of all workers
starts from the same weights: w plus the sum of all d, added in the order of their arrival.
With s = 1 the changes of n workers add up, as if the learning rate were n times that of their mean: divide it by n, or set
``average``.
Traffic: the bytes of the weights once per step with server processes; 2 (n-1)/n times that if the workers serve.
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
from typing_extensions import override

from ...errors import UsageError, explain
from ...weights.flat import FlatWeights, Named
from ..numbers import is_finite, some_of
from ..weights import WeightExchange
from .client import PartRequest, ServerClient, check_numbers, on_cpu, traffic
from .parts import ServedPart, cut
from .protocol import Opcode, ServerMessage

_log = logging.getLogger("guozhuang")


@dataclass
class AsyncServersState:
    """The state of :class:`AsyncParameterServer`: a worker's weights as flat tensors, and its connections to the servers.

    Attributes:
        group: the workers.
        client: the connections to the servers.
        parameters: the parameters that are trained.
        weights: the layout of the parameters in flat tensors.
        pulled: the weights that were pulled last, from which the worker started its step.
        changed: buffer for the changes that the optimizer made.
        leaving: buffer from which changes are sent: ``changed`` itself, or a copy on the CPU.
        coming: buffer into which weights are received: ``pulled`` itself, or a copy on the CPU.
        parts: the parts into which the flat tensors are cut; empty for a single worker without server processes.
        num_steps: the worker's number of steps since the last ``agree``. See [Note: numbers of steps] in ``protocol``.
        rests: whether this worker has reported to the servers that its data has ended.
    """

    group: dist.ProcessGroup
    client: ServerClient
    parameters: Named
    weights: FlatWeights
    pulled: list[Tensor]
    changed: list[Tensor]
    leaving: list[Tensor]
    coming: list[Tensor]
    parts: Sequence[ServedPart]
    num_steps: int = 0
    rests: bool = False


@dataclass(frozen=True)
class AsyncParameterServer(WeightExchange[AsyncServersState]):
    """Asynchronous training through parameter servers, with a bound on how far workers may be apart.

    Args:
        max_staleness_steps: how many steps a worker may be ahead of the slowest one; 0: all wait for all in every step.
        average: whether to add the mean of the workers' changes instead of their sum.
        part_bytes: the largest size of a part, in bytes.
        servers: K: exactly K server processes that ``guozhuang run --servers`` started. 0: the workers serve. None: all server
            processes of the run, or the workers if it has none.

    Raises:
        UsageError: a number is out of its range; in ``prepare``, the run has another number of servers.
        WorldError: in ``prepare``, a rank or a server did not join in time; the text names it.
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
    @override
    def in_step(self) -> bool:
        return False

    @override
    def prepare(self, parameters: Named, group: dist.ProcessGroup) -> AsyncServersState:
        """Connect to the servers; seed them with the weights of rank 0, which all ranks then copy. Every rank must call."""
        client = ServerClient(group, self.servers, self.part_bytes)
        weights = FlatWeights(parameters)
        pulled, changed = weights.copy(), weights.empty()
        leaving, coming = ([on_cpu(flat) for flat in flats] for flats in (changed, pulled))
        sizes = [(flat.numel(), flat.element_size()) for flat in pulled]
        parts = cut(sizes, self.part_bytes, len(client.connections)) if client.connections else []
        state = AsyncServersState(group, client, parameters, weights, pulled, changed, leaving, coming, parts)
        self._seed(state)
        return state

    @override
    def after_step(self, state: AsyncServersState, step: int) -> None:
        """Push the optimizer's changes; pull the servers' weights. May wait for slower workers, see the module's docstring."""
        if state.parts:
            if state.rests:
                part, lowest = state.parts[0], torch.zeros(1, dtype=torch.int64)
                request = PartRequest(ServerMessage(Opcode.JOIN, 0, part.index, 0, lowest.dtype, 1), into=lowest)
                state.client.send([(part.server, request)])
                request.wait()
                state.num_steps, state.rests = int(lowest), False
            state.num_steps += 1
            self._change(state, f"step {step}")
            self._request(state, Opcode.DELTA, state.num_steps)

    @override
    def rest(self, state: AsyncServersState) -> None:
        if state.parts and not state.rests:
            self._request(state, Opcode.REST, has_payload=False)
            state.rests = True

    @override
    def agree(self, state: AsyncServersState) -> None:
        """Push the changes since the last pull, wait until all workers have done so, and pull the same weights on all."""
        if state.parts:
            self._change(state, "before weights are agreed on")
            has_payload = any(bool(changed.count_nonzero()) for changed in state.changed)
            self._request(state, Opcode.AGREE, has_payload=has_payload)
            state.num_steps, state.rests = 0, False

    @override
    def close(self, state: AsyncServersState) -> None:
        state.client.close()

    @override
    def state_dict(self, state: AsyncServersState) -> dict[str, Any]:
        """Return the names of the weights that the servers hold; after ``agree`` the model itself has their values."""
        return {"held": [name for name, _ in state.parameters]}

    @override
    def load_state_dict(self, state: AsyncServersState, saved: Mapping[str, Any]) -> None:
        """Seed the servers again, with the loaded weights of rank 0, which all ranks then copy. Every rank must call."""
        if saved and saved.get("held") != [name for name, _ in state.parameters]:
            what = "the checkpoint was saved with another exchange, or for other parameters"
            raise UsageError(explain(what, value=sorted(saved), fix="choose the exchange that it was saved with"))
        state.weights.read(state.pulled)
        self._seed(state)

    @override
    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> float:
        return traffic(num_elements * element_bytes, self.servers, world_size)

    def _seed(self, state: AsyncServersState) -> None:
        if state.parts:
            is_source = state.group.rank() == 0
            for leaving, pulled in zip(state.leaving, state.pulled, strict=True) if is_source else ():
                leaving.copy_(pulled)
            self._request(state, Opcode.SEED, self.max_staleness_steps, is_source)
            state.num_steps, state.rests = 0, False

    @torch.no_grad()
    def _change(self, state: AsyncServersState, when: str) -> None:
        """Write the changes since the last pull to ``state.leaving``; warn of those that are not finite for the first time."""
        state.weights.read(state.changed)
        changes, before = state.weights.views(state.changed), state.weights.views(state.pulled)
        for i, (changed, pulled) in enumerate(zip(state.changed, state.pulled, strict=True)):
            changed -= pulled
            if not is_finite(changed):
                members = zip(state.weights.names[i], changes[i], before[i], strict=True)
                names = [name for name, new, old in members if is_finite(old) and not is_finite(new)]
                if names:
                    what = f"{when}: the change of {some_of(names)} holds NaN or infinity"
                    what += ", and so do the servers' weights from now on"
                    _log.warning("%s", explain(what, rank=state.group.rank()))
            if self.average:
                changed /= state.group.size()
            if state.leaving[i] is not changed:
                state.leaving[i].copy_(changed)

    def _request(self, state: AsyncServersState, opcode: Opcode, number: int = 0, has_payload: bool = True) -> None:
        """Send a message for each part, wait for the answers, and write the received weights into the parameters."""
        requests = []
        for part in state.parts:
            leaving, coming = part.of(state.leaving[part.tensor]), part.of(state.coming[part.tensor])
            message = ServerMessage(opcode, 0, part.index, number, leaving.dtype, part.num_elements, has_payload)
            request = PartRequest(message, leaving if has_payload else None, coming, part.urgency)
            requests.append((part.server, request))
        state.client.send(requests)
        for _, request in requests:
            request.wait()
        for pulled, coming in zip(state.pulled, state.coming, strict=True):
            if pulled is not coming:
                pulled.copy_(coming)
        state.weights.write(state.pulled)
