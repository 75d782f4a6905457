"""Cached datasets and their stores, with servers of Redis; skipped where Redis is not installed."""

from __future__ import annotations

import pickle
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from guozhuang.compat.bagua.torch_api.contrib import CachedDataset, CacheLoader
from guozhuang.compat.bagua.torch_api.contrib.utils import redis_store
from guozhuang.compat.bagua.torch_api.contrib.utils.redis_store import RedisStore, start_redis_server_cli
from guozhuang.compat.bagua.torch_api.contrib.utils.store import ClusterStore
from guozhuang.compat.bagua.torch_api.env import find_free_network_port
from guozhuang.errors import UsageError
from tests.launching import guozhuang, write
from tests.waiting import until


@pytest.fixture(name="hosts", scope="module")
def _hosts() -> Iterator[list[dict[str, Any]]]:
    pytest.importorskip("redis")
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server")
    started, hosts = [], []
    while len(hosts) < 3:
        # With a password: a port that was free may have become that of another program's server.
        host = {"host": "127.0.0.1", "port": find_free_network_port(), "password": secrets.token_hex(8)}
        words = ("--loglevel", "warning", "--requirepass", host["password"])
        server, store = start_redis_server_cli(host["port"], 10 << 20, *words), RedisStore([host])
        until(lambda store=store, server=server: store.status() or server.poll() is not None)
        if server.poll() is None:
            started.append(server)
            hosts.append(host)
    yield hosts
    for each in started:
        each.terminate()
        each.wait()


@pytest.mark.parametrize("num_servers", [1, 3])
def test_a_store(hosts: list[dict[str, Any]], num_servers: int) -> None:
    store = RedisStore(hosts[:num_servers])
    store.clear()
    store.set("a", "1")
    store.mset({"b": b"2", "c": "3", "d": "4"})
    again = pickle.loads(pickle.dumps(store))  # as for a worker of a data loader
    assert again.get("a") == b"1" and again.get("e") is None
    assert again.mget(["d", "e", "b"]) == [b"4", None, b"2"] and again.num_keys() == 4
    assert [each.num_keys() for each in store.stores] != [0, 0, 4]
    store.clear()
    assert store.num_keys() == 0


class _Counted:
    def __init__(self) -> None:
        self.num_made = 0

    def __len__(self) -> int:
        return 102

    def __getitem__(self, item: int) -> tuple[int, str]:
        self.num_made += 1
        return item**2, str(item)


def test_a_cached_dataset(hosts: list[dict[str, Any]]) -> None:
    RedisStore(hosts).clear()
    for name, num_keys in (("one", 102), ("two", 204)):
        plain, counted = _Counted(), _Counted()
        dataset = CachedDataset(counted, dataset_name=name, hosts=hosts)
        for _ in range(10):
            assert [dataset[i] for i in range(len(dataset))] == [plain[i] for i in range(102)]
        assert counted.num_made == 102 and dataset.cache_loader.num_keys() == num_keys


def test_a_store_that_fails_ends_nothing(hosts: list[dict[str, Any]], caplog: pytest.LogCaptureFixture) -> None:
    nobody = [{"host": "127.0.0.1", "port": find_free_network_port()}]
    loader = CacheLoader(hosts=nobody)
    assert [loader.get(key, lambda key: key + 1) for key in (1, 1, 2)] == [2, 2, 3]
    assert caplog.text.count("the cache failed") == 1


SCRIPT = """
import bagua.torch_api as bagua
from bagua.torch_api.contrib import CachedDataset
bagua.init_process_group()
data = CachedDataset(list(range(40)), writer_buffer_size=1)
mine = range(bagua.get_rank(), 40, 2)
assert [data[i] for i in mine] == list(mine)
bagua.barrier()
assert data.cache_loader.num_keys() == 40
print("forty")
"""


def test_ranks_share_a_server_that_ends_with_them(tmp_path: Path, hosts: list[dict[str, Any]]) -> None:
    done = guozhuang("run", "-np", 2, write(tmp_path, SCRIPT), folder=tmp_path)
    assert done.returncode == 0 and done.stdout.count("forty") == 2, done.stderr


@pytest.mark.parametrize(("size", "address"), [(2, "127.0.0.1"), (4, "10.1.2.3")])
def test_a_server_listens_where_other_nodes_reach_it(size: int, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, settings = [], []
    for name, value in {"RANK": 0, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "first")
    monkeypatch.setattr(redis_store, "_redis", lambda: None)
    monkeypatch.setattr(redis_store, "_run", settings.append)
    monkeypatch.setattr(redis_store, "_wait", lambda *_: None)
    # A host's own name may mean loopback on it: the route to the first rank tells its address then.
    monkeypatch.setattr(redis_store, "own_address", lambda hints, others: asked.append(others) or "10.1.2.3")
    RedisStore()
    assert f"bind {address}\n" in settings[0] and asked == [["first"]] * (size > 2)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="redis"):
        CacheLoader(backend="memory")
    with pytest.raises(UsageError, match="at least one store"):
        ClusterStore([])
    monkeypatch.setattr(redis_store.shutil, "which", lambda _: None)
    with pytest.raises(ImportError, match="hosts="):
        start_redis_server_cli(1, 1)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ImportError, match="pip install redis"):
        RedisStore()
