"""Lossy codes for numbers: the interface in ``base``, then one file per code."""
