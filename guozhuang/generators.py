"""The generators of random numbers that scripts use on the host: PyTorch's, Python's and numpy's. Here they are listed once."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch


def states() -> dict[str, Any]:
    """Return the states of the generators, by name."""
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}


def set_states(states: Mapping[str, Any]) -> None:
    """Set the generators to what :func:`states` returned; those that are left out stay."""
    if "torch" in states:
        torch.set_rng_state(states["torch"].clone())
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        np.random.set_state(states["numpy"])


def check_states(states: Mapping[str, Any]) -> None:
    """Raise unless :func:`set_states` can set these states; new generators take them.

    Raises:
        ValueError, TypeError, RuntimeError: a state is not that of a generator.
    """
    torch.Generator().set_state(states["torch"].clone())
    random.Random().setstate(states["python"])
    np.random.RandomState().set_state(states["numpy"])


@contextlib.contextmanager
def kept(*names: str) -> Iterator[None]:
    """Let what is drawn in this block leave the generators as they were: those of these names, or all."""
    before = {name: state for name, state in states().items() if not names or name in names}
    try:
        yield
    finally:
        set_states(before)


def checksums() -> dict[str, str]:
    """Return for each generator a text that tells whether its state is another one, by the name that errors have for it."""
    found = states()
    kind, keys, *rest = found["numpy"]
    told = {
        "torch": found["torch"].numpy().tobytes(),
        "Python's random": repr(found["python"]).encode(),
        "numpy.random": repr((kind, keys.tobytes(), *rest)).encode(),
    }
    return {name: hashlib.sha256(octets).hexdigest() for name, octets in told.items()}
