"""Random operations of a divided model: they draw what one process would, and each rank takes its part."""

from .divided import divided, divided_by, undivided
from .draws import Draws

__all__ = ["Draws", "divided", "divided_by", "undivided"]
