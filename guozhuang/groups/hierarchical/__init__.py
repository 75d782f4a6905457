"""A process group over several nodes: shared memory inside a node, and every byte crosses the network once per node."""

from guozhuang.groups.hierarchical.process_group import HierarchicalGroup

__all__ = ["HierarchicalGroup"]
