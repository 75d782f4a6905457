"""The table of strategies: name -> how to prepare a model and its optimizer (``table``), and the exchanges it is made of."""

from .table import DEFAULT, STRATEGIES, Prepared, Setup, Strategy, check_groups, get, prepare

__all__ = ["DEFAULT", "STRATEGIES", "Prepared", "Setup", "Strategy", "check_groups", "get", "prepare"]
