"""Strategies: the table of their names (``table``), the functions that apply them (``ways``), and ``prepare`` (``apply``)."""

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
