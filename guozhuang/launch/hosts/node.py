"""The program that the supervisor of a host starts: it takes part in the hosts' rendezvous, then becomes the host's agent.

``python -m guozhuang.launch.hosts.node IN OUT``, where IN and OUT are descriptors for messages (frames.py) from and to the
launcher. The first message is a ``NodeConfig``. The node answers ``NodeReady``, and carries out the launcher's requests until
``UseDoor``. Then it becomes the agent, or, if it is to run parameter servers, starts and watches these.

[Note: the meeting point] The first host opens a store on loopback and a door (``net.door``) on each address by which other
hosts might reach it, each at a port that the kernel chose; the other hosts try all of them. The launcher takes the first
door that all hosts reached, so neither address nor port is guessed, and no port is released in between. Every other host
then opens a passage to that door on its own loopback. So MASTER_ADDR is 127.0.0.1 on each host, and scripts need not know
of doors. Parameter servers and ranks meet at that store too.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.launch import agent
from guozhuang.launch.console.say import say
from guozhuang.launch.hosts import frames
from guozhuang.launch.hosts.supervisor import decode, encode
from guozhuang.launch.rendezvous.fixed import FIRST_HOST
from guozhuang.launch.request import Extension, Request
from guozhuang.launch.servers import VARIABLE as SERVERS
from guozhuang.launch.servers import Servers
from guozhuang.launch.signals import ENDING, Signals
from guozhuang.net import interfaces
from guozhuang.net.door import Door, NotOurDoorError, knock, pass_through
from guozhuang.net.store import serve
from guozhuang.watch.processes import node_identity

_KNOCK_S = 5.0
_STORE_S = 300.0
_ORPHAN_S = 5.0
_LOOK_AT_SERVERS_S = 0.05
# Prefixes of variables that set up a rendezvous (torchrun's, and an outer run's secret); they are removed: -H sets it up.
_SETTLED = (
    "PET_NNODES", "PET_NODE_RANK", "PET_NPROC", "PET_MASTER", "PET_RDZV", "PET_STANDALONE", "PET_LOCAL_ADDR", "PET_MAX_RES",
    "GUOZHUANG_SECRET",
)  # fmt: skip


class Node:
    """One host of the run: answers the launcher's requests until ``UseDoor``, then is the agent, or runs parameter servers."""

    def __init__(self, channel: Channel, config: frames.NodeConfig) -> None:
        self._channel = channel
        for name in [name for name in os.environ if name.startswith(_SETTLED)]:
            del os.environ[name]
        self._config, self._secret = config, bytes.fromhex(config.secret)
        out, err = config.terminals
        self._request = Request(
            extension=Extension(**config.extension),
            host=config.host,
            attempt=config.attempt,
            max_restarts=config.max_restarts,
            terminals=((out[0], out[1]), (err[0], err[1])),
            finished=lambda: channel.say(frames.RanksFinished()),
            report=channel.say,
        )
        os.environ.update(self._request.extension.defaults(os.environ))
        self._store: dist.Store | None = None
        self._store_port = 0
        self._doors: dict[tuple[str, int], Door] = {}
        self._door: tuple[str, int] = ("", 0)  # address and port of the ``Door`` that all hosts reached

    def run(self) -> int:
        """Take part in the rendezvous of the hosts, then run this host's agent or servers; return the exit code."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._close_doors)
            config, options = self._config, argparse.Namespace(**self._config.options)
            if config.num_nodes > 1 or config.num_servers:
                port = self._meet(stack)
                if config.serves:
                    return self._serve(port)
                if config.num_nodes > 1:
                    options.nnodes, options.node_rank = str(config.num_nodes), config.node_rank
                    options.master_addr, options.master_port = "127.0.0.1", port
                if config.num_servers:
                    os.environ[SERVERS] = f"{config.num_servers}@127.0.0.1:{port}"
            elif config.interface is not None:
                os.environ.update(interfaces.variables_towards("", os.environ, config.interface))
            stack.enter_context(self._channel.watched())
            return agent.run(options, self._request)

    def _serve(self, port: int) -> int:
        servers = Servers(self._config.serves, self._config.num_servers, say)
        signals = Signals(ENDING)
        signals.note()
        with signals, contextlib.closing(servers), self._channel.watched():
            servers.start(f"127.0.0.1:{port}")
            self._channel.say(frames.ServerEnded(_end_of_servers(servers, signals.noted, self._is_store_there)))
        return 1

    def _is_store_there(self) -> bool:
        """Return whether the first host's ``Door`` to the store still answers; its agent closes it when the run is over."""
        try:
            with knock(*self._door, self._secret, _KNOCK_S):
                return True
        except (OSError, NotOurDoorError):
            return False

    def _meet(self, stack: contextlib.ExitStack) -> int:
        """Answer the launcher's requests until the rendezvous is over; return the loopback port that leads to the store."""
        known, named = interfaces.addresses(), self._config.interface
        if named is not None:
            known = {named: [interfaces.named(named).address, *known[named]]}
        # SSH_CONNECTION holds client address and port, server address and port: by the third the launcher reached this host.
        by_ssh = os.environ.get("SSH_CONNECTION", "").split()
        reached_at = by_ssh[2] if len(by_ssh) == 4 else None
        self._channel.say(frames.NodeReady(node_identity(), known, reached_at))
        while True:
            request = self._channel.hear()
            if isinstance(request, frames.OpenDoors):
                self._channel.say(self._listen(request.addresses, request.port))
            elif isinstance(request, frames.TryDoors):
                self._channel.say(_knock(request.doors, self._secret))
            else:
                assert isinstance(request, frames.UseDoor), request
                return self._go(request.host, request.port, stack)

    def _listen(self, candidates: Sequence[str], port: int) -> frames.DoorsOpened:
        listener = socket.create_server(("127.0.0.1", 0))
        self._store_port = int(listener.getsockname()[1])
        # The agent, later in this process, opens a store at this port and gets this store, because both are multi_tenant.
        self._store = serve(listener, _STORE_S, is_shared=True)
        refused = {}
        for host in candidates:
            try:
                outer = interfaces.listen_at(host, port)
            except OSError as error:
                refused[host] = error.strerror or str(error)
                continue
            found = (host, int(outer.getsockname()[1]))
            self._doors[found] = Door(outer, self._store_port, self._secret)
        return frames.DoorsOpened(list(self._doors), refused)

    def _go(self, host: str, port: int, stack: contextlib.ExitStack) -> int:
        """Use this ``Door``: the first host closes the others, other hosts forward a loopback port; return the store's port."""
        self._door = host, port
        if self._config.node_rank == 0:
            for found in [each for each in self._doors if each != (host, port)]:
                self._doors.pop(found).close()
            own_port = self._store_port
        else:
            passage = pass_through(host, port, self._secret, _KNOCK_S)
            stack.callback(passage.close)
            own_port = passage[1]
        os.environ.update(interfaces.variables_towards(host, os.environ, self._config.interface))
        os.environ[FIRST_HOST] = host
        return own_port

    def _close_doors(self) -> None:
        for door in self._doors.values():
            door.close()


