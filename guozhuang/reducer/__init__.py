"""Autograd hooks to full buckets to exchanges. ``engine`` drives; the other files hold what it knows and what it moves."""

from .engine import Reducer
from .gradients import GradientViews
from .passes import Options

__all__ = ["GradientViews", "Options", "Reducer"]
