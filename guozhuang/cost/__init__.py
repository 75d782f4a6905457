"""Cost models: how long a step takes, what memory it needs, what it costs. Nothing here imports torch or measures."""
