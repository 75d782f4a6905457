"""Caches of keys and values, which decoders fill for a text that is written on: divided models train without them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


class CacheSettings:
    """The settings of a model's parts that ask for a cache, which its forward would return: an object that all layers change.

    Args:
        model: as Hugging Face's models have it, a module's ``config`` has a ``use_cache``.
    """

    def __init__(self, model: nn.Module) -> None:
        found = (getattr(module, "config", None) for module in model.modules())
        self._asking: dict[int, Any] = {id(each): each for each in found if getattr(each, "use_cache", None) is True}

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Keep keys and values out of the outputs of forwards in this block."""
        self.turn_off()
        try:
            yield
        finally:
            for each in self._asking.values():
                each.use_cache = True

    def turn_off(self) -> None:
        """Keep them out for good."""
        for each in self._asking.values():
            each.use_cache = False
