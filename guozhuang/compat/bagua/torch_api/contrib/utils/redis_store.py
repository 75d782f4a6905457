"""``RedisStore``: keys in Redis servers, which are named, or started on each node."""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.net.interfaces import own_address

from ...communicators import place
from ...env import find_free_network_port, get_local_rank, get_local_size
from .store import ClusterStore, Key, Store, Value

_CAPACITY_BYTES = 100 << 30
_START_S = 30.0
_ANSWER_S = 10.0


class RedisStore(ClusterStore):
    """Keys in one Redis server, or spread over several.

    Args:
        hosts: of running servers, as ``[{"host": "10.0.0.1", "port": 6379}]``, perhaps with a ``password``; the same on all
            ranks. None: the first rank of each node starts one, which ends with it; every rank must call then.
        cluster_mode: spread keys over all servers; False: each node uses one of them alone.
        capacity_per_node: the memory of a started server, in bytes; the least recently used keys go when it is full.

    Raises:
        ImportError: redis-py, or a program redis-server to start, is not there.
        WorldError: a server that was started does not answer within 30 s.
    """

    def __init__(
        self,
        hosts: Sequence[Mapping[str, Any]] | None = None,
        cluster_mode: bool = True,
        capacity_per_node: int = _CAPACITY_BYTES,
    ) -> None:
        _redis()
        if hosts is None:
            own, all_of_them = _started(capacity_per_node)
            hosts = all_of_them if cluster_mode else [own]
        elif not hosts:
            raise UsageError(explain("hosts names at least one server", value=hosts, fix="leave it out to start one"))
        elif not cluster_mode:
            hosts = [hosts[place()[0] // _ranks_of_a_node() % len(hosts)]]
        super().__init__([_OneServer(dict(host)) for host in hosts])


class _OneServer(Store):
    """The keys of one server. It can be pickled; each process connects for itself."""

    def __init__(self, where: dict[str, Any]) -> None:
        self._where = where
        self._connection: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_where": self._where, "_connection": None}

    @property
    def _client(self) -> Any:
        if self._connection is None:
            module = _redis()
            # By default redis-py tries again for half a minute, in which a training would stand still.
            once_more = module.retry.Retry(module.backoff.NoBackoff(), 1)
            limits = {"socket_timeout": _ANSWER_S, "socket_connect_timeout": _ANSWER_S, "retry": once_more}
            self._connection = module.Redis(**{**limits, **self._where})
        return self._connection

    @override
    def set(self, key: Key, value: Value) -> None:
        self._client.set(key, value)

    @override
    def get(self, key: Key) -> bytes | None:
        found: bytes | None = self._client.get(key)
        return found

    @override
    def mset(self, dictionary: Mapping[Key, Value]) -> None:
        self._client.mset(dict(dictionary))

    @override
    def mget(self, keys: Sequence[Key]) -> list[bytes | None]:
        found: list[bytes | None] = self._client.mget(list(keys))
        return found

    @override
    def num_keys(self) -> int:
        return int(self._client.dbsize())

    @override
    def clear(self) -> None:
        self._client.flushdb()

    @override
    def status(self) -> bool:
        try:
            return bool(self._client.ping())
        except _redis().exceptions.RedisError:
            return False

    @override
    def shutdown(self) -> None:
        if self.status():
            self._client.shutdown(nosave=True)


def start_redis_server_cli(port: int, capacity: int, *args: str) -> subprocess.Popen[bytes]:
    """Start a server on this machine's own address 127.0.0.1, and return its process.

    Args:
        port: where it listens.
        capacity: its memory, in bytes.
        *args: further arguments of the program.

    Raises:
        ImportError: there is no program ``redis-server``.
    """
    return _run(f"bind 127.0.0.1\nport {port}\nmaxmemory {capacity}\n", *args)


def _run(settings: str, *args: str) -> subprocess.Popen[bytes]:
    """Start a server with settings that do not stand on its command line, where others could read a password."""
    program = shutil.which("redis-server")
    if program is None:
        fix = "install it (apt-get install redis-server), or name running servers: hosts=[{'host': ..., 'port': ...}]"
        raise ImportError(explain("there is no program redis-server", fix=fix))
    always = 'save ""\nappendonly no\nmaxmemory-policy allkeys-lru\n'
    started = subprocess.Popen([program, "-", *args], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert started.stdin is not None
    started.stdin.write((settings + always).encode())
    started.stdin.close()
    atexit.register(_end, started)
    return started


def _end(started: subprocess.Popen[bytes]) -> None:
    started.terminate()
    started.wait()


def _started(capacity: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Start a server on the first rank of each node; return that of this node, and all of them by the rank that started it."""
    mine: dict[str, Any] | None = None
    rank, size = place()
    spans_nodes = size > _ranks_of_a_node()
    if get_local_rank() == 0:
        others = [os.environ.get("MASTER_ADDR", "127.0.0.1")]
        host = own_address([socket.gethostname()], others) if spans_nodes else "127.0.0.1"
        mine = {"host": host, "port": find_free_network_port(), "password": secrets.token_hex(16)}
        settings = f"bind {host}\nport {mine['port']}\nrequirepass {mine['password']}\nmaxmemory {capacity}\n"
        _wait(_OneServer(mine), _run(settings), rank)
    found: list[dict[str, Any] | None] = [mine]
    if dist.is_initialized():
        found = [None] * size
        dist.all_gather_object(found, mine)
    servers = [each for each in found if each is not None]
    own = [each for each in found[: rank + 1] if each is not None]
    if not own:
        fix = "call init_process_group() first, so that ranks learn which server their node has"
        raise UsageError(explain("this rank starts no server, and does not know the others", rank=rank, fix=fix))
    return own[-1], servers


def _wait(server: _OneServer, process: subprocess.Popen[bytes], rank: int) -> None:
    deadline = time.monotonic() + _START_S
    while not server.status():
        if process.poll() is not None or time.monotonic() > deadline:
            what = f"the redis-server that this rank started does not answer (exit code {process.poll()})"
            raise WorldError(explain(what, value=server._where["port"], rank=rank, fix="run redis-server by hand"))
        time.sleep(0.02)


def _ranks_of_a_node() -> int:
    return max(get_local_size(), 1)


def _redis() -> Any:
    try:
        import redis
    except ModuleNotFoundError as error:
        fix = "pip install redis; servers that run already are named by hosts=[{'host': ..., 'port': ...}]"
        raise ImportError(explain("RedisStore needs the package redis", fix=fix)) from error
    return redis