def _knock(doors: Sequence[tuple[str, int]], secret: bytes) -> frames.DoorsTried:
    """Connect to each ``Door`` at the same time; return for each the reason why that failed, "" if it did not."""
    reasons = ["nobody answered"] * len(doors)

    def try_one(number: int, host: str, port: int) -> None:
        try:
            with knock(host, port, secret, _KNOCK_S):
                reasons[number] = ""
        except TimeoutError:
            pass
        except (OSError, NotOurDoorError) as error:
            reasons[number] = str(error)

    threads = [threading.Thread(target=try_one, args=(n, *door), daemon=True) for n, door in enumerate(doors)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _KNOCK_S)
    return frames.DoorsTried(list(reasons))


class Channel:
    """A node's connection to the launcher, by pipes through the supervisor: receives requests and sends messages."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = os.fdopen(reading, "rb"), writing
        os.set_inheritable(reading, False)
        os.set_inheritable(writing, False)

    def hear(self) -> object:
        """Wait for the launcher's next request, and return it.

        Raises:
            WorldError: the supervisor is gone.
        """
        line = self._reading.readline()
        if not line:
            raise WorldError(explain("the supervisor of this host is gone"))
        return decode(line, frames.TO_NODE)

    def say(self, message: Any) -> None:
        """Send the launcher a message (a dataclass); do nothing if the supervisor is gone."""
        with contextlib.suppress(OSError):
            os.write(self._writing, encode(message))

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside the ``with`` block, end this process and its ranks as soon as the supervisor has ended."""

        def watch() -> None:
            while os.read(self._reading.fileno(), 4096):  # not _reading.read(), whose lock would be held at exit
                pass
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(_ORPHAN_S)
            _kill_everything()

        threading.Thread(target=watch, name="guozhuang supervisor watch", daemon=True).start()
        yield


def _end_of_servers(servers: Servers, signals: Sequence[int], is_store_there: Callable[[], bool]) -> str:
    """Watch servers until this process gets a signal or a server has ended. The caller closes them.

    Args:
        servers: the servers of this host.
        signals: the signals that this process has got; a signal handler appends to it.
        is_store_there: returns whether the store can still be reached.

    Returns:
        A sentence: which server ended too early, and how; or which signal ended this process (at the end of a run, too).
    """
    is_over = False
    while not signals:
        time.sleep(_LOOK_AT_SERVERS_S)
        ended = None if is_over else servers.ended()
        if ended is None or signals:
            continue
        if is_store_there():
            return ended
        # The run is over, or the first host is lost. The launcher notices either by itself, but late while it is stopped
        # (Ctrl-Z) or blocked by a pager. A failure that is reported here would make a successful run fail.
        is_over = True
    return f"its servers were told to end by {signal.Signals(signals[0]).name}"


def _kill_everything() -> None:
    import psutil

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.kill()
    os._exit(128 + signal.SIGKILL)


def main(arguments: Sequence[str]) -> int:
    """Run one node, with descriptors for messages as arguments; return the agent's exit code."""
    logging.basicConfig(format="guozhuang: %(message)s", level=logging.WARNING)
    channel = Channel(int(arguments[0]), int(arguments[1]))
    try:
        config = channel.hear()
        assert isinstance(config, frames.NodeConfig), config
        return Node(channel, config).run()
    except (UsageError, WorldError) as error:
        channel.say(frames.NodeRefused(str(error)))
        return 2 if isinstance(error, UsageError) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
