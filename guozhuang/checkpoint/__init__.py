"""Checkpoints: everything that a training needs to go on exactly, saved whole or not at all, on any number of ranks."""

from guozhuang.checkpoint.run import epochs, keep, restore, save
from guozhuang.checkpoint.state import TrainingState

__all__ = ["TrainingState", "epochs", "keep", "restore", "save"]
