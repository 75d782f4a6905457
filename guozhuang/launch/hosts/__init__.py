"""Runs over several hosts by ssh (``-H``): place ranks on hosts, connect to them, and end all hosts together."""
