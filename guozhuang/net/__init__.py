"""Connections to other processes, with time limits and errors that name the silent one: stores, doors and the roll call."""
