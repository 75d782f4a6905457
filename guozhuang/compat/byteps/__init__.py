"""BytePS's interface for PyTorch, carried out by Guozhuang: ``import byteps.torch`` finds ``guozhuang.compat.byteps.torch``.

It stands on the layer for Horovod scripts (``compat/horovod``), which matches operations by name as BytePS does: one world, one
engine and one table of handles serve both. docs/byteps.md lists the differences.
"""

__version__ = "0.2.5"
