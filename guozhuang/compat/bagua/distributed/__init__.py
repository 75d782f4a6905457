"""Launchers under Bagua's names: ``python -m bagua.distributed.launch`` and ``python -m bagua.distributed.run``."""
