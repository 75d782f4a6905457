"""The command line of ``guozhuang run``: what can be asked for, and whether it can work."""
