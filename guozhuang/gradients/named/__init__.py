"""Collectives that ranks submit in any order and that are matched by name: see ``Engine``."""

from .autotune import check_available
from .channel import Channel
from .engine import Engine
from .settings import AutotuneSettings, Knobs, Settings, Tuner
from .submission import DTYPES, DuplicateNameError, Handle, Kind, NegotiationError, Reduction, Submission

__all__ = [
    "DTYPES",
    "AutotuneSettings",
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
    "check_available",
]
