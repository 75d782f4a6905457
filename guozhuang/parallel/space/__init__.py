"""Space: one image or volume divided along its height over ranks, so that each holds its share of the activations."""

from .apply import divide_space

__all__ = ["divide_space"]
