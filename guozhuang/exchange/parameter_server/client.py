"""The worker's side of parameter servers: sends parts of tensors to the servers, most urgent first.

[Note: credit] A more urgent request cannot overtake bytes that gloo already has, so a connection gives gloo only enough to keep
the link busy: ``CREDIT_PARTS`` parts whose sending has not ended. Further requests wait in a queue, ordered by urgency. Answers
arrive while the next parts are sent, so the link is used in both directions.

[Note: the end] A worker that drops the model sends GOODBYE to the servers in the background. A worker that ends without error
sends GOODBYE and, if the workers serve, stays until all workers have sent it, or the limit has passed, because they may still
need its server. Its launcher cannot tell the others that it has ended, so it does so itself, and leaves the world first: who
waits for it there, in a collective or before a checkpoint, would else wait for its end, and it for theirs. What it does then is
no hang, so nothing watches its main thread any more. A worker that ends after an error closes all connections, so that the
other processes notice at once.

[Note: lifelines] When a connection breaks, gloo fails the receives that wait for their first byte, but not a send or an answer
of which a part was on its way: these reach the limit of the group. So something waits for a first byte: a worker that serves
waits for headers of all others, until they leave; for a server of its own it waits for the byte that says that the worker has
left. Its failure ends all requests of all connections, whatever the sending and the receiving threads are stuck in.

Source: parts of a few megabytes and the order of their sending: Peng et al., A Generic Communication Scheduler for Distributed
DNN Training Acceleration (ByteScheduler), SOSP 2019, https://doi.org/10.1145/3341301.3359642; the load of servers by bytes:
Jiang et al., A Unified Architecture for Accelerating Distributed DNN Training (BytePS), OSDI 2020.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import UsageError, WorldError, explain
from ...groups import roll_call
from ...groups.agreement import STORE_S, members_of, store_of
from ...groups.serial import SerialThread, SerialWork
from ...groups.subgroups import timeout_s
from ...net.client import attempt
from ...net.ended import tell_ended
from ...net.store import innermost, next_part
from ...registry import registry
from ...watch import afterwards
from ...world import shutdown
from ...world.requests import requested_servers
from . import protocol
from .protocol import HEADER, LIFELINE, PAYLOAD, REPLY, Announcement, Opcode, ServerGroup, ServerMessage, wire
from .service import FOR_EVER, Service, copy_into

CREDIT_PARTS = 2
_CREDIT_MESSAGES = 16  # at most this many messages are being sent at a time; small parts reach this limit
_GOODBYE_S = 5.0


class PartRequest(SerialWork):
    """One message to a server, and its answer. Each wait for the server has the limit of its group.

    Args:
        message: the header.
        payload: the values to send, contiguous in CPU memory; None for a message without payload.
        into: receives the answer, contiguous in CPU memory; None for a message without an answer.
        urgency: requests with a lower number are sent first.
        before: called in the sending thread before the payload is sent.
    """

    def __init__(
        self,
        message: ServerMessage,
        payload: Tensor | None = None,
        into: Tensor | None = None,
        urgency: float = 0,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self.message, self.payload, self.into, self.before = message, payload, into, before
        self.urgency = urgency


class Connection:
    """Sends requests to one server, with one thread for sending and one for answers; see also [Note: lifelines].

    Args:
        group: the group of workers and servers, in which this process is a worker.
        server: the number of the server.
        part_bytes: the largest size of a part, in bytes.
        service: the service of this process, if this process is that server itself; else None.
        everyone: the connections to all servers; this one is added. The failure of one is that of all.
    """

    def __init__(
        self,
        group: ServerGroup,
        server: int,
        part_bytes: int,
        service: Service | None,
        everyone: list[Connection],
    ) -> None:
        self._group, self._server, self._service, self._part_bytes = group, group.servers[server], service, part_bytes
        self._sender, self._receiver = (SerialThread("guozhuang to server", "message") for _ in range(2))
        self._leaving: collections.deque[tuple[int, list[Any], Tensor | None]] = collections.deque()
        self._open: set[PartRequest] = set()  # requests that have not ended
        self._lock = threading.Lock()
        self._failed: BaseException | None = None
        self._has_left = False
        self._lifeline = SerialThread("guozhuang lifeline")
        self._everyone = everyone
        everyone.append(self)
        if service is not None:
            service.when_it_fails(self._service_failed)
        elif not group.workers_serve:
            self._lifeline.run(self._hold)
            self._lifeline.close()

    def submit(self, request: PartRequest) -> None:
        """Queue a request for sending; the most urgent request is sent first. After a failure it ends at once."""
        with self._lock:
            self._open.add(request)
        if self._failed is not None:
            self._end(request, self._failed)
        self._sender.run(functools.partial(self._send, request), urgency=request.urgency)

    def leave(self) -> None:
        """Queue a GOODBYE behind all other requests. Not collective, and does not wait."""
        if not self._has_left:
            self._has_left = True
            self.submit(PartRequest(ServerMessage(Opcode.GOODBYE), urgency=float("inf")))
            self._sender.close()

    def wait(self, limit_s: float) -> bool:
        """Wait until the threads have ended, for at most ``limit_s`` seconds each; return whether they have."""
        have_ended = [each.join(limit_s) for each in (self._sender, self._receiver, self._lifeline)]
        return all(have_ended)

    def _hold(self) -> None:
        try:
            self._group.receive(torch.empty(1, dtype=torch.uint8), self._server, LIFELINE).wait(FOR_EVER)
        except BaseException as error:
            self._fail(self._doing(), error)

    def _end(self, request: PartRequest, error: BaseException | None = None) -> None:
        with self._lock:
            self._open.discard(request)
        request.end(error)

    def _doing(self) -> str:
        """Return what this process waits for, of all servers."""
        for each in self._everyone:
            with each._lock:
                if each._open:
                    return str(min(each._open, key=lambda request: request.urgency).message)
        return "the other ranks"

    def _send(self, request: PartRequest) -> None:
        is_last = request.message.opcode is Opcode.GOODBYE
        try:
            if self._failed is not None:
                raise self._failed
            request.before()
            if self._service is not None:
                self._serve(request, self._service)
            else:
                self._transmit(request, is_last)
            if is_last:  # the answer to GOODBYE is for another thread; other requests end when their answers arrive
                self._end(request)
        except BaseException as error:
            self._fail(str(request.message), error)
        finally:
            if is_last:
                self._receiver.close()

    def _transmit(self, request: PartRequest, is_last: bool) -> None:
        message, payload, group = request.message, request.payload, self._group
        if request.into is not None:
            answer = group.receive(wire(request.into), self._server, REPLY + message.part)
            self._receiver.run(functools.partial(self._receive, request, answer))
        works = [group.send(message.encode(), self._server, HEADER)]
        if payload is not None:
            works.append(group.send(wire(payload), self._server, PAYLOAD))
        self._leaving.append((0 if payload is None else payload.nbytes, works, payload))
        while self._leaving and (is_last or not self._has_credit()):  # bounds bytes in flight: [Note: credit]
            for work in self._leaving.popleft()[1]:
                work.wait(group.limit)

    def _has_credit(self) -> bool:
        num_bytes = self._part_bytes + sum(each[0] for each in self._leaving)
        return len(self._leaving) < _CREDIT_MESSAGES and num_bytes <= CREDIT_PARTS * self._part_bytes

    def _receive(self, request: PartRequest, answer: Any) -> None:
        try:
            answer.wait(self._group.limit)
            self._end(request)
        except BaseException as error:
            self._fail(str(request.message), error)

    def _serve(self, request: PartRequest, service: Service) -> None:
        if request.message.opcode is Opcode.GOODBYE:
            service.leave(self._group.rank)
            return
        assert request.into is not None
        copy = copy_into(request.into)

        def reply(answer: Tensor) -> Callable[[], object]:
            has_left = copy(answer)
            self._end(request)
            return has_left

        service.parts.take(self._group.rank, request.message, request.payload, True, reply)

    def _service_failed(self, text: str) -> None:
        self._fail(self._doing(), RuntimeError(text))

    def _fail(self, doing: str, error: BaseException) -> None:
        """End all requests of all connections, and all later ones, with the first error; and cut what leads to others."""
        group, is_derived = self._group, isinstance(error, RuntimeError) and not isinstance(error, WorldError)
        if self._failed is None and is_derived:
            error = group.error_of(self._server, doing, error)
        ended, is_first = [], False
        for each in self._everyone:
            with each._lock:
                is_first, each._failed = is_first or each._failed is None, each._failed or error
                ended += [(each, request, each._failed) for request in each._open]
        # Before the requests end: who hears of the failure may end the process.
        if is_first and is_derived:
            group.crossing.cut()  # the cause is reported already
        elif is_first:
            group.abort(None, f"{group.names[group.rank]} failed: {error}")
        for connection, request, failed in ended:
            connection._end(request, failed)


class ServerClient:
    """The connections of one model of one worker to all servers, and the worker's own service if the workers serve.

    Every rank of the group must construct it, and send the same requests. For its end see [Note: the end].

    Args:
        group: the workers.
        servers: see :func:`num_servers`.
        part_bytes: the largest size of a part, in bytes.

    Attributes:
        connections: one connection per server; empty for a single worker without server processes.

    Raises:
        UsageError: the run has another number of servers.
        WorldError: a process did not join within the group's time-out; the text names it.
    """

    def __init__(self, group: dist.ProcessGroup, servers: int | None, part_bytes: int) -> None:
        self.connections: list[Connection] = []
        found = _join(group, servers)
        if found is None:
            return
        service = Service(found) if found.workers_serve else None
        for number, rank in enumerate(found.servers):
            Connection(found, number, part_bytes, service if rank == found.rank else None, self.connections)
        ending = _Ending(found, self.connections, service, innermost(store_of(group)))
        self._finalizer = weakref.finalize(self, ending.in_background)
        self._finalizer.atexit = False
        atexit.register(ending.at_exit)

    def send(self, requests: Iterable[tuple[int, PartRequest]]) -> None:
        """Submit requests, given as (number of the server, request) pairs, in the order of urgency."""
        registry.num_exchanges += 1  # for the heartbeat, which else sees no collective in such a training
        for server, request in sorted(requests, key=lambda each: each[1].urgency):
            self.connections[server].submit(request)

    def close(self) -> None:
        """Send GOODBYE to the servers, in the background. Not collective."""
        if self.connections:
            self._finalizer()


class _Ending:
    """Ends a client's connections and service, when the client is dropped or the process ends. See [Note: the end]."""

    def __init__(
        self, group: ServerGroup, connections: Sequence[Connection], service: Service | None, store: dist.Store
    ) -> None:
        self._group, self._connections, self._service = group, connections, service
        self._store, self._number = store, dist.get_rank()
        self._thread = SerialThread("guozhuang leaves servers", "goodbye")
        self._is_at_exit = False

    def in_background(self) -> None:
        # The garbage collector may call this at any point, so locks are taken only in another thread.
        if not self._is_at_exit:
            self._thread.run(self._finish)
            self._thread.close()

    def _finish(self) -> None:
        self._leave(self._group.limit_s)
        if self._service is not None:
            self._service.wait_until_over()
        self._group.close()
        atexit.unregister(self.at_exit)

    def at_exit(self) -> None:
        self._is_at_exit = True
        if getattr(sys, "last_value", None) is not None:
            group = self._group
            group.abort(group.rank, f"{group.names[group.rank]} ended after an error")
            return
        if self._service is not None:
            self._leave_world()
        has_ended = self._leave(_GOODBYE_S)
        # A thread that is inside gloo when the interpreter ends aborts the process.
        if self._service is not None:
            self._service.end(self._group.limit_s)
        elif not has_ended:
            self._group.crossing.cut()
            self._leave(_GOODBYE_S)
        self._thread.join(_GOODBYE_S)

    def _leave_world(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone: so is the launcher, or the rank that kept it
            attempt(STORE_S, functools.partial(tell_ended, self._store, self._number))
        shutdown()
        afterwards.stop()

    def _leave(self, limit_s: float) -> bool:
        for connection in self._connections:
            connection.leave()
        have_ended = [connection.wait(limit_s) for connection in self._connections]
        return all(have_ended)


def num_servers(asked: int | None) -> int:
    """Return how many server processes an exchange uses; 0 means that the workers serve.

    Args:
        asked: the number that the user asked for; None: as many as this run has.

    Raises:
        UsageError: ``asked`` is a number other than 0, and this run has another number of servers.
    """
    there = requested_servers()
    if asked == 0 or (asked is None and there is None):
        return 0
    num_there = 0 if there is None else there[0]
    if asked is not None and asked != num_there:
        what = f"the exchange asks for {asked} parameter servers, and this run has {num_there}"
        raise UsageError(explain(what, fix=f"start it with `guozhuang run --servers {asked}`, or leave servers out"))
    return num_there


def on_cpu(flat: Tensor) -> Tensor:
    """Return the tensor itself if it is on the CPU; else a CPU tensor of its size, pinned if it is on a CUDA device."""
    is_there = flat.device.type == "cpu"
    return flat if is_there else torch.empty_like(flat, device="cpu", pin_memory=flat.device.type == "cuda")


def check_numbers(part_bytes: int, servers: int | None) -> None:
    """Check the settings that the two exchanges through parameter servers share.

    Raises:
        UsageError: ``part_bytes`` is below 1, or ``servers`` is below 0.
    """
    if part_bytes < 1:
        raise UsageError(explain("part_bytes is a size in bytes, at least 1", value=part_bytes, fix="give 4_000_000"))
    if servers is not None and servers < 0:
        raise UsageError(explain("servers is a count, at least 0, or None", value=servers, fix="leave it out"))


def traffic(num_bytes: int, servers: int | None, world_size: int) -> float:
    """Return the bytes that a worker sends per step: ``num_bytes`` to server processes, or 2 (n-1)/n of it if workers serve."""
    return num_bytes if num_servers(servers) else 2 * (world_size - 1) * num_bytes / world_size


def _join(group: dist.ProcessGroup, asked: int | None) -> ServerGroup | None:
    """Join the group of workers and servers as a worker; return None for a single worker without server processes."""
    rank, size, limit_s = group.rank(), group.size(), timeout_s(group)
    count = num_servers(asked)
    if count == 0 and size == 1:
        return None
    store = next_part(store_of(group), "parameter server", rank)
    keeper = ""
    if count:
        there = requested_servers()
        assert there is not None
        outer, keeper = protocol.connect(there[1], limit_s), protocol.address_of(there[1]).host
        number = str(protocol.announce(outer, Announcement(size, limit_s))) if rank == 0 else ""
        purpose = "to meet the parameter servers"
        members = members_of(group)
        [number, *_] = roll_call.call(store, "number", rank, size, number, limit_s, purpose=purpose, members=members)
        store = protocol.store_of_group(outer, int(number))
    return protocol.join(store, rank, size, count, limit_s, keeper, members_of(group))
