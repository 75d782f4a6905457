"""What does not depend on the framework: the world, process sets, exceptions. Module for module at Horovod's own paths."""
