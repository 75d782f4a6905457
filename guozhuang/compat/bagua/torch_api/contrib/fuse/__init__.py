"""One step for all parameters of a group."""
