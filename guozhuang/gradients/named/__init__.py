"""Collectives that ranks submit in any order and that are matched by name: see ``NamedEngine``."""

from .channel import NamedChannel
from .engine import NamedEngine
from .settings import Knobs, Settings, Tuner
from .submission import DTYPES, DuplicateNameError, Handle, Kind, NegotiationError, Reduction, Submission

__all__ = [
    "DTYPES",
    "DuplicateNameError",
    "Handle",
    "Kind",
    "Knobs",
    "NamedChannel",
    "NamedEngine",
    "NegotiationError",
    "Reduction",
    "Settings",
    "Submission",
    "Tuner",
]
