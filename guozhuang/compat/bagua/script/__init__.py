"""The program ``baguarun``."""
