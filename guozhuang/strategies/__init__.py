"""Strategies: names (``table``), what applies them (``ways``), ``prepare`` (``apply``), what it returns (``prepared``)."""

from .apply import prepare, record_steps
from .prepared import unwrap
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
    "record_steps",
    "register",
    "unwrap",
]
