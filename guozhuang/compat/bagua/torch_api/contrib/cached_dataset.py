"""``CachedDataset``: a dataset whose samples are made once, and then come from a store that all ranks share."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from .cache_loader import CacheLoader


class CachedDataset(Dataset[Any]):
    """The samples of another dataset, through a ``CacheLoader``.

    Args:
        dataset: has a length, is indexed, and gives equal samples each time.
        backend: of the cache.
        dataset_name: begins the keys of its samples.
        writer_buffer_size: so many new samples are written at once.
        **kwargs: of ``RedisStore``.

    Attributes:
        cache_loader: the cache.
    """

    def __init__(
        self,
        dataset: Any,
        backend: str = "redis",
        dataset_name: str = "",
        writer_buffer_size: int = 20,
        **kwargs: Any,
    ) -> None:
        self.dataset = dataset
        self.cache_loader = CacheLoader(backend, dataset_name, writer_buffer_size, **kwargs)

    def __getitem__(self, item: Any) -> Any:
        return self.cache_loader.get(item, lambda item: self.dataset[item])

    def __len__(self) -> int:
        return len(self.dataset)
