"""Strategies: the table of names (``table``), what each does to a model (``ways``), and the check and choice (``apply``)."""

from .apply import prepare
from .table import DEFAULT, STRATEGIES, Strategy, check_groups, get, register
from .ways import Exchanging, Prepared, Setup

__all__ = [
    "DEFAULT",
    "STRATEGIES",
    "Exchanging",
    "Prepared",
    "Setup",
    "Strategy",
    "check_groups",
    "get",
    "prepare",
    "register",
]
