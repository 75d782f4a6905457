"""The version of Horovod whose interface this package implements."""

__version__ = "0.28.1"
