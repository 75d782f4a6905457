"""``guozhuang run``: start the ranks of a training script on this node, by torch elastic."""

from guozhuang.launch.agent import main

__all__ = ["main"]
