"""Sends and receives between two ranks: `PointToPoint`."""

from .service import PointToPoint

__all__ = ["PointToPoint"]
