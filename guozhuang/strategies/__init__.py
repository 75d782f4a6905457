"""Strategies: the table of names (``table``), what each does to a model (``ways``), and the check and choice (``apply``)."""

from .apply import prepare
from .table import DEFAULT, STRATEGIES, Strategy, check_groups, get, register
from .ways import PreparedPair, Setup, WithExchange

__all__ = [
    "DEFAULT",
    "STRATEGIES",
    "PreparedPair",
    "Setup",
    "Strategy",
    "WithExchange",
    "check_groups",
    "get",
    "prepare",
    "register",
]
