"""Sequence parallelism: the tokens of each sequence are divided over ranks, and attention sees all of them."""

from .divide import divide_sequence

__all__ = ["divide_sequence"]
