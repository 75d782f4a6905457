"""Random operations of a divided model: they draw what one process would, and each rank takes its part."""

from .divided import divided, divided_by, undivided
from .draws import Draws
from .operations import align

__all__ = ["Draws", "align", "divided", "divided_by", "undivided"]
