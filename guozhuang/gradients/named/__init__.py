"""Collectives that ranks submit in any order and that are matched by name: see ``Engine``."""

from .channel import Channel
from .engine import Engine
from .settings import Autotune, Knobs, Settings, Tuner
from .submission import DTYPES, DuplicateNameError, Handle, Kind, NegotiationError, Reduction, Submission

__all__ = [
    "DTYPES",
    "Autotune",
    "Channel",
    "DuplicateNameError",
    "Engine",
    "Handle",
    "Kind",
    "Knobs",
    "NegotiationError",
    "Reduction",
    "Settings",
    "Submission",
    "Tuner",
]
