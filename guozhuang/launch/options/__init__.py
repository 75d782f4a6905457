"""The command line of ``guozhuang run``: its options, their defaults, and the checks that a run with them can work."""
