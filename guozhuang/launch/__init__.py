"""``guozhuang run``: start the ranks of a training script, on this node or on several hosts; ``agent`` is its entry point."""
