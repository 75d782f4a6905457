"""Strategies: names (``table``), what applies them (``ways``), ``prepare`` (``apply``), what it returns (``prepared``)."""

from .apply import MARK, PreparedAlready, check_bucket_cap, is_prepared, prepare, prepare_unseen
from .prepared import unwrap
from .table import DEFAULT, STRATEGIES, Strategy, check_groups, get, register
from .ways import PreparedPair, Setup, WithExchange, device_ids, several, takes_several

__all__ = [
    "DEFAULT",
    "MARK",
    "STRATEGIES",
    "PreparedAlready",
    "PreparedPair",
    "Setup",
    "Strategy",
    "WithExchange",
    "check_bucket_cap",
    "check_groups",
    "device_ids",
    "get",
    "is_prepared",
    "prepare",
    "prepare_unseen",
    "register",
    "several",
    "takes_several",
    "unwrap",
]
