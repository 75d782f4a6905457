"""Connections to other processes, with time limits and errors that name the silent one: to stores and to rank 0."""
