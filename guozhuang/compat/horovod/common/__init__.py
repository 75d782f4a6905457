"""Modules that all frameworks of Horovod share (world, process sets, exceptions), at the same module paths as in Horovod."""
