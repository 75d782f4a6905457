"""Strategies: names (``table``), what applies them (``ways``), ``prepare`` (``apply``), what it returns (``prepared``)."""

from .apply import MARK, PreparedAlready, is_prepared, prepare, record_steps
from .prepared import unwrap
from .table import DEFAULT, STRATEGIES, Strategy, check_groups, get, register
from .ways import PreparedPair, Setup, WithExchange

__all__ = [
    "DEFAULT",
    "MARK",
    "STRATEGIES",
    "PreparedAlready",
    "PreparedPair",
    "Setup",
    "Strategy",
    "WithExchange",
    "check_groups",
    "get",
    "is_prepared",
    "prepare",
    "record_steps",
    "register",
    "unwrap",
]
