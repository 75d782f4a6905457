"""Connections to stores and to other processes, with time limits and errors that name the process that does not answer."""
