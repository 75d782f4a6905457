"""``guozhuang run``: start the ranks of a training script, on this node or on several hosts."""

from guozhuang.launch.agent import main

__all__ = ["main"]
