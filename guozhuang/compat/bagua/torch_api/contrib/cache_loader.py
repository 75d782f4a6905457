"""``CacheLoader``: keeps what is slow to make, such as decoded samples, in a store that all ranks share."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from typing import Any

from guozhuang.errors import UsageError, explain

from .utils.store import Store

_log = logging.getLogger("guozhuang")
_READS_TO_FLUSH = 1000


class CacheLoader:
    """Returns values from a store, and makes and stores those that are not there.

    Whatever fails in the store is logged once, and the value is made as if there were none: a cache never ends a training.
    Values are pickled, so let nobody else write to the store.

    Args:
        backend: "redis".
        dataset_name: begins the keys, so that several datasets may share a store.
        writer_buffer_size: so many new values are written at once.
        **kwargs: of ``RedisStore``.

    Raises:
        UsageError: (a ValueError) another backend.
        ImportError: redis is not there.

    Attributes:
        store: the store.
    """

    def __init__(
        self, backend: str = "redis", dataset_name: str = "", writer_buffer_size: int = 1, **kwargs: Any
    ) -> None:
        if backend != "redis":
            raise UsageError(explain("the backend of a cache is redis", value=backend, fix="leave it out"))
        from .utils.redis_store import RedisStore

        self.store: Store = RedisStore(**kwargs)
        self._name, self._buffer_size = dataset_name, writer_buffer_size
        self._buffer: dict[str, bytes] = {}
        self._num_reads = 0
        self._has_failed = False

    def get(self, key: Any, load_fn: Callable[[Any], Any]) -> Any:
        """Return the value of a key from the store, or what ``load_fn(key)`` returns, which is then stored."""
        name = f"{self._name}_{key}"
        found = self._buffer.get(name) or self._tried(lambda: self.store.get(name))
        if found is not None:
            self._num_reads += 1
            if self._num_reads % _READS_TO_FLUSH == 0:
                self._flush()
            return pickle.loads(found)
        value = load_fn(key)
        self._buffer[name] = pickle.dumps(value)
        if len(self._buffer) >= self._buffer_size:
            self._flush()
        return value

    def num_keys(self) -> int:
        """Return the number of keys in the store, of all datasets, after what this process still held back was written."""
        self._flush()
        return self.store.num_keys()

    def _flush(self) -> None:
        if self._buffer:
            written, self._buffer = self._buffer, {}
            self._tried(lambda: self.store.mset(written))

    def _tried(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # of whatever kind the store raises
            if not self._has_failed:
                self._has_failed = True
                what = f"the cache failed, and values are made anew: {type(error).__name__}: {error}"
                _log.warning("%s", explain(what, fix="look at the store"))
            return None
