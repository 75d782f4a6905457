"""Which release of Horovod the interface is that of."""

__version__ = "0.28.1"
