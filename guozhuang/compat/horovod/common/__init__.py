"""The parts that do not depend on the framework: world, process sets, exceptions, at the same module paths as in Horovod."""
