"""The command ``guozhuang predict``: measure one process for a minute, predict many."""
